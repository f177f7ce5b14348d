//! The throttle state of a process: credit and debt per device, and the cache of the fast path.

use super::samples::Samples;
use crate::quanta::Pipeline;
use divvy_pages::PolicyPage;
use divvy_pages::sync::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Maximum part of an undercharge that is charged at once or with one later launch, in nanoseconds.
pub(super) const IMMEDIATE_CHARGE_MAX_NS: i64 = 2_000_000;

/// A process's compute time on one device. Zeros are the initial state.
///
/// The state is lost when the process dies. So its slot reports the unpaid work
/// ([`divvy_pages::account::Slot::set_unpaid`],
/// [`divvy_pages::account::Slot::set_unmeasured_since`]), and the process that frees the slot
/// charges the share for it.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Throttle {
    /// Credit: nanoseconds of work that it may still launch.
    pub(super) credit: AtomicI64,
    /// Time at which a closed gate last let a launch through.
    pub(super) last_passed_at: AtomicU64,
    /// Debt: nanoseconds that launches were undercharged, paid in instalments with later launches.
    pub(super) debt: AtomicI64,
    /// 1 if the node granted a trusted rate when the process last took tokens.
    pub(super) is_rate_measured: AtomicU32,
    _word: u32,
    /// The debt that was last reported on the account page.
    pub(super) reported_debt: AtomicU64,
    _line: [u64; 3],
    pub(super) samples: Samples,
}

impl Throttle {
    /// Stops using a context's events, before a call that may destroy the context.
    pub(crate) fn pause_context(&self, context: u64, nap: impl Fn()) {
        self.samples.pause_context(context, nap);
    }

    /// Resumes after that call. `is_gone` is true if the context was destroyed.
    pub(crate) fn resume_context(&self, is_gone: bool) {
        self.samples.resume_context(is_gone);
    }

    /// Charges or refunds a measured difference. A large debt is paid in instalments, because
    /// paying it at once would stall the program.
    pub(super) fn settle(&self, difference: i64) {
        let mut difference = difference;
        if difference > 0 {
            // A refund reduces the debt first.
            let owed = self.debt.load(Relaxed).clamp(0, difference);
            self.debt.fetch_sub(owed, Relaxed);
            difference -= owed;
        } else if difference < -IMMEDIATE_CHARGE_MAX_NS {
            self.debt.fetch_add(-IMMEDIATE_CHARGE_MAX_NS - difference, Relaxed);
            difference = -IMMEDIATE_CHARGE_MAX_NS;
        }
        self.credit.fetch_add(difference, Relaxed);
    }

    /// Unpaid work in nanoseconds: the debt plus negative credit.
    pub(super) fn unpaid_ns(&self) -> u64 {
        let sum = self.debt.load(Relaxed).max(0).saturating_sub(self.credit.load(Relaxed).min(0));
        sum.unsigned_abs()
    }

    /// Charges a launch and an instalment of the debt. Returns true if the credit was sufficient.
    #[inline]
    pub(super) fn pay(&self, cost: i64) -> bool {
        let costs = cost + self.instalment(cost);
        self.credit.fetch_sub(costs, Relaxed) >= costs
    }

    /// Takes a launch's instalment off the debt.
    #[inline]
    pub(super) fn instalment(&self, cost: i64) -> i64 {
        let owed = self.debt.load(Relaxed);
        if owed <= 0 {
            return 0;
        }
        let part = instalment(owed, cost);
        self.debt.fetch_sub(part, Relaxed);
        part
    }
}

/// Computes the instalment of a launch: a quarter of the debt, where at most the launch's own cost
/// counts as debt; but at least [`IMMEDIATE_CHARGE_MAX_NS`]. After a long kernel, a wait twice as
/// long would be a stall. If co-running shares disturb measurements, most of a debt is refunded
/// before it is paid.
fn instalment(owed: i64, cost: i64) -> i64 {
    let part = owed.min(cost);
    part.min(IMMEDIATE_CHARGE_MAX_NS.max(part / 4))
}

/// Data of the last launch on the only device. Zeros: nothing is cached.
#[derive(Debug)]
pub(crate) struct FastPathCache {
    pub(super) page: AtomicPtr<PolicyPage>,
    pub(super) throttle: AtomicPtr<Throttle>,
    /// Under exclusive quanta, instead of `throttle`.
    pub(super) pipeline: AtomicPtr<Pipeline>,
    /// The page's stamp when its policy was read.
    pub(super) stamp: AtomicU64,
    /// The page's throttle word; nonzero if data is cached.
    pub(super) word: AtomicU32,
}

#[cfg(test)]
mod tests {
    use super::instalment;

    #[test]
    fn debt_is_paid_in_bounded_instalments() {
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
