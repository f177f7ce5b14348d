//! Who has how much memory, and who hides it.

use super::*;
use proptest::prelude::*;

#[test]
fn who_keeps_to_the_limit_is_left_alone() {
    let mut scene = Scene::share(10_000);
    scene.expect(&[]);
    scene.process(7).has(5000).slot(7, 5000).process(8).has(5000).slot(8, 5000);
    scene.expect(&[]);
    // Another pid namespace or a cgroup below are still the container.
    scene.change(|process| process.cgroups = Cgroups::parse("0::/kubepods/c1\n")).expect(&[]);
    // It has a handle to the GPU and no memory.
    scene.process(9).has(0).expect(&[]);
}

#[test]
fn who_has_memory_and_no_slot_hides() {
    let mut scene = Scene::share(10_000);
    scene.process(7).expect(&[]);
    scene.has(10).expect(&[(Kind::Hidden, Some(7))]);
    // Another's slot, a dead one's, or one of an earlier program is none of its own.
    scene.slot(8, 10).expect(&[(Kind::Hidden, Some(7))]);
    let mut scene = Scene::share(10_000);
    scene.process(7).has(10).slot(7, 10);
    scene.expect(&[]);
    for change in [
        |slot: &mut Slot| slot.report.who.start += 1,
        |slot: &mut Slot| slot.report.who.image += 1,
        |slot: &mut Slot| slot.report.who.namespace += 1,
        |slot: &mut Slot| slot.report.owner = Owner(slot.report.owner.0 | 1 << 48),
    ] {
        let mut scene = scene.clone();
        change(scene.slot_mut(7));
        scene.expect(&[(Kind::Hidden, Some(7))]);
    }
    // A process that has no /proc to read cannot tell more than its number.
    scene.slot_mut(7).report.who = Identity { pid: 1007, namespace: 0, start: 0, image: 0 };
    scene.expect(&[]);
}

#[test]
fn a_limit_that_the_gpu_driver_keeps_needs_no_library() {
    let mut scene = Scene::share(10_000);
    scene.process(7).has(10);
    assert!(!judge(&scene.look, &Before::new())[0].report_only);
    scene.look.kept.insert("c1".to_owned());
    assert!(judge(&scene.look, &Before::new())[0].report_only);
}

#[test]
fn a_share_that_is_only_observed_is_only_reported() {
    let mut scene = Scene::share(100);
    scene.process(7).has(5000);
    scene.look.shares[0].policy.flags = Flags::OBSERVE_ONLY;
    let findings = judge(&scene.look, &Before::new());
    assert_eq!(findings.len(), 2);
    assert!(findings.iter().all(|finding| finding.report_only));
}

#[test]
fn who_passes_the_limit_is_named_and_the_neighbour_is_not() {
    let mut scene = Scene::share(10_000);
    // The second one's own page says little: it allocates behind the library's back.
    scene.process(7).has(4000).slot(7, 4000).process(8).has(9000).slot(8, 500);
    scene.expect(&[(Kind::Understated, Some(8)), (Kind::OverLimit, Some(8))]);
    // A total set to nothing lets honest calls go too far: the largest has to go.
    let mut scene = Scene::share(10_000);
    scene.process(7).has(4000).slot(7, 4000).process(8).has(9000).slot(8, 9000);
    scene.expect(&[(Kind::OverLimit, Some(8))]);
    // One that hides goes first though it has less.
    let mut scene = Scene::share(10_000);
    scene.process(7).has(9000).slot(7, 9000).process(8).has(4000);
    scene.expect(&[(Kind::Hidden, Some(8)), (Kind::OverLimit, Some(8))]);
    // As many as it takes.
    let mut scene = Scene::share(1000);
    scene.process(7).has(3000).process(8).has(2000).process(9).has(400).slot(9, 400);
    let over: Vec<_> = scene.findings().into_iter().filter(|(kind, _)| *kind == Kind::OverLimit).collect();
    assert_eq!(over, [(Kind::OverLimit, Some(7)), (Kind::OverLimit, Some(8))]);
}

#[test]
fn what_the_gpu_driver_takes_for_itself_ends_nobody() {
    let check = |beyond: u64, expected: &[(Kind, Option<u32>)]| {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(10_000 + beyond).slot(7, 10_000).expect(expected);
    };
    check(0, &[]);
    check(1, &[(Kind::Overhead, None)]);
    check(2 * CONTEXT, &[(Kind::Overhead, None)]);
    check(2 * CONTEXT + 1, &[(Kind::Understated, Some(7)), (Kind::OverLimit, Some(7))]);
    // That contexts are charged more lets no more pass.
    let mut scene = Scene::share(10_000);
    scene.look.shares[0].policy.memory.context = 2 * CONTEXT * MIB;
    scene.process(7).has(10_000 + 2 * CONTEXT + 1).slot(7, 10_000);
    scene.expect(&[(Kind::Understated, Some(7)), (Kind::OverLimit, Some(7))]);
    // Not one that is not registered.
    let mut scene = Scene::share(10_000);
    scene.process(7).has(10_000 + 600).slot(7, 10_000).process(10).has(200);
    let kinds: Vec<Kind> = scene.findings().into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, [Kind::Hidden, Kind::OverLimit]);
}

