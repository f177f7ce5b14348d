//! The rules, on pages in memory and with processes that tests can fork and kill.

mod deaths;
mod events;
mod freeing;
mod gate;
mod known;
mod model;
mod overcommit;
mod pace;
mod physical;
mod quick;
#[cfg(loom)]
mod threads;
mod world;

use crate::alive::{Signal, Stat, gone};
use crate::nvml::{MemoryInfo, utilisation};
use crate::table::{Class, Entry, Table};
use crate::{Identity, Kind, Standing};
use divvy_pages::Flags;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use world::{Fake, GPU, Pages, World, device, kept};

const MIB: u64 = 1 << 20;

#[test]
fn no_page_means_that_nothing_is_counted() {
    let world = World::new(&[]);
    let process = world.process(1);
    assert!(process.idle());
    assert!(matches!(process.device(0, || Some([GPU; 2])), Standing::Free));
}

/// Which of them it is that no page was read of nobody knows.
#[test]
fn of_more_devices_than_there_is_room_for_those_that_are_not_known_are_closed() {
    let mig = |number: usize| divvy_pages::GpuUuid([number as u8 + 10; 16]);
    let pages: Vec<Pages> =
        (0..crate::ledger::DEVICES + 3).map(|at| Pages::Instance { limit: MIB, mig: mig(at) }).collect();
    let process = World::new(&pages).process(1);
    let standing = |at: usize| process.device(at as i32, || Some([mig(at), GPU]));
    let shares = (0..pages.len()).filter(|at| matches!(standing(*at), Standing::Share(_))).count();
    let closed = (0..pages.len()).filter(|at| matches!(standing(*at), Standing::Closed)).count();
    assert_eq!((shares, closed), (crate::ledger::DEVICES, 3));
    assert!(matches!(process.device_of(divvy_pages::GpuUuid([9; 16])), Standing::Closed));
}

#[test]
fn refused_pages_alone_close_every_device_and_beside_good_ones_nothing() {
    let closed = World::new(&[Pages::Refused]).process(1);
    assert!(matches!(closed.device(0, || Some([GPU; 2])), Standing::Closed));
    let beside = World::new(&[Pages::Refused, Pages::share(10 * MIB)]).process(1);
    assert!(matches!(beside.device(0, || Some([GPU; 2])), Standing::Share(_)));
    let other = divvy_pages::GpuUuid([9; 16]);
    assert!(matches!(beside.device(1, || Some([other; 2])), Standing::Free));
    // A device that the driver cannot name might be the one with the share.
    assert!(matches!(beside.device(2, || None), Standing::Closed));
}

#[test]
fn an_instance_is_found_by_its_own_uuid_and_not_by_its_gpus() {
    let instance = divvy_pages::GpuUuid([3; 16]);
    let process = World::new(&[Pages::Instance { limit: 4 * MIB, mig: instance }]).process(1);
    assert!(matches!(process.device(0, || Some([instance, GPU])), Standing::Share(_)));
    assert!(matches!(process.device(1, || Some([GPU, GPU])), Standing::Free));
}

#[test]
fn the_figures_are_the_shares() {
    let process = World::new(&[Pages::share(10 * MIB)]).process(1);
    let device = device(&process);
    kept(device, 4 * MIB, 0x1000);
    assert_eq!(device.mem_info(60 * MIB, 80 * MIB), (6 * MIB, 10 * MIB));
    // Less is free on the device than the share has left, or less there at all.
    assert_eq!(device.mem_info(2 * MIB, 80 * MIB), (2 * MIB, 10 * MIB));
    assert_eq!(
        [8 * MIB, 80 * MIB].map(|total| process.total_mem(|| Some([GPU; 2]), total)),
        [8 * MIB, 10 * MIB]
    );
    assert_eq!(process.total_mem(|| Some([divvy_pages::GpuUuid([9; 16]); 2]), 80 * MIB), 80 * MIB);
    let memory =
        |free, total| device.figures().memory(MemoryInfo { total, free, used: total - free, reserved: MIB });
    let seen = MemoryInfo { total: 10 * MIB, free: 6 * MIB, used: 4 * MIB, reserved: 0 };
    assert_eq!(memory(60 * MIB, 80 * MIB), seen);
}

#[test]
fn a_limit_that_is_lowered_holds_at_the_next_allocation_and_leaves_what_there_is() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    let device = device(&process);
    kept(device, 6 * MIB, 0x1000);
    world.relimit(0, 5 * MIB);
    assert!(device.reserve(1).is_err());
    assert_eq!(device.mem_info(60 * MIB, 80 * MIB), (0, 5 * MIB));
    process.take(Class::Pointer, 0x1000).expect("it is there").freed();
    assert!(device.reserve(5 * MIB).is_ok());
}

