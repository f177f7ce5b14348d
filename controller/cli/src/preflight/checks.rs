//! The checks: what was found, whether Divvy works with it, and the remedy. Pure.

use super::facts::{Facts, NodeFacts};
use divvy_slices::scheduler_bugs::unsafe_counters;
use divvy_slices::{SchedulerOptions, Support};
use serde::Serialize;
use std::collections::BTreeSet;

/// The first version with `resource.k8s.io/v1` and all features that Divvy uses.
const KUBERNETES_MIN: (u32, u32) = (1, 36);
const DRA_API: &str = "resource.k8s.io/v1";
/// The features of partitions and shares, and what is missing without each.
const FEATURES: [(&str, &str); 2] = [
    ("DRAPartitionableDevices", "only whole GPUs and existing MIG instances are published"),
    ("DRAConsumableCapacity", "shares, time-slices and MPS are not published"),
];
/// Labels by which the chart selects nodes, with their meaning.
pub(super) const NODE_LABELS: [(&str, &str); 5] = [
    ("feature.node.kubernetes.io/pci-0302_10de.present", "true"),
    ("feature.node.kubernetes.io/pci-0300_10de.present", "true"),
    ("feature.node.kubernetes.io/pci-10de.present", "true"),
    ("feature.node.kubernetes.io/cpu-model.vendor_id", "NVIDIA"),
    ("nvidia.com/gpu.present", "true"),
];
/// Labels by which cloud providers mark GPU nodes, and the chart does not select.
pub(super) const CLOUD_LABELS: [&str; 4] = [
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "eks.amazonaws.com/instance-gpu-name",
    "kubernetes.azure.com/accelerator",
];
/// Other owners of GPUs: part of an image's name, the product, and how to stop it.
const OWNERS: [(&str, &str, &str); 9] = [
    (
        "k8s-device-plugin",
        "NVIDIA's device plugin",
        "GPU operator: devicePlugin.enabled=false; else delete it",
    ),
    ("nvidia-gpu-device-plugin", "the device plugin of the cloud provider", "see the provider's guide"),
    ("k8s-dra-driver-gpu", "NVIDIA's DRA driver", "helm uninstall it after its claims have ended"),
    ("dra-driver-nvidia-gpu", "NVIDIA's DRA driver", "helm uninstall it after its claims have ended"),
    ("k8s-mig-manager", "NVIDIA's MIG manager", "GPU operator: migManager.enabled=false"),
    ("projecthami/", "HAMi", "helm uninstall hami; foreignRequests.enabled=true serves its pods"),
    ("volcano-vgpu-device-plugin", "Volcano's device plugin", "delete its DaemonSet"),
    ("kai-scheduler/", "KAI", "exclude GPU nodes from it; foreignRequests.enabled=true serves its pods"),
    ("run-ai-docker/", "Run:ai", "uninstall it from these nodes"),
];
/// These owners only schedule; they conflict with Divvy when a pod uses their requests.
const SCHEDULERS_ONLY: [&str; 1] = ["KAI"];

/// A line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    pub(super) name: &'static str,
    pub(super) outcome: Outcome,
    pub(super) found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
}

/// Whether Divvy works with what was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    Pass,
    /// It works with a restriction, or the check could not see all.
    Warn,
    Fail,
}

fn pass(name: &'static str, found: impl Into<String>) -> Check {
    Check { name, outcome: Outcome::Pass, found: found.into(), remedy: None }
}

fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
    Check { name, outcome: Outcome::Warn, found: found.into(), remedy: Some(remedy.into()) }
}

fn fail(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
    Check { outcome: Outcome::Fail, ..warn(name, found, remedy) }
}

/// All checks. `driver_root` is that of the command line.
pub(super) fn all(facts: &Facts, driver_root: Option<&str>) -> Vec<Check> {
    let mut checks = vec![kubernetes(facts), dra_api(facts)];
    checks.extend(features(facts));
    checks.extend([
        nodes(facts),
        architecture(facts),
        cdi(facts),
        driver(facts, driver_root),
        owners(facts),
        device_plugin(facts),
        pod_security(facts),
        quota(facts),
    ]);
    checks.extend(openshift(facts));
    checks
}

