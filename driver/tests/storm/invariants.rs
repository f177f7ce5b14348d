//! Comparison of the node with the model: states that are never allowed, such as two modes on one GPU, and
//! the exact state after the node has settled.

use crate::device_nodes::find_debts;
use crate::harness::{TestNode, compare_dir, read_or_error};
use crate::model::{ModelClaim, ModelDevice, Sharing};
use crate::operations::MIG_ON_GPU;
use crate::processes::mps_processes;
use divvy_api::mps::{Actual, Phase};
use divvy_sim::state::{Gpu, ProcessKind};
use std::collections::{BTreeMap, BTreeSet};

/// A mode that the state of a GPU shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum VisibleMode {
    Instances,
    TimeSlice,
    Mps,
}

/// The modes that a GPU shows. MIG mode without instances counts only if the driver manages it.
fn visible_modes(gpu: &Gpu, manages_mig: bool) -> BTreeSet<VisibleMode> {
    let is_mps =
        |process: &divvy_sim::state::Process| process.kind == ProcessKind::Mps && process.instance.is_none();
    let visible_modes = [
        (VisibleMode::Instances, !gpu.instances.is_empty() || (manages_mig && gpu.mig.current)),
        (VisibleMode::TimeSlice, gpu.timeslice != 0),
        (VisibleMode::Mps, gpu.compute_mode != 0 || gpu.processes.iter().any(is_mps)),
    ];
    visible_modes.into_iter().filter(|(_, is)| *is).map(|(visible_mode, _)| visible_mode).collect()
}

/// The mode that a prepared device may show on its GPU.
fn visible_mode(device: &ModelDevice) -> Option<VisibleMode> {
    match (&device.placement, device.sharing) {
        (Some(_), _) => Some(VisibleMode::Instances),
        (None, Some(Sharing::TimeSlicing)) => Some(VisibleMode::TimeSlice),
        (None, Some(Sharing::Mps)) => Some(VisibleMode::Mps),
        (None, None) => None,
    }
}

/// A state that is never allowed, even while calls are in progress. Either a GPU is in two modes, by its
/// hardware or by its prepared claims, or in a mode that differs from that of its claims. `None` if there
/// is none.
pub(crate) fn forbidden_state(node: &TestNode, claims: &[&ModelClaim]) -> Option<String> {
    let prepared: Vec<_> = claims.iter().filter(|claim| claim.is_prepared()).collect();
    for (at, one) in prepared.iter().enumerate() {
        if let Some(two) = prepared[at + 1..].iter().find(|two| one.excludes(two)) {
            return Some(format!("{one:?} and {two:?} are both prepared"));
        }
        let others: Vec<&ModelClaim> = prepared[at + 1..].iter().map(|other| **other).collect();
        if one.exceeds_memory(&others) {
            return Some(format!("{one:?} and {others:?} exceed the device's memory"));
        }
    }
    // Dead processes show no mode.
    node.sim.remove_dead_processes().unwrap();
    let state = node.sim.read().unwrap();
    for (at, gpu) in state.gpus.iter().enumerate() {
        let seen = visible_modes(gpu, at != MIG_ON_GPU);
        if seen.len() > 1 {
            return Some(format!("gpu-{at} shows two modes: {seen:?}\n{gpu:?}"));
        }
        let devices = prepared.iter().flat_map(|claim| claim.devices());
        for device in devices.filter(|device| device.gpu == at && !device.admin) {
            if let Some(other) = seen.iter().find(|seen| visible_mode(device) != Some(**seen)) {
                return Some(format!("{} is prepared, but gpu-{at} shows {other:?}\n{gpu:?}", device.name));
            }
        }
    }
    None
}

