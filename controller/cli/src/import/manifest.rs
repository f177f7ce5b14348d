//! `divvy import manifest`: rewrites claims, classes, pods and workloads for Divvy.
//!
//! Objects that Divvy serves unchanged, and objects of other kinds, stay as they are, so that the
//! output can be applied in place of the input.

use super::{Output, print};
use crate::documents;
use anyhow::{Context, Result, anyhow, bail};
use divvy_api::Quantity;
use divvy_api::foreign::{self, ContainerRequest, GpuSize, Ported};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceClass};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Examples:
  divvy import manifest hami-pods.yaml
  divvy import manifest --gpu-memory 80Gi kai-pods.yaml
  kubectl get resourceclaimtemplates -o yaml | divvy import manifest - | divvy check -";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ManifestArguments {
    /// Files with claims, classes, pods and workloads; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Memory of one GPU, for requests in parts of a GPU, such as gpu-fraction
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    gpu_memory: Option<u64>,
    /// Format of the output
    #[arg(short, long, value_enum, default_value = "yaml")]
    output: Output,
}

fn memory(text: &str) -> Result<u64, String> {
    let size: Quantity =
        text.parse().map_err(|cause: divvy_api::quantity::QuantityError| cause.to_string())?;
    size.as_bytes().filter(|bytes| *bytes >= 1 << 20).ok_or_else(|| "expected a size such as 80Gi".to_owned())
}

