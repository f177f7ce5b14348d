//! Whether the balance of a share's compute time can be what its page says: pure, from one look after the other.
//!
//! Launches take from the balance before they go, and tell in their slot what they took; the clock adds to it at the
//! rate that the page grants. So by what it was at the last look, what was granted since and what the slots say was
//! taken, there is a most that it can be now, whatever the lengths of kernels. Who finds it above that, look
//! after look, has somebody at hand who writes there what is not so.
//!
//! A tenant can make the sum come out right by lying about what it took as well. Then it had more than was granted
//! by NVML's word alone, which takes longer to be sure of ([`super::overtime`]).
//!
//! Nothing can be said of a share of which processes see other shares of the GPU too, as they tell in the slot of one what they
//! took from any; nor where a rate without bounds held for a moment, as the debt has a floor then.

use super::arbiter::SECOND;
use super::desk::Had;
use super::look::{Look, Share};
use super::meter::Metered;
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::policy::{UNBOUNDED, accrued};
use std::collections::BTreeMap;
use std::time::Duration;

type Key = (ClaimUid, ShareId);

/// What is kept of unused time at most where the policy does not say, in nanoseconds: as the library has it.
const BURST: i64 = 20_000_000;
/// What is taken and not told yet when the page is read, and what comes of reading it word by word; nanoseconds.
const LOOSE: i64 = 100_000_000;
/// What is granted ends at about this time without a new look.
const LATE: Duration = Duration::from_secs(3);

/// What a page said at the last look, in nanoseconds: the balance, and for how long nothing had been added to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Was {
    balance: i64,
    unfilled: u64,
}

pub(super) type Memory = BTreeMap<Key, Was>;

