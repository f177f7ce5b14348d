//! The random operations and their probabilities.

use crate::sequence::Rng;
use divvy_sim::Code;
use divvy_sim::control::When;

/// Number of claims that can exist at once.
pub(crate) const CLAIM_SLOTS: usize = 10;
/// GPUs of the node: two with MIG, one without. All can be shared.
pub(crate) const GPUS: &str = "2xH100-SXM5-80GB,1xL4";
/// Number of GPUs in [`GPUS`].
const GPU_COUNT: usize = 3;
/// Number of GPUs with MIG. They come first.
pub(crate) const MIG_GPU_COUNT: usize = 2;

/// One operation of a sequence.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// Prepares the claim. If it does not exist, it is first allocated these devices.
    Prepare { claim: usize, devices: Vec<String> },
    /// Unprepares the claim, if it exists.
    Unprepare { claim: usize },
    /// Prepares or unprepares the claim, depending on its stage, while one of its NVML calls fails once.
    Fault { claim: usize, devices: Vec<String>, call: usize, nth: u64, when: When, code: Code },
    /// Like `Fault`, but one NVML call hangs.
    Hang { claim: usize, devices: Vec<String>, call: usize, when: When, until: HangUntil },
    /// Kills the daemon with SIGKILL and starts it again.
    Kill,
    /// Deletes the claim without an unprepare and kills the daemon.
    Forget { claim: usize },
    /// Reboots the node, perhaps without one of its GPUs.
    Reboot { without: Option<usize> },
    /// Reboots the node; the device nodes of its GPUs appear late.
    RebootWithLateNodes,
    /// Moves the virtual machine to another host with other boards, and back.
    Move,
    /// Resets a GPU, which loses its state.
    Reset { gpu: usize },
    /// Makes a GPU fall off the bus. No event reports a silent loss.
    Lose { gpu: usize, silent: bool },
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
    /// Settles, releases all claims, and settles again.
    ReleaseAll,
}

/// The time at which a hung call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HangUntil {
    /// As soon as the test sees that the call hangs.
    Reached,
    /// After the daemon has answered the kubelet without it.
    Answered,
    /// Never: the daemon is killed.
    Killed,
}

/// Calls of a prepare that can fail or hang: those that change hardware, and one that reads.
pub(crate) const PREPARE_CALLS: [&str; 6] = [
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceSetComputeMode",
    "compute-policy",
];
/// Calls of an unprepare that can fail or hang.
pub(crate) const UNPREPARE_CALLS: [&str; 6] = [
    "nvmlDeviceSetMigMode",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceSetComputeMode",
    "compute-policy",
];

/// Error codes of a failed call. With the first three, the call may have taken effect.
const ERROR_CODES: [Code; 6] = [
    Code::Unknown,
    Code::Timeout,
    Code::OperatingSystem,
    Code::InUse,
    Code::InsufficientResources,
    Code::NoPermission,
];
/// XIDs of programs, which change no state.
const APPLICATION_XIDS: [u64; 4] = [13, 31, 43, 45];
/// XIDs after which a GPU is not usable until it is reset.
pub(crate) const FATAL_XIDS: [u64; 4] = [48, 79, 95, 154];
/// Profiles of an H100, with their possible first slices. The smallest one is drawn more often.
const PROFILES: [(&str, &[u32]); 5] = [
    ("1g10gb-19", &[0, 1, 2, 3, 4, 5, 6]),
    ("1g10gb-19", &[0, 1, 2, 3, 4, 5, 6]),
    ("2g20gb-14", &[0, 2, 4]),
    ("3g40gb-9", &[0, 4]),
    ("7g80gb-0", &[0]),
];

impl Operation {
    /// The name in the summary.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Prepare { .. } => "prepare",
            Self::Unprepare { .. } => "unprepare",
            Self::Fault { .. } => "fault",
            Self::Hang { .. } => "hang",
            Self::Kill => "kill",
            Self::Forget { .. } => "forget",
            Self::Reboot { .. } => "reboot",
            Self::RebootWithLateNodes => "late nodes",
            Self::Move => "move",
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

