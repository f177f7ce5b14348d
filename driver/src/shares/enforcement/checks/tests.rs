//! Checks as tables: a snapshot, and the findings in it.

use super::*;
use crate::shares::snapshot::AccountError;
use crate::shares::snapshot::fixture::{CONTEXT, Fixture, identity, live, mounted, share};
use crate::shares::snapshot::process::Cgroups;
use divvy_pages::{Flags, GpuUuid, Identity, Owner};
use proptest::prelude::*;

impl Fixture {
    fn findings(&self) -> Vec<(Kind, Option<u32>)> {
        let findings = check(&self.snapshot, &SlotHistory::new()).into_iter();
        findings.map(|finding| (finding.kind, finding.process.map(|process| process.pid))).collect()
    }

    #[track_caller]
    fn expect(&self, expected: &[(Kind, Option<u32>)]) {
        assert_eq!(self.findings(), expected);
    }
}

#[test]
fn processes_within_the_limit_cause_no_findings() {
    let mut fixture = Fixture::share(10_000);
    fixture.expect(&[]);
    fixture.process(7).has(5000).slot(7, 5000).process(8).has(5000).slot(8, 5000);
    fixture.expect(&[]);
    // A process directly in the container's cgroup belongs to it as well.
    fixture.change(|process| process.cgroups = Cgroups::parse("0::/kubepods/c1\n")).expect(&[]);
    // A process that opened the GPU but has no memory.
    fixture.process(9).has(0).expect(&[]);
}

#[test]
fn memory_without_a_slot_is_unregistered() {
    let mut fixture = Fixture::share(10_000);
    fixture.process(7).expect(&[]);
    fixture.has(10).expect(&[(Kind::Unregistered, Some(7))]);
    // The slot of another process, of a dead one, or of an earlier program does not count.
    fixture.slot(8, 10).expect(&[(Kind::Unregistered, Some(7))]);
    let mut fixture = Fixture::share(10_000);
    fixture.process(7).has(10).slot(7, 10);
    fixture.expect(&[]);
    for change in [
        |slot: &mut Slot| slot.report.identity.start += 1,
        |slot: &mut Slot| slot.report.identity.image += 1,
        |slot: &mut Slot| slot.report.identity.namespace += 1,
        |slot: &mut Slot| slot.report.owner = Owner(slot.report.owner.0 | 1 << 48),
    ] {
        let mut fixture = fixture.clone();
        change(fixture.slot_mut(7));
        fixture.expect(&[(Kind::Unregistered, Some(7))]);
    }
    // A process without /proc knows only its pid.
    fixture.slot_mut(7).report.identity = Identity { pid: 1007, namespace: 0, start: 0, image: 0 };
    fixture.expect(&[]);
}

#[test]
fn driver_limited_container_needs_no_library() {
    let mut fixture = Fixture::share(10_000);
    fixture.process(7).has(10);
    assert!(!check(&fixture.snapshot, &SlotHistory::new())[0].report_only);
    fixture.snapshot.driver_limited.insert("c1".to_owned());
    assert!(check(&fixture.snapshot, &SlotHistory::new())[0].report_only);
}

#[test]
fn observe_only_share_is_only_reported() {
    let mut fixture = Fixture::share(100);
    fixture.process(7).has(5000);
    fixture.snapshot.shares[0].policy.flags = Flags::OBSERVE_ONLY;
    let findings = check(&fixture.snapshot, &SlotHistory::new());
    assert_eq!(findings.len(), 2);
    assert!(findings.iter().all(|finding| finding.report_only));
}

