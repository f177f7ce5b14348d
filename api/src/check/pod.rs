//! Checks of pods with their claims: which devices a container can use.
//!
//! A CUDA process finds its MPS control daemon by one environment variable and one directory, and
//! shares /dev/shm with it. So a container can use one daemon, and its own volumes must not cover
//! these paths. A claim does not know its containers, so prepare cannot check this. A pod with
//! extended resources has no claims at admission; the scheduler creates them later, and no class
//! for them uses MPS.

use super::claim::{self, DeviceRequest};
use super::mounts::{self, normalize};
use super::published::nearest;
use super::types::{ClusterView, Finding};
use crate::foreign::{self, Dialect, GpuSize, Refusal};
use crate::mps::CONTAINER_PIPE;
use crate::sharing::Mode;
use k8s_openapi::api::core::v1::{Container, Pod, PodResourceClaim, PodSpec};
use k8s_openapi::api::resource::v1::DeviceClaim;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Checks how the pod's containers use its claims.
pub(super) fn check(pod: &Pod, view: &dyn ClusterView) -> Vec<Finding> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let found = spec.resource_claims.iter().flatten().filter_map(|named| {
        let devices = devices(named, namespace, view)?;
        Some((named.name.as_str(), devices))
    });
    let claims: BTreeMap<&str, DeviceClaim> = found.collect();
    let containers = containers(spec);
    let mut findings: Vec<_> = containers
        .iter()
        .flat_map(|(path, container)| of_container(container, path, &claims, view))
        .collect();
    // An unknown claim may turn out to have a share.
    let may_share = |named: &&PodResourceClaim| {
        claims.get(named.name.as_str()).is_none_or(|devices| claim::has_share(devices, view))
    };
    findings.extend(containers.iter().flat_map(|(path, container)| shares_by_class(container, path, view)));
    let shares = spec.resource_claims.iter().flatten().filter(may_share).map(|named| named.name.as_str());
    findings.extend(mounts::check(spec, &containers, &shares.collect()));
    findings.extend(claim_names(spec, &containers, &claims));
    for (path, container) in &containers {
        findings.extend(privileged(container, path, &claims, view));
        findings.extend(several_instances(container, path, &claims, view));
        findings.extend(resource_names(container, path, view));
    }
    findings.extend(other_tools(pod, view));
    findings
}

/// The claims that a container uses, with the request that it names.
fn used(container: &Container) -> impl Iterator<Item = (&str, Option<&str>)> {
    let claims = container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
    claims.map(|claim| (claim.name.as_str(), claim.request.as_deref().filter(|name| !name.is_empty())))
}

/// Claims that a container names and the pod lacks, and claims that no container uses.
fn claim_names(
    spec: &PodSpec,
    containers: &[(String, &Container)],
    claims: &BTreeMap<&str, DeviceClaim>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let declared = || spec.resource_claims.iter().flatten().map(|claim| claim.name.as_str());
    let mut meant = BTreeSet::new();
    for (path, container) in containers {
        for (index, (name, request)) in used(container).enumerate() {
            let path = format!("{path}.resources.claims[{index}]");
            if !declared().any(|declared| declared == name) {
                let remedy = match nearest(name, declared()) {
                    Some(near) => {
                        meant.insert(near);
                        format!("did you mean {near}?")
                    }
                    None => "add it to spec.resourceClaims".to_owned(),
                };
                let message = format!(
                    "container {} names the claim {name}, which the pod does not declare; {remedy}",
                    container.name
                );
                findings.push(Finding::error(format!("{path}.name"), message));
                continue;
            }
            let Some((devices, request)) = claims.get(name).zip(request) else { continue };
            let known = || devices.requests.iter().flatten().map(|request| request.name.as_str());
            if !known().any(|known| known == request) {
                let remedy = match nearest(request, known()) {
                    Some(near) => format!("did you mean {near}?"),
                    None => format!("use {}", known().collect::<Vec<_>>().join(", ")),
                };
                let message = format!("claim {name} has no request {request}; {remedy}");
                findings.push(Finding::error(format!("{path}.request"), message));
            }
        }
    }
    for (index, claim) in spec.resource_claims.iter().flatten().enumerate() {
        let name = claim.name.as_str();
        let remedy = match (&claim.resource_claim_name, &claim.resource_claim_template_name) {
            (None, None) => {
                Some("has neither resourceClaimName nor resourceClaimTemplateName; add one of them")
            }
            (Some(_), Some(_)) => {
                Some("has resourceClaimName and resourceClaimTemplateName; remove one of them")
            }
            _ => None,
        };
        if let Some(remedy) = remedy {
            findings.push(Finding::error(
                format!("spec.resourceClaims[{index}]"),
                format!("claim {name} {remedy}"),
            ));
            continue;
        }
        let is_used = containers.iter().any(|(_, container)| used(container).any(|(used, _)| used == name));
        if !is_used && !meant.contains(name) && !name.is_empty() {
            let message = format!(
                "no container uses the claim {name}, so its devices are allocated for nothing; add it to \
                 resources.claims of a container, or remove it"
            );
            findings.push(Finding::warning(format!("spec.resourceClaims[{index}]"), message));
        }
    }
    findings
}

