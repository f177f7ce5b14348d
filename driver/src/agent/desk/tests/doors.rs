//! Who is waited at, and who is looked at when somebody rang.

use super::*;

#[test]
fn only_who_rang_is_looked_at_of_those_whose_doors_are_waited_at() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(30, 0, 0), of(30, 0, 0)]);
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    desk.plan(GPU, planned(&shares, &[100, 0, 0]), now);
    let doors: Vec<_> = desk.doors(now).0.into_iter().map(|(door, _)| door).collect();
    let [first, second] = &doors[..] else { panic!("two are waited at") };
    shares[2].rings(now);
    let mut check = |rang: Rang, points: u64| {
        desk.tick(now, &rang);
        assert_eq!(shares[0].rate(now), Some(points), "{rang:?}");
    };
    check(Rang::Nobody, 100);
    check(Rang::One(first.clone()), 100);
    check(Rang::One(second.clone()), 70);
    shares[1].rings(now);
    check(Rang::Anybody, 40);
}

#[test]
fn whose_page_is_cut_short_is_not_waited_at_until_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(30, 0, 0)]);
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    desk.plan(GPU, planned(&shares, &[100, 0]), now);
    let mut check = |size: usize, doors: usize, until: u64| {
        shares[1].account.set_len(size as u64).unwrap();
        desk.tick(now, &Rang::Anybody);
        let (waited_at, wakes) = desk.doors(now);
        assert_eq!((waited_at.len(), wakes), (doors, now + until), "{size} bytes");
    };
    check(account::SIZE, 1, RESTS);
    check(0, 0, TICK);
    check(100, 0, TICK);
    check(account::SIZE, 1, RESTS);
    // It rings with another number than it was asked at, or none: it is looked at whoever rang.
    shares[1].account.set_len(0).unwrap();
    desk.tick(now, &Rang::Anybody);
    desk.doors(now);
    shares[1].account.set_len(account::SIZE as u64).unwrap();
    shares[1].rings(now);
    desk.tick(now, &Rang::Nobody);
    assert_eq!(shares[0].rate(now), Some(70));
}