#[test]
fn offender_is_named_and_its_neighbour_is_not() {
    let mut fixture = Fixture::share(10_000);
    // The second process allocates without the library, so the page shows little.
    fixture.process(7).has(4000).slot(7, 4000).process(8).has(9000).slot(8, 500);
    fixture.expect(&[(Kind::UnderReported, Some(8)), (Kind::OverMemoryLimit, Some(8))]);
    // After the total was forged to zero, honest calls exceed the limit: the largest process is named.
    let mut fixture = Fixture::share(10_000);
    fixture.process(7).has(4000).slot(7, 4000).process(8).has(9000).slot(8, 9000);
    fixture.expect(&[(Kind::OverMemoryLimit, Some(8))]);
    // An unregistered process is named first although it has less.
    let mut fixture = Fixture::share(10_000);
    fixture.process(7).has(9000).slot(7, 9000).process(8).has(4000);
    fixture.expect(&[(Kind::Unregistered, Some(8)), (Kind::OverMemoryLimit, Some(8))]);
    // As many processes as necessary are named.
    let mut fixture = Fixture::share(1000);
    fixture.process(7).has(3000).process(8).has(2000).process(9).has(400).slot(9, 400);
    let over: Vec<_> =
        fixture.findings().into_iter().filter(|(kind, _)| *kind == Kind::OverMemoryLimit).collect();
    assert_eq!(over, [(Kind::OverMemoryLimit, Some(7)), (Kind::OverMemoryLimit, Some(8))]);
}

#[test]
fn driver_overhead_kills_no_process() {
    let case = |beyond: u64, expected: &[(Kind, Option<u32>)]| {
        let mut fixture = Fixture::share(10_000);
        fixture.process(7).has(10_000 + beyond).slot(7, 10_000).expect(expected);
    };
    case(0, &[]);
    case(1, &[(Kind::DriverOverhead, None)]);
    case(2 * CONTEXT, &[(Kind::DriverOverhead, None)]);
    case(2 * CONTEXT + 1, &[(Kind::UnderReported, Some(7)), (Kind::OverMemoryLimit, Some(7))]);
    // A larger charge for contexts does not extend the allowance.
    let mut fixture = Fixture::share(10_000);
    fixture.snapshot.shares[0].policy.memory.context = 2 * CONTEXT * MIB;
    fixture.process(7).has(10_000 + 2 * CONTEXT + 1).slot(7, 10_000);
    fixture.expect(&[(Kind::UnderReported, Some(7)), (Kind::OverMemoryLimit, Some(7))]);
    // Unregistered processes get no allowance.
    let mut fixture = Fixture::share(10_000);
    fixture.process(7).has(10_000 + 600).slot(7, 10_000).process(10).has(200);
    let kinds: Vec<Kind> = fixture.findings().into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, [Kind::Unregistered, Kind::OverMemoryLimit]);
}

/// Checks that `count` processes of a share, each with this charge and excess in MiB, cause only
/// findings of this kind.
#[track_caller]
fn check_many(limit: u64, count: u32, charged: u64, beyond: u64, expected: Kind) {
    let mut fixture = Fixture::share(limit);
    for pid in 7..7 + count {
        fixture.process(pid).has(charged + beyond).slot(pid, charged);
    }
    let found = fixture.findings();
    assert!(!found.is_empty() && found.iter().all(|(kind, _)| *kind == expected), "{found:?}");
}

#[test]
fn all_contexts_may_be_larger_than_estimated() {
    // As many as fit into the limit started at once, before one was measured.
    check_many(3000, 10, CONTEXT, CONTEXT, Kind::DriverOverhead);
    check_many(30_000, 100, CONTEXT, CONTEXT, Kind::DriverOverhead);
    check_many(30_000, 10, 3000, CONTEXT, Kind::DriverOverhead);
    // Four processes loaded modules of a context's size, or all processes loaded a few.
    check_many(4000, 4, 1000, 2 * CONTEXT, Kind::DriverOverhead);
    check_many(30_000, 60, 500, CONTEXT + 20, Kind::DriverOverhead);
}

