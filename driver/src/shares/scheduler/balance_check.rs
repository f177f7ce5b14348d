//! Detects forged balances: whether the compute time left on a share's page is possible.
//!
//! Launches subtract from the balance first and count that in their slot; the clock adds the
//! granted rate. The last balance, the grant and the slots give a maximum, for any kernel lengths.
//! A balance above it was forged. A share that also forges its slots uses more than granted by NVML
//! ([`crate::shares::enforcement::compute_limit`]).

use super::controller::NS_PER_SECOND;
use super::grant_table::GrantSummary;
use crate::shares::snapshot::usage::ShareTime;
use crate::shares::snapshot::{Share, ShareKey, Snapshot};
use divvy_pages::policy::{UNBOUNDED, accrued};
use std::collections::BTreeMap;
use std::time::Duration;

/// Maximum unused time in a bucket if the policy sets none, in nanoseconds; the library's default.
const BURST: i64 = 20_000_000;
/// Tolerance for time that is taken but not reported yet, and for reading the page word by word, in
/// nanoseconds.
const LOOSE: i64 = 100_000_000;
/// A grant expires after about this time without a new snapshot.
const LATE: Duration = Duration::from_secs(3);

/// The page at the last snapshot, in nanoseconds: the balance, and the time since its last refill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Was {
    balance: i64,
    unfilled: u64,
}

pub(crate) type BalanceHistory = BTreeMap<ShareKey, Was>;

/// Returns the nanoseconds by which each balance is too large, by share index. `now` is nanoseconds
/// of the monotonic clock, `since` the time since the last snapshot.
///
/// There is no
/// result for a share whose processes see other shares of the GPU: they count in one slot what they
/// take from any share. Nor is there one after an unlimited rate, because the debt has a lower
/// bound then.
pub(crate) fn beyond(
    snapshot: &Snapshot,
    metered: &[ShareTime],
    had: &BTreeMap<ShareKey, GrantSummary>,
    before: &BalanceHistory,
    since: Option<Duration>,
    now: u64,
) -> (BTreeMap<usize, i64>, BalanceHistory) {
    let (mut all, mut memory) = (BTreeMap::new(), BalanceHistory::new());
    for ((at, share), metered) in snapshot.shares.iter().enumerate().zip(metered) {
        let Ok(account) = &share.account else { continue };
        let highest = had.get(&share.key()).map_or(0, |had| had.highest);
        let was = Was { balance: account.balance, unfilled: now.saturating_sub(account.refilled) };
        memory.insert(share.key(), was);
        let (Some(was), Some((charged, _)), Some(since)) =
            (before.get(&share.key()), metered.reported_ns, since)
        else {
            continue;
        };
        if highest == 0 || highest == UNBOUNDED || since >= LATE || is_mixed(snapshot, share) {
            continue;
        }
        let burst = match share.policy.compute.burst_us {
            0 => BURST,
            us => i64::try_from(us.saturating_mul(1000)).unwrap_or(i64::MAX),
        };
        let since = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let taken = u128::from(charged) * u128::from(since) / u128::from(NS_PER_SECOND);
        // The next launch adds the accrued time, by the rate of that moment, up to the burst.
        let full = was.balance.saturating_add(accrued(highest, was.unfilled)).min(burst);
        let most = full
            .saturating_add(accrued(highest, since))
            .saturating_sub(i64::try_from(taken).unwrap_or(i64::MAX));
        let beyond = account.balance.saturating_sub(most);
        if beyond > LOOSE {
            all.insert(at, beyond);
        }
    }
    (all, memory)
}

