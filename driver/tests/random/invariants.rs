//! Comparison of the node with the model: a state that is never allowed, and the exact state after the
//! node has settled.

use crate::device_nodes::find_debts;
use crate::harness::TestNode;
use crate::harness::{compare_dir, read_or_error};
use crate::model::{ModelClaim, ModelDevice, Sharing, Stage};
use divvy_pages::Policy;
use std::collections::BTreeSet;

/// The differences between the node and the state that these claims need. Empty if there are none.
pub(crate) fn differences(node: &TestNode, claims: &[&ModelClaim]) -> Vec<String> {
    let mut found = Vec::new();
    let state = node.sim.read().unwrap();
    let devices = || claims.iter().flat_map(|claim| &claim.devices);
    for (at, gpu) in state.gpus.iter().enumerate() {
        if !gpu.missing && !node.publishes_gpu(at) {
            found.push(format!("gpu-{at} is not published as present"));
        }
        let wanted: BTreeSet<(u32, u32)> =
            devices().filter(|device| device.gpu == at).filter_map(mig_placement).collect();
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
        let sharing = |mode| devices().any(|device| device.gpu == at && device.sharing == Some(mode));
        let wanted = [sharing(Sharing::Timeslice), sharing(Sharing::Mps)].map(|is| if is { 3 } else { 0 });
        if [gpu.timeslice, gpu.compute_mode] != wanted {
            let (slice, mode) = (gpu.timeslice, gpu.compute_mode);
            found.push(format!("gpu-{at}: time slice {slice}, compute mode {mode} instead of {wanted:?}"));
        }
    }
    let clients = devices().filter(|device| device.sharing == Some(Sharing::Mps));
    let daemons = clients.map(|device| state.gpus[device.gpu].uuid.clone()).collect();
    compare_dir(&node.run_dir().join("mps"), &daemons, &mut found);
    let names = |prefix: &str| -> BTreeSet<String> {
        claims.iter().map(|claim| format!("{prefix}{}.json", claim.claim.uid)).collect()
    };
    compare_dir(&node.state_dir().join("claims"), &names(""), &mut found);
    compare_dir(&node.cdi_dir(), &names("gpu.divvy.dev-claim_"), &mut found);
    compare_dir(&node.state_dir().join("quarantine"), &BTreeSet::new(), &mut found);
    let in_shares = claims.iter().filter(|claim| claim.devices.iter().any(|device| device.memory.is_some()));
    let in_shares = in_shares.map(|claim| claim.claim.uid.clone()).collect();
    compare_dir(&node.run_dir().join("shares"), &in_shares, &mut found);
    find_debts(node, &mut found);
    for claim in claims {
        let uid = &claim.claim.uid;
        for (at, memory) in
            claim.devices.iter().enumerate().filter_map(|(at, device)| Some((at, device.memory?)))
        {
            let page = node.run_dir().join(format!("shares/{uid}/{uid}-share-{at}/policy"));
            let policy = std::fs::read(&page).map(|page| Policy::decode(&page));
            match policy {
                Ok(Ok((_, policy))) if policy.memory.limit == memory << 30 => {}
                other => found
                    .push(format!("{} holds {other:?} instead of a limit of {memory} GiB", page.display())),
            }
        }
        let record = read_or_error(&node.state_dir().join(format!("claims/{uid}.json")));
        if !record.contains(r#""state":"prepared""#) {
            found.push(format!("record of claim {uid} is not prepared: {record}"));
        }
        let file = read_or_error(&node.cdi_dir().join(format!("gpu.divvy.dev-claim_{uid}.json")));
        for device in &claim.devices {
            let device_node = format!("/dev/nvidia{}\"", state.gpus[device.gpu].minor);
            if !file.contains(&device.name) || !file.contains(&device_node) {
                found.push(format!("CDI file of {uid} lacks {} or {device_node}: {file}", device.name));
            }
        }
    }
    found
}

/// A state that is never allowed, even while calls are in progress. Either two conflicting claims are
/// prepared, or a GPU that is held whole has MIG mode or instances. `None` if there is none.
pub(crate) fn forbidden_state(node: &TestNode, claims: &[&ModelClaim]) -> Option<String> {
    let prepared: Vec<_> = claims.iter().filter(|claim| matches!(claim.stage, Stage::Prepared(_))).collect();
    for (at, one) in prepared.iter().enumerate() {
        let others: Vec<&ModelClaim> = prepared[at + 1..].iter().map(|other| **other).collect();
        if one.conflicts_with_any(&others) {
            return Some(format!("{one:?} is prepared although it conflicts with {others:?}"));
        }
    }
    let state = node.sim.read().unwrap();
    let whole = prepared.iter().flat_map(|claim| &claim.devices).filter(|device| device.instance.is_none());
    for device in whole {
        let gpu = &state.gpus[device.gpu];
        if gpu.mig.current || !gpu.instances.is_empty() {
            return Some(format!("{} is held whole and has MIG mode on", device.name));
        }
    }
    None
}

/// Profile ID and first slice of a MIG device.
fn mig_placement(device: &ModelDevice) -> Option<(u32, u32)> {
    device.instance.as_ref().map(|(profile, slices)| (*profile, slices.start))
}
