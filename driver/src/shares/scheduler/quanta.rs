//! The law of GPU time: which share of a device may launch next, and for how long.
//!
//! One share at a time has the device, for a quantum. Two balances decide. *Tokens* hold a share to
//! its ceiling: they accrue with the ceiling's rate, and GPU time is charged to them. *Virtual time*
//! is GPU time divided by entitlement: the waiting share with the least is next, so shares get time
//! in proportion to their entitlements, also of what hand-overs leave of it. Priority classes come
//! first. Times are nanoseconds; all functions are pure.

use super::controller::targets;
use crate::shares::snapshot::entitlement::{Entitlement, NS_PER_SECOND};
use divvy_pages::Compute;

/// Length of a quantum. A hand-over costs a change between processes, 0.17 ms on an H100 (driver
/// 580.159), and the time until the next share launches: together less than 2 % of this.
pub(crate) const QUANTUM_NS: u64 = 20_000_000;
/// Shortest quantum: while a share that used less than its entitlement waits.
pub(crate) const QUANTUM_MIN_NS: u64 = QUANTUM_NS / 8;
/// A share that has not used its entitlement keeps at most this much precedence.
const CREDIT_NS: u64 = QUANTUM_NS / 2;
/// A share counts as active for this long after it last waited or worked. Time that only it could
/// use is not lent meanwhile.
const ACTIVE_NS: u64 = 50_000_000;
/// A share that others of a higher class keep waiting for this long has one quantum of
/// [`QUANTUM_MIN_NS`].
const STARVED_NS: u64 = NS_PER_SECOND;
/// Tokens that a share saves while it is idle, if its policy does not say.
const BURST_NS: u64 = 20_000_000;
/// Largest debt that a new agent reads from the page of a share, whose processes write it. A kernel
/// of this length is paid in full.
const DEBT_MAX_NS: i64 = NS_PER_SECOND as i64;

/// The bucket of a share as its account page has it: nanoseconds left, and the time of the last refill
/// by the monotonic clock. A fresh page has zeros, so its bucket is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) balance: i64,
    pub(crate) refilled_at: u64,
}

/// The balances of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ledger {
    entitlement: Entitlement,
    priority: u32,
    burst: i64,
    tokens: i64,
    filled_at: u64,
    virtual_ns: u64,
    active_until: u64,
    /// Since when it waits without having had the device.
    waits_since: Option<u64>,
}

/// The next step on a device without a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Grant {
        index: usize,
        length: u64,
    },
    /// All waiting shares lack tokens until then.
    Tokens {
        at: u64,
    },
    Nobody,
}

/// Whether these policies divide the time of a device. If none does, nothing is gated.
pub(crate) fn divides(policies: impl IntoIterator<Item = Compute>) -> bool {
    let has_settings = |compute: Compute| {
        compute.cores > 0 || compute.ceiling > 0 || compute.weight > 1 || compute.priority > 0
    };
    policies.into_iter().any(has_settings)
}

impl Ledger {
    /// Continues the bucket of the page, so a new agent grants no second burst.
    pub(crate) fn new(compute: Compute, bucket: Bucket, now: u64) -> Self {
        let entitlement = Entitlement::of(compute);
        let burst = if compute.burst_us == 0 { BURST_NS } else { compute.burst_us.saturating_mul(1000) };
        let burst = i64::try_from(burst).unwrap_or(i64::MAX);
        let mut ledger = Self {
            entitlement,
            priority: compute.priority,
            burst,
            tokens: bucket.balance.clamp(-DEBT_MAX_NS, burst),
            filled_at: bucket.refilled_at.min(now),
            virtual_ns: 0,
            active_until: 0,
            waits_since: None,
        };
        ledger.fill(0, now);
        ledger
    }

    /// Applies a changed policy; the balances stay.
    pub(crate) fn with_policy(self, compute: Compute) -> Self {
        let Self { entitlement, priority, burst, .. } = Self::new(compute, Bucket::default(), self.filled_at);
        Self { entitlement, priority, burst, tokens: self.tokens.min(burst), ..self }
    }

    /// The ceiling, in nanoseconds of GPU time per second.
    pub(crate) fn ceiling(&self) -> u64 {
        self.entitlement.ceiling
    }

    #[cfg(test)]
    pub(crate) fn virtual_ns(&self) -> u64 {
        self.virtual_ns
    }

    fn is_limited(&self) -> bool {
        self.entitlement.ceiling < NS_PER_SECOND
    }