/// The differences between the node and the state that the prepared claims need. Empty if there are none.
pub(crate) fn differences(node: &TestNode, claims: &[&ModelClaim]) -> Vec<String> {
    node.sim.remove_dead_processes().unwrap();
    let state = node.sim.read().unwrap();
    let mut found = Vec::new();
    let mut daemons: BTreeSet<String> = BTreeSet::new();
    for (at, gpu) in state.gpus.iter().enumerate() {
        let devices: Vec<&ModelDevice> = claims
            .iter()
            .flat_map(|claim| claim.devices())
            .filter(|device| device.gpu == at && !device.admin)
            .collect();
        daemons.extend(
            devices
                .iter()
                .filter(|device| device.sharing == Some(Sharing::Mps))
                .map(|device| mps_target(device, gpu)),
        );
        compare_gpu(at, gpu, &devices, &mut found);
    }
    compare_dir(&node.run_dir().join("mps"), &daemons, &mut found);
    check_mps_daemons(node, &daemons, &mut found);
    let names = |prefix: &str| -> BTreeSet<String> {
        claims.iter().map(|claim| format!("{prefix}{}.json", claim.claim.uid)).collect()
    };
    compare_dir(&node.state_dir().join("claims"), &names(""), &mut found);
    compare_dir(&node.cdi_dir(), &names("gpu.divvy.dev-claim_"), &mut found);
    let in_shares =
        claims.iter().filter(|claim| claim.devices().any(|device| device.memory.is_some() && !device.admin));
    let in_shares = in_shares.map(|claim| claim.claim.uid.clone()).collect();
    compare_dir(&node.run_dir().join("shares"), &in_shares, &mut found);
    compare_dir(&node.state_dir().join("quarantine"), &BTreeSet::new(), &mut found);
    find_debts(node, &mut found);
    for claim in claims {
        let uid = &claim.claim.uid;
        let record = read_or_error(&node.state_dir().join(format!("claims/{uid}.json")));
        if !record.contains(r#""state":"prepared""#) {
            found.push(format!("record of claim {uid} is not prepared: {record}"));
        }
        let file = read_or_error(&node.cdi_dir().join(format!("gpu.divvy.dev-claim_{uid}.json")));
        for device in claim.devices() {
            let device_node = format!("/dev/nvidia{}\"", state.gpus[device.gpu].minor);
            if !file.contains(&device.name) || !file.contains(&device_node) {
                found.push(format!("CDI file of {uid} lacks {} or {device_node}: {file}", device.name));
            }
        }
    }
    found
}

/// Compares the hardware of a GPU with the devices that claims hold on it.
fn compare_gpu(at: usize, gpu: &Gpu, devices: &[&ModelDevice], found: &mut Vec<String>) {
    let places = devices.iter().filter_map(|device| device.placement.as_ref());
    let wanted: BTreeSet<(u32, u32)> = places.map(|(profile, slices)| (*profile, slices.start)).collect();
    let there: BTreeSet<(u32, u32)> =
        gpu.instances.iter().map(|gi| (gi.profile, gi.placement.start)).collect();
    if there != wanted {
        found.push(format!("gpu-{at} has instances (profile, start) {there:?} instead of {wanted:?}"));
    }
    if let Some(gi) = gpu.instances.iter().find(|gi| gi.cis.len() != 1) {
        found.push(format!("instance {} of gpu-{at} has {} compute instances", gi.id, gi.cis.len()));
    }
    if gpu.mig.current != (!wanted.is_empty() || at == MIG_ON_GPU) {
        found.push(format!("gpu-{at}: MIG mode is {} with {wanted:?}", gpu.mig.current));
    }
    let timeslicing = devices.iter().any(|device| visible_mode(device) == Some(VisibleMode::TimeSlice));
    if timeslicing != (gpu.timeslice != 0) {
        found.push(format!(
            "gpu-{at}: time slice is {} although time slicing is {timeslicing}",
            gpu.timeslice
        ));
    }
    let mps = devices.iter().any(|device| visible_mode(device) == Some(VisibleMode::Mps));
    if gpu.compute_mode != if mps { 3 } else { 0 } {
        found.push(format!("gpu-{at}: compute mode is {} although MPS is {mps}", gpu.compute_mode));
    }
}

/// Checks that exactly the wanted MPS control daemons run, and that all of them are ready.
fn check_mps_daemons(node: &TestNode, daemons: &BTreeSet<String>, found: &mut Vec<String>) {
    let mut running: BTreeMap<String, usize> = BTreeMap::new();
    for process in mps_processes(&node.run_dir()) {
        let count = running.entry(process.target).or_default();
        *count += usize::from(!process.is_server);
    }
    let wanted: BTreeMap<String, usize> = daemons.iter().map(|target| (target.clone(), 1)).collect();
    if running != wanted {
        found.push(format!("MPS control daemons {running:?} instead of {wanted:?}"));
    }
    for target in daemons {
        let text = read_or_error(&node.run_dir().join("mps").join(target).join("actual.json"));
        match serde_json::from_str::<Actual>(&text) {
            Ok(Actual { phase: Phase::Ready, .. }) => {}
            _ => found.push(format!("MPS control daemon {target} is not ready: {text}")),
        }
    }
}

/// The directory name of the MPS control daemon of a device.
fn mps_target(device: &ModelDevice, gpu: &Gpu) -> String {
    match &device.placement {
        None => gpu.uuid.clone(),
        Some((profile, slices)) => format!("{}-{profile}-{}", gpu.uuid, slices.start),
    }
}
