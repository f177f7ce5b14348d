//! The demo's input: files for `kubectl apply`, reduced to pods and their claims.
//!
//! A workload becomes its pods, and a pod its claims: those that it names, those of its templates,
//! and one for its extended resources, as the scheduler creates it. A template that no pod uses
//! becomes one claim. Kinds without pods and claims are skipped. An annotation marks claims that
//! must be refused.

use crate::documents;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceClass, DeviceRequest, ExactDeviceRequest, ResourceClaim, ResourceClaimSpec,
    ResourceClaimTemplate,
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Annotation of a claim that must be refused, with the value [`REFUSED`].
const EXPECT: &str = "demo.divvy.dev/expect";
const REFUSED: &str = "refused";
/// Prefix of the extended resource that every DeviceClass has.
const CLASS_RESOURCE: &str = "deviceclass.resource.kubernetes.io/";
/// Prefix of resources that must be served: others, such as `cpu`, are not the driver's.
const GPU_RESOURCE: &str = "nvidia.com/";
/// Limit of pods in one file, which a large number of replicas would exceed.
const PODS_MAX: usize = 256;

/// Why a file cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkloadError {
    #[error("{origin}: {cause}")]
    Text { origin: String, cause: String },
    #[error("{object}: {cause}")]
    Object { object: String, cause: serde_json::Error },
    #[error("{origin} has a document without a {field}; every object needs one")]
    NoField { origin: String, field: &'static str },
    #[error("{origin} has more than {PODS_MAX} pods; reduce the replicas")]
    TooManyPods { origin: String },
    #[error("pod {pod} uses the template {template}, which does not exist; add it to the file")]
    NoTemplate { pod: String, template: String },
    #[error("pod {pod} uses the claim {claim}, which does not exist; add it to the file")]
    NoClaim { pod: String, claim: String },
    #[error(
        "pod {pod} requests {resource}, which no DeviceClass serves; the GPUs here serve {}", known.join(", ")
    )]
    NoClass { pod: String, resource: String, known: Vec<String> },
    #[error("pod {pod}: {amount:?} of {resource} is not a whole number of devices")]
    Amount { pod: String, resource: String, amount: String },
}

/// The objects of a file.
#[derive(Debug, Default)]
pub(crate) struct Workloads {
    /// Title for the report.
    pub(crate) title: String,
    pub(crate) classes: Vec<DeviceClass>,
    pub(crate) claims: Vec<ResourceClaim>,
    pub(crate) templates: Vec<ResourceClaimTemplate>,
    pub(crate) pods: Vec<Pod>,
    /// Kinds and names of objects that have neither pods nor claims.
    pub(crate) skipped: Vec<String>,
}

/// Claims that are allocated together: those of a pod, or a single one.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) pod: Option<Pod>,
    pub(crate) claims: Vec<PodClaim>,
    /// It must find no device.
    pub(crate) must_be_refused: bool,
}

/// A claim of a pod.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PodClaim {
    /// It exists, and other pods may use it.
    Named(String),
    /// It is created for the pod and deleted with it.
    Own(Box<ResourceClaim>),
}

/// The objects that a pod may refer to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known<'a> {
    pub(crate) classes: &'a [DeviceClass],
    pub(crate) templates: &'a [ResourceClaimTemplate],
    pub(crate) claims: &'a [ResourceClaim],
}

/// Reads a text of several documents. `origin` is the title, and names the text in errors.
pub(crate) fn parse(text: &str, origin: &str) -> Result<Workloads, WorkloadError> {
    let documents = documents::documents(text)
        .map_err(|cause| WorkloadError::Text { origin: origin.to_owned(), cause })?;
    let mut found = Workloads { title: origin.to_owned(), ..Workloads::default() };
    for document in documents {
        let value = document.value;
        let no_field = |field| WorkloadError::NoField { origin: origin.to_owned(), field };
        let kind = value["kind"].as_str().ok_or_else(|| no_field("kind"))?.to_owned();
        let name = value["metadata"]["name"].as_str().or(value["metadata"]["generateName"].as_str());
        let name = name.ok_or_else(|| no_field("name"))?.to_owned();
        let object = format!("{origin}, {kind} {name}");
        match kind.as_str() {
            "DeviceClass" => found.classes.push(typed(value, &object)?),
            "ResourceClaim" => {
                let mut claim: ResourceClaim = typed(value, &object)?;
                claim.metadata.namespace.get_or_insert_with(|| "default".into());
                claim.status = None;
                found.claims.push(claim);
            }
            "ResourceClaimTemplate" => {
                let mut template: ResourceClaimTemplate = typed(value, &object)?;
                template.metadata.namespace.get_or_insert_with(|| "default".into());
                found.templates.push(template);
            }
            _ => match pods(&kind, &value) {
                Some((template, count)) => {
                    let too_many = || WorkloadError::TooManyPods { origin: origin.to_owned() };
                    let count = count.filter(|count| found.pods.len() + count <= PODS_MAX);
                    let count = count.ok_or_else(too_many)?;
                    for index in 0..count {
                        found.pods.push(pod(&kind, &name, index, &value, template, &object)?);
                    }
                }
                None => found.skipped.push(format!("{kind} {name}")),
            },
        }
    }
    Ok(found)
}

