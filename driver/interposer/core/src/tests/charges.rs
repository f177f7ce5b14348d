//! Charges and refunds of each event: the rows of the table at [`crate::AllocationKind`].

use super::MIB;
use super::fixture::{CONTEXT, PagesSpec, Process, TestContainer, allocate, device};
use super::vmm::create;
use crate::table::Class;
use crate::{AllocationKind, PoolKind};

/// Name of an event, the event, and the bytes charged after it.
pub(super) type EventCase<'a> = (&'a str, &'a dyn Fn(&Process), u64);

/// Runs events in one process of a 10 MiB share, and checks the charge after each.
pub(super) fn check(events: &[EventCase<'_>]) {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    for (name, event, charged) in events {
        event(&process);
        assert_eq!(container.used(), [*charged], "after {name}");
        assert_eq!(
            container.held_bytes().iter().map(|(_, bytes)| bytes).sum::<u64>(),
            *charged,
            "after {name}"
        );
    }
}

fn freed(process: &Process, class: Class, key: u64) {
    process.take(class, key).expect("it is in the table").commit();
}

#[test]
fn linear_memory_is_charged_as_granted() {
    check(&[
        ("an allocation", &|p| allocate(device(p), 2 * MIB, 0x1000), 2 * MIB),
        (
            "a pitched allocation with a larger grant",
            &|p| {
                let reserved = device(p).reserve(MIB).expect("it fits");
                reserved
                    .commit(AllocationKind::Linear { pointer: 0x2000, context: 1 }, 3 * MIB)
                    .expect("it fits");
            },
            5 * MIB,
        ),
        (
            "a grant above the limit",
            &|p| {
                let reserved = device(p).reserve(MIB).expect("it fits");
                assert!(
                    reserved.commit(AllocationKind::Linear { pointer: 0x3000, context: 1 }, 6 * MIB).is_err()
                );
            },
            5 * MIB,
        ),
        ("a refused call", &|p| drop(device(p).reserve(MIB).expect("it fits")), 5 * MIB),
        ("a refused free", &|p| drop(p.take(Class::Pointer, 0x1000)), 5 * MIB),
        ("a free of an unknown address", &|p| assert!(p.take(Class::Pointer, 0x9).is_none()), 5 * MIB),
        ("a free", &|p| freed(p, Class::Pointer, 0x1000), 3 * MIB),
        ("the other free", &|p| freed(p, Class::Pointer, 0x2000), 0),
    ]);
}

#[test]
fn managed_memory_and_arrays_are_charged_by_their_size() {
    let keep = |p: &Process, kind| {
        device(p).reserve(MIB).expect("it fits").commit_all(kind).expect("it is recorded")
    };
    check(&[
        ("managed", &|p| keep(p, AllocationKind::Managed { pointer: 0x1000, context: 1 }), MIB),
        ("an array", &|p| keep(p, AllocationKind::Array { handle: 0x1000, context: 1 }), 2 * MIB),
        ("a mipmapped array", &|p| keep(p, AllocationKind::Mipmap { handle: 0x1000, context: 1 }), 3 * MIB),
        ("a module", &|p| keep(p, AllocationKind::Module { handle: 0x1000, context: 1 }), 4 * MIB),
        ("free managed memory", &|p| freed(p, Class::Pointer, 0x1000), 3 * MIB),
        ("the array's", &|p| freed(p, Class::Array, 0x1000), 2 * MIB),
        ("the mipmapped array's", &|p| freed(p, Class::Mipmap, 0x1000), MIB),
        ("the module's", &|p| freed(p, Class::Module, 0x1000), 0),
    ]);
}

#[test]
fn reused_address_replaces_the_old_entry() {
    check(&[
        ("an allocation", &|p| allocate(device(p), 2 * MIB, 0x1000), 2 * MIB),
        ("the same address again after a missed free", &|p| allocate(device(p), MIB, 0x1000), MIB),
    ]);
}

#[test]
fn destroyed_context_refunds_all_its_memory() {
    let retain = |p: &Process| {
        device(p).reserve_context().expect("it fits").commit_context(1).expect("it is recorded");
    };
    check(&[
        ("the first retain of a primary context", &retain, CONTEXT),
        ("the second", &retain, CONTEXT),
        ("memory in it", &|p| allocate(device(p), 2 * MIB, 0x1000), CONTEXT + 2 * MIB),
        (
            "memory in another context",
            &|p| {
                let reserved = device(p).reserve(MIB).expect("it fits");
                reserved
                    .commit_all(AllocationKind::Linear { pointer: 0x2000, context: 2 })
                    .expect("it is recorded");
            },
            CONTEXT + 3 * MIB,
        ),
        ("physical memory, which belongs to no context", &|p| create(p, 70), CONTEXT + 4 * MIB),
        ("a refused destroy", &|p| drop(p.begin_teardown(1)), CONTEXT + 4 * MIB),
        ("the context's reset", &|p| gone(p, 1), 2 * MIB),
        ("a late free of destroyed memory", &|p| assert!(p.take(Class::Pointer, 0x1000).is_none()), 2 * MIB),
    ]);
}

fn gone(process: &Process, context: u64) {
    process.begin_teardown(context).expect("it is known").commit();
}

