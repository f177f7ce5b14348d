//! Pages as files, a table that grants quanta on them, and a clock that the test moves.

use super::super::grant_table::tests::{GPU, Share};
use super::*;
use divvy_pages::account::{self, ATTENTION, BALANCE, DOORBELL, SLOT};

const MS: u64 = 1_000_000;
const START: u64 = 1_000 * MS;

/// A device with shares of one process each.
struct Fixture {
    _dir: tempfile::TempDir,
    shares: Vec<Share>,
    table: QuantumTable,
    now: u64,
}

impl Fixture {
    fn new(policies: &[Compute]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let named = policies.iter().enumerate();
        let shares: Vec<Share> =
            named.map(|(at, compute)| Share::new(dir.path(), &format!("s{at}"), *compute)).collect();
        shares.iter().for_each(|share| write_account(share, 0, 0));
        let mut fixture = Self { _dir: dir, shares, table: QuantumTable::default(), now: START };
        fixture.plan();
        fixture
    }

    fn plan(&mut self) {
        let planned = self.shares.iter().map(|share| share.planned(0)).collect();
        self.table.plan(GPU, planned, self.now);
        self.tick();
    }

    fn tick(&mut self) {
        self.table.tick(self.now, &WakeReason::Anybody);
    }

    /// Moves the clock to the next time at which the table wants to look, at most to `limit`.
    fn pass(&mut self, limit: u64) {
        while self.now < limit {
            self.now = self.table.doors().1.clamp(self.now + 1, limit);
            self.table.tick(self.now, &WakeReason::Nobody);
        }
    }

    /// The slot of a share says this, and it rings.
    fn says(&mut self, index: usize, state: u64, number: u32) {
        let account = self.shares[index].account();
        account.write_all_at(&(u64::from(number) | state << 32).to_le_bytes(), HEADER as u64 + 208).unwrap();
        let mut doorbell = [0; 4];
        account.read_exact_at(&mut doorbell, DOORBELL).unwrap();
        let rung = u32::from_le_bytes(doorbell) + 1;
        account.write_all_at(&rung.to_le_bytes(), DOORBELL).unwrap();
        self.now += 1000;
        self.tick();
    }

    fn waits(&mut self, index: usize) {
        let number = self.number(index);
        self.says(index, 3, number);
    }

    fn works(&mut self, index: usize) {
        let number = self.number(index);
        self.says(index, 2, number);
    }

    fn pauses(&mut self, index: usize) {
        let number = self.number(index);
        self.says(index, 1, number);
    }

    fn is_charged(&self, index: usize, ns: u64) {
        self.shares[index].account().write_all_at(&ns.to_le_bytes(), BALANCE + 24).unwrap();
    }

    fn number(&self, index: usize) -> u32 {
        self.shares[index].page().quantum().load(std::sync::atomic::Ordering::SeqCst)
    }

    fn ends(&self, index: usize) -> u64 {
        self.shares[index].page().quantum_ends()
    }

    /// Which shares have the device.
    fn holders(&self) -> Vec<usize> {
        (0..self.shares.len()).filter(|index| self.number(*index) > 0).collect()
    }

    fn late(&self) -> u64 {
        self.usage().iter().map(|usage| usage.late_hand_overs).sum()
    }

    /// The counters of the shares, by name.
    fn usage(&self) -> Vec<QuantumUsage> {
        self.table.usage(GPU, self.now).into_values().collect()
    }
}

/// An account with this bucket and one process.
fn write_account(share: &Share, balance: i64, refilled_at: u64) {
    let mut page = account::fresh().to_vec();
    page.resize(HEADER + SLOT, 0);
    page[BALANCE as usize..][..8].copy_from_slice(&balance.to_le_bytes());
    page[BALANCE as usize + 8..][..8].copy_from_slice(&refilled_at.to_le_bytes());
    page[256] = 1;
    // A living owner with this test's PID on the host.
    let owner = (7_u64 | 2 << 48).to_le_bytes();
    page[HEADER..HEADER + 8].copy_from_slice(&owner);
    page[HEADER + 128..HEADER + 136].copy_from_slice(&owner);
    page[HEADER + 152..HEADER + 156].copy_from_slice(&std::process::id().to_le_bytes());
    // It has no work in flight, and its library knows quanta.
    page[HEADER + 208..HEADER + 216].copy_from_slice(&(1_u64 << 32).to_le_bytes());
    share.account().write_all_at(&page, 0).unwrap();
}

