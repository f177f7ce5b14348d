//! Which doors are waited at, and which shares are checked after a ring.

use super::*;

#[test]
fn only_the_ringing_share_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(30, 0, 0), of(30, 0, 0)]);
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[100, 0, 0]), now);
    let doors: Vec<_> = desk.doors(now).0.iter().map(|(door, _)| door.clone()).collect();
    let [first, second] = &doors[..] else { panic!("two are waited at") };
    shares[2].rings(now);
    let mut check = |rang: WakeReason, points: u64| {
        desk.tick(now, &rang);
        assert_eq!(shares[0].rate(now), Some(points), "{rang:?}");
    };
    check(WakeReason::Nobody, 100);
    check(WakeReason::One(first.clone()), 100);
    check(WakeReason::One(second.clone()), 70);
    shares[1].rings(now);
    check(WakeReason::Anybody, 40);
}

#[test]
fn truncated_page_is_skipped_until_it_is_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(30, 0, 0)]);
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[100, 0]), now);
    let mut at = now;
    let mut check = |size: usize, doors: usize, until: Option<u64>| {
        at += TICK;
        shares[1].account.set_len(size as u64).unwrap();
        desk.tick(at, &WakeReason::Anybody);
        let (waited_at, wakes) = desk.doors(at);
        assert_eq!((waited_at.len(), wakes), (doors, until.unwrap_or(at + TICK)), "{size} bytes");
    };
    let rests = Some(now + RESTS + WAITS[1]);
    check(account::SIZE, 1, rests);
    check(0, 0, None);
    check(100, 0, None);
    check(account::SIZE, 1, rests);
    // It rings with another number than it was asked at, or with none: each ring causes a check.
    check(0, 0, None);
    shares[1].account.set_len(account::SIZE as u64).unwrap();
    shares[1].rings(at + TICK);
    desk.tick(at + TICK, &WakeReason::Nobody);
    assert_eq!(shares[0].rate(at), Some(70));
}

#[test]
fn intermittent_share_gets_a_longer_idle_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
    let [borrower, owner] = &shares[..] else { panic!("two") };
    let (mut desk, mut at) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[100, 60]), at);
    // The time after the owner's last launch at which its part is lent, in milliseconds. It
    // launches again after that time.
    let mut lent_after = |pause: u64| {
        borrower.launches(at);
        owner.rings(at);
        desk.tick(at, &WakeReason::Anybody);
        assert_eq!(borrower.rate(at), Some(40));
        let launched = at;
        while borrower.rate(at) == Some(40) {
            at += MS;
            borrower.launches(at);
            desk.tick(at, &WakeReason::Nobody);
        }
        let lent = at - launched;
        at += pause;
        lent / RESTS
    };
    assert_eq!([0; 4].map(|_| lent_after(RESTS)), [1, 2, 4, 4]);
    assert_eq!([lent_after(3 * RESTS), lent_after(RESTS)], [4, 1]);
}

#[test]
fn long_running_share_gets_a_longer_idle_timeout() {
    let check = |seconds: u64, rests: u64| {
        let dir = tempfile::tempdir().unwrap();
        let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
        let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
        desk.plan(GPU, planned(&shares, &[100, 60]), now);
        let mut at = now;
        while at < now + seconds * NS_PER_SECOND {
            if (at - now).is_multiple_of(NS_PER_SECOND) {
                desk.plan(GPU, planned(&shares, &[100, 60]), at);
            }
            at += 10 * MS;
            shares.iter().for_each(|share| share.launches(at));
            desk.tick(at, &WakeReason::Nobody);
        }
        let worked_until = at;
        while shares[0].rate(at) == Some(40) {
            at += MS;
            shares[0].launches(at);
            desk.tick(at, &WakeReason::Nobody);
        }
        let took = at - worked_until;
        assert!((rests..=rests + 2 * WAITS[1]).contains(&took), "{seconds}: {} ms", took / MS);
    };
    check(2, RESTS);
    check(6, 6 * NS_PER_SECOND / STEADY);
    check(20, MOST);
}

#[test]
fn short_pauses_are_not_reported_as_changes() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(30, 0, 0), of(60, 0, 0)]);
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[0, 60]), now);
    let mut goes_on = |from: u64, to: u64, comes: u64| {
        for ms in (from..to).step_by(50) {
            let at = now + ms * MS;
            shares[1].launches(at);
            if ms % comes == 0 {
                shares[0].rings(at);
            }
            desk.tick(at, &WakeReason::Anybody);
        }
        desk.moved(now + to * MS)
    };
    assert_eq!(goes_on(0, 1000, 500), [ActivityChange { gpu: GPU, is_first: true }]);
    assert_eq!(goes_on(1000, 20_000, 500), []);
    assert_eq!(goes_on(20_000, 24_000, 2000), [ActivityChange { gpu: GPU, is_first: false }]);
}
