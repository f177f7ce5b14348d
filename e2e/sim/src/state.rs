//! What the GPUs of the node are like now: the part of the simulator that
//! stands for silicon, kept in one file and read by every process.
//!
//! A GPU's *slot* is its position in [`State::gpus`] and never changes. Its
//! *index* counts the GPUs the driver lists, in PCI order; its *minor* names
//! `/dev/nvidia<minor>`. Both are dealt anew at each boot, so a GPU that is
//! missing shifts those behind it.

use crate::catalogue::{GpuModel, Model};
use crate::control::Control;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The format of the file; another number is refused.
pub const FORMAT: u32 = 1;

/// Events kept; NVML drops what nobody fetched as well.
const EVENTS_KEPT: usize = 128;

/// A node with GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub format: u32,
    /// Counts the changes of this file.
    pub generation: u64,
    /// Counts boots, from 1.
    pub boot: u64,
    /// The GPU driver's version, `580.95.05`.
    pub driver: String,
    /// The CUDA version it speaks, `(13, 0)`.
    pub cuda: (u32, u32),
    pub host: Host,
    pub modules: Modules,
    pub gpus: Vec<Gpu>,
    pub events: Events,
    #[serde(default)]
    pub control: Control,
}

/// What sort of machine it is; chosen at `up`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// A virtual machine: it cannot reset a GPU by itself.
    pub vm: bool,
    /// Boots without kernel modules and device nodes; `nvidia-modprobe` makes them.
    pub bare: bool,
    /// Device nodes are character devices, not empty files.
    pub mknod: bool,
    /// A compute instance gets another UUID each time it is made.
    pub fresh_uuids: bool,
    /// A sample of a GPU's time says what each process had of it. An H100's (driver 580.159), whose processes take turns, says what
    /// all had and names one of them.
    #[serde(default)]
    pub divides_samples: bool,
    pub privilege: Privilege,
}

/// Who may change GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Privilege {
    /// Root, and the user who made the simulator: its root.
    #[default]
    Owner,
    /// Nobody, to see what a program does about NO_PERMISSION.
    Nobody,
}

/// Kernel modules that are loaded, with their device nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Modules {
    /// `nvidia`; while it is not, NVML answers DRIVER_NOT_LOADED.
    pub nvidia: bool,
    pub uvm: bool,
    pub modeset: bool,
}

/// One GPU board.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// The catalogue's row, by its key.
    pub model: Model,
    pub uuid: String,
    pub serial: String,
    /// Device id of this piece of silicon; UUIDs derive from it.
    pub pdi: u64,
    /// `/dev/nvidia<minor>`, of this boot.
    pub minor: u32,
    /// Whether that node exists.
    pub node: bool,
    /// PCI address in sysfs spelling, `0000:0a:00.0`.
    pub bdf: String,
    /// `pci0000:07`.
    pub pcie_root: String,
    /// Addresses of the bridges between root and GPU.
    pub bridges: Vec<String>,
    pub numa: Option<u32>,
    /// NVML's module id, from 1.
    pub module: u32,
    /// Fell off the bus: every call on it answers GPU_IS_LOST.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lost: bool,
    /// Was not found at boot: the driver does not list it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub missing: bool,
    /// Will not be found at the next boot.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dead: bool,
    /// Counts boots and resets: what was learnt before is void.
    pub epoch: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    pub mig: MigMode,
    /// `nvmlComputeMode_t`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub compute_mode: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub persistence: bool,
    /// As `nvidia-smi compute-policy --set-timeslice`: 0 default, 1 short, 2 medium, 3 long.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeslice: u32,
    /// GPU instances, by id.
    #[serde(default, skip_serializing_if = "is_default")]
    pub instances: Vec<Gi>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub processes: Vec<Process>,
    /// Clients without a CUDA context: monitoring agents, X servers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub holders: Vec<Holder>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub health: Health,
    /// Memory limits of cgroups; one ends with its cgroup.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: Vec<CgroupLimit>,
}

/// What the processes of a cgroup may have of a GPU's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupLimit {
    /// Its directory, as whoever set the limit saw it.
    pub path: String,
    /// Device, inode and birth of that directory (nanoseconds): another one of the same name has no limit.
    pub directory: (u64, u64, u64),
    /// Of this limit and of no other that this simulator ever had; kept when it is changed.
    pub number: u64,
    /// What the kernel calls the cgroup; none where a directory plays one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub name: Option<String>,
    /// The kernel's numbers of the cgroup and of those that were below it when the limit was set.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ids: Vec<u64>,
    /// Bytes that are kept for them.
    pub soft: u64,
    /// Bytes that they have at most.
    pub hard: u64,
}

/// MIG mode of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigMode {
    pub current: bool,
    pub pending: bool,
}

/// A run of slices, `start..start + size`: memory slices of the GPU for a GPU
/// instance, compute slices of the GPU instance for a compute instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Placement {
    pub start: u32,
    pub size: u32,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gi {
    /// Derived from the placement, so a re-created instance has it again.
    pub id: u32,
    /// Profile id, not index.
    pub profile: u32,
    pub placement: Placement,
    /// Generation it was made in: tells a stale handle from a re-used id.
    pub born: u64,
    pub cis: Vec<Ci>,
}

/// A compute instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ci {
    pub id: u32,
    /// Profile id; equal to the profile index on every known GPU.
    pub profile: u32,
    pub placement: Placement,
    /// `MIG-...`
    pub uuid: String,
    pub born: u64,
}