fn kubernetes(facts: &Facts) -> Check {
    let name = "Kubernetes";
    let number = |part: Option<&str>| {
        let digits: String = part?.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    };
    let mut parts = facts.version.trim_start_matches('v').split('.');
    let (Some(major), Some(minor)) = (number(parts.next()), number(parts.next())) else {
        return warn(
            name,
            format!("version {:?}", facts.version),
            "Divvy needs 1.36 or newer; check the version",
        );
    };
    if (major, minor) < KUBERNETES_MIN {
        return fail(name, facts.version.clone(), "upgrade to Kubernetes 1.36.2 or newer");
    }
    match unsafe_counters(&SchedulerOptions::default(), &facts.version, Support::default()) {
        Some(bugs) => warn(name, facts.version.clone(), bugs),
        None => pass(name, facts.version.clone()),
    }
}

fn dra_api(facts: &Facts) -> Check {
    let name = "DRA API";
    if facts.apis.contains(DRA_API) {
        return pass(name, format!("{DRA_API} is served"));
    }
    let remedy = "start the API server without --runtime-config=resource.k8s.io/v1=false, and with the \
                  feature gate DynamicResourceAllocation";
    fail(name, format!("{DRA_API} is not served"), remedy)
}

fn features(facts: &Facts) -> Vec<Check> {
    let name = "DRA features";
    let Some(gates) = &facts.features else {
        let remedy = "they are on by default in 1.36; after the installation the condition of the node's \
                      pool names one that is off";
        return vec![warn(name, "the metrics of the API server cannot be read", remedy)];
    };
    let off = FEATURES.iter().filter(|(gate, _)| gates.get(*gate) == Some(&false));
    let off: Vec<Check> = off
        .map(|(gate, effect)| {
            let remedy = format!("set --feature-gates={gate}=true on all components; until then {effect}");
            warn(name, format!("{gate} is off"), remedy)
        })
        .collect();
    match off.is_empty() {
        true => vec![pass(name, FEATURES.map(|(gate, _)| gate).join(", "))],
        false => off,
    }
}

/// Whether the chart selects a node.
fn is_selected(node: &NodeFacts) -> bool {
    NODE_LABELS.iter().any(|(key, value)| node.labels.get(*key).is_some_and(|found| found == value))
}

/// Whether a node has GPUs by other evidence.
fn has_gpus(node: &NodeFacts) -> bool {
    is_selected(node)
        || !node.gpus.is_empty()
        || CLOUD_LABELS.iter().any(|key| node.labels.contains_key(*key))
}

/// The nodes that seem to have GPUs.
fn gpu_nodes(facts: &Facts) -> impl Iterator<Item = &NodeFacts> {
    facts.nodes.iter().filter(|node| has_gpus(node))
}

/// At most three names, and the number of the others.
fn some<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    let shown = names.iter().take(3).copied().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(3) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn nodes(facts: &Facts) -> Check {
    let name = "GPU nodes";
    let all = facts.nodes.len();
    let selected = facts.nodes.iter().filter(|node| is_selected(node)).count();
    let missed: Vec<&str> =
        gpu_nodes(facts).filter(|node| !is_selected(node)).map(|node| node.name.as_str()).collect();
    if !missed.is_empty() {
        let remedy = format!(
            "kubectl label node {} nvidia.com/gpu.present=true, or install with the values of --values",
            missed[0]
        );
        let missed = some(missed);
        return fail(name, format!("the chart does not select {missed}, which have GPUs"), remedy);
    }
    if selected == 0 {
        let remedy = "install Node Feature Discovery, or kubectl label node NODE nvidia.com/gpu.present=true";
        return fail(name, format!("none of {all} nodes has a label of a GPU"), remedy);
    }
    let by: BTreeSet<&str> = NODE_LABELS
        .iter()
        .map(|(key, _)| *key)
        .filter(|key| facts.nodes.iter().any(|node| node.labels.contains_key(*key)))
        .collect();
    pass(name, format!("{selected} of {all} nodes, by {}", by.into_iter().collect::<Vec<_>>().join(", ")))
}

