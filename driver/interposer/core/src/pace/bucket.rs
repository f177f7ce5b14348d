//! The share's stock of GPU time, on its account page.
//!
//! One balance per share, in nanoseconds of GPU time, that all processes of the share take
//! from and that fills by the clock: there is no thread that fills it, whoever takes adds what
//! has accrued since the last time. It never holds more than the burst, and nothing of a time in which the share may have
//! all of the device. It may be overdrawn by
//! one taker, who launches a kernel that costs more than is there; then nobody gets anything
//! until the debt is paid.
//!
//! **In rows.** A GPU that changes from one process to another does nothing meanwhile, 0.17 ms each time (an H100, driver 580.159), and a
//! kernel that is launched after a pause has to wait for its turn, by which it looks longer than it is. So who has used up the stock waits
//! until there is enough for some kernels in a row: [`ROW`], or what comes in a [`PAUSES`]th of a second if that is less, so that
//! a small share does not pause for long. Kernels that are longer come one by one. Rows twice as long gained nothing.

use divvy_pages::AccountPage;
use divvy_pages::policy::{UNBOUNDED, accrued};
use divvy_pages::sync::Ordering::{AcqRel, Acquire};

/// Nanoseconds of GPU time a second for the whole device.
pub(crate) const SECOND: u64 = 1_000_000_000;
/// Unused GPU time that is kept, in nanoseconds, where the policy does not say.
pub(crate) const BURST: u64 = 20_000_000;
/// Who waits is woken when so much is there: less would be a sleep for each small kernel.
pub(crate) const QUANTUM: i64 = 250_000;
/// And so much more than there was, in nanoseconds of GPU time, or in one of so many parts of a second: a time slice of a GPU.
const ROW: u64 = 2_000_000;
const PAUSES: u64 = 64;
/// What is taken beyond the need, so that the page is looked at once for many launches.
const GRANT: i64 = 500_000;
/// More often than this the clock is not worth a write.
const TICK: u64 = 2_000;

/// The stock of one share, and how fast it fills.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket<'a> {
    pub(crate) page: &'a AccountPage,
    /// Nanoseconds of GPU time a second.
    pub(crate) rate: u64,
    /// The most that is kept, in nanoseconds.
    pub(crate) burst: u64,
}

impl Bucket<'_> {
    /// Adds what accrued until `now`.
    fn fill(&self, now: u64) {
        let last = self.page.refilled().load(Acquire);
        let since = now.saturating_sub(last);
        // A time from the future is none of ours: from now on, then.
        if last <= now && since < TICK
            || self.page.refilled().compare_exchange(last, now, AcqRel, Acquire).is_err()
        {
            return;
        }
        // Who may have all of the device leaves nothing unused that could be kept.
        let most = if self.rate == UNBOUNDED { 0 } else { i64::try_from(self.burst).unwrap_or(i64::MAX) };
        let accrued = accrued(self.rate, since);
        let more = |balance: i64| Some(balance.saturating_add(accrued).min(most));
        let _ = self.page.balance().fetch_update(AcqRel, Acquire, more);
    }

    /// Takes at least `need` nanoseconds if there is anything at all, or if the share may have all of the device:
    /// what it launches is counted then, so that the node sees that it works, and never waits. `Err`: nanoseconds
    /// until it is worth to ask again.
    pub(crate) fn take(&self, need: i64, now: u64) -> Result<i64, u64> {
        self.fill(now);
        if self.rate == UNBOUNDED {
            // While it is in debt a kernel of it runs, by which the node knows that it works. No more of it is kept than
            // this launch and the stock can explain: the rate may be another in a moment, and small errors add up.
            let least = i64::try_from(self.burst).map_or(i64::MIN, |burst| -burst.max(need + GRANT));
            let left = |balance: i64| Some(balance.saturating_sub(need + GRANT).max(least));
            let _ = self.page.balance().fetch_update(AcqRel, Acquire, left);
            return Ok(need + GRANT);
        }
        let taken = |balance: i64| need + (balance - need).clamp(0, GRANT);
        let left = |balance: i64| (balance > 0).then(|| balance.saturating_sub(taken(balance)));
        match self.page.balance().fetch_update(AcqRel, Acquire, left) {
            Ok(balance) => Ok(taken(balance)),
            Err(balance) => {
                let row = (self.rate / PAUSES).min(ROW) as i64;
                // Nothing is there, so that neither sum is too large.
                let enough = QUANTUM.max(balance + row).min(i64::try_from(self.burst).unwrap_or(i64::MAX));
                let missing = u128::from(enough.abs_diff(balance));
                let wait = missing * u128::from(SECOND) / u128::from(self.rate.max(1));
                Err(u64::try_from(wait).unwrap_or(SECOND).clamp(TICK, SECOND))
            }
        }
    }
}
