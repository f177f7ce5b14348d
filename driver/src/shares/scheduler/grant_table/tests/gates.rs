//! For how long gates are closed, and who is woken when they open.

use super::*;
use proptest::prelude::*;

/// A share of high priority that rang at that time, and one that it keeps out.
fn closed(dir: &Path, now: u64) -> (GrantTable, Share, Share) {
    let mut shares = shares(dir, &[of(0, 0, 1), of(0, 0, 0)]);
    let mut desk = GrantTable::default();
    desk.plan(GPU, planned(&shares, &[5, 100]), now);
    shares[0].rings(now);
    desk.tick(now, &WakeReason::Anybody);
    let (low, high) = (shares.remove(1), shares.remove(0));
    assert!(low.is_closed(now));
    (desk, high, low)
}

/// The thread wakes when its wait ends, and no later; until then the share launches again and again.
fn goes_on(desk: &mut GrantTable, share: Option<&Share>, at: u64) -> u64 {
    let until = desk.doors(at).1;
    if let Some(share) = share {
        (at..until).step_by(MS as usize).for_each(|at| share.launches(at));
    }
    desk.tick(until, &WakeReason::Nobody);
    until
}

#[test]
fn gate_stays_closed_despite_late_checks() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * NS_PER_SECOND;
    let (mut desk, high, low) = closed(dir.path(), now);
    let late = SPARE - MS;
    let mut at = now;
    while at < now + NS_PER_SECOND / 2 {
        let next = desk.doors(at).1 + late;
        while at < next {
            high.launches(at);
            assert!(low.is_closed(at), "{} ms", (at - now) / MS);
            at += MS;
        }
        desk.tick(at, &WakeReason::Nobody);
    }
}

/// No share rings, and the thread wakes when its wait ends. Returns the time until which the gate
/// is closed in the end, and the number of wakes.
fn opens(desk: &mut GrantTable, low: &Share, mut at: u64) -> (u64, usize) {
    for wakes in 0.. {
        let (until, opens) = (desk.doors(at).1, low.page().gate_closed_until());
        if until >= opens {
            return (opens, wakes);
        }
        desk.tick(until, &WakeReason::Nobody);
        at = until;
    }
    unreachable!("it opens")
}

#[test]
fn gate_opens_by_timeout_after_short_work() {
    let check = |works: u64, until: u64, wakes: usize| {
        let dir = tempfile::tempdir().unwrap();
        let now = 1000 * NS_PER_SECOND;
        let (mut desk, high, low) = closed(dir.path(), now);
        high.launches(now + works);
        assert_eq!(opens(&mut desk, &low, now), (now + until, wakes), "{} ms", works / MS);
        assert!(high.page().wakeup_request() > 0, "it is to ring again");
        assert!(low.page().gate_closed_until() > 0, "nothing is written for that");
    };
    check(0, BURST + HOLD, 1);
    check(BURST, BURST + HOLD, 1);
    // It rests by then, but for less than it is given.
    check(BURST + MS, BURST + MS + HOLD + WAITS[0] + SPARE, 2);
    // It works.
    let first = BURST + HOLD - SPARE;
    check(first, first + HOLD + WAITS[0] + SPARE, 2);
}

#[test]
fn doorbell_before_the_opening_keeps_the_gate_closed() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * NS_PER_SECOND;
    let (mut desk, high, low) = closed(dir.path(), now);
    let mut open = 0;
    for ms in 0..3000 {
        let at = now + ms * MS;
        let rings = ms % 18 == 0;
        if rings {
            high.rings(at);
        }
        // Something else wakes the thread all the time.
        desk.tick(at, if rings { &WakeReason::Anybody } else { &WakeReason::Nobody });
        open += u64::from(!low.is_closed(at));
    }
    assert!((15..30).contains(&open), "{open} ms of three seconds");
}