/// Prints the rewritten objects.
pub(super) fn run(arguments: &ManifestArguments) -> Result<ExitCode> {
    let size = arguments.gpu_memory.map(|memory| GpuSize { memory, class: None });
    let mut objects = Vec::new();
    let mut refused = false;
    for file in &arguments.files {
        let text = documents::text(file)?;
        let converted = convert(&text, size.as_ref()).with_context(|| file.display().to_string())?;
        objects.extend(converted.objects);
        for message in converted.notes.iter().chain(&converted.refusals) {
            eprintln!("divvy: {}: {message}", file.display());
        }
        refused |= !converted.refusals.is_empty();
    }
    if objects.is_empty() {
        bail!("the files have no objects; name files with claims, classes, pods or workloads");
    }
    print(&documents::yaml(&objects)?, arguments.output)?;
    Ok(if refused { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A rewritten file.
#[derive(Default)]
struct Converted {
    objects: Vec<Value>,
    /// Settings that are lost.
    notes: Vec<String>,
    /// The reasons why objects stay as they are.
    refusals: Vec<String>,
}

/// Rewrites the objects of a text.
fn convert(text: &str, size: Option<&GpuSize>) -> Result<Converted> {
    let documents = documents::documents(text).map_err(|fault| anyhow!(fault))?;
    let Converted { mut objects, mut notes, mut refusals } = Converted::default();
    // Templates by namespace and name.
    let mut templates: BTreeMap<(String, String), Value> = BTreeMap::new();
    for document in documents {
        let mut object = document.value;
        let mut added = Vec::new();
        if let Err(refusal) = rewrite(&mut object, size, &mut added, &mut notes) {
            let named = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
            let kind = object["kind"].as_str().unwrap_or_default();
            refusals.push(format!("{kind} {}: {refusal}", named("name")));
        }
        for mut template in added {
            let namespace = object["metadata"]["namespace"].clone();
            let name = template["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            if !namespace.is_null() {
                template["metadata"]["namespace"] = namespace.clone();
            }
            let key = (namespace.as_str().unwrap_or_default().to_owned(), name);
            if templates.insert(key, template.clone()).is_none() {
                objects.push(template);
            }
        }
        objects.push(object);
    }
    Ok(Converted { objects, notes, refusals })
}

fn rewrite(
    object: &mut Value,
    size: Option<&GpuSize>,
    templates: &mut Vec<Value>,
    notes: &mut Vec<String>,
) -> Result<()> {
    match object["kind"].as_str().unwrap_or_default() {
        "ResourceClaim" => port_devices(&mut object["spec"]["devices"]),
        "ResourceClaimTemplate" => port_devices(&mut object["spec"]["spec"]["devices"]),
        "DeviceClass" => {
            let class: DeviceClass = serde_json::from_value(object.clone())?;
            if foreign::is_foreign_class(&class) {
                *object = json!(foreign::port_class(&class)?);
            }
            Ok(())
        }
        "Pod" => rewrite_pod(object, size, templates, notes),
        _ => match object.get_mut("spec") {
            Some(spec) => rewrite_templates(spec, size, templates, notes, 0),
            None => Ok(()),
        },
    }
}

fn port_devices(devices: &mut Value) -> Result<()> {
    let claim: DeviceClaim = serde_json::from_value(devices.clone())?;
    if foreign::is_foreign(&claim) {
        *devices = json!(foreign::port_claim(&claim)?);
    }
    Ok(())
}

/// Deeper objects are no workloads.
const DEPTH_MAX: usize = 8;

/// Rewrites the pod templates in a workload.
fn rewrite_templates(
    value: &mut Value,
    size: Option<&GpuSize>,
    templates: &mut Vec<Value>,
    notes: &mut Vec<String>,
    depth: usize,
) -> Result<()> {
    if depth > DEPTH_MAX {
        return Ok(());
    }
    // Indexing would insert a null.
    if value.pointer("/spec/containers").is_some_and(Value::is_array) {
        return rewrite_pod(value, size, templates, notes);
    }
    match value {
        Value::Object(fields) => fields
            .values_mut()
            .try_for_each(|value| rewrite_templates(value, size, templates, notes, depth + 1)),
        Value::Array(items) => {
            items.iter_mut().try_for_each(|value| rewrite_templates(value, size, templates, notes, depth + 1))
        }
        _ => Ok(()),
    }
}

fn rewrite_pod(
    object: &mut Value,
    size: Option<&GpuSize>,
    templates: &mut Vec<Value>,
    notes: &mut Vec<String>,
) -> Result<()> {
    let pod: Pod = serde_json::from_value(json!({"metadata": object["metadata"], "spec": object["spec"]}))?;
    let requests: Vec<_> =
        foreign::requests(&pod, size).into_iter().filter(|request| !request.served).collect();
    for ContainerRequest { container, ported, notes: lost, .. } in &requests {
        notes.extend(lost.iter().map(|note| format!("container {container}: {note}")));
        if let Err(refusal) = ported {
            bail!("container {container}: {refusal}");
        }
    }
    let added = RefCell::new(Vec::new());
    foreign::rewrite(object, &requests, &|ported: &Ported| {
        let name = ported.name();
        added.borrow_mut().push(json!(ported.template(&name)));
        name
    });
    templates.extend(added.into_inner());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, size: Option<u64>, expected: &str, refused: &[&str]) {
        let size = size.map(|gib| GpuSize { memory: gib << 30, class: None });
        let Converted { objects, refusals, .. } = convert(text, size.as_ref()).expect("objects");
        assert_eq!(documents::yaml(&objects).expect("YAML"), expected.trim_start(), "{refusals:?}");
        assert_eq!(refusals, refused);
    }

    #[test]
    fn pod_templates_are_rewritten_with_their_claims() {
        let deployment = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: d, namespace: n}
spec:
  template:
    spec:
      containers:
      - name: main
        resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 3000, nvidia.com/gpucores: 30}}
";
        let expected = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: share-3000mi-30
  namespace: n
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          capacity:
            requests:
              cores: '30'
              memory: 3000Mi
          deviceClassName: share.divvy.dev
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: d
  namespace: n
spec:
  template:
    spec:
      containers:
      - name: main
        resources:
          claims:
          - name: gpu
      resourceClaims:
      - name: gpu
        resourceClaimTemplateName: share-3000mi-30
";
        check(deployment, None, expected, &[]);
    }

    #[test]
    fn refused_objects_stay_as_they_are() {
        let pod = "
apiVersion: v1
kind: Pod
metadata:
  name: p
  annotations:
    gpu-fraction: '0.5'
spec:
  containers:
  - name: main
";
        let refusal = "Pod p: container main: gpu-fraction: 0.5 is part of a GPU of unknown size; request \
            memory instead, such as memory: 10Gi in a claim of share.divvy.dev, or name the size of the GPUs";
        check(pod, None, pod, &[refusal]);
        let whole = "apiVersion: v1\nkind: Service\nmetadata:\n  name: s\n";
        check(whole, None, whole, &[]);
    }
}