fn architecture(facts: &Facts) -> Check {
    let name = "Architecture";
    let other = gpu_nodes(facts).filter(|node| !["", "amd64"].contains(&node.architecture.as_str()));
    let other: Vec<&str> = other.map(|node| node.name.as_str()).collect();
    match other.is_empty() {
        true => pass(name, "amd64"),
        false => warn(name, format!("{} is not amd64", some(other)), "Divvy leaves these nodes out"),
    }
}

/// How a runtime treats CDI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Cdi {
    On,
    /// It must be turned on in a file that is not visible from outside of the node.
    Configured,
    Unknown,
    Never,
}

fn cdi_of(runtime: &str) -> Cdi {
    let Some((product, version)) = runtime.split_once("://") else { return Cdi::Unknown };
    let mut parts = version.trim_start_matches('v').split('.').map(|part| part.parse::<u32>().ok());
    let (Some(Some(major)), Some(Some(minor))) = (parts.next(), parts.next()) else { return Cdi::Unknown };
    match (product, major, minor) {
        ("containerd", 2.., _) => Cdi::On,
        ("containerd", 1, 7..) => Cdi::Configured,
        ("cri-o", 1, 23..) | ("cri-o", 2.., _) => Cdi::On,
        ("containerd" | "cri-o" | "docker", ..) => Cdi::Never,
        _ => Cdi::Unknown,
    }
}

fn cdi(facts: &Facts) -> Check {
    let name = "CDI";
    let nodes = || gpu_nodes(facts);
    let worst = nodes().map(|node| cdi_of(&node.runtime)).max();
    let of = |state: Cdi| {
        let nodes = nodes().filter(|node| cdi_of(&node.runtime) == state);
        let nodes: Vec<_> = nodes.map(|node| (node.name.as_str(), node.runtime.as_str())).collect();
        let runtimes: BTreeSet<&str> = nodes.iter().map(|(_, runtime)| *runtime).collect();
        let runtimes = some(runtimes);
        format!("{runtimes} on {}", some(nodes.into_iter().map(|(name, _)| name)))
    };
    match worst {
        None => warn(name, "no GPU node to look at", "label the GPU nodes first"),
        Some(Cdi::On) => {
            let runtimes: BTreeSet<&str> = nodes().map(|node| node.runtime.as_str()).collect();
            pass(name, format!("on by default in {}", some(runtimes)))
        }
        Some(Cdi::Configured) => {
            let remedy = "in /etc/containerd/config.toml of these nodes, set enable_cdi = true and \
                          cdi_spec_dirs = [\"/etc/cdi\", \"/var/run/cdi\"]\n\
                          under [plugins.\"io.containerd.grpc.v1.cri\"], and restart containerd";
            warn(name, format!("off by default in {}", of(Cdi::Configured)), remedy)
        }
        Some(Cdi::Unknown) => {
            let remedy = "make sure that the runtime reads CDI files in /var/run/cdi";
            warn(name, format!("unknown for {}", of(Cdi::Unknown)), remedy)
        }
        Some(Cdi::Never) => {
            let remedy = "upgrade to containerd 1.7 or CRI-O 1.23 or newer";
            fail(name, format!("not supported by {}", of(Cdi::Never)), remedy)
        }
    }
}

/// The root of the GPU driver, and how it was derived.
pub(super) fn driver_root(facts: &Facts, given: Option<&str>) -> String {
    derived_driver_root(facts, given).0
}

fn derived_driver_root(facts: &Facts, given: Option<&str>) -> (String, &'static str) {
    let runs = |image: &str| {
        let images = facts.workloads.iter().flatten().flat_map(|workload| &workload.images);
        images.into_iter().any(|found| found.contains(image))
    };
    match given {
        Some(root) => (root.to_owned(), "as given"),
        None if runs("nvcr.io/nvidia/driver") || runs("nvidia-driver-daemonset") => {
            ("/run/nvidia/driver".to_owned(), "the GPU operator installs the driver in a container")
        }
        None if is_gke(facts) => ("/home/kubernetes/bin/nvidia".to_owned(), "the path of GKE"),
        None => ("/".to_owned(), "no driver container runs, so it is expected on the hosts"),
    }
}

