//! Events: delivery, content and timeouts.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use common::*;

const XID: u64 = 0x8;
const MIG_CONFIG: u64 = 0x100;

fn xid(node: &Node, slot: usize, number: u64, instance: Option<(u32, u32)>) {
    node.sim.update(|state| state.xid(slot, number, instance)).expect("an event");
}

#[test]
fn event_is_delivered_once_to_earlier_registrations() {
    let node = Node::up("2xH100-SXM5-80GB");
    let client = node.client();
    let (first, second) = (client.device(0).expect("a GPU"), client.device(1).expect("a GPU"));
    let set = client.event_set();
    xid(&node, 0, 13, None);
    assert_eq!(client.register(first, XID, set), SUCCESS);
    assert_eq!(client.wait(set, 0).err(), Some(TIMEOUT));
    xid(&node, 1, 79, None);
    xid(&node, 0, 31, None);
    let event = client.wait(set, 1000).expect("an event");
    assert_eq!((Device(event.device), event.eventType, event.eventData), (first, XID, 31));
    assert_eq!((event.gpuInstanceId, event.computeInstanceId), (u32::MAX, u32::MAX));
    assert_eq!(client.wait(set, 0).err(), Some(TIMEOUT));
    assert_eq!(client.register(second, XID, set), SUCCESS);
    assert_eq!(client.wait(set, 0).err(), Some(TIMEOUT));
}

#[test]
fn xid_event_has_its_instance() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let set = client.event_set();
    assert_eq!(client.register(client.device(0).expect("a GPU"), XID, set), SUCCESS);
    xid(&node, 0, 94, Some((9, 0)));
    let event = client.wait(set, 1000).expect("an event");
    assert_eq!((event.eventData, event.gpuInstanceId, event.computeInstanceId), (94, 9, 0));
}

#[test]
fn waiting_call_gets_an_event_of_another_process() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    let set = client.event_set();
    assert_eq!(client.register(gpu, MIG_CONFIG, set), SUCCESS);
    std::thread::scope(|scope| {
        scope.spawn(|| node.sim.update(|state| state.set_mig_mode(0, true)).expect("a mode"));
        assert_eq!(client.wait(set, 30_000).map(|event| event.eventType), Ok(MIG_CONFIG));
    });
}

#[test]
fn unknown_or_unsupported_event_kinds_are_refused() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    let set = client.event_set();
    assert_eq!(client.register(gpu, 1 << 40, set), INVALID_ARGUMENT);
    assert_eq!(client.register(gpu, XID | 0x1000, set), NOT_SUPPORTED);
    assert_eq!(client.register(gpu, XID, std::ptr::null_mut()), INVALID_ARGUMENT);
    xid(&node, 0, 79, None);
    assert_eq!(client.wait(set, 0).err(), Some(TIMEOUT));
}

#[test]
fn wait_ends_when_all_gpus_of_the_set_are_lost() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let set = client.event_set();
    assert_eq!(client.register(client.device(0).expect("a GPU"), XID, set), SUCCESS);
    node.sim.update(|state| state.lose(0, false)).expect("a GPU");
    assert_eq!(client.wait(set, 30_000).err(), Some(GPU_IS_LOST));
}