proptest! {
    /// Processes that charge before they allocate never exceed the allowance, with contexts of any
    /// size, some modules, and any order of events between two snapshots.
    #[test]
    fn processes_that_charge_first_are_never_over_limit(
        limit in 300..9000_u64,
        events in prop::collection::vec((0..8_u8, 0..40_usize, 0..=CONTEXT), 1..200),
    ) {
        // For each process: its charge, the driver's memory beside it, and how much of that was
        // measured already.
        let mut all: Vec<(u64, u64, u64)> = Vec::new();
        let mut late = 4 * CONTEXT;
        for (event, which, amount) in events {
            let used: u64 = all.iter().map(|(held, _, counted)| held + counted).sum();
            let room = limit.saturating_sub(used);
            let count = all.len().max(1);
            match (event, all.get_mut(which % count)) {
                (0 | 1, _) if room >= CONTEXT => all.push((CONTEXT, amount, 0)),
                (2 | 3, Some((held, ..))) => *held += room.min(amount * 5),
                (4, Some((held, ..))) => *held -= (*held - CONTEXT).min(amount * 5),
                (5, Some((_, more, _))) => {
                    let loaded = amount.min(late).min(2 * CONTEXT - *more);
                    (*more, late) = (*more + loaded, late - loaded);
                }
                (6, Some(_)) => drop(all.swap_remove(which % count)),
                (7, _) => {
                    let mut fixture = Fixture::share(limit);
                    for (pid, (held, more, counted)) in (7..).zip(&mut all) {
                        fixture.process(pid).has(*held + *more).slot(pid, *held);
                        *counted = *more;
                    }
                    let found = fixture.findings();
                    let is_overhead = |(kind, _): &(Kind, _)| *kind == Kind::DriverOverhead;
                    prop_assert!(found.iter().all(is_overhead), "{found:?} {all:?}");
                }
                _ => {}
            }
        }
    }
}

#[test]
fn many_processes_gain_only_contexts_and_some_modules() {
    check_many(10_000, 5, 2000, 2 * CONTEXT, Kind::OverMemoryLimit);
    check_many(30_000, 60, 500, CONTEXT + 21, Kind::OverMemoryLimit);
    // Processes with little or no charge get no allowance for a context.
    check_many(1000, 4, 0, 550, Kind::DriverOverhead);
    check_many(1000, 5, 0, 550, Kind::OverMemoryLimit);
    check_many(1000, 20, 10, 200, Kind::OverMemoryLimit);
    // Slots that are never stable, with charges that exceed the limit.
    for charged in [0, CONTEXT] {
        let mut fixture = Fixture::share(4000);
        for pid in 7..31 {
            fixture.process(pid).has(500).slot(pid, charged).moving(pid);
        }
        assert!(fixture.findings().iter().any(|(kind, _)| *kind == Kind::OverMemoryLimit), "{charged}");
    }
}

#[test]
fn pages_of_one_gpu_in_one_container_add_up() {
    let case = |first: u64, second: u64, expected: &[(Kind, Option<u32>)]| {
        let mut fixture = Fixture::share(1000);
        fixture.second_share(2000);
        // The second container has only the first share.
        let other = ("c2".to_owned(), Cgroups::parse("0::/kubepods/c2\n"));
        fixture.snapshot.shares[0].containers.push(other);
        fixture.process(7).has(first).slot(7, first);
        fixture.process(8).has(second).slot(8, second).elsewhere_cgroup();
        let page = mounted(&fixture.snapshot.shares[..1]);
        fixture.sees(&page).expect(expected);
    };
    case(3000, 0, &[]);
    case(2000, 1000, &[]);
    case(2500, 1000, &[(Kind::OverMemoryLimit, Some(7))]);
    // The second container cannot use the second share.
    case(1000, 1500, &[(Kind::OverMemoryLimit, Some(8))]);
}

#[test]
fn unmanaged_process_is_reported_only_on_shared_devices() {
    let mut fixture = Fixture::share(10_000);
    fixture.process(7).has(500).elsewhere_cgroup().sees("");
    fixture.expect(&[(Kind::UnmanagedProcess, Some(7))]);
    assert!(check(&fixture.snapshot, &SlotHistory::new())[0].report_only);
    // The shares are on one instance, the process on another.
    fixture.snapshot.shares[0].policy.mig = Some(GpuUuid([2; 16]));
    fixture.snapshot.uses[0].device.mig = Some(GpuUuid([3; 16]));
    fixture.expect(&[]);
}

