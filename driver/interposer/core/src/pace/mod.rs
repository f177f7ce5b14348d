//! Compute time: launches wait where a share has had its part of the device.
//!
//! The unit is a nanosecond of the device's time, whatever the width of the kernel: that is what
//! neighbours lose. A share has a stock of it that fills by the clock ([`bucket`]); each
//! launch is charged what its kernel is known to cost ([`costs`]) before it goes, and what it
//! really took is found by events round some launches, which are looked at later
//! ([`samples`]). The difference is charged or given back, so an estimate that is wrong is
//! wrong for some launches, not for good.
//!
//! A process that dies takes with it what it knows. So its slot on the account page says what it owes and since when work may run
//! that is not paid for: whoever finds it dead charges the share for that ([`Slot::owes`],
//! [`Slot::unmeasured`]), and a new process for each kernel gains nothing. What a program has waited for is looked at
//! when the wait is over, so that one that ends well is charged what it had.
//!
//! A process takes from the share's stock in grants and spends them by itself, so the common
//! launch writes no line that another process writes. Who finds nothing sleeps until the time at
//! which there is something, on the gate's futex, so that the node can wake it; nobody
//! spins and nobody holds anything meanwhile. Nothing is ever synchronised with the device.
//!
//! The node corrects what cannot be seen from here: a kernel that is cut by time slices of
//! neighbours looks longer than it is, and the node knows by NVML what the share really had. It
//! says so by the rate on the policy page, which it grants for a few seconds. Without the node a program that
//! does not set out to be mismeasured has less than its part, never more.

mod bucket;
mod costs;
mod quick;
mod runs;
mod samples;
#[cfg(all(test, loom))]
mod threads;

use crate::device::Device;
use crate::place::Place;
use crate::system::System;
pub(crate) use bucket::SECOND;
use bucket::{BURST, Bucket};
pub(crate) use costs::Costs;
pub use costs::Work;
use costs::{Charge, Cost};
use divvy_pages::Flags;
use divvy_pages::account::Slot;
use divvy_pages::policy::UNBOUNDED;
use divvy_pages::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
pub(crate) use quick::Quick;
use runs::Measure;
pub use samples::Timer;
use samples::{BUSY, Samples};

/// Measured work that is under way at most, in nanoseconds, when more is launched: a device is
/// kept busy by less, and what is queued nobody can take back.
const DEPTH: i64 = 8_000_000;
/// The same where nothing else bounds what is queued, as the share may have all of the device: the node
/// may close the gate at any moment, for somebody who is not to wait for long.
const SHORT: i64 = 2_000_000;
/// Of what was charged too little, so much is charged at once, or with a later launch, in nanoseconds.
const AT_ONCE: i64 = 2_000_000;
/// A launch waits no longer than this for others to end, in nanoseconds.
const PATIENCE: u64 = SECOND;
/// A gate that is closed without a time lets one launch through in each such time, in nanoseconds: a node
/// that died with the gate closed starves nobody.
const STARVED: u64 = SECOND;

/// What a process has of a device's time. Zeros are a process that has nothing yet.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Pace {
    /// Nanoseconds that it may still launch.
    credit: AtomicI64,
    /// When a closed gate last let a launch through.
    passed: AtomicU64,
    /// Nanoseconds that launches were charged too little, to be paid with later ones.
    owed: AtomicI64,
    /// Whether, when it last took from the stock, the node said what the share may have, and so knows what it had.
    watched: AtomicU32,
    _word: u32,
    /// What the share was told that it owes.
    told: AtomicU64,
    _line: [u64; 3],
    samples: Samples,
}

impl Pace {
    /// Before a call that may end a context.
    pub(crate) fn leaves(&self, context: u64, nap: impl Fn()) {
        self.samples.leaves(context, nap);
    }

    /// After it.
    pub(crate) fn left(&self, is_gone: bool) {
        self.samples.left(is_gone);
    }

    /// Charges or gives back what was measured. A large debt, as of one measured launch that stands for
    /// many, is paid in instalments: at once it would be a stall.
    fn settle(&self, difference: i64) {
        let mut difference = difference;
        if difference > 0 {
            // What is given back is taken off the debt first.
            let owed = self.owed.load(Relaxed).clamp(0, difference);
            self.owed.fetch_sub(owed, Relaxed);
            difference -= owed;
        } else if difference < -AT_ONCE {
            self.owed.fetch_add(-AT_ONCE - difference, Relaxed);
            difference = -AT_ONCE;
        }
        self.credit.fetch_add(difference, Relaxed);
    }

    /// What it has had and not paid, in nanoseconds: what launches are to pay, and what it has launched beyond its credit.
    fn owes(&self) -> u64 {
        let sum = self.owed.load(Relaxed).max(0).saturating_sub(self.credit.load(Relaxed).min(0));
        sum.unsigned_abs()
    }

