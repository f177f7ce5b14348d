//! Computes the [`Inventory`] from the readings of NVML and sysfs and from the records. Pure.
//!
//! A GPU that disappears becomes `Missing` with its last description. One that cannot be read keeps
//! its description and gets a condition with the cause. A description is *current* if NVML gave it
//! in this boot and the kernel does not contradict it; only then its minor is used.
//!
//! Readings may be older than the records, so the owner of an instance needs care: see
//! [`PendingOwnership`].

use crate::gpu::sysfs::PciFacts;
use divvy_api::GpuUuid;
use divvy_model::inventory::{
    Condition, Gpu, GpuInstance, Inventory, Mig, MigMode, MigToggle, Origin, Presence,
};
use divvy_model::numbers::GpuNumbers;
use divvy_model::{Finding, HealthState};
use divvy_nvml::{Description, Links, NvmlError, RawInstance, RawMig, Snapshot, State};
use std::collections::{BTreeMap, BTreeSet};

/// Whether a record has the instance with that profile id and start.
pub type Ownership = dyn Fn(&GpuUuid, u32, u32) -> bool + Send + Sync;

/// The inventory while NVML is open.
pub fn inventory(
    snapshot: &Snapshot,
    pci: &BTreeMap<String, PciFacts>,
    numbers: &mut GpuNumbers,
    mut classifier: OwnerClassifier<'_>,
    names_instance: &dyn Fn(&GpuUuid) -> bool,
    current: &BTreeSet<GpuUuid>,
    last: &Inventory,
) -> Inventory {
    let mut gpus: Vec<Gpu> = Vec::with_capacity(snapshot.gpus.len());
    for found in &snapshot.gpus {
        let known = last.gpus.iter().find(|gpu| gpu.uuid == found.uuid);
        match &found.reading {
            Ok((description, state)) => {
                let number = numbers.number(&found.uuid, state.minor);
                let facts = pci.get(&description.pci_bus_id).cloned().unwrap_or_default();
                let (mig, unreadable) =
                    mig(&found.uuid, description, state, known, &mut classifier, names_instance);
                gpus.push(Gpu {
                    number,
                    uuid: found.uuid.clone(),
                    minor: state.minor,
                    product: description.product.clone(),
                    brand: description.brand.clone(),
                    architecture: description.architecture.clone(),
                    compute_capability: description.compute_capability,
                    memory_bytes: description.memory_bytes,
                    addressing_mode: description.addressing_mode.clone(),
                    pci_bus_id: description.pci_bus_id.clone(),
                    pcie_root: facts.pcie_root,
                    numa_node: facts.numa_node,
                    nvlink_group: None,
                    nvlink_peers: 0,
                    mig,
                    presence: Presence::Present,
                    conditions: unreadable.into_iter().collect(),
                    policy: Default::default(),
                });
            }
            // A GPU that was never read cannot be described; it is added when it answers.
            Err(error) => gpus.extend(known.map(|gpu| {
                let conditions = conditions(error, &gpu.conditions);
                match current.contains(&gpu.uuid) {
                    true => Gpu { presence: Presence::Present, conditions, ..gpu.clone() },
                    false => Gpu { conditions, ..missing(gpu) },
                }
            })),
        }
    }
    let unlisted = last.gpus.iter().filter(|gpu| snapshot.gpus.iter().all(|have| have.uuid != gpu.uuid));
    gpus.extend(unlisted.map(|gpu| without_reading(gpu, current)));
    gpus.sort_by_key(|gpu| gpu.number);
    group_by_nvlink(&mut gpus, snapshot, last);
    Inventory {
        driver_version: snapshot.driver_version.clone(),
        cuda_version: snapshot.cuda_version,
        gpus,
        ..Inventory::default()
    }
}

/// The inventory while NVML is closed. GPUs with a current description keep it, with their
/// instances; all others are missing.
pub fn without_driver(last: &Inventory, current: &BTreeSet<GpuUuid>) -> Inventory {
    let gpus = last.gpus.iter().map(|gpu| without_reading(gpu, current));
    Inventory { gpus: gpus.collect(), ..Inventory::default() }
}

/// A GPU that NVML does not list now.
fn without_reading(gpu: &Gpu, current: &BTreeSet<GpuUuid>) -> Gpu {
    match current.contains(&gpu.uuid) {
        true => Gpu { presence: Presence::Unread, ..gpu.clone() },
        false => missing(gpu),
    }
}

/// The last description of a missing GPU, without its instances. A MIG mode that the infoROM does
/// not store is off when the GPU comes back.
fn missing(gpu: &Gpu) -> Gpu {
    let mig = match &gpu.mig {
        Mig::Unsupported => Mig::Unsupported,
        Mig::Supported { mode, toggle, profiles, .. } => {
            let mode = if *toggle == MigToggle::Live { MigMode::Off } else { *mode };
            Mig::Supported { mode, toggle: *toggle, profiles: profiles.clone(), instances: Vec::new() }
        }
    };
    Gpu { presence: Presence::Missing, conditions: Vec::new(), mig, ..gpu.clone() }
}

