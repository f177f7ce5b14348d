//! GPU instances: profiles, placements, creation, destruction.
//!
//! A profile *index* is one of the header's constants, a profile *id* is the GPU's own number.
//! Profiles and placements can be queried whether MIG is on or off; everything else requires it to
//! be on.

use divvy_sim::catalogue::GiProfile;
use divvy_sim::code::Code;
use divvy_sim::mig;
use divvy_sim::state::{self, Gpu};

use crate::abi::{
    GpuInstanceInfo, GpuInstanceProfile, GpuInstanceProfileV2, GpuInstanceProfileV3, Placement, Versioned,
};
use crate::argument::{Array, Count, In, Out, Outcome, fixed};
use crate::handle::{Device, GpuInstance};
use crate::library::{Nvml, entry};

/// `NVML_GPU_INSTANCE_PROFILE_COUNT` of header 13.3.
const PROFILE_COUNT: u32 = 0x12;
/// `NVML_GPU_INSTANCE_PROFILE_CAPS_GFX`. No profile of the catalogue has peer-to-peer access.
const CAPABILITY_GRAPHICS: u32 = 2;

impl From<state::Placement> for Placement {
    fn from(state::Placement { start, size }: state::Placement) -> Self {
        Self { start, size }
    }
}

impl From<Placement> for state::Placement {
    fn from(Placement { start, size }: Placement) -> Self {
        Self { start, size }
    }
}

/// The profile at an index. An index outside the header's range is INVALID_ARGUMENT, which ends
/// enumerations.
fn at_index(gpu: &Gpu, index: u32) -> Outcome<&'static GiProfile> {
    if index >= PROFILE_COUNT {
        return Err(Code::InvalidArgument);
    }
    mig::geometry(gpu)?;
    gpu.model().profile_at(index).ok_or(Code::NotSupported)
}

fn first_version(profile: &GiProfile) -> GpuInstanceProfile {
    let [copy_engines, decoders, encoders, jpeg_engines, ofa_engines] = profile.engines();
    GpuInstanceProfile {
        id: profile.id,
        p2p: 0,
        slices: profile.slices(),
        instances: profile.instances,
        multiprocessors: profile.sm,
        copy_engines,
        decoders,
        encoders,
        jpeg_engines,
        ofa_engines,
        memory_mib: profile.memory_mib,
    }
}

/// Fills in version 2 or 3, depending on the caller's version word.
fn fill_versioned(info: &Out<GpuInstanceProfileV2>, profile: &GiProfile) -> Outcome {
    let GpuInstanceProfile {
        id,
        p2p,
        slices,
        instances,
        multiprocessors,
        copy_engines,
        decoders,
        encoders,
        jpeg_engines,
        ofa_engines,
        memory_mib,
    } = first_version(profile);
    let name = fixed(&format!("MIG {}", profile.name));
    match info.version() {
        version @ GpuInstanceProfileV2::VERSION => info.set(GpuInstanceProfileV2 {
            version,
            id,
            p2p,
            slices,
            instances,
            multiprocessors,
            copy_engines,
            decoders,
            encoders,
            jpeg_engines,
            ofa_engines,
            memory_mib,
            name,
        }),
        version @ GpuInstanceProfileV3::VERSION => info.as_version().set(GpuInstanceProfileV3 {
            version,
            id,
            slices,
            instances,
            multiprocessors,
            copy_engines,
            decoders,
            encoders,
            jpeg_engines,
            ofa_engines,
            memory_mib,
            name,
            capabilities: if profile.has_graphics() { CAPABILITY_GRAPHICS } else { 0 },
        }),
        _ => return Err(Code::ArgumentVersionMismatch),
    }
    Ok(())
}

fn expect_versioned(info: &Out<GpuInstanceProfileV2>) -> Outcome {
    match info.version() {
        GpuInstanceProfileV2::VERSION | GpuInstanceProfileV3::VERSION => Ok(()),
        _ => Err(Code::ArgumentVersionMismatch),
    }
}

fn placements(nvml: &Nvml, device: Device, id: u32, array: &Array<Placement>, count: &Count) -> Outcome {
    let (_, gpu) = device.whole(&nvml.state)?;
    let profile = mig::profile(gpu, id)?;
    count.list_or_count(array, profile.placements().map(Placement::from).collect())
}

