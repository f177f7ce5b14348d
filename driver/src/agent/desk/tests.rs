//! Pages as files, a desk that has them, and a clock that the test moves.

use super::super::arbiter::{SECOND, Terms};
use super::super::door::Pulse;
use super::super::orders::SPARE;
use super::seat::{BURST, GRANT, HOLD, MOST, RESTS, STEADY};
use super::*;
use crate::shares::Mapped;
use divvy_pages::{Compute, Flags, Memory, Policy, PolicyPage, Text, account};
use rustix::thread::futex;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

mod doors;
mod gates;
mod instances;

pub(in super::super) const GPU: GpuUuid = GpuUuid([1; 16]);
const POINT: u64 = SECOND / 100;
const MS: u64 = 1_000_000;

/// A share with its pages in a directory.
pub(in super::super) struct Share {
    key: Key,
    policy: PathBuf,
    account: Arc<File>,
    compute: Compute,
    page: Mapped,
}

impl Share {
    pub(in super::super) fn new(dir: &Path, name: &str, compute: Compute) -> Self {
        let policy = Policy {
            claim: Text::EMPTY,
            share: Text::EMPTY,
            gpu: GPU,
            mig: None,
            pci: Text::EMPTY,
            memory: Memory::default(),
            compute,
            codec: Default::default(),
            flags: Flags::default(),
        };
        let path = dir.join(name);
        std::fs::write(&path, policy.encode()).unwrap();
        let path_of_account = dir.join(format!("{name}-account"));
        let mut options = File::options();
        let account =
            options.create(true).truncate(true).read(true).write(true).open(path_of_account).unwrap();
        account.set_len(account::SIZE as u64).unwrap();
        let page = Mapped::open(&path).unwrap();
        Self { key: (name.into(), "0".into()), policy: path, account: Arc::new(account), compute, page }
    }

    /// As an audit finds it that wants so many points.
    pub(in super::super) fn planned(&self, wants: u64) -> Planned {
        let standing = Standing {
            terms: Terms::of(self.compute),
            is_high: self.compute.priority > 0,
            is_limited: self.compute.is_limited(),
            wants: wants * POINT,
            is_awake: false,
            turn: None,
            sight: orders::Sight::Own,
            memory: arbiter::Memory::default(),
        };
        let (policy, account) = (self.policy.clone(), Arc::clone(&self.account));
        Planned { key: self.key.clone(), mig: None, policy, account, standing }
    }

    pub(in super::super) fn page(&self) -> &PolicyPage {
        self.page.page().unwrap()
    }

    /// Points that it may have, if it is held to any.
    pub(in super::super) fn rate(&self, now: u64) -> Option<u64> {
        let rate = || self.page().granted(now).unwrap_or(SECOND).min(SECOND) / POINT;
        self.page().is_paced().then(rate)
    }

    /// Its class is another from now on.
    fn changes(&mut self, compute: Compute) {
        let (_, policy) = self.page().read().unwrap();
        self.page().replace(&Policy { compute, ..policy }).unwrap();
        self.compute = compute;
    }

    fn launches(&self, now: u64) {
        self.account.write_all_at(&now.to_le_bytes(), account::BALANCE + 8).unwrap();
    }

    fn rings(&self, now: u64) {
        let doorbell = Pulse::read(&self.account).unwrap().doorbell + 1;
        self.account.write_all_at(&doorbell.to_le_bytes(), account::DOORBELL).unwrap();
        self.launches(now);
    }

    fn is_closed(&self, now: u64) -> bool {
        self.page().gate().load(SeqCst) != 0 && now < self.page().closed_until()
    }
}

fn shares(dir: &Path, all: &[Compute]) -> Vec<Share> {
    all.iter().enumerate().map(|(at, compute)| Share::new(dir, &format!("s{at}"), *compute)).collect()
}

fn planned(shares: &[Share], wants: &[u64]) -> Vec<Planned> {
    shares.iter().zip(wants).map(|(share, wants)| share.planned(*wants)).collect()
}

fn of(cores: u32, ceiling: u32, priority: u32) -> Compute {
    Compute { cores, ceiling, priority, ..Compute::default() }
}

