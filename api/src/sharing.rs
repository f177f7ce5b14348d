//! The modes and settings of sharing a GPU, with the names used in device names, attributes,
//! configuration, records and metrics. The first claim on a GPU determines its mode, and the
//! release of the last one ends it.

use crate::quantity::Quantity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Bytes charged for the first context of a process until the node has measured it. CUDA 12 with
/// lazy loading uses roughly this on a data centre GPU.
pub const CUDA_CONTEXT_BYTES: u64 = 300 << 20;

/// How a GPU is divided. A GPU has one mode at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The whole GPU for one claim: device `gpu-N`.
    Whole,
    /// Shares of the whole GPU, by memory and compute time: device `gpu-N-share`.
    Share,
    /// MIG instances: devices `gpu-N-mig-...`.
    Mig,
    /// Time-slicing: device `gpu-N-timeslice`.
    Timeslice,
    /// Clients of one MPS control daemon: device `gpu-N-mps`.
    Mps,
}

impl Mode {
    /// All modes, in the order of output.
    pub const ALL: [Self; 5] = [Self::Whole, Self::Share, Self::Mig, Self::Timeslice, Self::Mps];

    /// The modes that the node configuration lists. Shares have settings of their own.
    pub const LISTED: [Self; 4] = [Self::Whole, Self::Mig, Self::Timeslice, Self::Mps];

    /// Whether claims can hold shares of its devices, by memory and compute time. MIG instances have
    /// shares only where the node configuration turns them on.
    pub fn has_shares(self) -> bool {
        matches!(self, Self::Share | Self::Mig)
    }

    /// Whether an allocation of its devices may be a share. Earlier versions allocated shares on the device
    /// of the whole GPU.
    pub fn may_hold_shares(self) -> bool {
        self == Self::Whole || self.has_shares()
    }

    /// A device of this mode in words, for messages.
    pub(crate) fn device(self) -> &'static str {
        match self {
            Self::Whole => "a whole GPU",
            Self::Share => "a share",
            Self::Mig => "a MIG instance",
            Self::Timeslice => "a time-slice",
            Self::Mps => "an MPS share",
        }
    }

    /// The name in all output.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Share => "share",
            Self::Mig => "mig",
            Self::Timeslice => "timeslice",
            Self::Mps => "mps",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// The time slice of a process. The numbers are those of `nvidia-smi compute-policy
/// --set-timeslice` (open-gpu-kernel-modules, ctrl2080gpu.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Interval {
    #[default]
    Default,
    Short,
    Medium,
    Long,
}

impl Interval {
    /// The names of all intervals, by number.
    pub const NAMES: &'static [&'static str] = &["Default", "Short", "Medium", "Long"];

    /// The interval with that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Default, Self::Short, Self::Medium, Self::Long].into_iter().find(|one| one.as_str() == name)
    }

    /// The argument of `--set-timeslice`, 0 to 3.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The name in all output.
    pub fn as_str(self) -> &'static str {
        Self::NAMES[usize::from(self.number())]
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// How the pods of one claim share a device that the claim holds exclusively.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sharing {
    TimeSlicing(Interval),
    Mps(MpsSettings),
}

/// Settings of an MPS control daemon. Limits apply per client process. They are cooperative: a
/// client may change its own limit, and the server accepts that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsSettings {
    /// Percent of the SMs, 1 to 100; `None` is all.
    pub active_thread_percentage: Option<u32>,
    /// Device memory per client process, at least 1Mi; `None` is all.
    pub pinned_memory: Option<Quantity>,
    /// The same for one device. The key is 0 for the only device of a request, or the UUID of a
    /// whole GPU. A limit for a GPU that the claim did not get has no effect.
    pub pinned_memory_per_device: BTreeMap<String, Quantity>,
    /// Whether clients of different users may run at once; `None` means if the GPU driver supports
    /// it.
    pub multi_user: Option<bool>,
}

/// How the limits of a share are enforced, and what it may use beyond its guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareSettings {
    pub injection: Injection,
    /// Usage is counted, but nothing is refused.
    pub observe_only: bool,
    pub priority: Priority,
    /// Weight for compute time that is unused or not guaranteed, 1 to 10,000. The scale is that of
    /// the kernel's cpu.weight.
    pub weight: u32,
    /// Most percent of the compute time of the device, 1 to 100.
    pub ceiling: u32,
    /// Percent of the claimed memory that the share may hold, 100 to 1,000.
    pub overcommit: u32,
    /// Most sessions of the video encoder that may be open at once; `None` is no limit but that of
    /// the GPU driver. `decoders` is the same for the decoder.
    pub encoders: Option<u32>,
    pub decoders: Option<u32>,
    /// The class sets a ceiling, so a share with a guarantee may use idle time up to it. Otherwise
    /// its guarantee is its ceiling.
    pub burst: bool,
    /// The library prints one line on the container's stderr when a limit first takes effect.
    pub messages: bool,
}

impl Default for ShareSettings {
    fn default() -> Self {
        Self {
            injection: Injection::Preload,
            observe_only: false,
            priority: Priority::Low,
            weight: 100,
            ceiling: 100,
            overcommit: 100,
            encoders: None,
            decoders: None,
            burst: false,
            messages: true,
        }
    }
}

/// How the library that enforces the limits gets into a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Injection {
    /// By `/etc/ld.so.preload`.
    #[default]
    Preload,
    /// In place of the GPU driver's own libraries.
    Shim,
}

impl Injection {
    /// The names of all values.
    pub const NAMES: &'static [&'static str] = &["preload", "shim"];

    /// The value with that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Preload, Self::Shim].into_iter().find(|one| one.as_str() == name)
    }

    /// The name in all output.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preload => "preload",
            Self::Shim => "shim",
        }
    }
}

/// The priority of a share on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Priority {
    #[default]
    Low,
    /// While it works, shares with priority Low wait.
    High,
}

impl Priority {
    /// The names of all values.
    pub const NAMES: &'static [&'static str] = &["Low", "High"];

    /// The value with that name.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "Low" => Some(Self::Low),
            "High" => Some(Self::High),
            _ => None,
        }
    }
}
