//! Refusals of the MIG calls that programs rely on.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use common::*;
use divvy_sim::state::{Holder, Privilege, Process, ProcessKind};

/// A node with one H100 and MIG on.
fn with_mig() -> (Node, Client, Device) {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    assert_eq!(client.set_mig_mode(gpu, 1), Ok(SUCCESS));
    (node, client, gpu)
}

fn process(pid: u32, instance: Option<(u32, u32)>) -> Process {
    Process { pid, name: "train".to_owned(), kind: ProcessKind::Compute, instance, memory_mib: 1024 }
}

#[test]
fn gpu_without_mig_returns_not_supported() {
    let node = Node::up("L4");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    assert_eq!(client.mig_mode(gpu), Err(NOT_SUPPORTED));
    assert_eq!(client.set_mig_mode(gpu, 1), Err(NOT_SUPPORTED));
    assert_eq!(client.max_mig_devices(gpu), Ok(0));
    assert_eq!(client.profile(gpu, 0).err(), Some(NOT_SUPPORTED));
    assert_eq!(client.placements(gpu, 19, 8), Err(NOT_SUPPORTED));
    assert_eq!(client.mig_device(gpu, 0), Err(NOT_SUPPORTED));
    assert_eq!(client.create_gi(gpu, 19, None), Err(NOT_SUPPORTED));
}

#[test]
fn profiles_and_placements_are_listed_without_mig() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    assert_eq!(client.mig_mode(gpu), Ok((0, 0)));
    assert_eq!(client.profile(gpu, 0).map(|profile| (profile.id, profile.memorySizeMB)), Ok((19, 9984)));
    assert_eq!(client.placements(gpu, 9, 8), Ok(vec![(0, 4), (4, 4)]));
    assert_eq!(client.max_mig_devices(gpu), Ok(0));
    assert_eq!(client.remaining(gpu, 19), Err(NOT_SUPPORTED));
    assert_eq!(client.create_gi(gpu, 19, None), Err(NOT_SUPPORTED));
    assert_eq!(client.create_gi(gpu, 19, Some((0, 1))), Err(NOT_SUPPORTED));
    assert_eq!(client.gis(gpu, 19), Err(NOT_SUPPORTED));
    assert_eq!(client.gi(gpu, 7), Err(NOT_SUPPORTED));
    assert_eq!(client.mig_device(gpu, 0), Err(NOT_SUPPORTED));
}

#[test]
fn profile_enumeration_ends_with_the_header() {
    let (_node, client, gpu) = with_mig();
    let known: Vec<u32> = (0..0x12).filter(|index| client.profile(gpu, *index).is_ok()).collect();
    assert_eq!(known, [0, 1, 2, 3, 4, 7, 9]);
    for index in (0..0x12).filter(|index| !known.contains(index)) {
        assert_eq!(client.profile(gpu, index).err(), Some(NOT_SUPPORTED), "{index:#x}");
    }
    assert_eq!(client.profile(gpu, 0x12).err(), Some(INVALID_ARGUMENT));
}

#[test]
fn unknown_version_word_is_refused() {
    let (_node, client, gpu) = with_mig();
    let check =
        |version, expected| assert_eq!(client.profile_version(gpu, 0, version), expected, "{version:#x}");
    check(152 | 2 << 24, SUCCESS);
    check(152 | 3 << 24, SUCCESS);
    check(152 | 4 << 24, ARGUMENT_VERSION_MISMATCH);
    check(2, ARGUMENT_VERSION_MISMATCH);
    check(0, ARGUMENT_VERSION_MISMATCH);
}

#[test]
fn mig_mode_must_be_0_or_1() {
    let (_node, client, gpu) = with_mig();
    assert_eq!(client.set_mig_mode(gpu, 2), Err(INVALID_ARGUMENT));
}

#[test]
fn placement_list_needs_room_for_all() {
    let (_node, client, gpu) = with_mig();
    assert_eq!(client.placements(gpu, 19, 0).map(|places| places.len()), Ok(7));
    assert_eq!(client.placements(gpu, 19, 6), Err(INSUFFICIENT_SIZE));
    assert_eq!(client.placements(gpu, 99, 8), Err(NOT_SUPPORTED));
}

