//! The cost of each kernel, learned by measuring some of its launches.
//!
//! Kernels are identified by function and order of magnitude of the grid; an executable graph is
//! one kernel. Long kernels are measured at each launch. Short kernels are sampled
//! ([`super::sampling`]). Charges are corrected by the measurements ([`super::samples`]), so
//! estimates need not be exact. While the node measures the share itself, time that co-running
//! shares add by preemption is left out of the cost ([`Cost::learn`]); without the node it counts
//! in full.

use super::sampling::{Measure, Runs, Tempo};
use divvy_pages::sync::Ordering::Relaxed;
use divvy_pages::sync::{AtomicU16, AtomicU32, AtomicU64};

/// Number of distinguished kernels; all further kernels share the last entry.
pub(super) const KERNELS: usize = 1024;
const PROBES: usize = 8;
/// Kernels at least this long are measured at each launch, in nanoseconds.
const LONG: u64 = 100_000;
/// Charge of an unknown kernel until it is measured, in nanoseconds.
const UNKNOWN: u64 = 200_000;
/// Number of first launches of a kernel that are all measured.
const FIRST: u16 = 16;
/// Number of launches in the moving averages.
const MEAN: u16 = 64;
/// Maximum number of first launches in flight.
const YOUNG: u16 = 3;
/// A launch that takes this many times the centre counts as far too long.
const FAR: u64 = 4;
/// Minimum interval between preemptions, in nanoseconds of a share's own time: it is woken this
/// often.
const SLICED: u64 = 128_000;
/// Bounds of the share of launches that may be preempted, in 1/65536.
const SOME: u64 = 65536 / 20;
const MANY: u64 = 65536 / 4;
/// Kernels that are measured at each launch and fit a time slice, in nanoseconds. GPUs switch
/// processes every 2 ms by default (`nvidia-smi compute-policy`).
const FITTING: core::ops::Range<u64> = LONG / 2..2_000_000;
/// For kernels that fit a slice, the centre follows the fastest 1/1024 of the launches, because on
/// a full GPU nearly all launches of a small share are preempted. Undisturbed launches exceed it by
/// at most half or by [`VARY`] nanoseconds. A first measurement may have been preempted to twice
/// the length.
const FASTEST: u64 = 1024;
const FIRST_SEEN: core::ops::Range<u64> = FITTING.start..2 * FITTING.end;
const VARY: u64 = 60_000;
/// Up to this many quarters of the fastest, a launch may be preempted or really that long. A
/// preempted launch may have been a quarter longer than it counts, the mean of kernels that vary by
/// that much.
const NEAR: u64 = 9;
/// The measured time may be at most this many times the counted time.
const COUNTED: u32 = 4;

/// The work of one launch.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The `CUfunction`, `CUkernel` or `CUgraphExec`.
    pub function: u64,
    /// Blocks of the grid; 0 for a graph.
    pub blocks: u64,
}

/// The costs of all kernels of a process. Zeros are an empty table.
#[derive(Debug)]
pub(crate) struct Costs {
    kernels: [Cost; KERNELS],
    tempo: Tempo,
}

/// One kernel.
#[derive(Debug)]
pub(crate) struct Cost {
    key: AtomicU64,
    /// Nanoseconds; 0: never measured.
    estimate: AtomicU64,
    runs: Runs,
    /// The median duration in nanoseconds; for kernels that fit a slice, the fastest.
    centre: AtomicU32,
    measured: AtomicU16,
    /// Share of measured launches that were far longer than the centre, in 1/65536.
    far: AtomicU16,
    /// Averages of the last launches, in nanoseconds: the measured time and the counted time.
    took: AtomicU32,
    counted: AtomicU32,
    /// Measured launches in flight.
    under_way: AtomicU16,
}

/// One launch.
#[derive(Debug)]
pub(crate) struct Charge<'a> {
    pub(crate) cost: &'a Cost,
    pub(crate) number: u32,
    pub(crate) nanoseconds: i64,
    pub(crate) measure: Measure,
}

