//! From what NVML, sysfs and the records say to the one [`Inventory`]. Pure.
//!
//! A GPU never leaves the inventory: one that is gone is `Missing` with its
//! last description, one that cannot be read keeps its description and gets a
//! condition that says why. What is published of them is decided elsewhere.

mod doubts;

pub use doubts::{Doubts, Fresh, Judge};

use crate::sysfs::PciFacts;
use divvy_api::GpuUuid;
use divvy_model::inventory::{Condition, Gpu, GpuInstance, Inventory, Mig, MigMode, MigToggle, Presence};
use divvy_model::numbers::GpuNumbers;
use divvy_nvml::{Description, Links, NvmlError, RawMig, Snapshot, State};
use std::collections::{BTreeMap, BTreeSet};

/// Whether a record explains the instance of that profile id at that start.
pub type Ours = dyn Fn(&GpuUuid, u32, u32) -> bool + Send + Sync;

/// The inventory of a node whose NVML answers.
pub fn inventory(
    snapshot: &Snapshot,
    pci: &BTreeMap<String, PciFacts>,
    numbers: &mut GpuNumbers,
    mut judge: Judge<'_>,
    last: &Inventory,
) -> Inventory {
    let mut gpus: Vec<Gpu> = Vec::with_capacity(snapshot.gpus.len());
    for found in &snapshot.gpus {
        let known = last.gpus.iter().find(|gpu| gpu.uuid == found.uuid);
        match &found.reading {
            Ok((description, state)) => {
                let number = numbers.number(&found.uuid, state.minor);
                let facts = pci.get(&description.pci_bus_id).cloned().unwrap_or_default();
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
                    mig: mig(&found.uuid, description, state, known, &mut judge),
                    presence: Presence::Present,
                    conditions: Vec::new(),
                    policy: Default::default(),
                });
            }
            // A GPU that was never read cannot be described; it comes when it answers.
            Err(error) => gpus.extend(known.map(|gpu| {
                let conditions = conditions(error, &gpu.conditions);
                Gpu { presence: Presence::Present, conditions, ..gpu.clone() }
            })),
        }
    }
    gpus.extend(
        last.gpus.iter().filter(|gpu| snapshot.gpus.iter().all(|have| have.uuid != gpu.uuid)).map(missing),
    );
    gpus.sort_by_key(|gpu| gpu.number);
    link(&mut gpus, snapshot, last);
    Inventory {
        driver_version: snapshot.driver_version.clone(),
        cuda_version: snapshot.cuda_version,
        gpus,
        ..Inventory::default()
    }
}

/// The inventory of a node whose GPU driver is not there: what was known, all of it missing.
pub fn without_driver(last: &Inventory) -> Inventory {
    Inventory { gpus: last.gpus.iter().map(missing).collect(), ..Inventory::default() }
}

/// The last description of a GPU that is gone. Instances went with it, and so
/// did a MIG mode that no infoROM keeps.
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

fn mig(
    uuid: &GpuUuid,
    description: &Description,
    state: &State,
    last: Option<&Gpu>,
    judge: &mut Judge<'_>,
) -> Mig {
    let RawMig::Supported { mode, instances } = &state.mig else { return Mig::Unsupported };
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
            origin: judge.origin(uuid, raw, before.iter().find(same).map(|was| was.origin)),
        }
    });
    Mig::Supported {
        mode: *mode,
        toggle: description.toggle,
        profiles: description.profiles.clone(),
        instances: instances.collect(),
    }
}

/// What an unreadable GPU suffers from; an error that says nothing of the GPU changes nothing.
fn conditions(error: &NvmlError, before: &[Condition]) -> Vec<Condition> {
    match error {
        NvmlError::Lost { .. } => vec![Condition::Lost],
        NvmlError::Stuck { call, .. } | NvmlError::Deadline { call, .. } => {
            vec![Condition::Stuck { call: (*call).to_owned() }]
        }
        _ => before.to_vec(),
    }
}

/// Groups the GPUs that reach each other over NVLink. MIG silences links: as
/// long as it does so on any GPU, groups known from before are kept. A group
/// keeps its name, else it is named by its first GPU.
fn link(gpus: &mut [Gpu], snapshot: &Snapshot, last: &Inventory) {
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
    let mut given: BTreeMap<usize, (String, u32)> = BTreeMap::new();
    let mut names = BTreeSet::new();
    for first in &readable {
        if given.contains_key(&first.0) {
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
        let kept = members.iter().filter_map(|member| before(&gpus[member.0].uuid)).map(|(group, _)| group);
        let name = kept.chain([gpus[first.0].uuid.to_string()]).find(|name| !names.contains(name));
        let Some(name) = name else { continue };
        names.insert(name.clone());
        for member in &members {
            let peers = members.iter().filter(|other| other.0 != member.0 && joined(member, other)).count();
            given.insert(member.0, (name.clone(), u32::try_from(peers).unwrap_or(u32::MAX)));
        }
    }
    for (at, gpu) in gpus.iter_mut().enumerate() {
        let unread = !links.contains_key(&gpu.uuid);
        let kept = if silenced || unread { before(&gpu.uuid) } else { None };
        if let Some((group, peers)) = kept.or_else(|| given.remove(&at)) {
            gpu.nvlink_group = Some(group);
            gpu.nvlink_peers = peers;
        } else {
            gpu.nvlink_group = None;
            gpu.nvlink_peers = 0;
        }
    }
}

#[cfg(test)]
mod tests;