    /// Draws an operation. Prepare and unprepare are the most frequent ones.
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let claim = rng.below(CLAIM_SLOTS);
        let gpu = rng.below(MIG_GPU_COUNT);
        match rng.below(1000) {
            0..410 => Self::Prepare { claim, devices: random_devices(rng) },
            410..740 => Self::Unprepare { claim },
            740..840 => {
                let (call, when) = (rng.below(PREPARE_CALLS.len()), before_or_after(rng));
                let codes = if when == When::Before { &ERROR_CODES[..] } else { &ERROR_CODES[..3] };
                let nth = *rng.choose(&[1, 1, 2]);
                Self::Fault { claim, devices: random_devices(rng), call, nth, when, code: *rng.choose(codes) }
            }
            840..870 => {
                let until = match rng.below(10) {
                    0..5 => HangUntil::Reached,
                    5 => HangUntil::Answered,
                    _ => HangUntil::Killed,
                };
                let (call, when) = (rng.below(PREPARE_CALLS.len()), before_or_after(rng));
                Self::Hang { claim, devices: random_devices(rng), call, when, until }
            }
            870..885 => Self::Kill,
            885..890 => Self::Forget { claim },
            890..896 => Self::Reboot { without: None },
            896..900 => Self::Reboot { without: Some(gpu) },
            900..910 => Self::Reset { gpu },
            910..914 => Self::Lose { gpu, silent: rng.once_in(3) },
            914..924 => Self::Outage { over: rng.below(3) == 0 },
            924..925 => Self::RebootWithLateNodes,
            925..927 => Self::Move,
            927..935 => Self::Xid { gpu: rng.below(GPU_COUNT), xid: *rng.choose(&APPLICATION_XIDS) },
            935..938 => Self::Xid { gpu: rng.below(GPU_COUNT), xid: *rng.choose(&FATAL_XIDS) },
            938..942 => Self::Drain { over: rng.once_in(3) },
            942..945 => Self::RemoveTool { over: rng.once_in(3) },
            945..996 => Self::Settle,
            _ => Self::ReleaseAll,
        }
    }
}

fn before_or_after(rng: &mut Rng) -> When {
    *rng.choose(&[When::Before, When::After])
}

/// One to three devices. There are few placements, so that claims often conflict.
fn random_devices(rng: &mut Rng) -> Vec<String> {
    let count = [1, 1, 1, 1, 2, 3][rng.below(6)];
    let instance = |rng: &mut Rng| {
        let (profile, starts) = *rng.choose(&PROFILES);
        format!("gpu-{}-mig-{profile}-{}", rng.below(MIG_GPU_COUNT), rng.choose(starts))
    };
    let device = |rng: &mut Rng| match rng.below(18) {
        0 => format!("gpu-{}", rng.below(GPU_COUNT)),
        1..4 => format!("gpu-{}-timeslice", rng.below(GPU_COUNT)),
        4..7 => format!("gpu-{}-mps", rng.below(GPU_COUNT)),
        7..10 => {
            // Earlier versions allocated shares on the device of the whole GPU.
            let device = rng.choose(&["", "-share", "-share"]);
            format!("gpu-{}{device}={}Gi", rng.below(GPU_COUNT), rng.choose(&[3, 9, 12, 20]))
        }
        // Few placements, so that shares often use the same instance.
        10..12 => {
            format!(
                "gpu-{}-mig-1g10gb-19-{}={}Gi",
                rng.below(MIG_GPU_COUNT),
                rng.below(2),
                rng.choose(&[2, 4, 6])
            )
        }
        12 => format!("{}={}Gi", instance(rng), rng.choose(&[1, 8])),
        _ => instance(rng),
    };
    (0..count).map(|_| device(rng)).collect()
}
