//! How much longer kernels of the shares of a MIG instance look than they are: pure.
//!
//! Kernels longer than a time slice look longer where neighbours cut in, and in doubt ([`super::joint`]) all do, so what shares
//! say is more than the instance had. What is missing they lack who had such kernels, which their libraries tell; where
//! nobody had, all. How much each lacks follows from how much of the time it has one under way, if they come as chance has it ([`turns`]):
//! each rate is raised so that its share has what it is to have beside the others, whose rates are raised as well. What is missing
//! in a look tells whether they come so; more than by chance they never meet for long. Who claims what it did not lose
//! takes from what others would get back, and where nothing is missing has [`LUMPS`] at most.
//!
//! **Steps.** Shares whose kernels come equally often would stay in step or out of it, and chance would be none. So rates
//! are a little larger in one look and smaller in another, in none the same for two.
//!
//! **What all lack.** However they come: where the device was at work for less than those who wait for more are to have together, they are
//! given more, all by the same factor ([`lack`]). Who lies about waiting has no more by that than others have, a point at most.
//!
//! **What is measured and what is paid.** A share may pay for long kernels seconds after they ran, and for several at once, as when
//! its first looked long. So what it has under way is what was measured of long kernels, and what it pays for others. Those of a
//! share whose kernels are long for the better part count as such: beside others they wait for their turn, which is far longer than
//! they are. And programs that begin together have long kernels under way far more often than later, so nobody makes room for more
//! than another's ceiling.
//!
//! Of a device that has nothing left nobody has more by larger rates but from others, who wait longer for their turns and look longer by
//! that. So there none are raised for kernels that fit a time slice, and those that were fall by and by, or as soon as nothing is missing;
//! longer ones would leave much of it idle if theirs did.

use super::arbiter::{QUANTUM, SECOND};
use super::bell::Key;
use super::{lack, turns};
use std::collections::BTreeMap;
use std::time::Duration;

/// Where kernels are cut for less than this part of the time by chance, nothing follows from how much they were.
const LEAST_CUT: f64 = 0.001;
/// Half of what is believed of the last looks was so long ago.
const HALF: Duration = Duration::from_millis(1000);
/// And of what part of its kernels is long: of a small share few looks see any.
const MIX: Duration = Duration::from_secs(10);
/// A device that is at work for so much of the time, in nanoseconds a second, has nothing left.
const FULL: u64 = SECOND / 100 * 97;
/// What looks lack by no more than chance, of the device's time: a kernel that began before one ends in it. So where kernels
/// are cut for less they tell little of how much.
const LUMPS: f64 = 0.02;
/// This part of what is believed of kernels that are cut is kept there for each [`HALF`].
const KEPT: f64 = 0.8;
/// A rate is larger and smaller by so much of it, where its kernels are cut. In a look two shares of 30 % whose kernels take 10 ms then pass each other
/// a few times; with a quarter of that they were in step, or out of it, for seconds, of which the one that is over was made up for.
const STEP: f64 = 0.12;

/// What shares lack while they begin, and their kernels are not known, is none of what they lack later: that begins with this look.
const SETTLED: usize = 5;

/// What is known of the shares of an instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Cuts {
    shares: BTreeMap<Key, Known>,
    /// Seconds, and for how many of them the instance was at work; those longer ago count for less.
    time: f64,
    busy: f64,
    /// How many times as much as by chance kernels are cut, where none is long.
    times: f64,
    looks: usize,
    /// What those whose kernels are cut lack together, in seconds a second.
    lack: f64,
}

/// Of a share: by what factor its kernels look longer, from 1 on, and seconds, those longer ago counting for less.
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

/// What a share was charged in the time since the last look, what of it is for kernels that look longer where they
/// are cut, what more it may have had, what it was to have, as far as it wanted that, and what it is to have at most; nanoseconds a second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) charged: u64,
    pub(super) long: u64,
    pub(super) spared: u64,
    pub(super) due: u64,
    pub(super) ceiling: u64,
}

impl Cuts {
    /// By what factor the kernels of a share look longer.
    pub(super) fn trim(&self, share: &Key) -> f64 {
        self.shares.get(share).map_or(1.0, |known| known.trim)
    }

    /// After a time in which the instance had so much, in nanoseconds a second; in doubt all kernels are charged what they look like.
    pub(super) fn after(
        mut self,
        busy: u64,
        parts: &[(Key, Part)],
        since: Duration,
        is_doubted: bool,
    ) -> Self {
        // Of shares beside which others work now, what was before says nothing.
        let is_known = |(share, _): &(Key, Part)| self.shares.contains_key(share);
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
        let had = turns::had(&under_way);
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
            // Of a device that has nothing left what is missing is no reason to raise rates.
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
            false => lack::after(self.lack, (0..parts.len()).map(due).sum(), rate(busy), since),
        };
        let more = |at: usize| lack::more(self.lack * long[at] / of_long.max(lack::LEAST), due(at));
        let wished = turns::had_of_parts(&wishes);
        let trim = |at: usize| {
            let ((share, part), known) = (&parts[at], shares[at]);
            // Who had next to nothing tells nothing.
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

    /// What was known of a share, with what it said since.
    fn lately(&self, share: &Key, part: &Part, since: Duration) -> Known {
        let nothing = Known { trim: 1.0, charged: 0.0, long: 0.0, under_way: 0.0, wish: 0.0 };
        let before = self.shares.get(share).copied().unwrap_or(nothing);
        let (charged, long) = (seconds(part.charged, since), seconds(part.long.min(SECOND), since));
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

/// What of something is left after so long, if after that time it is a half.
pub(super) fn kept(since: Duration, half: Duration) -> f64 {
    0.5_f64.powf(since.as_secs_f64() / half.as_secs_f64())
}

/// How many times as much as by chance kernels are cut, if that much of the device's time is missing; so much is expected to be
/// by chance alone.
fn times(missing: f64, by_chance: f64, expected: f64) -> f64 {
    (missing + expected) / (by_chance + expected)
}

/// Of that time, at so many nanoseconds a second.
fn seconds(nanoseconds: u64, since: Duration) -> f64 {
    rate(nanoseconds) * since.as_secs_f64()
}

/// Seconds a second, of nanoseconds a second.
fn rate(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / SECOND as f64
}

#[cfg(test)]
pub(super) mod tests;
