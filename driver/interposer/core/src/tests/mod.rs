//! Tests of the rules, on pages in memory and with processes that tests can fork and kill.

mod charges;
mod fast_path;
mod fixture;
mod free;
mod gate;
mod handle_metadata;
mod model;
mod overcommit;
mod process_death;
mod quanta;
#[cfg(loom)]
mod threads;
mod throttle;
mod vmm;

use crate::liveness::{Signal, Stat, gone};
use crate::nvml::{MemoryInfo, utilisation};
use crate::table::{Class, Entry, Table};
use crate::{AllocationKind, DeviceAccess, Identity};
use divvy_pages::Flags;
use fixture::{FakeSystem, GPU, PagesSpec, TestContainer, allocate, device};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[test]
fn nothing_is_counted_without_pages() {
    let container = TestContainer::new(&[]);
    let process = container.process(1);
    assert!(process.has_no_policies());
    assert!(matches!(process.device(0, || Some([GPU; 2])), DeviceAccess::Unmanaged));
}

/// A device beyond the maximum cannot be distinguished from one whose page was not read, so it is denied.
#[test]
fn devices_beyond_the_maximum_are_denied() {
    let mig = |number: usize| divvy_pages::GpuUuid([number as u8 + 10; 16]);
    let pages: Vec<PagesSpec> = (0..crate::process_state::MAX_DEVICES + 3)
        .map(|at| PagesSpec::Instance { limit: MIB, mig: mig(at) })
        .collect();
    let process = TestContainer::new(&pages).process(1);
    let standing = |at: usize| process.device(at as i32, || Some([mig(at), GPU]));
    let shares = (0..pages.len()).filter(|at| matches!(standing(*at), DeviceAccess::Share(_))).count();
    let closed = (0..pages.len()).filter(|at| matches!(standing(*at), DeviceAccess::Denied)).count();
    assert_eq!((shares, closed), (crate::process_state::MAX_DEVICES, 3));
    assert!(matches!(process.device_by_uuid(divvy_pages::GpuUuid([9; 16])), DeviceAccess::Denied));
}

#[test]
fn untrusted_pages_alone_deny_every_device() {
    let closed = TestContainer::new(&[PagesSpec::Refused]).process(1);
    assert!(matches!(closed.device(0, || Some([GPU; 2])), DeviceAccess::Denied));
    let beside = TestContainer::new(&[PagesSpec::Refused, PagesSpec::share(10 * MIB)]).process(1);
    assert!(matches!(beside.device(0, || Some([GPU; 2])), DeviceAccess::Share(_)));
    let other = divvy_pages::GpuUuid([9; 16]);
    assert!(matches!(beside.device(1, || Some([other; 2])), DeviceAccess::Unmanaged));
    // A device without a UUID could be the one with the share.
    assert!(matches!(beside.device(2, || None), DeviceAccess::Denied));
}

#[test]
fn mig_instance_is_found_by_its_own_uuid() {
    let instance = divvy_pages::GpuUuid([3; 16]);
    let process = TestContainer::new(&[PagesSpec::Instance { limit: 4 * MIB, mig: instance }]).process(1);
    assert!(matches!(process.device(0, || Some([instance, GPU])), DeviceAccess::Share(_)));
    assert!(matches!(process.device(1, || Some([GPU, GPU])), DeviceAccess::Unmanaged));
}

#[test]
fn memory_figures_are_those_of_the_share() {
    let process = TestContainer::new(&[PagesSpec::share(10 * MIB)]).process(1);
    let device = device(&process);
    allocate(device, 4 * MIB, 0x1000);
    assert_eq!(device.mem_info(60 * MIB, 80 * MIB), (6 * MIB, 10 * MIB));
    // The device has less free, or less in total, than the share's limit allows.
    assert_eq!(device.mem_info(2 * MIB, 80 * MIB), (2 * MIB, 10 * MIB));
    assert_eq!(
        [8 * MIB, 80 * MIB].map(|total| process.total_mem(|| Some([GPU; 2]), total)),
        [8 * MIB, 10 * MIB]
    );
    assert_eq!(process.total_mem(|| Some([divvy_pages::GpuUuid([9; 16]); 2]), 80 * MIB), 80 * MIB);
    let memory = |free, total| {
        device.memory_usage().memory(MemoryInfo { total, free, used: total - free, reserved: MIB })
    };
    let seen = MemoryInfo { total: 10 * MIB, free: 6 * MIB, used: 4 * MIB, reserved: 0 };
    assert_eq!(memory(60 * MIB, 80 * MIB), seen);
}