fn create(
    nvml: &Nvml,
    device: Device,
    id: u32,
    place: Option<Placement>,
    created: &Out<GpuInstance>,
) -> Outcome {
    let (slot, gpu) = device.whole(&nvml.state)?;
    mig::geometry(gpu)?;
    nvml.may_configure()?;
    let gi = nvml.change(|state| state.create_gi(slot, id, place.map(Into::into)))?;
    created.set(GpuInstance::of(slot, &gi));
    Ok(())
}

/// The GPU of a call about instances, which requires MIG to be on.
fn with_mig(nvml: &Nvml, device: Device) -> Outcome<(usize, &Gpu)> {
    let (slot, gpu) = device.whole(&nvml.state)?;
    if gpu.mig.current { Ok((slot, gpu)) } else { Err(Code::NotSupported) }
}

entry! {
    fn nvmlDeviceGetGpuInstanceProfileInfo(
        nvml,
        device: Device,
        profile: u32,
        info: Out<GpuInstanceProfile>,
    ) {
        info.set(first_version(at_index(device.whole(&nvml.state)?.1, profile)?));
        Ok(())
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoV(
        nvml,
        device: Device,
        profile: u32,
        info: Out<GpuInstanceProfileV2>,
    ) {
        expect_versioned(&info)?;
        fill_versioned(&info, at_index(device.whole(&nvml.state)?.1, profile)?)
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(
        nvml,
        device: Device,
        id: u32,
        info: Out<GpuInstanceProfileV2>,
    ) {
        expect_versioned(&info)?;
        fill_versioned(&info, mig::profile(device.whole(&nvml.state)?.1, id)?)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements(
        nvml, device: Device, id: u32, array: Array<Placement>, count: Count,
    ) {
        placements(nvml, device, id, &array, &count)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        nvml, device: Device, id: u32, array: Array<Placement>, count: Count,
    ) {
        placements(nvml, device, id, &array, &count)
    }

    fn nvmlDeviceGetGpuInstanceRemainingCapacity(nvml, device: Device, id: u32, count: Out<u32>) {
        count.set(mig::remaining_gi(device.whole(&nvml.state)?.1, id)?);
        Ok(())
    }

    fn nvmlDeviceCreateGpuInstance(nvml, device: Device, id: u32, created: Out<GpuInstance>) {
        create(nvml, device, id, None, &created)
    }

    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        nvml, device: Device, id: u32, placement: In<Placement>, created: Out<GpuInstance>,
    ) {
        create(nvml, device, id, Some(placement.get()), &created)
    }

    /// The array has room for all instances that the profile allows; the count is only an output.
    fn nvmlDeviceGetGpuInstances(nvml, device: Device, id: u32, array: Array<GpuInstance>, count: Out<u32>) {
        if array.is_null() {
            return Err(Code::InvalidArgument);
        }
        let (slot, gpu) = with_mig(nvml, device)?;
        mig::profile(gpu, id)?;
        nvml.may_configure()?;
        let found: Vec<_> = gpu.instances.iter().filter(|gi| gi.profile == id).collect();
        count.set(found.len() as u32);
        array.fill(found.into_iter().map(|gi| GpuInstance::of(slot, gi)));
        Ok(())
    }

    fn nvmlDeviceGetGpuInstanceById(nvml, device: Device, id: u32, found: Out<GpuInstance>) {
        let (slot, gpu) = with_mig(nvml, device)?;
        let gi = gpu.gi(id).ok_or(Code::NotFound)?;
        if nvml.may_configure().is_err() && !nvml.visible().has_gi(gpu, id) {
            return Err(Code::NoPermission);
        }
        found.set(GpuInstance::of(slot, gi));
        Ok(())
    }

    fn nvmlGpuInstanceDestroy(nvml, instance: GpuInstance) {
        instance.target(&nvml.state)?;
        nvml.may_configure()?;
        nvml.change(|state| {
            let (slot, _, gi) = instance.target(state)?;
            let id = gi.id;
            state.destroy_gi(slot, id)
        })
    }

    fn nvmlGpuInstanceGetInfo(nvml, instance: GpuInstance, info: Out<GpuInstanceInfo>) {
        let (slot, gpu, gi) = instance.target(&nvml.state)?;
        info.set(GpuInstanceInfo {
            device: Device::of_gpu(slot, gpu).raw(),
            id: gi.id,
            profile_id: gi.profile,
            placement: gi.placement.into(),
        });
        Ok(())
    }
}