    /// A launch of that cost pays for itself, and something of the debt; whether there was credit for it.
    #[inline]
    fn pay(&self, cost: i64) -> bool {
        let costs = cost + self.instalment(cost);
        self.credit.fetch_sub(costs, Relaxed) >= costs
    }

    /// What a launch of that cost pays of the debt.
    #[inline]
    fn instalment(&self, cost: i64) -> i64 {
        let owed = self.owed.load(Relaxed);
        if owed <= 0 {
            return 0;
        }
        let part = instalment(owed, cost);
        self.owed.fetch_sub(part, Relaxed);
        part
    }
}

/// Of what is owed, a launch of that cost pays a quarter, of no more than it costs itself, or what is charged at once
/// if that is more: after a long kernel a wait twice as long would be a stall, and where neighbours make some launches look longer
/// and others shorter, most of a debt is given back before it is paid.
fn instalment(owed: i64, cost: i64) -> i64 {
    let part = owed.min(cost);
    part.min(AT_ONCE.max(part / 4))
}

impl<S: System> Device<'_, S> {
    fn pace(&self) -> Option<&Pace> {
        self.local.paces.get(self.index as usize)
    }

    /// Launches by `call`, when the share's time has come. `call` answers as the driver does: 0 is success. Of the
    /// `only` device that the process sees it is remembered what the next launches need ([`Ledger::goes`]).
    #[inline]
    pub fn launch(&self, work: Work, timer: &impl Timer, only: bool, call: impl FnOnce() -> i32) -> i32 {
        // All shares of the device are limited; with one that is not, the container has all of it.
        let (mut is_paced, mut is_open) = (true, true);
        for place in self.places.places() {
            let said = place.at_launch();
            is_paced &= said.is_paced;
            is_open &= said.is_open;
            if let Some(page) = said.called {
                page.doorbell().fetch_add(1, Relaxed);
                self.ledger.system.wake(page.doorbell());
            }
        }
        let Some(pace) = self.pace() else { return call() };
        if !is_paced {
            if !is_open {
                self.wait_for_gate(pace);
            }
            return call();
        }
        if only && is_open {
            self.remember(pace);
        }
        let charge = self.local.costs.charge(work, || self.ledger.system.now());
        if !pace.pay(charge.nanoseconds) || !is_open {
            self.wait_for_credit(pace, timer);
        }
        let answer = match charge.measure {
            Measure::No => call(),
            _ => self.measured(pace, &charge, timer, call),
        };
        if answer != 0 {
            pace.credit.fetch_add(charge.nanoseconds, Relaxed);
        }
        answer
    }

    #[cold]
    fn measured(
        &self,
        pace: &Pace,
        charge: &Charge<'_>,
        timer: &impl Timer,
        call: impl FnOnce() -> i32,
    ) -> i32 {
        self.wait_for_others(pace, charge.cost, timer);
        let now = || self.ledger.system.now();
        let sample = pace.samples.begin(timer, charge, now, |since| self.tell(|slot| slot.unmeasured(since)));
        let answer = call();
        if let Some(sample) = sample {
            charge.cost.goes(1);
            sample.end(timer, answer == 0);
        }
        answer
    }

    fn harvest(&self, pace: &Pace, timer: &impl Timer) {
        let is_watched = pace.watched.load(Relaxed) != 0;
        let now = || self.ledger.system.now();
        let tell = |since| self.tell(|slot| slot.unmeasured(since));
        pace.settle(pace.samples.harvest(timer, &self.local.costs, is_watched, now, tell));
        let owes = pace.owes();
        if pace.told.swap(owes, Relaxed) != owes {
            self.tell(|slot| slot.owes(owes));
        }
        if let Some(measured) = pace.samples.untold() {
            self.tell(|slot| slot.measured(measured));
        }
    }

    /// The program has waited for the device, or asked whether it is done: what it launched is looked at now, as it may
    /// launch nothing more.
    pub fn has_waited(&self, timer: &impl Timer) {
        if let Some(pace) = self.pace().filter(|pace| pace.samples.is_any()) {
            self.harvest(pace, timer);
        }
    }

    /// Until enough of what was measured has ended, of this kernel too while little is known of it. Nobody is woken by that, so
    /// it is looked for.
    fn wait_for_others(&self, pace: &Pace, cost: &Cost, timer: &impl Timer) {
        let system = &self.ledger.system;
        let mut pause = 20_000;
        let mut start = None;
        loop {
            // Whoever waits here is the next to launch.
            if !self.is_open() {
                self.wait_for_gate(pace);
            }
            self.harvest(pace, timer);
            let has_room = pace.samples.has_room(SHORT) || pace.samples.has_room(DEPTH) && !self.has_all();
            if cost.may_go() && has_room || self.observes() {
                return;
            }
            let now = system.now();
            if now.saturating_sub(*start.get_or_insert(now)) > PATIENCE {
                pace.samples.give_up();
                return;
            }
            self.sleep(now, pause);
            pause = (pause * 2).min(BUSY as u64);
        }
    }

    /// For so long, or until the node changes the gate. That may say that it is closed, if the time for which it is is over.
    fn sleep(&self, now: u64, pause: u64) {
        match self.places.places().find_map(Place::gate) {
            Some(gate) => self.ledger.system.wait(gate, gate.load(Relaxed), now.saturating_add(pause)),
            None => self.ledger.system.nap(pause),
        }
    }

    /// Some share may have all of the device, so that nothing but the depth bounds what is queued.
    fn has_all(&self) -> bool {
        let now = self.ledger.system.now();
        self.places.places().any(|place| place.rate(now) == UNBOUNDED)
    }

    /// Nothing is held up, all is counted.
    fn observes(&self) -> bool {
        self.places.places().all(|place| place.flags().has(Flags::OBSERVE_ONLY))
    }

    fn is_open(&self) -> bool {
        self.places.places().all(|place| place.gate().is_none_or(|gate| gate.load(Relaxed) == 0))
    }

    /// Sleeps while the gate of any share is closed.
    fn wait_for_gate(&self, pace: &Pace) {
        let system = &self.ledger.system;
        if self.observes() {
            return;
        }
        let start = system.now();
        let _ = pace.passed.compare_exchange(0, start, Relaxed, Relaxed);
        loop {
            let now = system.now();
            let closed = self.places.places().find_map(|place| {
                let gate = place.gate()?;
                let word = gate.load(Relaxed);
                let until = match place.closed_until() {
                    0 => pace.passed.load(Relaxed).saturating_add(STARVED),
                    until => until,
                };
                (word != 0 && now < until).then_some((gate, word, until))
            });
            let Some((gate, word, until)) = closed else { break };
            system.wait(gate, word, until);
        }
        let now = system.now();
        pace.passed.store(now, Relaxed);
        self.count(0, now.saturating_sub(start));
    }

    /// Takes from the share's stock what the process lacks, and sleeps until there is some.
    #[cold]
    fn wait_for_credit(&self, pace: &Pace, timer: &impl Timer) {
        let system = &self.ledger.system;
        let mut waited_since = None;
        loop {
            if !self.is_open() {
                self.wait_for_gate(pace);
            }
            self.harvest(pace, timer);
            let lacks = pace.credit.load(Relaxed).saturating_neg();
            if lacks <= 0 {
                break;
            }
            let now = system.now();
            let is_watched = self.places.places().all(|place| place.is_watched(now));
            pace.watched.store(is_watched.into(), Relaxed);
            match self.take(lacks, now) {
                Ok(taken) => {
                    pace.credit.fetch_add(taken, Relaxed);
                    self.count(taken, 0);
                }
                Err(_) if self.observes() => break,
                Err(pause) => {
                    // Told as it passes: who said it in the end only would look idle until then, and be lent away.
                    if let Some(since) = waited_since.replace(now) {
                        self.count(0, now.saturating_sub(since));
                    }
                    self.sleep(now, pause);
                }
            }
        }
        if let Some(since) = waited_since {
            self.count(0, system.now().saturating_sub(since));
        }
    }

    /// From the first share that has some; `Err`: nanoseconds until the first of them has.
    fn take(&self, lacks: i64, now: u64) -> Result<i64, u64> {
        let mut soonest = Err(SECOND);
        for place in self.places.places() {
            let Some(page) = place.account() else { continue };
            let rate = place.rate(now);
            match (Bucket { page, rate, burst: place.burst(rate) }).take(lacks, now) {
                Ok(taken) => return Ok(taken),
                Err(pause) => soonest = soonest.map_err(|least| pause.min(least)),
            }
        }
        soonest
    }

    fn count(&self, charged: i64, waited: u64) {
        self.tell(|slot| slot.worked(charged, waited));
    }

    /// Tells the node.
    pub(crate) fn tell(&self, tell: impl FnOnce(&Slot)) {
        let Some(seat) = self.places.places().next().and_then(Place::seat) else { return };
        if let Some(slot) = seat.page.slots().get(usize::from(seat.slot)) {
            tell(slot);
        }
    }
}

/// What a policy without one keeps.
pub(crate) fn burst(microseconds: u64) -> u64 {
    if microseconds == 0 { BURST } else { microseconds.saturating_mul(1000) }
}

#[cfg(test)]
mod tests {
    use super::instalment;

    #[test]
    fn a_debt_is_paid_in_parts_and_never_doubles_the_wait_for_a_long_kernel() {
        let check = |owed: i64, cost: i64, part: i64| {
            assert_eq!(instalment(owed * 1000, cost * 1000), part * 1000, "{owed} of {cost}");
        };
        check(1500, 10_000, 1500);
        check(3000, 10_000, 2000);
        check(10_000, 10_000, 2500);
        check(100_000, 10_000, 2500);
        check(10_000, 100_000, 2500);
        check(100_000, 20, 20);
    }
}