    /// Adds the tokens accrued until `now`, less the time used meanwhile.
    fn fill(&mut self, used: u64, now: u64) {
        let since = now.saturating_sub(self.filled_at);
        self.filled_at = self.filled_at.max(now);
        let accrued = u128::from(since) * u128::from(self.entitlement.ceiling) / u128::from(NS_PER_SECOND);
        let signed = |ns| i64::try_from(ns).unwrap_or(i64::MAX);
        let tokens = self.tokens.saturating_add(signed(accrued)).saturating_sub(signed(used.into()));
        // A share that waits for its turn is not idle, and saves what it could not use.
        let waited = if self.waits_since.is_some() { QUANTUM_NS as i64 } else { 0 };
        self.tokens = tokens.min(self.burst.saturating_add(waited));
    }

    /// Tokens with which a quantum begins.
    fn enough(&self) -> i64 {
        self.burst.min(QUANTUM_NS as i64 / 2)
    }

    /// Length of a quantum that uses all tokens; more accrue meanwhile.
    fn length(&self) -> u64 {
        if !self.is_limited() {
            return QUANTUM_NS;
        }
        let rest = NS_PER_SECOND - self.entitlement.ceiling;
        let tokens = u128::try_from(self.tokens).unwrap_or(0);
        u64::try_from(tokens * u128::from(NS_PER_SECOND) / u128::from(rest))
            .unwrap_or(u64::MAX)
            .min(QUANTUM_NS)
    }

    /// When it has tokens for a quantum.
    fn tokens_at(&self, now: u64) -> u64 {
        if !self.is_limited() || self.tokens >= self.enough() {
            return now;
        }
        let missing = u128::from(self.enough().abs_diff(self.tokens));
        let wait = missing * u128::from(NS_PER_SECOND) / u128::from(self.entitlement.ceiling.max(1));
        now.saturating_add(u64::try_from(wait).unwrap_or(NS_PER_SECOND)).saturating_add(1000)
    }
}

/// The shares of a device. The order of the ledgers is that of the caller's shares.
#[derive(Clone, Debug, Default)]
pub(crate) struct Law {
    pub(crate) ledgers: Vec<Ledger>,
    /// The least virtual time of active shares so far.
    virtual_ns: u64,
}

impl Law {
    /// The part of each share while those that are active want all they may have.
    fn parts(&self, now: u64) -> Vec<u64> {
        let wants = |ledger: &Ledger| if ledger.active_until > now { ledger.entitlement.ceiling } else { 0 };
        let shares: Vec<_> = self.ledgers.iter().map(|ledger| (ledger.entitlement, wants(ledger))).collect();
        targets(&shares)
    }

    /// A share was seen to work or to wait. One that was not active before keeps at most
    /// [`CREDIT_NS`] of precedence.
    pub(crate) fn is_active(&mut self, index: usize, waits: bool, now: u64) {
        let Some(ledger) = self.ledgers.get_mut(index) else { return };
        let is_new = ledger.active_until <= now;
        ledger.active_until = now + ACTIVE_NS;
        ledger.waits_since = if waits { ledger.waits_since.or(Some(now)) } else { None };
        if is_new {
            let others = self.ledgers.iter().enumerate();
            let others = others.filter(|(at, other)| *at != index && other.active_until > now);
            let served = others.map(|(_, other)| other.virtual_ns).min();
            self.virtual_ns = self.virtual_ns.max(served.unwrap_or(0));
            let part = self.parts(now).get(index).copied().unwrap_or(0);
            let least = self.virtual_ns.saturating_sub(virtual_time(CREDIT_NS, part));
            self.ledgers[index].virtual_ns = self.ledgers[index].virtual_ns.max(least);
        }
    }

    /// Whether a share that begins to wait has had less than the holder, in relation to its part. It
    /// uses little and must answer soon, so the quantum of the holder is a short one.
    pub(crate) fn precedes(&self, index: usize, holder: usize) -> bool {
        let virtual_ns = |index: usize| self.ledgers.get(index).map(|ledger| ledger.virtual_ns);
        virtual_ns(index) < virtual_ns(holder)
    }

    /// Charges GPU time that a share used.
    pub(crate) fn charge(&mut self, index: usize, used: u64, now: u64) {
        let part = if used == 0 { 0 } else { self.parts(now).get(index).copied().unwrap_or(0) };
        let Some(ledger) = self.ledgers.get_mut(index) else { return };
        ledger.fill(used, now);
        ledger.virtual_ns = ledger.virtual_ns.saturating_add(virtual_time(used, part));
    }

