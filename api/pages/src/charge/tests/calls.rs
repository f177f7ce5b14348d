//! Single-threaded tests: slot contents, registration, and which bytes count.

use crate::account::{Fault, Identity, NodeLine, Owner, PageError, SLOTS, Slot, SlotState, Snapshot};
use crate::charge::{NoSlot, Peers, Refused, SlotRef, charge, uncharge};
use crate::explore::{identity, page};
use crate::sync::Ordering::Acquire;

/// Peers that are never proven dead, and that are not waited for.
struct LivePeers;

impl Peers for LivePeers {
    fn is_dead(&self, _identity: &Identity) -> bool {
        false
    }

    fn back_off(&self, _round: u32) -> bool {
        false
    }

    fn now_ns(&self) -> u64 {
        0
    }
}

/// Two processes on one page of ten bytes; the first holds six.
fn two() -> [SlotRef<'static>; 2] {
    let page = page();
    let slots = [1, 2].map(|pid| {
        let slot = page.register(&identity(pid), &LivePeers).expect("there are slots");
        SlotRef { page, slot, limit: 10 }
    });
    charge(&slots[..1], 6, &LivePeers).expect("it fits");
    slots
}

/// Writes the node line of a slot.
fn say(slot_ref: &SlotRef<'_>, line: NodeLine) {
    let slot = slot_ref.page.slot(slot_ref.slot).expect("a slot");
    for (word, bytes) in slot.node.iter().zip(line.encode().chunks(8)) {
        word.store(u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
    }
}

#[test]
fn node_line_applies_only_to_its_owner() {
    let [first, second] = two();
    let owner = first.page.slots()[0].owner();
    let verdict = NodeLine { owner, dead: true, correction: 0, host_pid: 4711 };
    say(&first, NodeLine { owner: Owner(owner.0 + (1 << 32)), ..verdict });
    assert_eq!(charge(&[second], 5, &LivePeers), Err(Refused));
    say(&first, verdict);
    assert_eq!(first.page.slots()[0].host_pid(), 4711);
    assert_eq!(charge(&[second], 10, &LivePeers), Ok(()));
    assert_eq!(first.page.slots()[0].owner().state(), SlotState::Free);
    let next = first.page.register(&identity(3), &LivePeers).expect("there are slots");
    assert_eq!(next, first.slot);
    assert_eq!((first.page.slots()[0].host_pid(), first.page.slots()[0].effective_bytes()), (0, 0));
}

#[test]
fn node_correction_counts_like_a_charge() {
    let [first, second] = two();
    let about = first.page.slots()[0].owner();
    let measured = |correction| say(&first, NodeLine { owner: about, dead: false, correction, host_pid: 0 });
    measured(3);
    assert!(first.page.reconcile(None, &LivePeers));
    assert_eq!(first.page.used(), 9);
    assert_eq!(charge(&[second], 2, &LivePeers), Err(Refused));
    measured(-2);
    assert_eq!(charge(&[second], 6, &LivePeers), Ok(()));
    assert_eq!(first.page.used(), 10);
    // More than the device has: the share is full, and its bytes can still be released.
    measured(1 << 40);
    assert_eq!(charge(&[first], 1, &LivePeers), Err(Refused));
    uncharge(&[second], 6);
    assert_eq!(second.page.slots()[1].effective_bytes(), 0);
}

#[test]
fn stopped_process_delays_others_until_a_timeout() {
    let [first, second] = two();
    first.page.slot(first.slot).expect("a slot").begin();
    assert_eq!(charge(&[second], 4, &LivePeers), Ok(()));
    assert_eq!(charge(&[second], 1, &LivePeers), Err(Refused));
    assert_eq!(second.page.fault_count(Fault::TimedOut), 1);
}

#[test]
fn exec_releases_the_bytes_of_the_old_image() {
    let [first, second] = two();
    let again = Identity { image: 2, ..identity(1) };
    let slot = first.page.register(&again, &LivePeers).expect("there are slots");
    assert_ne!(slot, first.slot);
    assert_eq!(charge(&[second], 10, &LivePeers), Ok(()));
}

#[test]
fn second_library_copy_gets_its_own_slot() {
    let [first, _] = two();
    let slot = first.page.register(&identity(1), &LivePeers).expect("there are slots");
    assert_ne!(slot, first.slot);
    assert_eq!(charge(&[SlotRef { slot, ..first }], 5, &LivePeers), Err(Refused));
    assert_eq!(charge(&[SlotRef { slot, ..first }], 4, &LivePeers), Ok(()));
}

#[test]
fn unpaid_gpu_time_of_the_dead_is_charged_once() {
    /// The first process is dead.
    struct At(u64);
    impl Peers for At {
        fn is_dead(&self, identity: &Identity) -> bool {
            identity.pid == 1
        }
        fn back_off(&self, _round: u32) -> bool {
            false
        }
        fn now_ns(&self) -> u64 {
            self.0
        }
    }
    const SECOND: u64 = 1_000_000_000;
    let check = |owed: u64, since: u64, charged: u64| {
        let [first, second] = two();
        let slot = &first.page.slots()[0];
        slot.set_unpaid(owed);
        slot.set_unmeasured_since(since);
        for _ in 0..2 {
            assert!(second.page.reconcile(Some(second.slot), &At(9 * SECOND)));
        }
        let balance = first.page.balance().load(Acquire);
        assert_eq!(balance, -i64::try_from(charged).expect("it fits"), "{owed} {since}");
        // Charged by the process that found it.
        let file = crate::explore::file(first.page);
        let page = Snapshot::new(&file[..Snapshot::length(&file)]).expect("a page");
        assert_eq!(page.slots().map(|slot| slot.charged_ns).collect::<Vec<_>>(), [charged]);
        // The next owner has no unpaid time.
        assert_eq!(first.page.register(&identity(3), &LivePeers), Ok(first.slot));
        assert_eq!(first.page.slots()[0].unpaid(9 * SECOND), (0, (9 * SECOND, 9 * SECOND)));
    };
    check(0, 0, 0);
    check(7, 0, 7);
    check(7, 9 * SECOND - 50, 57);
    // Long ago, in the future, and an absurd amount.
    check(0, 5, SECOND);
    check(7, 10 * SECOND, 7);
    check(u64::MAX, 5, 11 * SECOND);
}

#[test]
fn short_lived_processes_leak_no_slots() {
    struct All;
    impl Peers for All {
        fn is_dead(&self, _identity: &Identity) -> bool {
            true
        }
        fn back_off(&self, _round: u32) -> bool {
            false
        }
        fn now_ns(&self) -> u64 {
            0
        }
    }
    let page = page();
    for pid in 1..3 * SLOTS as u32 {
        page.register(&identity(pid), &All).expect("there are slots");
    }
}

#[test]
fn full_page_admits_a_process_after_a_death() {
    struct All(u32);
    impl Peers for All {
        fn is_dead(&self, identity: &Identity) -> bool {
            identity.pid == self.0
        }
        fn back_off(&self, _round: u32) -> bool {
            false
        }
        fn now_ns(&self) -> u64 {
            0
        }
    }
    let page = page();
    for pid in 1..=SLOTS as u32 {
        page.register(&identity(pid), &All(0)).expect("there are slots");
    }
    assert_eq!(page.register(&identity(5000), &All(0)), Err(NoSlot));
    assert_eq!(page.register(&identity(5000), &All(700)), Ok(699));
    assert_eq!(page.fault_count(Fault::NoSlot), 1);
}

#[test]
fn snapshot_contains_what_processes_wrote() {
    let [first, second] = two();
    charge(&[second], 3, &LivePeers).expect("it fits");
    second.page.slots()[1].add_memory_use(2, 1);
    second.page.slots()[1].add_measured([40, 30, 20, 10]);
    let file = crate::explore::file(first.page);
    let page = Snapshot::new(&file[..Snapshot::length(&file)]).expect("a page");
    let slots: Vec<_> =
        page.slots().map(|slot| (slot.identity, slot.held, slot.context, slot.managed)).collect();
    assert_eq!(slots, [(identity(1), 6, 0, 0), (identity(2), 3, 2, 1)]);
    let time = page
        .slots()
        .map(|slot| [slot.measured_ns, slot.fastest_ns, slot.long_kernel_ns, slot.undercharged_ns]);
    assert_eq!(time.collect::<Vec<_>>(), [[0; 4], [40, 30, 20, 10]]);
    assert_eq!((page.used(), page.live_sum()), (9, 9));
    assert_eq!(Snapshot::new(&file[..4000]).err(), Some(PageError::Foreign));
}

#[test]
fn threads_stay_within_the_limit_and_release_all() {
    let page = page();
    std::thread::scope(|scope| {
        for pid in 1..=4 {
            scope.spawn(move || {
                let slot = page.register(&identity(pid), &LivePeers).expect("there are slots");
                let slot_ref = [SlotRef { page, slot, limit: 10 }];
                for turn in 0..5_000 {
                    let bytes = 1 + (turn + u64::from(pid)) % 7;
                    if charge(&slot_ref, bytes, &LivePeers).is_ok() {
                        assert!(page.used() <= 10);
                        uncharge(&slot_ref, bytes);
                    }
                }
            });
        }
    });
    assert_eq!((page.used(), page.slots().iter().map(Slot::effective_bytes).sum::<u64>()), (0, 0));
}

proptest::proptest! {
    #[test]
    fn any_bytes_give_a_snapshot_or_an_error(
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300),
    ) {
        let mut page = vec![0; 4096 + 256];
        page[..64].copy_from_slice(&crate::account::fresh());
        page.splice(64..64 + bytes.len(), bytes.iter().copied());
        page.extend(&bytes);
        let _ = Snapshot::length(&page);
        if let Ok(snapshot) = Snapshot::new(&page) {
            let _ = (snapshot.used(), snapshot.live_sum(), snapshot.slots().count());
        }
    }
}
