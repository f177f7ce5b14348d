//! Arguments of the command line.

use crate::catalogue::{self, Model};
use crate::code::Code;
use crate::state::ProcessKind;
use clap::{Parser, Subcommand, ValueEnum};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Simulated NVIDIA GPUs: a driver root with libnvidia-ml, nvidia-smi, /proc, /sys and /dev. All
/// processes share one state, which survives them.
///
/// Create a simulator with `divvy-sim up --gpus 8xH100-SXM5-80GB,2xL4 DIR` and point a driver's
/// roots at it: driver root and dev root DIR, proc root DIR/proc, sys root DIR/sys. The other
/// commands show the GPUs and inject faults. `rm -r DIR` removes the simulator.
///
/// The rules (latency, fault, hold) apply to calls. A call is a function of NVML, or one of these:
/// `compute-policy` (nvidia-smi reads or sets the time slice), `mps-control` (the MPS control
/// daemon handles a command or a client; a fault makes it exit), `mps-server` (an MPS server
/// executes work of a client), `mps-control-start` and `mps-server-start`. A fault puts an MPS
/// server in the FAULT state; GPU_IS_LOST makes it exit.
#[derive(Debug, Parser)]
#[command(name = "divvy-sim", version)]
pub(super) struct Args {
    /// Directory of the simulator, as given to `up`
    #[arg(short = 'C', long, global = true, value_name = "DIR", env = "DIVVY_SIM")]
    pub(super) root: Option<PathBuf>,
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Create a simulator
    Up(Up),
    /// Draw the GPUs with their instances and holders
    Show {
        /// Print the whole state as JSON
        #[arg(long)]
        json: bool,
    },
    /// Queue an XID event, and log it in the kernel log, run/divvy-sim/kmsg
    Xid {
        gpu: GpuArg,
        xid: u64,
        /// Attribute the event to a compute instance, GI/CI
        #[arg(long, value_name = "GI/CI", value_parser = instance)]
        instance: Option<(u32, u32)>,
    },
    /// Set the recovery action that NVML reports, queue its event and log XID 154: 0 none, 1 reset,
    /// 2 reboot, 3 drain, 4 drain and reset
    Recovery { gpu: GpuArg, action: u32 },
    /// Set health values that NVML reports. Values that are not given stay as they are
    Health(Health),
    /// Make a GPU fall off the bus: its calls return GPU_IS_LOST, and after a reboot it is missing
    Lose {
        gpu: GpuArg,
        /// The next boot finds it again
        #[arg(long)]
        comes_back: bool,
        /// Queue no event, and let event waits time out
        #[arg(long)]
        silent: bool,
        /// Return this code from all calls, such as UNKNOWN or IRQ_ISSUE. A GPU with RESET_REQUIRED
        /// is restored by `reset`, and the next boot finds it
        #[arg(long, default_value = "GPU_IS_LOST")]
        code: Code,
    },
    /// Restore a lost GPU. A GPU that was missing at boot is restored at the next boot
    Find { gpu: GpuArg },
    /// Add a GPU to the running node
    Plug {
        #[arg(value_parser = model)]
        model: Model,
    },
    /// Take a GPU out of the running node, even if processes use it
    Unplug { gpu: GpuArg },
    /// Replace a GPU by a new board of its model, with another UUID, at the same bus address
    Replace { gpu: GpuArg },
    /// Move the virtual machine to another host: at the next reboot, all GPUs have other UUIDs
    Migrate,
    /// Reset a GPU: removes its instances and makes a pending MIG mode current
    Reset {
        gpu: GpuArg,
        /// Reset even if processes use the GPU
        #[arg(long)]
        force: bool,
    },
    /// Reboot the node: removes instances, processes and settings, and assigns new minors
    Reboot,
    /// Upgrade the GPU driver at once; or do its steps as the GPU operator does: `driver unload`,
    /// which fails while a process has NVML or CUDA initialised, and `driver load VERSION`
    Driver {
        #[arg(value_name = "VERSION|unload|load")]
        step: String,
        /// Version to load
        #[arg(required_if_eq("step", "load"))]
        version: Option<String>,
    },
    /// Add and remove processes, which make GPUs and instances IN_USE
    Process {
        #[command(subcommand)]
        command: ProcessCommand,
    },
    /// Delay calls; 0 removes the delay
    Latency {
        /// An NVML function or another call (see `divvy-sim help`), or a prefix and `*`
        call: String,
        ms: u64,
        /// Run only one such call at a time on the whole node
        #[arg(long)]
        global_lock: bool,
        /// Apply only to this GPU
        #[arg(long)]
        gpu: Option<GpuArg>,
    },
    /// Make calls fail
    Fault {
        /// An NVML function or another call (see `divvy-sim help`), or a prefix and `*`
        #[arg(required_unless_present = "clear")]
        call: Option<String>,
        /// NVML return code: a name such as IN_USE, or a number
        #[arg(required_unless_present = "clear")]
        code: Option<Code>,
        /// Apply only to the N-th call from now
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        nth: Option<u64>,
        /// Fail after the effect: only the answer is replaced
        #[arg(long)]
        after: bool,
        /// Apply only to this GPU
        #[arg(long)]
        gpu: Option<GpuArg>,
        /// Remove the faults of that call, or all
        #[arg(long, conflicts_with_all = ["code", "nth", "after", "gpu"])]
        clear: bool,
    },
    /// Block calls before or after their effect, until `release`
    Hold {
        /// An NVML function or another call (see `divvy-sim help`), or a prefix and `*`
        call: String,
        #[command(flatten)]
        side: Side,
        /// Apply only to the N-th call from now
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        nth: Option<u64>,
        /// Apply only to this GPU
        #[arg(long)]
        gpu: Option<GpuArg>,
    },
    /// Print the calls that are blocked now, one JSON line each
    Held {
        /// Wait until a call is blocked, for at most this time
        #[arg(long, value_name = "SECONDS")]
        wait: Option<u64>,
    },
    /// Release the calls that are blocked by that name, or all
    Release { call: Option<String> },
    /// Print the traced calls, one JSON line each, or switch the trace
    Trace { toggle: Option<Toggle> },
    /// Simulate a CUDA process: a client of MPS if a control daemon uses the pipe directory, else a
    /// process on the GPU or MIG device that it sees. Prints a JSON line once it runs
    Client(Client),
    /// List the GPU models with their MIG profiles
    Catalogue,
}