#[test]
fn what_is_lent_is_returned_with_the_first_launch_and_lent_again_when_its_owner_rests() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
    let [borrower, owner] = &shares[..] else { panic!("two") };
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    assert!(desk.plan(GPU, planned(&shares, &[100, 0]), now));
    assert_eq!([borrower.rate(now), owner.rate(now)], [Some(100), Some(60)]);
    let (doors, until) = desk.doors(now);
    assert_eq!(
        (doors.len(), until),
        (1, now + RESTS + WAITS[1]),
        "it is heard, and the other one may come to rest"
    );
    desk.tick(now + MS, &Rang::Anybody);
    assert_eq!(borrower.rate(now), Some(100));
    let rung = now + 2 * MS;
    owner.rings(rung);
    desk.tick(rung, &Rang::Anybody);
    assert_eq!([borrower.rate(rung), owner.rate(rung)], [Some(40), Some(60)]);
    assert_eq!(owner.page().call(), 0, "it is not asked again");
    let (doors, until) = desk.doors(rung);
    assert_eq!((doors.len(), until), (0, rung + BURST + HOLD + WAITS[0]));
    // It works on, and an audit that has not seen it yet changes nothing.
    owner.launches(rung + 50 * MS);
    borrower.launches(rung + 50 * MS);
    desk.tick(rung + 60 * MS, &Rang::Anybody);
    desk.plan(GPU, planned(&shares, &[100, 0]), rung + 61 * MS);
    assert_eq!(borrower.rate(rung), Some(40));
    let rests = rung + 71 * MS;
    desk.tick(rests, &Rang::Anybody);
    assert_eq!(borrower.rate(rests), Some(100));
    assert_ne!(owner.page().call(), 0, "and is asked");
    assert_eq!(desk.doors(rests).0.len(), 1);
    assert_eq!(borrower.rate(rests + GRANT), Some(100), "an agent that is gone grants nothing");
}

#[test]
fn a_share_whose_class_takes_its_limit_away_is_paced_all_the_time_and_free_when_it_is_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut shares = shares(dir.path(), &[of(0, 30, 0), of(0, 0, 0)]);
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    desk.plan(GPU, planned(&shares, &[30, 100]), now);
    assert_eq!([shares[0].rate(now), shares[1].rate(now)], [Some(30), Some(70)]);
    shares[0].changes(of(0, 100, 0));
    assert_eq!(shares[0].rate(now), Some(30), "until the next audit");
    desk.plan(GPU, planned(&shares, &[100, 100]), now + SECOND);
    assert_eq!([shares[0].rate(now), shares[1].rate(now)], [Some(50), Some(50)]);
    shares.truncate(1);
    desk.plan(GPU, planned(&shares, &[100]), now + 2 * SECOND);
    assert_eq!(shares[0].rate(now), None);
    shares[0].changes(of(0, 30, 0));
    desk.plan(GPU, planned(&shares, &[30]), now + 3 * SECOND);
    assert_eq!((shares[0].rate(now), shares[0].page().is_divided()), (Some(30), false));
}

#[test]
fn what_an_owner_leaves_is_lent_as_soon_as_it_rests_though_it_worked_at_the_audit() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
    let [borrower, owner] = &shares[..] else { panic!("two") };
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    desk.plan(GPU, planned(&shares, &[100, 60]), now);
    assert_eq!([borrower.rate(now), owner.rate(now)], [Some(40), Some(60)]);
    let rests = now + RESTS + MS;
    borrower.launches(rests);
    desk.tick(rests, &Rang::Anybody);
    assert_eq!([borrower.rate(rests), owner.rate(rests)], [Some(100), Some(60)]);
    // The audit looks back.
    desk.plan(GPU, planned(&shares, &[100, 60]), rests + MS);
    assert_eq!(borrower.rate(rests), Some(100));
    owner.rings(rests + 2 * MS);
    desk.tick(rests + 2 * MS, &Rang::Anybody);
    assert_eq!(borrower.rate(rests), Some(40));
    // In debt for a long kernel it does not rest, however long ago it launched that.
    owner.account.write_all_at(&(-(SECOND as i64)).to_le_bytes(), account::BALANCE).unwrap();
    borrower.launches(rests + SECOND);
    desk.tick(rests + SECOND, &Rang::Anybody);
    assert_eq!(borrower.rate(rests), Some(40));
}

#[test]
fn who_may_rest_is_looked_at_soon_where_that_matters_to_somebody() {
    let check = |all: &[Compute], soon: u64| {
        let dir = tempfile::tempdir().unwrap();
        let shares = shares(dir.path(), all);
        let (mut desk, now) = (Desk::default(), 1000 * SECOND);
        desk.plan(GPU, planned(&shares, &[20, 20, 20]), now);
        assert_eq!(desk.doors(now).1, now + soon + WAITS[1], "{all:?}");
    };
    let fixed = of(20, 0, 0);
    check(&[fixed, fixed, fixed], MOST);
    check(&[fixed, fixed, of(20, 40, 0)], RESTS);
    check(&[fixed, fixed, of(0, 0, 0)], RESTS);
    check(&[fixed, fixed, of(20, 0, 1)], RESTS);
    // One of two would be alone.
    check(&[fixed, fixed], RESTS);
}

