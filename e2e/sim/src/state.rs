//! State of the node's GPUs: what the hardware and the driver remember. It is kept in one file that
//! every process reads.
//!
//! The *slot* of a GPU is its position in [`State::gpus`] and never changes. The *index* counts the
//! GPUs that the driver lists, in PCI order. The *minor* names `/dev/nvidia<minor>`. Index and
//! minor are assigned at each boot, so a missing GPU shifts those after it.

pub use crate::catalogue::Placement;
use crate::catalogue::{GpuModel, Model};
use crate::code::Code;
use crate::control::Control;
use serde::{Deserialize, Serialize};

/// Version of the file format. Other versions are refused.
pub const FORMAT: u32 = 1;

/// Maximum length of the event queue. NVML also drops old events that were not fetched.
const MAX_QUEUED_EVENTS: usize = 128;

/// A node with GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub format: u32,
    /// Number of changes of this file.
    pub generation: u64,
    /// Number of boots, from 1.
    pub boot: u64,
    /// Version of the GPU driver, such as `580.95.05`.
    pub driver: String,
    /// CUDA version of the driver, such as `(13, 0)`.
    pub cuda: (u32, u32),
    pub host: Host,
    pub modules: Modules,
    pub gpus: Vec<Gpu>,
    pub events: Events,
    #[serde(default)]
    pub control: Control,
    #[serde(default)]
    pub kernel_log: KernelLog,
    /// Number of times that the module `nvidia` was loaded after the creation.
    #[serde(default)]
    pub module_loads: u64,
    /// The driver's libraries and programs are unmounted, and boots do not load its modules.
    #[serde(default)]
    pub unmounted: bool,
    /// The next boot is on another host, which has other boards.
    #[serde(default)]
    pub migrates: bool,
}

/// Kind of machine; chosen when the simulator is created.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// A virtual machine: it cannot reset a GPU itself.
    pub vm: bool,
    /// Boots without kernel modules and device nodes. `nvidia-modprobe` loads and creates them.
    pub bare: bool,
    /// Device nodes are character devices instead of empty files.
    pub mknod: bool,
    /// A compute instance has a new UUID each time it is created.
    pub fresh_uuids: bool,
    /// Samples report the GPU time of each process. If false, a sample has the sum of all processes
    /// and names one of them, as measured on an H100 with driver 580.159 and time-slicing.
    #[serde(default)]
    pub divides_samples: bool,
    /// If the GPU is in use, SetMigMode returns IN_USE itself. If false, it returns SUCCESS, and the
    /// activation status is IN_USE.
    #[serde(default)]
    pub mig_mode_errors: bool,
    /// Device nodes of GPUs appear one after the other, with this time between two. Without it,
    /// they exist as soon as the driver is loaded.
    #[serde(default)]
    pub node_delay_ms: u64,
    /// Time that a change between processes on a GPU takes, in microseconds; `None` for that of the
    /// GPU model.
    #[serde(default)]
    pub switch_us: Option<u32>,
    pub privilege: Privilege,
}

/// The users that may change GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Privilege {
    /// Root, and the user who created the simulator.
    #[default]
    Owner,
    /// No user, to test how a program handles NO_PERMISSION.
    Nobody,
}

/// The kernel modules that are loaded. Their device nodes exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Modules {
    /// `nvidia`. Without it, NVML returns DRIVER_NOT_LOADED.
    pub nvidia: bool,
    pub uvm: bool,
    pub modeset: bool,
}

