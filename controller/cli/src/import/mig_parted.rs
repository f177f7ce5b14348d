//! `divvy import mig-parted`: converts layouts of NVIDIA's mig-parted and MIG manager.
//!
//! A layout lists the MIG instances to create in advance. Divvy creates instances on demand, so
//! their counts have no counterpart. The result is a node configuration, which restricts GPUs to
//! MIG or to whole-GPU claims, and a claim template for each profile of the layout.

use super::{OtherTool, Output, configurations, plain, print, quoted};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Examples:
  divvy import mig-parted config.yaml
  divvy import mig-parted --part node-config --layout all-balanced config.yaml
  kubectl get configmap -n gpu-operator custom-mig -o yaml | divvy import mig-parted -";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct MigPartedArguments {
    /// mig-parted's config.yaml, or its ConfigMap as kubectl prints it; `-` is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Convert only this layout, for all nodes; by default each layout applies to the nodes with
    /// its name in the label nvidia.com/mig.config
    #[arg(long, value_name = "NAME")]
    layout: Option<String>,
    /// What to print
    #[arg(long, value_enum, default_value = "all")]
    part: Part,
    /// Format of the output
    #[arg(short, long, value_enum, default_value = "yaml")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// A node configuration, for divvy-node --config or the chart's values
    NodeConfig,
    /// Claim templates, for kubectl apply
    Templates,
    All,
}

