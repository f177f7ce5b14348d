//! What a GPU's thread does with MIG. GPU instances are enumerated by profile,
//! because an instance without a compute instance has no MIG device and would
//! be overlooked.

use crate::code::Code;
use crate::error::NvmlError;
use crate::job::Worker;
use crate::raw::{CiProfile, Gi, GiInfo};
use crate::read::RawInstance;
use divvy_model::inventory::{ComputeInstance, MigMode};
use divvy_model::placement::Placement;
use std::sync::Arc;

/// Profile indices end where NVML says INVALID_ARGUMENT; this ends a library that never does.
pub(crate) const MAX_PROFILES: u32 = 64;

fn mode(on: bool) -> MigMode {
    if on { MigMode::On } else { MigMode::Off }
}

/// NVML's way to say that there is nothing to destroy: gone, or MIG is off.
fn absent_is_none<T>(found: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(NvmlError::Call { code: Code::NotFound | Code::NotSupported, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Worker {
    pub(crate) fn mig_mode(&mut self) -> Result<MigMode, NvmlError> {
        let device = self.device()?;
        let (current, _pending) = self.call("nvmlDeviceGetMigMode", |nvml| nvml.mig_mode(device))?;
        Ok(mode(current))
    }

    pub(crate) fn set_mig_mode(&mut self, wanted: MigMode) -> Result<(), NvmlError> {
        const SET: &str = "nvmlDeviceSetMigMode";
        let device = self.device()?;
        let on = wanted == MigMode::On;
        if self.call("nvmlDeviceGetMigMode", |nvml| nvml.mig_mode(device))? == (on, on) {
            return Ok(());
        }
        let code = match self.call(SET, |nvml| nvml.set_mig_mode(device, on)) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(code)) => code,
            Err(error) => return Err(self.name_holders(SET, None, error)),
        };
        // Accepted but not activated: a later reset would activate it behind our back.
        if let Ok((current, pending)) = self.call("nvmlDeviceGetMigMode", |nvml| nvml.mig_mode(device))
            && current != pending
        {
            let _not_activated_either = self.call(SET, |nvml| nvml.set_mig_mode(device, current));
        }
        Err(match code {
            Code::InUse => self.name_holders(SET, None, NvmlError::Call { call: SET, gpu: self.gpu(), code }),
            code => NvmlError::NotActivated { gpu: self.gpu(), mode: wanted, code },
        })
    }

    /// Turns IN_USE into the error that names the processes, of one GPU instance or all.
    fn name_holders(&mut self, call: &'static str, gpu_instance: Option<u32>, error: NvmlError) -> NvmlError {
        if error.code() != Some(Code::InUse) {
            return error;
        }
        let found = self.device().and_then(|device| {
            self.call("nvmlDeviceGetComputeRunningProcesses_v3", |nvml| nvml.processes(device))
        });
        let mut pids: Vec<u32> = found
            .unwrap_or_default()
            .into_iter()
            .filter(|entry| {
                gpu_instance.is_none_or(|wanted| entry.instance.is_some_and(|(gi, _)| gi == wanted))
            })
            .map(|entry| entry.pid)
            .collect();
        pids.sort_unstable();
        pids.dedup();
        NvmlError::InUse { call, gpu: self.gpu(), pids }
    }

    /// GPU instances of one profile or of all.
    pub(crate) fn instances_of(&mut self, only: Option<u32>) -> Result<Vec<RawInstance>, NvmlError> {
        let device = self.device()?;
        match absent_is_none(self.call("nvmlDeviceGetMigMode", |nvml| nvml.mig_mode(device)))? {
            Some((true, _)) => {}
            Some((false, _)) | None => return Ok(Vec::new()),
        }
        let mut all = Vec::new();
        let description = self.description()?;
        let wanted = description.profiles.iter().filter(|profile| only.is_none_or(|only| only == profile.id));
        for profile in wanted {
            let found = self.call("nvmlDeviceGetGpuInstances", |nvml| {
                nvml.gpu_instances(device, profile.id, profile.max_instances)
            });
            for gi in absent_is_none(found)?.unwrap_or_default() {
                // Destroyed by somebody else since it was listed: not an instance any more.
                let Some(info) =
                    absent_is_none(self.call("nvmlGpuInstanceGetInfo", |nvml| nvml.gi_info(gi)))?
                else {
                    continue;
                };
                let compute_instances = self.compute_instances(gi, info.profile_id)?;
                let GiInfo { id, profile_id, placement } = info;
                all.push(RawInstance { id, profile_id, placement, compute_instances });
            }
        }
        all.sort_by_key(|instance| instance.id);
        Ok(all)
    }

    fn compute_instances(&mut self, gi: Gi, profile_id: u32) -> Result<Vec<ComputeInstance>, NvmlError> {
        let mut all = Vec::new();
        for profile in self.ci_profiles(gi, profile_id)?.iter() {
            let found =
                self.call("nvmlGpuInstanceGetComputeInstances", |nvml| nvml.compute_instances(gi, *profile));
            for ci in absent_is_none(found)?.unwrap_or_default() {
                all.push(self.describe_ci(ci)?);
            }
        }
        all.sort_by_key(|instance| instance.id);
        Ok(all)
    }

    fn describe_ci(&self, ci: crate::raw::Ci) -> Result<ComputeInstance, NvmlError> {
        let info = self.call("nvmlComputeInstanceGetInfo_v2", |nvml| nvml.ci_info(ci))?;
        // The header calls it the parent; it is the MIG device, whose UUID names the instance.
        let uuid = self.call("nvmlDeviceGetUUID", |nvml| nvml.uuid(info.device))?;
        Ok(ComputeInstance { id: info.id, profile_id: info.profile_id, uuid })
    }

    /// Compute-instance profiles that a GPU instance of that profile offers; asked once.
    pub(crate) fn ci_profiles(&mut self, gi: Gi, profile_id: u32) -> Result<Arc<[CiProfile]>, NvmlError> {
        if let Some(known) = self.ci_profiles.get(&profile_id) {
            return Ok(Arc::clone(known));
        }
        let mut found: Vec<CiProfile> = Vec::new();
        for index in 0..MAX_PROFILES {
            match self.call("nvmlGpuInstanceGetComputeInstanceProfileInfo", |nvml| nvml.ci_profile(gi, index))
            {
                // Two indices may stand for one profile; its instances are listed by id.
                Ok(profile) if found.iter().all(|have| have.id != profile.id) => found.push(profile),
                Ok(_) | Err(NvmlError::Call { code: Code::NotSupported, .. }) => {}
                Err(NvmlError::Call { code: Code::InvalidArgument, .. }) => break,
                Err(error) => return Err(error),
            }
        }
        let found: Arc<[CiProfile]> = found.into();
        self.ci_profiles.insert(profile_id, Arc::clone(&found));
        Ok(found)
    }

    pub(crate) fn create_gpu_instance(&mut self, profile_id: u32, at: Placement) -> Result<u32, NvmlError> {
        let device = self.device()?;
        let gi = self.call("nvmlDeviceCreateGpuInstanceWithPlacement", |nvml| {
            nvml.create_gi(device, profile_id, at)
        })?;
        match self.call("nvmlGpuInstanceGetInfo", |nvml| nvml.gi_info(gi)) {
            Ok(info) => Ok(info.id),
            Err(error) => {
                // A refused call changes nothing: what has no id goes again.
                let _left_to_recovery = self.call("nvmlGpuInstanceDestroy", |nvml| nvml.destroy_gi(gi));
                Err(error)
            }
        }
    }

    pub(crate) fn create_compute_instance(
        &mut self,
        gpu_instance: u32,
    ) -> Result<ComputeInstance, NvmlError> {
        let device = self.device()?;
        let gi = self.call("nvmlDeviceGetGpuInstanceById", |nvml| nvml.gpu_instance(device, gpu_instance))?;
        let GiInfo { profile_id, .. } = self.call("nvmlGpuInstanceGetInfo", |nvml| nvml.gi_info(gi))?;
        let whole = self.ci_profiles(gi, profile_id)?.iter().copied().max_by_key(|profile| {
            // The largest; of equals the first, which is the plain one.
            (profile.slices, std::cmp::Reverse(profile.id))
        });
        let Some(whole) = whole else {
            return Err(NvmlError::NoFullSize { gpu: self.gpu(), gpu_instance, profile_id });
        };
        let ci = self.call("nvmlGpuInstanceCreateComputeInstance", |nvml| nvml.create_ci(gi, whole.id))?;
        self.describe_ci(ci).inspect_err(|_| {
            let _left_to_recovery = self.call("nvmlComputeInstanceDestroy", |nvml| nvml.destroy_ci(ci));
        })
    }

    pub(crate) fn destroy_compute_instance(&mut self, gpu_instance: u32, id: u32) -> Result<(), NvmlError> {
        let device = self.device()?;
        let found = self.call("nvmlDeviceGetGpuInstanceById", |nvml| nvml.gpu_instance(device, gpu_instance));
        let Some(gi) = absent_is_none(found)? else { return Ok(()) };
        let found = self.call("nvmlGpuInstanceGetComputeInstanceById", |nvml| nvml.compute_instance(gi, id));
        let Some(ci) = absent_is_none(found)? else { return Ok(()) };
        let gone = absent_is_none(self.call("nvmlComputeInstanceDestroy", |nvml| nvml.destroy_ci(ci)));
        gone.map(drop)
            .map_err(|error| self.name_holders("nvmlComputeInstanceDestroy", Some(gpu_instance), error))
    }

    pub(crate) fn destroy_gpu_instance(&mut self, id: u32) -> Result<(), NvmlError> {
        let device = self.device()?;
        let found = self.call("nvmlDeviceGetGpuInstanceById", |nvml| nvml.gpu_instance(device, id));
        let Some(gi) = absent_is_none(found)? else { return Ok(()) };
        self.forget_sample(Some(id));
        let gone = absent_is_none(self.call("nvmlGpuInstanceDestroy", |nvml| nvml.destroy_gi(gi)));
        gone.map(drop).map_err(|error| self.name_holders("nvmlGpuInstanceDestroy", Some(id), error))
    }
}