/// A process with a context on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub name: String,
    pub kind: ProcessKind,
    /// GPU and compute instance; absent on a GPU without MIG.
    #[serde(default, skip_serializing_if = "is_default")]
    pub instance: Option<(u32, u32)>,
    pub memory_mib: u64,
}

/// Which of NVML's process lists it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessKind {
    Compute,
    Graphics,
    Mps,
}

/// A client that holds a GPU, or one GPU instance of it, without running on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub pid: u32,
    pub name: String,
    #[serde(default, skip_serializing_if = "is_default")]
    pub gi: Option<u32>,
}

/// Counters that tell how ill a GPU is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Health {
    /// ECC errors since the last reset.
    pub ecc_corrected: u64,
    pub ecc_uncorrected: u64,
    /// ECC errors of the board's life.
    pub ecc_corrected_total: u64,
    pub ecc_uncorrected_total: u64,
    pub rows_remapped_corrected: u32,
    pub rows_remapped_uncorrected: u32,
    pub remap_pending: bool,
    pub remap_failed: bool,
    /// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
    pub recovery_action: u32,
}

/// The event queue, shared; a reader remembers the last number it saw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Number of the newest event.
    pub last: u64,
    pub queue: Vec<Event>,
}

/// Something the driver tells whoever registered for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub seq: u64,
    /// Slot of the GPU.
    pub slot: usize,
    pub kind: EventKind,
    /// GPU and compute instance it is attributed to.
    #[serde(default, skip_serializing_if = "is_default")]
    pub instance: Option<(u32, u32)>,
}

/// The sort of event, with NVML's `eventData`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    Xid(u64),
    MigConfigChange,
    SingleBitEcc,
    DoubleBitEcc,
    GpuUnavailable,
    RecoveryAction(u64),
}

impl EventKind {
    /// Bit in `nvmlEventType`.
    pub const fn mask(self) -> u64 {
        match self {
            Self::SingleBitEcc => 0x1,
            Self::DoubleBitEcc => 0x2,
            Self::Xid(_) => 0x8,
            Self::MigConfigChange => 0x100,
            Self::GpuUnavailable => 0x4000,
            Self::RecoveryAction(_) => 0x8000,
        }
    }

    /// `eventData`.
    pub const fn data(self) -> u64 {
        match self {
            Self::Xid(data) | Self::RecoveryAction(data) => data,
            _ => 0,
        }
    }
}

impl State {
    /// The GPUs that the driver lists, with their slots, by index.
    pub fn listed(&self) -> impl Iterator<Item = (usize, &Gpu)> {
        self.gpus.iter().enumerate().filter(|(_, gpu)| !gpu.missing)
    }

    /// The slot of the GPU with that index.
    pub fn slot_of_index(&self, index: usize) -> Option<usize> {
        self.listed().nth(index).map(|(slot, _)| slot)
    }

    /// The index of the GPU in that slot, unless it is missing.
    pub fn index_of_slot(&self, slot: usize) -> Option<usize> {
        self.listed().position(|(other, _)| other == slot)
    }

    /// Appends an event.
    pub fn push_event(&mut self, slot: usize, kind: EventKind, instance: Option<(u32, u32)>) {
        self.events.last += 1;
        if self.events.queue.len() >= EVENTS_KEPT {
            self.events.queue.remove(0);
        }
        self.events.queue.push(Event { seq: self.events.last, slot, kind, instance });
    }

    /// Deals minors to the GPUs that are there, as the driver does when it loads.
    pub(crate) fn deal_minors(&mut self) {
        let present = self.gpus.iter_mut().filter(|gpu| !gpu.missing);
        for (gpu, minor) in present.zip(0..) {
            gpu.minor = minor;
        }
    }
}

impl Gpu {
    /// The catalogue's row.
    pub fn model(&self) -> &'static GpuModel {
        self.model.row()
    }

    /// The GPU instance of that id.
    pub fn gi(&self, id: u32) -> Option<&Gi> {
        self.instances.iter().find(|gi| gi.id == id)
    }

    /// The GPU instance of that id.
    pub fn gi_mut(&mut self, id: u32) -> Option<&mut Gi> {
        self.instances.iter_mut().find(|gi| gi.id == id)
    }

    /// MIG devices in NVML's order: ascending GPU instance, then compute instance.
    pub fn mig_devices(&self) -> impl Iterator<Item = (&Gi, &Ci)> {
        self.instances.iter().flat_map(|gi| gi.cis.iter().map(move |ci| (gi, ci)))
    }

    /// MiB that processes have allocated, of one GPU instance or of the whole GPU.
    pub fn used_mib(&self, gi: Option<u32>) -> u64 {
        self.processes
            .iter()
            .filter(|process| gi.is_none() || process.instance.map(|(id, _)| id) == gi)
            .map(|process| process.memory_mib)
            .sum()
    }
}

impl Gi {
    /// The compute instance of that id.
    pub fn ci(&self, id: u32) -> Option<&Ci> {
        self.cis.iter().find(|ci| ci.id == id)
    }
}

impl Placement {
    /// The slices it covers.
    pub const fn slices(self) -> std::ops::Range<u32> {
        self.start..self.start.saturating_add(self.size)
    }

    /// Whether the two share a slice.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start < other.slices().end && other.start < self.slices().end
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.start, self.size)
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