/// mig-parted's file format v1 (github.com/NVIDIA/mig-parted, api/spec/v1).
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Layouts {
    version: String,
    mig_configs: BTreeMap<String, Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Entry {
    #[serde(default)]
    device_filter: Option<Filter>,
    devices: Devices,
    mig_enabled: bool,
    #[serde(default)]
    mig_devices: Option<BTreeMap<String, u32>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Filter {
    One(String),
    Several(Vec<String>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Devices {
    /// Must be `all`.
    Word(String),
    Indices(BTreeSet<u32>),
}

const LABEL: &str = "nvidia.com/mig.config";

/// Prints the converted layouts.
pub(super) fn run(arguments: &MigPartedArguments) -> Result<ExitCode> {
    let all = configurations(&arguments.file, OtherTool::MigParted)?;
    let text = mig_parted(&all, arguments).with_context(|| arguments.file.display().to_string())?;
    print(&text, arguments.output)?;
    Ok(ExitCode::SUCCESS)
}

fn mig_parted(all: &[(Option<String>, String)], arguments: &MigPartedArguments) -> Result<String> {
    let mut layouts = Layouts { version: "v1".to_owned(), mig_configs: BTreeMap::new() };
    for (key, text) in all {
        let name = key.as_deref().map(|key| format!("{key}: ")).unwrap_or_default();
        let read: Layouts =
            serde_norway::from_str(text).with_context(|| format!("{name}not a mig-parted file"))?;
        if read.version != "v1" {
            bail!("{name}version is {:?}, expected v1", read.version);
        }
        layouts.mig_configs.extend(read.mig_configs);
    }
    if let Some(only) = &arguments.layout {
        layouts.mig_configs.retain(|name, _| name == only);
        if layouts.mig_configs.is_empty() {
            bail!("the file has no layout {only}");
        }
    }
    let node_config = || node_config(&layouts, arguments.layout.is_none());
    Ok(match arguments.part {
        Part::NodeConfig => node_config()?,
        Part::Templates => templates(&layouts),
        Part::All => format!("{}{}", node_config()?, templates(&layouts)),
    })
}

fn node_config(layouts: &Layouts, by_label: bool) -> Result<String> {
    let mut text = "\
# Restricts GPUs to MIG or to whole-GPU claims, as in the layouts. Without a rule
# its GPUs offer every mode. MIG instances are created on demand, so the counts of
# the layouts are only comments. The index of a GPU is the N of its device gpu-N:
# compare with `divvy config explain`.
apiVersion: resource.divvy.dev/v1alpha1
kind: NodeConfig
rules:
"
    .to_owned();
    for (name, entries) in &layouts.mig_configs {
        writeln!(text, "  # layout {}", plain(name))?;
        for entry in entries {
            let mut matches = String::new();
            if by_label {
                write!(matches, "\n      nodeLabels: {{{LABEL}: {}}}", quoted(name))?;
            }
            match &entry.devices {
                Devices::Word(all) if all == "all" => {}
                Devices::Word(other) => bail!("layout {name}: devices is {other:?}, expected all or a list"),
                Devices::Indices(indices) => {
                    let indices: Vec<_> = indices.iter().map(u32::to_string).collect();
                    write!(matches, "\n      indices: [{}]", indices.join(", "))?;
                }
            }
            let filter = match &entry.device_filter {
                None => Vec::new(),
                Some(Filter::One(one)) => vec![one],
                Some(Filter::Several(several)) => several.iter().collect(),
            };
            if !filter.is_empty() {
                let ids: Vec<_> = filter.into_iter().map(|id| plain(id)).collect();
                writeln!(
                    text,
                    "  # In the layout only for PCI IDs {}: select them by name, as in \
                     products: [\"*H100*\"].",
                    ids.join(", ")
                )?;
            }
            let counts = entry.mig_devices.iter().flatten();
            let counts: Vec<_> =
                counts.map(|(profile, count)| format!("{count} x {}", plain(profile))).collect();
            if !counts.is_empty() {
                writeln!(text, "  # Was {} on each GPU.", counts.join(", "))?;
            }
            let matches = if matches.is_empty() { " {}".to_owned() } else { matches };
            let mode = if entry.mig_enabled { "mig" } else { "whole" };
            writeln!(text, "  - match:{matches}\n    modes: [{mode}]")?;
        }
    }
    Ok(text)
}

fn templates(layouts: &Layouts) -> String {
    let entries = layouts.mig_configs.values().flatten();
    let profiles: BTreeSet<&str> = entries
        .flat_map(|entry| entry.mig_devices.iter().flatten())
        .map(|(profile, _)| profile.as_str())
        .collect();
    profiles.into_iter().map(template).collect()
}

fn template(profile: &str) -> String {
    // Compute instances in a GPU instance, for example `1c.3g.40gb`.
    let computed = profile.split_once('.').is_some_and(|(first, _)| first.ends_with('c'));
    let known = profile.starts_with(|c: char| c.is_ascii_digit())
        && profile.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b));
    if computed || !known {
        return format!(
            "---\n# {}: not supported. Claims get whole GPU instances; request a smaller profile.\n",
            plain(profile)
        );
    }
    let name = profile.replace('+', ".");
    format!(
        "---
# Pods that use the device plugin's resource need no change: nvidia.com/mig-{name}: 1
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: mig-{name}
spec:
  spec:
    devices:
      requests:
        - name: mig
          exactly:
            deviceClassName: mig.divvy.dev
            selectors:
              - cel:
                  expression: device.attributes['gpu.divvy.dev'].profile == '{profile}'
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_model::NodeConfig;
    use divvy_model::nodeconfig::{Labels, Subject};
    use divvy_model::{GpuNumber, GpuPolicy};

    const FILE: &str = r#"
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  all-balanced:
    - device-filter: ["0x233010DE", "0x233110DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "1g.10gb+me": 1}
  half:
    - {devices: [0, 1], mig-enabled: false}
    - {devices: [2, 3], mig-enabled: true, mig-devices: {"1c.3g.40gb": 2}}
"#;

    fn import(text: &str, layout: Option<&str>, part: Part) -> Result<String> {
        let layout = layout.map(str::to_owned);
        let all = crate::import::configurations_in(text, OtherTool::MigParted)?;
        let arguments = MigPartedArguments { file: PathBuf::new(), layout, part, output: Output::Yaml };
        mig_parted(&all, &arguments)
    }

    #[test]
    fn gpus_offer_the_modes_of_their_layout() {
        let check = |text: &str, layout: Option<&str>, label: &str, expected: [&str; 2]| {
            let config = import(text, layout, Part::NodeConfig).expect("a layout");
            let config = NodeConfig::parse(&config).expect(&config);
            let labels: Labels = [(LABEL.to_owned(), label.to_owned())].into();
            let modes = |number| {
                let gpu = Subject { number: GpuNumber(number), product: "NVIDIA L4" };
                let found = config.explain(&GpuPolicy::default(), Some(&labels), gpu);
                found.policy.modes.iter().map(|mode| mode.as_str()).collect::<Vec<_>>().join(" ")
            };
            assert_eq!([modes(0), modes(2)], expected, "{label}");
        };
        check(FILE, None, "all-disabled", ["whole", "whole"]);
        check(FILE, None, "all-balanced", ["mig", "mig"]);
        check(FILE, None, "half", ["whole", "mig"]);
        let all = "whole mig timeslice mps";
        check(FILE, None, "none", [all, all]);
        check(FILE, Some("half"), "none", ["whole", "mig"]);
        let odd = FILE.replace("half", "\"a: #\\n- b\"");
        check(&odd, None, "a: #\n- b", ["whole", "mig"]);
    }

    #[test]
    fn each_profile_gets_a_valid_template() {
        let text = import(FILE, None, Part::Templates).expect("a layout");
        let documents = crate::documents::documents(&text).expect(&text);
        let mut names = Vec::new();
        for document in documents {
            let found = divvy_api::check::object(
                document.value.to_string().as_bytes(),
                &divvy_api::check::Objects::default(),
            );
            assert_eq!(found.expect("an object"), []);
            names.push(document.value["metadata"]["name"].as_str().expect("a name").to_owned());
        }
        assert_eq!(names, ["mig-1g.10gb", "mig-1g.10gb.me", "mig-2g.20gb"]);
        assert!(text.contains("# 1c.3g.40gb: not supported"), "{text}");
    }

    #[test]
    fn other_files_are_refused() {
        let check = |text: &str, part: &str| {
            let refused = format!("{:#}", import(text, None, Part::All).expect_err(text));
            assert!(refused.contains(part), "{refused}");
        };
        check("version: v2\nmig-configs: {}\n", "version is \"v2\", expected v1");
        check("version: v1\nmig-config: {}\n", "unknown field `mig-config`");
        check(&FILE.replace("devices: all", "devices: some"), "devices is \"some\", expected all or a list");
        let refused = import(FILE, Some("quarter"), Part::All).expect_err("no such layout").to_string();
        assert_eq!(refused, "the file has no layout quarter");
    }
}