fn driver(facts: &Facts, given: Option<&str>) -> Check {
    let name = "GPU driver";
    let (root, why) = derived_driver_root(facts, given);
    match root.starts_with('/') {
        true => pass(name, format!("nvidiaDriverRoot={root}: {why}")),
        false => fail(name, format!("nvidiaDriverRoot={root} is not absolute"), "give a path such as /"),
    }
}

fn owners(facts: &Facts) -> Check {
    let name = "Other owners";
    let Some(workloads) = &facts.workloads else {
        let remedy = "run it as a user that may list DaemonSets and Deployments";
        return warn(name, "the workloads of the cluster cannot be read", remedy);
    };
    let mut found: Vec<(&str, &str, &str)> = Vec::new();
    for (image, product, remedy) in OWNERS {
        let runs = workloads.iter().find(|workload| workload.images.iter().any(|one| one.contains(image)));
        if let Some(workload) = runs.filter(|_| !found.iter().any(|(_, known, _)| *known == product)) {
            found.push((&workload.name, product, remedy));
        }
    }
    let drivers = facts.drivers.iter().flatten();
    let foreign: Vec<&str> =
        drivers.map(String::as_str).filter(|driver| *driver != "gpu.divvy.dev").collect();
    if found.is_empty() && foreign.is_empty() {
        return pass(name, "no other component hands out GPUs");
    }
    let names = found.iter().map(|(workload, product, _)| format!("{product} ({workload})"));
    let names = names.chain(foreign.iter().map(|driver| format!("DRA driver {driver}")));
    let text = names.collect::<Vec<_>>().join(", ");
    let remedies: Vec<String> =
        found.iter().map(|(_, product, remedy)| format!("{product}: {remedy}")).collect();
    let mut remedy = remedies.join("\n");
    if remedy.is_empty() {
        remedy = "uninstall that driver after its claims have ended".to_owned();
    }
    match foreign.is_empty() && found.iter().all(|(_, product, _)| SCHEDULERS_ONLY.contains(product)) {
        true => warn(name, text, remedy),
        false => fail(name, text, remedy),
    }
}

fn device_plugin(facts: &Facts) -> Check {
    let name = "Extended resources";
    let serving: Vec<&NodeFacts> = facts.nodes.iter().filter(|node| !node.gpus.is_empty()).collect();
    let Some(first) = serving.first() else {
        return pass(name, "no device plugin serves nvidia.com/gpu");
    };
    let amounts = first.gpus.iter().map(|(name, amount)| format!("{name}={amount}"));
    let found = format!(
        "a device plugin serves {} ({})",
        some(serving.iter().map(|node| node.name.as_str())),
        amounts.collect::<Vec<_>>().join(", ")
    );
    let remedy = "stop it: Divvy taints the GPUs of these nodes while a plugin serves them; pods with \
                  nvidia.com/gpu run unchanged on Divvy";
    fail(name, found, remedy)
}

fn pod_security(facts: &Facts) -> Check {
    let name = "Pod Security";
    let namespace = &facts.namespace;
    let Some(labels) = &facts.namespace_labels else {
        return pass(name, format!("namespace {namespace} does not exist yet, and sets no level"));
    };
    let level = |mode: &str| labels.get(&format!("pod-security.kubernetes.io/{mode}")).map(String::as_str);
    match level("enforce") {
        None | Some("privileged") => pass(name, format!("namespace {namespace} admits privileged pods")),
        Some(level) => {
            let remedy = format!(
                "kubectl label --overwrite namespace {namespace} \
                 pod-security.kubernetes.io/enforce=privileged"
            );
            fail(name, format!("namespace {namespace} enforces {level}"), remedy)
        }
    }
}

pub(super) fn is_gke(facts: &Facts) -> bool {
    facts.version.contains("-gke.")
        || facts
            .nodes
            .iter()
            .any(|node| node.labels.keys().any(|key| key.starts_with("cloud.google.com/gke-")))
}

