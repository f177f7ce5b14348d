//! What the node must be when nothing is under way: exactly what the prepared
//! claims need.

use crate::files::{expect, read};
use crate::harness::World;
use crate::model::{Modelled, Part, Shared, Stage};
use divvy_pages::Policy;
use std::collections::BTreeSet;

/// What differs from what these claims need; empty if nothing does.
pub(crate) fn differences(world: &World, claims: &[&Modelled]) -> Vec<String> {
    let mut found = Vec::new();
    let state = world.sim.read().unwrap();
    let parts = || claims.iter().flat_map(|claim| &claim.devices);
    for (at, gpu) in state.gpus.iter().enumerate() {
        let wanted: BTreeSet<(u32, u32)> = parts().filter(|part| part.gpu == at).filter_map(key).collect();
        let there: BTreeSet<(u32, u32)> =
            gpu.instances.iter().map(|gi| (gi.profile, gi.placement.start)).collect();
        if there != wanted {
            found.push(format!("gpu-{at} has instances (profile, start) {there:?} instead of {wanted:?}"));
        }
        if let Some(gi) = gpu.instances.iter().find(|gi| gi.cis.len() != 1) {
            found.push(format!("instance {} of gpu-{at} has {} compute instances", gi.id, gi.cis.len()));
        }
        if gpu.mig.current == wanted.is_empty() {
            found.push(format!("gpu-{at}: MIG mode is {} with {wanted:?}", gpu.mig.current));
        }
        let shared = |mode| parts().any(|part| part.gpu == at && part.shared == Some(mode));
        let wanted = [shared(Shared::Timeslice), shared(Shared::Mps)].map(|is| if is { 3 } else { 0 });
        if [gpu.timeslice, gpu.compute_mode] != wanted {
            let (slice, mode) = (gpu.timeslice, gpu.compute_mode);
            found.push(format!("gpu-{at}: time slice {slice}, compute mode {mode} instead of {wanted:?}"));
        }
    }
    let clients = parts().filter(|part| part.shared == Some(Shared::Mps));
    let daemons = clients.map(|part| state.gpus[part.gpu].uuid.clone()).collect();
    expect(&world.run_dir().join("mps"), &daemons, &mut found);
    let names = |prefix: &str| -> BTreeSet<String> {
        claims.iter().map(|claim| format!("{prefix}{}.json", claim.claim.uid)).collect()
    };
    expect(&world.state_dir().join("claims"), &names(""), &mut found);
    expect(&world.cdi_dir(), &names("gpu.divvy.dev-claim_"), &mut found);
    expect(&world.state_dir().join("quarantine"), &BTreeSet::new(), &mut found);
    let in_shares = claims.iter().filter(|claim| claim.devices.iter().any(|part| part.memory.is_some()));
    let in_shares = in_shares.map(|claim| claim.claim.uid.clone()).collect();
    expect(&world.run_dir().join("shares"), &in_shares, &mut found);
    for claim in claims {
        let uid = &claim.claim.uid;
        for (at, memory) in claim.devices.iter().enumerate().filter_map(|(at, part)| Some((at, part.memory?)))
        {
            let page = world.run_dir().join(format!("shares/{uid}/{uid}-share-{at}/policy"));
            let policy = std::fs::read(&page).map(|page| Policy::decode(&page));
            match policy {
                Ok(Ok((_, policy))) if policy.memory.limit == memory << 30 => {}
                other => found.push(format!("{} says {other:?} instead of {memory} GiB", page.display())),
            }
        }
        let record = read(&world.state_dir().join(format!("claims/{uid}.json")));
        if !record.contains(r#""state":"prepared""#) {
            found.push(format!("record of {uid} is {record}"));
        }
        let file = read(&world.cdi_dir().join(format!("gpu.divvy.dev-claim_{uid}.json")));
        for part in &claim.devices {
            let node = format!("/dev/nvidia{}\"", state.gpus[part.gpu].minor);
            if !file.contains(&part.name) || !file.contains(&node) {
                found.push(format!("CDI file of {uid} lacks {} or {node}: {file}", part.name));
            }
        }
    }
    found
}

/// What never may be, whatever is under way: two claims in each other's way, or
/// a whole GPU with something on it.
pub(crate) fn never(world: &World, claims: &[&Modelled]) -> Option<String> {
    let prepared: Vec<_> = claims.iter().filter(|claim| matches!(claim.stage, Stage::Prepared(_))).collect();
    for (at, one) in prepared.iter().enumerate() {
        let others: Vec<&Modelled> = prepared[at + 1..].iter().map(|other| **other).collect();
        if one.is_kept_away(&others) {
            return Some(format!("{one:?} is prepared in spite of {others:?}"));
        }
    }
    let state = world.sim.read().unwrap();
    let whole = prepared.iter().flat_map(|claim| &claim.devices).filter(|part| part.instance.is_none());
    for part in whole {
        let gpu = &state.gpus[part.gpu];
        if gpu.mig.current || !gpu.instances.is_empty() {
            return Some(format!("{} is held whole and has MIG mode on", part.name));
        }
    }
    None
}

fn key(part: &Part) -> Option<(u32, u32)> {
    part.instance.as_ref().map(|(profile, slices)| (*profile, slices.start))
}
