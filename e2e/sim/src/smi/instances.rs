//! The NVML calls about GPU and compute instances.
#![allow(unsafe_code, reason = "NVML is a C library, loaded at run time")]

use std::ptr;

use super::library::{MOST, Nvml, Smi, SmiError, done};
use super::structures::{CiInfo, CiProfile, GiInfo, GiProfile, Handle, Placement, version};

impl Nvml {
    /// The GPU-instance profiles that the GPU has, small ones first.
    pub(super) fn gi_profiles(&self, device: Handle) -> Smi<Vec<GiProfile>> {
        let start = GiProfile {
            version: version::<GiProfile>(2),
            id: 0,
            p2p: 0,
            slices: 0,
            instances: 0,
            sm: 0,
            ce: 0,
            dec: 0,
            enc: 0,
            jpg: 0,
            ofa: 0,
            memory_mib: 0,
            name: [0; 96],
        };
        let name = "nvmlDeviceGetGpuInstanceProfileInfoV";
        let mut found = self.indexed(|index| self.about_number(name, device, index, start))?;
        found.sort_by_key(|profile| (profile.slices, profile.memory_mib));
        Ok(found)
    }

    /// The compute-instance profiles that the GPU instance has, by index.
    pub(super) fn ci_profiles(&self, gi: Handle) -> Smi<Vec<CiProfile>> {
        let name = "nvmlGpuInstanceGetComputeInstanceProfileInfoV";
        let call: unsafe extern "C" fn(Handle, u32, u32, *mut CiProfile) -> u32 = self.symbol(name)?;
        self.indexed(|index| {
            let mut value = CiProfile {
                version: version::<CiProfile>(2),
                id: 0,
                slices: 0,
                instances: 0,
                sm: 0,
                ce: 0,
                dec: 0,
                enc: 0,
                jpg: 0,
                ofa: 0,
                name: [0; 96],
            };
            // SAFETY: the output is a place of the type that the call fills.
            done(unsafe { call(gi, index, 0, &mut value) })?;
            Ok(value)
        })
    }

    /// All that an enumeration by index has, until the index is invalid.
    fn indexed<T>(&self, get: impl Fn(u32) -> Smi<T>) -> Smi<Vec<T>> {
        let mut found = Vec::new();
        for index in 0.. {
            match get(index) {
                Ok(value) => found.push(value),
                Err(SmiError::Nvml(3)) => {}
                Err(SmiError::Nvml(2)) => break,
                Err(other) => return Err(other),
            }
        }
        Ok(found)
    }

    pub(super) fn placements(&self, device: Handle, profile: u32) -> Smi<Vec<Placement>> {
        let name = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
        let call: unsafe extern "C" fn(Handle, u32, *mut Placement, *mut u32) -> u32 = self.symbol(name)?;
        let mut found = [Placement { start: 0, size: 0 }; MOST];
        let mut count = MOST as u32;
        // SAFETY: the array has room for as many as the count says.
        done(unsafe { call(device, profile, found.as_mut_ptr(), &mut count) })?;
        Ok(found.into_iter().take(count as usize).collect())
    }

    /// The GPU instances, by id.
    pub(super) fn gis(&self, device: Handle) -> Smi<Vec<(Handle, GiInfo)>> {
        let mut found = Vec::new();
        for profile in self.gi_profiles(device)? {
            for gi in self.listed("nvmlDeviceGetGpuInstances", device, profile.id)? {
                let placement = Placement { start: 0, size: 0 };
                let start = GiInfo { _device: 0, id: 0, profile: 0, placement };
                found.push((gi, self.about("nvmlGpuInstanceGetInfo", gi, start)?));
            }
        }
        found.sort_by_key(|(_, info)| info.id);
        Ok(found)
    }

    /// The compute instances of a GPU instance, by id.
    pub(super) fn cis(&self, gi: Handle) -> Smi<Vec<(Handle, CiInfo)>> {
        let mut found = Vec::new();
        for profile in self.ci_profiles(gi)? {
            for ci in self.listed("nvmlGpuInstanceGetComputeInstances", gi, profile.id)? {
                found.push((ci, self.ci_info(ci)?));
            }
        }
        found.sort_by_key(|(_, info)| info.id);
        Ok(found)
    }

    fn listed(&self, name: &'static str, parent: Handle, profile: u32) -> Smi<Vec<Handle>> {
        let call: unsafe extern "C" fn(Handle, u32, *mut Handle, *mut u32) -> u32 = self.symbol(name)?;
        let mut found = [0; MOST];
        let mut count = MOST as u32;
        // SAFETY: the array has room for all that a profile allows.
        done(unsafe { call(parent, profile, found.as_mut_ptr(), &mut count) })?;
        Ok(found.into_iter().take(count as usize).collect())
    }

    fn ci_info(&self, ci: Handle) -> Smi<CiInfo> {
        let placement = Placement { start: 0, size: 0 };
        let start = CiInfo { _device: 0, _gi: 0, id: 0, profile: 0, placement };
        self.about("nvmlComputeInstanceGetInfo_v2", ci, start)
    }

    pub(super) fn create_gi(
        &self,
        device: Handle,
        profile: u32,
        place: Option<Placement>,
    ) -> Smi<(Handle, GiInfo)> {
        let gi = match place {
            None => self.about_number("nvmlDeviceCreateGpuInstance", device, profile, 0)?,
            Some(place) => {
                let name = "nvmlDeviceCreateGpuInstanceWithPlacement";
                let call: unsafe extern "C" fn(Handle, u32, *const Placement, *mut Handle) -> u32 =
                    self.symbol(name)?;
                let mut gi = 0;
                // SAFETY: the placement is read, the output is a place for a handle.
                done(unsafe { call(device, profile, ptr::from_ref(&place), &mut gi) })?;
                gi
            }
        };
        let start = GiInfo { _device: 0, id: 0, profile: 0, placement: Placement { start: 0, size: 0 } };
        Ok((gi, self.about("nvmlGpuInstanceGetInfo", gi, start)?))
    }

    pub(super) fn create_ci(&self, gi: Handle, profile: u32) -> Smi<CiInfo> {
        let ci = self.about_number("nvmlGpuInstanceCreateComputeInstance", gi, profile, 0)?;
        self.ci_info(ci)
    }

    pub(super) fn destroy_gi(&self, gi: Handle) -> Smi<()> {
        self.act("nvmlGpuInstanceDestroy", gi, 0)
    }

    pub(super) fn destroy_ci(&self, ci: Handle) -> Smi<()> {
        self.act("nvmlComputeInstanceDestroy", ci, 0)
    }
}