/// The MIG facts, and the condition if they cannot be read now.
fn mig(
    uuid: &GpuUuid,
    description: &Description,
    state: &State,
    last: Option<&Gpu>,
    classifier: &mut OwnerClassifier<'_>,
    names_instance: &dyn Fn(&GpuUuid) -> bool,
) -> (Mig, Option<Condition>) {
    let unreadable = |cause: &NvmlError| Some(Condition::MigUnreadable { cause: cause.to_string() });
    let (mode, instances, profiles) = match (&state.mig, &description.profiles) {
        (RawMig::Unsupported, _) => return (Mig::Unsupported, None),
        (RawMig::Supported { mode, instances }, Ok(profiles)) => (mode, instances, profiles),
        (RawMig::Supported { mode, .. }, Err(cause)) => {
            let mig = last_mig(uuid, description, Some(*mode), last, names_instance);
            return (mig, unreadable(cause));
        }
        (RawMig::Unreadable { mode, cause }, _) => {
            return (last_mig(uuid, description, *mode, last, names_instance), unreadable(cause));
        }
    };
    let before = match last.map(|gpu| &gpu.mig) {
        Some(Mig::Supported { instances, .. }) => instances.as_slice(),
        _ => &[],
    };
    let instances = instances.iter().map(|raw| {
        let same = |was: &&GpuInstance| {
            (was.id, was.profile_id, was.placement) == (raw.id, raw.profile_id, raw.placement)
        };
        GpuInstance {
            id: raw.id,
            profile_id: raw.profile_id,
            placement: raw.placement,
            compute_instances: raw.compute_instances.clone(),
            origin: classifier.origin(uuid, raw, before.iter().find(same).map(|was| was.origin)),
        }
    });
    let mig = Mig::Supported {
        mode: *mode,
        toggle: description.toggle,
        profiles: profiles.clone(),
        instances: instances.collect(),
    };
    (mig, None)
}

/// MIG facts of a GPU whose facts cannot be read. The GPU may have been published with instances,
/// so it keeps its last facts. Without them, only a GPU with MIG mode off and no instance in a
/// record is safe to use as a whole. Any other GPU gets facts without instances: it stays visible,
/// and its condition taints it ([`Gpu::effect`]).
fn last_mig(
    uuid: &GpuUuid,
    description: &Description,
    mode: Option<MigMode>,
    last: Option<&Gpu>,
    names_instance: &dyn Fn(&GpuUuid) -> bool,
) -> Mig {
    match last.map(|gpu| &gpu.mig) {
        Some(known @ Mig::Supported { profiles, .. }) if !profiles.is_empty() => known.clone(),
        _ if mode == Some(MigMode::Off) && !names_instance(uuid) => Mig::Unsupported,
        _ => Mig::Supported {
            mode: mode.unwrap_or(MigMode::On),
            toggle: description.toggle,
            profiles: description.profiles.clone().unwrap_or_default(),
            instances: Vec::new(),
        },
    }
}

/// The conditions of an unreadable GPU. An error without information about the GPU changes nothing.
/// Findings other than [`HealthState::Stuck`] are added by `gpu/health`.
fn conditions(error: &NvmlError, before: &[Condition]) -> Vec<Condition> {
    match error {
        NvmlError::Lost { call, .. } => vec![finding(HealthState::Lost, format!("{call} found no GPU"))],
        NvmlError::Stuck { call, .. } | NvmlError::Deadline { call, .. } => {
            vec![finding(HealthState::Stuck, format!("{call} has not returned"))]
        }
        _ => {
            let is_other = |condition: &&Condition| match condition {
                Condition::Health(finding) => finding.state != HealthState::Stuck,
                _ => false,
            };
            before.iter().filter(|condition| !is_other(condition)).cloned().collect()
        }
    }
}

fn finding(state: HealthState, cause: String) -> Condition {
    Condition::Health(Finding::of_gpu(state, cause))
}