/// A process of it sees another share of the same device.
fn is_mixed(snapshot: &Snapshot, share: &Share) -> bool {
    let of_others = |process| {
        let shares = snapshot.shares_of(process);
        let here = shares.iter().filter(|at| snapshot.shares[**at].device() == share.device());
        here.count() > 1
    };
    snapshot.processes.values().any(|process| share.slots_of(process).next().is_some() && of_others(process))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture};
    use proptest::prelude::*;

    const POINT: u64 = NS_PER_SECOND / 100;
    const RATE: u64 = 30 * POINT;
    const FULL: Was = Was { balance: BURST, unfilled: 0 };

    /// A page that says so, to a process of which it is.
    fn snapshot(balance: i64, refilled: u64) -> Snapshot {
        let mut fixture = Fixture::share(10_000);
        fixture.process(7).has(CONTEXT).slot(7, CONTEXT);
        said(fixture.snapshot(), balance, refilled)
    }

    fn said(mut snapshot: Snapshot, balance: i64, refilled: u64) -> Snapshot {
        let account = snapshot.shares[0].account.as_mut().expect("a page");
        (account.balance, account.refilled) = (balance, refilled);
        snapshot
    }

    fn had(snapshot: &Snapshot, highest: u64) -> BTreeMap<ShareKey, GrantSummary> {
        let had = GrantSummary { highest, ..GrantSummary::default() };
        snapshot.shares.iter().map(|share| (share.key(), had)).collect()
    }

    /// The excess of the first share's balance, a second after its page was full.
    fn found(snapshot: &Snapshot, charged: u64, highest: u64) -> Option<i64> {
        let before = snapshot.shares.iter().map(|share| (share.key(), FULL)).collect();
        let metered = vec![
            ShareTime { reported_ns: Some((charged, 0)), ..ShareTime::default() };
            snapshot.shares.len()
        ];
        let had = had(snapshot, highest);
        let second = Some(Duration::from_secs(1));
        beyond(snapshot, &metered, &had, &before, second, 9 * NS_PER_SECOND).0.get(&0).copied()
    }

    #[test]
    fn forged_balance_differs_from_an_earned_one() {
        let rich = snapshot(BURST, 9 * NS_PER_SECOND);
        let check = |charged: u64, expected: Option<u64>| {
            let expected = expected.map(|points| (points * POINT) as i64);
            assert_eq!(found(&rich, charged, RATE), expected, "{charged}");
        };
        check(0, None);
        check(30 * POINT, None);
        check(40 * POINT, None);
        check(41 * POINT, Some(11));
        check(100 * POINT, Some(70));
        // A kernel of seventy points is under way: it is in debt for that.
        assert_eq!(found(&snapshot(BURST - 70 * POINT as i64, 9 * NS_PER_SECOND), 100 * POINT, RATE), None);
    }

    #[test]
    fn no_result_without_measurements() {
        let rich = snapshot(BURST, 9 * NS_PER_SECOND);
        for rate in [0, UNBOUNDED] {
            assert_eq!(found(&rich, 100 * POINT, rate), None, "{rate}");
        }
        let (had, none) = (had(&rich, RATE), ShareTime::default());
        let nothing = |metered: ShareTime, before: &BalanceHistory, since: Option<Duration>| {
            assert!(beyond(&rich, &[metered], &had, before, since, 9 * NS_PER_SECOND).0.is_empty());
        };
        let (second, before) = (Some(Duration::from_secs(1)), [(rich.shares[0].key(), FULL)].into());
        let all = ShareTime { reported_ns: Some((NS_PER_SECOND, 0)), ..ShareTime::default() };
        nothing(none, &before, second);
        nothing(all, &BalanceHistory::new(), second);
        nothing(all, &before, Some(Duration::from_secs(4)));
        nothing(all, &before, None);
        let mut fixture = Fixture::share(10_000);
        fixture.second_share(10_000).process(7).has(CONTEXT).slot(7, CONTEXT);
        assert_eq!(
            found(&said(fixture.snapshot(), BURST, 9 * NS_PER_SECOND), NS_PER_SECOND, RATE),
            None,
            "of two shares"
        );
    }

    proptest! {
        /// A share whose kernels have any length, at rates that change, looked at at any time.
        #[test]
        fn honest_balances_are_never_forged(
            kernels in proptest::collection::vec((1..3 * NS_PER_SECOND as i64, 0..NS_PER_SECOND), 1..60),
            rates in proptest::collection::vec(1..NS_PER_SECOND, 1..20),
        ) {
            let (mut now, mut balance, mut refilled) = (NS_PER_SECOND, 0_i64, NS_PER_SECOND);
            let (mut charged, mut told, mut looked, mut rate) = (0_u64, 0_u64, now, rates[0]);
            let mut highest = rate;
            let mut memory = BalanceHistory::new();
            let mut rates = rates.iter().cycle();
            for (cost, pause) in kernels {
                now += pause;
                // As the library takes: if anything is there.
                let accrued = u128::from(now - refilled) * u128::from(rate) / 1_000_000_000;
                balance = (balance + accrued as i64).min(BURST);
                refilled = now;
                if balance > 0 {
                    balance -= cost;
                    charged += cost as u64;
                }
                if now - looked >= NS_PER_SECOND {
                    let snapshot = snapshot(balance, refilled);
                    let since = Duration::from_nanos(now - looked);
                    let said = (u128::from(charged - told) * 1_000_000_000 / since.as_nanos()) as u64;
                    let metered = [ShareTime { reported_ns: Some((said, 0)), ..ShareTime::default() }];
                    let (found, after) =
                        beyond(&snapshot, &metered, &had(&snapshot, highest), &memory, Some(since), now);
                    prop_assert_eq!(found.len(), 0, "{:?}", found);
                    (memory, told, looked) = (after, charged, now);
                    let next = rates.next().copied().unwrap_or(1);
                    highest = rate.max(next);
                    rate = next;
                }
            }
        }
    }
}
