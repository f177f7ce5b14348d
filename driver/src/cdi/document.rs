//! The CDI document with the fields that a GPU needs, and the lowest `cdiVersion` that allows them.
//!
//! A runtime with an older CDI library refuses a newer version, so the version is computed from the
//! contents of the document.

use serde::Serialize;
use std::collections::BTreeSet;

/// A CDI file. It borrows the edits that all claims have in common.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Document<'a> {
    cdi_version: &'static str,
    kind: &'static str,
    devices: &'a [Device],
    container_edits: DocumentEdits<'a>,
}

/// The edits for every container with a device of the document.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DocumentEdits<'a> {
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    env: &'a [String],
    #[serde(skip_serializing_if = "<[DeviceNode]>::is_empty")]
    device_nodes: &'a [DeviceNode],
    mounts: Vec<&'a Mount>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hooks: Vec<&'a Hook>,
}

/// A device of a document; its id is `<kind>=<name>`.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    pub name: String,
    pub container_edits: Edits,
}

/// Changes to a container.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
}

/// A character device. Major and minor are always given, so the runtime creates the node without
/// looking at the host's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    pub path: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub major: u32,
    pub minor: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    pub permissions: &'static str,
}

/// A bind mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    pub host_path: String,
    pub container_path: String,
    pub options: &'static [&'static str],
}

/// A command that the runtime runs while it creates the container.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    pub hook_name: &'static str,
    pub path: String,
    pub args: Vec<String>,
    /// In seconds; the runtime then kills the command.
    pub timeout: u32,
}

impl<'a> Document<'a> {
    /// A document of the kind that all claims have: its devices, the edits that all claims have in
    /// common, and mounts and hooks of its own.
    pub fn new(devices: &'a [Device], common: &'a Edits, own: &'a Edits) -> Self {
        let container_edits = DocumentEdits {
            env: &common.env,
            device_nodes: &common.device_nodes,
            mounts: common.mounts.iter().chain(&own.mounts).collect(),
            hooks: common.hooks.iter().chain(&own.hooks).collect(),
        };
        Self { cdi_version: version(devices), kind: divvy_api::names::CDI_KIND, devices, container_edits }
    }
}

/// The lowest version that allows the contents. Only device names that start with a digit need more
/// than 0.3.0.
fn version(devices: &[Device]) -> &'static str {
    let letter = |device: &Device| device.name.starts_with(|c: char| c.is_ascii_alphabetic());
    if devices.iter().all(letter) { "0.3.0" } else { "0.5.0" }
}

impl DeviceNode {
    /// A character device with read and write permission.
    pub fn new(path: impl Into<String>, major: u32, minor: u32) -> Self {
        Self { path: path.into(), kind: "c", major, minor, file_mode: None, permissions: "rw" }
    }
}

/// The minors of the GPUs whose device nodes are in a file; `None` if it is no CDI document.
pub(super) fn gpu_minors(json: &[u8]) -> Option<BTreeSet<u32>> {
    let document: serde_json::Value = serde_json::from_slice(json).ok()?;
    let nodes = document["devices"].as_array()?.iter().flat_map(|device| {
        device["containerEdits"]["deviceNodes"].as_array().map(Vec::as_slice).unwrap_or_default()
    });
    // `/dev/nvidiactl` and the others have no number.
    let minor = |node: &serde_json::Value| node["path"].as_str()?.strip_prefix("/dev/nvidia")?.parse().ok();
    Some(nodes.filter_map(minor).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, expect: &str) {
        let devices = [Device { name: name.to_owned(), container_edits: Edits::default() }];
        let own = Edits { mounts: vec![Mount::default()], ..Edits::default() };
        let json = serde_json::to_value(Document::new(&devices, &Edits::default(), &own)).unwrap();
        assert_eq!(json["cdiVersion"], expect, "{name}");
        let fields: Vec<_> = json["containerEdits"].as_object().unwrap().keys().collect();
        assert_eq!(fields, ["mounts"], "empty fields are omitted");
    }

    #[test]
    fn version_is_the_lowest_that_fits_the_device_name() {
        check("a1b2-gpu-0", "0.3.0");
        check("1a2b-gpu-0", "0.5.0");
    }

    #[test]
    fn h1_minors_of_gpus_are_read_back() {
        let nodes = |paths: &[&str]| Device {
            name: "d".to_owned(),
            container_edits: Edits {
                device_nodes: paths.iter().map(|path| DeviceNode::new(*path, 195, 0)).collect(),
                ..Edits::default()
            },
        };
        let devices = [nodes(&["/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap7"]), nodes(&["/dev/nvidia11"])];
        let common = nodes(&["/dev/nvidiactl", "/dev/nvidia-uvm"]).container_edits;
        let json = serde_json::to_vec(&Document::new(&devices, &common, &Edits::default())).unwrap();
        assert_eq!(gpu_minors(&json), Some([3, 11].into()));
        for other in ["", "{}", "[]", r#"{"devices":{}}"#] {
            assert_eq!(gpu_minors(other.as_bytes()), None, "{other}");
        }
    }
}