#[derive(Debug, clap::Args)]
pub(super) struct Up {
    /// Counts and models of the GPUs, see `divvy-sim catalogue`
    #[arg(long, value_name = "LIST", default_value = "8xH100-SXM5-80GB")]
    pub(super) gpus: String,
    /// The driver root to create
    pub(super) dir: PathBuf,
    /// Version of the GPU driver
    #[arg(long, default_value = "580.95.05")]
    pub(super) driver: String,
    /// CUDA version of the driver
    #[arg(long, default_value = "13.0", value_parser = cuda_version)]
    pub(super) cuda: (u32, u32),
    /// Seed of the GPUs' ids; nodes with different seeds have different GPUs
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
    /// Number of NUMA nodes; 0 for a machine that does not report them
    #[arg(long, default_value_t = 2)]
    pub(super) numa_nodes: u32,
    /// Simulate a virtual machine, which cannot reset its GPUs
    #[arg(long)]
    pub(super) vm: bool,
    /// Boot without kernel modules and device nodes, which nvidia-modprobe then has to load and
    /// create
    #[arg(long)]
    pub(super) no_nodes: bool,
    /// If a GPU is in use, let SetMigMode return IN_USE itself instead of as activation status
    #[arg(long)]
    pub(super) mig_mode_errors: bool,
    /// Create the GPUs' device nodes one after the other, with this time before each, after a boot
    /// or the load of the kernel module
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub(super) node_delay: u64,
    /// Create real character devices (root only) instead of empty files
    #[arg(long)]
    pub(super) mknod: bool,
    /// Give a compute instance a new UUID each time it is created
    #[arg(long)]
    pub(super) fresh_uuids: bool,
    /// Report the GPU time of each process in each sample. Without this, a sample has the sum of
    /// all processes and names one of them, as on an H100
    #[arg(long)]
    pub(super) divides_samples: bool,
    /// Time that a change between processes on a GPU takes, in microseconds, in place of the
    /// model's
    #[arg(long, value_name = "US")]
    pub(super) switch_cost: Option<u32>,
    /// Return NO_PERMISSION for every change, even by root
    #[arg(long)]
    pub(super) unprivileged: bool,
    /// The simulated libnvidia-ml, if it is not beside this program
    #[arg(long, value_name = "FILE")]
    pub(super) library: Option<PathBuf>,
    /// The program to install as nvidia-smi and nvidia-modprobe, if not this one
    #[arg(long, value_name = "FILE")]
    pub(super) program: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(super) struct Health {
    pub(super) gpu: GpuArg,
    /// Corrected ECC errors since the last reset
    #[arg(long, value_name = "N")]
    pub(super) ecc_corrected: Option<u64>,
    /// Uncorrected ECC errors since the last reset
    #[arg(long, value_name = "N")]
    pub(super) ecc_uncorrected: Option<u64>,
    /// Rows that were remapped for corrected errors
    #[arg(long, value_name = "N")]
    pub(super) rows_corrected: Option<u32>,
    /// Rows that were remapped for uncorrected errors
    #[arg(long, value_name = "N")]
    pub(super) rows_uncorrected: Option<u32>,
    /// Whether the next reset remaps a row
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(super) remap_pending: Option<bool>,
    /// Whether a row could not be remapped
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(super) remap_failed: Option<bool>,
    /// Whether SRAM has had more uncorrected errors than its threshold
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(super) sram_threshold_exceeded: Option<bool>,
    /// Recovery action, see `recovery`
    #[arg(long, value_name = "N")]
    pub(super) recovery_action: Option<u32>,
    /// Also queue the events of values that got worse: ECC errors, XIDs 48, 63 and 64, and the
    /// recovery action
    #[arg(long)]
    pub(super) events: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct Client {
    /// Pipe directory of the control daemon [default: $CUDA_MPS_PIPE_DIRECTORY, else /tmp/nvidia-mps]
    #[arg(long, value_name = "DIR")]
    pub(super) pipe: Option<PathBuf>,
    /// User id to report to the control daemon [default: its own]
    #[arg(long)]
    pub(super) uid: Option<u32>,
    #[arg(long, default_value = "python3")]
    pub(super) name: String,
    /// Memory to allocate, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    pub(super) memory: u64,
    /// GPU or MIG UUID, or index; without MPS only [default: the first of $CUDA_VISIBLE_DEVICES,
    /// else the first visible device]
    #[arg(long)]
    pub(super) device: Option<String>,
    /// Keep running after a fatal error
    #[arg(long)]
    pub(super) stubborn: bool,
    /// Exit after this time [default: never]
    #[arg(long = "for", value_name = "SECONDS")]
    pub(super) seconds: Option<f64>,
}

#[derive(Debug, Subcommand)]
pub(super) enum ProcessCommand {
    /// Add a process on a GPU or in one of its compute instances
    Add {
        gpu: GpuArg,
        pid: u32,
        #[arg(long, default_value = "python3")]
        name: String,
        /// GPU instance and compute instance; required if MIG is enabled
        #[arg(long, value_name = "GI/CI", value_parser = instance)]
        instance: Option<(u32, u32)>,
        /// Memory that it has allocated, in MiB
        #[arg(long, value_name = "MIB", default_value_t = 512)]
        memory: u64,
        #[arg(long, value_enum, default_value_t = Kind::Compute)]
        kind: Kind,
    },
    /// Add a client, such as a monitoring agent, that holds a GPU or one of its GPU instances
    Hold {
        gpu: GpuArg,
        pid: u32,
        #[arg(long, default_value = "nv-hostengine")]
        name: String,
        #[arg(long)]
        gi: Option<u32>,
    },
    /// Remove a process, from that GPU or from all
    Remove {
        pid: u32,
        #[arg(long)]
        gpu: Option<GpuArg>,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Kind {
    Compute,
    Graphics,
    Mps,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Toggle {
    On,
    Off,
    Clear,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub(super) struct Side {
    /// Block before the effect
    #[arg(long)]
    pub(super) before: bool,
    /// Block after the effect, before the answer
    #[arg(long)]
    pub(super) after: bool,
}

/// A GPU: its number in `show`, or its UUID.
#[derive(Clone, Debug)]
pub(super) enum GpuArg {
    Slot(usize),
    Uuid(String),
}

impl FromStr for GpuArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("GPU-") {
            return Ok(Self::Uuid(text.to_owned()));
        }
        let number = text.parse().map(Self::Slot);
        number.map_err(|_| "give the GPU by its number in `divvy-sim show` or by its UUID".to_owned())
    }
}

impl fmt::Display for GpuArg {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slot(slot) => slot.fmt(out),
            Self::Uuid(uuid) => uuid.fmt(out),
        }
    }
}

impl Kind {
    pub(super) const fn kind(self) -> ProcessKind {
        match self {
            Self::Compute => ProcessKind::Compute,
            Self::Graphics => ProcessKind::Graphics,
            Self::Mps => ProcessKind::Mps,
        }
    }
}

/// Parses a version such as `13.0`.
fn cuda_version(text: &str) -> Result<(u32, u32), String> {
    let parse = || {
        let (major, minor) = text.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    parse().ok_or_else(|| "the format is MAJOR.MINOR, such as 13.0".to_owned())
}

fn model(text: &str) -> Result<Model, String> {
    catalogue::find(text).map_err(|error| error.to_string())
}

fn instance(text: &str) -> Result<(u32, u32), String> {
    let parse = || {
        let (gi, ci) = text.split_once('/')?;
        Some((gi.parse().ok()?, ci.parse().ok()?))
    };
    parse().ok_or_else(|| "the format is GI/CI, such as 7/0".to_owned())
}
