//! What a container gets by a claim: its CDI file, read as a runtime does.

use anyhow::{Context, Result};
use divvy_api::mps::CONTAINER_PIPE;
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// A claim's CDI file.
pub(crate) struct View {
    file: String,
    document: Value,
}

/// What a client of MPS is told and given.
pub(crate) struct MpsView {
    pub(crate) env: Vec<(String, String)>,
    /// The pipe directory on the host.
    pub(crate) pipe: PathBuf,
}

impl View {
    /// Reads the file of the claim with that UID.
    pub(crate) fn read(cdi_dir: &Path, uid: &str) -> Result<Self> {
        let mut entries = std::fs::read_dir(cdi_dir)?.filter_map(Result::ok).map(|entry| entry.path());
        let path =
            entries.find(|path| path.to_string_lossy().contains(uid)).context("no CDI file of the claim")?;
        let document = serde_json::from_slice(&std::fs::read(&path)?)
            .with_context(|| format!("{} is no JSON", path.display()))?;
        Ok(Self { file: path.file_name().unwrap_or_default().display().to_string(), document })
    }

    fn devices(&self) -> impl Iterator<Item = &Value> {
        list(&self.document["devices"]).map(|device| &device["containerEdits"])
    }

    /// Device nodes, variables and mounts, with paths below `root` made short.
    pub(crate) fn told(&self, root: &Path) -> String {
        let short = |path: &str| {
            let path = Path::new(path);
            path.strip_prefix(root).unwrap_or(path).display().to_string()
        };
        let mut text = String::new();
        for edits in self.devices() {
            let nodes: Vec<&str> =
                list(&edits["deviceNodes"]).filter_map(|node| node["path"].as_str()).collect();
            // Writing to a String cannot fail, here and below.
            let _ = writeln!(text, "{}", nodes.join("  "));
            for variable in list(&edits["env"]).filter_map(Value::as_str) {
                let _ = writeln!(text, "{variable}");
            }
            for mount in list(&edits["mounts"]) {
                let (host, container) = (mount["hostPath"].as_str(), mount["containerPath"].as_str());
                let _ = writeln!(
                    text,
                    "{} is {}",
                    container.unwrap_or_default(),
                    short(host.unwrap_or_default())
                );
            }
        }
        let common = &self.document["containerEdits"];
        let count = |part: &str| list(&common[part]).count();
        let _ = write!(
            text,
            "with {} common nodes, {} mounts, {} hook in {}",
            count("deviceNodes"),
            count("mounts"),
            count("hooks"),
            self.file
        );
        text
    }

    /// What the first device that is shared by MPS gives a client.
    pub(crate) fn mps(&self) -> Option<MpsView> {
        self.devices().find_map(|edits| {
            let pipe = list(&edits["mounts"]).find(|mount| mount["containerPath"] == CONTAINER_PIPE)?;
            let env = list(&edits["env"]).filter_map(Value::as_str).filter_map(|text| text.split_once('='));
            Some(MpsView {
                env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
                pipe: pipe["hostPath"].as_str()?.into(),
            })
        })
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}