fn of(cores: u32, priority: u32) -> Compute {
    Compute { cores, priority, ..Compute::default() }
}

#[test]
fn share_alone_has_the_device_until_another_waits() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    assert!(fixture.holders().is_empty());
    fixture.waits(0);
    assert_eq!((fixture.holders(), fixture.ends(0)), (vec![0], 0));
    fixture.works(0);
    fixture.pass(START + 500 * MS);
    assert_eq!((fixture.holders(), fixture.ends(0)), (vec![0], 0));
    fixture.waits(1);
    assert_eq!((fixture.holders(), fixture.ends(0)), (vec![0], fixture.now));
    fixture.waits(0);
    assert_eq!(fixture.holders(), [1]);
    assert!(fixture.ends(1) > fixture.now);
}

#[test]
fn granted_time_includes_the_current_quantum() {
    let mut fixture = Fixture::new(&[of(30, 0), of(0, 0)]);
    let granted = |fixture: &Fixture| -> Vec<_> {
        fixture.usage().iter().map(|usage| (usage.granted_ns, usage.hand_overs)).collect()
    };
    fixture.waits(0);
    let began = fixture.now;
    fixture.works(0);
    fixture.pass(START + 500 * MS);
    assert_eq!(granted(&fixture), [(fixture.now - began, 1), (0, 0)]);
    fixture.waits(1);
    fixture.waits(0);
    let handed_over = fixture.now;
    fixture.pass(handed_over + MS);
    assert_eq!(granted(&fixture), [(handed_over - began, 1), (MS, 1)]);
    fixture.shares.remove(0);
    fixture.plan();
    assert_eq!(fixture.usage(), [], "the other share has no settings, so it needs no quanta");
}

#[test]
fn paused_holder_gives_the_device_up() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    fixture.waits(0);
    fixture.works(0);
    fixture.waits(1);
    fixture.waits(0);
    fixture.works(1);
    fixture.pauses(1);
    fixture.pass(fixture.now + PAUSE_NS / 2);
    assert_eq!(fixture.holders(), [1], "a short pause");
    fixture.works(1);
    fixture.pass(fixture.now + 2 * PAUSE_NS);
    assert_eq!(fixture.holders(), [1], "it goes on");
    fixture.pauses(1);
    fixture.pass(fixture.now + PAUSE_NS);
    assert_eq!(fixture.holders(), [0]);
}

#[test]
fn holder_that_does_not_complete_loses_exclusivity() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    fixture.waits(0);
    fixture.works(0);
    fixture.waits(1);
    let ends = fixture.ends(0);
    fixture.pass(ends + LATE_NS - 1);
    assert_eq!((fixture.holders(), fixture.late()), (vec![0], 0));
    fixture.pass(ends + LATE_NS);
    assert_eq!((fixture.holders(), fixture.late()), (vec![1], 1));
    // Beside it the share has quanta, for which it is charged half.
    assert!(fixture.ends(1) > fixture.now);
    fixture.works(1);
    fixture.is_charged(1, 10 * MS);
    fixture.waits(1);
    assert_eq!(fixture.holders(), [1], "it goes on beside the kernel that does not end");
}

#[test]
fn dead_holder_delays_others_for_a_moment() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    // No process has this PID.
    let account = fixture.shares[0].account();
    account.write_all_at(&(i32::MAX as u32).to_le_bytes(), HEADER as u64 + 152).unwrap();
    fixture.waits(0);
    fixture.works(0);
    fixture.waits(1);
    fixture.pass(fixture.ends(0) + CHECK_NS);
    assert_eq!((fixture.holders(), fixture.late()), (vec![1], 0));
}

#[test]
fn share_of_high_priority_ends_the_quantum() {
    let mut fixture = Fixture::new(&[of(0, 0), of(0, 0), of(0, 1)]);
    fixture.waits(0);
    fixture.works(0);
    fixture.waits(1);
    fixture.waits(0);
    fixture.works(1);
    assert!(fixture.ends(1) > fixture.now + 10 * MS);
    fixture.waits(2);
    assert_eq!(fixture.ends(1), fixture.now);
    fixture.waits(1);
    assert_eq!(fixture.holders(), [2]);
}

