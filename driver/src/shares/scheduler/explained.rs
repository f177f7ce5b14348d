//! Tests whether the work on a device is explained by grants and charges of exclusive quanta.
//!
//! [`GrantLog`] has the times in which a share may have work on the device. [`SampleTest`] compares
//! them with NVML's process samples, [`ActiveTimeTest`] compares the charges with the active time of
//! the device or MIG instance. All functions are pure. Times are nanoseconds.

use crate::shares::snapshot::ShareKey;
use crate::shares::snapshot::entitlement::NS_PER_SECOND;
use std::collections::{BTreeMap, VecDeque};

/// Intervals that ended before this time are dropped, in nanoseconds. An audit reads the last second.
const LOG_NS: u64 = 5 * NS_PER_SECOND;

/// Samples a second of an H100 (driver 580.159), each naming one process. Other GPUs take more, so
/// fewer are counted than there are, which only delays a finding.
const SAMPLES_PER_SECOND: f64 = 5.0;
/// Part of the samples that may name a share without a grant. It covers memsets and copies, which are
/// not gated, the edges of the time that the samples cover, and NVML's rounding to whole per cent.
const UNGATED_PART: f64 = 0.03;
/// Part of the time for which a device must have been busy for its samples to count.
const BUSY_PART_MIN: f64 = 0.2;
/// Threshold of the Shiryaev-Roberts statistic, which is also the mean number of looks until a false
/// finding, at least. 100 years have this many looks at five a second.
const FALSE_FINDING_LOOKS: f64 = 100.0 * 365.25 * 86_400.0 * 5.0;

/// Charges may be this much less than the active time: a twentieth, and a point of the time. Events of
/// two batches are microseconds apart, and memsets are not charged.
const ACTIVE_SLACK: (u64, u64) = (20, NS_PER_SECOND / 50);
/// Active time beyond that which makes a finding. NVML's counters and the pages are read at most
/// 0.2 s apart.
const UNEXPLAINED_NS: u64 = NS_PER_SECOND / 2;
/// Longest kernel whose time counts before it completed and was charged.
pub(crate) const PENDING_MAX_NS: u64 = 60 * NS_PER_SECOND;

/// The times in which a share has the device, or work in flight after its quantum.
#[derive(Clone, Debug, Default)]
pub(crate) struct GrantLog {
    intervals: VecDeque<(u64, u64)>,
    open: Option<u64>,
    /// The length of all intervals that have ended, also of those that were dropped.
    total: u64,
    /// Until then the share may have worked without a grant.
    unknown_until: u64,
}

impl GrantLog {
    pub(crate) fn new(unknown_until: u64) -> Self {
        Self { unknown_until, ..Self::default() }
    }

    /// From `now` on the share may have work on the device, or not.
    pub(crate) fn set(&mut self, may_work: bool, now: u64) {
        match (may_work, self.open) {
            (true, None) => self.open = Some(now),
            (false, Some(since)) => {
                self.intervals.push_back((since, now));
                self.total = self.total.saturating_add(now.saturating_sub(since));
                self.open = None;
            }
            _ => return,
        }
        while self.intervals.front().is_some_and(|(_, end)| end + LOG_NS < now) {
            self.unknown_until = self.intervals.pop_front().map_or(0, |(_, end)| end).max(self.unknown_until);
        }
    }

    /// Until `until` the share may have worked without a grant.
    pub(crate) fn forget(&mut self, until: u64) {
        self.unknown_until = self.unknown_until.max(until);
    }

    /// From `now` on the share works only with a grant.
    pub(crate) fn learn(&mut self, now: u64) {
        self.unknown_until = self.unknown_until.min(now);
    }

    /// The time between `from` and `to` in which the share may have worked.
    pub(crate) fn within(&self, from: u64, to: u64) -> u64 {
        let known = from.max(self.unknown_until.min(to));
        let open = self.open.map(|since| (since, u64::MAX));
        let intervals = self.intervals.iter().copied().chain(open);
        let granted = intervals.map(|(begin, end)| end.min(to).saturating_sub(begin.max(known)));
        granted.fold(known.saturating_sub(from), u64::saturating_add)
    }

