//! What the claims are, as far as the kubelet's side can know.

use divvy_kubelet::dra::v1::{Claim, Device};

/// A claim that exists.
#[derive(Clone, Debug)]
pub(crate) struct Modelled {
    pub(crate) claim: Claim,
    pub(crate) devices: Vec<Part>,
    pub(crate) stage: Stage,
}

/// How far it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    /// Asked for, not answered with success: it may hold something.
    Waiting,
    Prepared(Vec<Device>),
    /// To be released, not answered with success.
    Ending,
    /// Gone from the API server, and nobody will ask for its end.
    Forgotten,
}

/// What a device name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) gpu: usize,
    /// Profile and memory slices; absent for the whole GPU.
    pub(crate) instance: Option<(u32, std::ops::Range<u32>)>,
    /// The mode in which claims have the whole GPU together.
    pub(crate) shared: Option<Shared>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shared {
    Timeslice,
    Mps,
}

impl Part {
    /// Of a name like `gpu-0`, `gpu-0-mig-1g10gb-19-2` or `gpu-0-timeslice`.
    pub(crate) fn of(name: &str) -> Self {
        let words: Vec<&str> = name.split('-').collect();
        let number = |at: usize| words[at].parse::<u32>().unwrap();
        let shared = match words[2..] {
            ["timeslice"] => Some(Shared::Timeslice),
            ["mps"] => Some(Shared::Mps),
            _ => None,
        };
        let instance = (words.len() > 3).then(|| {
            let size = match words[3] {
                "1g10gb" => 1,
                "2g20gb" => 2,
                "3g40gb" => 4,
                _ => 8,
            };
            (number(4), number(5)..number(5) + size)
        });
        Self { name: name.to_owned(), gpu: number(1) as usize, instance, shared }
    }

    /// Whether two claims cannot have both: two modes, or one slice twice.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let overlap = match (&self.instance, &other.instance) {
            (Some((_, one)), Some((_, two))) => one.start < two.end && two.start < one.end,
            _ => self.shared.is_none() || self.shared != other.shared,
        };
        self.gpu == other.gpu && overlap
    }
}

impl Modelled {
    pub(crate) fn is_prepared(&self) -> bool {
        matches!(self.stage, Stage::Prepared(_))
    }

    /// Whether its own devices exclude each other.
    pub(crate) fn is_absurd(&self) -> bool {
        let later = |at: usize| &self.devices[at + 1..];
        self.devices.iter().enumerate().any(|(at, one)| later(at).iter().any(|two| one.excludes(two)))
    }

    /// Whether the two cannot be prepared at once.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        self.devices.iter().any(|one| other.devices.iter().any(|two| one.excludes(two)))
    }
}