#[test]
fn share_that_never_woke_does_not_keep_the_device() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    fixture.waits(0);
    let number = fixture.number(0);
    fixture.pass(START + 2 * LATE_NS);
    assert!(fixture.holders().is_empty());
    fixture.says(0, 3, 0);
    assert!(fixture.number(0) > number, "it is granted again when it wakes");
}

#[test]
fn what_is_written_expires_without_an_agent() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    let expires = |fixture: &Fixture| fixture.shares[0].page().quanta_expire();
    assert_eq!(expires(&fixture), START + EXPIRE_NS);
    fixture.pass(START + EXPIRE_NS);
    assert!(expires(&fixture) > fixture.now + EXPIRE_NS / 2);
    fixture.table.leave();
    assert_eq!(expires(&fixture), 0);
}

#[test]
fn shares_that_end_or_need_no_division_are_released() {
    let mut fixture = Fixture::new(&[of(30, 0), of(0, 0)]);
    assert!(fixture.shares.iter().all(|share| share.page().is_exclusive()));
    let removed = fixture.shares.remove(0);
    fixture.plan();
    assert!(!removed.page().is_exclusive());
    assert!(!fixture.shares[0].page().is_exclusive(), "the other has no settings");
}

#[test]
fn truncated_account_stops_nobody() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    fixture.waits(0);
    fixture.works(0);
    fixture.shares[0].account().set_len(ATTENTION).unwrap();
    fixture.waits(1);
    fixture.pass(fixture.now + MS);
    assert_eq!(fixture.holders(), [1]);
}

#[test]
fn sleeping_share_does_not_keep_others_waiting() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    fixture.waits(1);
    fixture.works(1);
    // It is stopped while it waits, so it never begins.
    fixture.waits(0);
    fixture.is_charged(1, 10 * MS);
    fixture.waits(1);
    assert_eq!(fixture.holders(), [0]);
    fixture.pass(fixture.ends(0) + PAUSE_NS);
    assert_eq!(fixture.holders(), [1]);
    fixture.works(1);
    fixture.is_charged(1, 20 * MS);
    fixture.waits(1);
    assert_eq!(fixture.holders(), [1], "it does not get the device again");
}

#[test]
fn share_that_worked_and_waits_again_is_not_asleep() {
    let mut fixture = Fixture::new(&[of(50, 0), of(50, 0)]);
    fixture.waits(0);
    fixture.works(0);
    fixture.waits(1);
    fixture.is_charged(0, 10 * MS);
    fixture.waits(0);
    assert_eq!(fixture.holders(), [1]);
    // It worked, and waits for the next quantum at the moment in which this one is taken.
    fixture.is_charged(1, 20 * MS);
    fixture.now = fixture.ends(1) + PAUSE_NS;
    fixture.says(1, 3, 0);
    assert_eq!(fixture.holders(), [0]);
    fixture.works(0);
    fixture.is_charged(0, 40 * MS);
    fixture.waits(0);
    assert_eq!(fixture.holders(), [1]);
}

#[test]
fn share_that_was_just_granted_the_device_has_time_to_wake() {
    let mut fixture = Fixture::new(&[of(50, 0), of(50, 0)]);
    fixture.waits(0);
    let granted = fixture.now;
    fixture.waits(1);
    assert_eq!((fixture.holders(), fixture.ends(0)), (vec![0], granted + QUANTUM_MIN_NS));
}

#[test]
fn new_agent_continues_the_bucket_of_the_page() {
    let check = |balance_ms: i64, expected: Vec<usize>| {
        let dir = tempfile::tempdir().unwrap();
        let share = Share::new(dir.path(), "s", of(30, 0));
        write_account(&share, balance_ms * MS as i64, START);
        let mut fixture =
            Fixture { _dir: dir, shares: vec![share], table: QuantumTable::default(), now: START };
        fixture.plan();
        fixture.waits(0);
        assert_eq!(fixture.holders(), expected, "{balance_ms} ms");
    };
    check(20, vec![0]);
    check(-50, vec![]);
}

#[test]
fn forged_charge_is_no_debt_without_bound() {
    let mut fixture = Fixture::new(&[of(50, 0), of(50, 0)]);
    fixture.waits(0);
    fixture.works(0);
    fixture.is_charged(0, u64::MAX);
    fixture.waits(1);
    fixture.pass(START + 100 * MS);
    assert!(fixture.usage()[0].used_ns <= 100 * MS, "{:?}", fixture.usage());
}