/// Whether somebody is to be ended, of so many processes of a share that are charged and have so much each.
#[track_caller]
fn check_many(limit: u64, count: u32, charged: u64, beyond: u64, expected: Kind) {
    let mut scene = Scene::share(limit);
    for pid in 7..7 + count {
        scene.process(pid).has(charged + beyond).slot(pid, charged);
    }
    let found = scene.findings();
    assert!(!found.is_empty() && found.iter().all(|(kind, _)| *kind == expected), "{found:?}");
}

#[test]
fn honest_processes_may_all_have_larger_contexts_than_estimated() {
    // Started at once, before one was measured: as many as the limit has room for.
    check_many(3000, 10, CONTEXT, CONTEXT, Kind::Overhead);
    check_many(30_000, 100, CONTEXT, CONTEXT, Kind::Overhead);
    check_many(30_000, 10, 3000, CONTEXT, Kind::Overhead);
    // And four of them loaded as much again, or all of them a little.
    check_many(4000, 4, 1000, 2 * CONTEXT, Kind::Overhead);
    check_many(30_000, 60, 500, CONTEXT + 20, Kind::Overhead);
}

proptest! {
    /// Processes that ask before they take, at any time between two looks: contexts of any size that they have, and some
    /// modules after them, end nobody.
    #[test]
    fn who_is_charged_before_it_takes_is_left_alone(
        limit in 300..9000_u64,
        events in prop::collection::vec((0..8_u8, 0..40_usize, 0..=CONTEXT), 1..200),
    ) {
        // Of each what it is charged, what the GPU driver took beside that, and how much of this counts already.
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
                    let mut scene = Scene::share(limit);
                    for (pid, (held, more, counted)) in (7..).zip(&mut all) {
                        scene.process(pid).has(*held + *more).slot(pid, *held);
                        *counted = *more;
                    }
                    let found = scene.findings();
                    prop_assert!(found.iter().all(|(kind, _)| *kind == Kind::Overhead), "{found:?} {all:?}");
                }
                _ => {}
            }
        }
    }
}

#[test]
fn many_processes_gain_no_more_than_contexts_and_some_modules() {
    check_many(10_000, 5, 2000, 2 * CONTEXT, Kind::OverLimit);
    check_many(30_000, 60, 500, CONTEXT + 21, Kind::OverLimit);
    // Charged little or nothing, none of them has a context that was.
    check_many(1000, 4, 0, 550, Kind::Overhead);
    check_many(1000, 5, 0, 550, Kind::OverLimit);
    check_many(1000, 20, 10, 200, Kind::OverLimit);
    // Whose slots are never still, and say that more is charged than there is room for.
    for charged in [0, CONTEXT] {
        let mut scene = Scene::share(4000);
        for pid in 7..31 {
            scene.process(pid).has(500).slot(pid, charged).moving(pid);
        }
        assert!(scene.findings().iter().any(|(kind, _)| *kind == Kind::OverLimit), "{charged}");
    }
}

#[test]
fn pages_of_one_gpu_in_one_container_add_up() {
    let check = |first: u64, second: u64, expected: &[(Kind, Option<u32>)]| {
        let mut scene = Scene::share(1000);
        scene.second_share(2000);
        // The second container has the first share only.
        let other = ("c2".to_owned(), Cgroups::parse("0::/kubepods/c2\n"));
        scene.look.shares[0].containers.push(other);
        scene.process(7).has(first).slot(7, first);
        scene.process(8).has(second).slot(8, second).elsewhere_cgroup();
        let page = mounted(&scene.look.shares[..1]);
        scene.sees(&page).expect(expected);
    };
    check(3000, 0, &[]);
    check(2000, 1000, &[]);
    check(2500, 1000, &[(Kind::OverLimit, Some(7))]);
    // It has not got the second share.
    check(1000, 1500, &[(Kind::OverLimit, Some(8))]);
}

#[test]
fn a_process_without_a_share_is_told_of_only_where_shares_are() {
    let mut scene = Scene::share(10_000);
    scene.process(7).has(500).elsewhere_cgroup().sees("");
    scene.expect(&[(Kind::Stranger, Some(7))]);
    assert!(judge(&scene.look, &Before::new())[0].report_only);
    // The shares are of one instance, it is on another.
    scene.look.shares[0].policy.mig = Some(GpuUuid([2; 16]));
    scene.look.uses[0].device.mig = Some(GpuUuid([3; 16]));
    scene.expect(&[]);
}