/// The requests of our devices that a container reaches, with their claims.
fn reached<'a>(
    container: &'a Container,
    claims: &'a BTreeMap<&str, DeviceClaim>,
    view: &dyn ClusterView,
) -> Vec<(&'a str, DeviceRequest<'a>)> {
    let mut found = Vec::new();
    for (name, request) in used(container) {
        let Some(devices) = claims.get(name) else { continue };
        let requests = claim::requested(devices, "", view).into_iter();
        found.extend(
            requests.filter(|one| request.is_none_or(|name| name == one.base)).map(|request| (name, request)),
        );
    }
    found
}

/// A share in a container that sees all devices of the node.
fn privileged(
    container: &Container,
    path: &str,
    claims: &BTreeMap<&str, DeviceClaim>,
    view: &dyn ClusterView,
) -> Option<Finding> {
    let context = container.security_context.as_ref()?;
    if context.privileged != Some(true) {
        return None;
    }
    let reached = reached(container, claims, view);
    let limited = |request: &&(&str, DeviceRequest<'_>)| {
        let (_, request) = request;
        let divided = |mode: &Mode| *mode != Mode::Whole || request.is_share(*mode);
        !request.admin && request.modes.iter().any(divided)
    };
    let (claim, _) = reached.iter().find(limited)?;
    let message = format!(
        "container {} is privileged and sees all GPUs of the node, so the limit of claim {claim} does not \
         hold; remove privileged",
        container.name
    );
    Some(Finding::warning(format!("{path}.securityContext.privileged"), message))
}

/// Several MIG instances in one container.
fn several_instances(
    container: &Container,
    path: &str,
    claims: &BTreeMap<&str, DeviceClaim>,
    view: &dyn ClusterView,
) -> Option<Finding> {
    let reached = reached(container, claims, view);
    let mig = reached.iter().filter(|(_, request)| !request.admin && request.modes == [Mode::Mig].into());
    // Alternatives of one request are one device.
    let bases: BTreeSet<_> = mig.clone().map(|(claim, request)| (*claim, request.base)).collect();
    let many = mig.clone().any(|(_, request)| request.many);
    let message = format!(
        "container {} gets several MIG instances, but a CUDA process sees one MIG device; use one instance \
         in each container, or a larger profile",
        container.name
    );
    (many || bases.len() > 1).then(|| Finding::warning(format!("{path}.resources.claims"), message))
}

