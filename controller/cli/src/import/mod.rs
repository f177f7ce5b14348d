//! `divvy import`: converts requests and configurations of other tools.
//!
//! A file may be the configuration itself, or ConfigMaps as kubectl prints them. `divvy check`
//! accepts each output.

mod device_plugin;
mod manifest;
mod mig_parted;

use crate::documents;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use std::process::ExitCode;

/// See the command's help.
#[derive(clap::Subcommand)]
pub(crate) enum ImportCommand {
    /// Convert the sharing settings of NVIDIA's device plugin: time-slicing and MPS
    DevicePlugin(device_plugin::DevicePluginArguments),
    /// Convert claims and classes of NVIDIA's DRA driver, and pods of HAMi, Volcano and KAI
    Manifest(manifest::ManifestArguments),
    /// Convert layouts of mig-parted, for example from the ConfigMap of the GPU operator's MIG manager
    MigParted(mig_parted::MigPartedArguments),
}

/// Format of the output.
#[derive(Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum Output {
    /// With comments
    #[default]
    Yaml,
    /// A List
    Json,
}

/// Prints the converted file.
pub(crate) fn run(command: &ImportCommand) -> Result<ExitCode> {
    match command {
        ImportCommand::DevicePlugin(arguments) => device_plugin::run(arguments),
        ImportCommand::Manifest(arguments) => manifest::run(arguments),
        ImportCommand::MigParted(arguments) => mig_parted::run(arguments),
    }
}

/// Prints YAML, or the same as a List in JSON.
pub(crate) fn print(yaml: &str, output: Output) -> Result<()> {
    match output {
        Output::Yaml => print!("{yaml}"),
        Output::Json => {
            let objects = documents::documents(yaml).map_err(anyhow::Error::msg)?;
            let items: Vec<_> = objects.into_iter().map(|document| document.value).collect();
            let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": items});
            println!("{}", serde_json::to_string_pretty(&list)?);
        }
    }
    Ok(())
}

/// A tool whose configuration files are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OtherTool {
    DevicePlugin,
    MigParted,
}

impl OtherTool {
    fn command(self) -> &'static str {
        match self {
            Self::DevicePlugin => "device-plugin",
            Self::MigParted => "mig-parted",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::DevicePlugin => "NVIDIA's device plugin",
            Self::MigParted => "mig-parted",
        }
    }

    /// The remedy for a configuration of the tool, which is in these keys of a ConfigMap.
    pub(crate) fn hint(self, keys: &[String]) -> String {
        let (name, command) = (self.name(), self.command());
        let place =
            if keys.is_empty() { String::new() } else { format!(" in data[{}]", keys.join("], data[")) };
        format!(
            "Divvy does not read the configuration of {name}{place}; `divvy import {command} FILE` turns it \
             into a node configuration"
        )
    }
}

/// The tool that a configuration is for; `None` for Kubernetes objects and other files.
pub(crate) fn other_tool(document: &Value) -> Option<OtherTool> {
    let has = |field: &str| document.get(field).is_some();
    if has("apiVersion") || has("kind") {
        return None;
    }
    if has("mig-configs") {
        return Some(OtherTool::MigParted);
    }
    let plugin = ["sharing", "flags", "resources", "health"].iter().any(|field| has(field));
    (document["version"].as_str() == Some("v1") && plugin).then_some(OtherTool::DevicePlugin)
}

/// The configurations of a tool in a file, by the key of their ConfigMap.
fn configurations(file: &Path, tool: OtherTool) -> Result<Vec<(Option<String>, String)>> {
    let text = documents::text(file)?;
    let found = configurations_in(&text, tool).with_context(|| file.display().to_string())?;
    Ok(found)
}

fn configurations_in(text: &str, tool: OtherTool) -> Result<Vec<(Option<String>, String)>> {
    let documents = documents::documents(text).map_err(anyhow::Error::msg)?;
    let mut found = Vec::new();
    let (mut maps, mut others) = (0, Vec::new());
    for document in &documents {
        if document.value["kind"] != "ConfigMap" {
            others.extend(other_tool(&document.value).filter(|other| *other != tool));
            continue;
        }
        maps += 1;
        for (key, text) in documents::config_map(&document.value) {
            let Ok(inner) = documents::documents(&text) else { continue };
            let all = inner.iter().filter_map(|document| other_tool(&document.value));
            others.extend(all.clone().filter(|other| *other != tool));
            if all.into_iter().any(|other| other == tool) {
                found.push((Some(key), text));
            }
        }
    }
    let name = tool.name();
    match (maps > 0, found.is_empty(), others.first()) {
        // The reader of the tool explains other files better.
        (false, _, None) => Ok(vec![(None, text.to_owned())]),
        (_, false, _) => Ok(found),
        (_, _, Some(other)) => {
            bail!("the file configures {}, not {name}; use `divvy import {}`", other.name(), other.command())
        }
        (true, true, None) => bail!("the data of the ConfigMap has no configuration of {name}; name another"),
    }
}

/// The text without control characters, for a comment line.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// A quoted YAML string: JSON strings are valid YAML.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
