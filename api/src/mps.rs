//! The files through which the node daemon and the keeper of MPS control
//! daemons speak: one directory per daemon, one writer per file.
//!
//! ```text
//! <run dir>/mps/<target>/desired.json   what is wanted     written by divvy-node
//! <run dir>/mps/<target>/actual.json    what there is      written by divvy-keeper
//! <run dir>/mps/<target>/{pipe,log}/    the daemon's own directories
//! <run dir>/mps/<target>/shm/           mounted over /dev/shm in the daemon and its clients
//! ```
//!
//! The run directory (`/run/divvy`) lies in memory, as the daemons do: a reboot
//! takes both, and the node daemon asks anew for what its records promise.
//!
//! `<target>` is the GPU's UUID, or `<UUID>-<profile id>-<start>` for a MIG
//! instance. Both files are replaced by rename, so a reader sees one version or
//! the other; a reader is woken by inotify on the directory, never by a poll. A
//! directory without `desired.json` is one whose daemon is to end; when it has
//! ended, the keeper removes the directory. Both files carry [`FORMAT`], fields
//! that are not known are ignored.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What both sides of this build write and the newest they read.
pub const FORMAT: u32 = 1;
/// Directory below the run directory.
pub const DIRECTORY: &str = "mps";
/// File of [`Desired`].
pub const DESIRED: &str = "desired.json";
/// File of [`Actual`].
pub const ACTUAL: &str = "actual.json";
/// Where the pipe directory is mounted in a container.
pub const CONTAINER_PIPE: &str = "/tmp/nvidia-mps";

/// A daemon that is wanted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Desired {
    pub format: u32,
    /// `CUDA_VISIBLE_DEVICES` of the daemon: one GPU or MIG UUID.
    pub device: String,
    /// `set_default_active_thread_percentage`, 1 to 100; none leaves the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread_percentage: Option<u32>,
    /// `set_default_device_pinned_mem_limit 0 <n>M`, MiB; none leaves all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Clients of different users at once; none means where the daemon can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multi_user: Option<bool>,
}

/// A daemon as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Actual {
    pub format: u32,
    pub phase: Phase,
    /// The settings that are in force, so that a waiter knows its wish is met.
    pub desired: Desired,
    /// Which start of the daemon this is; counts up. Clients of an earlier start
    /// are lost: their containers must restart.
    pub incarnation: u64,
    /// Process id and start time (field 22 of /proc/<pid>/stat) of the control daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
    /// Whether clients of different users are served at once.
    #[serde(default)]
    pub multi_user: bool,
}

/// A process that is not mistaken for another that got its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    pub pid: u32,
    pub start_time: u64,
}

/// How a daemon is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum Phase {
    Starting,
    /// Answers on its pipe, with the settings in force.
    Ready,
    /// A server of it is in FAULT: its clients are dead, new ones may be refused.
    Fault {
        cause: String,
    },
    /// It could not be started or does not answer; it is tried again.
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
