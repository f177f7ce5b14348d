//! The ways in which a GPU is handed out, in the words that device names,
//! attributes, configuration, records and metrics share.
//!
//! The first claim on a GPU decides its mode and the last release ends it, so a
//! mode is a property of what is held, never of a node.

use crate::quantity::Quantity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Bytes that the first context of a process is charged until it has been measured:
/// what CUDA 12 takes on a data centre GPU with lazy loading, roughly.
pub const CONTEXT: u64 = 300 << 20;

/// How a GPU is cut. Two modes never live on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// All of it for one claim: device `gpu-N`.
    Whole,
    /// In MIG instances: devices `gpu-N-mig-...`.
    Mig,
    /// In turns: device `gpu-N-timeslice`.
    Timeslice,
    /// By clients of one MPS control daemon: device `gpu-N-mps`.
    Mps,
}

impl Mode {
    /// All modes, in the order in which they are told.
    pub const ALL: [Self; 4] = [Self::Whole, Self::Mig, Self::Timeslice, Self::Mps];

    /// Whether parts of its devices are had as shares, by memory and compute time.
    pub fn has_shares(self) -> bool {
        matches!(self, Self::Whole | Self::Mig)
    }

    /// As it is written everywhere.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Whole => "whole",
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

/// How long one process runs before the next has its turn. The numbers are those
/// of `nvidia-smi compute-policy --set-timeslice` (open-gpu-kernel-modules,
/// ctrl2080gpu.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Interval {
    #[default]
    Default,
    Short,
    Medium,
    Long,
}

impl Interval {
    /// All of them, as they are written, by number.
    pub const NAMES: &'static [&'static str] = &["Default", "Short", "Medium", "Long"];

    /// The one that is written so.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Default, Self::Short, Self::Medium, Self::Long].into_iter().find(|one| one.as_str() == name)
    }

    /// The argument of `--set-timeslice`, 0 to 3.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// As it is written everywhere.
    pub fn as_str(self) -> &'static str {
        Self::NAMES[usize::from(self.number())]
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// How the pods of one claim share a device that the claim has for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sharing {
    TimeSlicing(Interval),
    Mps(MpsSettings),
}

/// What an MPS control daemon is told. Limits hold per client process and are
/// cooperative: a client may lower them for itself and the server believes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsSettings {
    /// Per cent of the multiprocessors, 1 to 100; none leaves all.
    pub active_thread_percentage: Option<u32>,
    /// Device memory per client process, at least 1Mi; none leaves all.
    pub pinned_memory: Option<Quantity>,
    /// The same for one device: the key is 0, a request's only device, or on a
    /// whole GPU a GPU's UUID. One for a GPU that the claim did not get rests.
    pub pinned_memory_per_device: BTreeMap<String, Quantity>,
    /// Clients of different users at once; none means where the GPU driver can.
    pub multi_user: Option<bool>,
}

/// How the limits of a share are kept and what it may have beyond its guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareSettings {
    pub injection: Injection,
    /// Usage is counted and nothing is refused.
    pub observe_only: bool,
    pub priority: Priority,
    /// Of the compute time that is guaranteed to nobody or not used, 1 to 10,000;
    /// the scale of the kernel's cpu.weight.
    pub weight: u32,
    /// Per cent of the device's compute time at most, 1 to 100.
    pub ceiling: u32,
    /// Per cent of the claimed memory that it may hold, 100 to 1,000.
    pub overcommit: u32,
    /// Sessions of the video encoder and decoder that it may have open at once; none: as many as the GPU driver allows.
    pub encoders: Option<u32>,
    pub decoders: Option<u32>,
    /// The class names a ceiling: up to it a share with a guarantee may have what others leave.
    /// Otherwise its guarantee is its ceiling.
    pub burst: bool,
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
        }
    }
}

/// How the library that keeps the limits comes into a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Injection {
    /// By `/etc/ld.so.preload`.
    #[default]
    Preload,
    /// In the place of the GPU driver's own libraries.
    Shim,
}

impl Injection {
    /// All of them, as they are written.
    pub const NAMES: &'static [&'static str] = &["preload", "shim"];

    /// The one that is written so.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Preload, Self::Shim].into_iter().find(|one| one.as_str() == name)
    }

    /// As it is written everywhere.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preload => "preload",
            Self::Shim => "shim",
        }
    }
}

/// Whose work goes first on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Priority {
    #[default]
    Low,
    /// While it works, Low waits.
    High,
}

impl Priority {
    /// All of them, as they are written.
    pub const NAMES: &'static [&'static str] = &["Low", "High"];

    /// The one that is written so.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "Low" => Some(Self::Low),
            "High" => Some(Self::High),
            _ => None,
        }
    }
}