#[test]
fn lowered_limit_applies_to_the_next_allocation() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    let device = device(&process);
    allocate(device, 6 * MIB, 0x1000);
    container.set_limit(0, 5 * MIB);
    assert!(device.reserve(1).is_err());
    assert_eq!(device.mem_info(60 * MIB, 80 * MIB), (0, 5 * MIB));
    process.take(Class::Pointer, 0x1000).expect("it is there").commit();
    assert!(device.reserve(5 * MIB).is_ok());
}

#[test]
fn pages_of_one_device_are_charged_in_share_order() {
    let container = TestContainer::new(&[PagesSpec::share(4 * MIB), PagesSpec::share(6 * MIB)]);
    let process = container.process(1);
    let device = device(&process);
    allocate(device, 3 * MIB, 0x1000);
    assert_eq!(container.used(), [3 * MIB, 0]);
    allocate(device, 5 * MIB, 0x2000);
    assert_eq!(container.used(), [3 * MIB, 5 * MIB]);
    allocate(device, 2 * MIB, 0x3000);
    assert_eq!(container.used(), [4 * MIB, 6 * MIB]);
    assert!(device.reserve(1).is_err());
    assert_eq!(device.mem_info(60 * MIB, 80 * MIB), (0, 10 * MIB));
    for pointer in [0x1000, 0x2000, 0x3000] {
        process.take(Class::Pointer, pointer).expect("it is there").commit();
    }
    assert_eq!(container.used(), [0, 0]);
}

#[test]
fn discovery_order_of_pages_does_not_matter() {
    let container = TestContainer::new(&[4, 1, 2, 3].map(|size| PagesSpec::share(size * MIB))).reversed();
    let process = container.process(1);
    for (pointer, used) in [(1, [0, 0, 0, 4]), (2, [0, 0, 1, 4]), (3, [0, 2, 1, 4]), (4, [3, 2, 1, 4])] {
        let bytes = used.iter().sum::<u64>() * MIB - container.used().iter().sum::<u64>();
        allocate(device(&process), bytes, pointer);
        assert_eq!(container.used(), used.map(|used| used * MIB));
    }
}

#[test]
fn query_of_the_total_takes_no_slot() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    assert_eq!(process.total_mem(|| Some([GPU; 2]), 80 * MIB), 10 * MIB);
    assert!(!process.has_no_policies());
    assert_eq!(container.held_bytes(), []);
    device(&process);
    assert_eq!(container.held_bytes(), [(1, 0)]);
}

#[test]
fn observe_only_counts_and_never_refuses() {
    for flags in [Flags::OBSERVE_ONLY, Flags::NATIVE_MEMORY] {
        let container = TestContainer::new(&[PagesSpec::With { limit: 4 * MIB, flags }]);
        let process = container.process(1);
        allocate(device(&process), 9 * MIB, 0x1000);
        assert_eq!(container.used(), [9 * MIB]);
        assert_eq!(device(&process).mem_info(60 * MIB, 80 * MIB), (0, 4 * MIB));
    }
}

#[test]
fn first_refusal_prints_limit_usage_and_remedy() {
    let container = TestContainer::new(&[PagesSpec::share(10 * GIB)]);
    let (process, other) = (container.process(1), container.process(2));
    allocate(device(&process), 6 * GIB, 0x1000);
    allocate(device(&other), 3 * GIB, 0x1000);
    assert_eq!(process.system().printed(), [""; 0]);
    device(&process).report_refusal(2 * GIB);
    let line = "divvy: allocation of 2.0 GiB refused: 9.0 GiB of 10.0 GiB used by 2 processes; free \
                memory, or raise `memory` in the claim\n";
    assert_eq!(process.system().printed(), [line]);
    device(&process).report_refusal(GIB);
    process.system().fork(3);
    device(&process).report_refusal(GIB);
    assert_eq!(process.system().printed(), [""; 0], "once, and not again in a forked child");
}

#[test]
fn class_without_messages_prints_nothing() {
    let flags = Flags::NO_MESSAGES;
    let container = TestContainer::new(&[PagesSpec::With { limit: 4 * MIB, flags }]);
    let process = container.process(1);
    device(&process).report_refusal(9 * MIB);
    assert_eq!(process.system().printed(), [""; 0]);
}

#[test]
fn forked_child_has_its_own_slot_and_no_memory() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    allocate(device(&process), 6 * MIB, 0x1000);
    // The kernel zeroes the child's copy; the test continues as the child.
    process.system().fork(2);
    assert!(process.take(Class::Pointer, 0x1000).is_none());
    assert!(device(&process).reserve(5 * MIB).is_err());
    allocate(device(&process), 4 * MIB, 0x2000);
    assert_eq!(container.held_bytes(), [(1, 6 * MIB), (2, 4 * MIB)]);
    container.kill(1);
    assert!(device(&process).reserve(6 * MIB).is_ok());
}