/// The pod template of a workload, and its number of pods. `None` for objects without pods, and for
/// a number of pods that is none.
fn pods<'a>(kind: &str, value: &'a Value) -> Option<(&'a Value, Option<usize>)> {
    let number = |value: &Value| match value {
        Value::Null => Some(1),
        value => value.as_u64().and_then(|count| usize::try_from(count).ok()),
    };
    let spec = &value["spec"];
    Some(match kind {
        "Pod" => (value, Some(1)),
        "Deployment" | "ReplicaSet" | "StatefulSet" | "ReplicationController" => {
            (&spec["template"], number(&spec["replicas"]))
        }
        // The demo has one node.
        "DaemonSet" => (&spec["template"], Some(1)),
        "Job" => (&spec["template"], job_pods(spec, number)),
        "CronJob" => {
            let job = &spec["jobTemplate"]["spec"];
            (&job["template"], job_pods(job, number))
        }
        _ => return None,
    })
}

/// A job runs at most `parallelism` pods at once, and no more than are to complete.
fn job_pods(spec: &Value, number: impl Fn(&Value) -> Option<usize>) -> Option<usize> {
    let parallel = number(&spec["parallelism"])?;
    Some(match &spec["completions"] {
        Value::Null => parallel,
        completions => parallel.min(number(completions)?),
    })
}

fn pod(
    kind: &str,
    name: &str,
    index: usize,
    owner: &Value,
    template: &Value,
    object: &str,
) -> Result<Pod, WorkloadError> {
    let mut value = template.clone();
    value["apiVersion"] = "v1".into();
    value["kind"] = "Pod".into();
    let mut pod: Pod = typed(value, object)?;
    pod.metadata.name = Some(if kind == "Pod" { name.to_owned() } else { format!("{name}-{index}") });
    pod.metadata.generate_name = None;
    let namespace = owner["metadata"]["namespace"].as_str().unwrap_or("default");
    pod.metadata.namespace = Some(namespace.to_owned());
    pod.status = None;
    Ok(pod)
}

fn typed<T: DeserializeOwned>(value: Value, object: &str) -> Result<T, WorkloadError> {
    serde_json::from_value(value).map_err(|cause| WorkloadError::Object { object: object.to_owned(), cause })
}

impl Workloads {
    /// The pods with their claims, then the claims and templates that no pod uses.
    pub(crate) fn units(&self, classes: &[DeviceClass]) -> Result<Vec<Unit>, WorkloadError> {
        let known = Known { classes, templates: &self.templates, claims: &self.claims };
        let mut used = BTreeSet::new();
        let mut units = Vec::new();
        for pod in &self.pods {
            let claims = claims_of(pod, known)?;
            let all = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
            used.extend(all.clone().filter_map(|claim| claim.resource_claim_template_name.clone()));
            used.extend(all.filter_map(|claim| claim.resource_claim_name.clone()));
            let must_be_refused = claims.iter().any(|claim| self.is_refused(claim));
            units.push(Unit { pod: Some(pod.clone()), claims, must_be_refused });
        }
        let is_unused = |name: &Option<String>| name.as_ref().is_some_and(|name| !used.contains(name));
        let claims = self.claims.iter().filter(|claim| is_unused(&claim.metadata.name));
        let named = claims.filter_map(|claim| claim.metadata.name.clone()).map(PodClaim::Named);
        let templates = self.templates.iter().filter(|template| is_unused(&template.metadata.name));
        let own = templates.map(|template| {
            PodClaim::Own(Box::new(instance(template, template.metadata.name.as_deref().unwrap_or_default())))
        });
        let alone = |claim| {
            let must_be_refused = self.is_refused(&claim);
            Unit { pod: None, claims: vec![claim], must_be_refused }
        };
        Ok(named.map(alone).chain(units).chain(own.map(alone)).collect())
    }

    /// Whether a claim has the annotation that it must be refused.
    fn is_refused(&self, claim: &PodClaim) -> bool {
        match claim {
            PodClaim::Own(claim) => must_be_refused(claim),
            PodClaim::Named(name) => {
                let mut claims = self.claims.iter();
                claims.any(|claim| claim.metadata.name.as_ref() == Some(name) && must_be_refused(claim))
            }
        }
    }
}

