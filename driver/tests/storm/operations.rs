//! The random operations and their probabilities.

use crate::claim_spec::{ClaimSpec, random_claim_spec};
use crate::sequence::Rng;
use divvy_sim::Code;
use divvy_sim::control::When;

/// Number of claims that can exist at once.
pub(crate) const CLAIM_SLOTS: usize = 14;
/// GPUs of the node: two with MIG mode on demand, two on which MIG mode needs a reset, two without MIG.
pub(crate) const GPUS: &str = "2xH100-SXM5-80GB,2xA30-24GB,1xL4,1xT4";
/// Number of GPUs in [`GPUS`].
pub(crate) const GPU_COUNT: usize = 6;
/// The GPU on which MIG mode is always on.
pub(crate) const MIG_ON_GPU: usize = 2;
/// The GPUs on which MIG mode is always off.
pub(crate) const MIG_OFF_GPUS: [usize; 3] = [3, 4, 5];

/// One operation of a sequence.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// Creates a claim, and prepares it if the scheduler allocates it. A claim that already exists
    /// is prepared again.
    Claim { slot: usize, devices: ClaimSpec },
    /// Like `Claim`, but without the prepare.
    Allocate { slot: usize, devices: ClaimSpec },
    /// Prepares a claim with devices that no scheduler would allocate.
    Misallocate { slot: usize, devices: Vec<MisallocatedDevice> },
    /// Unprepares the next claim from this slot on.
    Unprepare { slot: usize },
    /// Deletes the next claim, so that the scheduler allocates its devices to others while the node
    /// still holds them.
    ForceDelete { slot: usize },
    /// Starts a process that uses a device of the next claim.
    Use { slot: usize },
    /// Prepares or unprepares the claim, depending on its stage, while one of its driver calls fails.
    Fault { slot: usize, devices: ClaimSpec, call: usize, when: When, code: Code },
    /// Like `Fault`, but kills the victim during one of the driver calls.
    KillDuringCall { slot: usize, devices: ClaimSpec, call: usize, when: When, victim: Victim },
    /// Kills the victim with SIGKILL and starts it again.
    Kill { victim: Victim },
    /// Kills an MPS server or control daemon with SIGKILL. The supervisor recovers from it.
    KillMps { which: usize, server: bool },
    /// Changes the node configuration: the interval, and the enabled modes of one GPU.
    Configure { interval: &'static str, gpu: usize, modes: &'static str },
    /// Restarts the kubelet, which deletes the node's slices.
    Kubelet,
    /// Reboots the node.
    Reboot,
    /// Resets a GPU, which loses its state.
    Reset { gpu: usize },
    /// Makes a GPU fall off the bus until the next reboot. No event reports it. A reboot may not find it,
    /// so that the minors of the GPUs after it shift.
    Lose { gpu: usize, reboots: bool },
    /// Reports an XID of a GPU.
    Xid { gpu: usize, xid: u64 },
    /// Closes NVML with SIGUSR1, or opens it again with SIGUSR2.
    Drain { over: bool },
    /// Removes `nvidia-smi`, or restores it.
    RemoveTool { over: bool },
    /// Starts or ends an outage of the API server.
    Outage { over: bool },
    /// Ends all failures, retries pending calls, and compares the node with the model.
    Settle,
    /// Settles, releases all claims, and checks that every GPU can be allocated whole.
    ReleaseAll,
}

/// A device that is allocated against the rules of the scheduler.
#[derive(Clone, Debug)]
pub(crate) struct MisallocatedDevice {
    pub(crate) name: String,
    pub(crate) admin: bool,
}

/// The processes that are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victim {
    Node,
    Supervisor,
    Both,
}

impl Victim {
    pub(crate) fn includes_node(self) -> bool {
        self != Self::Supervisor
    }

    pub(crate) fn includes_supervisor(self) -> bool {
        self != Self::Node
    }
}

/// Error codes of a failed call. With the first two, the call may have taken effect.
const ERROR_CODES: [Code; 5] =
    [Code::Unknown, Code::Timeout, Code::InUse, Code::InsufficientResources, Code::NoPermission];

/// XIDs of programs, which change no state.
const APPLICATION_XIDS: [u64; 4] = [13, 31, 43, 45];
/// XIDs after which a GPU is not usable until it is reset.
pub(crate) const FATAL_XIDS: [u64; 4] = [48, 79, 95, 154];

