//! The words of the command line.

use crate::code::Code;
use crate::state::ProcessKind;
use clap::{Parser, Subcommand, ValueEnum};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Simulated NVIDIA GPUs: a driver root with libnvidia-ml, nvidia-smi, /proc, /sys and /dev
/// over one state that all processes share and that survives them.
///
/// Make one with `divvy-sim up --gpus 8xH100-SXM5-80GB,2xL4 DIR`, point a driver's roots at
/// DIR (driver root and dev root DIR, proc root DIR/proc, sys root DIR/sys), and use the other
/// commands to look at the GPUs and to make them misbehave. The simulator ends with `rm -r DIR`.
///
/// Rules (latency, fault, hold) are about calls. Besides NVML's functions there are: `compute-policy`
/// (nvidia-smi reads or sets the time slice), `mps-control` (the MPS control daemon handles a
/// command or a client; at fault it dies), `mps-server` (an MPS server does a client's work; at fault
/// it goes to FAULT, with GPU_IS_LOST it dies), `mps-control-start` and `mps-server-start`.
#[derive(Debug, Parser)]
#[command(name = "divvy-sim", version)]
pub(super) struct Args {
    /// The directory given to `up`
    #[arg(short = 'C', long, global = true, value_name = "DIR", env = "DIVVY_SIM")]
    pub(super) root: Option<PathBuf>,
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Make GPUs
    Up(Up),
    /// Draw the GPUs: what is cut out of each and who holds it
    Show {
        /// Print the whole state instead
        #[arg(long)]
        json: bool,
    },
    /// Send an XID event
    Xid {
        gpu: GpuArg,
        xid: u64,
        /// Attribute it to a compute instance, GI/CI
        #[arg(long, value_name = "GI/CI", value_parser = instance)]
        instance: Option<(u32, u32)>,
    },
    /// Set the recovery action that NVML reports, with its event: 0 none, 1 reset, 2 reboot,
    /// 3 drain, 4 drain and reset
    Recovery { gpu: GpuArg, action: u32 },
    /// Let a GPU fall off the bus: its calls answer GPU_IS_LOST, and after a reboot it is missing
    Lose {
        gpu: GpuArg,
        /// It is found again at the next boot
        #[arg(long)]
        comes_back: bool,
    },
    /// Bring a lost GPU back; one that was missing at boot is there at the next
    Find { gpu: GpuArg },
    /// Reset a GPU: instances are gone, a pending MIG mode becomes current
    Reset {
        gpu: GpuArg,
        /// Even while processes run on it
        #[arg(long)]
        force: bool,
    },
    /// Reboot the node: instances, processes and settings are gone, minors are dealt anew
    Reboot,
    /// Replace the GPU driver by another version, as an upgrade does
    Driver { version: String },
    /// Let processes use GPUs, so that what they hold is IN_USE
    Process {
        #[command(subcommand)]
        command: ProcessCommand,
    },
    /// Make calls slow; 0 makes them fast again
    Latency {
        /// Name of an NVML function or of another call (see `divvy-sim help`), or its beginning and a `*`
        call: String,
        ms: u64,
        /// One such call at a time on the whole node
        #[arg(long)]
        global_lock: bool,
        /// Only on this GPU
        #[arg(long)]
        gpu: Option<GpuArg>,
    },
    /// Make calls fail
    Fault {
        /// Name of an NVML function or of another call (see `divvy-sim help`), or its beginning and a `*`
        #[arg(required_unless_present = "clear")]
        call: Option<String>,
        /// NVML return code: a name such as IN_USE or a number
        #[arg(required_unless_present = "clear")]
        code: Option<Code>,
        /// Only the N-th call from now
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        nth: Option<u64>,
        /// The call has its effect, only its answer is lost
        #[arg(long)]
        after: bool,
        /// Only on this GPU
        #[arg(long)]
        gpu: Option<GpuArg>,
        /// Take back the faults of that call, or all
        #[arg(long, conflicts_with_all = ["code", "nth", "after", "gpu"])]
        clear: bool,
    },
    /// Make calls block before or after their effect, until `release`
    Hold {
        /// Name of an NVML function or of another call (see `divvy-sim help`), or its beginning and a `*`
        call: String,
        #[command(flatten)]
        side: Side,
        /// Only the N-th call from now
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        nth: Option<u64>,
        /// Only on this GPU
        #[arg(long)]
        gpu: Option<GpuArg>,
    },
    /// Print the calls that are blocked now, a JSON line each
    Held {
        /// Wait until there is one, at most that long
        #[arg(long, value_name = "SECONDS")]
        wait: Option<u64>,
    },
    /// Let blocked calls go on: those held by that name, or all
    Release { call: Option<String> },
    /// Print the calls made while the trace was on, a JSON line each
    Trace { toggle: Option<Toggle> },
    /// Stand in for a CUDA process: a client of MPS where a control daemon is at the pipe directory, else a process on
    /// the GPU or MIG device it sees; says in a JSON line what it has got and stays
    Client(Client),
    /// List the GPU models with their MIG profiles
    Catalogue,
}