#[test]
fn occupied_and_unlisted_placements_are_refused() {
    let (_node, client, gpu) = with_mig();
    assert!(client.create_gi(gpu, 9, Some((4, 4))).is_ok());
    assert_eq!(client.create_gi(gpu, 9, Some((4, 4))), Err(INSUFFICIENT_RESOURCES));
    assert_eq!(client.create_gi(gpu, 19, Some((5, 1))), Err(INSUFFICIENT_RESOURCES));
    assert_eq!(client.create_gi(gpu, 19, Some((7, 1))), Err(INVALID_ARGUMENT));
    assert_eq!(client.create_gi(gpu, 19, Some((0, 2))), Err(INVALID_ARGUMENT));
    assert_eq!(client.create_gi(gpu, 99, None), Err(NOT_SUPPORTED));
    assert_eq!(client.create_gi(gpu, 0, None), Err(INSUFFICIENT_RESOURCES));
    assert_eq!(client.remaining(gpu, 0), Ok(0));
}

#[test]
fn gpu_instance_in_use_is_not_destroyed() {
    let (node, client, gpu) = with_mig();
    let (gi, ci) = client.instance(gpu, 9, 2, (0, 4));
    assert_eq!(client.destroy_gi(gi), IN_USE);
    node.sim.update(|state| state.add_process(0, process(4242, Some((1, 0))))).expect("a process");
    assert_eq!(client.destroy_ci(ci), IN_USE);
    node.sim.update(|state| state.remove_process(None, 4242)).expect("a process");
    assert_eq!(client.destroy_ci(ci), SUCCESS);
    let holder = Holder { pid: 77, name: "nv-hostengine".to_owned(), gi: Some(1) };
    node.sim.update(|state| state.add_holder(0, holder)).expect("a holder");
    assert_eq!(client.destroy_gi(gi), IN_USE);
    node.sim.update(|state| state.remove_process(None, 77)).expect("a holder");
    assert_eq!(client.destroy_gi(gi), SUCCESS);
}

#[test]
fn stale_handle_stays_invalid_if_its_id_is_reused() {
    let (_node, client, gpu) = with_mig();
    let (gi, ci) = client.instance(gpu, 19, 0, (0, 1));
    let mig = client.mig_device(gpu, 0).expect("a MIG device");
    assert_eq!(client.destroy_ci(ci), SUCCESS);
    assert_eq!(client.destroy_gi(gi), SUCCESS);
    let check_stale = || {
        assert_eq!(client.gi_info(gi).err(), Some(INVALID_ARGUMENT));
        assert_eq!(client.ci_info(ci).err(), Some(INVALID_ARGUMENT));
        assert_eq!(client.uuid(mig), Err(INVALID_ARGUMENT));
        assert_eq!(client.destroy_gi(gi), INVALID_ARGUMENT);
        assert_eq!(client.destroy_ci(ci), INVALID_ARGUMENT);
    };
    check_stale();
    client.instance(gpu, 19, 0, (0, 1));
    check_stale();
}

#[test]
fn missing_objects_return_not_found() {
    let (_node, client, gpu) = with_mig();
    assert_eq!(client.gi(gpu, 7), Err(NOT_FOUND));
    assert_eq!(client.mig_device(gpu, 0), Err(NOT_FOUND));
    assert_eq!(client.mig_device(gpu, 6), Err(NOT_FOUND));
    assert_eq!(client.mig_device(gpu, 7), Err(INVALID_ARGUMENT));
    assert_eq!(client.device(1), Err(INVALID_ARGUMENT));
    assert_eq!(client.by_uuid("GPU-00000000-0000-0000-0000-000000000000"), Err(NOT_FOUND));
    let gi = client.create_gi(gpu, 19, None).expect("a GPU instance");
    assert_eq!(client.ci(gi, 0), Err(NOT_FOUND));
}

