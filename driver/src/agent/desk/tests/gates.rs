//! For how long gates are closed, and who is woken when they open.

use super::*;

/// A share of high priority that rang at that time, and one that it keeps out.
fn closed(dir: &Path, now: u64) -> (Desk, Share, Share) {
    let mut shares = shares(dir, &[of(0, 0, 1), of(0, 0, 0)]);
    let mut desk = Desk::default();
    desk.plan(GPU, planned(&shares, &[5, 100]), now);
    shares[0].rings(now);
    desk.tick(now, &Rang::Anybody);
    let (low, high) = (shares.remove(1), shares.remove(0));
    assert!(low.is_closed(now));
    (desk, high, low)
}

/// The thread wakes when its wait ends, and no later; until then the share launches again and again.
fn goes_on(desk: &mut Desk, share: Option<&Share>, at: u64) -> u64 {
    let until = desk.doors(at).1;
    if let Some(share) = share {
        (at..until).step_by(MS as usize).for_each(|at| share.launches(at));
    }
    desk.tick(until, &Rang::Nobody);
    until
}

#[test]
fn a_gate_opens_for_nobody_while_who_closed_it_works_though_each_look_is_late() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * SECOND;
    let (mut desk, high, low) = closed(dir.path(), now);
    let late = SPARE - MS;
    let mut at = now;
    while at < now + SECOND / 2 {
        let next = desk.doors(at).1 + late;
        while at < next {
            high.launches(at);
            assert!(low.is_closed(at), "{} ms", (at - now) / MS);
            at += MS;
        }
        desk.tick(at, &Rang::Nobody);
    }
}

#[test]
fn after_short_work_whoever_waits_at_the_gate_sleeps_for_a_few_milliseconds_more_at_most() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * SECOND;
    let (mut desk, high, low) = closed(dir.path(), now);
    for ms in 0..20 {
        high.launches(now + ms * MS);
    }
    let (mut at, mut until) = (now, 0);
    while low.page().gate().load(SeqCst) != 0 {
        until = low.page().closed_until();
        at = goes_on(&mut desk, None, at);
    }
    assert!(at < until && until <= at + 10 * MS, "until {} ms after that", (until - at) / MS);
    assert!(until <= now + 50 * MS, "{} ms", (until - now) / MS);
}

#[test]
fn after_long_work_whoever_waits_at_the_gate_is_woken() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * SECOND;
    let (mut desk, high, low) = closed(dir.path(), now);
    let mut at = now;
    while at < now + SECOND / 2 {
        at = goes_on(&mut desk, Some(&high), at);
    }
    assert!(low.page().closed_until() > at + 50 * MS);
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
fn who_is_kept_out_is_not_taken_to_rest() {
    let dir = tempfile::tempdir().unwrap();
    let now = 1000 * SECOND;
    let (mut desk, high, low) = closed(dir.path(), now);
    let mut at = now;
    while low.is_closed(at) {
        at = goes_on(&mut desk, (at < now + 5 * RESTS).then_some(&high), at);
    }
    assert!(at > now + 5 * RESTS);
    assert_eq!(low.page().call(), 0, "it may have waited all the time");
    low.launches(at + MS);
    let launched = at + MS;
    while at <= launched + RESTS {
        assert_eq!(low.page().call(), 0);
        at = goes_on(&mut desk, None, at);
    }
    assert!(low.page().call() > 0, "then it rests, too");
}