/// The claims of a pod.
pub(crate) fn claims_of(pod: &Pod, known: Known<'_>) -> Result<Vec<PodClaim>, WorkloadError> {
    let name = pod.metadata.name.clone().unwrap_or_default();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let Some(spec) = &pod.spec else { return Ok(Vec::new()) };
    let mut claims = Vec::new();
    for claim in spec.resource_claims.iter().flatten() {
        if let Some(template) = &claim.resource_claim_template_name {
            let found = known.templates.iter().find(|one| {
                one.metadata.name.as_deref() == Some(template)
                    && one.metadata.namespace.as_deref() == Some(namespace)
            });
            let no_template = || WorkloadError::NoTemplate { pod: name.clone(), template: template.clone() };
            let own = instance(found.ok_or_else(no_template)?, &format!("{name}-{}", claim.name));
            claims.push(PodClaim::Own(Box::new(own)));
        } else if let Some(named) = &claim.resource_claim_name {
            let exists = known.claims.iter().any(|one| {
                one.metadata.name.as_deref() == Some(named)
                    && one.metadata.namespace.as_deref() == Some(namespace)
            });
            if !exists {
                return Err(WorkloadError::NoClaim { pod: name, claim: named.clone() });
            }
            claims.push(PodClaim::Named(named.clone()));
        }
    }
    let requests = extended_requests(&name, spec, known.classes)?;
    if !requests.is_empty() {
        let mut claim = ResourceClaim::default();
        claim.metadata.name = Some(format!("{name}-extended-resources"));
        claim.metadata.namespace = Some(namespace.to_owned());
        let devices = DeviceClaim { requests: Some(requests), ..DeviceClaim::default() };
        claim.spec = Some(ResourceClaimSpec { devices: Some(devices) });
        claims.push(PodClaim::Own(Box::new(claim)));
    }
    Ok(claims)
}

/// A request for each extended resource of each container, as the scheduler makes them.
fn extended_requests(
    pod: &str,
    spec: &PodSpec,
    classes: &[DeviceClass],
) -> Result<Vec<DeviceRequest>, WorkloadError> {
    let mut counts: BTreeMap<(String, String), i64> = BTreeMap::new();
    let init = spec.init_containers.iter().flatten().map(|container| (true, container));
    for (is_init, container) in init.chain(spec.containers.iter().map(|container| (false, container))) {
        let resources = container.resources.as_ref();
        // Limits and requests of an extended resource are equal.
        let limits =
            resources.and_then(|resources| resources.limits.as_ref().or(resources.requests.as_ref()));
        for (resource, amount) in limits.into_iter().flatten() {
            let Some(class) = class_of(resource, classes) else {
                if resource.starts_with(GPU_RESOURCE) {
                    let known = classes.iter().filter_map(resource_of).map(str::to_owned);
                    let (pod, resource) = (pod.to_owned(), resource.clone());
                    return Err(WorkloadError::NoClass { pod, resource, known: known.collect() });
                }
                continue;
            };
            let wrong = || WorkloadError::Amount {
                pod: pod.to_owned(),
                resource: resource.clone(),
                amount: amount.0.clone(),
            };
            let count = amount.0.parse::<i64>().map_err(|_| wrong())?;
            let sum = counts.entry((resource.clone(), class)).or_default();
            // Init containers run before the others and leave their devices to them.
            *sum = if is_init { count.max(*sum) } else { sum.saturating_add(count) };
        }
    }
    let requests = counts.into_iter().filter(|(_, count)| *count > 0).enumerate();
    let request = |(index, ((_, class), count))| DeviceRequest {
        name: format!("request-{index}"),
        exactly: Some(ExactDeviceRequest {
            device_class_name: class,
            allocation_mode: Some("ExactCount".to_owned()),
            count: Some(count),
            ..ExactDeviceRequest::default()
        }),
        ..DeviceRequest::default()
    };
    Ok(requests.map(request).collect())
}

/// The class that serves a resource.
fn class_of(resource: &str, classes: &[DeviceClass]) -> Option<String> {
    let names = |class: &&DeviceClass| {
        let name = resource.strip_prefix(CLASS_RESOURCE);
        resource_of(class) == Some(resource) || (name.is_some() && class.metadata.name.as_deref() == name)
    };
    classes.iter().find(names)?.metadata.name.clone()
}

fn resource_of(class: &DeviceClass) -> Option<&str> {
    class.spec.as_ref()?.extended_resource_name.as_deref()
}

fn instance(template: &ResourceClaimTemplate, name: &str) -> ResourceClaim {
    let mut claim =
        ResourceClaim { spec: template.spec.clone().and_then(|spec| spec.spec), ..ResourceClaim::default() };
    claim.metadata.name = Some(name.to_owned());
    claim.metadata.namespace = template.metadata.namespace.clone();
    claim
}

