//! `divvy check`: the errors of admission and of prepare, before anything is applied.
//!
//! The files are checked together: claims, templates and classes that an object refers to are
//! looked up in all of them. References to anything else are not checked. The exit status is 0
//! without errors, 1 with errors or with nothing to check, and 2 for wrong arguments.

use crate::documents::{self, Document};
use crate::import::other_tool;
use anyhow::{Context, Result};
use divvy_api::Quantity;
use divvy_api::check::published::SelectorProblem;
use divvy_api::check::{
    self, Class, ClusterView, Finding, GpuMemory, KnownGpus, Objects, Severity, failed, hint,
};
use divvy_api::names::{CONFIG_API_VERSION, DRIVER};
use divvy_api::sharing::Mode;
use divvy_catalogue::{Model, parse_list};
use divvy_model::NodeConfig;
use divvy_model::nodeconfig::NodeConfigError;
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceClaim, DeviceClass, ResourceSlice};
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Exit status: 0 without errors (there may be warnings), 1 with errors or nothing to check, 2 for
wrong arguments.

Examples:
  divvy check claims.yaml pods.yaml
  divvy check manifests/
  helm template my-chart | divvy check -
  divvy check --gpus 8xH100-SXM5-80GB claims.yaml
  divvy check -o json claims.yaml | jq -r '.[].message'";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CheckArguments {
    /// Files with ResourceClaims, ResourceClaimTemplates, DeviceClasses, Pods, workloads with a pod
    /// template, and NodeConfigs, YAML or JSON; directories of such files; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// GPUs of the cluster, such as 8xH100-SXM5-80GB, to find requests that are too large; by default
    /// those of ResourceSlices in the files, else all models
    #[arg(long, value_name = "GPUS")]
    gpus: Option<String>,
    /// Treat warnings as errors
    #[arg(long)]
    strict: bool,
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
        match file.is_dir() {
            true => read_directory(file, &mut texts)?,
            false => texts.push(Text::read(file)?),
        }
    }
    let gpus = match &arguments.gpus {
        Some(list) => Some(parse_list(list).context("--gpus")?),
        None => None,
    };
    let (lines, checked) = check_all(&texts, gpus.as_deref());
    let errors = lines.iter().filter(|line| line.finding.severity == Severity::Error).count();
    match arguments.output {
        Output::Json => println!("{}", serde_json::to_string_pretty(&lines)?),
        Output::Text => {
            let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            for line in &lines {
                println!("{}", coloured(&format_line(line), line.finding.severity, colours));
                print!("{}", format_instead(&line.finding)?);
            }
            eprintln!("checked: {checked}, errors: {errors}, warnings: {}", lines.len() - errors);
        }
    }
    let failed = errors > 0 || (arguments.strict && !lines.is_empty());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A file and its text.
struct Text {
    file: String,
    text: String,
    /// Whether the file was named itself, not its directory.
    named: bool,
}

impl Text {
    fn read(file: &Path) -> Result<Self> {
        Ok(Self { file: file.display().to_string(), text: documents::text(file)?, named: true })
    }
}

/// Reads the manifests of a directory and of those in it, in the order of their names.
fn read_directory(directory: &Path, texts: &mut Vec<Text>) -> Result<()> {
    let entries = std::fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        let is_manifest =
            path.extension().is_some_and(|ending| ["yaml", "yml", "json"].iter().any(|one| ending == *one));
        if is_hidden || path.is_symlink() && path.is_dir() {
            continue;
        }
        if path.is_dir() {
            read_directory(&path, texts)?;
        } else if is_manifest {
            texts.push(Text { named: false, ..Text::read(&path)? });
        }
    }
    Ok(())
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

/// Red errors and yellow warnings.
fn coloured(line: &str, severity: Severity, colours: bool) -> String {
    let (code, word) = match severity {
        Severity::Error => (31, ": error: "),
        Severity::Warning => (33, ": warning: "),
    };
    match colours {
        true => line.replacen(word, &format!(": \x1b[{code}m{severity}\x1b[0m: "), 1),
        false => line.to_owned(),
    }
}

/// The objects to use instead, indented.
fn format_instead(finding: &Finding) -> Result<String> {
    let text = documents::yaml(&finding.instead)?;
    Ok(text.lines().map(|line| format!("    {line}\n")).collect())
}

