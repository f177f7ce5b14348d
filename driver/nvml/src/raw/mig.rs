//! MIG: profiles, GPU instances, compute instances.

use super::{Answer, Device, Library, Plain, check, sys, text, version};
use crate::code::Code;
use divvy_model::placement::Placement;
use std::ffi::c_uint;

/// A GPU instance handle. It is used within one job only, because NVML reuses handles after
/// destroy.
#[derive(Clone, Copy)]
pub(crate) struct Gi(sys::nvmlGpuInstance_t);
/// A compute instance handle, used within one job only.
#[derive(Clone, Copy)]
pub(crate) struct Ci(sys::nvmlComputeInstance_t);
/// A GPU instance profile.
pub(crate) struct GiProfile {
    pub(crate) id: u32,
    pub(crate) slices: u32,
    pub(crate) instances: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) copy_engines: u32,
    pub(crate) decoders: u32,
    pub(crate) encoders: u32,
    pub(crate) jpeg_engines: u32,
    pub(crate) ofa_engines: u32,
    pub(crate) memory_mib: u64,
    /// Empty if the GPU driver has only the first version of the call.
    pub(crate) name: String,
}

/// The fields of a compute instance profile that are used here.
#[derive(Clone, Copy)]
pub(crate) struct CiProfile {
    pub(crate) id: u32,
    pub(crate) slices: u32,
    pub(crate) instances: u32,
}

/// A GPU instance as NVML describes it.
#[derive(Clone, Copy)]
pub(crate) struct GiInfo {
    pub(crate) id: u32,
    pub(crate) profile_id: u32,
    pub(crate) placement: Placement,
}

/// A compute instance as NVML describes it; `device` is its MIG device.
pub(crate) struct CiInfo {
    pub(crate) id: u32,
    pub(crate) profile_id: u32,
    pub(crate) device: Device,
}

impl Library {
    /// The current and the pending MIG mode; true is on.
    pub(crate) fn mig_mode(&self, device: Device) -> Answer<(bool, bool)> {
        let (mut current, mut pending) = (0, 0);
        nvml!(self, nvmlDeviceGetMigMode(device.0, &mut current, &mut pending))?;
        Ok((current == 1, pending == 1))
    }

    /// `Ok(Err(code))` means that the mode was accepted but not activated.
    pub(crate) fn set_mig_mode(&self, device: Device, on: bool) -> Answer<Answer<()>> {
        let mut activation = 0;
        nvml!(self, nvmlDeviceSetMigMode(device.0, c_uint::from(on), &mut activation))?;
        Ok(check(activation))
    }

    pub(crate) fn gi_profile(&self, device: Device, index: u32) -> Answer<GiProfile> {
        let mut info = sys::nvmlGpuInstanceProfileInfo_v2_t::zeroed();
        info.version = version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
        match nvml!(self, nvmlDeviceGetGpuInstanceProfileInfoV(device.0, index, &mut info)) {
            Ok(()) => Ok(GiProfile {
                id: info.id,
                slices: info.sliceCount,
                instances: info.instanceCount,
                multiprocessors: info.multiprocessorCount,
                copy_engines: info.copyEngineCount,
                decoders: info.decoderCount,
                encoders: info.encoderCount,
                jpeg_engines: info.jpegCount,
                ofa_engines: info.ofaCount,
                memory_mib: info.memorySizeMB,
                name: text(&info.name),
            }),
            Err(Code::FunctionNotFound | Code::ArgumentVersionMismatch) => self.gi_profile_v1(device, index),
            Err(code) => Err(code),
        }
    }

    fn gi_profile_v1(&self, device: Device, index: u32) -> Answer<GiProfile> {
        let mut info = sys::nvmlGpuInstanceProfileInfo_t::zeroed();
        nvml!(self, nvmlDeviceGetGpuInstanceProfileInfo(device.0, index, &mut info))?;
        Ok(GiProfile {
            id: info.id,
            slices: info.sliceCount,
            instances: info.instanceCount,
            multiprocessors: info.multiprocessorCount,
            copy_engines: info.copyEngineCount,
            decoders: info.decoderCount,
            encoders: info.encoderCount,
            jpeg_engines: info.jpegCount,
            ofa_engines: info.ofaCount,
            memory_mib: info.memorySizeMB,
            name: String::new(),
        })
    }

