//! What each event charges and gives back: the rows of the table in [`crate::device`].

use super::MIB;
use super::physical::create;
use super::world::{CONTEXT, Pages, Process, World, device, kept};
use crate::table::Class;
use crate::{Grown, Kind};

/// What happens, its name, and what is charged after it.
pub(super) type Row<'a> = (&'a str, &'a dyn Fn(&Process), u64);

/// Runs events in one process with a share of ten MiB; after each, what is charged.
pub(super) fn check(events: &[Row<'_>]) {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    for (name, event, charged) in events {
        event(&process);
        assert_eq!(world.used(), [*charged], "after {name}");
        assert_eq!(world.held().iter().map(|(_, bytes)| bytes).sum::<u64>(), *charged, "after {name}");
    }
}

fn freed(process: &Process, class: Class, key: u64) {
    process.take(class, key).expect("it is in the table").freed();
}

#[test]
fn linear_memory_is_charged_as_granted_until_it_is_freed() {
    check(&[
        ("an allocation", &|p| kept(device(p), 2 * MIB, 0x1000), 2 * MIB),
        (
            "a pitched one, granted more than asked",
            &|p| {
                let reserved = device(p).reserve(MIB).expect("it fits");
                reserved.keep(Kind::Linear { pointer: 0x2000, context: 1 }, 3 * MIB).expect("it fits");
            },
            5 * MIB,
        ),
        (
            "one granted more than there is",
            &|p| {
                let reserved = device(p).reserve(MIB).expect("it fits");
                assert!(reserved.keep(Kind::Linear { pointer: 0x3000, context: 1 }, 6 * MIB).is_err());
            },
            5 * MIB,
        ),
        ("a call that the driver refused", &|p| drop(device(p).reserve(MIB).expect("it fits")), 5 * MIB),
        ("a free that the driver refused", &|p| drop(p.take(Class::Pointer, 0x1000)), 5 * MIB),
        (
            "a free of an address that is not ours",
            &|p| assert!(p.take(Class::Pointer, 0x9).is_none()),
            5 * MIB,
        ),
        ("a free", &|p| freed(p, Class::Pointer, 0x1000), 3 * MIB),
        ("the other free", &|p| freed(p, Class::Pointer, 0x2000), 0),
    ]);
}

#[test]
fn managed_memory_and_arrays_are_charged_by_their_size() {
    let keep =
        |p: &Process, kind| device(p).reserve(MIB).expect("it fits").keep_all(kind).expect("it is kept");
    check(&[
        ("managed", &|p| keep(p, Kind::Managed { pointer: 0x1000, context: 1 }), MIB),
        ("an array", &|p| keep(p, Kind::Array { handle: 0x1000, context: 1 }), 2 * MIB),
        ("a mipmapped array", &|p| keep(p, Kind::Mipmap { handle: 0x1000, context: 1 }), 3 * MIB),
        ("a module", &|p| keep(p, Kind::Module { handle: 0x1000, context: 1 }), 4 * MIB),
        ("the free of managed memory", &|p| freed(p, Class::Pointer, 0x1000), 3 * MIB),
        ("the array's", &|p| freed(p, Class::Array, 0x1000), 2 * MIB),
        ("the mipmapped array's", &|p| freed(p, Class::Mipmap, 0x1000), MIB),
        ("the module's", &|p| freed(p, Class::Module, 0x1000), 0),
    ]);
}

#[test]
fn an_address_that_comes_again_replaces_what_was_there() {
    check(&[
        ("an allocation", &|p| kept(device(p), 2 * MIB, 0x1000), 2 * MIB),
        ("another at the same address, the free was not seen", &|p| kept(device(p), MIB, 0x1000), MIB),
    ]);
}

#[test]
fn a_context_is_charged_once_and_takes_everything_with_it() {
    let retain = |p: &Process| {
        device(p).reserve_context().expect("it fits").keep_context(1).expect("it is kept");
    };
    check(&[
        ("the first retain of a primary context", &retain, CONTEXT),
        ("the second", &retain, CONTEXT),
        ("memory in it", &|p| kept(device(p), 2 * MIB, 0x1000), CONTEXT + 2 * MIB),
        (
            "memory in another",
            &|p| {
                let reserved = device(p).reserve(MIB).expect("it fits");
                reserved.keep_all(Kind::Linear { pointer: 0x2000, context: 2 }).expect("it is kept");
            },
            CONTEXT + 3 * MIB,
        ),
        ("physical memory, which no context has", &|p| create(p, 70), CONTEXT + 4 * MIB),
        ("an end that the driver refused", &|p| drop(p.context_leaves(1)), CONTEXT + 4 * MIB),
        ("its reset", &|p| gone(p, 1), 2 * MIB),
        ("a late free of what went with it", &|p| assert!(p.take(Class::Pointer, 0x1000).is_none()), 2 * MIB),
    ]);
}

fn gone(process: &Process, context: u64) {
    process.context_leaves(context).expect("it is set aside").gone();
}

