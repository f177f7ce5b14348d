//! The model: the state of each claim as the kubelet knows it.

use crate::harness::KubeletCall;
use crate::operations::{MIG_GPU_COUNT, PREPARE_CALLS, UNPREPARE_CALLS};
use divvy_kubelet::dra::v1::{Claim, Device};

/// A claim that exists.
#[derive(Clone, Debug)]
pub(crate) struct ModelClaim {
    pub(crate) claim: Claim,
    pub(crate) devices: Vec<ModelDevice>,
    pub(crate) stage: Stage,
}

/// The stage of a claim's life.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    /// Prepare was called without success. The node may hold some of the claim's devices.
    Preparing,
    Prepared(Vec<Device>),
    /// Unprepare was called without success.
    Releasing,
    /// Deleted from the API server, and the kubelet will not unprepare it.
    Forgotten,
}

/// A device of a claim, parsed from its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelDevice {
    pub(crate) name: String,
    pub(crate) gpu: usize,
    /// MIG profile ID and memory slices, or `None` for a whole GPU.
    pub(crate) instance: Option<(u32, std::ops::Range<u32>)>,
    /// The mode in which several claims share the whole GPU.
    pub(crate) sharing: Option<Sharing>,
    /// The memory share in GiB, or `None` for the whole device.
    pub(crate) memory: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    Timeslice,
    Mps,
}

impl ModelDevice {
    /// Parses a name like `gpu-0`, `gpu-0-mig-1g10gb-19-2`, `gpu-0-timeslice` or `gpu-0-share=3Gi`.
    pub(crate) fn parse(name: &str) -> Self {
        let (name, memory) = name.split_once('=').map_or((name, None), |(name, memory)| {
            (name, Some(memory.trim_end_matches("Gi").parse().unwrap()))
        });
        let fields: Vec<&str> = name.split('-').collect();
        let number = |at: usize| fields[at].parse::<u32>().unwrap();
        let sharing = match fields[2..] {
            ["timeslice"] => Some(Sharing::Timeslice),
            ["mps"] => Some(Sharing::Mps),
            _ => None,
        };
        let instance = (fields.len() > 3).then(|| {
            let size = match fields[3] {
                "1g10gb" => 1,
                "2g20gb" => 2,
                "3g40gb" => 4,
                _ => 8,
            };
            (number(4), number(5)..number(5) + size)
        });
        Self { name: name.to_owned(), gpu: number(1) as usize, instance, sharing, memory }
    }

    /// Memory of the device in GiB, rounded down.
    fn total_memory_gib(&self) -> u64 {
        match self.name.split('-').nth(3) {
            None if self.gpu < MIG_GPU_COUNT => 79,
            None => 22,
            Some("1g10gb") => 9,
            Some("2g20gb") => 19,
            Some("3g40gb") => 39,
            Some(_) => 79,
        }
    }

    /// Whether two claims cannot hold these devices at once: two modes of a GPU, or overlapping MIG slices.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let overlap = match (&self.instance, &other.instance) {
            _ if self.shares_device_with(other) => false,
            (Some((_, one)), Some((_, two))) => one.start < two.end && two.start < one.end,
            _ => self.sharing.is_none() || self.sharing != other.sharing,
        };
        self.gpu == other.gpu && overlap
    }

    /// Whether both are memory shares of one device.
    fn shares_device_with(&self, other: &Self) -> bool {
        (self.gpu, &self.instance) == (other.gpu, &other.instance)
            && self.memory.is_some()
            && other.memory.is_some()
    }
}

impl ModelClaim {
    pub(crate) fn is_prepared(&self) -> bool {
        matches!(self.stage, Stage::Prepared(_))
    }

    /// Whether the claim's own devices conflict, so that no node could prepare it.
    pub(crate) fn is_unsatisfiable(&self) -> bool {
        let later = |at: usize| &self.devices[at + 1..];
        self.exceeds_memory(&[])
            || self.devices.iter().enumerate().any(|(at, one)| later(at).iter().any(|two| one.excludes(two)))
    }

    /// Whether the claim cannot be prepared beside all of these.
    pub(crate) fn conflicts_with_any(&self, others: &[&Self]) -> bool {
        self.exceeds_memory(others) || others.iter().any(|other| self.excludes(other))
    }

    /// Whether both claims have memory shares of one MIG instance, which may be only partly created.
    pub(crate) fn shares_instance_with(&self, other: &Self) -> bool {
        let mut mig_devices = self.devices.iter().filter(|device| device.instance.is_some());
        mig_devices.any(|one| other.devices.iter().any(|two| one.shares_device_with(two)))
    }

    /// Whether the two claims cannot be prepared at once.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        self.devices.iter().any(|one| other.devices.iter().any(|two| one.excludes(two)))
    }

    /// Whether the memory shares of a device add up to more than its memory.
    fn exceeds_memory(&self, others: &[&Self]) -> bool {
        let all = || others.iter().copied().chain([self]).flat_map(|claim| &claim.devices);
        self.devices.iter().filter(|device| device.memory.is_some()).any(|device| {
            let beside = all().filter(|other| device.shares_device_with(other));
            beside.filter_map(|other| other.memory).sum::<u64>() > device.total_memory_gib()
        })
    }
}

impl KubeletCall {
    /// The name of one NVML call that the kubelet call may cause for these devices, chosen by `nth`.
    pub(crate) fn nvml_call(self, devices: &[ModelDevice], nth: usize) -> &'static str {
        let all = match self {
            Self::Prepare => PREPARE_CALLS,
            Self::Unprepare => UNPREPARE_CALLS,
        };
        let sharing = |mode| devices.iter().any(|device| device.sharing == Some(mode));
        let may_occur = |call: &&&str| match **call {
            "compute-policy" => sharing(Sharing::Timeslice),
            "nvmlDeviceSetComputeMode" => sharing(Sharing::Mps),
            _ => devices.iter().any(|device| device.instance.is_some()),
        };
        let likely: Vec<&str> = all.iter().filter(may_occur).copied().collect();
        if likely.is_empty() { all[nth % all.len()] } else { likely[nth % likely.len()] }
    }
}