    pub(crate) fn placements(&self, device: Device, profile_id: u32) -> Answer<Vec<Placement>> {
        let mut count = 0;
        let null = std::ptr::null_mut();
        match nvml!(
            self,
            nvmlDeviceGetGpuInstancePossiblePlacements_v2(device.0, profile_id, null, &mut count)
        ) {
            Ok(()) | Err(Code::InsufficientSize) => {}
            Err(code) => return Err(code),
        }
        let mut found: Vec<_> = (0..count).map(|_| sys::nvmlGpuInstancePlacement_t::zeroed()).collect();
        nvml!(
            self,
            nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                device.0,
                profile_id,
                found.as_mut_ptr(),
                &mut count
            )
        )?;
        found.truncate(count as usize);
        Ok(found.iter().map(|at| Placement { start: at.start, size: at.size }).collect())
    }

    /// GPU instances of a profile, of which at most `max` exist.
    pub(crate) fn gpu_instances(&self, device: Device, profile_id: u32, max: u32) -> Answer<Vec<Gi>> {
        let mut found = vec![std::ptr::null_mut(); max.max(1) as usize];
        let mut count = found.len() as c_uint;
        nvml!(self, nvmlDeviceGetGpuInstances(device.0, profile_id, found.as_mut_ptr(), &mut count))?;
        found.truncate(count as usize);
        Ok(found.into_iter().map(Gi).collect())
    }

    pub(crate) fn gpu_instance(&self, device: Device, id: u32) -> Answer<Gi> {
        let mut gi = std::ptr::null_mut();
        nvml!(self, nvmlDeviceGetGpuInstanceById(device.0, id, &mut gi))?;
        Ok(Gi(gi))
    }

    pub(crate) fn gi_info(&self, gi: Gi) -> Answer<GiInfo> {
        let mut info = sys::nvmlGpuInstanceInfo_t::zeroed();
        nvml!(self, nvmlGpuInstanceGetInfo(gi.0, &mut info))?;
        let placement = Placement { start: info.placement.start, size: info.placement.size };
        Ok(GiInfo { id: info.id, profile_id: info.profileId, placement })
    }

    pub(crate) fn create_gi(&self, device: Device, profile_id: u32, at: Placement) -> Answer<Gi> {
        let at = sys::nvmlGpuInstancePlacement_t { start: at.start, size: at.size };
        let mut gi = std::ptr::null_mut();
        nvml!(self, nvmlDeviceCreateGpuInstanceWithPlacement(device.0, profile_id, &at, &mut gi))?;
        Ok(Gi(gi))
    }

    pub(crate) fn destroy_gi(&self, gi: Gi) -> Answer<()> {
        nvml!(self, nvmlGpuInstanceDestroy(gi.0))
    }

    /// The compute instance profile at `index`, with shared engines.
    pub(crate) fn ci_profile(&self, gi: Gi, index: u32) -> Answer<CiProfile> {
        let mut info = sys::nvmlComputeInstanceProfileInfo_t::zeroed();
        nvml!(self, nvmlGpuInstanceGetComputeInstanceProfileInfo(gi.0, index, 0, &mut info))?;
        Ok(CiProfile { id: info.id, slices: info.sliceCount, instances: info.instanceCount })
    }

    pub(crate) fn compute_instances(&self, gi: Gi, profile: CiProfile) -> Answer<Vec<Ci>> {
        let mut found = vec![std::ptr::null_mut(); profile.instances.max(1) as usize];
        let mut count = found.len() as c_uint;
        nvml!(self, nvmlGpuInstanceGetComputeInstances(gi.0, profile.id, found.as_mut_ptr(), &mut count))?;
        found.truncate(count as usize);
        Ok(found.into_iter().map(Ci).collect())
    }

    pub(crate) fn compute_instance(&self, gi: Gi, id: u32) -> Answer<Ci> {
        let mut ci = std::ptr::null_mut();
        nvml!(self, nvmlGpuInstanceGetComputeInstanceById(gi.0, id, &mut ci))?;
        Ok(Ci(ci))
    }

    pub(crate) fn ci_info(&self, ci: Ci) -> Answer<CiInfo> {
        let mut info = sys::nvmlComputeInstanceInfo_t::zeroed();
        nvml!(self, nvmlComputeInstanceGetInfo_v2(ci.0, &mut info))?;
        Ok(CiInfo { id: info.id, profile_id: info.profileId, device: Device(info.device) })
    }

    pub(crate) fn create_ci(&self, gi: Gi, profile_id: u32) -> Answer<Ci> {
        let mut ci = std::ptr::null_mut();
        nvml!(self, nvmlGpuInstanceCreateComputeInstance(gi.0, profile_id, &mut ci))?;
        Ok(Ci(ci))
    }

    pub(crate) fn destroy_ci(&self, ci: Ci) -> Answer<()> {
        nvml!(self, nvmlComputeInstanceDestroy(ci.0))
    }
}