impl Work {
    fn key(self) -> u64 {
        let size = u64::from(64 - self.blocks.leading_zeros());
        (self.function ^ size << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
    }
}

impl Costs {
    /// Returns the charge of a kernel's next launch, and how it is measured; `now` in nanoseconds.
    #[inline]
    pub(crate) fn charge(&self, work: Work, now: impl Fn() -> u64) -> Charge<'_> {
        let number = self.number(work);
        let cost = &self.kernels[number];
        let (nanoseconds, measure) = cost.next(&self.tempo, now);
        Charge { cost, number: number as u32, nanoseconds: nanoseconds as i64, measure }
    }

    /// Returns a kernel that is in its first table entry, as all are if they are few.
    #[inline]
    pub(super) fn known(&self, work: Work) -> Option<&Cost> {
        let key = work.key();
        let cost = &self.kernels[(key >> 54) as usize % KERNELS];
        (cost.key.load(Relaxed) == key).then_some(cost)
    }

    /// The index of a kernel; new kernels are added.
    #[inline]
    fn number(&self, work: Work) -> usize {
        let key = work.key();
        let start = (key >> 54) as usize;
        for probe in 0..PROBES {
            let at = (start + probe) % KERNELS;
            let known = &self.kernels[at].key;
            let claim = || {
                known.compare_exchange(0, key, Relaxed, Relaxed).map_or_else(|other| other == key, |_| true)
            };
            match known.load(Relaxed) {
                0 if claim() => return at,
                other if other == key => return at,
                _ => {}
            }
        }
        KERNELS - 1
    }

    pub(crate) fn at(&self, number: u32) -> Option<&Cost> {
        self.kernels.get(number as usize)
    }
}

impl Cost {
    /// The charge of an unmeasured launch, in nanoseconds.
    #[inline]
    pub(super) fn charged(&self) -> i64 {
        self.estimate.load(Relaxed) as i64
    }

    /// Returns true and counts the launch if it is not measured.
    #[inline]
    pub(super) fn passes(&self) -> bool {
        !self.runs.is_due()
    }

    /// Returns the next launch's charge in nanoseconds, and how it is measured.
    #[inline]
    fn next(&self, tempo: &Tempo, now: impl Fn() -> u64) -> (u64, Measure) {
        let estimate = self.estimate.load(Relaxed);
        if self.runs.is_due() { self.next_measured(estimate, tempo, now) } else { (estimate, Measure::No) }
    }

    #[cold]
    fn next_measured(&self, estimate: u64, tempo: &Tempo, now: impl Fn() -> u64) -> (u64, Measure) {
        // Overlapping kernels are charged less than their length, by chance much less for a while.
        let half = u64::from(self.centre.load(Relaxed) / 2);
        if estimate.max(half) >= LONG || self.measured.load(Relaxed) < FIRST {
            return (if estimate == 0 { UNKNOWN } else { estimate }, Measure::For(1));
        }
        (estimate, self.runs.next(estimate, self.key.load(Relaxed), tempo, now))
    }

    /// Returns true if another launch may go. While little is known of a kernel, only few may be in
    /// flight; otherwise many would go before the first shows how long it is.
    pub(crate) fn may_go(&self) -> bool {
        let most = match self.measured.load(Relaxed) {
            0 => 1,
            count if count < FIRST => YOUNG,
            _ => return true,
        };
        self.under_way.load(Relaxed) < most
    }

    /// Changes the number of measured launches in flight.
    pub(crate) fn goes(&self, by: i16) {
        let _ = self.under_way.fetch_update(Relaxed, Relaxed, |count| count.checked_add_signed(by));
    }

