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

/// Length of a quantum. A hand-over costs 0.17 ms of an H100 and the time until the next share
/// launches, together about 3 % of this.
pub(crate) const QUANTUM_NS: u64 = 10_000_000;
/// Shortest quantum: of a share with few tokens, and while a share that used less than its
/// entitlement waits.
pub(crate) const QUANTUM_MIN_NS: u64 = QUANTUM_NS / 4;
/// A share that has not used its entitlement keeps at most this much precedence.
const CREDIT_NS: u64 = QUANTUM_NS;
/// A share counts as active for this long after it last waited or worked. Time that only it could
/// use is not lent meanwhile.
const ACTIVE_NS: u64 = 50_000_000;
/// A share that others of a higher class keep waiting for this long has one quantum of
/// [`QUANTUM_MIN_NS`].
const STARVED_NS: u64 = NS_PER_SECOND;
/// Tokens that a share saves while it is idle, if its policy does not say.
const BURST_NS: u64 = 20_000_000;

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

/// What is to happen on a device without a holder.
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
    pub(crate) fn new(compute: Compute, now: u64) -> Self {
        let entitlement = Entitlement::of(compute);
        let burst = if compute.burst_us == 0 { BURST_NS } else { compute.burst_us.saturating_mul(1000) };
        let burst = i64::try_from(burst).unwrap_or(i64::MAX);
        Self {
            entitlement,
            priority: compute.priority,
            burst,
            tokens: burst,
            filled_at: now,
            virtual_ns: 0,
            active_until: 0,
            waits_since: None,
        }
    }

    /// Applies a changed policy; the balances stay.
    pub(crate) fn with_policy(self, compute: Compute) -> Self {
        let Self { entitlement, priority, burst, .. } = Self::new(compute, self.filled_at);
        Self { entitlement, priority, burst, tokens: self.tokens.min(burst), ..self }
    }

    /// The ceiling, in nanoseconds of GPU time per second.
    pub(crate) fn ceiling(&self) -> u64 {
        self.entitlement.ceiling
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
        self.tokens = tokens.min(self.burst);
    }

    /// Tokens with which a quantum begins.
    fn enough(&self) -> i64 {
        self.burst.min(QUANTUM_MIN_NS as i64)
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
    /// [`CREDIT_NS`] of precedence. Returns true if it was not.
    pub(crate) fn is_active(&mut self, index: usize, waits: bool, now: u64) -> bool {
        let Some(ledger) = self.ledgers.get_mut(index) else { return false };
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
        is_new
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
            (std::cmp::Reverse(class), ledger.virtual_ns)
        };
        let Some(index) = waiting.iter().copied().filter(has_tokens).min_by_key(order) else {
            let at = waiting.iter().map(|index| self.ledgers[*index].tokens_at(now)).min();
            return at.map_or(Next::Nobody, |at| Next::Tokens { at });
        };
        let highest = waiting.iter().map(|index| self.ledgers[*index].priority).max();
        let ledger = &mut self.ledgers[index];
        let length = match ledger.is_limited() {
            _ if Some(ledger.priority) < highest => QUANTUM_MIN_NS,
            true => QUANTUM_NS.min(u64::try_from(ledger.tokens).unwrap_or(0)),
            false => QUANTUM_NS,
        };
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
