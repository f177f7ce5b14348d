//! The share's token bucket of GPU time, on its account page.
//!
//! All processes of a share take from one balance, in nanoseconds of GPU time. No thread refills
//! it: each taker adds what has accrued since the last refill, up to the burst. A rate of the whole
//! device accrues nothing. One taker may overdraw the balance for a kernel that costs more; then
//! all others wait until the debt is paid.

use divvy_pages::AccountPage;
use divvy_pages::policy::{UNBOUNDED, accrued};
use divvy_pages::sync::Ordering::{AcqRel, Acquire};

/// Nanoseconds of GPU time per second of the whole device.
pub(crate) const SECOND_NS: u64 = 1_000_000_000;
/// Default burst in nanoseconds, if the policy states none.
const DEFAULT_BURST_NS: u64 = 20_000_000;
/// Minimum balance at which a waiter wakes, in nanoseconds. Less would mean a sleep per small
/// kernel.
pub(crate) const WAKE_QUANTUM_NS: i64 = 250_000;
/// Tokens of one batch of kernels, in nanoseconds of GPU time: one time slice of a GPU. A GPU that
/// switches processes is idle for 0.17 ms (H100, driver 580.159), and the first kernel after a
/// pause looks longer because it waits for its turn. So a waiter sleeps until there are tokens for
/// several kernels. Batches twice as long gained nothing.
const BATCH_NS: u64 = 2_000_000;
/// A batch is at most the accrual of `1 / 64` second, so that a small share does not pause for long.
const BATCH_PERIODS_PER_SECOND: u64 = 64;
/// Extra tokens taken with each grant, in nanoseconds, so that many launches share one page access.
const GRANT_EXTRA_NS: i64 = 500_000;
/// Tokens that a share saves beyond its burst while another share has the device, in nanoseconds: one
/// quantum, as the node saves them.
const HAND_OVER_NS: u64 = 20_000_000;
/// Minimum interval between refills, in nanoseconds, to limit writes to the shared page.
const REFILL_INTERVAL_NS: u64 = 2_000;

/// The bucket of one share with its rate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket<'a> {
    pub(crate) page: &'a AccountPage,
    /// Nanoseconds of GPU time per second.
    pub(crate) rate: u64,
    /// Maximum balance, in nanoseconds.
    pub(crate) burst: u64,
}

impl Bucket<'_> {
    /// Adds the tokens accrued until `now`.
    fn fill(&self, now: u64) {
        self.fill_up_to(self.burst, now);
    }

    fn fill_up_to(&self, most: u64, now: u64) {
        let last = self.page.refilled_at().load(Acquire);
        let since = now.saturating_sub(last);
        // A refill time in the future is invalid; refilling restarts at `now`.
        if last <= now && since < REFILL_INTERVAL_NS
            || self.page.refilled_at().compare_exchange(last, now, AcqRel, Acquire).is_err()
        {
            return;
        }
        // A share without a limit saves no unused time.
        let most = if self.rate == UNBOUNDED { 0 } else { i64::try_from(most).unwrap_or(i64::MAX) };
        let accrued = accrued(self.rate, since);
        let more = |balance: i64| Some(balance.saturating_add(accrued).min(most));
        let _ = self.page.balance().fetch_update(AcqRel, Acquire, more);
    }

    /// Whether more than `need` nanoseconds are there.
    ///
    /// # Errors
    /// The nanoseconds to wait before the next attempt.
    pub(crate) fn has_more_than(&self, need: u64, now: u64) -> Result<(), u64> {
        self.fill(now);
        let need = i64::try_from(need).unwrap_or(i64::MAX);
        let balance = self.page.balance().load(Acquire).saturating_sub(need);
        if balance > 0 { Ok(()) } else { Err(self.pause(balance)) }
    }

    /// Charges work that has completed. The tokens that accrued meanwhile are added first, and a share
    /// that waited for its quantum keeps those of one hand-over beyond the burst.
    ///
    /// A share without a limit owes at most its burst: it may get a ceiling at any time, and must not
    /// pay then for the time before. With `by_node` another share waits, and the node's ledger holds
    /// the share to its ceiling. The ledger charges less beside late work, so the bucket then gets no
    /// debt beyond its burst and one hand-over.
    pub(crate) fn charge(&self, charged: i64, by_node: bool, now: u64) {
        let saved = self.burst.saturating_add(HAND_OVER_NS);
        self.fill_up_to(saved, now);
        let least = match self.rate {
            UNBOUNDED => i64::try_from(self.burst).map_or(i64::MIN, |burst| -burst),
            _ if by_node => i64::try_from(saved).map_or(i64::MIN, |saved| -saved),
            _ => i64::MIN,
        };
        let floor = |balance: i64| if self.rate == UNBOUNDED { least } else { least.min(balance) };
        let left = |balance: i64| Some(balance.saturating_sub(charged).max(floor(balance)));
        let _ = self.page.balance().fetch_update(AcqRel, Acquire, left);
    }

    /// Takes at least `need` nanoseconds if the balance is positive. At the rate of the whole
    /// device it always succeeds and only counts the launch, so that the node sees the activity.
    ///
    /// # Errors
    /// The nanoseconds to wait before the next attempt.
    pub(crate) fn take(&self, need: i64, now: u64) -> Result<i64, u64> {
        self.fill(now);
        if self.rate == UNBOUNDED {
            // A negative balance shows the node that a kernel runs. It is bounded by this launch
            // and the burst: the rate may change soon, and small errors would add up.
            let least = i64::try_from(self.burst).map_or(i64::MIN, |burst| -burst.max(need + GRANT_EXTRA_NS));
            let left = |balance: i64| Some(balance.saturating_sub(need + GRANT_EXTRA_NS).max(least));
            let _ = self.page.balance().fetch_update(AcqRel, Acquire, left);
            return Ok(need + GRANT_EXTRA_NS);
        }
        let taken = |balance: i64| need + (balance - need).clamp(0, GRANT_EXTRA_NS);
        let left = |balance: i64| (balance > 0).then(|| balance.saturating_sub(taken(balance)));
        match self.page.balance().fetch_update(AcqRel, Acquire, left) {
            Ok(balance) => Ok(taken(balance)),
            Err(balance) => Err(self.pause(balance)),
        }
    }

    /// The time until a balance that is not positive suffices for a batch, in nanoseconds.
    fn pause(&self, balance: i64) -> u64 {
        let batch = (self.rate / BATCH_PERIODS_PER_SECOND).min(BATCH_NS) as i64;
        // The balance is not positive, so neither sum overflows.
        let enough = WAKE_QUANTUM_NS.max(balance + batch).min(i64::try_from(self.burst).unwrap_or(i64::MAX));
        let missing = u128::from(enough.abs_diff(balance));
        let wait = missing * u128::from(SECOND_NS) / u128::from(self.rate.max(1));
        u64::try_from(wait).unwrap_or(SECOND_NS).clamp(REFILL_INTERVAL_NS, SECOND_NS)
    }
}

/// Converts the policy's burst to nanoseconds, with the default for 0.
pub(crate) fn burst_ns(microseconds: u64) -> u64 {
    if microseconds == 0 { DEFAULT_BURST_NS } else { microseconds.saturating_mul(1000) }
}