#[test]
fn compute_instances_share_the_gpu_instance_slices() {
    let (_node, client, gpu) = with_mig();
    let gi = client.create_gi(gpu, 9, Some((0, 4))).expect("a GPU instance");
    let sizes: Vec<u32> = (0..9).filter(|index| client.ci_profile(gi, *index, 0).is_ok()).collect();
    assert_eq!(sizes, [0, 1, 2]);
    assert_eq!(client.ci_profile(gi, 3, 0).err(), Some(NOT_SUPPORTED));
    assert_eq!(client.ci_profile(gi, 9, 0).err(), Some(INVALID_ARGUMENT));
    assert_eq!(client.ci_profile(gi, 0, 1).err(), Some(INVALID_ARGUMENT));
    assert_eq!(client.ci_remaining(gi, 0), Ok(3));
    assert!(client.create_ci_at(gi, 0, (1, 1)).is_ok());
    assert_eq!(client.create_ci_at(gi, 0, (1, 1)), Err(INSUFFICIENT_RESOURCES));
    assert_eq!(client.create_ci_at(gi, 0, (3, 1)), Err(INVALID_ARGUMENT));
    assert_eq!(client.create_ci(gi, 2), Err(INSUFFICIENT_RESOURCES));
    assert_eq!(client.create_ci(gi, 3), Err(NOT_SUPPORTED));
    assert_eq!(client.ci_remaining(gi, 0), Ok(2));
}

#[test]
fn mig_device_refuses_gpu_calls() {
    let (_node, client, gpu) = with_mig();
    client.instance(gpu, 19, 0, (0, 1));
    let mig = client.mig_device(gpu, 0).expect("a MIG device");
    assert_eq!(client.mig_mode(mig), Err(NOT_SUPPORTED));
    assert_eq!(client.set_mig_mode(mig, 0), Err(NOT_SUPPORTED));
    assert_eq!(client.profile(mig, 0).err(), Some(NOT_SUPPORTED));
    assert_eq!(client.register(mig, 8, client.event_set()), NOT_SUPPORTED);
    assert_eq!(client.parent(mig), Ok(gpu));
    assert_eq!(client.parent(gpu), Err(INVALID_ARGUMENT));
    assert_eq!(client.gi_id(gpu), Err(NOT_SUPPORTED));
    assert_eq!((client.gi_id(mig), client.ci_id(mig)), (Ok(7), Ok(0)));
}

#[test]
fn hopper_in_use_keeps_its_mig_mode() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    node.sim.update(|state| state.add_process(0, process(4242, None))).expect("a process");
    assert_eq!(client.set_mig_mode(gpu, 1), Ok(IN_USE));
    assert_eq!(client.mig_mode(gpu), Ok((0, 0)));
    node.sim.update(|state| state.remove_process(None, 4242)).expect("a process");
    assert_eq!(client.set_mig_mode(gpu, 1), Ok(SUCCESS));
    let (gi, ci) = client.instance(gpu, 0, 4, (0, 8));
    assert_eq!(client.set_mig_mode(gpu, 0), Ok(IN_USE));
    assert_eq!((client.destroy_ci(ci), client.destroy_gi(gi)), (SUCCESS, SUCCESS));
    assert_eq!(client.set_mig_mode(gpu, 0), Ok(SUCCESS));
}

