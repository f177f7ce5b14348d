//! `divvy import device-plugin`: converts the configuration of NVIDIA's device plugin.
//!
//! Replicas of a time-sliced GPU become the slots of its time-slice device, and replicas with MPS
//! become equal parts for MPS clients. The plugin shares each GPU always; Divvy's GPUs offer every
//! mode unless a rule limits them, so each rule does. Source: `api/config/v1` of
//! github.com/NVIDIA/k8s-device-plugin.

use super::{OtherTool, Output, configurations, plain, print, quoted};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Examples:
  divvy import device-plugin config.yaml
  kubectl get configmap -n gpu-operator plugin-config -o yaml | divvy import device-plugin -
  divvy import device-plugin config.yaml --config any | divvy check -";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DevicePluginArguments {
    /// The plugin's configuration, or its ConfigMap as kubectl prints it; `-` is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Convert only this configuration of the ConfigMap, for all nodes; by default each one of
    /// several applies to the nodes with its name in the label nvidia.com/device-plugin.config
    #[arg(long, value_name = "NAME")]
    config: Option<String>,
    /// Format of the output
    #[arg(short, long, value_enum, default_value = "yaml")]
    output: Output,
}

const LABEL: &str = "nvidia.com/device-plugin.config";
/// Limits of the fields `slots` and `mpsClients` of a NodeConfig.
const SLOTS_MAX: u32 = 256;
const MPS_CLIENTS_MAX: u32 = 60;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Configuration {
    version: String,
    #[serde(default)]
    flags: Value,
    #[serde(default)]
    resources: Value,
    #[serde(default)]
    sharing: Sharing,
    #[serde(default)]
    #[allow(dead_code)]
    health: Value,
    #[serde(default)]
    #[allow(dead_code)]
    imex: Value,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Sharing {
    #[serde(default)]
    time_slicing: Option<Replicated>,
    #[serde(default)]
    mps: Option<Replicated>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Replicated {
    #[serde(default)]
    rename_by_default: bool,
    #[serde(default)]
    fail_requests_greater_than_one: bool,
    #[serde(default)]
    resources: Vec<Resource>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Resource {
    name: String,
    #[serde(default)]
    rename: Option<String>,
    #[serde(default)]
    devices: Option<Devices>,
    replicas: u32,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Devices {
    /// The first devices of the node.
    Count(u32),
    /// Must be `all`.
    Word(String),
    /// Indices or UUIDs.
    List(Vec<Value>),
}

/// How the plugin shares GPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    TimeSlicing,
    Mps,
}

/// Prints the node configuration and the claim templates.
pub(super) fn run(arguments: &DevicePluginArguments) -> Result<ExitCode> {
    let all = configurations(&arguments.file, OtherTool::DevicePlugin)?;
    let text = convert(all, arguments.config.as_deref());
    print(&text.with_context(|| arguments.file.display().to_string())?, arguments.output)?;
    Ok(ExitCode::SUCCESS)
}

fn convert(mut all: Vec<(Option<String>, String)>, only: Option<&str>) -> Result<String> {
    if let Some(only) = only {
        all.retain(|(key, _)| key.as_deref() == Some(only));
        if all.is_empty() {
            bail!("the file has no configuration {only}");
        }
    }
    let by_label = all.len() > 1;
    let (mut rules, mut modes) = (String::new(), Vec::new());
    for (key, text) in &all {
        let name = key.as_deref().unwrap_or("the file");
        let configuration: Configuration = serde_norway::from_str(text)
            .with_context(|| format!("{name} is not a file of the device plugin"))?;
        if configuration.version != "v1" {
            bail!("{name}: version is {:?}, expected v1", configuration.version);
        }
        if let Some(key) = key {
            writeln!(rules, "  # configuration {}", plain(key))?;
        }
        let label = key.as_deref().filter(|_| by_label);
        modes.extend(add_rules(&mut rules, &configuration, label)?);
    }
    let mut text = "\
# Each rule offers what the device plugin offered on these GPUs, and nothing else.
# Without a rule, GPUs offer every mode, and their first claim decides.
apiVersion: resource.divvy.dev/v1alpha1
kind: NodeConfig
"
    .to_owned();
    match rules.lines().any(|line| line.starts_with("  - ")) {
        true => write!(text, "rules:\n{rules}")?,
        false => write!(text, "rules: []\n{rules}")?,
    }
    if modes.contains(&Mode::TimeSlicing) {
        text.push_str(&template(
            "timeslice",
            "Pods that request nvidia.com/gpu.shared: 1 need no change. Others use this template.",
        ));
    }
    if modes.contains(&Mode::Mps) {
        text.push_str(&template("mps", "Pods use this template in place of the plugin's resource."));
    }
    Ok(text)
}

/// Adds the rules of a configuration, and returns the modes that they offer.
fn add_rules(rules: &mut String, configuration: &Configuration, label: Option<&str>) -> Result<Vec<Mode>> {
    let mut modes = Vec::new();
    match configuration.flags["migStrategy"].as_str() {
        Some("single") => writeln!(
            rules,
            "  # migStrategy single: pods that request nvidia.com/gpu get a whole GPU here. Request\n  # \
             nvidia.com/mig-PROFILE, or a claim of mig.divvy.dev."
        )?,
        Some("mixed") => writeln!(rules, "  # migStrategy mixed: nvidia.com/mig-PROFILE works unchanged.")?,
        _ => {}
    }
    if !configuration.resources.is_null() {
        writeln!(
            rules,
            "  # resources: for other names of a GPU, set extendedResourceName in a DeviceClass of your own."
        )?;
    }
    let sharing = &configuration.sharing;
    for (mode, replicated) in [(Mode::TimeSlicing, &sharing.time_slicing), (Mode::Mps, &sharing.mps)] {
        let Some(replicated) = replicated else { continue };
        if replicated.fail_requests_greater_than_one && mode == Mode::TimeSlicing {
            writeln!(rules, "  # failRequestsGreaterThanOne: a claim with two slots gets them on one GPU.")?;
        }
        for resource in &replicated.resources {
            let added = add_rule(rules, resource, mode, replicated.rename_by_default, label)?;
            modes.extend(added.then_some(mode));
        }
    }
    if modes.is_empty() {
        writeln!(rules, "  # No GPU is shared, so no rule is needed.")?;
    }
    Ok(modes)
}

fn add_rule(
    rules: &mut String,
    resource: &Resource,
    mode: Mode,
    renamed: bool,
    label: Option<&str>,
) -> Result<bool> {
    let Resource { name, rename, devices, replicas } = resource;
    let bare = name.strip_prefix("nvidia.com/").unwrap_or(name);
    if bare != "gpu" {
        writeln!(
            rules,
            "  # {}: {replicas} replicas: MIG instances have no time-slices. Share them with\n  \
             # migShares, or with MPS by a MigDeviceConfig in the claim.",
            plain(name)
        )?;
        return Ok(false);
    }
    if *replicas < 2 {
        writeln!(rules, "  # {}: {replicas} replica is the whole GPU.", plain(name))?;
        return Ok(false);
    }
    let mut matches = String::new();
    if let Some(label) = label {
        write!(matches, "\n      nodeLabels: {{{LABEL}: {}}}", quoted(label))?;
    }
    let indices = match devices {
        None => None,
        Some(Devices::Word(all)) if all == "all" => None,
        Some(Devices::Word(other)) => bail!("{name}: devices is {other:?}, expected all, a number or a list"),
        Some(Devices::Count(count)) => Some((0..*count).collect::<Vec<_>>()),
        Some(Devices::List(list)) => Some(list.iter().map(|one| index(name, one)).collect::<Result<_>>()?),
    };
    if let Some(indices) = indices {
        let indices: Vec<_> = indices.iter().map(u32::to_string).collect();
        write!(matches, "\n      indices: [{}]", indices.join(", "))?;
    }
    let matches = if matches.is_empty() { " {}".to_owned() } else { matches };
    let (most, field, offered) = match mode {
        Mode::TimeSlicing => (SLOTS_MAX, "slots", "timeslice"),
        Mode::Mps => (MPS_CLIENTS_MAX, "mpsClients", "mps"),
    };
    if let Some(rename) = rename {
        writeln!(rules, "  # The name {} has no counterpart.", plain(rename))?;
    } else if !renamed && mode == Mode::TimeSlicing {
        writeln!(rules, "  # Pods must request nvidia.com/gpu.shared instead of nvidia.com/gpu.")?;
    }
    let count = replicas.min(&most);
    if count != replicas {
        writeln!(rules, "  # Was {replicas} replicas; {field} is at most {most}.")?;
    }
    writeln!(rules, "  - match:{matches}\n    modes: [{offered}]\n    {field}: {count}")?;
    Ok(true)
}

/// The index of a GPU.
fn index(resource: &str, device: &Value) -> Result<u32> {
    let text = device.as_str().map_or_else(|| device.to_string(), str::to_owned);
    text.parse().ok().with_context(|| {
        format!(
            "{resource}: device {text:?} is not the index of a GPU; rules match GPUs by index or product \
             name, so write its index"
        )
    })
}

fn template(mode: &str, about: &str) -> String {
    format!(
        "---
# {about}
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: {mode}
spec:
  spec:
    devices:
      requests:
        - name: gpu
          exactly:
            deviceClassName: {mode}.divvy.dev
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::configurations_in;
    use divvy_model::NodeConfig;

    const CONFIG_MAP: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: plugin-config, namespace: gpu-operator}
data:
  any: |-
    version: v1
    flags: {migStrategy: none}
    sharing:
      timeSlicing:
        renameByDefault: true
        failRequestsGreaterThanOne: true
        resources:
        - {name: nvidia.com/gpu, replicas: 10}
  mps8: |-
    version: v1
    sharing:
      mps:
        resources:
        - {name: nvidia.com/gpu, replicas: 8, devices: [0, "2"]}
"#;

    fn import(text: &str, only: Option<&str>) -> Result<String> {
        convert(configurations_in(text, OtherTool::DevicePlugin)?, only)
    }

    #[test]
    fn replicas_become_slots_and_clients() {
        let check = |text: &str, only: Option<&str>, expected: &[&str]| {
            let text = import(text, only).expect("a configuration");
            let first = text.split("---").next().expect("a document");
            let rules = NodeConfig::parse(first).expect(&text).rules;
            let shown = rules.iter().map(|rule| {
                let modes =
                    rule.modes.iter().flatten().map(|mode| mode.as_str()).collect::<Vec<_>>().join(" ");
                let label = rule.matches.node_labels.get(LABEL).map(String::as_str).unwrap_or("-");
                let count = rule.slots.or(rule.mps_clients).unwrap_or_default();
                format!("{label} {modes} {count} {:?}", rule.matches.indices)
            });
            assert_eq!(shown.collect::<Vec<_>>(), expected, "{text}");
        };
        check(CONFIG_MAP, None, &["any timeslice 10 {}", "mps8 mps 8 {0, 2}"]);
        check(CONFIG_MAP, Some("mps8"), &["- mps 8 {0, 2}"]);
        let one = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
        check(one, None, &["- timeslice 4 {}"]);
        check(&one.replace("replicas: 4", "replicas: 4, devices: 2"), None, &["- timeslice 4 {0, 1}"]);
        check(&one.replace("replicas: 4", "replicas: 900"), None, &["- timeslice 256 {}"]);
        check(&one.replace("nvidia.com/gpu", "nvidia.com/mig-1g.10gb"), None, &[]);
        check("version: v1\nflags: {migStrategy: mixed}\n", None, &[]);
    }

    #[test]
    fn other_files_are_refused() {
        let check = |text: &str, part: &str| {
            let refused = format!("{:#}", import(text, None).expect_err(text));
            assert!(refused.contains(part), "{refused}");
        };
        check("version: v2\nsharing: {}\n", "version is \"v2\", expected v1");
        check("version: v1\nmig-configs: {}\n", "configures mig-parted, not NVIDIA's device plugin");
        check("version: v1\nsharing: {timeslicing: {}}\n", "unknown field `timeslicing`");
        check(&CONFIG_MAP.replace("\"2\"", "\"GPU-1\""), "device \"GPU-1\" is not the index of a GPU");
        check("kind: ConfigMap\ndata: {a: b}\n", "has no configuration of NVIDIA's device plugin");
        assert!(import(CONFIG_MAP, Some("none")).is_err());
    }
}
