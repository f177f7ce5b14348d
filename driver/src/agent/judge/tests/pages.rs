//! What processes see of pages, and what they write there.

use super::*;

#[test]
fn a_page_that_cannot_be_read_accuses_nobody_and_a_spoiled_one_protects_nobody() {
    let mut scene = Scene::share(10_000);
    scene.process(7).has(10);
    scene.look.shares[0].account = Err(AccountError::Unreadable("too many open files".to_owned()));
    scene.expect(&[(Kind::Account, None)]);
    for spoiled in [AccountError::Spoiled(divvy_pages::PageError::Foreign), AccountError::Leased] {
        scene.look.shares[0].account = Err(spoiled);
        scene.expect(&[(Kind::Hidden, Some(7)), (Kind::Account, None)]);
    }
}

#[test]
fn without_a_hook_the_mounted_page_tells_whose_a_process_is() {
    let mut scene = Scene::share(10_000);
    scene.process(7).has(10);
    scene.look.shares[0].containers.clear();
    scene.expect(&[(Kind::Hidden, Some(7))]);
    scene.sees("1 0 0:50 / / rw - overlay overlay rw\n").expect(&[(Kind::Stranger, Some(7))]);
}

#[test]
fn a_page_that_is_covered_is_found_and_a_process_beside_the_gpu_is_not_ended_for_it() {
    let mut scene = Scene::share(10_000);
    let cover = "90 10 0:77 /x /run/divvy/claim-0/share-0/policy rw - tmpfs t rw\n";
    let seen = mounted(&scene.look.shares) + cover;
    scene.process(7).has(10).slot(7, 10).sees(&seen).expect(&[(Kind::Pages, Some(7))]);
    assert!(!judge(&scene.look, &Before::new())[0].report_only);
    scene.look.uses.clear();
    scene.expect(&[(Kind::Pages, Some(7))]);
    assert!(judge(&scene.look, &Before::new())[0].report_only);
    scene.sees("1 0 0:50 / / rw - overlay overlay rw\n").expect(&[(Kind::NoPages, Some(7))]);
}

#[test]
fn what_no_honest_process_writes_on_the_account_page_is_found() {
    let check = |lie: fn(&mut Scene), text: &str| {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(2000).slot(7, 2000).process(8).has(100).slot(8, 100);
        let before = remember(&scene.look);
        assert!(judge(&scene.look, &before).is_empty());
        lie(&mut scene);
        let findings = judge(&scene.look, &before);
        let found = findings.iter().find(|finding| finding.kind == Kind::Account);
        let told = found.map(|finding| finding.text.as_str()).unwrap_or_default();
        assert!(told.contains(text), "{text}: {findings:?}");
        assert_eq!(told.is_empty(), text.is_empty(), "{findings:?}");
    };
    check(|scene| scene.account(0).used = 0, "0 MiB are used");
    check(|scene| scene.account(0).balance = i64::MAX, "balance");
    check(|scene| scene.account(0).is_long = true, "larger");
    check(|scene| scene.slot_mut(7).report.owner = live(7, 9), "generation");
    check(|scene| scene.slot_mut(8).report.who = identity(7), "slot of process 1008");
    // A drift upwards, a change under way, a new process in an old slot.
    check(|scene| scene.account(0).used = 9000 * MIB, "");
    check(
        |scene| {
            scene.moving(7);
            scene.account(0).used = 0;
        },
        "",
    );
    check(
        |scene| {
            scene.only_elsewhere(8);
            scene.look.uses.retain(|usage| usage.pid != 8);
            let slot = scene.slot_mut(8);
            (slot.report.who.start, slot.report.owner) = (4711, live(8, 2));
        },
        "",
    );
    // What the node took off a context need not be charged again yet.
    check(|scene| scene.account(0).used = 1700 * MIB, "");
}
