//! Random events of several processes, including forks and kills, against a simple model.

use super::MIB;
use super::fixture::{CONTEXT, PagesSpec, Process, TestContainer, device};
use crate::table::Class;
use crate::{AllocationKind, PoolKind};
use proptest::prelude::*;
use std::collections::BTreeMap;

const LIMIT: u64 = 10 * MIB;

#[derive(Clone, Copy, Debug)]
enum Event {
    Alloc { pointer: u64, bytes: u64 },
    Free { pointer: u64 },
    Context { handle: u64 },
    ContextGone { handle: u64 },
    Create { handle: u64, bytes: u64 },
    Release { handle: u64 },
    Map { place: u64, handle: u64 },
    Unmap { place: u64 },
    Pool { pool: u64, reserved: u64 },
    Fork,
    Kill,
}

fn event() -> impl Strategy<Value = Event> {
    let bytes = || 1..4 * MIB;
    prop_oneof![
        4 => (0..6_u64, bytes()).prop_map(|(pointer, bytes)| Event::Alloc { pointer, bytes }),
        3 => (0..6_u64).prop_map(|pointer| Event::Free { pointer }),
        1 => (0..2_u64).prop_map(|handle| Event::Context { handle }),
        1 => (0..2_u64).prop_map(|handle| Event::ContextGone { handle }),
        3 => (0..3_u64, bytes()).prop_map(|(handle, bytes)| Event::Create { handle, bytes }),
        3 => (0..3_u64).prop_map(|handle| Event::Release { handle }),
        3 => (0..4_u64, 0..3_u64).prop_map(|(place, handle)| Event::Map { place, handle }),
        3 => (0..4_u64).prop_map(|place| Event::Unmap { place }),
        2 => (0..2_u64, 0..4 * MIB).prop_map(|(pool, reserved)| Event::Pool { pool, reserved }),
        1 => Just(Event::Fork),
        1 => Just(Event::Kill),
    ]
}

/// The allocations of one process, as its driver knows them.
#[derive(Clone, Default)]
struct Holdings {
    /// Bytes and context.
    pointers: BTreeMap<u64, (u64, u64)>,
    contexts: BTreeMap<u64, u64>,
    /// Physical memory: bytes and references.
    objects: Vec<(u64, u32)>,
    handles: BTreeMap<u64, (usize, u32)>,
    mappings: BTreeMap<u64, usize>,
    pools: BTreeMap<u64, u64>,
}

impl Holdings {
    fn sum(&self) -> u64 {
        let objects = self.objects.iter().filter(|(_, references)| *references > 0).map(|(bytes, _)| bytes);
        self.pointers.values().map(|(bytes, _)| bytes).sum::<u64>()
            + self.contexts.values().sum::<u64>()
            + objects.sum::<u64>()
            + self.pools.values().sum::<u64>()
    }
}

struct TestProcess {
    pid: u32,
    process: Process,
    holdings: Holdings,
}

