//! Random events of several processes, forks and kills among them, against a model that only adds.

use super::MIB;
use super::world::{CONTEXT, Pages, Process, World, device};
use crate::table::Class;
use crate::{Grown, Kind};
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

/// What one process has, as its driver knows it.
#[derive(Clone, Default)]
struct Holds {
    /// Bytes and context.
    pointers: BTreeMap<u64, (u64, u64)>,
    contexts: BTreeMap<u64, u64>,
    /// Physical memory: bytes and references.
    objects: Vec<(u64, u32)>,
    handles: BTreeMap<u64, (usize, u32)>,
    mappings: BTreeMap<u64, usize>,
    pools: BTreeMap<u64, u64>,
}

impl Holds {
    fn sum(&self) -> u64 {
        let objects = self.objects.iter().filter(|(_, references)| *references > 0).map(|(bytes, _)| bytes);
        self.pointers.values().map(|(bytes, _)| bytes).sum::<u64>()
            + self.contexts.values().sum::<u64>()
            + objects.sum::<u64>()
            + self.pools.values().sum::<u64>()
    }
}

struct Tenant {
    pid: u32,
    process: Process,
    holds: Holds,
}

/// Applies the event in the process and in the model; `free` is what the share has left.
fn apply(tenant: &mut Tenant, event: Event, free: u64) {
    let (process, holds) = (&tenant.process, &mut tenant.holds);
    let device = device(process);
    let context = |number: u64| 0xc000 + number;
    match event {
        Event::Alloc { pointer, bytes } if !holds.pointers.contains_key(&pointer) => {
            let reserved = device.reserve(bytes);
            assert_eq!(reserved.is_ok(), bytes <= free);
            let Ok(reserved) = reserved else { return };
            // Every other pointer is of the second context.
            let context = context(pointer % 2);
            reserved.keep_all(Kind::Linear { pointer, context }).expect("it is kept");
            holds.pointers.insert(pointer, (bytes, context));
        }
        Event::Free { pointer } => {
            process.freeing(Class::Pointer, pointer).expect("nobody else frees it").freed();
            holds.pointers.remove(&pointer);
        }
        Event::Context { handle } => {
            let known = holds.contexts.contains_key(&context(handle));
            let reserved = device.reserve_context();
            assert_eq!(reserved.is_ok(), CONTEXT <= free);
            let Ok(reserved) = reserved else { return };
            reserved.keep_context(context(handle)).expect("it is kept");
            if !known {
                holds.contexts.insert(context(handle), CONTEXT);
            }
        }
        Event::ContextGone { handle } => {
            process.context_leaves(context(handle)).into_iter().for_each(crate::Leaving::gone);
            holds.contexts.remove(&context(handle));
            holds.pointers.retain(|_, (_, of)| *of != context(handle));
        }
        Event::Create { handle, bytes } if !holds.handles.contains_key(&handle) => {
            let reserved = device.reserve(bytes);
            assert_eq!(reserved.is_ok(), bytes <= free);
            let Ok(reserved) = reserved else { return };
            reserved.keep_handle(handle).expect("it is kept");
            holds.handles.insert(handle, (holds.objects.len(), 1));
            holds.objects.push((bytes, 1));
        }
        Event::Release { handle } => {
            let released = process.release(handle);
            assert_eq!(released.is_some(), holds.handles.contains_key(&handle));
            released.into_iter().for_each(crate::vmm::Release::released);
            if let Some((object, references)) = holds.handles.get_mut(&handle) {
                holds.objects[*object].1 -= 1;
                *references -= 1;
                if *references == 0 {
                    holds.handles.remove(&handle);
                }
            }
        }
        Event::Map { place, handle } if !holds.mappings.contains_key(&place) => {
            process.hold(handle).into_iter().for_each(|held| held.mapped(place * MIB, MIB));
            if let Some((object, _)) = holds.handles.get(&handle) {
                holds.objects[*object].1 += 1;
                holds.mappings.insert(place, *object);
            }
        }
        Event::Unmap { place } => {
            process.unmapped(place * MIB, MIB);
            if let Some(object) = holds.mappings.remove(&place) {
                holds.objects[object].1 -= 1;
            }
        }
        Event::Pool { pool, reserved } => {
            let before = holds.pools.get(&pool).copied().unwrap_or_default();
            let growth = reserved.saturating_sub(before);
            let settled = device.grow(Grown::Pool(pool)).settle(reserved);
            assert_eq!(settled.is_ok(), growth <= free);
            if settled.is_ok() {
                holds.pools.insert(pool, reserved);
            }
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// One page, or the same limit in two: what is charged is what the living hold, always.
    #[test]
    fn what_is_charged_is_what_the_living_hold(
        split in 0..LIMIT,
        events in proptest::collection::vec((0..3_usize, event()), 1..120),
    ) {
        let world = World::new(&[Pages::share(split), Pages::share(LIMIT - split)]);
        let mut pids = 1..;
        let mut born = |holds| {
            let pid = pids.next().expect("endless");
            Tenant { pid, process: world.process(pid), holds }
        };
        let mut tenants = [born(Holds::default()), born(Holds::default()), born(Holds::default())];
        for (index, event) in events {
            let used: u64 = tenants.iter().map(|tenant| tenant.holds.sum()).sum();
            match event {
                Event::Kill => {
                    world.kill(tenants[index].pid);
                    tenants[index] = born(Holds::default());
                }
                Event::Fork => {
                    // The tenant goes on as its own child, and the parent ends.
                    let before = tenants[index].pid;
                    let child = born(Holds::default());
                    let _ = device(&tenants[index].process);
                    tenants[index].process.system().fork(child.pid);
                    (tenants[index].pid, tenants[index].holds) = (child.pid, Holds::default());
                    world.kill(before);
                }
                event => apply(&mut tenants[index], event, LIMIT - used),
            }
        }
        let expected: u64 = tenants.iter().map(|tenant| tenant.holds.sum()).sum();
        // Whoever comes now settles the accounts of the dead.
        let last = world.process(1000);
        let _ = device(&last);
        prop_assert_eq!(world.used().iter().sum::<u64>(), expected);
        for tenant in &tenants {
            let held: u64 = world.held().iter().filter(|(pid, _)| *pid == tenant.pid).map(|(_, bytes)| bytes).sum();
            prop_assert_eq!(held, tenant.holds.sum());
        }
    }
}
