//! Loom models: two threads of one process or of two, in every order and with every load as stale
//! as its ordering allows ([`divvy_pages::sync`]). They cover the table, one-time creation, and the
//! last bytes of a share.

use super::fixture::{FakeSystem, GPU, PagesSpec, Process, TestContainer, device};
use crate::table::{Class, Entry, Table};
use crate::{AllocationKind, DeviceAccess};
use divvy_pages::Flags;
use divvy_pages::sync::Model;
use loom::sync::Mutex;
use loom::thread::spawn;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const KEY: u64 = 0x7000_0000_0200;

/// Runs `acts` in two threads on a table prepared by `first`, and passes the results to `end`.
fn check_table<A: Send + 'static>(
    first: fn(&FakeSystem, &Table),
    acts: [fn(&FakeSystem, &Table) -> A; 2],
    end: fn(&FakeSystem, &Table, [A; 2]),
) {
    Model::default().check(move || {
        let shared = Arc::new((FakeSystem::default(), Table::empty()));
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

fn put(fake: &FakeSystem, table: &Table, class: Class, bytes: u64) -> Option<u64> {
    let old = table.insert(fake, Entry::new(class, KEY, 0, bytes, 0)).expect("there is memory");
    old.map(|entry| entry.bytes())
}

fn taken(fake: &FakeSystem, table: &Table) -> Option<u64> {
    table.remove(fake, Class::Pointer, KEY).map(|entry| entry.bytes())
}

fn found(fake: &FakeSystem, table: &Table, class: Class) -> Option<u64> {
    table.get(fake, class, KEY).map(|entry| entry.bytes())
}

#[test]
fn concurrent_first_inserts_of_a_shard_are_both_kept() {
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
fn concurrent_removals_of_a_key_succeed_once() {
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
fn concurrent_inserts_of_a_key_displace_one() {
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
fn insert_during_removal_is_removed_or_kept() {
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

/// Processes of a 10 MiB share that have registered their slots.
fn registered(container: &TestContainer, pids: &[u32]) -> Vec<Arc<Process>> {
    let registered = |pid: &u32| {
        let process = Arc::new(container.process(*pid));
        device(&process);
        process
    };
    pids.iter().map(registered).collect()
}

/// A container with a constant policy, and a model for it.
fn share(pages: PagesSpec) -> (TestContainer, Model) {
    let container = TestContainer::new(&[pages]);
    let model = Model::default().constant(container.pages().0);
    (container, model)
}

#[test]
fn address_reused_by_another_thread_is_charged_once() {
    let (container, model) = share(PagesSpec::share(10 * MIB));
    model.check(move || {
        let process = registered(&container, &[1]).remove(0);
        let linear = AllocationKind::Linear { pointer: KEY, context: 0 };
        device(&process).reserve(MIB).expect("it fits").commit_all(linear).expect("it is recorded");
        let is_free = Arc::new(Mutex::new(false));
        let other = spawn({
            let (process, is_free) = (Arc::clone(&process), Arc::clone(&is_free));
            // The driver gives the address to the next caller.
            move || {
                let device = device(&process);
                let reserved = device.reserve(2 * MIB).expect("it fits");
                let is_given = std::mem::take(&mut *is_free.lock().expect("no panic"));
                if is_given {
                    reserved.commit_all(linear).expect("it is recorded");
                }
                is_given
            }
        });
        let freeing = process.begin_free(Class::Pointer, KEY).expect("no other free is pending");
        *is_free.lock().expect("no panic") = true;
        freeing.commit();
        let is_given = other.join().expect("no panic");
        assert_eq!(container.used(), [if is_given { 2 * MIB } else { 0 }]);
        if let Some(taken) = process.take(Class::Pointer, KEY) {
            taken.commit();
        }
        assert_eq!(container.used(), [0]);
    });
}

#[test]
fn concurrent_first_calls_take_one_slot() {
    let (container, model) = share(PagesSpec::share(10 * MIB));
    model.check(move || {
        let process = Arc::new(container.process(1));
        let charged = |process: &Process| match process.device(0, || Some([GPU; 2])) {
            DeviceAccess::Share(device) => {
                device.reserve(6 * MIB).map(|reserved| reserved.transfer()).is_ok()
            }
            _ => panic!("it has a share"),
        };
        let other = spawn({
            let process = Arc::clone(&process);
            move || charged(&process)
        });
        let answers = [charged(&process), other.join().expect("no panic")];
        assert!(answers[0] ^ answers[1], "{answers:?}");
        assert_eq!(container.held_bytes(), [(1, 6 * MIB)]);
    });
}

#[test]
fn trim_thread_is_claimed_once() {
    let (container, model) = share(PagesSpec::With { limit: 10 * MIB, flags: Flags::UVM });
    model.check(move || {
        let process = registered(&container, &[1]).remove(0);
        let other = spawn({
            let process = Arc::clone(&process);
            move || process.claim_trim_thread()
        });
        assert!(process.claim_trim_thread() ^ other.join().expect("no panic"));
    });
}

#[test]
fn race_for_the_last_bytes_of_a_share() {
    let (container, model) = share(PagesSpec::share(10 * MIB));
    model.check(move || {
        let [one, two] = <[_; 2]>::try_from(registered(&container, &[1, 2])).expect("two");
        let takes = |process: &Process, bytes: u64| {
            device(process).reserve(bytes).map(|reserved| reserved.transfer()).is_ok()
        };
        let other = spawn(move || takes(&two, 7 * MIB));
        let answers = [takes(&one, 6 * MIB), other.join().expect("no panic")];
        assert_eq!(container.used(), [if answers[0] { 6 * MIB } else { 7 * MIB }]);
        assert!(answers[0] ^ answers[1], "{answers:?}");
    });
}
