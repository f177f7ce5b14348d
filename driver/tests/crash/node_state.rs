//! A comparable snapshot of everything that the driver changes on a node.

use crate::harness::TestNode;
use std::collections::BTreeMap;
use std::path::Path;

/// The GPUs, and the content of every file below the state, CDI and run directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeState {
    gpus: Vec<String>,
    files: BTreeMap<String, String>,
}

impl NodeState {
    /// Reads the current state.
    pub(crate) fn read(node: &TestNode) -> Self {
        let mut files = BTreeMap::new();
        read_files(&node.state_dir(), "state", &mut files);
        read_files(&node.cdi_dir(), "cdi", &mut files);
        read_files(&node.run_dir(), "run", &mut files);
        // Its energies grow with time.
        files.remove("state/health.json");
        // Lock files that the test itself holds, see `ScenarioRunner::start`.
        files.retain(|name, _| !name.starts_with("run/agent-"));
        let state = node.sim.read().unwrap();
        Self { gpus: state.gpus.iter().map(describe_gpu).collect(), files }
    }

    /// Describes the differences in text.
    pub(crate) fn diff(&self, wanted: &Self) -> String {
        let mut text = String::new();
        for (found, wanted) in self.gpus.iter().zip(&wanted.gpus).filter(|(found, wanted)| found != wanted) {
            text += &format!("GPU is    {found}\ninstead of {wanted}\n");
        }
        for (name, content) in &self.files {
            match wanted.files.get(name) {
                None => text += &format!("{name} should not be there: {content}\n"),
                Some(other) if other != content => {
                    text += &format!("{name} is   {content}\ninstead of {other}\n");
                }
                Some(_) => {}
            }
        }
        for name in wanted.files.keys().filter(|name| !self.files.contains_key(*name)) {
            text += &format!("{name} is missing\n");
        }
        text
    }
}

/// MIG mode, the instances with every identifier that a container can see, time slice and compute mode.
fn describe_gpu(gpu: &divvy_sim::state::Gpu) -> String {
    let mut text = String::from(if gpu.mig.current { "mig" } else { "off" });
    for gi in &gpu.instances {
        text += &format!(" {}:{}@{}", gi.id, gi.profile, gi.placement);
        for ci in &gi.cis {
            text += &format!(" ({}:{}@{} {})", ci.id, ci.profile, ci.placement, ci.uuid);
        }
    }
    text + &format!(" slice {} mode {}", gpu.timeslice, gpu.compute_mode)
}

fn read_files(dir: &Path, name: &str, files: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = format!("{name}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            read_files(&entry.path(), &name, files);
        } else if let Ok(bytes) = std::fs::read(entry.path()) {
            files.insert(name, normalise(&bytes));
        }
    }
}

/// Size in bytes from which a file is a page in binary format. All text files are smaller.
const POLICY_PAGE_MIN_BYTES: usize = 4096;

/// The content of a text file, without the generation in a GPU's file, which counts changes, and without
/// what names the boot, which a reboot changes. The length and checksum of a page.
fn normalise(bytes: &[u8]) -> String {
    if bytes.len() >= POLICY_PAGE_MIN_BYTES && bytes.starts_with(b"divvy") {
        return format!("{} bytes, {:08x}", bytes.len(), crc32fast::hash(bytes));
    }
    if let Ok(mut record) = serde_json::from_slice::<serde_json::Map<_, _>>(bytes) {
        record.remove("crc32");
        record.remove("epoch");
        if let Some(boot) = record.get_mut("boot").and_then(|boot| boot.as_object_mut()) {
            boot.remove("id");
        }
        if let Some(body) = record.get_mut("record").and_then(|body| body.as_object_mut()) {
            body.remove("epoch");
        }
        return serde_json::Value::Object(record).to_string();
    }
    let text = String::from_utf8_lossy(bytes);
    match text.split(' ').collect::<Vec<_>>().as_slice() {
        ["divvy", format, _, mig] => format!("divvy {format} {mig}"),
        _ => text.into_owned(),
    }
}
