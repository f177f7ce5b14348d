//! Delays launches until the share has compute time, and measures some of them.

use super::bucket::{Bucket, SECOND_NS};
use super::cost_model::{Charge, Cost, Work};
use super::samples::{BUSY, Timer};
use super::sampling::Measure;
use super::state::Throttle;
use crate::pages::SharePages;
use crate::process_state::Device;
use crate::system::System;
use divvy_pages::Flags;
use divvy_pages::policy::UNBOUNDED;
use divvy_pages::sync::Ordering::Relaxed;

/// Maximum measured work in flight when more is launched, in nanoseconds. Less keeps a device busy,
/// and queued work cannot be revoked.
const MAX_IN_FLIGHT_NS: i64 = 8_000_000;
/// The same for a share without a compute limit, where nothing else bounds the queue. The node may
/// close the gate for a co-running share that must not wait for long.
const MAX_IN_FLIGHT_UNLIMITED_NS: i64 = 2_000_000;
/// How long a launch waits for measured launches to complete, in nanoseconds.
const MEASUREMENT_WAIT_TIMEOUT_NS: u64 = SECOND_NS;
/// A gate that is closed without a deadline lets one launch through per interval, in nanoseconds.
/// So a node daemon that died with the gate closed does not block the share forever.
const CLOSED_GATE_INTERVAL_NS: u64 = SECOND_NS;