#[test]
fn a_share_has_its_trim_for_company_while_there_is_any() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(30, 0, 0), of(60, 0, 0)]);
    let [first, other] = &shares[..] else { panic!("two") };
    let now = 1000 * SECOND;
    // Of the agent before: kernels look half as long again.
    first.page().grant(45 * POINT, now + SECOND);
    first.page().keep([1.0, 1.5].map(f64::to_bits));
    let mut desk = Desk::default();
    desk.plan(GPU, planned(&shares, &[30, 60]), now);
    assert_eq!(first.rate(now), Some(45));
    let rests = now + RESTS + MS;
    first.launches(rests);
    desk.tick(rests, &Rang::Anybody);
    assert_eq!(first.rate(rests), Some(30), "alone");
    other.rings(rests + MS);
    desk.tick(rests + MS, &Rang::Anybody);
    assert_eq!(first.rate(rests), Some(45));
    let mut company = |at| desk.since(GPU, at)[&first.key].company;
    let mean = company(now + SECOND);
    assert_eq!((mean.is_beside, mean.has_changed), (true, false), "three times is on the mean");
    assert!(company(now + SECOND + SECOND / 4).has_changed, "of so little nothing follows");
    assert!(!company(now + 2 * SECOND).has_changed);
}

#[test]
fn gates_are_closed_while_high_priority_works_and_no_longer() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(0, 0, 1), of(0, 0, 0)]);
    let [high, low] = &shares[..] else { panic!("two") };
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    desk.plan(GPU, planned(&shares, &[5, 100]), now);
    assert!(!low.is_closed(now) && low.page().is_paced() && high.page().is_paced());
    high.rings(now);
    desk.tick(now, &Rang::Anybody);
    assert!(low.is_closed(now) && !high.is_closed(now));
    assert!(!low.is_closed(now + CLOSED), "a node that is gone keeps nobody out");
    let mut open = 0;
    for ms in 0..2000 {
        let at = now + ms * MS;
        high.launches(at);
        desk.tick(at, &Rang::Anybody);
        open += u64::from(!low.is_closed(at));
    }
    assert_eq!(open, 10, "it is let through for as long in each second");
    let rests = now + 2100 * MS;
    desk.tick(rests, &Rang::Anybody);
    assert!(!low.is_closed(rests));
    high.rings(rests);
    desk.tick(rests, &Rang::Anybody);
    assert!(low.is_closed(rests));
    desk.leave();
    assert!(!low.is_closed(rests), "nor does one that ends");
}

#[test]
fn who_takes_turns_is_alone() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(0, 0, 0), of(0, 0, 0), of(0, 0, 0)]);
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    desk.plan(GPU, planned(&shares, &[100, 100, 0]), now);
    let order = || shares[..2].iter().map(|share| share.key.clone()).collect();
    assert!(desk.turns(GPU, order(), SECOND, now));
    let closed = |now| shares.iter().map(|share| share.is_closed(now)).collect::<Vec<_>>();
    assert_eq!(closed(now), [false, true, false]);
    let mut at = now;
    while at < now + SECOND {
        shares[0].launches(at);
        desk.tick(at, &Rang::Anybody);
        assert_eq!((closed(at), shares[0].rate(at)), (vec![false, true, false], Some(100)));
        at += 10 * MS;
    }
    desk.tick(at, &Rang::Anybody);
    assert_eq!(closed(at), [true, false, false]);
    desk.turns(GPU, Vec::new(), 0, at);
    assert_eq!(closed(at), [false; 3]);
}

