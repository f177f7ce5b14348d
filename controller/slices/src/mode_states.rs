//! Decides which modes of the node's GPUs are published ([`ModeStates`], pure), and stores the
//! decisions ([`ModeFile`]) before the slices are written.
//!
//! The rules are in [`divvy_model::closing`]. Stored states count only after they were compared with the
//! server once. A file that is damaged or gone counts as empty; then the devices on the server decide.

use crate::taints;
use divvy_api::sharing::Mode;
use divvy_model::closing::{
    ClosingId, Closings, GpuMode, ModeFacts, ModeSet, ModeState, OnServer, next_state,
};
use divvy_model::inventory::{Gpu, Inventory, Mig};
use divvy_model::removed::gpu_mode;
use divvy_model::{GpuNumber, share};
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tracing::{info, warn};

const VERSION: u32 = 1;

/// Why the states could not be stored.
#[derive(Debug, thiserror::Error)]
#[error("the state of closing modes cannot be written to {path}; check the space of its disk")]
pub(crate) struct StoreError {
    path: PathBuf,
    #[source]
    cause: std::io::Error,
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    /// The greatest ID of a closing so far; a mode that was opened again has lost its own.
    last: ClosingId,
    modes: Vec<(GpuNumber, Mode, ModeState)>,
}

/// The states of all modes of the node's GPUs.
#[derive(Debug, Default)]
pub struct ModeStates {
    states: BTreeMap<GpuMode, ModeState>,
    /// States from before the start that were not compared with the server yet.
    stored: BTreeMap<GpuMode, ModeState>,
    /// The greatest ID so far.
    last: ClosingId,
    /// The modes that are off, with the closings of those that are still published.
    off: ModeSet,
}

impl ModeStates {
    /// Restores stored states.
    ///
    /// # Errors
    /// The bytes are damaged or in an unknown format.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let document: Document = serde_json::from_slice(bytes).map_err(|cause| cause.to_string())?;
        if document.version != VERSION {
            return Err(format!("format {} is not format {VERSION}", document.version));
        }
        let stored = document.modes.into_iter().map(|(gpu, mode, state)| ((gpu, mode), state)).collect();
        Ok(Self { stored, last: document.last, ..Self::default() })
    }

    /// The states as they are stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let all = self.stored.iter().chain(&self.states).map(|((gpu, mode), state)| (*gpu, *mode, *state));
        let document = Document { version: VERSION, last: self.last, modes: all.collect() };
        // Serializing numbers and names to memory cannot fail.
        serde_json::to_vec(&document).unwrap_or_default()
    }

    /// The modes that are off by the last decision.
    pub fn off(&self) -> &ModeSet {
        &self.off
    }

    /// Decides which modes are published. `now` is in seconds since the Unix epoch.
    /// `there` are the slices of the pool.
    pub fn decide<'a>(
        &mut self,
        inventory: &Inventory,
        held: &BTreeSet<String>,
        there: impl Iterator<Item = &'a ResourceSlice>,
        now: u64,
    ) -> Closings {
        let server = on_server(there);
        let facts = Facts::new(inventory, held);
        let new = self.new_id(&server, &inventory.removals.removable, now);
        for gpu in &inventory.gpus {
            for of in modes(gpu) {
                let (before, is_certain) = match self.stored.remove(&of) {
                    Some(stored) => (Some(stored), false),
                    None => (self.states.get(&of).copied(), true),
                };
                let on_server = server.get(&of).copied().unwrap_or(OnServer::Nothing);
                let next = next_state(before, is_certain, &facts.of(gpu, of, on_server), new);
                if next != before {
                    report(of, before, next);
                }
                if next == Some(ModeState::Closing(new)) {
                    self.last = new;
                }
                match next {
                    Some(next) => drop(self.states.insert(of, next)),
                    None => drop(self.states.remove(&of)),
                }
            }
        }
        let is_off = |gpu: &Gpu, (_, mode): &GpuMode| !gpu.policy.offers(*mode);
        let modes = inventory.gpus.iter().flat_map(|gpu| modes(gpu).filter(|of| is_off(gpu, of)));
        self.off = modes.map(|of| (of, closing(self.states.get(&of)))).collect();
        self.off.closings()
    }

    /// Whether the held devices lead to another decision than the last one.
    pub fn would_change(&self, inventory: &Inventory, held: &BTreeSet<String>) -> bool {
        let facts = Facts::new(inventory, held);
        inventory.gpus.iter().any(|gpu| {
            modes(gpu).any(|of| {
                let state = self.states.get(&of).copied();
                let facts = facts.of(gpu, of, OnServer::Nothing);
                !facts.is_offered && next_state(state, true, &facts, ClosingId(u64::MAX)) != state
            })
        })
    }

    /// An ID that is greater than all earlier ones, even if the clock was set back or the file was lost.
    fn new_id(&self, server: &BTreeMap<GpuMode, OnServer>, approved: &ModeSet, now: u64) -> ClosingId {
        let shown = server.values().filter_map(|shown| match shown {
            OnServer::Closing(id) => Some(*id),
            OnServer::Nothing | OnServer::Other => None,
        });
        let last = shown.chain(approved.0.values().copied().flatten()).fold(self.last, ClosingId::max);
        ClosingId(now.max(last.0.saturating_add(1)))
    }
}

