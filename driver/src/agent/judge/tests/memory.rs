//! Who has how much memory, and who hides it.

use super::*;

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
    // Each process has its own.
    let mut scene = Scene::share(10_000);
    for pid in [7, 8, 9] {
        scene.process(pid).has(3333 + 600).slot(pid, 3333);
    }
    scene.expect(&[(Kind::Overhead, None)]);
    // Not one that is not registered.
    scene.process(10).has(200);
    let kinds: Vec<Kind> = scene.findings().into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, [Kind::Hidden, Kind::OverLimit]);
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