#[test]
fn pages_of_one_device_add_up_and_are_charged_in_the_order_of_their_shares() {
    let world = World::new(&[Pages::share(4 * MIB), Pages::share(6 * MIB)]);
    let process = world.process(1);
    let device = device(&process);
    kept(device, 3 * MIB, 0x1000);
    assert_eq!(world.used(), [3 * MIB, 0]);
    kept(device, 5 * MIB, 0x2000);
    assert_eq!(world.used(), [3 * MIB, 5 * MIB]);
    kept(device, 2 * MIB, 0x3000);
    assert_eq!(world.used(), [4 * MIB, 6 * MIB]);
    assert!(device.reserve(1).is_err());
    assert_eq!(device.mem_info(60 * MIB, 80 * MIB), (0, 10 * MIB));
    for pointer in [0x1000, 0x2000, 0x3000] {
        process.take(Class::Pointer, pointer).expect("it is there").freed();
    }
    assert_eq!(world.used(), [0, 0]);
}

#[test]
fn the_order_in_which_pages_are_found_does_not_matter() {
    let world = World::new(&[4, 1, 2, 3].map(|size| Pages::share(size * MIB))).backwards();
    let process = world.process(1);
    for (pointer, used) in [(1, [0, 0, 0, 4]), (2, [0, 0, 1, 4]), (3, [0, 2, 1, 4]), (4, [3, 2, 1, 4])] {
        let bytes = used.iter().sum::<u64>() * MIB - world.used().iter().sum::<u64>();
        kept(device(&process), bytes, pointer);
        assert_eq!(world.used(), used.map(|used| used * MIB));
    }
}

#[test]
fn who_only_asks_how_much_there_is_takes_no_slot() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    assert_eq!(process.total_mem(|| Some([GPU; 2]), 80 * MIB), 10 * MIB);
    assert!(!process.idle());
    assert_eq!(world.held(), []);
    device(&process);
    assert_eq!(world.held(), [(1, 0)]);
}

#[test]
fn observing_counts_and_never_refuses() {
    for flags in [Flags::OBSERVE_ONLY, Flags::NATIVE_MEMORY] {
        let world = World::new(&[Pages::With { limit: 4 * MIB, flags }]);
        let process = world.process(1);
        kept(device(&process), 9 * MIB, 0x1000);
        assert_eq!(world.used(), [9 * MIB]);
        assert_eq!(device(&process).mem_info(60 * MIB, 80 * MIB), (0, 4 * MIB));
    }
}

#[test]
fn a_child_of_fork_has_a_slot_of_its_own_and_none_of_its_parents_memory() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    kept(device(&process), 6 * MIB, 0x1000);
    // What the kernel does to the child's copy; this test goes on as the child.
    process.system().fork(2);
    assert!(process.take(Class::Pointer, 0x1000).is_none());
    assert!(device(&process).reserve(5 * MIB).is_err());
    kept(device(&process), 4 * MIB, 0x2000);
    assert_eq!(world.held(), [(1, 6 * MIB), (2, 4 * MIB)]);
    world.kill(1);
    assert!(device(&process).reserve(6 * MIB).is_ok());
}

#[test]
fn what_is_told_of_a_device_in_all_is_what_is_seen_once_it_is_charged() {
    let check = |pages: &[Pages], total: u64, expected: u64| {
        let process = World::new(pages).process(1);
        let told = || process.total_mem(|| Some([GPU; 2]), total * MIB);
        assert_eq!(told(), expected * MIB, "{pages:?}");
        if let Standing::Share(device) = process.device(0, || Some([GPU; 2])) {
            assert_eq!(device.mem_info(total * MIB, total * MIB).1, told(), "{pages:?}");
        }
        // A child of fork has the same pages, whatever its parent has made.
        process.system().fork(2);
        assert_eq!(told(), expected * MIB, "{pages:?}");
    };
    let over = Pages::Over { soft: 4 * MIB, limit: 90 * MIB };
    let instance = Pages::Instance { limit: 5 * MIB, mig: divvy_pages::GpuUuid([3; 16]) };
    check(&[], 80, 80);
    check(&[Pages::share(10 * MIB)], 80, 10);
    check(&[Pages::share(10 * MIB)], 8, 8);
    check(&[Pages::share(10 * MIB), Pages::share(20 * MIB)], 80, 30);
    check(&[Pages::share(u64::MAX), Pages::share(20 * MIB)], 80, 80);
    check(&[Pages::share(10 * MIB), instance, Pages::Refused], 80, 10);
    check(&[instance], 80, 80);
    check(&[over], 80, 90);
    check(&[over, Pages::share(10 * MIB)], 80, 14);
    check(&[Pages::Refused], 80, 80);
    check(&vec![Pages::share(MIB); 20], 80, 16);
}