/// Extended resources of NVIDIA's device plugin that nothing serves.
fn resource_names(container: &Container, path: &str, view: &dyn ClusterView) -> Vec<Finding> {
    const KNOWN: [&str; 11] = [
        "nvidia.com/gpu",
        "nvidia.com/gpu.shared",
        "nvidia.com/gpumem",
        "nvidia.com/gpumem-percentage",
        "nvidia.com/gpucores",
        "nvidia.com/priority",
        "volcano.sh/vgpu-number",
        "volcano.sh/vgpu-memory",
        "volcano.sh/vgpu-memory-percentage",
        "volcano.sh/vgpu-cores",
        "nvidia.com/mig-1g.10gb",
    ];
    let resources = container.resources.as_ref();
    let limits = || resources.iter().flat_map(|resources| resources.limits.iter().flatten());
    let requests = resources.iter().flat_map(|resources| resources.requests.iter().flatten());
    let mut findings = Vec::new();
    for (name, amount) in requests.filter(|(name, _)| name.starts_with("nvidia.com/")) {
        if !limits().any(|(limited, limit)| limited == name && limit == amount) {
            let message = format!(
                "{name} is an extended resource, which needs an equal limit; set {name}: {} in limits",
                amount.0
            );
            findings.push(Finding::error(format!("{path}.resources.requests[{name}]"), message));
        }
    }
    for (name, _) in limits() {
        let path = format!("{path}.resources.limits[{name}]");
        if let Some(profile) = name.strip_prefix("nvidia.com/mig-") {
            let profile = foreign::mig_profile(profile);
            let write = |near: &str| format!("nvidia.com/mig-{}", near.replace('+', "."));
            findings.extend(Finding::unknown_profile(&profile, &view.profiles(), path, &write));
            continue;
        }
        let similar = ["nvidia.com/gpu", "nvidia.com/mig", "volcano.sh/vgpu", "nvidia.com/share"];
        if KNOWN.contains(&name.as_str()) || !similar.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        if let Some(near) = nearest(name, KNOWN) {
            let message = format!("no device serves the resource {name}; did you mean {near}?");
            findings.push(Finding::warning(path, message));
        }
    }
    findings
}

/// The GPU that a printed claim assumes where the size of the GPUs is unknown.
const EXAMPLE_GPU_BYTES: u64 = 80 << 30;

/// Requests in the forms of other tools.
fn other_tools(pod: &Pod, view: &dyn ClusterView) -> Vec<Finding> {
    let example = GpuSize { memory: EXAMPLE_GPU_BYTES, class: None };
    let with_example = foreign::requests(pod, Some(&example));
    let mut findings = Vec::new();
    for (request, example) in foreign::requests(pod, None).into_iter().zip(with_example) {
        if request.served {
            continue;
        }
        let name = request.resources.first().or(request.annotations.first()).cloned().unwrap_or_default();
        let path = match request.annotations.first() {
            Some(name) => format!("metadata.annotations[{name}]"),
            None => format!("{}.resources.limits[{name}]", request.path),
        };
        let (container, names, dialect) = (&request.container, request.names(), request.dialect);
        let claim = |ported: &foreign::Ported| {
            let name = format!("{}-gpu", container.as_str());
            vec![json!(ported.template(&name)), container_part(container, &name)]
        };
        let is_fraction = dialect == Dialect::DevicePlugin;
        let finding = match (&request.ported, &example.ported) {
            (Ok(ported), _) => {
                let lost = request.notes.iter().map(|note| format!("; {note}")).collect::<String>();
                let message = format!(
                    "container {container} requests {names}, which the device plugin or scheduler of \
                     {dialect} serves, not Divvy; request this claim instead{lost}"
                );
                Finding::warning(path, message).with(claim(ported))
            }
            (Err(Refusal::SizeUnknown { value, .. }), Ok(ported)) if is_fraction => {
                let message = format!(
                    "extended resources are whole numbers, but {name} is {value}; request a share instead, \
                     such as this one of a GPU with 80Gi"
                );
                Finding::error(path, message).with(claim(ported))
            }
            (Err(Refusal::SizeUnknown { value, .. }), Ok(ported)) => {
                let message = format!(
                    "container {container} requests {names} ({value} of a GPU), which {dialect} serves, not \
                     Divvy; request a share instead, such as this one of a GPU with 80Gi"
                );
                Finding::warning(path, message).with(claim(ported))
            }
            (Err(refusal), _) => Finding::error(path, refusal),
        };
        // In a cluster, the other tool may be there and serve the pod.
        let severity = match is_fraction {
            true => finding.severity,
            false => finding.severity.max(view.other_driver()),
        };
        findings.push(Finding { severity, ..finding });
    }
    findings
}

/// The part of a pod that gives a container its claim.
fn container_part(container: &str, template: &str) -> Value {
    json!({"spec": {
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}],
        "containers": [{"name": container, "resources": {"claims": [{"name": "gpu"}]}}],
    }})
}

/// The prefix of the extended resource of a DeviceClass, in the limits of a container.
const CLASS_RESOURCE_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

