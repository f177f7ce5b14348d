//! Estimates how much longer preempted kernels look than they are, on a device of which only the
//! total is known.
//!
//! Kernels longer than a time slice look longer if neighbours preempt them; during distrust
//! ([`super::device_totals`]) all do. So shares report more than the device total. The difference
//! belongs to the shares that had such kernels, by their own reports, or to all shares if none had.
//! All functions are pure.

use super::controller::{NS_PER_SECOND, QUANTUM};
use super::processor_sharing_model;
use super::shortfall::{self, kept};
use crate::shares::snapshot::ShareKey;
use std::collections::BTreeMap;
use std::time::Duration;

/// Where kernels are cut for less than this part of the time by chance, nothing follows from how
/// much they were.
const LEAST_CUT: f64 = 0.001;
/// Half-life of earlier measurements.
const HALF: Duration = Duration::from_millis(1000);
/// And of what part of its kernels is long: of a small share few looks see any.
const MIX: Duration = Duration::from_secs(10);
/// A device that is busy for this time, in nanoseconds per second, has no idle time left.
const FULL: u64 = NS_PER_SECOND / 100 * 97;
/// Random shortfall of a measurement, as a part of the device's time: a kernel that began before
/// the interval ends in it. Where kernels are preempted for less, the measurement says little.
const LUMPS: f64 = 0.02;
/// This part of what is believed of kernels that are cut is kept there for each [`HALF`].
const KEPT: f64 = 0.8;
/// Rates vary by this part, where kernels are preempted. Two shares of 30 % with kernels of 10 ms then
/// pass each other a few times per snapshot. With a quarter of it they stayed in step, or out of it,
/// for seconds.
const STEP: f64 = 0.12;

/// A shortfall at the start of a share, while its kernels are unknown, does not count. It counts
/// from this measurement on.
const SETTLED: usize = 5;

/// State of the shares of a device.
///
/// How much each share lacks follows from how much of the time it has a kernel under way, if kernels
/// arrive by chance ([`super::processor_sharing_model`]). Each rate is raised so that its share gets
/// its target beside the others, whose rates are raised as well. The missing time of a snapshot
/// shows whether arrivals are by chance. A share that claims a shortfall it does not have takes from
/// what others would get back, [`LUMPS`] at most if nothing is missing.
///
/// *Steps.* Shares whose kernels arrive equally often would stay in step or out of it. So rates are a
/// little larger in one snapshot and smaller in the next.
///
/// *Common shortfall.* If the device was busy for less than the shares that wait should have
/// together, all get more by the same factor ([`super::shortfall`]). False waiting reports gain one
/// point at most.
///
/// *Measured and paid.* A share may pay for long kernels seconds after they ran. So kernels under
/// way are counted by measurement for long kernels and by payment for others. Programs that start
/// together have long kernels under way far more often than later. So no share makes room for more
/// than another's ceiling.
///
/// *Full devices.* On a device without idle time larger rates only take from others. Rates are not
/// raised there for kernels that fit a time slice, and raised ones fall again.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PreemptionInflation {
    shares: BTreeMap<ShareKey, Known>,
    /// Seconds, and for how many of them the instance was at work; those longer ago count for less.
    time: f64,
    busy: f64,
    /// How many times as much as by chance kernels are cut, where none is long.
    times: f64,
    looks: usize,
    /// The common shortfall of the shares whose kernels are preempted, in seconds per second.
    lack: f64,
}

/// The factor by which a share's kernels look longer, at least 1, and the measured seconds,
/// weighted by age.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Known {
    trim: f64,
    /// For which it was charged, and had long kernels under way, by [`MIX`].
    charged: f64,
    long: f64,
    /// For which it had kernels under way, and would have had them if none were cut, by [`HALF`].
    under_way: f64,
    wish: f64,
}

/// The time of a share since the last snapshot, in nanoseconds per second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) charged: u64,
    /// Charged for kernels that look longer if they are preempted.
    pub(crate) long: u64,
    /// Possibly used beyond the charge.
    pub(crate) spared: u64,
    /// Expected, as far as the share wanted it.
    pub(crate) due: u64,
    /// The most it may use.
    pub(crate) ceiling: u64,
}

impl PreemptionInflation {
    /// By what factor the kernels of a share look longer.
    pub(crate) fn trim(&self, share: &ShareKey) -> f64 {
        self.shares.get(share).map_or(1.0, |known| known.trim)
    }

