//! Pages as files, a desk that has them, and a clock that the test moves.

use super::super::controller::{self, Entitlement, NS_PER_SECOND};
use super::super::doorbell::WakeEvent;
use super::super::grants::SPARE;
use super::share_state::{BURST, GRANT, HOLD, MOST, RESTS, STEADY};
use super::*;
use crate::shares::MappedPolicy;
use divvy_pages::{Compute, Flags, Memory, Policy, PolicyPage, Text, account};
use rustix::thread::futex;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;

mod doors;
mod gates;
mod instances;

pub(crate) const GPU: GpuUuid = GpuUuid([1; 16]);
const POINT: u64 = NS_PER_SECOND / 100;
const MS: u64 = 1_000_000;

/// A share with its pages in a directory.
pub(crate) struct Share {
    key: ShareKey,
    policy: PathBuf,
    account: Arc<File>,
    compute: Compute,
    page: MappedPolicy,
}

impl Share {
    pub(crate) fn new(dir: &Path, name: &str, compute: Compute) -> Self {
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
        let page = MappedPolicy::open(&path).unwrap();
        Self { key: (name.into(), "0".into()), policy: path, account: Arc::new(account), compute, page }
    }

    /// The plan of an audit in which the share demands these points.
    pub(crate) fn planned(&self, wants: u64) -> PlannedShare {
        let standing = ShareStatus {
            terms: Entitlement::of(self.compute),
            is_high: self.compute.priority > 0,
            is_limited: self.compute.is_limited(),
            wants: wants * POINT,
            is_awake: false,
            turn: None,
            attribution: grants::Attribution::PerProcess,
            memory: controller::ControllerState::default(),
        };
        let (policy, account) = (self.policy.clone(), Arc::clone(&self.account));
        PlannedShare {
            key: self.key.clone(),
            mig: None,
            policy,
            account,
            compute: self.compute,
            suits_quanta: true,
            standing,
        }
    }

    pub(crate) fn account(&self) -> &File {
        &self.account
    }

    pub(crate) fn page(&self) -> &PolicyPage {
        self.page.page().unwrap()
    }

    /// Points that it may have, if it is held to any.
    pub(crate) fn rate(&self, now: u64) -> Option<u64> {
        let rate = || self.page().granted(now).unwrap_or(NS_PER_SECOND).min(NS_PER_SECOND) / POINT;
        self.page().is_rate_limited().then(rate)
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
        let doorbell = WakeEvent::read(&self.account).unwrap().doorbell + 1;
        self.account.write_all_at(&doorbell.to_le_bytes(), account::DOORBELL).unwrap();
        self.launches(now);
    }

    fn is_closed(&self, now: u64) -> bool {
        self.page().gate().load(SeqCst) != 0 && now < self.page().gate_closed_until()
    }
}

fn shares(dir: &Path, all: &[Compute]) -> Vec<Share> {
    all.iter().enumerate().map(|(at, compute)| Share::new(dir, &format!("s{at}"), *compute)).collect()
}

fn planned(shares: &[Share], wants: &[u64]) -> Vec<PlannedShare> {
    shares.iter().zip(wants).map(|(share, wants)| share.planned(*wants)).collect()
}

fn of(cores: u32, ceiling: u32, priority: u32) -> Compute {
    Compute { cores, ceiling, priority, ..Compute::default() }
}