fn quota(facts: &Facts) -> Check {
    let name = "Quota";
    let namespace = &facts.namespace;
    if let Some(first) = facts.quotas.first().filter(|name| !name.starts_with("divvy")) {
        let remedy = format!(
            "make sure that it admits two pods with system-node-critical on each GPU node: \
             kubectl -n {namespace} describe quota {first}"
        );
        return warn(
            name,
            format!("namespace {namespace} has {}", some(facts.quotas.iter().map(String::as_str))),
            remedy,
        );
    }
    match is_gke(facts) && namespace != "kube-system" {
        true => pass(name, "GKE admits system-node-critical only with a quota, which the chart installs"),
        false => pass(name, format!("no other quota in namespace {namespace}")),
    }
}

pub(super) fn is_openshift(facts: &Facts) -> bool {
    facts.apis.iter().any(|api| api.starts_with("security.openshift.io/"))
}

fn openshift(facts: &Facts) -> Option<Check> {
    is_openshift(facts).then(|| {
        let found = "the chart allows its ServiceAccounts the SecurityContextConstraints privileged and \
                     nonroot-v2, which the installing user must be able to grant";
        pass("OpenShift", found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::facts::Workload;

    /// A cluster that passes every check.
    fn facts() -> Facts {
        Facts {
            version: "v1.37.0".to_owned(),
            apis: [DRA_API.to_owned()].into(),
            features: Some(FEATURES.map(|(gate, _)| (gate.to_owned(), true)).into()),
            nodes: vec![NodeFacts {
                name: "n1".to_owned(),
                labels: labels(&[("nvidia.com/gpu.present", "true")]),
                runtime: "containerd://2.1.4".to_owned(),
                architecture: "amd64".to_owned(),
                gpus: [].into(),
            }],
            workloads: Some(Vec::new()),
            drivers: Some([].into()),
            namespace: "divvy".to_owned(),
            namespace_labels: None,
            quotas: Vec::new(),
        }
    }

    fn labels(pairs: &[(&str, &str)]) -> std::collections::BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    /// Changes the facts; the check of that name must have that outcome and say these words, and
    /// no other check may change.
    fn check(change: impl FnOnce(&mut Facts), name: &str, outcome: Outcome, words: &str) {
        let mut facts = facts();
        change(&mut facts);
        for check in all(&facts, None) {
            let text = format!("{} {}", check.found, check.remedy.clone().unwrap_or_default());
            if check.name == name {
                assert_eq!(check.outcome, outcome, "{text}");
                assert!(text.contains(words), "{text}");
                assert_eq!(check.remedy.is_none(), outcome == Outcome::Pass, "{text}");
            } else {
                assert_eq!(check.outcome, Outcome::Pass, "{}: {text}", check.name);
            }
        }
        assert!(all(&facts, None).iter().any(|check| check.name == name), "no check {name}");
    }

    #[test]
    fn suitable_cluster_passes_every_check() {
        assert!(all(&facts(), None).iter().all(|check| check.outcome == Outcome::Pass));
    }

    #[test]
    fn versions_and_features_are_checked() {
        use Outcome::{Fail, Pass, Warn};
        let version = |version: &'static str| move |facts: &mut Facts| facts.version = version.to_owned();
        check(version("v1.35.2"), "Kubernetes", Fail, "1.36");
        check(version("v1.36.1"), "Kubernetes", Warn, "kubernetes#139034");
        check(version("v1.36.4-eks-1"), "Kubernetes", Pass, "v1.36.4");
        check(version("v1.38.0"), "Kubernetes", Pass, "");
        check(version("new"), "Kubernetes", Warn, "new");
        check(|facts| facts.apis.clear(), "DRA API", Fail, "is not served");
        check(|facts| facts.features = None, "DRA features", Warn, "metrics");
        let off = |facts: &mut Facts| {
            facts.features.as_mut().unwrap().insert("DRAConsumableCapacity".to_owned(), false);
        };
        check(off, "DRA features", Warn, "shares, time-slices and MPS are not published");
    }

    #[test]
    fn nodes_are_found_by_any_label() {
        use Outcome::{Fail, Pass};
        let label = |key: &'static str, value: &'static str| {
            move |facts: &mut Facts| facts.nodes[0].labels = labels(&[(key, value)])
        };
        for (key, value) in NODE_LABELS {
            check(label(key, value), "GPU nodes", Pass, key);
        }
        check(
            label("cloud.google.com/gke-accelerator", "nvidia-l4"),
            "GPU nodes",
            Fail,
            "kubectl label node n1",
        );
        let mut bare = facts();
        bare.nodes[0].labels.clear();
        assert_eq!(nodes(&bare).outcome, Fail);
        assert_eq!(cdi(&bare).outcome, Outcome::Warn);
        let arm = |facts: &mut Facts| facts.nodes[0].architecture = "arm64".to_owned();
        check(arm, "Architecture", Outcome::Warn, "n1");
    }

    #[test]
    fn runtime_must_support_cdi() {
        use Outcome::{Fail, Pass, Warn};
        for (runtime, outcome, words) in [
            ("containerd://2.0.0", Pass, "containerd://2.0.0"),
            ("containerd://1.7.28", Warn, "enable_cdi = true"),
            ("containerd://1.6.9", Fail, "upgrade"),
            ("cri-o://1.36.0", Pass, "cri-o"),
            ("docker://28.1.0", Fail, "not supported"),
            ("other://1", Warn, "unknown"),
        ] {
            check(|facts| facts.nodes[0].runtime = runtime.to_owned(), "CDI", outcome, words);
        }
    }

    #[test]
    fn other_owners_are_named_with_their_remedy() {
        use Outcome::{Fail, Warn};
        let runs = |image: &'static str| {
            move |facts: &mut Facts| {
                let workload = Workload { name: "ns/plugin".to_owned(), images: vec![image.to_owned()] };
                facts.workloads = Some(vec![workload]);
            }
        };
        check(
            runs("nvcr.io/nvidia/k8s-device-plugin:v0.18"),
            "Other owners",
            Fail,
            "devicePlugin.enabled=false",
        );
        check(runs("docker.io/projecthami/hami:v2.7"), "Other owners", Fail, "HAMi (ns/plugin)");
        check(runs("ghcr.io/nvidia/kai-scheduler/scheduler:v0.9"), "Other owners", Warn, "foreignRequests");
        check(|facts| facts.workloads = None, "Other owners", Warn, "cannot be read");
        let driver = |facts: &mut Facts| facts.drivers = Some(["gpu.nvidia.com".to_owned()].into());
        check(driver, "Other owners", Fail, "gpu.nvidia.com");
        let plugin = |facts: &mut Facts| facts.nodes[0].gpus = labels(&[("nvidia.com/gpu", "8")]);
        check(plugin, "Extended resources", Fail, "nvidia.com/gpu=8");
    }

    #[test]
    fn namespace_must_admit_privileged_pods() {
        use Outcome::{Fail, Pass, Warn};
        let level = |level: &'static str| {
            move |facts: &mut Facts| {
                facts.namespace_labels = Some(labels(&[("pod-security.kubernetes.io/enforce", level)]));
            }
        };
        check(level("privileged"), "Pod Security", Pass, "admits");
        check(level("baseline"), "Pod Security", Fail, "enforce=privileged");
        check(|facts| facts.namespace_labels = Some([].into()), "Pod Security", Pass, "admits");
        check(|facts| facts.quotas = vec!["team".to_owned()], "Quota", Warn, "describe quota team");
        check(|facts| facts.version = "v1.37.0-gke.1".to_owned(), "Quota", Pass, "GKE");
        let openshift = |facts: &mut Facts| facts.apis.extend(["security.openshift.io/v1".to_owned()]);
        check(openshift, "OpenShift", Pass, "SecurityContextConstraints");
    }

    #[test]
    fn driver_root_is_derived_from_the_cluster() {
        let check = |change: &dyn Fn(&mut Facts), given: Option<&str>, expected: &str| {
            let mut facts = facts();
            change(&mut facts);
            assert_eq!(driver_root(&facts, given), expected);
        };
        let operator = |facts: &mut Facts| {
            let images = vec!["nvcr.io/nvidia/driver:580".to_owned()];
            facts.workloads = Some(vec![Workload { images, ..Workload::default() }]);
        };
        check(&|_| {}, None, "/");
        check(&operator, None, "/run/nvidia/driver");
        check(&operator, Some("/opt"), "/opt");
        check(&|facts| facts.version += "-gke.1", None, "/home/kubernetes/bin/nvidia");
        assert_eq!(driver(&facts(), Some("opt")).outcome, Outcome::Fail);
    }
}