    /// The state after a measurement of the instance's busy time, in nanoseconds per second. During
    /// distrust all kernels are charged their measured length.
    pub(crate) fn after(
        mut self,
        busy: u64,
        parts: &[(ShareKey, Part)],
        since: Duration,
        is_doubted: bool,
    ) -> Self {
        // Measurements of a share with other co-runners do not apply any more.
        let is_known = |(share, _): &(ShareKey, Part)| self.shares.contains_key(share);
        let is_first = self.shares.len() != parts.len() || !parts.iter().all(is_known);
        if is_first {
            self = Self::default();
        }
        let kept = kept(since, HALF);
        self.time = self.time * kept + since.as_secs_f64();
        self.busy = self.busy * kept + seconds(busy, since);
        let shares: Vec<Known> = parts.iter().map(|(share, part)| self.lately(share, part, since)).collect();
        let by_time =
            |of: fn(&Known) -> f64| shares.iter().map(|share| of(share) / self.time).collect::<Vec<f64>>();
        let (under_way, wishes) = (by_time(|share| share.under_way), by_time(|share| share.wish));
        let had = processor_sharing_model::had(&under_way);
        let cut = |at: usize| under_way[at] * (1.0 - had[at]);
        let by_chance = |long: &[f64]| (0..long.len()).map(|at| long[at] * cut(at)).sum::<f64>();
        let long: Vec<f64> = shares.iter().map(Known::part).collect();
        // Where none is long what is missing is of the others.
        let are_all = is_doubted || by_chance(&long) < LEAST_CUT;
        if are_all && is_first {
            // Kernels are charged a guess until they were measured: what that is too much is missing once.
            let nothing = |known: Known| Known { under_way: 0.0, wish: 0.0, ..known };
            let known = parts.iter().zip(shares).map(|((share, _), known)| (share.clone(), nothing(known)));
            return Self { shares: known.collect(), ..Self::default() };
        }
        let long = if are_all { vec![1.0; parts.len()] } else { long };
        let missing = under_way.iter().sum::<f64>() - self.busy / self.time;
        let most = parts.len() as f64;
        let times = if are_all {
            // On a device without idle time, a shortfall is no reason to raise rates.
            let falls = self.times * KEPT.powf(since.as_secs_f64() / HALF.as_secs_f64());
            let most = if busy < FULL || is_doubted { most } else { falls };
            self.times = times(missing, by_chance(&long), LEAST_CUT).clamp(0.0, most);
            self.times
        } else {
            times(missing, by_chance(&long), LUMPS).clamp(0.0, 1.0)
        };
        // Short ones come too often to be in step.
        let step = if are_all { 0.0 } else { STEP };
        self.looks = self.looks.wrapping_add(1);
        let due = |at: usize| rate(parts[at].1.due);
        let of_long: f64 = (0..parts.len()).map(|at| due(at) * long[at]).sum();
        self.lack = match are_all || self.looks < SETTLED {
            true => 0.0,
            false => shortfall::after(self.lack, (0..parts.len()).map(due).sum(), rate(busy), since),
        };
        let more = |at: usize| shortfall::more(self.lack * long[at] / of_long.max(shortfall::LEAST), due(at));
        let wished = processor_sharing_model::had_of_parts(&wishes);
        let trim = |at: usize| {
            let ((share, part), known) = (&parts[at], shares[at]);
            // A share with almost no time gives no information.
            if part.charged < QUANTUM {
                return (share.clone(), known);
            }
            let place = ((at + self.looks) % parts.len()) as f64 / (most - 1.0).max(1.0);
            let step = step * (2.0 * place - 1.0) * times * long[at] * (1.0 - wishes[at]).max(0.0);
            let left = 1.0 - times * long[at] * (1.0 - wished[at]);
            let trim = (1.0 + step) / left.max(1.0 / most) * more(at);
            (share.clone(), Known { trim: trim.clamp(1.0, most), ..known })
        };
        self.shares = (0..parts.len()).map(trim).collect();
        self
    }

    /// The state of a share, with its latest report.
    fn lately(&self, share: &ShareKey, part: &Part, since: Duration) -> Known {
        let nothing = Known { trim: 1.0, charged: 0.0, long: 0.0, under_way: 0.0, wish: 0.0 };
        let before = self.shares.get(share).copied().unwrap_or(nothing);
        let (charged, long) = (seconds(part.charged, since), seconds(part.long.min(NS_PER_SECOND), since));
        let mix = kept(since, MIX);
        let known =
            Known { charged: before.charged * mix + charged, long: before.long * mix + long, ..before };
        let under_way = (long + charged * (1.0 - known.long_part())).min(since.as_secs_f64());
        let kept = kept(since, HALF);
        Known {
            under_way: before.under_way * kept + under_way,
            // Launches that began together looked long once, and are no more than it may have.
            wish: before.wish * kept + (under_way / before.trim).min(seconds(part.ceiling, since)),
            ..known
        }
    }
}

impl Known {
    /// The part of what it was charged that is for long kernels.
    fn long_part(&self) -> f64 {
        if self.charged > 0.0 { (self.long / self.charged).min(1.0) } else { 0.0 }
    }

    /// And for those that count as such.
    fn part(&self) -> f64 {
        (2.0 * self.long_part()).min(1.0)
    }
}

/// The factor by which kernels are preempted more often than by chance, if this part of the
/// device's time is missing and `expected` is missing by chance alone.
fn times(missing: f64, by_chance: f64, expected: f64) -> f64 {
    (missing + expected) / (by_chance + expected)
}

/// This time in seconds, for a rate in nanoseconds per second.
fn seconds(nanoseconds: u64, since: Duration) -> f64 {
    rate(nanoseconds) * since.as_secs_f64()
}

/// Seconds a second, of nanoseconds a second.
fn rate(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / NS_PER_SECOND as f64
}

#[cfg(test)]
pub(crate) mod tests;