    /// Whether the share may work now.
    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// The time until `now` in which the share might work, since the log began.
    pub(crate) fn total(&self, now: u64) -> u64 {
        self.total + self.open.map_or(0, |since| now.saturating_sub(since))
    }

    /// Whether all of the time since `from` is known.
    pub(crate) fn knows(&self, from: u64) -> bool {
        self.unknown_until <= from
    }
}

/// A Shiryaev-Roberts test of one share: do samples name it more often than its grants explain?
///
/// A sample names a process with the probability of its part of the busy time (H100, driver 580.159).
/// So a share that works only while it may is named with at most the probability
/// `granted / busy`. The statistic `R = (1 + R) L`, with the likelihood ratio `L` against a
/// probability halfway between that and 1, grows by at most one a look on the mean for such a
/// share. So it exceeds [`FALSE_FINDING_LOOKS`] within `n` looks with at most the probability
/// `n / FALSE_FINDING_LOOKS` (Pollak 1985): for each share less than once in 100 years.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SampleTest {
    statistic: f64,
    /// Sampled time of each process since the statistic was last small.
    by_pid: BTreeMap<u32, u64>,
}

/// NVML's samples between two looks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sampled {
    /// The time that they cover, and how much of it the device was busy.
    pub(crate) span: u64,
    pub(crate) busy: u64,
    /// The busy time of the samples that name each process of the share.
    pub(crate) named: BTreeMap<u32, u64>,
}

impl SampleTest {
    /// Adds samples of a time in which the share may have worked for `granted`. Returns the process
    /// named most often if they are a finding; then the test begins again.
    pub(crate) fn add(&mut self, sampled: &Sampled, granted: u64) -> Option<u32> {
        if (sampled.busy as f64) < sampled.span as f64 * BUSY_PART_MIN {
            return None;
        }
        let named: u64 = sampled.named.values().sum::<u64>().min(sampled.busy);
        let count = |ns: u64| ns as f64 / NS_PER_SECOND as f64 * SAMPLES_PER_SECOND;
        let likelihood = Likelihood::of(granted as f64 / sampled.busy as f64)
            .ratio(count(named), count(sampled.busy - named));
        self.statistic = ((1.0 + self.statistic) * likelihood).min(f64::MAX);
        if self.statistic < 1.0 {
            self.by_pid.clear();
        }
        for (pid, ns) in &sampled.named {
            *self.by_pid.entry(*pid).or_default() += ns;
        }
        if self.statistic < FALSE_FINDING_LOOKS {
            return None;
        }
        let most = self.by_pid.iter().max_by_key(|(_, ns)| **ns).map(|(pid, _)| *pid);
        *self = Self::default();
        most
    }
}

/// The factors of a sample that names the share, and of one that names another.
struct Likelihood {
    named: f64,
    other: f64,
}

impl Likelihood {
    /// `part`: the probability that an honest share is named, at most.
    fn of(part: f64) -> Self {
        let honest = (part + UNGATED_PART).min(1.0);
        let alternative = f64::midpoint(honest, 1.0);
        let other = if honest < 1.0 { (1.0 - alternative) / (1.0 - honest) } else { 1.0 };
        Self { named: alternative / honest, other }
    }

    fn ratio(&self, named: f64, others: f64) -> f64 {
        self.named.powf(named) * self.other.powf(others)
    }
}

/// Levels of a share since an arbitrary time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ShareLevel {
    /// Charged time, and the time of the kernel that was not charged yet.
    pub(crate) charged: u64,
    pub(crate) pending: u64,
    /// Time in which it may have worked.
    pub(crate) granted: u64,
}

impl ShareLevel {
    fn explained(&self) -> u64 {
        self.charged.saturating_add(self.pending)
    }
}

/// Why the active time of a device exceeds the charges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unexplained {
    /// These shares were charged less than they were granted, and that explains it.
    LowCharges(Vec<ShareKey>),
    /// A process works without a grant.
    Ungranted,
}