/// The virtual time of a share, relative to the other one.
fn charged_ms(fixture: &Fixture, index: usize) -> u64 {
    let device = fixture.table.devices.values().next().expect("a device");
    device.law.ledgers[index].virtual_ns() / MS
}

#[test]
fn charges_are_corrected_while_active_time_is_unexplained() {
    let check = |unexplained: Option<Unexplained>, used_ms: u64, expected: u64| {
        let mut fixture = Fixture::new(&[of(50, 0), of(50, 0)]);
        fixture.waits(0);
        fixture.works(0);
        fixture.waits(1);
        let device = *fixture.table.devices.keys().next().expect("a device");
        if let Some(unexplained) = unexplained {
            fixture.table.correct(&device, unexplained, fixture.now);
        }
        let before = charged_ms(&fixture, 0);
        fixture.now += 10 * MS;
        fixture.is_charged(0, used_ms * MS);
        fixture.waits(0);
        assert_eq!(fixture.holders(), [1]);
        assert_eq!((charged_ms(&fixture, 0) - before).div_ceil(2), expected, "{used_ms}");
    };
    let low = |fixture: &Fixture| {
        Unexplained::LowCharges(vec![fixture.table.usage(GPU, 0).into_keys().next().unwrap()])
    };
    let first = low(&Fixture::new(&[of(50, 0), of(50, 0)]));
    check(None, 8, 8);
    check(Some(Unexplained::Ungranted), 8, 4);
    check(Some(first.clone()), 0, 10);
    check(Some(first), 8, 10);
}

#[test]
fn log_has_quanta_and_the_time_of_late_work() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    let granted = |fixture: &Fixture| -> Vec<u64> {
        let grants = fixture.table.grants(GPU, fixture.now);
        grants.into_values().flatten().map(|share| share.level.granted).collect()
    };
    fixture.waits(0);
    let began = fixture.now;
    fixture.works(0);
    fixture.waits(1);
    let late = fixture.ends(0) + LATE_NS;
    fixture.pass(late + 5 * MS);
    assert_eq!(fixture.holders(), [1]);
    assert_eq!(granted(&fixture), [fixture.now - began, fixture.now - late]);
    fixture.waits(0);
    let drained = fixture.now;
    fixture.pass(drained + MS);
    assert_eq!(granted(&fixture)[0], drained - began);
}

#[test]
fn work_during_a_stall_of_the_agent_is_no_work_without_a_grant() {
    let mut fixture = Fixture::new(&[of(30, 0), of(50, 0)]);
    let knows = |fixture: &Fixture, from: u64| {
        fixture.table.grants(GPU, fixture.now).into_values().flatten().all(|share| share.log.knows(from))
    };
    fixture.pass(START + 60_000 * MS);
    let now = fixture.now;
    assert!(knows(&fixture, now - MS));
    fixture.now += EXPIRE_NS + RENEW_NS;
    fixture.tick();
    assert!(!knows(&fixture, now) && !knows(&fixture, fixture.now + EARLIER_KERNEL_NS - 1));
    assert!(knows(&fixture, fixture.now + EARLIER_KERNEL_NS));
}

#[test]
fn work_from_before_the_gate_ends_with_later_work() {
    let knows = |fixture: &Fixture| {
        let mut shares = fixture.table.grants(GPU, fixture.now).into_values().flatten();
        shares.next().is_some_and(|share| share.log.knows(fixture.now))
    };
    let check = |name: &str, act: fn(&mut Fixture), expected: bool| {
        let mut fixture = Fixture::new(&[of(50, 0), of(50, 0)]);
        fixture.pass(START + 5 * MS);
        fixture.waits(0);
        fixture.works(0);
        act(&mut fixture);
        assert_eq!(knows(&fixture), expected, "{name}");
    };
    check("it works in its first quantum", |_| (), false);
    check("its quantum has ended", |fixture| fixture.pauses(0), true);
    check("it waits for the next one", |fixture| fixture.says(0, 3, 0), true);
    let charge = |fixture: &mut Fixture| {
        fixture.is_charged(0, MS);
        fixture.works(0);
    };
    check("a batch has completed", charge, true);
}
