//! What is kept in mind of pools and graphs.

use super::MIB;
use super::world::{Pages, Process, World, device};
use crate::Grown;
use crate::known::LESS;

fn process(test: impl FnOnce(&Process, &dyn Fn() -> u64)) {
    let world = World::new(&[Pages::share(100 * MIB)]);
    let process = world.process(1);
    device(&process);
    test(&process, &|| world.used()[0]);
}

/// More than any table of a fixed size would hold.
const MANY: u64 = 2000;

#[test]
fn any_number_of_pools_has_its_owner_until_it_ends() {
    process(|process, used| {
        let owner = |pool: u64| pool.is_multiple_of(3).then_some((pool % 60) as i32);
        let pools = || (1..=MANY).map(|number| number * 64);
        pools().for_each(|pool| process.pool_is_of(pool, owner(pool)).expect("there is room"));
        pools().for_each(|pool| assert_eq!(process.owner_of(pool), Some(owner(pool))));
        // An end that the driver refuses is none.
        pools().for_each(|pool| drop(process.pool_ends(pool)));
        pools().for_each(|pool| assert_eq!(process.owner_of(pool), Some(owner(pool))));
        pools().for_each(|pool| process.pool_ends(pool).expect("it is known").forgotten());
        pools().for_each(|pool| assert_eq!(process.owner_of(pool), None));
        assert_eq!(used(), 0);
    });
}

#[test]
fn any_number_of_graphs_has_its_needs_on_each_device_until_it_ends() {
    process(|process, used| {
        let graphs = || (1..=MANY).map(|number| 0x7f00_0000_0000 + number * 64);
        for graph in graphs() {
            for (device, bytes) in [(0, MIB), (3, 2 * MIB), (0, 4 * MIB)] {
                process.graph_needs(graph, device, bytes).expect("there is room");
            }
        }
        let needs = |graph| [0, 1, 3].map(|device| process.need_of(graph, device));
        graphs().for_each(|graph| assert_eq!(needs(graph), [Some(5 * MIB), None, Some(2 * MIB)]));
        for graph in graphs() {
            drop(process.graph_ends(graph, 3));
            process.graph_ends(graph, 0).expect("it is known").forgotten();
            assert_eq!(needs(graph), [None, None, Some(2 * MIB)]);
        }
        assert_eq!(used(), 0, "neither is a charge");
    });
}

#[test]
fn what_a_graph_needs_less_is_taken_off_and_never_more_than_it_needs() {
    process(|process, _| {
        let graph = 0x7f00_0000_0000;
        let needs = |sign: u64, bytes: u64| {
            process.graph_needs(graph | sign, 3, bytes * MIB).expect("there is room");
            process.need_of(graph, 3).map(|bytes| bytes / MIB)
        };
        assert_eq!(needs(LESS, 1), Some(0), "of what is not known");
        assert_eq!((needs(0, 5), needs(LESS, 2), needs(LESS, 4)), (Some(5), Some(3), Some(0)));
    });
}

#[test]
fn all_pools_of_a_device_are_named_and_each_once() {
    process(|process, _| {
        let mut pools: Vec<u64> = (1..=90).map(|number| number * 4096).collect();
        for pool in pools.iter().rev() {
            device(process).grow(Grown::Pool(*pool)).settle(MIB).expect("it fits");
        }
        let mut named = Vec::new();
        device(process).pools(|pool| {
            named.push(pool);
            device(process).grow(Grown::Pool(pool)).settle(0).expect("less fits");
        });
        named.sort_unstable();
        assert_eq!(named, pools);
        pools.clear();
        device(process).pools(|pool| pools.push(pool));
        assert!(pools.is_empty(), "what is empty is not looked at");
    });
}

/// A graph has memory of both at once.
#[test]
fn graphs_of_two_devices_are_open_at_once_by_one_thread() {
    let world = World::new(&[Pages::share(100 * MIB)]);
    let process = world.process(1);
    let one = device(&process);
    let two = crate::Device { index: 16, ..one };
    let before = crate::System::now(process.system());
    let (first, second) = (one.grow(Grown::Graph), two.grow(Grown::Graph));
    assert_eq!(crate::System::now(process.system()), before, "neither waits for the other");
    drop((first, second));
}