/// One GPU board.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// Model in the catalogue, stored by name.
    pub model: Model,
    pub uuid: String,
    pub serial: String,
    /// Device id of the board. UUIDs derive from it.
    pub pdi: u64,
    /// `/dev/nvidia<minor>` in this boot.
    pub minor: u32,
    /// Whether that device node exists.
    pub node: bool,
    /// PCI address as in sysfs, `0000:0a:00.0`.
    pub bdf: String,
    /// PCIe root, such as `pci0000:07`.
    pub pcie_root: String,
    /// PCI addresses of the bridges between the root and the GPU.
    pub bridges: Vec<String>,
    pub numa: Option<u32>,
    /// NVML's module id, from 1.
    pub module: u32,
    /// When that device node appears, in ms since the Unix epoch; none if it is not on its way.
    #[serde(default, skip_serializing_if = "is_default")]
    pub node_due_ms: Option<u64>,
    /// The GPU does not respond: every call on it fails with [`Gpu::failure`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub lost: bool,
    /// How it was lost. Has no effect unless `lost`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub loss: Loss,
    /// The GPU was not found at boot: the driver does not list it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub missing: bool,
    /// The GPU will not be found at the next boot.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dead: bool,
    /// Number of boots and resets, which invalidate earlier observations.
    pub epoch: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    pub mig: MigMode,
    /// `nvmlComputeMode_t`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub compute_mode: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub persistence: bool,
    /// Time slice level of `nvidia-smi compute-policy --set-timeslice`: 0 default, 1 short, 2
    /// medium, 3 long.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeslice: u32,
    /// GPU instances, by id.
    #[serde(default, skip_serializing_if = "is_default")]
    pub instances: Vec<Gi>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub processes: Vec<Process>,
    /// Clients without a CUDA context, such as monitoring agents and X servers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub holders: Vec<Holder>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub health: Health,
    /// Memory limits of cgroups. A limit ends with its cgroup.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: Vec<CgroupLimit>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub energy: Energy,
}

/// How a GPU was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Loss {
    /// No event reports the loss, and event waits do not fail.
    pub silent: bool,
    /// The answer of calls, if not GPU_IS_LOST.
    pub code: Option<Code>,
}

/// Energy that a GPU has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Energy {
    /// Millijoules until `until_ns`.
    pub mj: u64,
    /// Monotonic time, in ns.
    pub until_ns: u64,
}

/// Position in the kernel log, and the lines that are not in the file yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KernelLog {
    /// Sequence number of the next record.
    pub next: u64,
    #[serde(skip)]
    pub(crate) lines: Vec<String>,
    #[serde(skip)]
    pub(crate) restarts: bool,
}

/// Memory limit of a cgroup on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupLimit {
    /// Path of the cgroup's directory, as seen by the process that set the limit.
    pub path: String,
    /// Device, inode and creation time (ns) of the directory. The limit does not apply to a later
    /// directory with the same path.
    pub directory: (u64, u64, u64),
    /// Unique number of the limit. It stays the same when the limit is changed.
    pub number: u64,
    /// Path of the cgroup in its hierarchy; none for a plain directory that stands in for a cgroup.
    #[serde(default, skip_serializing_if = "is_default")]
    pub name: Option<String>,
    /// Kernel ids of the cgroup and of those below it when the limit was set.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ids: Vec<u64>,
    /// Guaranteed memory in bytes.
    pub soft: u64,
    /// Maximum memory in bytes.
    pub hard: u64,
}

/// MIG mode of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigMode {
    pub current: bool,
    pub pending: bool,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gi {
    /// Derived from the placement, so that a recreated instance has the same id.
    pub id: u32,
    /// Profile id, not index.
    pub profile: u32,
    pub placement: Placement,
    /// Generation in which it was created. Distinguishes a stale handle from a reused id.
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
    /// UUID of the MIG device, `MIG-...`.
    pub uuid: String,
    pub born: u64,
}

/// A process with a context on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub name: String,
    pub kind: ProcessKind,
    /// GPU instance and compute instance ids; absent on a GPU without MIG.
    #[serde(default, skip_serializing_if = "is_default")]
    pub instance: Option<(u32, u32)>,
    pub memory_mib: u64,
}

/// The process list of NVML that has the process.
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

/// Error counters and health flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Health {
    /// ECC errors since the last reset.
    pub ecc_corrected: u64,
    pub ecc_uncorrected: u64,
    /// ECC errors over the lifetime of the board.
    pub ecc_corrected_total: u64,
    pub ecc_uncorrected_total: u64,
    pub rows_remapped_corrected: u32,
    pub rows_remapped_uncorrected: u32,
    pub remap_pending: bool,
    pub remap_failed: bool,
    /// SRAM has had more uncorrected errors than its threshold.
    pub sram_threshold_exceeded: bool,
    /// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
    pub recovery_action: u32,
}

