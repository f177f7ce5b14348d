//! GPUs that come, go and die while the library is initialised.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use common::*;
use divvy_sim::code::Code as Answer;
use divvy_sim::driver_root::{CreateError, load_driver, unload_driver};
use divvy_sim::state::{Loss, State};

const XID: u64 = 0x8;

fn update(node: &Node, change: impl FnOnce(&mut State) -> Result<(), Answer>) {
    node.sim.update(change).expect("a change");
}

#[test]
fn session_keeps_the_gpus_that_it_could_open() {
    let node = Node::with("4xL4", |options| options.host.node_delay_ms = 600_000);
    update(&node, |state| {
        (state.gpus[0].node_due_ms, state.gpus[1].node_due_ms) = (Some(1), Some(1));
        Ok(())
    });
    let client = node.client();
    let uuid = node.sim.read().expect("a state").gpus[2].uuid.clone();
    assert_eq!((client.count(), client.by_uuid(&uuid)), (Ok(2), Err(NOT_FOUND)));
    update(&node, |state| {
        (state.gpus[2].node_due_ms, state.gpus[3].node_due_ms) = (Some(1), Some(1));
        Ok(())
    });
    assert!(node.sim.read().expect("a state").gpus.iter().all(|gpu| gpu.node));
    assert_eq!((client.init(), client.shutdown()), (SUCCESS, SUCCESS));
    assert_eq!(client.count(), Ok(2), "another init does not enumerate again");
    assert_eq!((client.device(2).err(), client.by_uuid(&uuid)), (Some(INVALID_ARGUMENT), Err(NOT_FOUND)));
    assert_eq!((client.shutdown(), client.init()), (SUCCESS, SUCCESS));
    assert_eq!(client.count(), Ok(4));
    assert!(client.by_uuid(&uuid).is_ok());
}

#[test]
fn replaced_gpu_is_lost_to_open_sessions() {
    let node = Node::up("2xL4");
    let client = node.client();
    let (first, second) = (client.device(0).expect("a GPU"), client.device(1).expect("a GPU"));
    update(&node, |state| state.replace_gpu(0));
    assert_eq!((client.uuid(first), client.count()), (Err(GPU_IS_LOST), Ok(1)));
    assert!(client.uuid(second).is_ok());
    assert_eq!((client.shutdown(), client.init()), (SUCCESS, SUCCESS));
    assert!(client.device(0).is_ok_and(|device| device != first));
}

#[test]
fn unplugged_gpu_is_lost_and_plugged_gpu_needs_a_new_session() {
    let node = Node::up("2xL4");
    let client = node.client();
    let first = client.device(0).expect("a GPU");
    update(&node, |state| state.plug(state.gpus[0].model).map(drop));
    update(&node, |state| state.unplug(0));
    assert_eq!((client.uuid(first), client.count()), (Err(GPU_IS_LOST), Ok(1)));
    assert_eq!((client.shutdown(), client.init(), client.count()), (SUCCESS, SUCCESS, Ok(2)));
}

#[test]
fn silent_loss_answers_with_its_code() {
    for code in [None, Some(Answer::Unknown), Some(Answer::IrqIssue), Some(Answer::GpuNotFound)] {
        let node = Node::up("2xL4");
        let client = node.client();
        let (lost, other) = (client.device(0).expect("a GPU"), client.device(1).expect("a GPU"));
        let set = client.event_set();
        assert_eq!(client.register(lost, XID | 0x4000, set), SUCCESS);
        update(&node, |state| state.lose_as(0, false, Loss { silent: true, code }));
        assert_eq!(client.wait(set, 30).err(), Some(TIMEOUT));
        let answer = code.map_or(GPU_IS_LOST, u32::from);
        assert_eq!((client.uuid(lost), client.device(0).err()), (Err(answer), Some(answer)));
        assert!(client.uuid(other).is_ok());
    }
}

#[test]
fn reset_restores_a_gpu_that_requires_it() {
    let node = Node::up("L4");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    let loss = Loss { silent: true, code: Some(Answer::ResetRequired) };
    update(&node, |state| state.lose_as(0, false, loss));
    assert_eq!(client.uuid(gpu), Err(RESET_REQUIRED));
    update(&node, |state| state.reset(0, false));
    assert!(client.uuid(gpu).is_ok());
}

#[test]
fn initialised_library_keeps_the_module_loaded() {
    let node = Node::up("L4");
    let client = node.loaded();
    assert_eq!((client.init(), client.init()), (SUCCESS, SUCCESS));
    assert_eq!(client.shutdown(), SUCCESS);
    assert!(matches!(unload_driver(&node.sim), Err(CreateError::InUse)));
    assert_eq!(client.shutdown(), SUCCESS);
    unload_driver(&node.sim).expect("no users");
    assert_eq!(client.init(), DRIVER_NOT_LOADED);
    load_driver(&node.sim, "590.44.01").expect("no driver is loaded");
    assert_eq!((client.init(), client.count()), (SUCCESS, Ok(1)));
}
