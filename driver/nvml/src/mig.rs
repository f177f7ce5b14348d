//! MIG operations of the thread of a GPU. GPU instances are listed by profile: a GPU instance
//! without a compute instance has no MIG device, so a list of MIG devices would miss it.

use crate::code::Code;
use crate::error::NvmlError;
use crate::events::Event;
use crate::job::Worker;
use crate::raw::{CiProfile, Gi, GiInfo};
use crate::types::RawInstance;
use divvy_model::inventory::{ComputeInstance, MigMode};
use divvy_model::placement::Placement;
use std::sync::Arc;

/// Bound for a faulty library. A real one returns INVALID_ARGUMENT after its last profile.
pub(crate) const MAX_PROFILES: u32 = 64;

fn mode(on: bool) -> MigMode {
    if on { MigMode::On } else { MigMode::Off }
}

/// Turns the errors of a missing instance, or of MIG being off, into `None`.
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

    pub(crate) fn set_mig_mode(&mut self, requested: MigMode) -> Result<(), NvmlError> {
        const SET: &str = "nvmlDeviceSetMigMode";
        let device = self.device()?;
        let on = requested == MigMode::On;
        if self.call("nvmlDeviceGetMigMode", |nvml| nvml.mig_mode(device))? == (on, on) {
            return Ok(());
        }
        let code = match self.call(SET, |nvml| nvml.set_mig_mode(device, on)) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(code)) => code,
            Err(error) => return Err(self.with_holders(SET, None, error)),
        };
        // The mode is pending, not active: a later GPU reset would activate it unexpectedly.
        // Restore the old mode.
        if let Ok((current, pending)) = self.call("nvmlDeviceGetMigMode", |nvml| nvml.mig_mode(device))
            && current != pending
        {
            let _ignored = self.call(SET, |nvml| nvml.set_mig_mode(device, current));
        }
        Err(match code {
            Code::InUse => self.with_holders(SET, None, NvmlError::Call { call: SET, gpu: self.gpu(), code }),
            code => NvmlError::NotActivated { gpu: self.gpu(), mode: requested, code },
        })
    }

    /// Turns IN_USE into an error with the processes of one GPU instance or of the whole GPU.
    fn with_holders(&mut self, call: &'static str, gpu_instance: Option<u32>, error: NvmlError) -> NvmlError {
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
                gpu_instance.is_none_or(|requested| entry.instance.is_some_and(|(gi, _)| gi == requested))
            })
            .map(|entry| entry.pid)
            .collect();
        pids.sort_unstable();
        pids.dedup();
        NvmlError::InUse { call, gpu: self.gpu(), pids }
    }

    /// The GPU instances of one profile, or of all profiles.
    pub(crate) fn instances_of(&mut self, only: Option<u32>) -> Result<Vec<RawInstance>, NvmlError> {
        let device = self.device()?;
        match absent_is_none(self.call("nvmlDeviceGetMigMode", |nvml| nvml.mig_mode(device)))? {
            Some((true, _)) => {}
            Some((false, _)) | None => return Ok(Vec::new()),
        }
        let mut all = Vec::new();
        let description = self.description()?;
        // Without profiles nothing can be listed, which must not look like no instances.
        let profiles = description.profiles.as_ref().map_err(Clone::clone)?;
        let requested = profiles.iter().filter(|profile| only.is_none_or(|only| only == profile.id));
        for profile in requested {
            let found = self.call("nvmlDeviceGetGpuInstances", |nvml| {
                nvml.gpu_instances(device, profile.id, profile.max_instances)
            });
            for gi in absent_is_none(found)?.unwrap_or_default() {
                // Another tool destroyed the instance after it was listed.
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
        // NVML calls this handle the parent, but it is the MIG device whose UUID names the
        // instance.
        let uuid = self.call("nvmlDeviceGetUUID", |nvml| nvml.uuid(info.device))?;
        Ok(ComputeInstance { id: info.id, profile_id: info.profile_id, uuid })
    }

    /// Compute instance profiles of a GPU instance profile; read once.
    pub(crate) fn ci_profiles(&mut self, gi: Gi, profile_id: u32) -> Result<Arc<[CiProfile]>, NvmlError> {
        if let Some(known) = self.ci_profiles.get(&profile_id) {
            return Ok(Arc::clone(known));
        }
        let mut found: Vec<CiProfile> = Vec::new();
        for index in 0..MAX_PROFILES {
            match self.call("nvmlGpuInstanceGetComputeInstanceProfileInfo", |nvml| nvml.ci_profile(gi, index))
            {
                // Two indices may have the same profile id, and instances are listed by id.
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
                // A failed call must change nothing, so the instance without a known id is
                // destroyed.
                let _ignored = self.call("nvmlGpuInstanceDestroy", |nvml| nvml.destroy_gi(gi));
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
            // The largest profile; among equal ones the first, which is the plain one.
            (profile.slices, std::cmp::Reverse(profile.id))
        });
        let Some(whole) = whole else {
            return Err(NvmlError::NoFullSize { gpu: self.gpu(), gpu_instance, profile_id });
        };
        let ci = self.call("nvmlGpuInstanceCreateComputeInstance", |nvml| nvml.create_ci(gi, whole.id))?;
        self.describe_ci(ci).inspect_err(|_| {
            let _ignored = self.call("nvmlComputeInstanceDestroy", |nvml| nvml.destroy_ci(ci));
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
            .map_err(|error| self.with_holders("nvmlComputeInstanceDestroy", Some(gpu_instance), error))
    }

    pub(crate) fn destroy_gpu_instance(&mut self, id: u32) -> Result<(), NvmlError> {
        let device = self.device()?;
        let found = self.call("nvmlDeviceGetGpuInstanceById", |nvml| nvml.gpu_instance(device, id));
        let Some(gi) = absent_is_none(found)? else { return Ok(()) };
        self.forget_sample(Some(id));
        let gone = absent_is_none(self.call("nvmlGpuInstanceDestroy", |nvml| nvml.destroy_gi(gi)));
        if gone.is_ok() {
            self.send_event(Event::InstanceDestroyed { gpu: self.gpu(), gpu_instance: id });
        }
        gone.map(drop).map_err(|error| self.with_holders("nvmlGpuInstanceDestroy", Some(id), error))
    }
}
