//! A process sees the GPUs and instances with device nodes in its `/dev`.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use common::*;

/// Removes a node from the simulator's `/dev`, as in a container that does not have it.
fn hide(node: &Node, name: &str) {
    std::fs::remove_file(node.sim.dev().join(name)).expect("a node");
}

#[test]
fn hidden_gpu_is_neither_counted_nor_found() {
    let node = Node::up("3xL4");
    let client = node.client();
    let uuids: Vec<String> =
        (0..3).map(|index| client.device(index).and_then(|gpu| client.uuid(gpu)).expect("a GPU")).collect();
    hide(&node, "nvidia1");
    assert_eq!(client.count(), Ok(2));
    assert_eq!(client.device(1).and_then(|gpu| client.uuid(gpu)).as_ref(), Ok(&uuids[2]));
    assert_eq!(client.device(1).and_then(|gpu| client.minor(gpu)), Ok(2));
    assert_eq!(client.device(2), Err(INVALID_ARGUMENT));
    assert_eq!(client.by_uuid(&uuids[1]), Err(NOT_FOUND));
}

#[test]
fn init_fails_without_the_control_node() {
    let node = Node::up("L4");
    hide(&node, "nvidiactl");
    assert_eq!(node.loaded().init(), DRIVER_NOT_LOADED);
}

#[test]
fn mig_devices_need_both_capability_nodes() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    assert_eq!(client.set_mig_mode(gpu, 1), Ok(SUCCESS));
    for start in 0..3 {
        client.instance(gpu, 19, 0, (start, 1));
    }
    let ids = || -> Vec<u32> {
        let found = (0..7).map_while(|index| client.mig_device(gpu, index).ok());
        found.map(|device| client.gi_id(device).expect("an id")).collect()
    };
    assert_eq!(ids(), [7, 8, 9]);
    let hidden = client.mig_device(gpu, 0).and_then(|device| client.uuid(device)).expect("a UUID");
    // Hides the node of GPU instance 7, and that of the compute instance in GPU instance 9.
    hide(&node, "nvidia-caps/nvidia-cap66");
    hide(&node, "nvidia-caps/nvidia-cap85");
    assert_eq!(ids(), [8]);
    assert_eq!(client.by_uuid(&hidden), Err(NOT_FOUND));
}

#[test]
fn missing_gpu_shifts_minors_but_handles_stay_valid() {
    let node = Node::up("3xH100-SXM5-80GB");
    let client = node.client();
    let gpus: Vec<Device> = (0..3).map(|index| client.device(index).expect("a GPU")).collect();
    let last = client.uuid(gpus[2]).expect("a UUID");
    let change = |state: &mut divvy_sim::State| {
        state.lose(1, false)?;
        state.reboot();
        Ok(())
    };
    node.sim.update(change).expect("a reboot");
    assert_eq!(client.count(), Ok(2));
    assert_eq!(client.uuid(gpus[1]), Err(GPU_IS_LOST));
    let found = client.by_uuid(&last).expect("the last GPU");
    assert_eq!((found, client.minor(found)), (gpus[2], Ok(1)));
}
