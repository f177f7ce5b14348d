//! What can happen, and how it is drawn.

use crate::sequence::Dice;
use crate::wish::{Wish, wish};
use divvy_sim::Code;
use divvy_sim::control::When;

/// Names for claims that exist at a time.
pub(crate) const CLAIMS: usize = 14;
/// Two that are cut when somebody wants it, two that need a reset for it, two that cannot be cut.
pub(crate) const GPUS: &str = "2xH100-SXM5-80GB,2xA30-24GB,1xL4,1xT4";
pub(crate) const ALL: usize = 6;
/// The one that was reset with MIG mode on.
pub(crate) const MIG_ON: usize = 2;
/// Those on which MIG mode is and stays off.
pub(crate) const MIG_OFF: [usize; 3] = [3, 4, 5];

/// One thing that happens.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// Somebody wants devices: if the scheduler finds them the claim is prepared.
    /// A claim that exists is asked for again.
    Claim { slot: usize, devices: Wish },
    /// As before, but nobody asks the node yet.
    Allocate { slot: usize, devices: Wish },
    /// A claim gets devices that no scheduler would give it, and is prepared.
    Bogus { slot: usize, devices: Vec<Odd> },
    /// The next claim from there on is released.
    Unprepare { slot: usize },
    /// The next claim is deleted, so the scheduler gives its devices to others while
    /// the node still has them.
    Force { slot: usize },
    /// A process uses what the next claim has.
    Use { slot: usize },
    /// Prepare or unprepare, whichever is next for the claim, while one of its calls fails.
    Fault { slot: usize, devices: Wish, call: usize, when: When, code: Code },
    /// The same while somebody is killed in the middle of one of its calls.
    Cut { slot: usize, devices: Wish, call: usize, when: When, who: Who },
    /// SIGKILL and a new start.
    Kill { who: Who },
    /// SIGKILL for a process of MPS; its keeper sees to the rest.
    KillMps { which: usize, server: bool },
    /// The administrator changes intervals and turns modes off on a GPU.
    Configure { interval: &'static str, gpu: usize, modes: &'static str },
    /// The kubelet starts anew: the node's slices are deleted.
    Kubelet,
    /// The machine boots.
    Reboot,
    /// A GPU loses all that was on it.
    Reset { gpu: usize },
    /// The API server goes away, or comes back.
    Outage { over: bool },
    /// All that went wrong ends, all that waits is asked for again, and the node is looked at.
    Settle,
    /// Nothing is left of anything, and every GPU is whole again.
    ReleaseAll,
}

/// A device that is allocated by nobody's rules.
#[derive(Clone, Debug)]
pub(crate) struct Odd {
    pub(crate) name: String,
    pub(crate) admin: bool,
}

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Node,
    Keeper,
    Both,
}

impl Who {
    pub(crate) fn is_node(self) -> bool {
        self != Self::Keeper
    }

    pub(crate) fn is_keeper(self) -> bool {
        self != Self::Node
    }
}

/// Codes of a call that may have had its effect all the same; then those of one that was refused.
const CODES: [Code; 5] =
    [Code::Unknown, Code::Timeout, Code::InUse, Code::InsufficientResources, Code::NoPermission];

impl Operation {
    /// For the summary.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Claim { .. } => "claim",
            Self::Allocate { .. } => "allocate",
            Self::Bogus { .. } => "bogus",
            Self::Unprepare { .. } => "unprepare",
            Self::Force { .. } => "force",
            Self::Use { .. } => "use",
            Self::Fault { .. } => "fault",
            Self::Cut { .. } => "cut",
            Self::Kill { .. } => "kill",
            Self::KillMps { .. } => "kill mps",
            Self::Configure { .. } => "configure",
            Self::Kubelet => "kubelet",
            Self::Reboot => "reboot",
            Self::Reset { .. } => "reset",
            Self::Outage { .. } => "outage",
            Self::Settle => "settle",
            Self::ReleaseAll => "release all",
        }
    }

    /// One of them, the usual ones often.
    pub(crate) fn draw(dice: &mut Dice) -> Self {
        let slot = dice.below(CLAIMS);
        match dice.below(1000) {
            0..390 => Self::Claim { slot, devices: wish(dice) },
            390..410 => Self::Allocate { slot, devices: wish(dice) },
            410..490 => Self::Bogus { slot, devices: odd(dice) },
            490..660 => Self::Unprepare { slot },
            660..720 => Self::Force { slot },
            720..800 => Self::Use { slot },
            800..850 => {
                let (call, when) = (dice.below(60), side(dice));
                let codes = if when == When::Before { &CODES[..] } else { &CODES[..2] };
                Self::Fault { slot, devices: wish(dice), call, when, code: *dice.of(codes) }
            }
            850..890 => {
                let (call, when) = (dice.below(60), side(dice));
                Self::Cut { slot, devices: wish(dice), call, when, who: who(dice) }
            }
            890..905 => Self::Kill { who: who(dice) },
            905..917 => Self::KillMps { which: dice.below(60), server: dice.once_in(2) },
            917..927 => {
                let modes =
                    dice.of(&["[whole, mig, timeslice, mps]", "[whole]", "[mig, timeslice]", "[mps]"]);
                let interval = dice.of(&["Short", "Medium", "Long"]);
                Self::Configure { interval, gpu: dice.below(ALL), modes }
            }
            927..932 => Self::Reboot,
            932..938 => Self::Reset { gpu: dice.below(ALL) },
            938..946 => Self::Outage { over: dice.once_in(3) },
            946..952 => Self::Kubelet,
            952..997 => Self::Settle,
            _ => Self::ReleaseAll,
        }
    }
}

fn side(dice: &mut Dice) -> When {
    *dice.of(&[When::Before, When::After])
}

fn who(dice: &mut Dice) -> Who {
    *dice.of(&[Who::Node, Who::Keeper, Who::Both])
}

/// One or two devices of any mode on any GPU; now and then one that is not there.
fn odd(dice: &mut Dice) -> Vec<Odd> {
    let count = if dice.once_in(3) { 2 } else { 1 };
    let device = |dice: &mut Dice| {
        let gpu = dice.below(ALL);
        let name = match dice.below(12) {
            0..3 => format!("gpu-{gpu}"),
            3..6 => format!("gpu-{gpu}-timeslice"),
            6..8 => format!("gpu-{gpu}-mps"),
            8..11 if gpu < 2 => format!(
                "gpu-{gpu}-mig-{}",
                dice.of(&["1g10gb-19-0", "1g10gb-19-6", "2g20gb-14-2", "3g40gb-9-4", "7g80gb-0-0"])
            ),
            8..11 if gpu < 4 => {
                format!("gpu-{gpu}-mig-{}", dice.of(&["1g6gb-14-0", "2g12gb-5-2", "4g24gb-0-0"]))
            }
            8..11 => format!("gpu-{gpu}-mig-1g10gb-19-0"),
            _ => dice.of(&["gpu-9", "gpu-0-mig-1g10gb-19-9", "gpu-1-mig-2g20gb-14-1", "disk-0"]).to_string(),
        };
        Odd { name, admin: dice.once_in(10) }
    };
    (0..count).map(|_| device(dice)).collect()
}