#[test]
fn where_there_are_more_pages_than_there_is_room_for_no_device_is_free() {
    let process = World::new(&vec![Pages::share(MIB); 65]).process(1);
    assert!(matches!(process.device(0, || Some([GPU; 2])), Standing::Share(_)));
    let other = divvy_pages::GpuUuid([9; 16]);
    assert!(matches!(process.device(1, || Some([other; 2])), Standing::Closed));
}

#[test]
fn a_killed_process_leaves_its_room_to_others() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let [first, second] = [1, 2].map(|pid| world.process(pid));
    kept(device(&first), 10 * MIB, 0x1000);
    assert!(device(&second).reserve(1).is_err());
    world.kill(1);
    kept(device(&second), 10 * MIB, 0x1000);
    // One that comes after a death sees true figures at once.
    world.kill(2);
    assert_eq!(device(&world.process(3)).mem_info(60 * MIB, 80 * MIB), (10 * MIB, 10 * MIB));
}

#[test]
fn processes_are_listed_with_what_they_hold() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let [first, second] = [1, 2].map(|pid| world.process(pid));
    kept(device(&first), 3 * MIB, 0x1000);
    kept(device(&second), 4 * MIB, 0x1000);
    let bytes = |pid| device(&first).process(pid).map(|process| (process.pid, process.bytes));
    assert_eq!([1, 2, 3].map(bytes), [Some((1, 3 * MIB)), Some((2, 4 * MIB)), None]);
}

#[test]
fn a_process_that_the_node_has_found_is_known_by_its_pid_on_the_host_and_shown_under_its_own() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    kept(device(&process), 3 * MIB, 0x1000);
    let seen = |pid| device(&process).process(pid).map(|process| process.pid);
    assert_eq!([1, 4711].map(seen), [Some(1), None]);
    world.found_on_host(4711);
    // On the host that pid is somebody else's.
    assert_eq!([1, 4711].map(seen), [None, Some(1)]);
}

#[test]
fn what_threads_allocate_at_once_is_told_in_full() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    let arrived = AtomicU32::new(0);
    // Two threads that wait for each other without sleep, so that they go on at once where both have a core.
    let meet = |time: u32| {
        arrived.fetch_add(1, SeqCst);
        let mut looks = 0_u32;
        while arrived.load(SeqCst) < 2 * time {
            looks += 1;
            if looks.is_multiple_of(1000) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    };
    let run = |thread: u64| {
        let mut seen = Vec::new();
        for round in 0..5000 {
            meet(3 * round + 1);
            let kind = Kind::Managed { pointer: thread, context: 1 };
            device(&process).reserve(MIB).expect("it fits").keep_all(kind).expect("it is kept");
            meet(3 * round + 2);
            seen.push(world.told());
            meet(3 * round + 3);
            process.take(Class::Pointer, thread).expect("it is there").freed();
        }
        seen
    };
    let seen = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(2));
        [run(1), other.join().expect("no panic")].concat()
    });
    assert_eq!(seen.iter().position(|told| *told != (0, 2 * MIB)), None);
    assert_eq!(world.told(), (0, 0));
}

#[test]
fn utilisation_is_of_the_shares_part() {
    for (busy, part, seen) in
        [(15, 30, 50), (40, 30, 100), (40, 100, 40), (0, 30, 0), (200, 100, 100), (1, 0, 100)]
    {
        assert_eq!(utilisation(busy, part), seen, "{busy} of {part}");
    }
    for (cores, part) in [(30, 30), (0, 100), (100, 100)] {
        let world = pace::share(cores);
        let process = world.process(7);
        assert_eq!(device(&process).part(), part, "cores: {cores}");
    }
}

/// A line as Linux writes it, with the fields that matter.
fn line(name: &str, state: char, threads: u32, start: u64, image: u64) -> String {
    format!(
        "77 ({name}) {state} 1 77 77 0 -1 4194304 100 0 0 0 5 5 0 0 20 -5 {threads} 0 {start} 1000 50 \
         18446744073709551615 1 1 {image} 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
    )
}

#[test]
fn a_stat_line_is_read_whatever_the_process_is_called() {
    let stat = Stat { pid: 77, ended: false, start: 4711, image: 8000 };
    for name in ["bash", "a b", ") Z 1", "((", ""] {
        assert_eq!(Stat::parse(line(name, 'S', 3, 4711, 8000).as_bytes()), Some(stat), "{name}");
    }
    let ended = |state, threads| {
        Stat::parse(line("x", state, threads, 1, 1).as_bytes()).map(|stat| (stat.ended, stat.image))
    };
    assert_eq!(ended('Z', 1), Some((true, 0)));
    // A leader that ended before its threads: the process lives.
    assert_eq!(ended('Z', 2), Some((false, 0)));
    let own = std::fs::read("/proc/self/stat").expect("proc is mounted");
    assert_eq!(Stat::parse(&own).map(|stat| stat.pid), Some(std::process::id()));
}