/// Groups GPUs that are connected over NVLink. In MIG mode the links are not visible; while any GPU
/// is in that mode, earlier groups are kept. A group keeps its name; a new one gets the name of its
/// first GPU.
fn group_by_nvlink(gpus: &mut [Gpu], snapshot: &Snapshot, last: &Inventory) {
    let links: BTreeMap<&GpuUuid, &Description> = snapshot
        .gpus
        .iter()
        .filter_map(|found| {
            found.reading.as_ref().ok().map(|(description, _)| (&found.uuid, description.as_ref()))
        })
        .collect();
    let silenced = links.values().any(|description| description.links.is_none());
    let before = |uuid: &GpuUuid| {
        let gpu = last.gpus.iter().find(|gpu| gpu.uuid == *uuid)?;
        gpu.nvlink_group.clone().map(|group| (group, gpu.nvlink_peers))
    };
    let readable: Vec<(usize, &Links, &str)> = gpus
        .iter()
        .enumerate()
        .filter_map(|(at, gpu)| {
            let description = links.get(&gpu.uuid)?;
            Some((at, description.links.as_ref()?, description.pci_bus_id.as_str()))
        })
        .collect();
    let joined = |(_, a, a_id): &(usize, &Links, &str), (_, b, b_id): &(usize, &Links, &str)| {
        a.gpus.iter().any(|far| far == b_id)
            || b.gpus.iter().any(|far| far == a_id)
            || (a.switch.is_some() && a.switch == b.switch)
    };
    let mut groups: BTreeMap<usize, (String, u32)> = BTreeMap::new();
    let mut names = BTreeSet::new();
    for first in &readable {
        if groups.contains_key(&first.0) {
            continue;
        }
        let mut members = vec![first];
        let mut next = 0;
        while next < members.len() {
            let from = members[next];
            let reached = |gpu: &&(usize, &Links, &str)| {
                members.iter().all(|have| have.0 != gpu.0) && joined(from, gpu)
            };
            let more: Vec<_> = readable.iter().filter(reached).collect();
            members.extend(more);
            next += 1;
        }
        if members.len() < 2 {
            continue;
        }
        members.sort_by_key(|member| member.0);
        let earlier =
            members.iter().filter_map(|member| before(&gpus[member.0].uuid)).map(|(group, _)| group);
        let name = earlier.chain([gpus[first.0].uuid.to_string()]).find(|name| !names.contains(name));
        let Some(name) = name else { continue };
        names.insert(name.clone());
        for member in &members {
            let peers = members.iter().filter(|other| other.0 != member.0 && joined(member, other)).count();
            groups.insert(member.0, (name.clone(), u32::try_from(peers).unwrap_or(u32::MAX)));
        }
    }
    for (at, gpu) in gpus.iter_mut().enumerate() {
        let unread = !links.contains_key(&gpu.uuid);
        let earlier = if silenced || unread { before(&gpu.uuid) } else { None };
        if let Some((group, peers)) = earlier.or_else(|| groups.remove(&at)) {
            gpu.nvlink_group = Some(group);
            gpu.nvlink_peers = peers;
        } else {
            gpu.nvlink_group = None;
            gpu.nvlink_peers = 0;
        }
    }
}

/// An instance: GPU, id, profile id, start.
type InstanceId = (GpuUuid, u32, u32, u32);

/// Instances that belonged to Divvy but have no record any more, so that the owner is undecided.
///
/// A reading may show an instance that was destroyed since, with its record removed. Such an
/// instance stays Divvy's until a reading that began without a record shows it; then it is foreign.
/// This is safe because a record is written before its instance is created, and GPU calls run in
/// the order of their requests.
#[derive(Debug, Default)]
pub struct PendingOwnership(BTreeMap<InstanceId, PendingState>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingState {
    /// No reading began since the record was missed.
    Unread,
    /// The last reading of the GPU began when there was no record.
    ReadingBegun,
}

/// The GPUs that were read since the last classification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadScope<'a> {
    /// All GPUs, at a time when this process could not change them.
    All,
    Gpu(&'a GpuUuid),
    Nothing,
}

impl PendingOwnership {
    /// Notes that a reading of the GPU begins.
    pub fn reading_begins(&mut self, gpu: &GpuUuid, ownership: &Ownership) {
        self.0.retain(|(of, _, profile_id, start), _| of != gpu || !ownership(of, *profile_id, *start));
        for (_, since) in self.0.iter_mut().filter(|((of, ..), _)| of == gpu) {
            *since = PendingState::ReadingBegun;
        }
    }

    /// The GPUs that must be read to decide.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.0.keys().map(|(gpu, ..)| gpu)
    }

    /// Starts a classification; instances that it does not meet are forgotten.
    pub fn classify<'a>(&'a mut self, ownership: &'a Ownership, scope: ReadScope<'a>) -> OwnerClassifier<'a> {
        let before = std::mem::take(&mut self.0);
        OwnerClassifier { ownership, scope, before, now: self }
    }
}

/// Classifies the instances of one inventory.
pub struct OwnerClassifier<'a> {
    ownership: &'a Ownership,
    scope: ReadScope<'a>,
    before: BTreeMap<InstanceId, PendingState>,
    now: &'a mut PendingOwnership,
}

impl OwnerClassifier<'_> {
    /// The owner of the instance; `last` is the earlier answer.
    fn origin(&mut self, gpu: &GpuUuid, raw: &RawInstance, last: Option<Origin>) -> Origin {
        if (self.ownership)(gpu, raw.profile_id, raw.placement.start) {
            return Origin::Ours;
        }
        let instance = (gpu.clone(), raw.id, raw.profile_id, raw.placement.start);
        let since = self.before.get(&instance).copied().unwrap_or(PendingState::Unread);
        let decided = match self.scope {
            ReadScope::All => true,
            ReadScope::Gpu(scope) => scope == gpu && since == PendingState::ReadingBegun,
            ReadScope::Nothing => false,
        };
        if decided || last == Some(Origin::Foreign) {
            return Origin::Foreign;
        }
        self.now.0.insert(instance, since);
        Origin::Ours
    }
}

#[cfg(test)]
mod tests;