/// The view of the files.
struct Files {
    objects: Objects,
    gpus: KnownGpus,
    profiles: BTreeSet<String>,
}

impl ClusterView for Files {
    fn class(&self, name: &str) -> Option<Class> {
        self.objects.class(name)
    }
    fn claim(&self, namespace: &str, name: &str) -> Option<DeviceClaim> {
        self.objects.claim(namespace, name)
    }
    fn template(&self, namespace: &str, name: &str) -> Option<DeviceClaim> {
        self.objects.template(namespace, name)
    }
    fn selector_problems(&self, expression: &str, modes: &BTreeSet<Mode>) -> Vec<SelectorProblem> {
        divvy_alloc::check_selector(expression, modes, &self.profiles)
    }
    fn profiles(&self) -> BTreeSet<String> {
        self.profiles.clone()
    }
    fn gpus(&self) -> KnownGpus {
        self.gpus.clone()
    }
}

/// The GPUs of the published slices; of the catalogue, if there are none.
fn known_gpus(given: Option<&[Model]>, slices: &[ResourceSlice]) -> KnownGpus {
    let of_model = |model: &Model| GpuMemory {
        model: model.row().key.clone(),
        bytes: model.row().memory_total_mib << 20,
    };
    if let Some(models) = given {
        return KnownGpus { models: models.iter().map(of_model).collect(), complete: true };
    }
    let devices = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
    let devices = devices.flat_map(|slice| slice.spec.devices.iter().flatten());
    let mut published = BTreeMap::new();
    for device in devices {
        let text = |name: &str| device.attributes.as_ref()?.get(name)?.string.as_deref();
        let memory = device.capacity.as_ref().and_then(|capacity| capacity.get("memory"));
        let bytes = memory.and_then(|memory| Quantity::try_from(&memory.value).ok()?.as_bytes());
        if let (Some("gpu"), Some(product), Some(bytes)) = (text("type"), text("productName"), bytes) {
            published.insert(product.to_owned(), bytes);
        }
    }
    let models: Vec<_> = published.into_iter().map(|(model, bytes)| GpuMemory { model, bytes }).collect();
    match models.is_empty() {
        false => KnownGpus { models, complete: true },
        true => KnownGpus {
            models: divvy_catalogue::all().map(|model| of_model(&model)).collect(),
            complete: false,
        },
    }
}

/// The MIG profiles of the models of the catalogue, and those of the slices.
fn known_profiles(slices: &[ResourceSlice]) -> BTreeSet<String> {
    let all = divvy_catalogue::all();
    let catalogue =
        all.flat_map(|model| divvy_catalogue::node::profiles(model.row())).map(|profile| profile.name);
    let devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let published = devices.filter_map(|device| device.attributes.as_ref()?.get("profile")?.string.clone());
    catalogue.chain(published).collect()
}

/// The findings of an object, beside the objects that it refers to.
pub(crate) fn problems(object: &Value, all: &[Value]) -> Vec<Finding> {
    let mut objects = Objects::default();
    all.iter().for_each(|object| add_object(&mut objects, object));
    let view = Files { objects, gpus: known_gpus(None, &[]), profiles: known_profiles(&[]) };
    check::manifest(object, &view).unwrap_or_default()
}