#[test]
fn total_is_the_same_before_and_after_the_first_charge() {
    let check = |pages: &[PagesSpec], total: u64, expected: u64| {
        let process = TestContainer::new(pages).process(1);
        let seen_total = || process.total_mem(|| Some([GPU; 2]), total * MIB);
        assert_eq!(seen_total(), expected * MIB, "{pages:?}");
        if let DeviceAccess::Share(device) = process.device(0, || Some([GPU; 2])) {
            assert_eq!(device.mem_info(total * MIB, total * MIB).1, seen_total(), "{pages:?}");
        }
        // A forked child has the same pages, whatever state its parent has created.
        process.system().fork(2);
        assert_eq!(seen_total(), expected * MIB, "{pages:?}");
    };
    let over = PagesSpec::Over { soft: 4 * MIB, limit: 90 * MIB };
    let instance = PagesSpec::Instance { limit: 5 * MIB, mig: divvy_pages::GpuUuid([3; 16]) };
    check(&[], 80, 80);
    check(&[PagesSpec::share(10 * MIB)], 80, 10);
    check(&[PagesSpec::share(10 * MIB)], 8, 8);
    check(&[PagesSpec::share(10 * MIB), PagesSpec::share(20 * MIB)], 80, 30);
    check(&[PagesSpec::share(u64::MAX), PagesSpec::share(20 * MIB)], 80, 80);
    check(&[PagesSpec::share(10 * MIB), instance, PagesSpec::Refused], 80, 10);
    check(&[instance], 80, 80);
    check(&[over], 80, 90);
    check(&[over, PagesSpec::share(10 * MIB)], 80, 14);
    check(&[PagesSpec::Refused], 80, 80);
    check(&vec![PagesSpec::share(MIB); 20], 80, 16);
}

#[test]
fn too_many_pages_leave_no_device_unmanaged() {
    let process = TestContainer::new(&vec![PagesSpec::share(MIB); 65]).process(1);
    assert!(matches!(process.device(0, || Some([GPU; 2])), DeviceAccess::Share(_)));
    let other = divvy_pages::GpuUuid([9; 16]);
    assert!(matches!(process.device(1, || Some([other; 2])), DeviceAccess::Denied));
}

#[test]
fn charge_of_a_killed_process_is_refunded() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let [first, second] = [1, 2].map(|pid| container.process(pid));
    allocate(device(&first), 10 * MIB, 0x1000);
    assert!(device(&second).reserve(1).is_err());
    container.kill(1);
    allocate(device(&second), 10 * MIB, 0x1000);
    // A process that starts after a death sees correct figures at once.
    container.kill(2);
    assert_eq!(device(&container.process(3)).mem_info(60 * MIB, 80 * MIB), (10 * MIB, 10 * MIB));
}

#[test]
fn processes_are_listed_with_their_charge() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let [first, second] = [1, 2].map(|pid| container.process(pid));
    allocate(device(&first), 3 * MIB, 0x1000);
    allocate(device(&second), 4 * MIB, 0x1000);
    let bytes = |pid| device(&first).process(pid).map(|process| (process.pid, process.bytes));
    assert_eq!([1, 2, 3].map(bytes), [Some((1, 3 * MIB)), Some((2, 4 * MIB)), None]);
}

#[test]
fn process_is_found_by_host_pid_and_shown_with_its_own() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    allocate(device(&process), 3 * MIB, 0x1000);
    let seen = |pid| device(&process).process(pid).map(|process| process.pid);
    assert_eq!([1, 4711].map(seen), [Some(1), None]);
    container.set_host_pid(4711);
    // On the host, pid 1 is another process.
    assert_eq!([1, 4711].map(seen), [None, Some(1)]);
}

#[test]
fn concurrent_allocations_are_reported_in_full() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    let arrived = AtomicU32::new(0);
    // Two threads wait for each other without sleeping, so that they continue at the same moment if
    // both have a core.
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
            let kind = AllocationKind::Managed { pointer: thread, context: 1 };
            device(&process).reserve(MIB).expect("it fits").commit_all(kind).expect("it is recorded");
            meet(3 * round + 2);
            seen.push(container.reported_bytes());
            meet(3 * round + 3);
            process.take(Class::Pointer, thread).expect("it is there").commit();
        }
        seen
    };
    let seen = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(2));
        [run(1), other.join().expect("no panic")].concat()
    });
    assert_eq!(seen.iter().position(|seen_total| *seen_total != (0, 2 * MIB)), None);
    assert_eq!(container.reported_bytes(), (0, 0));
}