#[test]
fn gate_is_closed_little_longer_than_bursts() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * NS_PER_SECOND;
    let (mut desk, high, low) = closed(dir.path(), now);
    desk.since(GPU, now);
    let (mut at, mut open) = (now, 0);
    for ms in 0..3000 {
        at = now + ms * MS;
        if ms % 50 == 0 {
            high.rings(at);
            desk.tick(at, &WakeReason::Anybody);
        } else if desk.doors(at).1 <= at {
            desk.tick(at, &WakeReason::Nobody);
        }
        low.launches(at);
        open += u64::from(!low.is_closed(at));
    }
    // It is closed for 20 ms each.
    assert_eq!(open, 3000 / 50 * 30);
    assert_eq!(low.page().wakeup_request(), 0, "it does not rest");
    let granted = desk.since(GPU, at)[&low.key].memory.granted().0 / POINT;
    assert!((59..=60).contains(&granted), "{granted}");
}

#[test]
fn share_idle_after_gate_timeout_is_found_idle() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * NS_PER_SECOND;
    let (mut desk, _high, low) = closed(dir.path(), now);
    let (opened, _) = opens(&mut desk, &low, now);
    low.launches(opened);
    let mut at = opened;
    while low.page().wakeup_request() == 0 {
        at = goes_on(&mut desk, None, at);
        assert!(at <= opened + RESTS + 2 * WAITS[1], "{} ms", (at - opened) / MS);
    }
}

#[test]
fn waiters_are_woken_after_long_work() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * NS_PER_SECOND;
    let (mut desk, high, low) = closed(dir.path(), now);
    let mut at = now;
    while at < now + NS_PER_SECOND / 2 {
        at = goes_on(&mut desk, Some(&high), at);
    }
    assert!(low.page().gate_closed_until() > at + 50 * MS);
    std::thread::scope(|scope| {
        let gate = low.page().gate();
        let patience = rustix::time::Timespec { tv_sec: 60, tv_nsec: 0 };
        let waiter = scope.spawn(move || futex::wait(gate, futex::Flags::empty(), 1, Some(&patience)));
        std::thread::sleep(std::time::Duration::from_millis(50));
        while gate.load(SeqCst) != 0 {
            at = goes_on(&mut desk, None, at);
        }
        assert_eq!(waiter.join().unwrap(), Ok(()));
    });
}

#[test]
fn gated_share_does_not_count_as_idle() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * NS_PER_SECOND;
    let (mut desk, high, low) = closed(dir.path(), now);
    let mut at = now;
    while low.is_closed(at) {
        at = goes_on(&mut desk, (at < now + 5 * RESTS).then_some(&high), at);
    }
    assert!(at > now + 5 * RESTS);
    assert_eq!(low.page().wakeup_request(), 0, "it may have waited all the time");
    low.launches(at + MS);
    let launched = at + MS;
    while at <= launched + RESTS {
        assert_eq!(low.page().wakeup_request(), 0);
        at = goes_on(&mut desk, None, at);
    }
    assert!(low.page().wakeup_request() > 0, "then it rests, too");
}

proptest! {
    /// However it launches, and however late each look is: others are kept out for as long as it
    /// goes on, and not for much longer.
    #[test]
    fn gate_is_closed_from_first_to_last_launch(
        pauses in proptest::collection::vec(1_u64..60, 1..32),
        late in 0..SPARE / MS,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut at = 1000 * NS_PER_SECOND;
        let (mut desk, high, low) = closed(dir.path(), at);
        let (mut answered, mut launched, mut woken) = (high.page().wakeup_request(), at, None);
        let times: Vec<u64> = pauses.iter().scan(at, |at, ms| { *at += ms * MS; Some(*at) }).collect();
        while at < times[times.len() - 1] + NS_PER_SECOND / 5 {
            at += MS;
            let until = desk.doors(at).1;
            if until <= at && *woken.get_or_insert(at) + late * MS <= at {
                desk.tick(at, &WakeReason::Nobody);
                woken = None;
            }
            if times.contains(&at) {
                launched = at;
                high.launches(at);
                let call = high.page().wakeup_request();
                if call != 0 && call != answered {
                    answered = call;
                    high.rings(at);
                    desk.tick(at, &WakeReason::Anybody);
                }
            }
            let rests = at - launched;
            // No gate is closed long enough here to force an opening: with these pauses, each would
            // be 31 ms at most.
            if rests < HOLD {
                prop_assert!(low.is_closed(at), "open {} ms after a launch", rests / MS);
            }
            if rests > HOLD + WAITS[0] + SPARE {
                prop_assert!(!low.is_closed(at), "closed {} ms after the last launch", rests / MS);
            }
        }
    }
}
