//! MIG rules of one GPU: which instances it can have, and when the mode can change.
//!
//! Pure functions on [`Gpu`] that answer and refuse like NVML. Ids derive from placements, default
//! placements follow the driver's buddy order. A mode change requires a reset on GA100 and an idle
//! GPU on everything later.

use crate::catalogue::{CiProfile, GiProfile, MigModel, Toggle};
use crate::code::Code;
use crate::state::{Ci, Gi, Gpu, Health, Host, Loss, MigMode, Placement, Process, ProcessKind};
use sha1::{Digest, Sha1};

/// Limit of the driver, independent of the profiles.
const MAX_GPU_INSTANCES: usize = 8;
/// Limit of the driver for one GPU instance. Ids are below it.
const MAX_COMPUTE_INSTANCES: u32 = 8;

/// Makes a new instance distinguishable from earlier ones.
#[derive(Clone, Copy, Debug)]
pub struct InstanceSeed {
    /// Generation of the state; becomes the instance's `born`.
    pub generation: u64,
    /// Mixed into the UUID. With 0, an instance at the same place has the same UUID each time.
    pub salt: u64,
}

/// The GPU's MIG geometry, independent of the mode.
pub fn geometry(gpu: &Gpu) -> Result<&'static MigModel, Code> {
    if let Some(code) = gpu.failure() {
        return Err(code);
    }
    gpu.model().mig.as_ref().ok_or(Code::NotSupported)
}

/// The GPU's MIG geometry; NOT_SUPPORTED unless the mode is on.
fn enabled(gpu: &Gpu) -> Result<&'static MigModel, Code> {
    let model = geometry(gpu)?;
    if gpu.mig.current { Ok(model) } else { Err(Code::NotSupported) }
}

/// The GPU-instance profile with that id.
pub fn profile(gpu: &Gpu, id: u32) -> Result<&'static GiProfile, Code> {
    geometry(gpu)?;
    gpu.model().profile(id).ok_or(Code::NotSupported)
}

/// Id of the GPU instance at a placement: its node in the binary tree over the grid, in
/// breadth-first order. The whole is 0, the halves are 1 and 2, the quarters 3 to 6.
pub const fn gi_id(grid: u32, placement: Placement) -> u32 {
    grid / placement.size - 1 + placement.start / placement.size
}

/// Changes the MIG mode. The outer result is that of the call, the inner code the activation
/// status: `Success`, `InUse` or `ResetRequired`.
pub fn set_mode(gpu: &mut Gpu, on: bool, host: &Host) -> Result<Code, Code> {
    let model = geometry(gpu)?;
    if gpu.mig.current == on {
        gpu.mig.pending = on;
        return Ok(Code::Success);
    }
    let busy = !gpu.instances.is_empty() || !gpu.processes.is_empty() || !gpu.holders.is_empty();
    match model.toggle {
        Toggle::Live if busy => Ok(Code::InUse),
        Toggle::Live => {
            gpu.mig = MigMode { current: on, pending: on };
            Ok(Code::Success)
        }
        Toggle::Reset => {
            gpu.mig.pending = on;
            if busy {
                return Ok(Code::InUse);
            }
            if host.vm {
                return Ok(Code::ResetRequired);
            }
            // On bare metal the driver resets an idle GPU itself.
            wipe(gpu);
            gpu.mig.current = on;
            Ok(Code::Success)
        }
    }
}

/// Resets the GPU: removes instances and processes, and makes a pending mode current.
pub fn reset(gpu: &mut Gpu) {
    wipe(gpu);
    gpu.mig.current = gpu.mig.pending;
    (gpu.lost, gpu.loss) = (false, Loss::default());
}

