//! Two threads of a process, or of two, in every order and with every load as old as its ordering allows
//! ([`divvy_pages::sync`]): the table, what is made once, and the last bytes of a share.

use super::world::{Fake, GPU, Pages, Process, World, device};
use crate::table::{Class, Entry, Table};
use crate::{Kind, Standing};
use divvy_pages::Flags;
use divvy_pages::sync::Model;
use loom::sync::Mutex;
use loom::thread::spawn;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const KEY: u64 = 0x7000_0000_0200;

/// What two threads do with a table that `first` was done with, and what they were answered.
fn check_table<A: Send + 'static>(
    first: fn(&Fake, &Table),
    acts: [fn(&Fake, &Table) -> A; 2],
    end: fn(&Fake, &Table, [A; 2]),
) {
    Model::default().check(move || {
        let shared = Arc::new((Fake::default(), Table::empty()));
        first(&shared.0, &shared.1);
        let other = spawn({
            let shared = Arc::clone(&shared);
            move || acts[1](&shared.0, &shared.1)
        });
        let one = acts[0](&shared.0, &shared.1);
        let answers = [one, other.join().expect("no panic")];
        end(&shared.0, &shared.1, answers);
    });
}

fn put(fake: &Fake, table: &Table, class: Class, bytes: u64) -> Option<u64> {
    let old = table.insert(fake, Entry::new(class, KEY, 0, bytes, 0)).expect("there is memory");
    old.map(|entry| entry.bytes())
}

fn taken(fake: &Fake, table: &Table) -> Option<u64> {
    table.remove(fake, Class::Pointer, KEY).map(|entry| entry.bytes())
}

fn found(fake: &Fake, table: &Table, class: Class) -> Option<u64> {
    table.get(fake, class, KEY).map(|entry| entry.bytes())
}

#[test]
fn of_two_keys_that_are_the_first_of_a_shard_none_is_lost() {
    check_table(
        |_, _| (),
        [|fake, table| put(fake, table, Class::Pointer, 1), |fake, table| put(fake, table, Class::Handle, 2)],
        |fake, table, old| {
            assert_eq!(old, [None, None]);
            assert_eq!(
                [Class::Pointer, Class::Handle].map(|class| found(fake, table, class)),
                [Some(1), Some(2)]
            );
        },
    );
}

#[test]
fn one_key_is_taken_by_one() {
    check_table(
        |fake, table| assert_eq!(put(fake, table, Class::Pointer, 7), None),
        [taken, taken],
        |fake, table, taken| {
            assert!(taken == [Some(7), None] || taken == [None, Some(7)], "{taken:?}");
            assert_eq!(found(fake, table, Class::Pointer), None);
        },
    );
}

#[test]
fn one_key_that_is_put_twice_displaces_one_of_the_two() {
    check_table(
        |_, _| (),
        [
            |fake, table| put(fake, table, Class::Pointer, 1),
            |fake, table| put(fake, table, Class::Pointer, 2),
        ],
        |fake, table, old| {
            let last = found(fake, table, Class::Pointer);
            assert!((old, last) == ([None, Some(1)], Some(2)) || (old, last) == ([Some(2), None], Some(1)));
        },
    );
}

#[test]
fn what_is_put_while_it_is_looked_for_is_taken_or_stays() {
    check_table(
        |fake, table| assert_eq!(put(fake, table, Class::Handle, 9), None),
        [|fake, table| put(fake, table, Class::Pointer, 1), taken],
        |fake, table, answers| {
            let left = found(fake, table, Class::Pointer);
            assert!((answers[1], left) == (Some(1), None) || (answers[1], left) == (None, Some(1)));
            assert_eq!(found(fake, table, Class::Handle), Some(9));
        },
    );
}

/// Processes of a share of ten MiB, of which each has been given its place.
fn seated(world: &World, pids: &[u32]) -> Vec<Arc<Process>> {
    let seated = |pid: &u32| {
        let process = Arc::new(world.process(*pid));
        device(&process);
        process
    };
    pids.iter().map(seated).collect()
}

/// A world whose policy nobody changes, and a model of it.
fn share(pages: Pages) -> (World, Model) {
    let world = World::new(&[pages]);
    let model = Model::default().constant(world.pages().0);
    (world, model)
}

#[test]
fn an_address_that_is_another_threads_as_soon_as_it_is_free_is_charged_once() {
    let (world, model) = share(Pages::share(10 * MIB));
    model.check(move || {
        let process = seated(&world, &[1]).remove(0);
        let linear = Kind::Linear { pointer: KEY, context: 0 };
        device(&process).reserve(MIB).expect("it fits").keep_all(linear).expect("it is kept");
        let is_free = Arc::new(Mutex::new(false));
        let other = spawn({
            let (process, is_free) = (Arc::clone(&process), Arc::clone(&is_free));
            // The driver gives the address to whoever asks next.
            move || {
                let device = device(&process);
                let reserved = device.reserve(2 * MIB).expect("it fits");
                let is_given = std::mem::take(&mut *is_free.lock().expect("no panic"));
                if is_given {
                    reserved.keep_all(linear).expect("it is kept");
                }
                is_given
            }
        });
        let freeing = process.freeing(Class::Pointer, KEY).expect("nobody else frees it");
        *is_free.lock().expect("no panic") = true;
        freeing.freed();
        let is_given = other.join().expect("no panic");
        assert_eq!(world.used(), [if is_given { 2 * MIB } else { 0 }]);
        if let Some(taken) = process.take(Class::Pointer, KEY) {
            taken.freed();
        }
        assert_eq!(world.used(), [0]);
    });
}

#[test]
fn two_first_calls_make_one_ledger_and_take_one_slot() {
    let (world, model) = share(Pages::share(10 * MIB));
    model.check(move || {
        let process = Arc::new(world.process(1));
        let charged = |process: &Process| match process.device(0, || Some([GPU; 2])) {
            Standing::Share(device) => device.reserve(6 * MIB).map(|reserved| reserved.settled()).is_ok(),
            _ => panic!("it has a share"),
        };
        let other = spawn({
            let process = Arc::clone(&process);
            move || charged(&process)
        });
        let answers = [charged(&process), other.join().expect("no panic")];
        assert!(answers[0] ^ answers[1], "{answers:?}");
        assert_eq!(world.held(), [(1, 6 * MIB)]);
    });
}

#[test]
fn one_thread_is_the_first_to_serve() {
    let (world, model) = share(Pages::With { limit: 10 * MIB, flags: Flags::UVM });
    model.check(move || {
        let process = seated(&world, &[1]).remove(0);
        let other = spawn({
            let process = Arc::clone(&process);
            move || process.serve()
        });
        assert!(process.serve() ^ other.join().expect("no panic"));
    });
}

#[test]
fn two_processes_at_the_last_bytes_of_a_share() {
    let (world, model) = share(Pages::share(10 * MIB));
    model.check(move || {
        let [one, two] = <[_; 2]>::try_from(seated(&world, &[1, 2])).expect("two");
        let takes = |process: &Process, bytes: u64| {
            device(process).reserve(bytes).map(|reserved| reserved.settled()).is_ok()
        };
        let other = spawn(move || takes(&two, 7 * MIB));
        let answers = [takes(&one, 6 * MIB), other.join().expect("no panic")];
        assert_eq!(world.used(), [if answers[0] { 6 * MIB } else { 7 * MIB }]);
        assert!(answers[0] ^ answers[1], "{answers:?}");
    });
}