/// Applies the event to the process and to the model; `free` is the remaining limit.
fn apply(test_process: &mut TestProcess, event: Event, free: u64) {
    let (process, holdings) = (&test_process.process, &mut test_process.holdings);
    let device = device(process);
    let context = |number: u64| 0xc000 + number;
    match event {
        Event::Alloc { pointer, bytes } if !holdings.pointers.contains_key(&pointer) => {
            let reserved = device.reserve(bytes);
            assert_eq!(reserved.is_ok(), bytes <= free);
            let Ok(reserved) = reserved else { return };
            // Every other pointer belongs to the second context.
            let context = context(pointer % 2);
            reserved.commit_all(AllocationKind::Linear { pointer, context }).expect("it is recorded");
            holdings.pointers.insert(pointer, (bytes, context));
        }
        Event::Free { pointer } => {
            process.begin_free(Class::Pointer, pointer).expect("no other free is pending").commit();
            holdings.pointers.remove(&pointer);
        }
        Event::Context { handle } => {
            let known = holdings.contexts.contains_key(&context(handle));
            let reserved = device.reserve_context();
            assert_eq!(reserved.is_ok(), CONTEXT <= free);
            let Ok(reserved) = reserved else { return };
            reserved.commit_context(context(handle)).expect("it is recorded");
            if !known {
                holdings.contexts.insert(context(handle), CONTEXT);
            }
        }
        Event::ContextGone { handle } => {
            process.begin_teardown(context(handle)).into_iter().for_each(crate::PendingTeardown::commit);
            holdings.contexts.remove(&context(handle));
            holdings.pointers.retain(|_, (_, of)| *of != context(handle));
        }
        Event::Create { handle, bytes } if !holdings.handles.contains_key(&handle) => {
            let reserved = device.reserve(bytes);
            assert_eq!(reserved.is_ok(), bytes <= free);
            let Ok(reserved) = reserved else { return };
            reserved.commit_handle(handle).expect("it is recorded");
            holdings.handles.insert(handle, (holdings.objects.len(), 1));
            holdings.objects.push((bytes, 1));
        }
        Event::Release { handle } => {
            let released = process.begin_release(handle);
            assert_eq!(released.is_some(), holdings.handles.contains_key(&handle));
            released.into_iter().for_each(crate::vmm::PendingRelease::commit);
            if let Some((object, references)) = holdings.handles.get_mut(&handle) {
                holdings.objects[*object].1 -= 1;
                *references -= 1;
                if *references == 0 {
                    holdings.handles.remove(&handle);
                }
            }
        }
        Event::Map { place, handle } if !holdings.mappings.contains_key(&place) => {
            process.add_reference(handle).into_iter().for_each(|held| held.mapped(place * MIB, MIB));
            if let Some((object, _)) = holdings.handles.get(&handle) {
                holdings.objects[*object].1 += 1;
                holdings.mappings.insert(place, *object);
            }
        }
        Event::Unmap { place } => {
            process.remove_mappings(place * MIB, MIB);
            if let Some(object) = holdings.mappings.remove(&place) {
                holdings.objects[object].1 -= 1;
            }
        }
        Event::Pool { pool, reserved } => {
            let before = holdings.pools.get(&pool).copied().unwrap_or_default();
            let growth = reserved.saturating_sub(before);
            let settled = device.open_pool(PoolKind::Pool(pool)).settle(reserved);
            assert_eq!(settled.is_ok(), growth <= free);
            if settled.is_ok() {
                holdings.pools.insert(pool, reserved);
            }
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// With one page, or the same limit in two: the charge always equals what living processes
    /// hold.
    #[test]
    fn charge_equals_memory_of_living_processes(
        split in 0..LIMIT,
        events in proptest::collection::vec((0..3_usize, event()), 1..120),
    ) {
        let container = TestContainer::new(&[PagesSpec::share(split), PagesSpec::share(LIMIT - split)]);
        let mut pids = 1..;
        let mut start = |holdings| {
            let pid = pids.next().expect("endless");
            TestProcess { pid, process: container.process(pid), holdings }
        };
        let mut processes = [(); 3].map(|()| start(Holdings::default()));
        for (index, event) in events {
            let used: u64 = processes.iter().map(|test_process| test_process.holdings.sum()).sum();
            match event {
                Event::Kill => {
                    container.kill(processes[index].pid);
                    processes[index] = start(Holdings::default());
                }
                Event::Fork => {
                    // The tenant continues as its own child, and the parent exits.
                    let before = processes[index].pid;
                    let child = start(Holdings::default());
                    let _ = device(&processes[index].process);
                    processes[index].process.system().fork(child.pid);
                    (processes[index].pid, processes[index].holdings) = (child.pid, Holdings::default());
                    container.kill(before);
                }
                event => apply(&mut processes[index], event, LIMIT - used),
            }
        }
        let expected: u64 = processes.iter().map(|test_process| test_process.holdings.sum()).sum();
        // A new process refunds what dead processes held.
        let last = container.process(1000);
        let _ = device(&last);
        prop_assert_eq!(container.used().iter().sum::<u64>(), expected);
        for test_process in &processes {
            let held = container.held_bytes();
            let held = held.iter().filter(|(pid, _)| *pid == test_process.pid).map(|(_, bytes)| bytes);
            let held: u64 = held.sum();
            prop_assert_eq!(held, test_process.holdings.sum());
        }
    }
}