/// The effect of a reboot or a driver reload on the GPU itself.
pub fn boot(gpu: &mut Gpu) {
    wipe(gpu);
    // Only GA100 stores the mode on the board.
    let kept = gpu.model().mig.as_ref().is_some_and(|mig| mig.toggle == Toggle::Reset);
    let on = kept && gpu.mig.pending;
    gpu.mig = MigMode { current: on, pending: on };
    gpu.compute_mode = 0;
    gpu.timeslice = 0;
    gpu.persistence = false;
    (gpu.lost, gpu.loss) = (false, Loss::default());
}

fn wipe(gpu: &mut Gpu) {
    gpu.epoch += 1;
    gpu.instances.clear();
    gpu.processes.clear();
    gpu.holders.clear();
    gpu.limits.clear();
    let old = gpu.health;
    gpu.health = Health {
        ecc_corrected_total: old.ecc_corrected_total,
        ecc_uncorrected_total: old.ecc_uncorrected_total,
        rows_remapped_corrected: old.rows_remapped_corrected,
        // A pending remap takes effect with the reset.
        rows_remapped_uncorrected: old.rows_remapped_uncorrected + u32::from(old.remap_pending),
        remap_failed: old.remap_failed,
        sram_threshold_exceeded: old.sram_threshold_exceeded,
        ..Health::default()
    };
}

/// MiB that processes can use, of one GPU instance or of the whole GPU.
pub fn memory_mib(gpu: &Gpu, gi: Option<u32>) -> u64 {
    let model = gpu.model();
    match gi {
        None => model.memory_total_mib.saturating_sub(model.memory_reserved_mib),
        Some(id) => {
            gpu.gi(id).and_then(|gi| model.profile(gi.profile)).map_or(0, |profile| profile.memory_mib)
        }
    }
}

/// Whether the compute mode allows another process. The mode does not apply to MIG instances or to
/// clients of MPS, whose server counts as the one process.
pub fn allows_process(gpu: &Gpu, process: &Process) -> bool {
    let alone = |other: &&Process| other.kind == ProcessKind::Compute && other.pid != process.pid;
    match gpu.compute_mode {
        _ if process.kind != ProcessKind::Compute || process.instance.is_some() => true,
        0 => true,
        2 => false,
        _ => gpu.processes.iter().find(alone).is_none(),
    }
}

/// Creates a GPU instance at the given placement, or where the driver would place it.
pub fn create_gi(gpu: &mut Gpu, id: u32, wanted: Option<Placement>, birth: InstanceSeed) -> Result<Gi, Code> {
    let model = enabled(gpu)?;
    let profile = profile(gpu, id)?;
    if gpu.processes.iter().any(|process| process.instance.is_none()) {
        return Err(Code::InUse);
    }
    let placement = match wanted {
        Some(placement) if !profile.placements().any(|listed| listed == placement) => {
            return Err(Code::InvalidArgument);
        }
        Some(placement) => placement,
        None => default_placement(gpu, model, profile).ok_or(Code::InsufficientResources)?,
    };
    if !fits(gpu, model, profile, placement) {
        return Err(Code::InsufficientResources);
    }
    let id = gi_id(model.grid, placement);
    let gi = Gi { id, profile: profile.id, placement, born: birth.generation, cis: Vec::new() };
    let at = gpu.instances.partition_point(|other| other.id < id);
    gpu.instances.insert(at, gi.clone());
    Ok(gi)
}

/// Destroys a GPU instance that is empty and not held.
pub fn destroy_gi(gpu: &mut Gpu, id: u32) -> Result<(), Code> {
    enabled(gpu)?;
    let gi = gpu.gi(id).ok_or(Code::NotFound)?;
    let held = gpu.holders.iter().any(|holder| holder.gi == Some(id));
    let runs = gpu.processes.iter().any(|process| process.instance.is_some_and(|(gi, _)| gi == id));
    if !gi.cis.is_empty() || held || runs {
        return Err(Code::InUse);
    }
    gpu.instances.retain(|gi| gi.id != id);
    Ok(())
}