#[derive(Debug, clap::Args)]
pub(super) struct Up {
    /// Counts and models, see `divvy-sim catalogue`
    #[arg(long, value_name = "LIST", default_value = "8xH100-SXM5-80GB")]
    pub(super) gpus: String,
    /// The driver root to make
    pub(super) dir: PathBuf,
    /// Version of the GPU driver
    #[arg(long, default_value = "580.95.05")]
    pub(super) driver: String,
    /// Version of CUDA that it speaks
    #[arg(long, default_value = "13.0", value_parser = cuda_version)]
    pub(super) cuda: (u32, u32),
    /// Nodes with different seeds have different GPUs
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
    /// NUMA nodes to spread the GPUs over; 0 for a machine that does not say
    #[arg(long, default_value_t = 2)]
    pub(super) numa_nodes: u32,
    /// A virtual machine: GPUs cannot be reset from inside
    #[arg(long)]
    pub(super) vm: bool,
    /// Start without kernel modules and device nodes: somebody has to run nvidia-modprobe
    #[arg(long)]
    pub(super) no_nodes: bool,
    /// Make real character devices (root only), not empty files
    #[arg(long)]
    pub(super) mknod: bool,
    /// Give a compute instance another UUID each time it is made
    #[arg(long)]
    pub(super) fresh_uuids: bool,
    /// Have each sample of a GPU's time say what each process had, instead of naming one and saying what all had, as
    /// an H100 does
    #[arg(long)]
    pub(super) divides_samples: bool,
    /// Answer NO_PERMISSION to every change, even by root
    #[arg(long)]
    pub(super) unprivileged: bool,
    /// The simulated libnvidia-ml, if it is not beside this program
    #[arg(long, value_name = "FILE")]
    pub(super) library: Option<PathBuf>,
    /// The program that becomes nvidia-smi and nvidia-modprobe, if not this one
    #[arg(long, value_name = "FILE")]
    pub(super) program: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(super) struct Client {
    /// Pipe directory of the control daemon [default: $CUDA_MPS_PIPE_DIRECTORY, else /tmp/nvidia-mps]
    #[arg(long, value_name = "DIR")]
    pub(super) pipe: Option<PathBuf>,
    /// User that it claims to be, to the control daemon [default: its own]
    #[arg(long)]
    pub(super) uid: Option<u32>,
    #[arg(long, default_value = "python3")]
    pub(super) name: String,
    /// MiB that it allocates
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    pub(super) memory: u64,
    /// GPU or MIG UUID, or index, without MPS [default: the first of $CUDA_VISIBLE_DEVICES, else the first it sees]
    #[arg(long)]
    pub(super) device: Option<String>,
    /// Stay connected after a fatal error
    #[arg(long)]
    pub(super) stubborn: bool,
    /// End after that time [default: never]
    #[arg(long = "for", value_name = "SECONDS")]
    pub(super) seconds: Option<f64>,
}

#[derive(Debug, Subcommand)]
pub(super) enum ProcessCommand {
    /// A process starts on a GPU or in one of its compute instances
    Add {
        gpu: GpuArg,
        pid: u32,
        #[arg(long, default_value = "python3")]
        name: String,
        /// GPU instance and compute instance; needed where MIG is on
        #[arg(long, value_name = "GI/CI", value_parser = instance)]
        instance: Option<(u32, u32)>,
        /// MiB that it has allocated
        #[arg(long, value_name = "MIB", default_value_t = 512)]
        memory: u64,
        #[arg(long, value_enum, default_value_t = Kind::Compute)]
        kind: Kind,
    },
    /// A monitoring agent or X server holds a GPU, or one GPU instance of it
    Hold {
        gpu: GpuArg,
        pid: u32,
        #[arg(long, default_value = "nv-hostengine")]
        name: String,
        #[arg(long)]
        gi: Option<u32>,
    },
    /// A process ends, on that GPU or on all
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

/// A GPU: the number that `show` prints, or its UUID.
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
        number.map_err(|_| "a GPU is its number in `divvy-sim show`, or its UUID".to_owned())
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

/// `13.0`.
fn cuda_version(text: &str) -> Result<(u32, u32), String> {
    let parse = || {
        let (major, minor) = text.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    parse().ok_or_else(|| "write major and minor version as 13.0".to_owned())
}

fn instance(text: &str) -> Result<(u32, u32), String> {
    let parse = || {
        let (gi, ci) = text.split_once('/')?;
        Some((gi.parse().ok()?, ci.parse().ok()?))
    };
    parse().ok_or_else(|| "write GPU instance and compute instance as 7/0".to_owned())
}