    /// Records a launch and returns what it counts as, in nanoseconds. `took` is how far it moved
    /// the end of all work, `length` how long it ran.
    ///
    /// A launch is too long if it runs far longer than most. The excess is left out if the node
    /// measures the share and such launches are few, or if the kernel fits a time slice. At least a
    /// quarter of the measured time counts in that case. For overlapping kernels the excess is
    /// subtracted only from a launch that moved the end at least that far.
    pub(crate) fn learn(&self, took: u64, length: u64, is_watched: bool) -> u64 {
        let all = self.measured.load(Relaxed).min(MEAN);
        self.measured.store(all + 1, Relaxed);
        let count = all.min(FIRST);
        // The earlier launches were preempted. Their estimate would delay every launch again.
        let is_anew = is_watched && count < FIRST && length * FAR < self.centre.load(Relaxed).into();
        let old = if is_anew { took } else { self.estimate.load(Relaxed) };
        let (centre, far) = self.place(length, count);
        let is_cut = is_watched && length > longest(centre) && self.may_leave_out(centre, far);
        let away = length.wrapping_sub(usual(centre));
        let counts = if is_cut && took > away { took - away } else { took };
        for (mean, now) in [(&self.took, took), (&self.counted, counts)] {
            let new = towards(mean.load(Relaxed).into(), now.min(u32::MAX.into()), all);
            mean.store(new as u32, Relaxed);
        }
        // Nanoseconds in 64 bits cover centuries: no overflow.
        let seen = if count < FIRST { counts } else { counts.min(old.wrapping_mul(4)) };
        self.estimate.store(towards(old, seen, count).max(1), Relaxed);
        counts
    }

    /// For a launch that counts as less than it took: the part that may be its own, in nanoseconds.
    pub(crate) fn spared(&self, took: u64, counts: u64) -> u64 {
        let centre = u64::from(self.centre.load(Relaxed));
        if !FITTING.contains(&centre) {
            return 0;
        }
        let most = if took <= centre * NEAR / 4 { took } else { took.min(counts + counts / 4) };
        most.wrapping_sub(counts)
    }

    /// Returns true if its launches count as more than a time slice on average.
    pub(super) fn is_long(&self) -> bool {
        u64::from(self.counted.load(Relaxed)) >= FITTING.end
    }

    /// The average charge of a kernel longer than a slice, in nanoseconds. `None` if the launch
    /// deviates too much.
    pub(super) fn usually(&self, counts: u64) -> Option<u64> {
        let mean = u64::from(self.counted.load(Relaxed));
        let is_usual = counts <= mean * FAR && mean <= counts * FAR;
        (self.is_long() && is_usual && self.measured.load(Relaxed) >= FIRST).then_some(mean)
    }

    /// Returns true if the excess of long launches may be left out; `far` is their share in
    /// 1/65536.
    fn may_leave_out(&self, centre: u64, far: u64) -> bool {
        let few = (centre * 65536 / SLICED).clamp(SOME, MANY);
        let is_counted = || self.counted.load(Relaxed) >= self.took.load(Relaxed) / COUNTED;
        far <= few || FITTING.contains(&centre) && is_counted()
    }

    /// Adds a measured launch, and returns the centre and the share of far launches in 1/65536.
    fn place(&self, length: u64, count: u16) -> (u64, u64) {
        let length = length.clamp(1, u32::MAX.into());
        let (old, far) = (u64::from(self.centre.load(Relaxed)), u64::from(self.far.load(Relaxed)));
        let centre = match old {
            0 => length,
            // The old centre was measured during preemptions.
            _ if length * FAR < old && count < FIRST => length,
            _ if length * FAR < old => old / 2,
            _ => {
                let step = (old / (u64::from(count) + 1)).max(1);
                // It settles where the ratio of longer to shorter launches is the inverse ratio of
                // its steps.
                let up = if FIRST_SEEN.contains(&old) { step / (FASTEST - 1) } else { step };
                if length > old {
                    (old + up.max(1)).min(length)
                } else {
                    old.saturating_sub(step).max(length)
                }
            }
        };
        let far = if length > longest(centre) { far + (65535 - far) / 64 } else { far - far / 64 };
        self.centre.store(centre as u32, Relaxed);
        self.far.store(far as u16, Relaxed);
        (centre, far)
    }
}

/// A moving average with one more value.
fn towards(mean: u64, now: u64, count: u16) -> u64 {
    (mean as i64 + (now as i64 - mean as i64) / (i64::from(count) + 1)) as u64
}

/// The duration above which a launch is too long.
fn longest(centre: u64) -> u64 {
    if FITTING.contains(&centre) { centre + VARY.max(centre / 2) } else { centre * FAR }
}

/// The duration that a too long launch counts as.
fn usual(centre: u64) -> u64 {
    if FITTING.contains(&centre) { centre + centre / 4 } else { centre }
}

#[cfg(test)]
mod tests;