/// Number of further GPU instances of the profile that fit.
pub fn remaining_gi(gpu: &Gpu, id: u32) -> Result<u32, Code> {
    let model = enabled(gpu)?;
    let profile = profile(gpu, id)?;
    let placements: u32 = profile.placements().map(|place| u32::from(is_free(gpu, place))).sum();
    Ok(placements.min(remaining_by_resources(gpu, model, profile)))
}

/// Creates a compute instance.
pub fn create_ci(
    gpu: &mut Gpu,
    gi: u32,
    id: u32,
    wanted: Option<Placement>,
    birth: InstanceSeed,
) -> Result<Ci, Code> {
    let grid = enabled(gpu)?.grid;
    let instance = gpu.gi(gi).ok_or(Code::NotFound)?;
    let place = instance.placement;
    let profile = ci_profile(gpu, instance, id)?;
    let mut listed = ci_placements(gpu, instance, profile);
    let free = |place: Placement| !instance.cis.iter().any(|ci| ci.placement.overlaps(place));
    let placement = match wanted {
        Some(wanted) if !listed.any(|place| place == wanted) => return Err(Code::InvalidArgument),
        Some(wanted) => Some(wanted).filter(|place| free(*place)),
        None => listed.find(|place| free(*place)),
    };
    let ours = instance.cis.iter().filter(|ci| ci.profile == id).count();
    if ours >= profile.instances as usize {
        return Err(Code::InsufficientResources);
    }
    let placement = placement.ok_or(Code::InsufficientResources)?;
    let id = (0..MAX_COMPUTE_INSTANCES)
        .find(|id| instance.ci(*id).is_none())
        .ok_or(Code::InsufficientResources)?;
    // The graphics pipe of a compute slice, numbered over the GPU.
    let pipe = place.start * MAX_COMPUTE_INSTANCES / grid + placement.start;
    let uuid = mig_uuid(gpu.pdi, gi, pipe, birth.salt);
    let ci = Ci { id, profile: profile.index, placement, uuid, born: birth.generation };
    let instance = gpu.gi_mut(gi).ok_or(Code::NotFound)?;
    let at = instance.cis.partition_point(|other| other.id < id);
    instance.cis.insert(at, ci.clone());
    Ok(ci)
}

/// Destroys a compute instance without processes.
pub fn destroy_ci(gpu: &mut Gpu, gi: u32, id: u32) -> Result<(), Code> {
    enabled(gpu)?;
    gpu.gi(gi).and_then(|gi| gi.ci(id)).ok_or(Code::NotFound)?;
    if gpu.processes.iter().any(|process| process.instance == Some((gi, id))) {
        return Err(Code::InUse);
    }
    let instance = gpu.gi_mut(gi).ok_or(Code::NotFound)?;
    instance.cis.retain(|ci| ci.id != id);
    Ok(())
}

/// Number of further compute instances of the profile that fit into the GPU instance.
pub fn remaining_ci(gpu: &Gpu, gi: u32, id: u32) -> Result<u32, Code> {
    enabled(gpu)?;
    let instance = gpu.gi(gi).ok_or(Code::NotFound)?;
    let profile = ci_profile(gpu, instance, id)?;
    let free = ci_placements(gpu, instance, profile)
        .filter(|place| !instance.cis.iter().any(|ci| ci.placement.overlaps(*place)));
    let ours = instance.cis.iter().filter(|ci| ci.profile == id).count();
    Ok(to_u32(free.count().min((profile.instances as usize).saturating_sub(ours))))
}

/// The compute-instance profile with that id in that GPU instance.
pub fn ci_profile(gpu: &Gpu, gi: &Gi, id: u32) -> Result<CiProfile, Code> {
    gpu.model().ci_profile(profile(gpu, gi.profile)?, id).ok_or(Code::NotSupported)
}

