//! `divvy check`: the errors of admission and of prepare, before anything is applied.
//!
//! The files are checked together: claims, templates and classes that an object refers to are
//! looked up in all of them. References to anything else are not checked.

use crate::documents::{self, Document};
use anyhow::Result;
use divvy_api::check::{self, Class, Finding, Objects, Severity};
use divvy_api::names::{CONFIG_API_VERSION, DRIVER};
use divvy_api::sharing::Mode;
use divvy_model::NodeConfig;
use divvy_model::nodeconfig::NodeConfigError;
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceClaim, DeviceClass};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// See the command's help.
#[derive(clap::Args)]
pub(crate) struct CheckArguments {
    /// Files with ResourceClaims, ResourceClaimTemplates, DeviceClasses, Pods, workloads with a pod
    /// template, and NodeConfigs, YAML or JSON; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Format of the findings
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

/// A finding and its object.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Line {
    file: String,
    /// For example `ResourceClaim default/gpu`; empty for a file that cannot be parsed.
    object: String,
    #[serde(flatten)]
    finding: Finding,
}

/// Prints a line per finding. Fails if one is an error.
pub(crate) fn run(arguments: &CheckArguments) -> Result<ExitCode> {
    let mut texts = Vec::new();
    for file in &arguments.files {
        texts.push((file.display().to_string(), documents::text(file)?));
    }
    let (lines, checked) = check_all(&texts);
    let errors = lines.iter().filter(|line| line.finding.severity == Severity::Error).count();
    match arguments.output {
        Output::Json => println!("{}", serde_json::to_string_pretty(&lines)?),
        Output::Text => {
            for line in &lines {
                println!("{}", format_line(line));
            }
            eprintln!("checked: {checked}, errors: {errors}, warnings: {}", lines.len() - errors);
        }
    }
    Ok(if errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn format_line(Line { file, object, finding }: &Line) -> String {
    let (severity, path, message) = (finding.severity, &finding.path, &finding.message);
    let place: Vec<_> =
        [object, path].into_iter().filter(|part| !part.is_empty()).map(String::as_str).collect();
    match place.as_slice() {
        [] => format!("{file}: {severity}: {message}"),
        place => format!("{file}: {severity}: {}: {message}", place.join(": ")),
    }
}

/// All findings, and the number of checked objects.
fn check_all(texts: &[(String, String)]) -> (Vec<Line>, usize) {
    let (mut lines, mut read) = (Vec::new(), Vec::new());
    for (file, text) in texts {
        match documents::documents(text) {
            Ok(documents) => read.extend(documents.into_iter().map(|document| (file, text, document))),
            Err(message) => {
                let finding = Finding { severity: Severity::Error, path: String::new(), message };
                lines.push(Line { file: file.clone(), object: String::new(), finding });
            }
        }
    }
    let mut objects = Objects::default();
    for (.., document) in &read {
        add_object(&mut objects, &document.value);
    }
    let mut checked = 0;
    for (file, text, document) in &read {
        if let Some(findings) = findings(text, document, &objects) {
            checked += 1;
            let object = object_name(&document.value);
            let line = |finding| Line { file: (*file).clone(), object: object.clone(), finding };
            lines.extend(findings.into_iter().map(line));
        }
    }
    (lines, checked)
}

/// Kind, namespace and name of an object.
fn object_name(object: &Value) -> String {
    let part = |value: &Value| value.as_str().map(str::to_owned);
    let metadata = &object["metadata"];
    let name = part(&metadata["name"]).or_else(|| part(&metadata["generateName"]));
    let names: Vec<_> = [part(&metadata["namespace"]), name].into_iter().flatten().collect();
    [part(&object["kind"]).unwrap_or_default(), names.join("/")].join(" ").trim().to_owned()
}

/// The object's namespace; `default` if it has none, as for kubectl.
fn namespace(object: &Value) -> String {
    object["metadata"]["namespace"].as_str().unwrap_or("default").to_owned()
}

/// Adds an object to which others can refer.
fn add_object(objects: &mut Objects, object: &Value) {
    let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let devices = |devices: &Value| serde_json::from_value::<DeviceClaim>(devices.clone()).ok();
    match object["kind"].as_str() {
        Some("ResourceClaim") => {
            let devices = devices(&object["spec"]["devices"]);
            objects.claims.extend(devices.map(|devices| ((namespace(object), name), devices)));
        }
        Some("ResourceClaimTemplate") => {
            let devices = devices(&object["spec"]["spec"]["devices"]);
            objects.templates.extend(devices.map(|devices| ((namespace(object), name), devices)));
        }
        Some("DeviceClass") => {
            if let Ok(class) = serde_json::from_value::<DeviceClass>(object.clone())
                && let Some(read) = read_class(&class)
            {
                objects.classes.insert(name, read);
            }
        }
        _ => {}
    }
}

/// The modes that a class selects, found by evaluating its selectors for one device of each type.
///
/// `None` if the selectors depend on more than the type.
fn read_class(class: &DeviceClass) -> Option<Class> {
    let types = [
        (Mode::Whole, "gpu"),
        (Mode::Share, "share"),
        (Mode::Mig, "mig"),
        (Mode::Timeslice, "timeslice"),
        (Mode::Mps, "mps"),
    ];
    let device = |(_, type_): &(Mode, &str)| {
        let text = DeviceAttribute { string: Some((*type_).to_owned()), ..DeviceAttribute::default() };
        let attributes = Some([("type".to_owned(), text)].into());
        Device { name: (*type_).to_owned(), attributes, ..Device::default() }
    };
    let devices: Vec<_> = types.iter().map(device).collect();
    let selected = divvy_alloc::selected(class, DRIVER, &devices).ok()?;
    let modes = types.iter().zip(selected).filter(|(_, selected)| *selected).map(|((mode, _), _)| *mode);
    let class = Class::of(
        class,
        Some(modes.collect()).filter(|modes: &std::collections::BTreeSet<_>| !modes.is_empty()),
    );
    (!class.modes.is_empty()).then_some(class)
}

/// The findings of an object; `None` if its kind is not checked.
fn findings(text: &str, document: &Document, objects: &Objects) -> Option<Vec<Finding>> {
    let object = &document.value;
    let failed = |message: String| vec![Finding { severity: Severity::Error, path: String::new(), message }];
    let check = |object: &Value| {
        check::object(object.to_string().as_bytes(), objects)
            .unwrap_or_else(|cause| failed(cause.to_string()))
    };
    let (version, kind) = (object["apiVersion"].as_str()?, object["kind"].as_str()?);
    match (version, kind) {
        ("resource.k8s.io/v1", "ResourceClaim" | "ResourceClaimTemplate" | "DeviceClass") | ("v1", "Pod") => {
            Some(check(object))
        }
        (older, "ResourceClaim" | "ResourceClaimTemplate" | "DeviceClass")
            if older.starts_with("resource.k8s.io/") =>
        {
            Some(failed(format!("apiVersion {older} is not supported; use resource.k8s.io/v1")))
        }
        (CONFIG_API_VERSION, "NodeConfig") => Some(match node_config(text, document) {
            Ok(_) => Vec::new(),
            Err(cause) => failed(cause.to_string()),
        }),
        (CONFIG_API_VERSION, _) => Some(failed(format!(
            "kind {kind} is not an API object; put it into the config of a claim or DeviceClass, \
             under opaque.parameters"
        ))),
        _ => {
            let template = pod_template(object)?;
            let pod = json!({
                "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
                "metadata": {"name": object["metadata"]["name"], "namespace": namespace(object)},
            });
            let base = if kind == "CronJob" { "spec.jobTemplate.spec.template." } else { "spec.template." };
            let mut findings = check(&pod);
            findings.iter_mut().for_each(|finding| finding.path.insert_str(0, base));
            Some(findings)
        }
    }
}

/// The pod template of a Deployment, Job, CronJob and the like.
fn pod_template(object: &Value) -> Option<&Value> {
    let spec = &object["spec"];
    let templates = [&spec["template"], &spec["jobTemplate"]["spec"]["template"]];
    templates.into_iter().find(|template| template["spec"]["containers"].is_array())
}

/// Parses a node configuration from the text, so that errors have line numbers.
fn node_config(text: &str, document: &Document) -> Result<NodeConfig, NodeConfigError> {
    let source = document.index.and_then(|index| serde_norway::Deserializer::from_str(text).nth(index));
    match source {
        Some(source) => NodeConfig::read(source),
        None => NodeConfig::parse(&document.value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[&str]) {
        let (lines, _) = check_all(&[("f".to_owned(), text.to_owned())]);
        assert_eq!(lines.iter().map(format_line).collect::<Vec<_>>(), expected);
    }

    const TEMPLATE: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: client}
spec: {spec: {devices: {requests: [{name: r, exactly: {deviceClassName: ours.example.com}}]}}}
";
    const CLASS: &str = "
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: ours.example.com}
spec:
  selectors:
    - cel:
        expression: >-
          device.driver == 'gpu.divvy.dev' && device.attributes['gpu.divvy.dev'].type == 'mps'
";
    const DEPLOYMENT: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: d}
spec:
  template:
    spec:
      resourceClaims: [{name: c, resourceClaimTemplateName: client}]
      containers:
        - name: main
          resources: {claims: [{name: c}]}
          volumeMounts: [{name: shm, mountPath: /dev/shm}]
";

    #[test]
    fn files_are_checked_together() {
        let refused = "f: error: Deployment d: spec.template.spec.containers[0].volumeMounts[0].mountPath: \
            container main uses MPS and mounts a volume at /dev/shm, \
            which MPS clients and their control daemon need; remove the volume";
        check(&format!("{DEPLOYMENT}---{TEMPLATE}---{CLASS}"), &[refused]);
        check(&format!("{DEPLOYMENT}---{TEMPLATE}"), &[]);
        let elsewhere = DEPLOYMENT.replace("{name: d}", "{name: d, namespace: other}");
        check(&format!("{elsewhere}---{TEMPLATE}---{CLASS}"), &[]);
    }

    #[test]
    fn the_examples_have_no_findings() {
        let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../manifests/examples");
        let files = |folder: &str| {
            let entries = std::fs::read_dir(format!("{examples}/{folder}")).expect("examples");
            entries.map(|entry| entry.expect("an entry").path())
        };
        let is_yaml =
            |file: &std::path::PathBuf| file.extension().is_some_and(|extension| extension == "yaml");
        let texts: Vec<_> = files("")
            .chain(files("kueue"))
            .filter(is_yaml)
            .map(|file| (file.display().to_string(), std::fs::read_to_string(&file).expect("a text")))
            .collect();
        let (lines, checked) = check_all(&texts);
        assert_eq!(lines, []);
        assert!(checked >= texts.len(), "{checked}");
    }

    #[test]
    fn findings_name_their_position() {
        let claim = "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c}, \
            spec: {devices: {requests: [{name: r, exactly: {deviceClassName: mps.divvy.dev, count: 2}}]}}}";
        let refused = format!(
            "f: error: ResourceClaim c: spec.devices.requests[0].exactly: request r: {}",
            check::ONE_DAEMON_PER_CONTAINER
        );
        check(claim, &[refused.as_str()]);
        check(&format!("{{kind: List, apiVersion: v1, items: [{claim}]}}"), &[refused.as_str()]);
        check(
            "apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\nrules: [{}]\n---\n\
             apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\nrules:\n  - slot: 1\n",
            &["f: error: NodeConfig: line 8: field rules[0].slot is unknown to Rule; did you mean slots?"],
        );
        check(
            "{apiVersion: resource.k8s.io/v1beta1, kind: DeviceClass, metadata: {name: x}}",
            &["f: error: DeviceClass x: apiVersion resource.k8s.io/v1beta1 is not supported; \
                 use resource.k8s.io/v1"],
        );
        check(
            "{apiVersion: resource.divvy.dev/v1alpha1, kind: GpuConfig}",
            &["f: error: GpuConfig: kind GpuConfig is not an API object; put it into the config of a claim \
                 or DeviceClass, under opaque.parameters"],
        );
        check("a: 1\nb: {c: 2, c: 3}\n", &["f: error: line 2: field b.c is given twice"]);
        check("{apiVersion: v1, kind: Service}\n---\n---\n[1]\n", &[]);
    }
}