#[test]
fn lent_time_follows_the_activity_of_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
    let [borrower, owner] = &shares[..] else { panic!("two") };
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    assert!(desk.plan(GPU, planned(&shares, &[100, 0]), now));
    assert_eq!([borrower.rate(now), owner.rate(now)], [Some(100), Some(60)]);
    let (doors, until) = desk.doors(now);
    assert_eq!(
        (doors.len(), until),
        (1, now + RESTS + WAITS[1]),
        "it is heard, and the other one may come to rest"
    );
    desk.tick(now + MS, &WakeReason::Anybody);
    assert_eq!(borrower.rate(now), Some(100));
    let rung = now + 2 * MS;
    owner.rings(rung);
    desk.tick(rung, &WakeReason::Anybody);
    assert_eq!([borrower.rate(rung), owner.rate(rung)], [Some(40), Some(60)]);
    assert_eq!(owner.page().wakeup_request(), 0, "it is not asked again");
    let (doors, until) = desk.doors(rung);
    assert_eq!((doors.len(), until), (0, rung + BURST + HOLD + WAITS[0]));
    // It works on, and an audit that has not seen it yet changes nothing.
    owner.launches(rung + 50 * MS);
    borrower.launches(rung + 50 * MS);
    desk.tick(rung + 60 * MS, &WakeReason::Anybody);
    desk.plan(GPU, planned(&shares, &[100, 0]), rung + 61 * MS);
    assert_eq!(borrower.rate(rung), Some(40));
    let rests = rung + 71 * MS;
    desk.tick(rests, &WakeReason::Anybody);
    assert_eq!(borrower.rate(rests), Some(100));
    assert_ne!(owner.page().wakeup_request(), 0, "and is asked");
    assert_eq!(desk.doors(rests).0.len(), 1);
    assert_eq!(borrower.rate(rests + GRANT), Some(100), "an agent that is gone grants nothing");
}

#[test]
fn share_without_a_limit_is_free_only_when_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut shares = shares(dir.path(), &[of(0, 30, 0), of(0, 0, 0)]);
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[30, 100]), now);
    assert_eq!([shares[0].rate(now), shares[1].rate(now)], [Some(30), Some(70)]);
    shares[0].changes(of(0, 100, 0));
    assert_eq!(shares[0].rate(now), Some(30), "until the next audit");
    desk.plan(GPU, planned(&shares, &[100, 100]), now + NS_PER_SECOND);
    assert_eq!([shares[0].rate(now), shares[1].rate(now)], [Some(50), Some(50)]);
    shares.truncate(1);
    desk.plan(GPU, planned(&shares, &[100]), now + 2 * NS_PER_SECOND);
    assert_eq!(shares[0].rate(now), None);
    shares[0].changes(of(0, 30, 0));
    desk.plan(GPU, planned(&shares, &[30]), now + 3 * NS_PER_SECOND);
    assert_eq!((shares[0].rate(now), shares[0].page().is_agent_limited()), (Some(30), false));
}

#[test]
fn idle_time_is_lent_before_the_next_audit() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
    let [borrower, owner] = &shares[..] else { panic!("two") };
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[100, 60]), now);
    assert_eq!([borrower.rate(now), owner.rate(now)], [Some(40), Some(60)]);
    let rests = now + RESTS + MS;
    borrower.launches(rests);
    desk.tick(rests, &WakeReason::Anybody);
    assert_eq!([borrower.rate(rests), owner.rate(rests)], [Some(100), Some(60)]);
    // The audit looks back.
    desk.plan(GPU, planned(&shares, &[100, 60]), rests + MS);
    assert_eq!(borrower.rate(rests), Some(100));
    owner.rings(rests + 2 * MS);
    desk.tick(rests + 2 * MS, &WakeReason::Anybody);
    assert_eq!(borrower.rate(rests), Some(40));
    // In debt for a long kernel it does not rest, however long ago it launched that.
    owner.account.write_all_at(&(-(NS_PER_SECOND as i64)).to_le_bytes(), account::BALANCE).unwrap();
    borrower.launches(rests + NS_PER_SECOND);
    desk.tick(rests + NS_PER_SECOND, &WakeReason::Anybody);
    assert_eq!(borrower.rate(rests), Some(40));
}