/// Allowed placements of a compute instance in the GPU instance, ascending.
pub fn ci_placements(gpu: &Gpu, gi: &Gi, ci: CiProfile) -> impl Iterator<Item = Placement> + use<> {
    let slices = gpu.model().profile(gi.profile).map_or(0, GiProfile::slices);
    // Starts are aligned to the next power of two: 3-slice instances in 7 slices start at 0 and 4.
    let step = ci.slices.next_power_of_two();
    (0..slices)
        .step_by(step as usize)
        .map(move |start| Placement { start, size: ci.slices })
        .filter(move |place| place.slices().end <= slices)
}

/// The driver's choice: the placement that breaks up the smallest free buddy block, so that large
/// blocks stay intact; the lowest one among equals.
fn default_placement(gpu: &Gpu, model: &MigModel, profile: &GiProfile) -> Option<Placement> {
    profile
        .placements()
        .filter(|place| fits(gpu, model, profile, *place))
        .min_by_key(|place| (broken_block_size(gpu, model, *place), place.start))
}

/// Size of the largest intact block that the placement would break up.
fn broken_block_size(gpu: &Gpu, model: &MigModel, place: Placement) -> u32 {
    let live = |place: Placement| to_u32(place.slices().filter(|slice| !model.is_dead(*slice)).count());
    let mut damage = live(place);
    let mut size = place.size;
    while size * 2 <= model.grid {
        size *= 2;
        let block = Placement { start: place.start / size * size, size };
        if live(block) < block.size || !is_free(gpu, block) {
            break;
        }
        damage = block.size;
    }
    damage
}

fn fits(gpu: &Gpu, model: &MigModel, profile: &GiProfile, place: Placement) -> bool {
    is_free(gpu, place) && remaining_by_resources(gpu, model, profile) > 0
}

fn is_free(gpu: &Gpu, place: Placement) -> bool {
    !gpu.instances.iter().any(|gi| gi.placement.overlaps(place))
}

/// Number of further instances that everything but the memory slices allows.
fn remaining_by_resources(gpu: &Gpu, model: &MigModel, profile: &GiProfile) -> u32 {
    let live = || gpu.instances.iter().filter_map(|gi| gpu.model().profile(gi.profile));
    let ours = to_u32(live().filter(|other| other.id == profile.id).count());
    let of_profile = profile.instances.saturating_sub(ours);
    let of_driver = to_u32(MAX_GPU_INSTANCES.saturating_sub(gpu.instances.len()));
    let slices: u32 = live().map(GiProfile::slices).sum();
    let of_slices = model.compute_slices.saturating_sub(slices) / profile.slices();
    let total = model.whole().map_or([u32::MAX; 5], GiProfile::engines);
    let of_engines = (0..total.len()).filter_map(|kind| {
        let used: u32 = live().map(|other| other.engines()[kind]).sum();
        total[kind].saturating_sub(used).checked_div(profile.engines()[kind])
    });
    of_engines.chain([of_profile, of_driver, of_slices]).min().unwrap_or(0)
}

/// UUID of a board.
pub(crate) fn gpu_uuid(pdi: u64) -> String {
    format!("GPU-{}", uuid5(&board(pdi)))
}

/// UUID of a compute instance, from the board, the GPU instance's id and the graphics pipe.
fn mig_uuid(pdi: u64, gi: u32, pipe: u32, salt: u64) -> String {
    let mut message = board(pdi);
    message.extend(b"\x0bSMC");
    message.extend(gi.to_le_bytes());
    message.extend(pipe.to_le_bytes());
    if salt != 0 {
        message.extend(salt.to_le_bytes());
    }
    format!("MIG-{}", uuid5(&message))
}

fn board(pdi: u64) -> Vec<u8> {
    let mut message = b"divvy simulated graphics board".to_vec();
    message.extend(pdi.to_le_bytes());
    message
}

/// The first 16 bytes of the SHA-1 hash, formatted as a version 5 UUID.
fn uuid5(message: &[u8]) -> String {
    let mut bytes: Vec<u8> = Sha1::digest(message).into_iter().take(16).collect();
    bytes[6] = (bytes[6] & 0x0f) | 0x50;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let mut text = String::with_capacity(36);
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn to_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