impl Operation {
    /// The name in the summary.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Claim { .. } => "claim",
            Self::Allocate { .. } => "allocate",
            Self::Misallocate { .. } => "misallocate",
            Self::Unprepare { .. } => "unprepare",
            Self::ForceDelete { .. } => "force delete",
            Self::Use { .. } => "use",
            Self::Fault { .. } => "fault",
            Self::KillDuringCall { .. } => "kill during call",
            Self::Kill { .. } => "kill",
            Self::KillMps { .. } => "kill mps",
            Self::Configure { .. } => "configure",
            Self::Kubelet => "kubelet",
            Self::Reboot => "reboot",
            Self::Reset { .. } => "reset",
            Self::Lose { .. } => "lose",
            Self::Xid { .. } => "xid",
            Self::Drain { .. } => "drain",
            Self::RemoveTool { .. } => "remove tool",
            Self::Outage { .. } => "outage",
            Self::Settle => "settle",
            Self::ReleaseAll => "release all",
        }
    }

    /// Draws an operation. Claims and releases are the most frequent ones.
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let slot = rng.below(CLAIM_SLOTS);
        match rng.below(1000) {
            0..390 => Self::Claim { slot, devices: random_claim_spec(rng) },
            390..410 => Self::Allocate { slot, devices: random_claim_spec(rng) },
            410..490 => Self::Misallocate { slot, devices: random_misallocation(rng) },
            490..660 => Self::Unprepare { slot },
            660..720 => Self::ForceDelete { slot },
            720..800 => Self::Use { slot },
            800..850 => {
                let (call, when) = (rng.below(60), before_or_after(rng));
                let codes = if when == When::Before { &ERROR_CODES[..] } else { &ERROR_CODES[..2] };
                Self::Fault { slot, devices: random_claim_spec(rng), call, when, code: *rng.choose(codes) }
            }
            850..890 => {
                let (call, when) = (rng.below(60), before_or_after(rng));
                Self::KillDuringCall {
                    slot,
                    devices: random_claim_spec(rng),
                    call,
                    when,
                    victim: random_victim(rng),
                }
            }
            890..905 => Self::Kill { victim: random_victim(rng) },
            905..917 => Self::KillMps { which: rng.below(60), server: rng.once_in(2) },
            917..927 => {
                let modes =
                    rng.choose(&["[whole, mig, timeslice, mps]", "[whole]", "[mig, timeslice]", "[mps]"]);
                let interval = rng.choose(&["Short", "Medium", "Long"]);
                Self::Configure { interval, gpu: rng.below(GPU_COUNT), modes }
            }
            927..932 => Self::Reboot,
            932..938 => Self::Reset { gpu: rng.below(GPU_COUNT) },
            938..946 => Self::Outage { over: rng.once_in(3) },
            946..952 => Self::Kubelet,
            952..955 => Self::Lose { gpu: rng.below(GPU_COUNT), reboots: rng.once_in(2) },
            955..961 => Self::Xid { gpu: rng.below(GPU_COUNT), xid: *rng.choose(&APPLICATION_XIDS) },
            961..964 => Self::Xid { gpu: rng.below(GPU_COUNT), xid: *rng.choose(&FATAL_XIDS) },
            964..967 => Self::Drain { over: rng.once_in(3) },
            967..970 => Self::RemoveTool { over: rng.once_in(3) },
            970..997 => Self::Settle,
            _ => Self::ReleaseAll,
        }
    }
}

fn before_or_after(rng: &mut Rng) -> When {
    *rng.choose(&[When::Before, When::After])
}

fn random_victim(rng: &mut Rng) -> Victim {
    *rng.choose(&[Victim::Node, Victim::Supervisor, Victim::Both])
}

/// One or two devices of any mode on any GPU, and sometimes a device that does not exist.
fn random_misallocation(rng: &mut Rng) -> Vec<MisallocatedDevice> {
    let count = if rng.once_in(3) { 2 } else { 1 };
    let device = |rng: &mut Rng| {
        let gpu = rng.below(GPU_COUNT);
        let name = match rng.below(12) {
            0..3 => format!("gpu-{gpu}"),
            3..6 => format!("gpu-{gpu}-timeslice"),
            6..8 => format!("gpu-{gpu}-mps"),
            8..11 if gpu < 2 => format!(
                "gpu-{gpu}-mig-{}",
                rng.choose(&["1g10gb-19-0", "1g10gb-19-6", "2g20gb-14-2", "3g40gb-9-4", "7g80gb-0-0"])
            ),
            8..11 if gpu < 4 => {
                format!("gpu-{gpu}-mig-{}", rng.choose(&["1g6gb-14-0", "2g12gb-5-2", "4g24gb-0-0"]))
            }
            8..11 => format!("gpu-{gpu}-mig-1g10gb-19-0"),
            _ => {
                rng.choose(&["gpu-9", "gpu-0-mig-1g10gb-19-9", "gpu-1-mig-2g20gb-14-1", "disk-0"]).to_string()
            }
        };
        MisallocatedDevice { name, admin: rng.once_in(10) }
    };
    (0..count).map(|_| device(rng)).collect()
}