/// The file with the states.
#[derive(Debug)]
pub(crate) struct ModeFile {
    /// `None` stores nothing.
    path: Option<PathBuf>,
    /// The content of the file, so that it is written only after a change.
    written: Vec<u8>,
}

impl ModeFile {
    /// Reads the file.
    pub(crate) fn load(path: Option<PathBuf>) -> (Self, ModeStates) {
        let (written, states) = path.as_deref().map(read).unwrap_or_default();
        (Self { path, written }, states)
    }

    /// Stores the states if they changed.
    pub(crate) fn store(&mut self, states: &ModeStates) -> Result<(), StoreError> {
        let Some(path) = &self.path else { return Ok(()) };
        let bytes = states.to_bytes();
        if bytes != self.written {
            write(path, &bytes).map_err(|cause| StoreError { path: path.clone(), cause })?;
            self.written = bytes;
        }
        Ok(())
    }
}

/// The inputs of a decision that are the same for all modes.
struct Facts<'a> {
    inventory: &'a Inventory,
    held: BTreeSet<GpuMode>,
    allocated: BTreeSet<GpuMode>,
}

impl<'a> Facts<'a> {
    fn new(inventory: &'a Inventory, held: &BTreeSet<String>) -> Self {
        let held = held.iter().filter_map(|name| gpu_mode(&name.as_str().into())).collect();
        let allocated = inventory.removals.allocated.iter().filter_map(|entry| entry.gpu_mode()).collect();
        Self { inventory, held, allocated }
    }

    fn of(&self, gpu: &Gpu, of: GpuMode, on_server: OnServer) -> ModeFacts {
        ModeFacts {
            is_offered: gpu.policy.offers(of.1),
            is_held: self.held.contains(&of),
            is_allocated: self.allocated.contains(&of),
            approved: self.inventory.removals.removable.0.get(&of).copied().flatten(),
            on_server,
        }
    }
}

fn closing(state: Option<&ModeState>) -> Option<ClosingId> {
    match state {
        Some(ModeState::Closing(id)) => Some(*id),
        _ => None,
    }
}

/// The modes in which the GPU has devices.
fn modes(gpu: &Gpu) -> impl Iterator<Item = GpuMode> {
    let has = |mode: &Mode| match mode {
        Mode::Whole | Mode::Timeslice => true,
        Mode::Share => share::memory(gpu, None) >> 20 > 0,
        Mode::Mig => matches!(&gpu.mig, Mig::Supported { profiles, .. } if !profiles.is_empty()),
        Mode::Mps => gpu.compute_capability >= crate::modes::MPS_COMPUTE_CAPABILITY_MIN,
    };
    let number = gpu.number;
    Mode::ALL.into_iter().filter(has).map(move |mode| (number, mode))
}

/// The state on the server of each mode that has devices in these slices.
fn on_server<'a>(there: impl Iterator<Item = &'a ResourceSlice>) -> BTreeMap<GpuMode, OnServer> {
    let mut shown = BTreeMap::new();
    for device in there.flat_map(|slice| slice.spec.devices.iter().flatten()) {
        let Some(of) = gpu_mode(&device.name.as_str().into()) else { continue };
        let one = taints::closing_of(device).map_or(OnServer::Other, OnServer::Closing);
        let all = shown.entry(of).or_insert(one);
        if *all != one {
            *all = OnServer::Other;
        }
    }
    shown
}

fn report((gpu, mode): GpuMode, before: Option<ModeState>, next: Option<ModeState>) {
    match (before, next) {
        (_, Some(ModeState::Closing(id))) => {
            info!("mode {mode} of gpu-{gpu} is off; its devices stay published with a taint (closing {id})");
        }
        (_, Some(ModeState::Removed(id))) => {
            info!("mode {mode} of gpu-{gpu} is off; the controller approved the removal of closing {id}");
        }
        (Some(ModeState::Closing(_) | ModeState::Removed(_)), Some(ModeState::Published)) => {
            info!("mode {mode} of gpu-{gpu} is on again");
        }
        _ => {}
    }
}

/// The content of the file and its states. Both are empty if there is no file.
fn read(path: &Path) -> (Vec<u8>, ModeStates) {
    let bytes = match std::fs::read(path) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Default::default(),
        read => read.map_err(|cause| cause.to_string()),
    };
    let states = bytes.and_then(|bytes| Ok((ModeStates::from_bytes(&bytes)?, bytes)));
    match states {
        Ok((states, bytes)) => (bytes, states),
        Err(cause) => {
            warn!(path = %path.display(), cause, "state of closing modes cannot be read; ignored");
            Default::default()
        }
    }
}

/// Replaces the file, without fsync, as records of claims: a killed process keeps what it wrote. After a
/// crash of the node a lost file means that modes look new, and what the server still shows decides.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let temporary = path.with_extension("json.part");
    std::fs::write(&temporary, bytes)?;
    std::fs::rename(&temporary, path)
}