#[test]
fn who_begins_for_the_first_time_was_not_there_before() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(30, 0, 0), of(60, 0, 0)]);
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    desk.plan(GPU, planned(&shares, &[0, 60]), now);
    assert_eq!(desk.moved(now), [Moved { gpu: GPU, is_first: true }], "the other one works");
    // It has not been idle for so long that it would be seen to rest.
    shares[0].rings(now + 10 * MS);
    desk.tick(now + 10 * MS, &Rang::Anybody);
    assert_eq!(desk.moved(now), [Moved { gpu: GPU, is_first: true }]);
    let mut has_moved = |at| desk.since(GPU, at)[&shares[0].key].company.has_moved;
    assert!(has_moved(now + SECOND));
    assert!(!has_moved(now + 2 * SECOND));
    // It rests, and begins again; the next time is told of when it is heard.
    let mut check = |seconds: u64, moved: &[Moved]| {
        let later = now + seconds * SECOND;
        desk.tick(later, &Rang::Anybody);
        shares[0].rings(later + MS);
        desk.tick(later + MS, &Rang::Anybody);
        assert_eq!(desk.moved(later + MS), moved, "after {seconds} s");
    };
    check(3, &[]);
    check(6, &[Moved { gpu: GPU, is_first: false }]);
    check(9, &[]);
}

#[test]
fn what_was_granted_is_told_by_the_mean() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    desk.plan(GPU, planned(&shares, &[100, 0]), now);
    shares[0].launches(now + SECOND / 4);
    shares[1].rings(now + SECOND / 4);
    desk.tick(now + SECOND / 4, &Rang::Anybody);
    let had = desk.since(GPU, now + SECOND);
    let granted = |share: &Share| had[&share.key].memory.granted().0 / POINT;
    assert_eq!([granted(&shares[0]), granted(&shares[1])], [55, 60]);
}

#[test]
fn an_agent_goes_on_from_where_the_one_before_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(30, 0, 0), of(20, 100, 0), of(0, 0, 0)]);
    let now = 1000 * SECOND;
    // Trims beside others, and last a page of an agent that kept nothing.
    let kept = [[1.0, 1.5], [1.0, 1.25], [0.0, 0.0]];
    for (share, kept) in shares.iter().zip(kept) {
        share.page().grant(45 * POINT, now + SECOND);
        share.page().keep(kept.map(f64::to_bits));
    }
    shares[2].page().divide(true);
    shares[2].page().ask(true, 7);
    let mut desk = Desk::default();
    desk.plan(GPU, planned(&shares, &[30, 100, 0]), now);
    let rates: Vec<_> = shares.iter().map(|share| share.rate(now)).collect();
    // Of what each is to have now: 30, what that leaves, and what is its own when it wants it.
    assert_eq!(rates, [Some(45), Some(87), Some(25)]);
    assert!(shares[2].page().call() > 7);
    drop(desk);
    let rate_after = |seconds: u64| {
        let at = now + seconds * SECOND;
        Desk::default().plan(GPU, planned(&shares, &[30, 100, 0]), at);
        shares[0].rate(at)
    };
    assert_eq!(rate_after(20), Some(45), "it was away for a while");
    assert_eq!(rate_after(120), Some(30), "what was granted long ago says nothing");
}

#[test]
fn pages_that_were_made_anew_are_another_share() {
    let dir = tempfile::tempdir().unwrap();
    let mut shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
    let (mut desk, now) = (Desk::default(), 1000 * SECOND);
    desk.plan(GPU, planned(&shares, &[100, 0]), now);
    std::fs::rename(dir.path().join("s1"), dir.path().join("gone")).unwrap();
    shares[1] = Share::new(dir.path(), "s1", of(60, 0, 0));
    desk.plan(GPU, planned(&shares, &[100, 0]), now + MS);
    assert_ne!(shares[1].page().call(), 0);
    shares[1].rings(now + 2 * MS);
    desk.tick(now + 2 * MS, &Rang::Anybody);
    assert_eq!(shares[0].rate(now + 2 * MS), Some(40));
    // One that is released is divided no more.
    let released = shares.remove(0);
    desk.plan(GPU, planned(&shares, &[0]), now + 3 * MS);
    assert_eq!(desk.since(GPU, now + 4 * MS).len(), 1);
    assert_eq!(released.page().call(), 0);
}

/// A launch of a process of the share, on its mapping of the account page.
#[allow(unsafe_code)]
pub(in super::super) fn launch(share: &Share) {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, of a file that stays as long as it is; it is never given back.
    let address = unsafe {
        mmap(std::ptr::null_mut(), account::SIZE, access, MapFlags::SHARED, &share.account, 0).unwrap()
    };
    // SAFETY: mapped just now, and aligned.
    let doorbell = unsafe {
        &*address.cast::<u8>().add(account::DOORBELL as usize).cast::<std::sync::atomic::AtomicU32>()
    };
    doorbell.fetch_add(1, SeqCst);
    futex::wake(doorbell, futex::Flags::empty(), 1).unwrap();
}