#[test]
fn utilisation_is_relative_to_the_share() {
    for (busy, part, seen) in
        [(15, 30, 50), (40, 30, 100), (40, 100, 40), (0, 30, 0), (200, 100, 100), (1, 0, 100)]
    {
        assert_eq!(utilisation(busy, part), seen, "{busy} of {part}");
    }
    for (cores, part) in [(30, 30), (0, 100), (100, 100)] {
        let container = throttle::compute_share(cores);
        let process = container.process(7);
        assert_eq!(device(&process).compute_percent(), part, "cores: {cores}");
    }
}

/// A line of `/proc/<pid>/stat` as Linux writes it, with the relevant fields.
fn line(name: &str, state: char, threads: u32, start: u64, image: u64) -> String {
    format!(
        "77 ({name}) {state} 1 77 77 0 -1 4194304 100 0 0 0 5 5 0 0 20 -5 {threads} 0 {start} 1000 50 \
         18446744073709551615 1 1 {image} 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
    )
}

#[test]
fn stat_line_is_parsed_for_any_process_name() {
    let stat = Stat { pid: 77, exited: false, start: 4711, image: 8000 };
    for name in ["bash", "a b", ") Z 1", "((", ""] {
        assert_eq!(Stat::parse(line(name, 'S', 3, 4711, 8000).as_bytes()), Some(stat), "{name}");
    }
    let ended = |state, threads| {
        Stat::parse(line("x", state, threads, 1, 1).as_bytes()).map(|stat| (stat.exited, stat.image))
    };
    assert_eq!(ended('Z', 1), Some((true, 0)));
    // The leader has exited before its threads: the process is alive.
    assert_eq!(ended('Z', 2), Some((false, 0)));
    let own = std::fs::read("/proc/self/stat").expect("proc is mounted");
    assert_eq!(Stat::parse(&own).map(|stat| stat.pid), Some(std::process::id()));
}

#[test]
fn process_is_gone_only_with_proof() {
    let me = Identity { pid: 1, namespace: 7, start: 10, image: 5 };
    let peer = Identity { pid: 77, namespace: 7, start: 4711, image: 8000 };
    let stat = Stat { pid: 77, exited: false, start: 4711, image: 8000 };
    let there = |stat| gone(&me, &peer, Signal::Exists, true, stat);
    assert!(gone(&me, &peer, Signal::NoSuchProcess, false, None));
    assert!(!gone(&me, &Identity { namespace: 8, ..peer }, Signal::NoSuchProcess, true, None));
    assert!(!gone(
        &Identity { namespace: 0, ..me },
        &Identity { namespace: 0, ..peer },
        Signal::NoSuchProcess,
        true,
        None
    ));
    assert!(!there(Some(stat)));
    assert!(!there(None));
    assert!(there(Some(Stat { exited: true, ..stat })));
    assert!(there(Some(Stat { start: 4712, ..stat })));
    assert!(there(Some(Stat { image: 8001, ..stat })));
    assert!(!there(Some(Stat { image: 0, ..stat })));
    // The `/proc` of another namespace shows another process under this pid.
    assert!(!gone(&me, &peer, Signal::Exists, false, Some(Stat { start: 4712, ..stat })));
}

/// Maximum number of operations in one case.
const OPERATIONS_MAX: usize = if cfg!(miri) { 200 } else { 1500 };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 64 }))]

    #[test]
    fn stat_parser_accepts_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Stat::parse(&bytes);
    }

    /// Compares the table with a map, for keys that collide.
    #[test]
    fn table_behaves_like_a_map(
        acts in proptest::collection::vec((0..4_u8, 0..300_u64, 0..3_usize), 1..OPERATIONS_MAX),
    ) {
        let fake = FakeSystem::default();
        let table = Table::empty();
        let mut map = HashMap::new();
        let classes = [Class::Pointer, Class::Handle, Class::Mapping];
        for (turn, (act, key, class)) in acts.into_iter().enumerate() {
            // Half of the keys are adjacent in a shard, half look like addresses.
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
        // An entry that is kept may be visited twice.
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
    let fake = FakeSystem::default();
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
fn allocation_is_refused_when_the_table_is_full() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    let device = device(&process);
    process.system().no_memory(true);
    let reserved = device.reserve(MIB).expect("it fits");
    assert!(reserved.commit_all(AllocationKind::Linear { pointer: 0x1000, context: 0 }).is_err());
    assert!(device.reserve(MIB).expect("it fits").commit_handle(7).is_err());
    assert_eq!(container.used(), [0]);
    process.system().no_memory(false);
    allocate(device, MIB, 0x1000);
}