#[test]
fn possibly_idle_shares_are_checked_soon() {
    let check = |all: &[Compute], soon: u64| {
        let dir = tempfile::tempdir().unwrap();
        let shares = shares(dir.path(), all);
        let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
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
fn correction_for_co_runners_holds_while_there_are_any() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(30, 0, 0), of(60, 0, 0)]);
    let [first, other] = &shares[..] else { panic!("two") };
    let now = 1000 * NS_PER_SECOND;
    // From the earlier agent: kernels look half as long again.
    first.page().grant(45 * POINT, now + NS_PER_SECOND);
    first.page().set_agent_state([1.0, 1.5].map(f64::to_bits));
    let mut desk = GrantTable::default();
    desk.plan(GPU, planned(&shares, &[30, 60]), now);
    assert_eq!(first.rate(now), Some(45));
    let rests = now + RESTS + MS;
    first.launches(rests);
    desk.tick(rests, &WakeReason::Anybody);
    assert_eq!(first.rate(rests), Some(30), "alone");
    other.rings(rests + MS);
    desk.tick(rests + MS, &WakeReason::Anybody);
    assert_eq!(first.rate(rests), Some(45));
    let mut company = |at| desk.since(GPU, at)[&first.key].company;
    let mean = company(now + NS_PER_SECOND);
    assert_eq!((mean.is_beside, mean.has_changed), (true, false), "three times is on the mean");
    assert!(company(now + NS_PER_SECOND + NS_PER_SECOND / 4).has_changed, "of so little nothing follows");
    assert!(!company(now + 2 * NS_PER_SECOND).has_changed);
}

#[test]
fn gates_are_closed_only_while_high_priority_is_active() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(0, 0, 1), of(0, 0, 0)]);
    let [high, low] = &shares[..] else { panic!("two") };
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[5, 100]), now);
    assert!(!low.is_closed(now) && low.page().is_rate_limited() && high.page().is_rate_limited());
    high.rings(now);
    desk.tick(now, &WakeReason::Anybody);
    assert!(low.is_closed(now) && !high.is_closed(now));
    assert!(!low.is_closed(now + CLOSED), "a node that is gone keeps nobody out");
    let mut open = 0;
    for ms in 0..2000 {
        let at = now + ms * MS;
        high.launches(at);
        desk.tick(at, &WakeReason::Anybody);
        open += u64::from(!low.is_closed(at));
    }
    assert_eq!(open, 10, "it is let through for as long in each second");
    let rests = now + 2100 * MS;
    desk.tick(rests, &WakeReason::Anybody);
    assert!(!low.is_closed(rests));
    high.rings(rests);
    desk.tick(rests, &WakeReason::Anybody);
    assert!(low.is_closed(rests));
    desk.leave();
    assert!(!low.is_closed(rests), "nor does one that ends");
}

#[test]
fn share_in_turn_is_alone() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(0, 0, 0), of(0, 0, 0), of(0, 0, 0)]);
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[100, 100, 0]), now);
    let order = || shares[..2].iter().map(|share| share.key.clone()).collect();
    assert!(desk.turns(GPU, order(), NS_PER_SECOND, now));
    let closed = |now| shares.iter().map(|share| share.is_closed(now)).collect::<Vec<_>>();
    assert_eq!(closed(now), [false, true, false]);
    let mut at = now;
    while at < now + NS_PER_SECOND {
        shares[0].launches(at);
        desk.tick(at, &WakeReason::Anybody);
        assert_eq!((closed(at), shares[0].rate(at)), (vec![false, true, false], Some(100)));
        at += 10 * MS;
    }
    desk.tick(at, &WakeReason::Anybody);
    assert_eq!(closed(at), [true, false, false]);
    desk.turns(GPU, Vec::new(), 0, at);
    assert_eq!(closed(at), [false; 3]);
}

#[test]
fn first_activity_is_reported_as_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(30, 0, 0), of(60, 0, 0)]);
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[0, 60]), now);
    assert_eq!(desk.moved(now), [ActivityChange { gpu: GPU, is_first: true }], "the other one works");
    // It has not been idle for as long as the idle timeout.
    shares[0].rings(now + 10 * MS);
    desk.tick(now + 10 * MS, &WakeReason::Anybody);
    assert_eq!(desk.moved(now), [ActivityChange { gpu: GPU, is_first: true }]);
    let mut has_moved = |at| desk.since(GPU, at)[&shares[0].key].company.has_moved;
    assert!(has_moved(now + NS_PER_SECOND));
    assert!(!has_moved(now + 2 * NS_PER_SECOND));
    // It rests, and begins again; the next time is told of when it is heard.
    let mut check = |seconds: u64, moved: &[ActivityChange]| {
        let later = now + seconds * NS_PER_SECOND;
        desk.tick(later, &WakeReason::Anybody);
        shares[0].rings(later + MS);
        desk.tick(later + MS, &WakeReason::Anybody);
        assert_eq!(desk.moved(later + MS), moved, "after {seconds} s");
    };
    check(3, &[]);
    check(6, &[ActivityChange { gpu: GPU, is_first: false }]);
    check(9, &[]);
}