/// The event queue, shared by all processes. Each reader remembers the last number that it has
/// seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Number of the newest event.
    pub last: u64,
    pub queue: Vec<Event>,
}

/// An event that the driver delivers to the processes that registered for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub seq: u64,
    /// Slot of the GPU.
    pub slot: usize,
    pub kind: EventKind,
    /// GPU instance and compute instance ids that the event is attributed to.
    #[serde(default, skip_serializing_if = "is_default")]
    pub instance: Option<(u32, u32)>,
}

/// The kind of event, with NVML's `eventData`.
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
    /// The GPUs that the driver lists, in index order, with their slots.
    pub fn listed(&self) -> impl Iterator<Item = (usize, &Gpu)> {
        self.gpus.iter().enumerate().filter(|(_, gpu)| !gpu.missing)
    }

    /// The slot of the GPU with an index.
    pub fn slot_of_index(&self, index: usize) -> Option<usize> {
        self.listed().nth(index).map(|(slot, _)| slot)
    }

    /// The index of the GPU in a slot; none if the GPU is missing.
    pub fn index_of_slot(&self, slot: usize) -> Option<usize> {
        self.listed().position(|(other, _)| other == slot)
    }

    /// Appends an event.
    pub fn push_event(&mut self, slot: usize, kind: EventKind, instance: Option<(u32, u32)>) {
        self.events.last += 1;
        if self.events.queue.len() >= MAX_QUEUED_EVENTS {
            self.events.queue.remove(0);
        }
        self.events.queue.push(Event { seq: self.events.last, slot, kind, instance });
    }

    /// The next time at which a device node appears, in ms since the Unix epoch.
    pub fn next_node_ms(&self) -> Option<u64> {
        self.gpus.iter().filter_map(|gpu| gpu.node_due_ms).min()
    }

    /// Assigns minors to the GPUs that are present, as the driver does when it loads.
    pub(crate) fn assign_minors(&mut self) {
        let present = self.gpus.iter_mut().filter(|gpu| !gpu.missing);
        for (gpu, minor) in present.zip(0..) {
            gpu.minor = minor;
        }
    }
}

impl Gpu {
    /// The catalogue's properties of the model.
    pub fn model(&self) -> &'static GpuModel {
        self.model.row()
    }

    /// Version of the video BIOS.
    pub fn vbios(&self) -> String {
        format!("{:02X}.00.5E.00.01", 0x80 + self.model().architecture as u32 * 2)
    }

    /// Interrupt number.
    pub const fn irq(&self) -> u32 {
        64 + self.minor
    }

    /// The answer of calls on the GPU if it does not respond.
    pub fn failure(&self) -> Option<Code> {
        self.lost.then(|| self.loss.code.unwrap_or(Code::GpuIsLost))
    }

    /// The GPU instance with that id.
    pub fn gi(&self, id: u32) -> Option<&Gi> {
        self.instances.iter().find(|gi| gi.id == id)
    }

    /// The GPU instance with that id, for changes.
    pub fn gi_mut(&mut self, id: u32) -> Option<&mut Gi> {
        self.instances.iter_mut().find(|gi| gi.id == id)
    }

    /// MIG devices in NVML's order: by GPU instance id, then by compute instance id.
    pub fn mig_devices(&self) -> impl Iterator<Item = (&Gi, &Ci)> {
        self.instances.iter().flat_map(|gi| gi.cis.iter().map(move |ci| (gi, ci)))
    }

    /// MiB that processes have allocated in one GPU instance or on the whole GPU.
    pub fn used_mib(&self, gi: Option<u32>) -> u64 {
        self.processes
            .iter()
            .filter(|process| gi.is_none() || process.instance.map(|(id, _)| id) == gi)
            .map(|process| process.memory_mib)
            .sum()
    }
}

impl Gi {
    /// The compute instance with that id.
    pub fn ci(&self, id: u32) -> Option<&Ci> {
        self.cis.iter().find(|ci| ci.id == id)
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