    /// Chooses among the shares that wait.
    pub(crate) fn next(&mut self, waits: impl Fn(usize) -> bool, now: u64) -> Next {
        let waiting: Vec<usize> = (0..self.ledgers.len()).filter(|index| waits(*index)).collect();
        waiting.iter().for_each(|index| self.ledgers[*index].fill(0, now));
        let has_tokens = |index: &usize| self.ledgers[*index].tokens_at(now) <= now;
        let is_starved = |ledger: &Ledger| ledger.waits_since.is_some_and(|since| now >= since + STARVED_NS);
        let order = |index: &usize| {
            let ledger = &self.ledgers[*index];
            let class = if is_starved(ledger) { u32::MAX } else { ledger.priority };
            (std::cmp::Reverse(class), ledger.virtual_ns, ledger.waits_since.unwrap_or(now))
        };
        let Some(index) = waiting.iter().copied().filter(has_tokens).min_by_key(order) else {
            let at = waiting.iter().map(|index| self.ledgers[*index].tokens_at(now)).min();
            return at.map_or(Next::Nobody, |at| Next::Tokens { at });
        };
        let highest = waiting.iter().map(|index| self.ledgers[*index].priority).max();
        // A share that is behind and only lacks tokens gets the device when it has them.
        let is_behind = |other: &usize| !has_tokens(other) && self.precedes(*other, index);
        let behind = waiting.iter().filter(|other| is_behind(other));
        let tokens_at = behind.map(|other| self.ledgers[*other].tokens_at(now) - now).min();
        let longest = tokens_at.map_or(u64::MAX, |wait| wait.max(QUANTUM_MIN_NS));
        let ledger = &mut self.ledgers[index];
        let length =
            if Some(ledger.priority) < highest { QUANTUM_MIN_NS } else { ledger.length().min(longest) };
        ledger.waits_since = None;
        Next::Grant { index, length }
    }

    /// Whether a share that waits ends the quantum of the holder at once.
    pub(crate) fn outranks(&self, index: usize, holder: usize, now: u64) -> bool {
        let (Some(one), Some(other)) = (self.ledgers.get(index), self.ledgers.get(holder)) else {
            return false;
        };
        let mut filled = *one;
        filled.fill(0, now);
        one.priority > other.priority && filled.tokens_at(now) <= now
    }
}

