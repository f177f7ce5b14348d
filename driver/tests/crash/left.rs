//! What the driver leaves on a node, to be compared.

use crate::harness::World;
use std::collections::BTreeMap;
use std::path::Path;

/// The GPUs, and every file below the state, CDI and run directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    gpus: Vec<String>,
    files: BTreeMap<String, String>,
}

impl Left {
    /// As it is now.
    pub(crate) fn on(world: &World) -> Self {
        let mut files = BTreeMap::new();
        read(&world.state_dir(), "state", &mut files);
        read(&world.cdi_dir(), "cdi", &mut files);
        read(&world.run_dir(), "run", &mut files);
        // Whoever audits shares has them; see `Walker::start`.
        files.retain(|name, _| !name.starts_with("run/agent-"));
        let state = world.sim.read().unwrap();
        Self { gpus: state.gpus.iter().map(gpu).collect(), files }
    }

    /// Names what differs, for a person.
    pub(crate) fn differs(&self, wanted: &Self) -> String {
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

/// MIG mode and instances, by everything that a container could tell them by,
/// then what is set for processes that share the GPU.
fn gpu(gpu: &divvy_sim::state::Gpu) -> String {
    let mut text = String::from(if gpu.mig.current { "mig" } else { "off" });
    for gi in &gpu.instances {
        text += &format!(" {}:{}@{}", gi.id, gi.profile, gi.placement);
        for ci in &gi.cis {
            text += &format!(" ({}:{}@{} {})", ci.id, ci.profile, ci.placement, ci.uuid);
        }
    }
    text + &format!(" slice {} mode {}", gpu.timeslice, gpu.compute_mode)
}

fn read(dir: &Path, name: &str, files: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = format!("{name}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            read(&entry.path(), &name, files);
        } else if let Ok(bytes) = std::fs::read(entry.path()) {
            files.insert(name, plain(&bytes));
        }
    }
}

/// A page is longer than all else, and no text.
const PAGE: usize = 4096;

/// The content, less the generation of a GPU's file: it counts changes; of a page its checksum.
fn plain(bytes: &[u8]) -> String {
    if bytes.len() >= PAGE && bytes.starts_with(b"divvy") {
        return format!("{} bytes, {:08x}", bytes.len(), crc32fast::hash(bytes));
    }
    let text = String::from_utf8_lossy(bytes);
    match text.split(' ').collect::<Vec<_>>().as_slice() {
        ["divvy", format, _, mig] => format!("divvy {format} {mig}"),
        _ => text.into_owned(),
    }
}
