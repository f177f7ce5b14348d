//! The model: the state of each claim as scheduler and kubelet know it.

use crate::harness::KubeletCall;
use crate::operations::{MIG_OFF_GPUS, MIG_ON_GPU};
use divvy_api::sharing::Mode;
use divvy_api::{DeviceName, Quantity};
use divvy_kubelet::dra::v1::{Claim, Device};
use divvy_model::DeviceId;
use divvy_sim::state::Gpu;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceRequestAllocationResult,
};
use std::ops::Range;

/// A claim that exists, or that the node may still hold.
#[derive(Clone, Debug)]
pub(crate) struct ModelClaim {
    pub(crate) claim: Claim,
    /// The claim's devices. `None` for a device that is not on this node.
    pub(crate) devices: Vec<Option<ModelDevice>>,
    pub(crate) stage: Stage,
    /// Allocated by the test against the rules of the scheduler, which does not know the claim.
    pub(crate) misallocated: bool,
    /// Deleted from the API server, so that the scheduler no longer knows it.
    pub(crate) deleted: bool,
}

/// The stage of a claim's life.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    /// Not prepared yet. The node holds nothing for the claim.
    Allocated,
    /// Prepare was called without success. The node may hold some of the claim's devices.
    Preparing,
    Prepared(Vec<Device>),
    /// Unprepare was called without success.
    Releasing,
    /// Deleted, and the daemon may have released it by itself.
    Forgotten,
}

/// A device of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelDevice {
    pub(crate) name: String,
    /// The shareID, if the device is shared.
    pub(crate) share: Option<String>,
    pub(crate) gpu: usize,
    /// MIG profile ID and memory slices, or `None` for a whole GPU.
    pub(crate) placement: Option<(u32, Range<u32>)>,
    pub(crate) mode: Mode,
    /// The sharing strategy of its processes, if one is configured.
    pub(crate) sharing: Option<Sharing>,
    /// Admin access, which reserves nothing.
    pub(crate) admin: bool,
    /// Memory of the share and of the whole device, in MiB.
    pub(crate) memory: Option<(u64, u64)>,
}

/// A strategy by which processes share a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    TimeSlicing,
    Mps,
}

impl ModelDevice {
    fn of(
        result: &DeviceRequestAllocationResult,
        configs: &[DeviceAllocationConfiguration],
        gpus: &[Gpu],
    ) -> Option<Self> {
        let id = DeviceId::try_from(&DeviceName::from(result.device.as_str())).ok()?;
        // GPU numbers follow the order in the simulator, because all GPUs were present at the first start.
        let at = usize::try_from(id.gpu().0).ok().filter(|at| *at < gpus.len())?;
        let mut total = gpus[at].model().memory_total_mib;
        let placement = match &id {
            DeviceId::Mig { profile_id, start, .. } => {
                let mig = gpus[at].model().mig.as_ref()?;
                let profile = mig.profiles.iter().find(|profile| profile.id == *profile_id)?;
                profile.starts.contains(start).then_some(())?;
                total = profile.memory_mib;
                Some((*profile_id, *start..start + profile.size))
            }
            _ => None,
        };
        let consumed = result.consumed_capacity.iter().flatten().find(|(name, _)| name.ends_with("memory"));
        let taken = consumed.and_then(|(_, amount)| amount.0.parse::<Quantity>().ok()?.as_bytes());
        let taken = taken.filter(|_| id.mode().may_hold_shares()).map(|bytes| bytes >> 20);
        let memory = taken.filter(|taken| *taken < total).map(|taken| (taken, total));
        let admin = result.admin_access == Some(true);
        let mode = id.mode();
        let sharing = match mode {
            _ if admin => None,
            Mode::Timeslice => Some(Sharing::TimeSlicing),
            Mode::Mps => Some(Sharing::Mps),
            Mode::Whole | Mode::Share | Mode::Mig => {
                configs.iter().find_map(|config| configured_sharing(config, &result.request))
            }
        };
        let (name, share) = (result.device.clone(), result.share_id.clone());
        Some(Self { name, share, gpu: at, placement, mode, sharing, admin, memory })
    }

    /// Whether two claims cannot hold these devices at once: two modes of a GPU, or overlapping MIG slices.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let overlap = match (&self.placement, &other.placement) {
            _ if self.shares_device_with(other) => false,
            (Some((_, one)), Some((_, two))) => one.start < two.end && two.start < one.end,
            (None, None) => self.mode != other.mode || matches!(self.mode, Mode::Whole | Mode::Share),
            _ => true,
        };
        !self.admin && !other.admin && self.gpu == other.gpu && overlap
    }

    /// Whether both are memory shares of one device.
    fn shares_device_with(&self, other: &Self) -> bool {
        (self.gpu, &self.placement) == (other.gpu, &other.placement)
            && self.memory.is_some()
            && other.memory.is_some()
    }

    /// Whether the GPU's MIG mode, which only a reset can change, excludes the device.
    fn is_impossible(&self) -> bool {
        let is_mig = self.placement.is_some();
        !self.admin && ((self.gpu == MIG_ON_GPU && !is_mig) || (MIG_OFF_GPUS.contains(&self.gpu) && is_mig))
    }
}