/// GPU time in relation to a part of the device.
fn virtual_time(ns: u64, part: u64) -> u64 {
    let scaled = u128::from(ns) * u128::from(NS_PER_SECOND) / u128::from(part.max(NS_PER_SECOND / 1000));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    const FULL: Bucket = Bucket { balance: i64::MAX, refilled_at: 0 };

    fn of(cores: u32, ceiling: u32, weight: u32, priority: u32) -> Compute {
        Compute { cores, ceiling, weight, priority, ..Compute::default() }
    }

    /// A share that launches batches of this length whenever it may, from a time on.
    #[derive(Clone, Copy, Debug)]
    struct Tenant {
        compute: Compute,
        batch: u64,
        from: u64,
    }

    fn always(compute: Compute, batch: u64) -> Tenant {
        Tenant { compute, batch, from: 0 }
    }

    /// GPU time of each tenant between two times, in points, on a device whose hand-overs take
    /// `cost`. Quanta end with the batch that is in flight.
    fn run(tenants: &[Tenant], cost: u64, [from, to]: [u64; 2]) -> Vec<f64> {
        let ledgers = tenants.iter().map(|tenant| Ledger::new(tenant.compute, FULL, 0)).collect();
        let mut law = Law { ledgers, virtual_ns: 0 };
        let (mut now, mut last) = (1, None);
        let mut used = vec![0; tenants.len()];
        while now < to {
            let waits = |index: usize| tenants[index].from <= now;
            for index in (0..tenants.len()).filter(|index| waits(*index)) {
                law.is_active(index, true, now);
            }
            match law.next(waits, now) {
                Next::Nobody => now += MS,
                Next::Tokens { at } => now = at,
                Next::Grant { index, length } => {
                    now += if last.replace(index) == Some(index) { 0 } else { cost };
                    let batches = length.div_ceil(tenants[index].batch).max(1);
                    let had = batches * tenants[index].batch;
                    used[index] += (now + had).min(to).saturating_sub(now.max(from));
                    now += had;
                    law.charge(index, had, now);
                }
            }
        }
        used.iter().map(|used| *used as f64 / (to - from) as f64 * 100.0).collect()
    }

    fn check(tenants: &[Tenant], expected: &[f64]) {
        let had = run(tenants, 0, [1000 * MS, 11_000 * MS]);
        for (had, expected) in had.iter().zip(expected) {
            assert!((had - expected).abs() < 1.0, "{tenants:?}: {had:.1}, expected {expected}");
        }
    }

    #[test]
    fn shares_get_what_they_are_entitled_to() {
        let fixed = |cores| always(of(cores, 0, 0, 0), MS);
        let weight = |weight| always(of(0, 0, weight, 0), MS);
        check(&[fixed(30), fixed(50)], &[30.0, 50.0]);
        check(&[fixed(30), fixed(70)], &[30.0, 70.0]);
        check(&[weight(1), weight(2), weight(3), weight(4)], &[10.0, 20.0, 30.0, 40.0]);
        check(&[fixed(30), always(of(20, 100, 1, 0), MS)], &[30.0, 70.0]);
        check(&[fixed(20)], &[20.0]);
        // Long kernels beside short ones.
        check(&[always(of(30, 0, 0, 0), 20 * MS), always(of(50, 0, 0, 0), MS / 10)], &[30.0, 50.0]);
    }

    #[test]
    fn idle_time_is_lent_and_back_within_a_quantum() {
        let owner = Tenant { from: 5_000 * MS, ..always(of(60, 0, 0, 0), MS) };
        let both = [always(of(20, 100, 0, 0), MS), owner];
        assert!(run(&both, 0, [1000 * MS, 5000 * MS])[0] > 99.0);
        let back = run(&both, 0, [5000 * MS, 5100 * MS]);
        assert!(back[1] > 59.0 && back[1] <= 90.0, "its part, and what it saved: {back:?}");
        let later = run(&both, 0, [6000 * MS, 9000 * MS]);
        assert!((later[1] - 60.0).abs() < 1.0, "{later:?}");
    }

    #[test]
    fn long_idle_share_does_not_take_over_when_it_returns() {
        let both = [always(of(0, 0, 1, 0), MS), Tenant { from: 5_000 * MS, ..always(of(0, 0, 1, 0), MS) }];
        let back = run(&both, 0, [5000 * MS, 5200 * MS]);
        assert!(back[0] > 40.0, "{back:?}");
    }

    #[test]
    fn high_priority_comes_first_but_starves_nobody() {
        let had = run(&[always(of(0, 0, 0, 1), MS), always(of(0, 0, 0, 0), MS)], 0, [1000 * MS, 11_000 * MS]);
        assert!(had[1] > 0.1 && had[1] < 1.0, "{had:?}");
        let law = Law {
            ledgers: vec![Ledger::new(of(0, 0, 0, 1), FULL, 0), Ledger::new(of(0, 0, 0, 0), FULL, 0)],
            virtual_ns: 0,
        };
        assert_eq!([law.outranks(0, 1, 5), law.outranks(1, 0, 5)], [true, false]);
    }

    #[test]
    fn new_agent_continues_the_bucket() {
        let check = |balance: i64, refilled_at: u64, expected: i64| {
            let bucket = Bucket { balance, refilled_at };
            let ledger = Ledger::new(of(50, 0, 0, 0), bucket, 1000 * MS);
            assert_eq!(ledger.tokens, expected * MS as i64, "{bucket:?}");
        };
        let ms = |ms: i64| ms * MS as i64;
        check(0, 0, 20);
        check(ms(20), 1000 * MS, 20);
        check(ms(3), 1000 * MS, 3);
        check(ms(3), 990 * MS, 8);
        check(ms(-400), 1000 * MS, -400);
        // Values that no honest process writes.
        check(i64::MAX, 1000 * MS, 20);
        check(i64::MIN, 1000 * MS, -1000);
        check(0, u64::MAX, 0);
    }

    #[test]
    fn shares_without_settings_are_not_gated() {
        assert!(!divides([Compute::default(), of(0, 0, 1, 0)]));
        for compute in [of(1, 0, 0, 0), of(0, 50, 0, 0), of(0, 0, 2, 0), of(0, 0, 0, 1)] {
            assert!(divides([Compute::default(), compute]), "{compute:?}");
        }
    }

    proptest! {
        /// Any kernels and any cost of hand-overs: no share exceeds its ceiling, and of what is
        /// delivered each has its part.
        #[test]
        fn any_kernels_get_the_same_parts(
            requests in prop::collection::vec(1_u32..=60, 2..5),
            batches in prop::collection::vec(5_000_u64..20 * MS, 4),
            cost in 0_u64..MS,
        ) {
            let sum: u32 = requests.iter().sum();
            let within = |cores: &u32| (cores * 100 / sum.max(100)).max(1);
            let requests: Vec<u32> = requests.iter().map(within).collect();
            let tenant = |(cores, batch): (&u32, u64)| always(of(*cores, 0, 0, 0), batch);
            let tenants: Vec<Tenant> = requests.iter().zip(batches).map(tenant).collect();
            let had = run(&tenants, cost, [1000 * MS, 21_000 * MS]);
            let delivered: f64 = had.iter().sum::<f64>().min(100.0);
            let entitled: f64 = requests.iter().map(|cores| f64::from(*cores)).sum();
            for (had, cores) in had.iter().zip(&requests) {
                let cores = f64::from(*cores);
                prop_assert!(*had < cores + 0.5, "{had:.2} of {cores}: {tenants:?}");
                let part = cores * (delivered / entitled).min(1.0);
                prop_assert!(*had > part - 1.0, "{had:.2} of {cores}: {tenants:?}");
            }
        }
    }
}
