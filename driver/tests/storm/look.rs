//! What the node must be: never two modes on one GPU, whatever is under way, and
//! exactly what the prepared claims need when nothing is.

use crate::files::{expect, read};
use crate::harness::World;
use crate::model::{Modelled, Part, Shared};
use crate::operations::MIG_ON;
use crate::processes::mps_processes;
use divvy_api::mps::{Actual, Phase};
use divvy_sim::state::{Gpu, ProcessKind};
use std::collections::{BTreeMap, BTreeSet};

/// What can be seen on a GPU of the mode that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Trace {
    Instances,
    TimeSlice,
    Mps,
}

/// The traces on a GPU.
fn traces(gpu: &Gpu, mig_is_ours: bool) -> BTreeSet<Trace> {
    let served =
        |process: &divvy_sim::state::Process| process.kind == ProcessKind::Mps && process.instance.is_none();
    let traces = [
        (Trace::Instances, !gpu.instances.is_empty() || (mig_is_ours && gpu.mig.current)),
        (Trace::TimeSlice, gpu.timeslice != 0),
        (Trace::Mps, gpu.compute_mode != 0 || gpu.processes.iter().any(served)),
    ];
    traces.into_iter().filter(|(_, is)| *is).map(|(trace, _)| trace).collect()
}

/// The trace that a claim's part may leave on its GPU.
fn trace(part: &Part) -> Option<Trace> {
    match (&part.place, part.sharing) {
        (Some(_), _) => Some(Trace::Instances),
        (None, Some(Shared::Turns)) => Some(Trace::TimeSlice),
        (None, Some(Shared::Mps)) => Some(Trace::Mps),
        (None, None) => None,
    }
}

/// What never may be: two modes on a GPU, by what its hardware shows or by what
/// is prepared, or a mode that is another than that of the claims on it.
pub(crate) fn never(world: &World, claims: &[&Modelled]) -> Option<String> {
    let prepared: Vec<_> = claims.iter().filter(|claim| claim.is_prepared()).collect();
    for (at, one) in prepared.iter().enumerate() {
        if let Some(two) = prepared[at + 1..].iter().find(|two| one.excludes(two)) {
            return Some(format!("{one:?} and {two:?} are prepared both"));
        }
        let others: Vec<&Modelled> = prepared[at + 1..].iter().map(|other| **other).collect();
        if one.has_no_room(&others) {
            return Some(format!("{one:?} and {others:?} have more memory than there is"));
        }
    }
    // Dead processes are no trace.
    world.sim.bury().unwrap();
    let state = world.sim.read().unwrap();
    for (at, gpu) in state.gpus.iter().enumerate() {
        let seen = traces(gpu, at != MIG_ON);
        if seen.len() > 1 {
            return Some(format!("gpu-{at} shows two modes: {seen:?}\n{gpu:?}"));
        }
        let parts = prepared.iter().flat_map(|claim| claim.parts());
        for part in parts.filter(|part| part.gpu == at && !part.admin) {
            if let Some(other) = seen.iter().find(|seen| trace(part) != Some(**seen)) {
                return Some(format!("{} is prepared, and gpu-{at} shows {other:?}\n{gpu:?}", part.name));
            }
        }
    }
    None
}

