//! Metadata of pools and graphs.

use super::MIB;
use super::fixture::{PagesSpec, Process, TestContainer, device};
use crate::PoolKind;
use crate::handle_metadata::SUBTRACT;

fn process(test: impl FnOnce(&Process, &dyn Fn() -> u64)) {
    let container = TestContainer::new(&[PagesSpec::share(100 * MIB)]);
    let process = container.process(1);
    device(&process);
    test(&process, &|| container.used()[0]);
}

/// More than a table of fixed size would hold.
const MANY: u64 = 2000;

#[test]
fn pool_owners_are_kept_until_destroyed() {
    process(|process, used| {
        let owner = |pool: u64| pool.is_multiple_of(3).then_some((pool % 60) as i32);
        let pools = || (1..=MANY).map(|number| number * 64);
        pools().for_each(|pool| process.set_pool_owner(pool, owner(pool)).expect("there is room"));
        pools().for_each(|pool| assert_eq!(process.pool_owner(pool), Some(owner(pool))));
        // The driver refuses to destroy the pool.
        pools().for_each(|pool| drop(process.take_pool_owner(pool)));
        pools().for_each(|pool| assert_eq!(process.pool_owner(pool), Some(owner(pool))));
        pools().for_each(|pool| process.take_pool_owner(pool).expect("it is known").discard());
        pools().for_each(|pool| assert_eq!(process.pool_owner(pool), None));
        assert_eq!(used(), 0);
    });
}

#[test]
fn graph_needs_are_kept_per_device_until_destroyed() {
    process(|process, used| {
        let graphs = || (1..=MANY).map(|number| 0x7f00_0000_0000 + number * 64);
        for graph in graphs() {
            for (device, bytes) in [(0, MIB), (3, 2 * MIB), (0, 4 * MIB)] {
                process.add_graph_need(graph, device, bytes).expect("there is room");
            }
        }
        let needs = |graph| [0, 1, 3].map(|device| process.graph_need(graph, device));
        graphs().for_each(|graph| assert_eq!(needs(graph), [Some(5 * MIB), None, Some(2 * MIB)]));
        for graph in graphs() {
            drop(process.take_graph_need(graph, 3));
            process.take_graph_need(graph, 0).expect("it is known").discard();
            assert_eq!(needs(graph), [None, None, Some(2 * MIB)]);
        }
        assert_eq!(used(), 0, "neither is a charge");
    });
}

#[test]
fn graph_need_is_subtracted_down_to_zero() {
    process(|process, _| {
        let graph = 0x7f00_0000_0000;
        let needs = |sign: u64, bytes: u64| {
            process.add_graph_need(graph | sign, 3, bytes * MIB).expect("there is room");
            process.graph_need(graph, 3).map(|bytes| bytes / MIB)
        };
        assert_eq!(needs(SUBTRACT, 1), Some(0), "subtracted from nothing");
        assert_eq!((needs(0, 5), needs(SUBTRACT, 2), needs(SUBTRACT, 4)), (Some(5), Some(3), Some(0)));
    });
}

#[test]
fn each_pool_of_a_device_is_listed_once() {
    process(|process, _| {
        let mut pools: Vec<u64> = (1..=90).map(|number| number * 4096).collect();
        for pool in pools.iter().rev() {
            device(process).open_pool(PoolKind::Pool(*pool)).settle(MIB).expect("it fits");
        }
        let mut named = Vec::new();
        device(process).pools(|pool| {
            named.push(pool);
            device(process).open_pool(PoolKind::Pool(pool)).settle(0).expect("less fits");
        });
        named.sort_unstable();
        assert_eq!(named, pools);
        pools.clear();
        device(process).pools(|pool| pools.push(pool));
        assert!(pools.is_empty(), "empty pools are not listed");
    });
}

/// One graph can have memory of both devices.
#[test]
fn graph_memory_of_two_devices_can_be_locked_at_once() {
    let container = TestContainer::new(&[PagesSpec::share(100 * MIB)]);
    let process = container.process(1);
    let one = device(&process);
    let two = crate::Device { index: 16, ..one };
    let before = crate::System::now(process.system());
    let (first, second) = (one.open_pool(PoolKind::Graph), two.open_pool(PoolKind::Graph));
    assert_eq!(crate::System::now(process.system()), before, "neither waits for the other");
    drop((first, second));
}