/// Whether the claim must be refused.
fn must_be_refused(claim: &ResourceClaim) -> bool {
    let expected = claim.metadata.annotations.as_ref().and_then(|all| all.get(EXPECT));
    expected.is_some_and(|expected| expected == REFUSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPLATE: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: slice}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: mig.divvy.dev}}]}}}
---
";

    fn classes() -> Vec<DeviceClass> {
        let class = "
kind: DeviceClass
metadata: {name: gpu.divvy.dev}
spec: {extendedResourceName: nvidia.com/gpu}
";
        parse(class, "classes").expect("parses").classes
    }

    /// The units of a text: `pod: claims`, or `claims` without a pod.
    fn units(text: &str) -> Result<Vec<String>, String> {
        let found = parse(text, "test").map_err(|error| error.to_string())?;
        let units = found.units(&classes()).map_err(|error| error.to_string())?;
        let line = |unit: &Unit| {
            let name = |claim: &PodClaim| match claim {
                PodClaim::Named(name) => format!("={name}"),
                PodClaim::Own(claim) => claim.metadata.name.clone().unwrap_or_default(),
            };
            let claims = unit.claims.iter().map(name).collect::<Vec<_>>().join(" ");
            match &unit.pod {
                Some(pod) => format!("{}: {claims}", pod.metadata.name.clone().unwrap_or_default()),
                None => claims,
            }
        };
        Ok(units.iter().map(line).collect())
    }

    fn check(text: &str, expected: Result<&[&str], &str>) {
        match (units(text), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{text}"),
            (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
            (found, expected) => panic!("{found:?} instead of {expected:?} for {text}"),
        }
    }

    fn workload(kind: &str, spec: &str) -> String {
        let pod = "spec: {containers: [], resourceClaims: [{name: g, resourceClaimTemplateName: slice}]}";
        format!("{TEMPLATE}kind: {kind}\nmetadata: {{name: w}}\nspec: {{{spec}, template: {{{pod}}}}}\n")
    }

    fn with_resource(resource: &str) -> String {
        format!(
            "kind: Pod
metadata: {{name: p}}
spec: {{containers: [{{name: c, resources: {{limits: {{{resource}, cpu: 100m}}}}}}]}}
"
        )
    }

    #[test]
    fn unused_templates_become_claims() {
        check(TEMPLATE, Ok(&["slice"]));
    }

    #[test]
    fn workloads_become_pods_with_claims() {
        check(&workload("Deployment", "replicas: 2"), Ok(&["w-0: w-0-g", "w-1: w-1-g"]));
        check(&workload("ReplicaSet", "selector: {}"), Ok(&["w-0: w-0-g"]));
        check(&workload("StatefulSet", "replicas: 1"), Ok(&["w-0: w-0-g"]));
        check(&workload("DaemonSet", "selector: {}"), Ok(&["w-0: w-0-g"]));
        check(&workload("Job", "parallelism: 3, completions: 2"), Ok(&["w-0: w-0-g", "w-1: w-1-g"]));
        check(&workload("Deployment", "replicas: 0"), Ok(&["slice"]));
        check(&workload("Deployment", "replicas: 1000000"), Err("reduce the replicas"));
        check(&workload("Deployment", "replicas: -1"), Err("reduce the replicas"));
    }

    #[test]
    fn pods_share_a_named_claim() {
        let claim = "kind: ResourceClaim\nmetadata: {name: one}\nspec: {devices: {requests: []}}\n---\n";
        let pod = "kind: Pod
metadata: {name: NAME}
spec: {containers: [], resourceClaims: [{name: g, resourceClaimName: one}]}
---
";
        let pods = pod.replace("NAME", "a") + &pod.replace("NAME", "b");
        check(&format!("{claim}{pods}"), Ok(&["a: =one", "b: =one"]));
        check(claim, Ok(&["=one"]));
        check(pod, Err("uses the claim one, which does not exist"));
    }

    #[test]
    fn extended_resources_become_a_claim() {
        check(&with_resource("nvidia.com/gpu: 2"), Ok(&["p: p-extended-resources"]));
        let class = "deviceclass.resource.kubernetes.io/gpu.divvy.dev: \"1\"";
        check(&with_resource(class), Ok(&["p: p-extended-resources"]));
        check(&with_resource("example.com/nic: 1"), Ok(&["p: "]));
        check(&with_resource("nvidia.com/gpumem: 1"), Err("the GPUs here serve nvidia.com/gpu"));
        check(&with_resource("nvidia.com/gpu: 500m"), Err("not a whole number"));
    }

    #[test]
    fn other_kinds_are_skipped() {
        let found = parse("kind: Service\nmetadata: {name: s}\n", "test").expect("parses");
        assert_eq!(found.skipped, ["Service s"]);
        check("kind: Pod\nmetadata: {}\n", Err("a document without a name"));
        check("metadata: {name: x}\n", Err("a document without a kind"));
    }
}