#[test]
fn ampere_in_use_changes_its_mig_mode_at_reset() {
    let node = Node::up("A100-SXM4-40GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    node.sim.update(|state| state.add_process(0, process(4242, None))).expect("a process");
    assert_eq!(client.set_mig_mode(gpu, 1), Ok(IN_USE));
    assert_eq!(client.mig_mode(gpu), Ok((0, 1)));
    node.sim.update(|state| state.remove_process(None, 4242)).expect("a process");
    node.sim.update(|state| state.reset(0, false)).expect("a reset");
    assert_eq!(client.mig_mode(gpu), Ok((1, 1)));
}

#[test]
fn gpu_in_use_refuses_the_mode_by_error_if_configured() {
    for (model, pending) in [("H100-SXM5-80GB", 0), ("A100-SXM4-40GB", 1)] {
        let node = Node::with(model, |options| options.host.mig_mode_errors = true);
        let client = node.client();
        let gpu = client.device(0).expect("a GPU");
        node.sim.update(|state| state.add_process(0, process(4242, None))).expect("a process");
        assert_eq!(client.set_mig_mode(gpu, 1), Err(IN_USE));
        assert_eq!(client.mig_mode(gpu), Ok((0, pending)));
        node.sim.update(|state| state.remove_process(None, 4242)).expect("a process");
        assert_eq!(client.set_mig_mode(gpu, 1), Ok(SUCCESS));
    }
}

#[test]
fn ampere_in_a_vm_requires_a_reset() {
    let node = Node::with("A30-24GB", |options| options.host.vm = true);
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    assert_eq!(client.set_mig_mode(gpu, 1), Ok(RESET_REQUIRED));
    assert_eq!(client.mig_mode(gpu), Ok((0, 1)));
}

#[test]
fn unprivileged_process_changes_nothing() {
    let (node, client, gpu) = with_mig();
    let (gi, ci) = client.instance(gpu, 19, 0, (0, 1));
    let set = |privilege| {
        let change = |state: &mut divvy_sim::State| {
            state.host.privilege = privilege;
            Ok(())
        };
        node.sim.update(change).expect("a state");
    };
    set(Privilege::Nobody);
    // The capability node alone allows creating and destroying instances.
    let config = node.sim.dev().join("nvidia-caps/nvidia-cap1");
    assert!(client.create_gi(gpu, 19, Some((1, 1))).is_ok());
    std::fs::remove_file(&config).expect("the node of mig/config");
    assert_eq!(client.set_mig_mode(gpu, 0), Err(NO_PERMISSION));
    assert_eq!(client.create_gi(gpu, 19, None), Err(NO_PERMISSION));
    assert_eq!(client.gis(gpu, 19), Err(NO_PERMISSION));
    assert_eq!(client.create_ci(gi, 0), Err(NO_PERMISSION));
    assert_eq!(client.destroy_ci(ci), NO_PERMISSION);
    assert_eq!(client.destroy_gi(gi), NO_PERMISSION);
    assert!(client.profile(gpu, 0).is_ok());
    set(Privilege::Owner);
    assert_eq!(client.destroy_ci(ci), SUCCESS);
}

#[test]
fn lost_gpu_fails_every_call_and_others_work() {
    let node = Node::up("2xH100-SXM5-80GB");
    let client = node.client();
    let (lost, other) = (client.device(0).expect("a GPU"), client.device(1).expect("a GPU"));
    node.sim.update(|state| state.lose(0, false)).expect("a GPU");
    assert_eq!(client.count(), Ok(2));
    assert_eq!(client.device(0), Err(GPU_IS_LOST));
    assert_eq!(client.uuid(lost), Err(GPU_IS_LOST));
    assert_eq!(client.set_mig_mode(lost, 1), Err(GPU_IS_LOST));
    assert_eq!(client.profile(lost, 0).err(), Some(GPU_IS_LOST));
    assert!(client.uuid(other).is_ok());
}

#[test]
fn init_and_shutdown_are_counted() {
    let node = Node::up("L4");
    let client = node.loaded();
    assert_eq!(client.shutdown(), UNINITIALIZED);
    assert_eq!(client.count(), Err(UNINITIALIZED));
    assert_eq!((client.init(), client.init_with(1)), (SUCCESS, SUCCESS));
    assert_eq!(client.shutdown(), SUCCESS);
    assert_eq!(client.count(), Ok(1));
    assert_eq!(client.shutdown(), SUCCESS);
    assert_eq!(client.count(), Err(UNINITIALIZED));
    assert_eq!(client.init_with(8), INVALID_ARGUMENT);
    assert_eq!((client.init(), client.count()), (SUCCESS, Ok(1)));
}

#[test]
fn init_fails_without_kernel_modules() {
    let node = Node::with("L4", |options| options.host.bare = true);
    assert_eq!(node.loaded().init(), DRIVER_NOT_LOADED);
}
