//! From a pod with requests of HAMi or KAI to a JSON patch with claims of Divvy. Pure.
//!
//! The patch names ResourceClaimTemplates by hashes of the requests and records the requests in an
//! annotation; see [`crate::templates`]. A second review of a patched pod changes nothing, because
//! the foreign requests are gone.

use super::wire::Verdict;
use crate::args::ForeignArgs;
use crate::templates::{PORTED_LABEL, REQUESTS_ANNOTATION, Record, template_name};
use divvy_api::Quantity;
use divvy_api::foreign::{
    ContainerRequest, Dialect, GpuSize, Ported, Refusal, SCHEDULERS, requests, rewrite,
};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

const DEFAULT_SCHEDULER: &str = "default-scheduler";
/// The class of shares of every GPU. Where the pod names a model with a class, that class replaces it.
const SHARE_CLASS: &str = "share.divvy.dev";
/// The names of the GPU model in a pod: an annotation of HAMi, and a label of GPU feature discovery.
const MODEL_ANNOTATION: &str = "nvidia.com/use-gputype";
const MODEL_LABEL: &str = "nvidia.com/gpu.product";

/// How requests of other GPU schedulers are served.
#[derive(Clone, Debug, Default)]
pub struct ForeignRequests {
    enabled: bool,
    /// Of every GPU.
    gpu_memory: Option<u64>,
    models: Vec<GpuModel>,
}

/// A GPU model whose size is known.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GpuModel {
    /// Part of the product name, in lower case.
    name: String,
    size: GpuSize,
}

/// Why the settings of foreign requests are invalid.
#[derive(Debug, thiserror::Error)]
pub enum ForeignSettingsError {
    #[error("--foreign-gpu-memory: {value:?} is not an amount of memory; write it as 80Gi")]
    Memory { value: String },
    #[error("--foreign-gpu-model: {value:?} is not MODEL=SIZE[:CLASS]; write it as H100=80Gi")]
    Model { value: String },
}

impl ForeignRequests {
    /// # Errors
    /// A size or a model is invalid.
    pub fn new(args: &ForeignArgs) -> Result<Self, ForeignSettingsError> {
        let bytes = |text: &str| text.parse::<Quantity>().ok()?.as_bytes().filter(|bytes| *bytes > 0);
        let gpu_memory = match args.foreign_gpu_memory.as_deref() {
            None | Some("") => None,
            Some(value) => {
                let invalid = || ForeignSettingsError::Memory { value: value.to_owned() };
                Some(bytes(value).ok_or_else(invalid)?)
            }
        };
        let model = |value: &String| {
            let (name, size) = value.split_once('=')?;
            let (memory, class) =
                size.split_once(':').map_or((size, None), |(size, class)| (size, Some(class.to_owned())));
            let size = GpuSize { memory: bytes(memory)?, class };
            (!name.is_empty()).then(|| GpuModel { name: name.to_lowercase(), size })
        };
        let models = args.foreign_gpu_model.iter().filter(|value| !value.is_empty());
        let models = models
            .map(|value| model(value).ok_or_else(|| ForeignSettingsError::Model { value: value.clone() }));
        let models = models.collect::<Result<_, _>>()?;
        Ok(Self { enabled: args.foreign_requests, gpu_memory, models })
    }

    /// The verdict on a pod, as JSON: a patch, a refusal, or neither if nothing is foreign.
    pub(super) fn review(&self, object: &str) -> Result<Verdict, serde_json::Error> {
        let mut verdict = Verdict::default();
        if !self.enabled {
            return Ok(verdict);
        }
        let before: Value = serde_json::from_str(object)?;
        let pod: Pod = serde_json::from_str(object)?;
        let size = self.size(&pod);
        let mut found = requests(&pod, size.as_ref());
        // Extended resource names serve the rest, and Volcano's scheduler has other duties.
        found.retain(|request| !request.served && request.dialect != Dialect::Volcano);
        if let Some(class) = size.and_then(|size| size.class) {
            let ported = found.iter_mut().filter_map(|request| request.ported.as_mut().ok());
            ported
                .filter(|ported| ported.class == SHARE_CLASS)
                .for_each(|ported| ported.class.clone_from(&class));
        }
        let refusals: Vec<String> = found.iter().filter_map(refusal).collect();
        if !refusals.is_empty() {
            verdict.refusal = Some(refusals.join("; "));
            return Ok(verdict);
        }
        let notes = found.iter().flat_map(|request| &request.notes);
        verdict.warnings = notes.map(|note| format!("requests of another GPU scheduler: {note}")).collect();
        verdict.patch = patch(&before, &found);
        Ok(verdict)
    }

