//! What the claims are, as far as the kubelet's side can know.

use crate::operations::CUT;
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
    /// A part of its memory, in GiB.
    pub(crate) memory: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shared {
    Timeslice,
    Mps,
}

impl Part {
    /// Of a name like `gpu-0`, `gpu-0-mig-1g10gb-19-2`, `gpu-0-timeslice` or `gpu-0=3Gi`.
    pub(crate) fn of(name: &str) -> Self {
        let (name, memory) = name.split_once('=').map_or((name, None), |(name, memory)| {
            (name, Some(memory.trim_end_matches("Gi").parse().unwrap()))
        });
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
        Self { name: name.to_owned(), gpu: number(1) as usize, instance, shared, memory }
    }

    /// Memory of the device, in whole GiB.
    fn all_memory(&self) -> u64 {
        match self.name.split('-').nth(3) {
            None if self.gpu < CUT => 79,
            None => 22,
            Some("1g10gb") => 9,
            Some("2g20gb") => 19,
            Some("3g40gb") => 39,
            Some(_) => 79,
        }
    }

    /// Whether two claims cannot have both: two modes, or one slice twice.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let overlap = match (&self.instance, &other.instance) {
            _ if self.is_beside(other) => false,
            (Some((_, one)), Some((_, two))) => one.start < two.end && two.start < one.end,
            _ => self.shared.is_none() || self.shared != other.shared,
        };
        self.gpu == other.gpu && overlap
    }

    /// Whether both are parts of the memory of one device.
    fn is_beside(&self, other: &Self) -> bool {
        self.name == other.name && self.memory.is_some() && other.memory.is_some()
    }
}

impl Modelled {
    pub(crate) fn is_prepared(&self) -> bool {
        matches!(self.stage, Stage::Prepared(_))
    }

    /// Whether its own devices exclude each other.
    pub(crate) fn is_absurd(&self) -> bool {
        let later = |at: usize| &self.devices[at + 1..];
        self.has_no_room(&[])
            || self.devices.iter().enumerate().any(|(at, one)| later(at).iter().any(|two| one.excludes(two)))
    }

    /// Whether it cannot be prepared beside all of these.
    pub(crate) fn is_kept_away(&self, others: &[&Self]) -> bool {
        self.has_no_room(others) || others.iter().any(|other| self.excludes(other))
    }

    /// Whether it and one of these are parts of one instance, which may be half made.
    pub(crate) fn is_beside_in_instance(&self, other: &Self) -> bool {
        let mut cut = self.devices.iter().filter(|part| part.instance.is_some());
        cut.any(|one| other.devices.iter().any(|two| one.is_beside(two)))
    }

    /// Whether the two cannot be prepared at once.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        self.devices.iter().any(|one| other.devices.iter().any(|two| one.excludes(two)))
    }

    fn has_no_room(&self, others: &[&Self]) -> bool {
        let all = || others.iter().copied().chain([self]).flat_map(|claim| &claim.devices);
        self.devices.iter().filter(|part| part.memory.is_some()).any(|part| {
            let beside = all().filter(|other| part.is_beside(other));
            beside.filter_map(|other| other.memory).sum::<u64>() > part.all_memory()
        })
    }
}