/// Extended resources of classes that require a share size, which they cannot set.
fn shares_by_class(container: &Container, path: &str, view: &dyn ClusterView) -> Vec<Finding> {
    let limits = container.resources.iter().flat_map(|resources| resources.limits.iter().flatten());
    let part = |name: &&String| {
        name.strip_prefix(CLASS_RESOURCE_PREFIX)
            .and_then(|class| view.class(class))
            .is_some_and(|class| class.needs_share)
    };
    let message = |name: &String| {
        let message = format!(
            "{name} cannot set a share size, but its DeviceClass is for part of a GPU; use a ResourceClaim"
        );
        Finding::error(format!("{path}.resources.limits[{name}]"), message)
    };
    limits.map(|(name, _)| name).filter(part).map(message).collect()
}

fn devices(named: &PodResourceClaim, namespace: &str, view: &dyn ClusterView) -> Option<DeviceClaim> {
    match (&named.resource_claim_name, &named.resource_claim_template_name) {
        (Some(name), _) => view.claim(namespace, name),
        (None, Some(name)) => view.template(namespace, name),
        (None, None) => None,
    }
}

fn containers(spec: &PodSpec) -> Vec<(String, &Container)> {
    let listed = |list: &'static str| move |(index, one)| (format!("spec.{list}[{index}]"), one);
    let init = spec.init_containers.iter().flatten().enumerate().map(listed("initContainers"));
    init.chain(spec.containers.iter().enumerate().map(listed("containers"))).collect()
}

fn of_container(
    container: &Container,
    path: &str,
    claims: &BTreeMap<&str, DeviceClaim>,
    view: &dyn ClusterView,
) -> Vec<Finding> {
    let mut used: BTreeMap<&str, BTreeSet<Option<&str>>> = BTreeMap::new();
    for named in container.resources.iter().flat_map(|resources| resources.claims.iter().flatten()) {
        used.entry(&named.name).or_default().insert(named.request.as_deref().filter(|name| !name.is_empty()));
    }
    // Name, MPS requests (alternatives count as their base request), and whether their devices are
    // on one GPU.
    let of_claim = |(name, devices): (&&str, &DeviceClaim)| {
        let requests = used.get(name)?;
        let reached =
            |request: &DeviceRequest<'_>| requests.contains(&None) || requests.contains(&Some(request.base));
        let requested = claim::requested(devices, "", view);
        let mps: Vec<_> =
            requested.iter().filter(|request| reached(request) && claim::is_mps(devices, request)).collect();
        let requests: BTreeSet<_> = mps.iter().map(|request| request.base.to_owned()).collect();
        let shared = mps.iter().all(|request| request.modes == [Mode::Mps].into());
        let one_gpu = shared && claim::on_one_gpu(devices, &mps);
        (!requests.is_empty()).then(|| ((*name).to_owned(), requests, one_gpu))
    };
    let clients: Vec<_> = claims.iter().filter_map(of_claim).collect();
    let mut findings = Vec::new();
    let at = format!("{path}.resources.claims");
    let container_name = &container.name;
    match clients.as_slice() {
        [] => return findings,
        [(claim, requests, one_gpu)] => {
            if requests.len() > 1 && !one_gpu {
                let requests = requests.iter().cloned().collect::<Vec<_>>().join(" and ");
                findings.push(Finding::error(
                    at,
                    format!(
                        "container {container_name} uses the MPS requests {requests} of claim {claim}, but \
                         a container can use only one MPS control daemon; add the constraint matchAttribute \
                         gpu.divvy.dev/uuid to the claim, or use each request in its own container"
                    ),
                ));
            }
        }
        several => {
            let names = several.iter().map(|(claim, ..)| claim.clone()).collect::<Vec<_>>().join(" and ");
            findings.push(Finding::error(
                at,
                format!(
                    "container {container_name} uses MPS requests of the claims {names}, but a container \
                     can use only one MPS control daemon; use each claim in its own container"
                ),
            ));
        }
    }
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let place = normalize(&mount.mount_path);
        if ["/dev/shm", CONTAINER_PIPE].contains(&place.as_str()) {
            findings.push(Finding::error(
                format!("{path}.volumeMounts[{index}].mountPath"),
                format!(
                    "container {container_name} uses MPS and mounts a volume at {place}, which MPS clients \
                     and their control daemon need; remove the volume"
                ),
            ));
        }
    }
    findings
}