/// Compares the active time of a device with the charges of its shares.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ActiveTimeTest {
    levels: BTreeMap<ShareKey, ShareLevel>,
    /// The highest level of charged and pending time of each share. A pending kernel whose charge is
    /// missing later explains nothing twice.
    highest: BTreeMap<ShareKey, u64>,
    /// Granted time of each share for which it was not charged yet.
    unused: BTreeMap<ShareKey, u64>,
    unexplained: u64,
}

impl ActiveTimeTest {
    /// Adds a time of `span` in which the device was active for `active`. `levels` has all shares of
    /// the device.
    pub(crate) fn add(
        &mut self,
        active: u64,
        span: u64,
        levels: BTreeMap<ShareKey, ShareLevel>,
    ) -> Option<Unexplained> {
        let before = std::mem::replace(&mut self.levels, levels);
        let is_later = |(now, was): (&ShareLevel, &ShareLevel)| now.granted >= was.granted;
        let are_same =
            before.keys().eq(self.levels.keys()) && self.levels.values().zip(before.values()).all(is_later);
        if !are_same {
            let level = |(key, level): (&ShareKey, &ShareLevel)| (key.clone(), level.explained());
            self.highest = self.levels.iter().map(level).collect();
            (self.unexplained, self.unused) = (0, BTreeMap::new());
            return None;
        }
        let (mut explained, mut low, mut missing) = (0_u64, Vec::new(), 0_u64);
        for ((share, now), was) in self.levels.iter().zip(before.values()) {
            let granted = now.granted.saturating_sub(was.granted);
            let highest = self.highest.entry(share.clone()).or_default();
            let charged = now.explained().saturating_sub(*highest);
            *highest = now.explained().max(*highest);
            // A share cannot have worked for longer than it was granted, whatever its page shows.
            let unused = self.unused.entry(share.clone()).or_default();
            *unused = unused.saturating_add(granted).min(PENDING_MAX_NS);
            let charged = charged.min(*unused);
            *unused -= charged;
            explained = explained.saturating_add(charged);
            if charged < granted / 4 * 3 {
                low.push(share.clone());
                missing = missing.saturating_add(granted - charged);
            }
        }
        let (part, slack) = ACTIVE_SLACK;
        let slack =
            explained / part + (u128::from(slack) * u128::from(span) / u128::from(NS_PER_SECOND)) as u64;
        let beyond = active.saturating_sub(explained);
        let sum = self.unexplained.saturating_add(beyond);
        // Half of it is forgotten at each look that explains all, so it does not outlast its cause.
        self.unexplained =
            if beyond > slack { (sum - slack).min(2 * UNEXPLAINED_NS) } else { self.unexplained / 2 };
        let are_low = !low.is_empty() && missing >= beyond / 4 * 3;
        (self.unexplained >= UNEXPLAINED_NS && beyond > slack).then_some(if are_low {
            Unexplained::LowCharges(low)
        } else {
            Unexplained::Ungranted
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = NS_PER_SECOND;

    #[test]
    fn log_has_the_granted_time_of_an_interval() {
        let mut log = GrantLog::new(100);
        for (at, may_work) in [(200, true), (300, false), (400, true), (450, true), (500, false), (600, true)]
        {
            log.set(may_work, at);
        }
        let check =
            |from: u64, to: u64, expected: u64| assert_eq!(log.within(from, to), expected, "{from} {to}");
        check(100, 200, 0);
        check(200, 300, 100);
        check(250, 450, 100);
        check(100, 700, 300);
        // Before that nothing is known.
        check(50, 150, 50);
        check(0, 50, 50);
        let mut long = GrantLog::new(0);
        (0..600).for_each(|at| long.set(at % 2 == 1, at * 20 * MS));
        assert!(long.intervals.len() < 200 && !long.knows(6 * SECOND) && long.knows(8 * SECOND));
        assert_eq!(long.within(10 * SECOND, 11 * SECOND), SECOND / 2);
    }

    /// Looks until a share is found, each a second with five samples, of which it is named in this part.
    fn looks_until_found(granted_percent: u64, named_percent: u64) -> Option<usize> {
        let mut test = SampleTest::default();
        let named = [(7, named_percent * SECOND / 100)].into();
        let sampled = Sampled { span: SECOND, busy: SECOND, named };
        (1..=100_000).find(|_| test.add(&sampled, granted_percent * SECOND / 100).is_some())
    }

    #[test]
    fn share_that_ignores_grants_is_found_within_five_seconds() {
        let check = |granted: u64, named: u64, expected: std::ops::RangeInclusive<usize>| {
            let found = looks_until_found(granted, named);
            assert!(found.is_some_and(|look| expected.contains(&look)), "{granted} {named}: {found:?}");
        };
        check(0, 100, 1..=2);
        check(0, 70, 2..=3);
        check(0, 50, 4..=5);
        check(30, 100, 2..=8);
        for granted in [10, 30, 50, 90] {
            assert_eq!(looks_until_found(granted, granted), None, "{granted}");
        }
    }

    #[test]
    fn busiest_process_of_the_share_is_named() {
        let mut test = SampleTest::default();
        let sampled =
            Sampled { span: SECOND, busy: SECOND, named: [(7, SECOND / 4), (8, SECOND / 2)].into() };
        assert_eq!((0..5).find_map(|_| test.add(&sampled, 0)), Some(8));
        assert_eq!(test, SampleTest::default(), "the rest of the share may be honest");
        let idle = Sampled { span: SECOND, busy: SECOND / 10, named: [(7, SECOND / 10)].into() };
        assert!((0..1000).all(|_| test.add(&idle, 0).is_none()), "an idle device");
    }

    /// The false-finding rate, exactly: for each number of samples and each probability that grants
    /// explain, the mean of the next statistic is at most the statistic plus one.
    #[test]
    fn honest_share_is_found_once_in_100_years_at_most() {
        let choose = |n: u32, k: u32| (0..k).fold(1.0, |all, at| all * f64::from(n - at) / f64::from(at + 1));
        for percent in 0..=100 {
            let explained = f64::from(percent) / 100.0;
            let likelihood = Likelihood::of(explained);
            for count in 0..=6_u32 {
                for honest in [0.0, explained / 2.0, explained, (explained + UNGATED_PART).min(1.0)] {
                    let mean: f64 = (0..=count)
                        .map(|named| {
                            let others = count - named;
                            let probability = choose(count, named)
                                * honest.powi(named as i32)
                                * (1.0 - honest).powi(others as i32);
                            probability * likelihood.ratio(named.into(), others.into())
                        })
                        .sum();
                    assert!(mean <= 1.0 + 1e-9, "{explained} {honest} {count}: {mean}");
                }
            }
        }
        let years = FALSE_FINDING_LOOKS / (5.0 * 86_400.0 * 365.25);
        assert!((years - 100.0).abs() < 1e-9, "{years}");
    }

    proptest! {
        /// Samples of a part of the period, and periods of which each explains another part: the mean
        /// likelihood is at most one as well.
        #[test]
        fn uneven_samples_are_no_evidence(
            samples in prop::collection::vec((0.01_f64..1.0, 0.0_f64..1.0), 1..7),
        ) {
            let busy: f64 = samples.iter().map(|(busy, _)| busy).sum();
            let granted: f64 = samples.iter().map(|(busy, part)| busy * part).sum();
            let likelihood = Likelihood::of(granted / busy);
            let mean = |(busy, part): &(f64, f64)| {
                part * likelihood.ratio(*busy, 0.0) + (1.0 - part) * likelihood.ratio(0.0, *busy)
            };
            let mean: f64 = samples.iter().map(mean).product();
            prop_assert!(mean <= 1.0 + 1e-9, "{mean}");
        }
    }

    fn key(number: u32) -> ShareKey {
        (format!("c{number}").as_str().into(), "s".into())
    }

    /// Seconds in which the device was active for `active` ms, and each share was charged and granted
    /// these ms. Returns the second of the first finding.
    fn found(seconds: u64, active: u64, shares: &[(u64, u64)]) -> Option<(u64, Unexplained)> {
        let mut test = ActiveTimeTest::default();
        (0..=seconds).find_map(|second| {
            let level = |(at, (charged, granted)): (usize, &(u64, u64))| {
                let (charged, granted) = (charged * MS * second, granted * MS * second);
                (key(at as u32), ShareLevel { charged, pending: 0, granted })
            };
            let levels = shares.iter().enumerate().map(level).collect();
            Some((second, test.add(active * MS, SECOND, levels)?))
        })
    }

    #[test]
    fn unexplained_active_time_is_found_within_five_seconds() {
        let check = |active: u64, shares: &[(u64, u64)], by: u64, low: &[u32]| {
            let expected = match low {
                [] => Unexplained::Ungranted,
                low => Unexplained::LowCharges(low.iter().copied().map(key).collect()),
            };
            let is = found(20, active, shares);
            assert!(
                is.as_ref().is_some_and(|(second, is)| *second <= by && *is == expected),
                "{active} {shares:?}: {is:?}"
            );
        };
        // A process works without a grant, beside a share and alone.
        check(1000, &[(600, 600), (0, 0)], 2, &[]);
        check(800, &[(600, 600), (0, 0)], 4, &[]);
        check(1000, &[(0, 0), (0, 0)], 1, &[]);
        // One measures nothing in its quanta, or half.
        check(980, &[(600, 600), (0, 380)], 2, &[1]);
        check(980, &[(490, 500), (240, 490)], 4, &[1]);
        // It shows charges for more time than it was granted.
        check(1000, &[(600, 600), (400, 0)], 2, &[]);
    }

    #[test]
    fn honest_charges_explain_the_active_time() {
        for (active, shares) in [
            (1000, &[(600, 600), (390, 395)][..]),
            (970, &[(500, 600), (480, 500)]),
            (300, &[(300, 900), (0, 0)]),
            (0, &[(0, 500)]),
            (620, &[(600, 1000)]),
        ] {
            assert_eq!(found(1000, active, shares), None, "{active} {shares:?}");
        }
    }

    #[test]
    fn long_kernel_explains_its_time_before_it_is_charged() {
        let (mut test, mut charged) = (ActiveTimeTest::default(), 0);
        for second in 0..200 {
            // Kernels of seven seconds: each is charged when it has completed.
            let pending = second % 7 * SECOND;
            charged += if second > 0 && pending == 0 { 7 * SECOND } else { 0 };
            let level = ShareLevel { charged, pending, granted: second * SECOND };
            assert_eq!(test.add(SECOND, SECOND, [(key(0), level)].into()), None, "{second}");
        }
        // A process that says so for ever is not believed for ever.
        let mut test = ActiveTimeTest::default();
        let ends = (0..200).find(|second| {
            let pending = (second * SECOND).min(PENDING_MAX_NS);
            let level = ShareLevel { charged, pending, granted: second * SECOND };
            test.add(SECOND, SECOND, [(key(0), level)].into()).is_some()
        });
        assert!(ends.is_some_and(|second| (59..70).contains(&second)), "{ends:?}");
    }

    #[test]
    fn uncharged_kernels_explain_nothing_again_and_again() {
        let mut test = ActiveTimeTest::default();
        let found = (0..6).find(|second| {
            let pending = if second % 2 == 0 { 0 } else { 300 * MS };
            let level = ShareLevel { charged: 0, pending, granted: second * SECOND };
            test.add(SECOND, SECOND, [(key(0), level)].into()).is_some()
        });
        assert!(found.is_some_and(|second| second <= 2), "{found:?}");
    }

    #[test]
    fn finding_ends_with_its_cause() {
        let mut test = ActiveTimeTest::default();
        let mut level = ShareLevel::default();
        let mut add = |active: u64, charged: u64| {
            level =
                ShareLevel { charged: level.charged + charged, granted: level.granted + charged, pending: 0 };
            test.add(active, SECOND, [(key(0), level), (key(1), ShareLevel::default())].into()).is_some()
        };
        assert!((0..100).any(|_| add(SECOND, SECOND / 2)));
        assert!(!add(SECOND / 2, SECOND / 2));
        // A share that comes says nothing yet.
        let levels = (0..3).map(|at| (key(at), ShareLevel::default())).collect();
        assert_eq!(test.add(SECOND, SECOND, levels), None);
    }
}