/// By the index of the share, by how many nanoseconds the balance is more than it can be. `now` is of the monotonic
/// clock, in nanoseconds; `since` the time since the last look.
pub(super) fn beyond(
    look: &Look,
    metered: &[Metered],
    had: &BTreeMap<Key, Had>,
    before: &Memory,
    since: Option<Duration>,
    now: u64,
) -> (BTreeMap<usize, i64>, Memory) {
    let (mut all, mut memory) = (BTreeMap::new(), Memory::new());
    for ((at, share), metered) in look.shares.iter().enumerate().zip(metered) {
        let Ok(account) = &share.account else { continue };
        let highest = had.get(&share.key()).map_or(0, |had| had.highest);
        let was = Was { balance: account.balance, unfilled: now.saturating_sub(account.refilled) };
        memory.insert(share.key(), was);
        let (Some(was), Some((charged, _)), Some(since)) = (before.get(&share.key()), metered.said, since)
        else {
            continue;
        };
        if highest == 0 || highest == UNBOUNDED || since >= LATE || is_mixed(look, share) {
            continue;
        }
        let burst = match share.policy.compute.burst_us {
            0 => BURST,
            us => i64::try_from(us.saturating_mul(1000)).unwrap_or(i64::MAX),
        };
        let since = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let taken = u128::from(charged) * u128::from(since) / u128::from(SECOND);
        // Whoever takes next adds what has accrued, by the rate that holds then, and never beyond the burst.
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
fn is_mixed(look: &Look, share: &Share) -> bool {
    let of_others = |process| {
        let shares = look.shares_of(process);
        let here = shares.iter().filter(|at| look.shares[**at].device() == share.device());
        here.count() > 1
    };
    look.processes.values().any(|process| share.slots_of(process).next().is_some() && of_others(process))
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::*;
    use proptest::prelude::*;

    const POINT: u64 = SECOND / 100;
    const RATE: u64 = 30 * POINT;
    const FULL: Was = Was { balance: BURST, unfilled: 0 };

    /// A page that says so, to a process of which it is.
    fn look(balance: i64, refilled: u64) -> Look {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(CONTEXT).slot(7, CONTEXT);
        said(scene.look(), balance, refilled)
    }

    fn said(mut look: Look, balance: i64, refilled: u64) -> Look {
        let account = look.shares[0].account.as_mut().expect("a page");
        (account.balance, account.refilled) = (balance, refilled);
        look
    }

    fn had(look: &Look, highest: u64) -> BTreeMap<Key, Had> {
        let had = Had { highest, ..Had::default() };
        look.shares.iter().map(|share| (share.key(), had)).collect()
    }

    /// Of the first share, a second after a page that was full: by how much its balance is too much.
    fn found(look: &Look, charged: u64, highest: u64) -> Option<i64> {
        let before = look.shares.iter().map(|share| (share.key(), FULL)).collect();
        let metered = vec![Metered { said: Some((charged, 0)), ..Metered::default() }; look.shares.len()];
        let had = had(look, highest);
        let second = Some(Duration::from_secs(1));
        beyond(look, &metered, &had, &before, second, 9 * SECOND).0.get(&0).copied()
    }

    #[test]
    fn what_is_left_of_what_was_granted_and_taken_is_told_from_what_somebody_wrote() {
        let rich = look(BURST, 9 * SECOND);
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
        assert_eq!(found(&look(BURST - 70 * POINT as i64, 9 * SECOND), 100 * POINT, RATE), None);
    }

    #[test]
    fn nothing_is_said_where_nothing_is_known() {
        let rich = look(BURST, 9 * SECOND);
        for rate in [0, UNBOUNDED] {
            assert_eq!(found(&rich, 100 * POINT, rate), None, "{rate}");
        }
        let (had, none) = (had(&rich, RATE), Metered::default());
        let nothing = |metered: Metered, before: &Memory, since: Option<Duration>| {
            assert!(beyond(&rich, &[metered], &had, before, since, 9 * SECOND).0.is_empty());
        };
        let (second, before) = (Some(Duration::from_secs(1)), [(rich.shares[0].key(), FULL)].into());
        let all = Metered { said: Some((SECOND, 0)), ..Metered::default() };
        nothing(none, &before, second);
        nothing(all, &Memory::new(), second);
        nothing(all, &before, Some(Duration::from_secs(4)));
        nothing(all, &before, None);
        let mut scene = Scene::share(10_000);
        scene.second_share(10_000).process(7).has(CONTEXT).slot(7, CONTEXT);
        assert_eq!(found(&said(scene.look(), BURST, 9 * SECOND), SECOND, RATE), None, "of two shares");
    }

    proptest! {
        /// A share whose kernels have any length, at rates that change, looked at at any time.
        #[test]
        fn nobody_who_only_takes_what_is_there_is_found(
            kernels in proptest::collection::vec((1..3 * SECOND as i64, 0..SECOND), 1..60),
            rates in proptest::collection::vec(1..SECOND, 1..20),
        ) {
            let (mut now, mut balance, mut refilled) = (SECOND, 0_i64, SECOND);
            let (mut charged, mut told, mut looked, mut rate) = (0_u64, 0_u64, now, rates[0]);
            let mut highest = rate;
            let mut memory = Memory::new();
            let mut rates = rates.iter().cycle();
            for (cost, pause) in kernels {
                now += pause;
                // As the library takes: if anything is there.
                balance = (balance + (u128::from(now - refilled) * u128::from(rate) / 1_000_000_000) as i64).min(BURST);
                refilled = now;
                if balance > 0 {
                    balance -= cost;
                    charged += cost as u64;
                }
                if now - looked >= SECOND {
                    let look = look(balance, refilled);
                    let since = Duration::from_nanos(now - looked);
                    let said = (u128::from(charged - told) * 1_000_000_000 / since.as_nanos()) as u64;
                    let metered = [Metered { said: Some((said, 0)), ..Metered::default() }];
                    let (found, after) =
                        beyond(&look, &metered, &had(&look, highest), &memory, Some(since), now);
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