impl<S: System> Device<'_, S> {
    fn throttle(&self) -> Option<&Throttle> {
        self.local.throttles.get(self.index as usize)
    }

    /// Runs `call` once the share has compute time. `call` returns the driver's code; 0 is success.
    /// If `only` is true, the process sees one device, and the data for the fast path is cached
    /// ([`crate::ProcessState::try_fast_launch`]).
    #[inline]
    pub fn launch(&self, work: Work, timer: &impl Timer, only: bool, call: impl FnOnce() -> i32) -> i32 {
        if let Some((share, page)) = self.pages.exclusive() {
            return self.launch_exclusive(share, page, timer, only, call);
        }
        // The device is throttled only if all its shares are; a share without a limit gives the
        // whole device.
        let (mut is_throttled, mut is_open) = (true, true);
        for share in self.pages.shares() {
            let launch_gate = share.launch_gate();
            is_throttled &= launch_gate.is_throttled;
            is_open &= launch_gate.is_open;
            if let Some(page) = launch_gate.doorbell_page {
                page.doorbell().fetch_add(1, Relaxed);
                self.process.system.wake(page.doorbell());
            }
        }
        let Some(throttle) = self.throttle() else { return call() };
        if !is_throttled {
            if !is_open {
                self.wait_for_gate(throttle);
            }
            return call();
        }
        if only && is_open {
            self.fill_fast_path(throttle);
        }
        let charge = self.local.costs.charge(work, || self.process.system.now());
        if !throttle.pay(charge.nanoseconds) || !is_open {
            self.wait_for_credit(throttle, timer);
        }
        let answer = match charge.measure {
            Measure::No => call(),
            _ => self.launch_measured(throttle, &charge, timer, call),
        };
        if answer != 0 {
            throttle.credit.fetch_add(charge.nanoseconds, Relaxed);
        }
        answer
    }

    #[cold]
    fn launch_measured(
        &self,
        throttle: &Throttle,
        charge: &Charge<'_>,
        timer: &impl Timer,
        call: impl FnOnce() -> i32,
    ) -> i32 {
        self.wait_for_capacity(throttle, charge.cost, timer);
        let now = || self.process.system.now();
        let sample = throttle
            .samples
            .begin(timer, charge, now, |since| self.update_slot(|slot| slot.set_unmeasured_since(since)));
        let answer = call();
        if let Some(sample) = sample {
            charge.cost.goes(1);
            sample.end(timer, answer == 0);
        }
        answer
    }

    fn harvest(&self, throttle: &Throttle, timer: &impl Timer) {
        let is_measured = throttle.is_rate_measured.load(Relaxed) != 0;
        let now = || self.process.system.now();
        let report = |since| self.update_slot(|slot| slot.set_unmeasured_since(since));
        throttle.settle(throttle.samples.harvest(timer, &self.local.costs, is_measured, now, report));
        let unpaid = throttle.unpaid_ns();
        if throttle.reported_debt.swap(unpaid, Relaxed) != unpaid {
            self.update_slot(|slot| slot.set_unpaid(unpaid));
        }
        if let Some(measured) = throttle.samples.untold() {
            self.update_slot(|slot| slot.add_measured(measured));
        }
    }

    /// Collects measurements after the program has synchronised or polled the device, because it
    /// may not launch again.
    pub fn collect_measurements(&self, timer: &impl Timer) {
        if self.pages.exclusive().is_some() {
            return self.collect_exclusive(timer);
        }
        if let Some(throttle) = self.throttle().filter(|throttle| throttle.samples.is_any()) {
            self.harvest(throttle, timer);
        }
    }

    /// Waits until enough measured work has completed, including this kernel's while little is
    /// known about it. No event wakes the waiter, so it polls.
    fn wait_for_capacity(&self, throttle: &Throttle, cost: &Cost, timer: &impl Timer) {
        let system = &self.process.system;
        let mut pause = 20_000;
        let mut start = None;
        loop {
            // This thread launches next, so it must respect the gate.
            if !self.is_open() {
                self.wait_for_gate(throttle);
            }
            self.harvest(throttle, timer);
            let has_room = throttle.samples.has_room(MAX_IN_FLIGHT_UNLIMITED_NS)
                || throttle.samples.has_room(MAX_IN_FLIGHT_NS) && !self.has_unlimited_share();
            if cost.may_go() && has_room || self.is_observe_only() {
                return;
            }
            let now = system.now();
            if now.saturating_sub(*start.get_or_insert(now)) > MEASUREMENT_WAIT_TIMEOUT_NS {
                throttle.samples.give_up();
                return;
            }
            self.sleep(now, pause);
            pause = (pause * 2).min(BUSY as u64);
        }
    }

    /// Sleeps for `pause` nanoseconds, or until the node changes the gate. A gate whose deadline
    /// has passed still counts as closed in the word.
    fn sleep(&self, now: u64, pause: u64) {
        match self.pages.shares().find_map(SharePages::gate) {
            Some(gate) => self.process.system.wait(gate, gate.load(Relaxed), now.saturating_add(pause)),
            None => self.process.system.sleep(pause),
        }
    }

    /// Returns true if a share may use the whole device, so that only the queue depth bounds the
    /// queue.
    fn has_unlimited_share(&self) -> bool {
        let now = self.process.system.now();
        self.pages.shares().any(|share| share.rate(now) == UNBOUNDED)
    }

    /// Returns true if all shares only observe: launches are counted but never delayed.
    fn is_observe_only(&self) -> bool {
        self.pages.shares().all(|share| share.flags().has(Flags::OBSERVE_ONLY))
    }

    fn is_open(&self) -> bool {
        self.pages.shares().all(|share| share.gate().is_none_or(|gate| gate.load(Relaxed) == 0))
    }

    /// Sleeps while the gate of any share is closed.
    fn wait_for_gate(&self, throttle: &Throttle) {
        let system = &self.process.system;
        if self.is_observe_only() {
            return;
        }
        let start = system.now();
        let _ = throttle.last_passed_at.compare_exchange(0, start, Relaxed, Relaxed);
        loop {
            let now = system.now();
            let closed = self.pages.shares().find_map(|share| {
                let gate = share.gate()?;
                let word = gate.load(Relaxed);
                let until = match share.gate_closed_until() {
                    0 => throttle.last_passed_at.load(Relaxed).saturating_add(CLOSED_GATE_INTERVAL_NS),
                    until => until,
                };
                (word != 0 && now < until).then_some((gate, word, until))
            });
            let Some((gate, word, until)) = closed else { break };
            system.wait(gate, word, until);
        }
        let now = system.now();
        throttle.last_passed_at.store(now, Relaxed);
        self.report_time(0, now.saturating_sub(start));
    }

    /// Takes the missing credit from the share's bucket, and sleeps until tokens are available.
    #[cold]
    fn wait_for_credit(&self, throttle: &Throttle, timer: &impl Timer) {
        let system = &self.process.system;
        let mut waited_since = None;
        loop {
            if !self.is_open() {
                self.wait_for_gate(throttle);
            }
            self.harvest(throttle, timer);
            let missing = throttle.credit.load(Relaxed).saturating_neg();
            if missing <= 0 {
                break;
            }
            let now = system.now();
            let is_measured = self.pages.shares().all(|share| share.is_measured(now));
            throttle.is_rate_measured.store(is_measured.into(), Relaxed);
            match self.take(missing, now) {
                Ok(taken) => {
                    throttle.credit.fetch_add(taken, Relaxed);
                    self.report_time(taken, 0);
                }
                Err(_) if self.is_observe_only() => break,
                Err(pause) => {
                    self.report_throttling();
                    // Report the wait as it passes. Otherwise the share would look idle, and its
                    // time would be lent away.
                    if let Some(since) = waited_since.replace(now) {
                        self.report_time(0, now.saturating_sub(since));
                    }
                    self.sleep(now, pause);
                }
            }
        }
        if let Some(since) = waited_since {
            self.report_time(0, system.now().saturating_sub(since));
        }
    }

    /// Takes tokens from the first share that has some. `Err` is the time until one has, in
    /// nanoseconds.
    fn take(&self, missing: i64, now: u64) -> Result<i64, u64> {
        let mut soonest = Err(SECOND_NS);
        for share in self.pages.shares() {
            let Some(page) = share.account() else { continue };
            let rate = share.rate(now);
            match (Bucket { page, rate, burst: share.burst_ns(rate) }).take(missing, now) {
                Ok(taken) => return Ok(taken),
                Err(pause) => soonest = soonest.map_err(|least| pause.min(least)),
            }
        }
        soonest
    }

    fn report_time(&self, charged: i64, waited: u64) {
        self.update_slot(|slot| slot.add_gpu_time(charged, waited));
    }
}