/// What differs from what the prepared claims need; empty if nothing does.
pub(crate) fn differences(world: &World, claims: &[&Modelled]) -> Vec<String> {
    world.sim.bury().unwrap();
    let state = world.sim.read().unwrap();
    let mut found = Vec::new();
    let mut daemons: BTreeSet<String> = BTreeSet::new();
    for (at, gpu) in state.gpus.iter().enumerate() {
        let parts: Vec<&Part> = claims
            .iter()
            .flat_map(|claim| claim.parts())
            .filter(|part| part.gpu == at && !part.admin)
            .collect();
        daemons.extend(
            parts.iter().filter(|part| part.sharing == Some(Shared::Mps)).map(|part| target(part, gpu)),
        );
        compare(at, gpu, &parts, &mut found);
    }
    expect(&world.run_dir().join("mps"), &daemons, &mut found);
    well(world, &daemons, &mut found);
    let names = |prefix: &str| -> BTreeSet<String> {
        claims.iter().map(|claim| format!("{prefix}{}.json", claim.claim.uid)).collect()
    };
    expect(&world.state_dir().join("claims"), &names(""), &mut found);
    expect(&world.cdi_dir(), &names("gpu.divvy.dev-claim_"), &mut found);
    let in_shares =
        claims.iter().filter(|claim| claim.parts().any(|part| part.memory.is_some() && !part.admin));
    let in_shares = in_shares.map(|claim| claim.claim.uid.clone()).collect();
    expect(&world.run_dir().join("shares"), &in_shares, &mut found);
    expect(&world.state_dir().join("quarantine"), &BTreeSet::new(), &mut found);
    for claim in claims {
        let uid = &claim.claim.uid;
        let record = read(&world.state_dir().join(format!("claims/{uid}.json")));
        if !record.contains(r#""state":"prepared""#) {
            found.push(format!("record of {uid} is {record}"));
        }
        let file = read(&world.cdi_dir().join(format!("gpu.divvy.dev-claim_{uid}.json")));
        for part in claim.parts() {
            let node = format!("/dev/nvidia{}\"", state.gpus[part.gpu].minor);
            if !file.contains(&part.name) || !file.contains(&node) {
                found.push(format!("CDI file of {uid} lacks {} or {node}: {file}", part.name));
            }
        }
    }
    found
}

/// The hardware of a GPU against the parts that are held of it.
fn compare(at: usize, gpu: &Gpu, parts: &[&Part], found: &mut Vec<String>) {
    let places = parts.iter().filter_map(|part| part.place.as_ref());
    let wanted: BTreeSet<(u32, u32)> = places.map(|(profile, slices)| (*profile, slices.start)).collect();
    let there: BTreeSet<(u32, u32)> =
        gpu.instances.iter().map(|gi| (gi.profile, gi.placement.start)).collect();
    if there != wanted {
        found.push(format!("gpu-{at} has instances (profile, start) {there:?} instead of {wanted:?}"));
    }
    if let Some(gi) = gpu.instances.iter().find(|gi| gi.cis.len() != 1) {
        found.push(format!("instance {} of gpu-{at} has {} compute instances", gi.id, gi.cis.len()));
    }
    if gpu.mig.current != (!wanted.is_empty() || at == MIG_ON) {
        found.push(format!("gpu-{at}: MIG mode is {} with {wanted:?}", gpu.mig.current));
    }
    let turns = parts.iter().any(|part| trace(part) == Some(Trace::TimeSlice));
    if turns != (gpu.timeslice != 0) {
        found.push(format!("gpu-{at}: time slice {} where in turns is {turns}", gpu.timeslice));
    }
    let mps = parts.iter().any(|part| trace(part) == Some(Trace::Mps));
    if gpu.compute_mode != if mps { 3 } else { 0 } {
        found.push(format!("gpu-{at}: compute mode {} where MPS is {mps}", gpu.compute_mode));
    }
}

/// Every daemon that is wanted is well, and there is no process of another.
fn well(world: &World, daemons: &BTreeSet<String>, found: &mut Vec<String>) {
    let mut running: BTreeMap<String, usize> = BTreeMap::new();
    for process in mps_processes(&world.run_dir()) {
        let count = running.entry(process.target).or_default();
        *count += usize::from(!process.is_server);
    }
    let wanted: BTreeMap<String, usize> = daemons.iter().map(|target| (target.clone(), 1)).collect();
    if running != wanted {
        found.push(format!("MPS control daemons {running:?} instead of {wanted:?}"));
    }
    for target in daemons {
        let text = read(&world.run_dir().join("mps").join(target).join("actual.json"));
        match serde_json::from_str::<Actual>(&text) {
            Ok(Actual { phase: Phase::Ready, .. }) => {}
            _ => found.push(format!("MPS control daemon {target} is {text}")),
        }
    }
}

/// The directory of a part's daemon.
fn target(part: &Part, gpu: &Gpu) -> String {
    match &part.place {
        None => gpu.uuid.clone(),
        Some((profile, slices)) => format!("{}-{profile}-{}", gpu.uuid, slices.start),
    }
}