/// The driver gives the handle away before the thread that destroyed the context is back.
#[test]
fn a_context_of_the_same_handle_is_another_one() {
    let made = |p: &Process, pointer| {
        device(p).reserve_context().expect("it fits").keep_context(1).expect("it is kept");
        kept(device(p), 2 * MIB, pointer);
    };
    check(&[
        ("a context with memory", &|p| made(p, 0x1000), CONTEXT + 2 * MIB),
        (
            "its end, in the middle of which it is made anew",
            &|p| {
                let leaving = p.context_leaves(1).expect("it is set aside");
                made(p, 0x2000);
                leaving.gone();
            },
            CONTEXT + 2 * MIB,
        ),
        ("the free of the new one's memory", &|p| freed(p, Class::Pointer, 0x2000), CONTEXT),
        ("more in the new one", &|p| kept(device(p), MIB, 0x3000), CONTEXT + MIB),
        (
            "an end that the driver refused, in the middle of which more is made",
            &|p| {
                let leaving = p.context_leaves(1).expect("it is set aside");
                kept(device(p), 2 * MIB, 0x4000);
                drop(leaving);
            },
            CONTEXT + 3 * MIB,
        ),
        ("the end", &|p| gone(p, 1), 0),
    ]);
}

#[test]
fn a_context_that_does_not_fit_is_refused() {
    check(&[
        ("almost everything", &|p| kept(device(p), 10 * MIB - CONTEXT / 2, 0x1000), 10 * MIB - CONTEXT / 2),
        ("a context", &|p| assert!(device(p).reserve_context().is_err()), 10 * MIB - CONTEXT / 2),
    ]);
}

const POOL: Grown = Grown::Pool(0xb00);

#[test]
fn a_pool_is_charged_by_what_it_has_reserved() {
    check(&[
        (
            "an allocation for which the pool grew by a chunk",
            &|p| {
                let mut pool = device(p).grow(POOL);
                pool.ask(MIB, 0, 0).expect("it fits");
                pool.settle(4 * MIB).expect("it fits");
            },
            4 * MIB,
        ),
        (
            "one that has room in the chunk",
            &|p| {
                let mut pool = device(p).grow(POOL);
                pool.ask(MIB, 4 * MIB, MIB).expect("it fits");
                pool.settle(4 * MIB).expect("it fits");
            },
            4 * MIB,
        ),
        (
            "one that does not fit",
            &|p| assert!(device(p).grow(POOL).ask(7 * MIB, 4 * MIB, 4 * MIB).is_err()),
            4 * MIB,
        ),
        (
            "one that the driver refused",
            &|p| device(p).grow(POOL).ask(5 * MIB, 4 * MIB, 4 * MIB).expect("it fits"),
            4 * MIB,
        ),
        (
            "one that grew by more than there is",
            &|p| {
                let mut pool = device(p).grow(POOL);
                pool.ask(5 * MIB, 4 * MIB, 4 * MIB).expect("it fits");
                assert!(pool.settle(12 * MIB).is_err());
            },
            4 * MIB,
        ),
        ("a trim", &|p| device(p).grow(POOL).settle(MIB).expect("less fits"), MIB),
        (
            "an allocation after the driver gave back by itself",
            &|p| {
                let mut pool = device(p).grow(POOL);
                pool.ask(10 * MIB, 0, 0).expect("it fits");
                pool.settle(10 * MIB).expect("it fits");
            },
            10 * MIB,
        ),
        ("the list of pools", &|p| device(p).pools(|pool| assert_eq!(POOL, Grown::Pool(pool))), 10 * MIB),
        (
            "its end, with something allocated",
            &|p| p.take(Class::Pool, 0xb00).expect("it is there").freed_but(3 * MIB),
            3 * MIB,
        ),
        ("another of the same handle", &|p| device(p).grow(POOL).settle(MIB).expect("it fits"), 4 * MIB),
        ("its end, empty", &|p| freed(p, Class::Pool, 0xb00), 3 * MIB),
    ]);
}

#[test]
fn a_pool_whose_call_hangs_holds_up_nobody_for_ever_and_the_sum_is_right_in_the_end() {
    check(&[(
        "two calls at once",
        &|p| {
            let mut hangs = device(p).grow(POOL);
            hangs.ask(MIB, 0, 0).expect("it fits");
            let mut other = device(p).grow(POOL);
            other.ask(2 * MIB, 0, 0).expect("it fits");
            other.settle(2 * MIB).expect("it fits");
            hangs.settle(3 * MIB).expect("it fits");
        },
        3 * MIB,
    )]);
}

#[test]
fn graph_memory_is_charged_even_where_it_cannot_be_refused() {
    check(&[
        ("a launch", &|p| device(p).grow(Grown::Graph).settle_anyway(12 * MIB), 12 * MIB),
        ("an allocation", &|p| assert!(device(p).reserve(1).is_err()), 12 * MIB),
        ("a trim", &|p| device(p).grow(Grown::Graph).settle_anyway(0), 0),
    ]);
}