#[test]
fn a_process_is_gone_only_with_proof() {
    let me = Identity { pid: 1, namespace: 7, start: 10, image: 5 };
    let who = Identity { pid: 77, namespace: 7, start: 4711, image: 8000 };
    let stat = Stat { pid: 77, ended: false, start: 4711, image: 8000 };
    let there = |stat| gone(&me, &who, Signal::Exists, true, stat);
    assert!(gone(&me, &who, Signal::NoSuchProcess, false, None));
    assert!(!gone(&me, &Identity { namespace: 8, ..who }, Signal::NoSuchProcess, true, None));
    assert!(!gone(
        &Identity { namespace: 0, ..me },
        &Identity { namespace: 0, ..who },
        Signal::NoSuchProcess,
        true,
        None
    ));
    assert!(!there(Some(stat)));
    assert!(!there(None));
    assert!(there(Some(Stat { ended: true, ..stat })));
    assert!(there(Some(Stat { start: 4712, ..stat })));
    assert!(there(Some(Stat { image: 8001, ..stat })));
    assert!(!there(Some(Stat { image: 0, ..stat })));
    // The /proc of another namespace shows another process under that pid.
    assert!(!gone(&me, &who, Signal::Exists, false, Some(Stat { start: 4712, ..stat })));
}

/// Acts on a table in one case.
const MOST: usize = if cfg!(miri) { 200 } else { 1500 };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 64 }))]

    #[test]
    fn any_bytes_are_a_stat_line_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Stat::parse(&bytes);
    }

    /// The table against a map, with keys that collide.
    #[test]
    fn the_table_is_a_map(acts in proptest::collection::vec((0..4_u8, 0..300_u64, 0..3_usize), 1..MOST)) {
        let fake = Fake::default();
        let table = Table::empty();
        let mut map = HashMap::new();
        let classes = [Class::Pointer, Class::Handle, Class::Mapping];
        for (turn, (act, key, class)) in acts.into_iter().enumerate() {
            // Half of the keys are neighbours in a shard, half are like addresses.
            let (key, class) = (if key % 2 == 0 { key << 21 } else { key }, classes[class]);
            match act {
                0 => {
                    let old = table.remove(&fake, class, key).map(|entry| entry.bytes());
                    prop_assert_eq!(old, map.remove(&(class as u64, key)));
                }
                1 => {
                    let found = table.get(&fake, class, key).map(|entry| entry.bytes());
                    prop_assert_eq!(found, map.get(&(class as u64, key)).copied());
                }
                _ => {
                    let entry = Entry::new(class, key, 1, turn as u64, 0);
                    let old = table.insert(&fake, entry).expect("there is memory").map(|entry| entry.bytes());
                    prop_assert_eq!(old, map.insert((class as u64, key), turn as u64));
                }
            }
        }
        let mut left = vec![];
        table.sweep(&fake, |entry| {
            left.push(entry.bytes());
            entry.class() == Some(Class::Pointer)
        });
        left.sort_unstable();
        // One that is kept may be seen twice.
        left.dedup();
        let mut expected: Vec<_> = map.values().copied().collect();
        expected.sort_unstable();
        prop_assert_eq!(left, expected);
        map.retain(|(class, _), _| *class != Class::Pointer as u64);
        let mut rest = 0;
        table.sweep(&fake, |_| {
            rest += 1;
            false
        });
        prop_assert_eq!(rest, map.len());
    }
}

#[test]
fn threads_share_the_table() {
    let fake = Fake::default();
    let table = Table::empty();
    // Enough for a shard to grow.
    let turns = if cfg!(miri) { 600 } else { 3_000_u64 };
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (fake, table) = (&fake, &table);
            scope.spawn(move || {
                for turn in 0..turns {
                    let key = (thread << 32) + (turn << 9);
                    table.insert(fake, Entry::new(Class::Pointer, key, 0, turn, 0)).expect("there is memory");
                    if turn % 3 == 0 {
                        assert_eq!(
                            table.remove(fake, Class::Pointer, key).map(|entry| entry.bytes()),
                            Some(turn)
                        );
                    }
                }
            });
        }
    });
    let mut count = 0;
    table.sweep(&fake, |_| {
        count += 1;
        true
    });
    assert_eq!(count, 4 * turns / 3 * 2);
}

#[test]
fn an_allocation_is_refused_where_it_cannot_be_kept_in_mind() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    let device = device(&process);
    process.system().no_memory(true);
    let reserved = device.reserve(MIB).expect("it fits");
    assert!(reserved.keep_all(Kind::Linear { pointer: 0x1000, context: 0 }).is_err());
    assert!(device.reserve(MIB).expect("it fits").keep_handle(7).is_err());
    assert_eq!(world.used(), [0]);
    process.system().no_memory(false);
    kept(device, MIB, 0x1000);
}
