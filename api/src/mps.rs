//! The files that the node daemon and the supervisor of MPS control daemons exchange.
//!
//! Each daemon has a directory `<run dir>/mps/<target>`. `divvy-node` writes `desired.json`, and
//! `divvy-mps-supervisor` writes `actual.json`. The directory also holds the daemon's `pipe` and
//! `log`, and `shm`, which is mounted over /dev/shm in the daemon and its clients. `<target>` is
//! the UUID of the GPU, or `<UUID>-<profile id>-<start>` for a MIG instance. Both files are
//! replaced by rename; readers use inotify. Without `desired.json`, the supervisor stops the daemon
//! and removes the directory.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The format that this build writes, and the newest one that it reads. Unknown fields are ignored.
pub const FORMAT: u32 = 1;
/// Directory below the run directory, which is on a tmpfs: a reboot removes it, and the node daemon
/// writes desired states again.
pub const DIRECTORY: &str = "mps";
/// File name of [`Desired`].
pub const DESIRED: &str = "desired.json";
/// File name of [`Actual`].
pub const ACTUAL: &str = "actual.json";
/// Mount point of the pipe directory in a container.
pub const CONTAINER_PIPE: &str = "/tmp/nvidia-mps";

/// The desired state of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Desired {
    pub format: u32,
    /// `CUDA_VISIBLE_DEVICES` of the daemon: one GPU or MIG UUID.
    pub device: String,
    /// `set_default_active_thread_percentage`, 1 to 100; `None` keeps the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread_percentage: Option<u32>,
    /// `set_default_device_pinned_mem_limit 0 <n>M`, in MiB; `None` is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Whether clients of different users may run at once; `None` means if the daemon supports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multi_user: Option<bool>,
}

/// The actual state of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Actual {
    pub format: u32,
    pub phase: Phase,
    /// The settings that are applied. A waiter compares them with its own desired state.
    pub desired: Desired,
    /// The number of this start of the daemon, from 1. Clients of an earlier start are lost: their
    /// containers must restart.
    pub incarnation: u64,
    /// PID and start time (field 22 of /proc/<pid>/stat) of the control daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
    /// Whether clients of different users may run at once.
    #[serde(default)]
    pub multi_user: bool,
}

/// A process, identified even after its PID is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    pub pid: u32,
    pub start_time: u64,
}

/// The phase of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum Phase {
    Starting,
    /// The daemon answers on its pipe, with the settings applied.
    Ready,
    /// A server is in FAULT: its clients have failed, and new ones may be refused.
    Fault {
        cause: String,
    },
    /// The daemon cannot be started or does not answer. The supervisor retries.
    Down {
        cause: String,
    },
}

impl fmt::Display for Phase {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => out.write_str("starting"),
            Self::Ready => out.write_str("ready"),
            Self::Fault { cause } => write!(out, "fault: {cause}"),
            Self::Down { cause } => write!(out, "down: {cause}"),
        }
    }
}
