//! Exported physical memory, on the simulated driver: it can be imported under any handle, so it
//! stays charged.

mod common;

use common::container::{Node, key};
use common::program::Program;

/// Entry point of the programs in the containers.
#[test]
fn scenario_program() {
    common::container::guest();
}

/// A GPU with one share of 1,000 MiB, and two programs in its container.
fn shared(test: impl FnOnce(Program, Program, &dyn Fn() -> u64)) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let container = node.container(std::slice::from_ref(&share));
    test(container.started(), container.started(), &|| share.used_mib());
}

/// If the exporter imports the memory, it has a second handle, which keeps it after the first is
/// released.
#[test]
fn memory_imported_by_its_exporter_stays_charged() {
    shared(|mut one, mut two, used| {
        let made = key(&one.ask("shareable create 600"));
        let descriptor = key(&one.ask(&format!("shareable export {made}")));
        let imported = key(&one.ask(&format!("shareable import {descriptor}")));
        assert_ne!(imported, made, "the driver gives a handle of its own");
        assert_eq!(one.ask(&format!("free release {made}")), "0");
        assert_eq!(used(), 600);
        assert_eq!(one.ask("shareable create 600"), "error 2", "past the limit");
        let address = key(&one.ask("reserve 600"));
        assert_eq!(one.ask(&format!("map {address} 600 {imported}")), "0", "the memory is there");
        key(&one.ask("shareable create 400"));
        // When the process exits, its memory and its charge end.
        one.kill();
        key(&two.ask("alloc v2 1000"));
        assert_eq!(used(), 1000);
    });
}

/// A file descriptor keeps the memory: it can be imported after the release.
#[test]
fn memory_imported_after_release_stays_charged() {
    shared(|mut one, _two, used| {
        let made = key(&one.ask("shareable create 600"));
        let descriptor = key(&one.ask(&format!("shareable export {made}")));
        assert_eq!(one.ask(&format!("free release {made}")), "0");
        key(&one.ask(&format!("shareable import {descriptor}")));
        assert_eq!(used(), 600);
    });
}

/// An export that the driver refuses is not charged.
#[test]
fn refused_export_is_refunded() {
    shared(|mut one, _two, used| {
        let made = key(&one.ask("alloc create 600"));
        assert_eq!(one.ask(&format!("shareable export {made}")), "error 1");
        assert_eq!(used(), 600);
        assert_eq!(one.ask(&format!("free release {made}")), "0");
        assert_eq!(used(), 0);
    });
}

/// A thread exports or maps a handle during its release, which takes two seconds in the driver.
#[test]
fn memory_exported_or_mapped_during_release_stays_charged() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let container = node.container(std::slice::from_ref(&share));
    let container = container.with("export DIVVY_SIM_CUDA=cuMemRelease@2000000");
    let mut program = container.started();
    let exported = key(&program.ask("shareable create 600"));
    let said = program.ask(&format!("during free release {exported} , shareable export {exported}"));
    assert!(said.starts_with("0, ok "), "{said}");
    assert_eq!(share.used_mib(), 600, "a descriptor holds it");
    let mapped = key(&program.ask("alloc create 400"));
    let address = key(&program.ask("reserve 400"));
    let said = program.ask(&format!("during free release {mapped} , map {address} 400 {mapped}"));
    assert_eq!((said.as_str(), share.used_mib()), ("0, 0", 1000), "a mapping holds it");
    assert_eq!(program.ask(&format!("unmap {address} 400")), "0");
    assert_eq!(share.used_mib(), 600);
}

/// Tiles of an array and multicast objects keep the memory after its handle is released. It stays
/// charged after they are gone, because no call reports what they have held.
#[test]
fn memory_in_arrays_and_multicast_objects_stays_charged() {
    for way in ["cuMemMapArrayAsync", "cuMemMapArrayAsync_ptsz"] {
        shared(|mut program, _, used| {
            let array = key(&program.ask("alloc sparse 0"));
            let made = key(&program.ask("alloc create 600"));
            assert_eq!(program.ask(&format!("tile map {way} {array} {made}")), "0");
            assert_eq!(program.ask(&format!("free release {made}")), "0");
            assert_eq!((used(), program.ask("alloc create 600")), (600, "error 2".into()), "{way}");
            assert_eq!(program.ask(&format!("tile unmap {way} {array}")), "0");
            assert_eq!(used(), 600, "{way}");
        });
    }
    for way in ["cuMulticastBindMem", "cuMulticastBindMem_v2"] {
        shared(|mut program, _, used| {
            let made = key(&program.ask("alloc create 600"));
            key(&program.ask(&format!("bind {way} {made}")));
            assert_eq!(program.ask(&format!("free release {made}")), "0");
            assert_eq!((used(), program.ask("alloc create 600")), (600, "error 2".into()), "{way}");
        });
    }
    for way in ["cuMulticastBindAddr", "cuMulticastBindAddr_v2"] {
        shared(|mut program, _, used| {
            let made = key(&program.ask("alloc create 600"));
            let address = key(&program.ask("reserve 600"));
            assert_eq!(program.ask(&format!("map {address} 600 {made}")), "0");
            key(&program.ask(&format!("bind {way} {address}")));
            assert_eq!(program.ask(&format!("unmap {address} 600")), "0");
            assert_eq!(program.ask(&format!("free release {made}")), "0");
            assert_eq!((used(), program.ask("alloc create 600")), (600, "error 2".into()), "{way}");
        });
    }
}

/// A binding that the driver refuses is not charged.
#[test]
fn refused_multicast_binding_is_refunded() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let container = node.container(std::slice::from_ref(&share));
    let mut program = container.with("export DIVVY_SIM_CUDA=cuMulticastBindMem=1").started();
    let made = key(&program.ask("alloc create 600"));
    assert_eq!(program.ask(&format!("bind cuMulticastBindMem {made}")), "error 1 touched");
    assert_eq!(program.ask(&format!("free release {made}")), "0");
    assert_eq!(share.used_mib(), 0);
}
