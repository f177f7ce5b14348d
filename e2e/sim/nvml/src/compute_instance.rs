//! Compute instances: profiles, placements, creation, destruction, and the attributes of MIG
//! devices.
//!
//! The id of a profile is its index on all known cards. The only engine profile is the shared one:
//! the compute instances of a GPU instance share its copy, video, JPEG and optical-flow engines and
//! its memory.

use divvy_sim::catalogue::CiProfile;
use divvy_sim::code::Code;
use divvy_sim::mig;
use divvy_sim::state::{Gi, Gpu};

use crate::abi::{
    Attributes, ComputeInstanceInfo, ComputeInstanceProfile, ComputeInstanceProfileV2,
    ComputeInstanceProfileV3, Placement, Versioned,
};
use crate::argument::{Array, Count, In, Out, Outcome, fixed};
use crate::handle::{ComputeInstance, Device, GpuInstance, Target};
use crate::library::{Nvml, entry};

/// `NVML_COMPUTE_INSTANCE_PROFILE_COUNT` of header 13.3.
const PROFILE_COUNT: u32 = 9;
/// `NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED`, the only engine profile.
const ENGINES_SHARED: u32 = 0;
/// `NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX`.
const CAPABILITY_GRAPHICS: u32 = 1;

/// `3g.40gb` if the compute instance has all slices, else `1c.3g.40gb`.
pub(crate) fn name(gpu: &Gpu, gi: &Gi, profile: u32) -> Option<String> {
    let whole = gpu.model().profile(gi.profile)?;
    let ci = gpu.model().ci_profile(whole, profile)?;
    let all = ci.slices == whole.slices();
    Some(if all { whole.name.clone() } else { format!("{}c.{}", ci.slices, whole.name) })
}

/// Attributes of a MIG device; NOT_SUPPORTED for a GPU.
pub(crate) fn attributes(target: &Target<'_>) -> Outcome<Attributes> {
    let (gi, ci) = target.mig.ok_or(Code::NotSupported)?;
    let profile = mig::profile(target.gpu, gi.profile)?;
    let part = mig::ci_profile(target.gpu, gi, ci.profile)?;
    let [copy_engines, decoders, encoders, jpeg_engines, ofa_engines] = profile.engines();
    Ok(Attributes {
        multiprocessors: part.sm,
        copy_engines,
        decoders,
        encoders,
        jpeg_engines,
        ofa_engines,
        gpu_instance_slices: profile.slices(),
        compute_instance_slices: part.slices,
        memory_mib: profile.memory_mib,
    })
}

/// The profile at an index. An index outside the header's range is INVALID_ARGUMENT, which ends
/// enumerations.
fn at_index(gpu: &Gpu, gi: &Gi, index: u32, engines: u32) -> Outcome<CiProfile> {
    if index >= PROFILE_COUNT || engines != ENGINES_SHARED {
        return Err(Code::InvalidArgument);
    }
    mig::ci_profile(gpu, gi, index)
}

fn first_version(gpu: &Gpu, gi: &Gi, profile: CiProfile) -> Outcome<ComputeInstanceProfile> {
    let [copy_engines, decoders, encoders, jpeg_engines, ofa_engines] =
        mig::profile(gpu, gi.profile)?.engines();
    Ok(ComputeInstanceProfile {
        id: profile.index,
        slices: profile.slices,
        instances: profile.instances,
        multiprocessors: profile.sm,
        copy_engines,
        decoders,
        encoders,
        jpeg_engines,
        ofa_engines,
    })
}

fn create(
    nvml: &Nvml,
    instance: GpuInstance,
    id: u32,
    place: Option<Placement>,
    created: &Out<ComputeInstance>,
) -> Outcome {
    instance.target(&nvml.state)?;
    nvml.may_configure()?;
    let made = nvml.change(|state| {
        let (slot, _, gi) = instance.target(state)?;
        let gi = gi.id;
        let ci = state.create_ci(slot, gi, id, place.map(Into::into))?;
        Ok(ComputeInstance::of(slot, gi, &ci))
    })?;
    created.set(made);
    Ok(())
}

fn info(nvml: &Nvml, instance: ComputeInstance) -> Outcome<ComputeInstanceInfo> {
    let (slot, _, gi, ci) = instance.target(&nvml.state)?;
    Ok(ComputeInstanceInfo {
        // The MIG device instead of the GPU, because programs query its UUID.
        device: Device::of_mig(slot, gi.id, ci).raw(),
        gpu_instance: GpuInstance::of(slot, gi).raw(),
        id: ci.id,
        profile_id: ci.profile,
        placement: ci.placement.into(),
    })
}