    /// The size of the GPUs that the pod means: of the only model that it names, else of every GPU.
    fn size(&self, pod: &Pod) -> Option<GpuSize> {
        let annotation = pod.metadata.annotations.as_ref().and_then(|all| all.get(MODEL_ANNOTATION));
        let label = pod.spec.as_ref().and_then(|spec| spec.node_selector.as_ref()?.get(MODEL_LABEL));
        let named: Vec<String> =
            annotation.into_iter().chain(label).map(|text| text.to_lowercase()).collect();
        let mut models =
            self.models.iter().filter(|model| named.iter().any(|text| text.contains(&model.name)));
        match (models.next(), models.next()) {
            (Some(model), None) => Some(model.size.clone()),
            (Some(_), Some(_)) => None,
            (None, _) => self.gpu_memory.map(|memory| GpuSize { memory, class: None }),
        }
    }
}

/// Why a request is refused.
fn refusal(request: &ContainerRequest) -> Option<String> {
    let refusal = request.ported.as_ref().err()?;
    let remedy = match refusal {
        Refusal::SizeUnknown { .. } => {
            ". An administrator names it in foreignRequests.gpuMemory of the chart, or for each model in \
             foreignRequests.models; then the pod names its model in the annotation nvidia.com/use-gputype"
        }
        _ => "",
    };
    Some(format!("{} ({}): {refusal}{remedy}", request.path, request.dialect))
}