#[test]
fn grants_are_averaged_over_time() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[100, 0]), now);
    shares[0].launches(now + NS_PER_SECOND / 4);
    shares[1].rings(now + NS_PER_SECOND / 4);
    desk.tick(now + NS_PER_SECOND / 4, &WakeReason::Anybody);
    let had = desk.since(GPU, now + NS_PER_SECOND);
    let granted = |share: &Share| had[&share.key].memory.granted().0 / POINT;
    assert_eq!([granted(&shares[0]), granted(&shares[1])], [55, 60]);
}

#[test]
fn new_agent_continues_from_the_page_state() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path(), &[of(30, 0, 0), of(20, 100, 0), of(0, 0, 0)]);
    let now = 1000 * NS_PER_SECOND;
    // Trims beside others, and last a page of an agent that kept nothing.
    let kept = [[1.0, 1.5], [1.0, 1.25], [0.0, 0.0]];
    for (share, kept) in shares.iter().zip(kept) {
        share.page().grant(45 * POINT, now + NS_PER_SECOND);
        share.page().set_agent_state(kept.map(f64::to_bits));
    }
    shares[2].page().set_agent_limited(true);
    shares[2].page().request_wakeup(true, 7);
    let mut desk = GrantTable::default();
    desk.plan(GPU, planned(&shares, &[30, 100, 0]), now);
    let rates: Vec<_> = shares.iter().map(|share| share.rate(now)).collect();
    // The targets: 30, the remainder, and the own part of each on demand.
    assert_eq!(rates, [Some(45), Some(87), Some(25)]);
    assert!(shares[2].page().wakeup_request() > 7);
    drop(desk);
    let rate_after = |seconds: u64| {
        let at = now + seconds * NS_PER_SECOND;
        GrantTable::default().plan(GPU, planned(&shares, &[30, 100, 0]), at);
        shares[0].rate(at)
    };
    assert_eq!(rate_after(20), Some(45), "it was away for a while");
    assert_eq!(rate_after(120), Some(30), "what was granted long ago says nothing");
}

#[test]
fn recreated_pages_are_another_share() {
    let dir = tempfile::tempdir().unwrap();
    let mut shares = shares(dir.path(), &[of(20, 100, 0), of(60, 0, 0)]);
    let (mut desk, now) = (GrantTable::default(), 1000 * NS_PER_SECOND);
    desk.plan(GPU, planned(&shares, &[100, 0]), now);
    std::fs::rename(dir.path().join("s1"), dir.path().join("gone")).unwrap();
    shares[1] = Share::new(dir.path(), "s1", of(60, 0, 0));
    desk.plan(GPU, planned(&shares, &[100, 0]), now + MS);
    assert_ne!(shares[1].page().wakeup_request(), 0);
    shares[1].rings(now + 2 * MS);
    desk.tick(now + 2 * MS, &WakeReason::Anybody);
    assert_eq!(shares[0].rate(now + 2 * MS), Some(40));
    // One that is released is divided no more.
    let released = shares.remove(0);
    desk.plan(GPU, planned(&shares, &[0]), now + 3 * MS);
    assert_eq!(desk.since(GPU, now + 4 * MS).len(), 1);
    assert_eq!(released.page().wakeup_request(), 0);
}

/// A launch of a process of the share, on its mapping of the account page.
#[allow(unsafe_code)]
pub(crate) fn launch(share: &Share) {
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