#[test]
fn unreadable_page_accuses_no_process_a_corrupt_one_does() {
    let mut fixture = Fixture::share(10_000);
    fixture.process(7).has(10);
    fixture.snapshot.shares[0].account = Err(AccountError::Unreadable("too many open files".to_owned()));
    fixture.expect(&[(Kind::AccountMismatch, None)]);
    for spoiled in [AccountError::Corrupt(divvy_pages::PageError::Foreign), AccountError::Leased] {
        fixture.snapshot.shares[0].account = Err(spoiled);
        fixture.expect(&[(Kind::Unregistered, Some(7)), (Kind::AccountMismatch, None)]);
    }
}

#[test]
fn mounted_page_identifies_a_process_without_a_hook() {
    let mut fixture = Fixture::share(10_000);
    fixture.process(7).has(10);
    fixture.snapshot.shares[0].containers.clear();
    fixture.expect(&[(Kind::Unregistered, Some(7))]);
    fixture.sees("1 0 0:50 / / rw - overlay overlay rw\n").expect(&[(Kind::UnmanagedProcess, Some(7))]);
}

#[test]
fn page_of_another_gpu_is_not_forged() {
    let mut fixture = Fixture::share(10_000);
    let other = share(1, 1000);
    let seen = mounted(&[fixture.snapshot.shares[0].clone(), other.clone()]);
    fixture.process(7).has(10).slot(7, 10).sees(&seen).expect(&[(Kind::PagesMasked, Some(7))]);
    fixture.snapshot.node_pages = [other.page].into();
    fixture.expect(&[]);
}

#[test]
fn masked_page_off_the_gpu_is_only_reported() {
    let mut fixture = Fixture::share(10_000);
    let cover = "90 10 0:77 /x /run/divvy/claim-0/share-0/policy rw - tmpfs t rw\n";
    let seen = mounted(&fixture.snapshot.shares) + cover;
    fixture.process(7).has(10).slot(7, 10).sees(&seen).expect(&[(Kind::PagesMasked, Some(7))]);
    assert!(!check(&fixture.snapshot, &SlotHistory::new())[0].report_only);
    fixture.snapshot.uses.clear();
    fixture.expect(&[(Kind::PagesMasked, Some(7))]);
    assert!(check(&fixture.snapshot, &SlotHistory::new())[0].report_only);
    fixture.sees("1 0 0:50 / / rw - overlay overlay rw\n").expect(&[(Kind::PagesMissing, Some(7))]);
}

#[test]
fn impossible_account_values_are_found() {
    let case = |forge: fn(&mut Fixture), text: &str| {
        let mut fixture = Fixture::share(10_000);
        fixture.process(7).has(2000).slot(7, 2000).process(8).has(100).slot(8, 100);
        let before = live_slots(&fixture.snapshot);
        assert!(check(&fixture.snapshot, &before).is_empty());
        forge(&mut fixture);
        let findings = check(&fixture.snapshot, &before);
        let found = findings.iter().find(|finding| finding.kind == Kind::AccountMismatch);
        let reported = found.map(|finding| finding.text.as_str()).unwrap_or_default();
        assert!(reported.contains(text), "{text}: {findings:?}");
        assert_eq!(reported.is_empty(), text.is_empty(), "{findings:?}");
    };
    case(|fixture| fixture.account(0).used = 0, "a total of 0 MiB");
    case(|fixture| fixture.account(0).balance = i64::MAX, "balance");
    case(|fixture| fixture.account(0).is_oversized = true, "larger");
    case(|fixture| fixture.slot_mut(7).report.owner = live(7, 9), "generation");
    case(|fixture| fixture.slot_mut(8).report.identity = identity(7), "slot of process 1008");
    // No mismatch: a total that is too large, a change in progress, a new process in an old slot.
    case(|fixture| fixture.account(0).used = 9000 * MIB, "");
    case(
        |fixture| {
            fixture.moving(7);
            fixture.account(0).used = 0;
        },
        "",
    );
    case(
        |fixture| {
            fixture.only_elsewhere(8);
            fixture.snapshot.uses.retain(|usage| usage.pid != 8);
            let slot = fixture.slot_mut(8);
            (slot.report.identity.start, slot.report.owner) = (4711, live(8, 2));
        },
        "",
    );
    // A correction of the node that the processes have not applied yet.
    case(|fixture| fixture.account(0).used = 1700 * MIB, "");
}