/// The driver reuses the handle before the destroying thread has returned from the driver.
#[test]
fn reused_context_handle_is_a_new_context() {
    let made = |p: &Process, pointer| {
        device(p).reserve_context().expect("it fits").commit_context(1).expect("it is recorded");
        allocate(device(p), 2 * MIB, pointer);
    };
    check(&[
        ("a context with memory", &|p| made(p, 0x1000), CONTEXT + 2 * MIB),
        (
            "its destroy, during which it is created again",
            &|p| {
                let teardown = p.begin_teardown(1).expect("it is known");
                made(p, 0x2000);
                teardown.commit();
            },
            CONTEXT + 2 * MIB,
        ),
        ("the free of the new one's memory", &|p| freed(p, Class::Pointer, 0x2000), CONTEXT),
        ("more memory in the new context", &|p| allocate(device(p), MIB, 0x3000), CONTEXT + MIB),
        (
            "a refused destroy, during which memory is allocated",
            &|p| {
                let teardown = p.begin_teardown(1).expect("it is known");
                allocate(device(p), 2 * MIB, 0x4000);
                drop(teardown);
            },
            CONTEXT + 3 * MIB,
        ),
        ("the destroy", &|p| gone(p, 1), 0),
    ]);
}

#[test]
fn context_above_the_limit_is_refused() {
    check(&[
        (
            "nearly the whole limit",
            &|p| allocate(device(p), 10 * MIB - CONTEXT / 2, 0x1000),
            10 * MIB - CONTEXT / 2,
        ),
        ("a context", &|p| assert!(device(p).reserve_context().is_err()), 10 * MIB - CONTEXT / 2),
    ]);
}

const POOL: PoolKind = PoolKind::Pool(0xb00);

#[test]
fn pool_is_charged_its_reserved_size() {
    check(&[
        (
            "an allocation that grows the pool by a chunk",
            &|p| {
                let mut pool = device(p).open_pool(POOL);
                pool.reserve_growth(MIB, 0, 0).expect("it fits");
                pool.settle(4 * MIB).expect("it fits");
            },
            4 * MIB,
        ),
        (
            "an allocation within the chunk",
            &|p| {
                let mut pool = device(p).open_pool(POOL);
                pool.reserve_growth(MIB, 4 * MIB, MIB).expect("it fits");
                pool.settle(4 * MIB).expect("it fits");
            },
            4 * MIB,
        ),
        (
            "an allocation above the limit",
            &|p| assert!(device(p).open_pool(POOL).reserve_growth(7 * MIB, 4 * MIB, 4 * MIB).is_err()),
            4 * MIB,
        ),
        (
            "a refused allocation",
            &|p| device(p).open_pool(POOL).reserve_growth(5 * MIB, 4 * MIB, 4 * MIB).expect("it fits"),
            4 * MIB,
        ),
        (
            "a growth above the limit",
            &|p| {
                let mut pool = device(p).open_pool(POOL);
                pool.reserve_growth(5 * MIB, 4 * MIB, 4 * MIB).expect("it fits");
                assert!(pool.settle(12 * MIB).is_err());
            },
            4 * MIB,
        ),
        ("a trim", &|p| device(p).open_pool(POOL).settle(MIB).expect("less fits"), MIB),
        (
            "an allocation after the driver has released memory",
            &|p| {
                let mut pool = device(p).open_pool(POOL);
                pool.reserve_growth(10 * MIB, 0, 0).expect("it fits");
                pool.settle(10 * MIB).expect("it fits");
            },
            10 * MIB,
        ),
        ("the list of pools", &|p| device(p).pools(|pool| assert_eq!(POOL, PoolKind::Pool(pool))), 10 * MIB),
        (
            "its destroy with live allocations",
            &|p| p.take(Class::Pool, 0xb00).expect("it is there").commit_except(3 * MIB),
            3 * MIB,
        ),
        (
            "another pool with the same handle",
            &|p| device(p).open_pool(POOL).settle(MIB).expect("it fits"),
            4 * MIB,
        ),
        ("its destroy when empty", &|p| freed(p, Class::Pool, 0xb00), 3 * MIB),
    ]);
}

#[test]
fn hanging_pool_call_does_not_block_others_forever() {
    check(&[(
        "two calls at once",
        &|p| {
            let mut hangs = device(p).open_pool(POOL);
            hangs.reserve_growth(MIB, 0, 0).expect("it fits");
            let mut other = device(p).open_pool(POOL);
            other.reserve_growth(2 * MIB, 0, 0).expect("it fits");
            other.settle(2 * MIB).expect("it fits");
            hangs.settle(3 * MIB).expect("it fits");
        },
        3 * MIB,
    )]);
}

#[test]
fn graph_memory_is_charged_above_the_limit() {
    check(&[
        ("a launch", &|p| device(p).open_pool(PoolKind::Graph).force_settle(12 * MIB), 12 * MIB),
        ("an allocation", &|p| assert!(device(p).reserve(1).is_err()), 12 * MIB),
        ("a trim", &|p| device(p).open_pool(PoolKind::Graph).force_settle(0), 0),
    ]);
}