/// The sharing strategy that a configuration sets for a request.
fn configured_sharing(config: &DeviceAllocationConfiguration, request: &str) -> Option<Sharing> {
    let named = |name: &String| name == request || request.split('/').next() == Some(name);
    if !config.requests.as_ref().is_none_or(|requests| requests.iter().any(named)) {
        return None;
    }
    match config.opaque.as_ref()?.parameters.0["sharing"]["strategy"].as_str()? {
        "MPS" => Some(Sharing::Mps),
        _ => Some(Sharing::TimeSlicing),
    }
}

impl ModelClaim {
    pub(crate) fn new(claim: Claim, allocation: &AllocationResult, gpus: &[Gpu], misallocated: bool) -> Self {
        let devices = allocation.devices.clone().unwrap_or_default();
        let (results, configs) = (devices.results.unwrap_or_default(), devices.config.unwrap_or_default());
        let devices = results.iter().map(|result| ModelDevice::of(result, &configs, gpus)).collect();
        Self { claim, devices, stage: Stage::Allocated, misallocated, deleted: false }
    }

    /// The devices that are on this node.
    pub(crate) fn devices(&self) -> impl Iterator<Item = &ModelDevice> {
        self.devices.iter().flatten()
    }

    pub(crate) fn is_prepared(&self) -> bool {
        matches!(self.stage, Stage::Prepared(_))
    }

    /// Whether the node may hold devices of the claim.
    pub(crate) fn may_hold(&self) -> bool {
        self.stage != Stage::Allocated
    }

    /// Whether no node could prepare the claim, because its own devices conflict or do not exist.
    pub(crate) fn is_unsatisfiable(&self) -> bool {
        let devices: Vec<&ModelDevice> = self.devices().collect();
        let later = |at: usize| &devices[at + 1..];
        self.devices.iter().any(Option::is_none)
            || self.exceeds_memory(&[])
            || devices.iter().any(|device| device.is_impossible())
            || devices.iter().enumerate().any(|(at, one)| later(at).iter().any(|two| one.excludes(two)))
    }

    /// Whether the two claims cannot be prepared at once.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        self.devices().any(|one| other.devices().any(|two| one.excludes(two)))
    }

    /// Whether the memory shares of this claim and the others add up to more than a device's memory.
    pub(crate) fn exceeds_memory(&self, others: &[&Self]) -> bool {
        let shares = |device: &&ModelDevice| device.memory.is_some() && !device.admin;
        self.devices().filter(shares).any(|device| {
            let all = others.iter().copied().chain([self]).flat_map(Self::devices);
            let taken = all.filter(shares).filter(|other| device.shares_device_with(other));
            let taken: u64 = taken.filter_map(|other| other.memory).map(|(taken, _)| taken).sum();
            device.memory.is_some_and(|(_, total)| taken > total)
        })
    }

    /// Whether both claims have memory shares of one MIG instance, which may be only partly created.
    pub(crate) fn shares_instance_with(&self, other: &Self) -> bool {
        let mut mig_devices = self.devices().filter(|device| device.placement.is_some());
        mig_devices.any(|one| other.devices().any(|two| one.shares_device_with(two)))
    }

    pub(crate) fn is_on(&self, gpu: usize) -> bool {
        self.devices().any(|device| device.gpu == gpu)
    }
}

impl KubeletCall {
    /// The calls of the GPU driver and its programs that the kubelet call may cause for the claim.
    pub(crate) fn driver_calls(self, claim: &ModelClaim) -> Vec<&'static str> {
        let mut calls = Vec::new();
        for device in claim.devices() {
            calls.extend_from_slice(match (self, device.placement.is_some()) {
                (_, false) => &["nvmlDeviceSetMigMode"],
                (Self::Prepare, true) => &[
                    "nvmlDeviceSetMigMode",
                    "nvmlDeviceCreateGpuInstanceWithPlacement",
                    "nvmlGpuInstanceCreateComputeInstance",
                    "nvmlDeviceGetGpuInstances",
                ],
                (Self::Unprepare, true) => &[
                    "nvmlDeviceSetMigMode",
                    "nvmlComputeInstanceDestroy",
                    "nvmlGpuInstanceDestroy",
                    "nvmlDeviceGetGpuInstances",
                ],
            });
            calls.extend_from_slice(match device.sharing {
                None => &[],
                Some(Sharing::TimeSlicing) => &["compute-policy", "compute-policy"],
                Some(Sharing::Mps) => &["nvmlDeviceSetComputeMode", "mps-control-start", "mps-control"],
            });
        }
        calls
    }
}