entry! {
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        nvml, instance: GpuInstance, profile: u32, engines: u32, info: Out<ComputeInstanceProfile>,
    ) {
        let (_, gpu, gi) = instance.target(&nvml.state)?;
        info.set(first_version(gpu, gi, at_index(gpu, gi, profile, engines)?)?);
        Ok(())
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        nvml, instance: GpuInstance, profile: u32, engines: u32, info: Out<ComputeInstanceProfileV2>,
    ) {
        let version = info.version();
        if !matches!(version, ComputeInstanceProfileV2::VERSION | ComputeInstanceProfileV3::VERSION) {
            return Err(Code::ArgumentVersionMismatch);
        }
        let (_, gpu, gi) = instance.target(&nvml.state)?;
        let profile = at_index(gpu, gi, profile, engines)?;
        let ComputeInstanceProfile {
            id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpeg_engines,
            ofa_engines,
        } = first_version(gpu, gi, profile)?;
        let name = fixed(&format!("MIG {}", name(gpu, gi, profile.index).ok_or(Code::Unknown)?));
        if version == ComputeInstanceProfileV2::VERSION {
            info.set(ComputeInstanceProfileV2 {
                version, id, slices, instances, multiprocessors, copy_engines, decoders, encoders,
                jpeg_engines,
                ofa_engines, name,
            });
            return Ok(());
        }
        let graphics = mig::profile(gpu, gi.profile)?.has_graphics();
        info.as_version().set(ComputeInstanceProfileV3 {
            version, id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpeg_engines,
            ofa_engines, name,
            capabilities: if graphics { CAPABILITY_GRAPHICS } else { 0 },
        });
        Ok(())
    }

    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
        nvml,
        instance: GpuInstance,
        id: u32,
        count: Out<u32>,
    ) {
        let (_, gpu, gi) = instance.target(&nvml.state)?;
        count.set(mig::remaining_ci(gpu, gi.id, id)?);
        Ok(())
    }

    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        nvml, instance: GpuInstance, id: u32, array: Array<Placement>, count: Count,
    ) {
        let (_, gpu, gi) = instance.target(&nvml.state)?;
        let profile = mig::ci_profile(gpu, gi, id)?;
        count.list_or_count(&array, mig::ci_placements(gpu, gi, profile).map(Placement::from).collect())
    }

    fn nvmlGpuInstanceCreateComputeInstance(
        nvml,
        instance: GpuInstance,
        id: u32,
        created: Out<ComputeInstance>,
    ) {
        create(nvml, instance, id, None, &created)
    }

    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        nvml, instance: GpuInstance, id: u32, placement: In<Placement>, created: Out<ComputeInstance>,
    ) {
        create(nvml, instance, id, Some(placement.get()), &created)
    }

    /// The array has room for all instances that the profile allows; the count is only an output.
    fn nvmlGpuInstanceGetComputeInstances(
        nvml, instance: GpuInstance, id: u32, array: Array<ComputeInstance>, count: Out<u32>,
    ) {
        if array.is_null() {
            return Err(Code::InvalidArgument);
        }
        let (slot, gpu, gi) = instance.target(&nvml.state)?;
        mig::ci_profile(gpu, gi, id)?;
        nvml.may_configure()?;
        let found: Vec<_> = gi.cis.iter().filter(|ci| ci.profile == id).collect();
        count.set(found.len() as u32);
        array.fill(found.into_iter().map(|ci| ComputeInstance::of(slot, gi.id, ci)));
        Ok(())
    }

    fn nvmlGpuInstanceGetComputeInstanceById(
        nvml,
        instance: GpuInstance,
        id: u32,
        found: Out<ComputeInstance>,
    ) {
        let (slot, gpu, gi) = instance.target(&nvml.state)?;
        let ci = gi.ci(id).ok_or(Code::NotFound)?;
        if nvml.may_configure().is_err() && !nvml.visible().has_ci(gpu, gi.id, id) {
            return Err(Code::NoPermission);
        }
        found.set(ComputeInstance::of(slot, gi.id, ci));
        Ok(())
    }

    fn nvmlComputeInstanceGetInfo(nvml, instance: ComputeInstance, place: Out<ComputeInstanceInfo>) {
        place.set(info(nvml, instance)?);
        Ok(())
    }

    fn nvmlComputeInstanceGetInfo_v2(nvml, instance: ComputeInstance, place: Out<ComputeInstanceInfo>) {
        place.set(info(nvml, instance)?);
        Ok(())
    }

    fn nvmlComputeInstanceDestroy(nvml, instance: ComputeInstance) {
        instance.target(&nvml.state)?;
        nvml.may_configure()?;
        nvml.change(|state| {
            let (slot, _, gi, ci) = instance.target(state)?;
            let (gi, ci) = (gi.id, ci.id);
            state.destroy_ci(slot, gi, ci)
        })
    }
}