/// The patch, or `None` if the pod needs no change.
fn patch(before: &Value, found: &[ContainerRequest]) -> Option<Vec<Value>> {
    let mut after = before.clone();
    rewrite(&mut after, found, &template_name);
    let scheduler = before["spec"]["schedulerName"].as_str();
    if scheduler.is_some_and(|name| SCHEDULERS.contains(&name)) {
        after["spec"]["schedulerName"] = DEFAULT_SCHEDULER.into();
    }
    let ported: Vec<&Ported> = found.iter().filter_map(|request| request.ported.as_ref().ok()).collect();
    if !ported.is_empty() {
        after["metadata"]["labels"][PORTED_LABEL] = "true".into();
        let record = Record::of(ported.into_iter().cloned());
        after["metadata"]["annotations"][REQUESTS_ANNOTATION] = record.text().into();
    }
    let mut operations = Vec::new();
    // `rewrite` removes no field of these objects, except those that are set again here.
    for parent in ["metadata", "spec"] {
        for (field, value) in after[parent].as_object()? {
            if before[parent].get(field) != Some(value) {
                // `add` replaces a field that exists.
                let path = format!("/{parent}/{field}");
                operations.push(json!({"op": "add", "path": path, "value": value}));
            }
        }
    }
    (!operations.is_empty()).then_some(operations)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};
    use clap::Parser;

    fn settings(flags: &[&str]) -> Result<ForeignRequests, ForeignSettingsError> {
        let words = ["divvy-controller", "run", "--foreign-requests", "true"];
        let args = Args::try_parse_from(words.iter().chain(flags)).unwrap();
        let Command::Run(args) = args.command else { unreachable!() };
        ForeignRequests::new(&args.foreign)
    }

    fn pod(annotations: Value, limits: Value, scheduler: &str) -> Value {
        json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {"schedulerName": scheduler,
            "containers": [{"name": "main", "image": "x", "resources": {"limits": limits}}]}})
    }

    fn apply(pod: &Value, operations: &[Value]) -> Value {
        let mut pod = pod.clone();
        for operation in operations {
            let (parent, field) = operation["path"].as_str().unwrap().rsplit_once('/').unwrap();
            pod.pointer_mut(parent).unwrap()[field] = operation["value"].clone();
        }
        pod
    }

    /// Reviews a pod twice: the patched pod must need no further patch. Returns the patched pod.
    fn served(flags: &[&str], pod: &Value) -> Value {
        let settings = settings(flags).unwrap();
        let verdict = settings.review(&pod.to_string()).unwrap();
        assert_eq!(verdict.refusal, None, "{pod}");
        let patched = apply(pod, verdict.patch.as_deref().unwrap_or_default());
        assert_eq!(settings.review(&patched.to_string()).unwrap().patch, None, "{patched}");
        patched
    }

    #[test]
    fn foreign_requests_become_claims() {
        let check = |flags: &[&str], annotations: Value, limits: Value, expected: Option<Value>| {
            let patched = served(flags, &pod(annotations, limits, "hami-scheduler"));
            assert_eq!(patched["spec"]["schedulerName"], DEFAULT_SCHEDULER);
            let record = patched["metadata"]["annotations"][REQUESTS_ANNOTATION].as_str();
            let record: Option<Value> = record.map(|text| serde_json::from_str(text).unwrap());
            let request = record.as_ref().and_then(|record| record.as_object()?.values().next()).cloned();
            assert_eq!(request, expected);
            let Some(record) = record else { return };
            let name = record.as_object().unwrap().keys().next().unwrap().clone();
            assert_eq!(
                patched["spec"]["resourceClaims"],
                json!([{"name": "gpu", "resourceClaimTemplateName": name}])
            );
            let resources = &patched["spec"]["containers"][0]["resources"];
            assert_eq!(resources, &json!({"limits": {"cpu": 1}, "claims": [{"name": "gpu"}]}));
            assert_eq!(patched["metadata"]["labels"], json!({PORTED_LABEL: "true"}));
        };
        let share = |memory: &str| json!({"class": "share.divvy.dev", "count": 1, "memory": memory});
        let none = || json!({});
        let hami = json!({"cpu": 1, "nvidia.com/gpu": 1, "nvidia.com/gpumem": 3072});
        check(&[], none(), hami.clone(), Some(share("3Gi")));
        check(&[], json!({"gpu-memory": "2048"}), json!({"cpu": 1}), Some(share("2Gi")));
        let half = json!({"cpu": 1, "nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 50});
        check(&["--foreign-gpu-memory", "80Gi"], none(), half.clone(), Some(share("40Gi")));
        let models = ["--foreign-gpu-model", "A30=24Gi,H100=80Gi:h100-share"];
        let h100 = || json!({"nvidia.com/use-gputype": "NVIDIA-H100"});
        let of_class = |memory: &str| json!({"class": "h100-share", "count": 1, "memory": memory});
        check(&models, h100(), half, Some(of_class("40Gi")));
        check(&models, h100(), hami, Some(of_class("3Gi")));
        check(&[], none(), json!({"cpu": 1, "nvidia.com/gpu": 1}), None);
    }

    #[test]
    fn pods_without_foreign_requests_are_unchanged() {
        let unchanged = |pod: &Value| assert_eq!(&served(&[], pod), pod);
        unchanged(&pod(json!({}), json!({"nvidia.com/gpu": 1}), DEFAULT_SCHEDULER));
        unchanged(&pod(json!({}), json!({"volcano.sh/vgpu-memory": 1}), "volcano"));
        unchanged(&pod(json!({}), json!({"cpu": 1}), "another"));
        let off = ForeignRequests::default();
        let hami = pod(json!({}), json!({"nvidia.com/gpumem": 1}), "hami-scheduler");
        assert_eq!(off.review(&hami.to_string()).unwrap(), Verdict::default());
    }

    #[test]
    fn part_of_an_unknown_gpu_is_refused_with_the_remedy() {
        let check = |flags: &[&str], annotations: Value, limits: Value| {
            let pod = pod(annotations, limits, DEFAULT_SCHEDULER);
            let verdict = settings(flags).unwrap().review(&pod.to_string()).unwrap();
            let refusal = verdict.refusal.expect("a refusal");
            assert!(refusal.starts_with("spec.containers[0] ("), "{refusal}");
            assert!(refusal.contains("foreignRequests.gpuMemory"), "{refusal}");
            assert_eq!(verdict.patch, None);
        };
        let percentage = || json!({"nvidia.com/gpumem-percentage": 50});
        check(&[], json!({}), percentage());
        check(&[], json!({"gpu-fraction": "0.5"}), json!({}));
        check(&[], json!({}), json!({"nvidia.com/gpu": "500m"}));
        let models = ["--foreign-gpu-model", "A30=24Gi,A100=80Gi"];
        check(&models, json!({}), percentage());
        check(&models, json!({"nvidia.com/use-gputype": "A30,A100"}), percentage());
    }

    #[test]
    fn invalid_settings_are_refused() {
        for flags in [
            ["--foreign-gpu-memory", "large"],
            ["--foreign-gpu-memory", "0"],
            ["--foreign-gpu-model", "H100"],
            ["--foreign-gpu-model", "=80Gi"],
            ["--foreign-gpu-model", "H100=x"],
        ] {
            assert!(settings(&flags).is_err(), "{flags:?}");
        }
        assert!(settings(&["--foreign-gpu-memory", "", "--foreign-gpu-model", ""]).is_ok());
    }
}