/// All findings, and the number of checked objects.
fn check_all(texts: &[Text], gpus: Option<&[Model]>) -> (Vec<Line>, usize) {
    let (mut lines, mut read, mut slices) = (Vec::new(), Vec::new(), Vec::new());
    for Text { file, text, named } in texts {
        let (documents, faults) = documents::all_documents(text);
        for fault in &faults {
            let finding = match text.contains("{{") {
                true => hint("a Helm template is not a manifest; check the output of `helm template`"),
                false => failed(fault, Vec::new()),
            };
            lines.push(Line { file: file.clone(), object: String::new(), finding });
        }
        if *named && documents.is_empty() && faults.is_empty() {
            let finding =
                failed("the file is empty, so there is nothing to check; name another file", Vec::new());
            lines.push(Line { file: file.clone(), object: String::new(), finding });
        }
        read.extend(documents.into_iter().map(|document| (file, text, document)));
    }
    let mut objects = Objects::default();
    for (.., document) in &read {
        add_object(&mut objects, &document.value);
        if document.value["kind"] == "ResourceSlice" {
            slices.extend(serde_json::from_value::<ResourceSlice>(document.value.clone()).ok());
        }
    }
    let view = Files { objects, gpus: known_gpus(gpus, &slices), profiles: known_profiles(&slices) };
    let mut checked = 0;
    for (file, text, document) in &read {
        if let Some(findings) = findings(text, document, &view) {
            checked += 1;
            let object = object_name(&document.value);
            let line = |finding| Line { file: (*file).clone(), object: object.clone(), finding };
            lines.extend(findings.into_iter().map(line));
        }
    }
    if checked == 0 && lines.is_empty() {
        let files: Vec<_> = texts.iter().map(|text| text.file.as_str()).collect();
        let file = if files.len() == 1 { files.concat() } else { format!("{} files", files.len()) };
        let message = "nothing to check: no claim, template, class, pod, workload or node configuration; \
             name files with such objects";
        lines.push(Line { file, object: String::new(), finding: failed(message, Vec::new()) });
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
fn findings(text: &str, document: &Document, view: &Files) -> Option<Vec<Finding>> {
    let object = &document.value;
    if let Some(tool) = other_tool(object) {
        return Some(vec![hint(tool.hint(&[]))]);
    }
    let (version, kind) = (object["apiVersion"].as_str(), object["kind"].as_str());
    match (version, kind) {
        (Some(CONFIG_API_VERSION), Some("NodeConfig")) => Some(of_node_config(text, document)),
        (Some(CONFIG_API_VERSION), Some(kind)) => Some(vec![failed(
            format!(
                "kind {kind} is not an API object; put it into the config of a claim or DeviceClass, under \
                 opaque.parameters"
            ),
            Vec::new(),
        )]),
        (_, Some("ConfigMap")) => of_config_map(object),
        _ => check::manifest(object, view),
    }
}

/// Configurations in a ConfigMap; `None` if it has none that is known.
fn of_config_map(object: &Value) -> Option<Vec<Finding>> {
    let mut known = false;
    let mut findings = Vec::new();
    let mut tools: Vec<(_, Vec<String>)> = Vec::new();
    for (key, text) in documents::config_map(object) {
        let Ok(inner) = documents::documents(&text) else { continue };
        for document in &inner {
            if let Some(tool) = other_tool(&document.value) {
                known = true;
                match tools.iter_mut().find(|(other, _)| *other == tool) {
                    Some((_, keys)) => keys.push(key.clone()),
                    None => tools.push((tool, vec![key.clone()])),
                }
            }
            if document.value["apiVersion"] == CONFIG_API_VERSION && document.value["kind"] == "NodeConfig" {
                known = true;
                let inner = of_node_config(&text, document).into_iter();
                findings.extend(inner.map(|finding| Finding { path: format!("data[{key}]"), ..finding }));
            }
        }
    }
    for (tool, keys) in tools {
        findings.push(hint(tool.hint(&keys)));
    }
    known.then_some(findings)
}

/// The faults of a node configuration. The first one has its line.
fn of_node_config(text: &str, document: &Document) -> Vec<Finding> {
    let Err(first) = node_config(text, document) else { return Vec::new() };
    let others = NodeConfig::faults(&document.value).into_iter();
    let others = others.filter(|fault| match &first {
        NodeConfigError::Field { fault: reported, .. } => fault != reported,
        NodeConfigError::NotYaml { .. } => true,
    });
    let others: Vec<_> = others.map(|fault| failed(fault, Vec::new())).collect();
    [failed(&first, Vec::new())].into_iter().chain(others).collect()
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
        let text = Text { file: "f".to_owned(), text: text.to_owned(), named: true };
        let (lines, _) = check_all(&[text], None);
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
            .map(|file| Text::read(&file).expect("a text"))
            .collect();
        let (lines, checked) = check_all(&texts, None);
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
             apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\nrules:\n  - slot: 1\n    \
             modes: [gpu]\n",
            &[
                "f: error: NodeConfig: line 8: field rules[0].slot is unknown to Rule; did you mean slots?",
                "f: error: NodeConfig: field rules[0].modes[0] is \"gpu\", expected whole, mig, timeslice or \
                 mps",
            ],
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
        check(
            "{apiVersion: v1, kind: Service}\n---\n---\n[1]\n",
            &["f: error: nothing to check: no claim, template, class, pod, workload or node configuration; \
                 name files with such objects"],
        );
    }
}
