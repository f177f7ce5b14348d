//! What can happen, and how it is drawn.

use crate::sequence::Dice;
use divvy_sim::Code;
use divvy_sim::control::When;

/// Names for claims that exist at a time.
pub(crate) const CLAIMS: usize = 10;
/// Two that can be cut, one that cannot; all can be shared.
pub(crate) const GPUS: &str = "2xH100-SXM5-80GB,1xL4";
const ALL: usize = 3;
/// How many of them can be cut; they come first.
pub(crate) const CUT: usize = 2;

/// One thing that happens.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// The claim is allocated those devices, unless it exists, and prepared.
    Prepare { claim: usize, devices: Vec<String> },
    /// The claim is released, if it exists.
    Unprepare { claim: usize },
    /// Prepare or unprepare, whichever is next for the claim, while one of its calls fails once.
    Fault { claim: usize, devices: Vec<String>, call: usize, nth: u64, when: When, code: Code },
    /// The same while one of its calls hangs.
    Hang { claim: usize, devices: Vec<String>, call: usize, when: When, until: Until },
    /// SIGKILL and a new start.
    Kill,
    /// The claim is deleted, its kubelet forgets it, the daemon is killed.
    Forget { claim: usize },
    /// The machine boots, perhaps without one of its GPUs.
    Reboot { without: Option<usize> },
    /// A GPU loses all that was on it.
    Reset { gpu: usize },
    /// A GPU falls off the bus.
    Lose { gpu: usize },
    /// The API server goes away, or comes back.
    Outage { over: bool },
    /// All that went wrong ends, all that waits is asked for again, and the node is looked at.
    Settle,
    /// Nothing is left of anything.
    ReleaseAll,
}

/// How long a call hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// For a moment.
    Noticed,
    /// Until the daemon has answered without it.
    Answered,
    /// Until the daemon is killed.
    Killed,
}

/// The calls by which a prepare changes hardware, and one by which it looks.
pub(crate) const PREPARES: [&str; 6] = [
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceSetComputeMode",
    "compute-policy",
];
/// The same of an unprepare.
pub(crate) const UNPREPARES: [&str; 6] = [
    "nvmlDeviceSetMigMode",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceSetComputeMode",
    "compute-policy",
];

/// Codes of a call that may have had its effect all the same; then those of one that was refused.
const CODES: [Code; 6] = [
    Code::Unknown,
    Code::Timeout,
    Code::OperatingSystem,
    Code::InUse,
    Code::InsufficientResources,
    Code::NoPermission,
];
/// Profiles of an H100 that are used, and where they may start.
const PROFILES: [(&str, &[u32]); 5] = [
    ("1g10gb-19", &[0, 1, 2, 3, 4, 5, 6]),
    ("1g10gb-19", &[0, 1, 2, 3, 4, 5, 6]),
    ("2g20gb-14", &[0, 2, 4]),
    ("3g40gb-9", &[0, 4]),
    ("7g80gb-0", &[0]),
];

impl Operation {
    /// For the summary.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Prepare { .. } => "prepare",
            Self::Unprepare { .. } => "unprepare",
            Self::Fault { .. } => "fault",
            Self::Hang { .. } => "hang",
            Self::Kill => "kill",
            Self::Forget { .. } => "forget",
            Self::Reboot { .. } => "reboot",
            Self::Reset { .. } => "reset",
            Self::Lose { .. } => "lose",
            Self::Outage { .. } => "outage",
            Self::Settle => "settle",
            Self::ReleaseAll => "release all",
        }
    }

    /// One of them, the usual ones often.
    pub(crate) fn draw(dice: &mut Dice) -> Self {
        let claim = dice.below(CLAIMS);
        let gpu = dice.below(CUT);
        match dice.below(1000) {
            0..410 => Self::Prepare { claim, devices: devices(dice) },
            410..740 => Self::Unprepare { claim },
            740..840 => {
                let (call, when) = (dice.below(PREPARES.len()), side(dice));
                let codes = if when == When::Before { &CODES[..] } else { &CODES[..3] };
                let nth = *dice.of(&[1, 1, 2]);
                Self::Fault { claim, devices: devices(dice), call, nth, when, code: *dice.of(codes) }
            }
            840..870 => {
                let until = match dice.below(10) {
                    0..5 => Until::Noticed,
                    5 => Until::Answered,
                    _ => Until::Killed,
                };
                let (call, when) = (dice.below(PREPARES.len()), side(dice));
                Self::Hang { claim, devices: devices(dice), call, when, until }
            }
            870..885 => Self::Kill,
            885..890 => Self::Forget { claim },
            890..896 => Self::Reboot { without: None },
            896..900 => Self::Reboot { without: Some(gpu) },
            900..910 => Self::Reset { gpu },
            910..914 => Self::Lose { gpu },
            914..926 => Self::Outage { over: dice.below(3) == 0 },
            926..996 => Self::Settle,
            _ => Self::ReleaseAll,
        }
    }
}

fn side(dice: &mut Dice) -> When {
    *dice.of(&[When::Before, When::After])
}

/// One to three devices; few places, so that claims meet.
fn devices(dice: &mut Dice) -> Vec<String> {
    let count = [1, 1, 1, 1, 2, 3][dice.below(6)];
    let instance = |dice: &mut Dice| {
        let (profile, starts) = *dice.of(&PROFILES);
        format!("gpu-{}-mig-{profile}-{}", dice.below(CUT), dice.of(starts))
    };
    let device = |dice: &mut Dice| match dice.below(18) {
        0 => format!("gpu-{}", dice.below(ALL)),
        1..4 => format!("gpu-{}-timeslice", dice.below(ALL)),
        4..7 => format!("gpu-{}-mps", dice.below(ALL)),
        7..10 => format!("gpu-{}={}Gi", dice.below(ALL), dice.of(&[3, 9, 12, 20])),
        // Few places, so that they meet.
        10..12 => {
            format!("gpu-{}-mig-1g10gb-19-{}={}Gi", dice.below(CUT), dice.below(2), dice.of(&[2, 4, 6]))
        }
        12 => format!("{}={}Gi", instance(dice), dice.of(&[1, 8])),
        _ => instance(dice),
    };
    (0..count).map(|_| device(dice)).collect()
}
