//! What each kernel costs, learned by measuring some of its launches.
//!
//! Kernels are told apart by their function and the order of magnitude of their grid; an
//! executable graph is one kernel. A kernel that is long is measured at each launch, so that
//! what it is charged is what it took. Of a short one that is launched often some launches are
//! measured, which stand for the others ([`super::runs`]). (A program that means to can find out and be long where nobody
//! looks. What it has is for the node to see.) Charges are corrected by what was measured ([`super::samples`]), so the estimate need not be good for the sum to be right.
//!
//! **Slices of neighbours.** A kernel that a neighbour's time slice cuts, or that has to wait for its turn after a
//! pause, looks longer than it is. Of very short ones it is one in a hundred, which looks a hundred times longer: counted
//! in full those few are half of what is charged, and as they come by chance, it is another half each second. Of those of
//! a millisecond it is most, which look two or three times longer; and who is charged more pauses more often, waits for its
//! turn more often, and is charged more again, while its neighbours are charged less. So while the node watches, who sees
//! what the share really had, what is too long counts as others do. Too long is what is far longer than most, if it is one
//! of few. Of kernels that fit a time slice it is what is longer than the fastest vary, as no neighbour moves these; of
//! what such kernels were measured to take a quarter counts at least, however they vary, so that what the node has to make up
//! for is bounded. A kernel may also be now short and now long by itself: of how much of what is left out that may be the node is told
//! ([`Cost::spared`]), which knows for how long the device was at work. While nobody watches all of it counts: no kernel can be made to look shorter.
//! Long is what ran long itself, from begin to end: of kernels that overlap each
//! moves the end of all work by much or by little, as they happen to end. A slice that cuts them cuts all that are under way, and the first to end moves that end for all:
//! so what a launch ran too long is taken off what it moved the end by, if that is as much, and the others count in full.
//!
//! **Kernels longer than a slice** are cut by each neighbour that works meanwhile. By how much changes from launch to
//! launch, as others come and go, and comes in spells of a second or so, which the node, that looks once a second,
//! answers when they are over. So while it watches each is charged what the last [`MEAN`] of its kernel took on
//! average, and what it took more or less is put off ([`super::samples`]): the sum is right, and the spells are gone.

use super::runs::{Measure, Runs, Tempo};
use divvy_pages::sync::Ordering::Relaxed;
use divvy_pages::sync::{AtomicU16, AtomicU32, AtomicU64};

/// Kernels that are told apart; all further ones are one.
pub(super) const KERNELS: usize = 1024;
const PROBES: usize = 8;
/// From here on a launch is worth its own measurement, in nanoseconds.
const LONG: u64 = 100_000;
/// What an unknown kernel is charged until it was measured, in nanoseconds.
const UNKNOWN: u64 = 200_000;
/// So many first launches are all measured.
const FIRST: u16 = 16;
/// Of so many launches what they took is the mean.
const MEAN: u16 = 64;
/// So many of these may be under way at once.
const YOUNG: u16 = 3;
/// A launch that takes so many times what most take is far longer than most.
const FAR: u64 = 4;
/// Slices come so often at most, in nanoseconds of a share's own time: as often as it is woken.
const SLICED: u64 = 128_000;
/// Of 65536: of kernels that were measured so many may have been cut though they are very short, and however long.
const SOME: u64 = 65536 / 20;
const MANY: u64 = 65536 / 4;
/// Kernels that are measured at each launch and fit a time slice, in nanoseconds: GPUs change from one process to the
/// next every 2 ms unless they are told otherwise (`nvidia-smi compute-policy`).
const FITTING: core::ops::Range<u64> = LONG / 2..2_000_000;
/// Of these one in so many is one of the fastest, which others exceed by half or by so many nanoseconds without being
/// cut: few, as on a full GPU nearly all launches of a small share are cut, each of which waits for its turn. When it was first
/// measured, one may have been cut to twice the length.
const FASTEST: u64 = 1024;
const FIRST_SEEN: core::ops::Range<u64> = FITTING.start..2 * FITTING.end;
const VARY: u64 = 60_000;
/// Of one that takes longer than that, but no more than so many quarters of the fastest, nobody can tell whether it was cut or is as long
/// as that; and one that was cut may have been a quarter longer than it counts, as the mean of kernels that vary by that is.
const NEAR: u64 = 9;
/// They may have been measured to take so many times what of it counts.
const COUNTED: u32 = 4;

/// What is launched.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The `CUfunction`, `CUkernel` or `CUgraphExec`.
    pub function: u64,
    /// Blocks of the grid; 0 for a graph.
    pub blocks: u64,
}

/// All costs of a process. Zeros are a table that knows nothing.
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
    /// What about half of them take less than and half more, in nanoseconds; where they fit a slice, the fastest.
    centre: AtomicU32,
    measured: AtomicU16,
    /// Of 65536 that were measured so many were far longer than the centre.
    far: AtomicU16,
    /// What the last ones took, and what of it counted: means in nanoseconds.
    took: AtomicU32,
    counted: AtomicU32,
    /// Measured launches under way.
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
    /// What the next launch of a kernel is charged, and how it is measured; `now` in nanoseconds.
    #[inline]
    pub(crate) fn charge(&self, work: Work, now: impl Fn() -> u64) -> Charge<'_> {
        let number = self.number(work);
        let cost = &self.kernels[number];
        let (nanoseconds, measure) = cost.next(&self.tempo, now);
        Charge { cost, number: number as u32, nanoseconds: nanoseconds as i64, measure }
    }

    /// A kernel that lies where it is looked for first, which of few all do.
    #[inline]
    pub(super) fn known(&self, work: Work) -> Option<&Cost> {
        let key = work.key();
        let cost = &self.kernels[(key >> 54) as usize % KERNELS];
        (cost.key.load(Relaxed) == key).then_some(cost)
    }

    /// Where a kernel is kept; made if it is new.
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
    /// What a launch is charged that is not measured, in nanoseconds.
    #[inline]
    pub(super) fn charged(&self) -> i64 {
        self.estimate.load(Relaxed) as i64
    }

    /// Whether the next launch is not measured; then it is counted.
    #[inline]
    pub(super) fn passes(&self) -> bool {
        !self.runs.is_due()
    }

    /// What the next launch is charged, in nanoseconds, and how it is measured.
    #[inline]
    fn next(&self, tempo: &Tempo, now: impl Fn() -> u64) -> (u64, Measure) {
        let estimate = self.estimate.load(Relaxed);
        if self.runs.is_due() { self.next_measured(estimate, tempo, now) } else { (estimate, Measure::No) }
    }

    #[cold]
    fn next_measured(&self, estimate: u64, tempo: &Tempo, now: impl Fn() -> u64) -> (u64, Measure) {
        // Of kernels that overlap each is charged less than its length, and by chance much less for a while.
        let half = u64::from(self.centre.load(Relaxed) / 2);
        if estimate.max(half) >= LONG || self.measured.load(Relaxed) < FIRST {
            return (if estimate == 0 { UNKNOWN } else { estimate }, Measure::For(1));
        }
        (estimate, self.runs.next(estimate, self.key.load(Relaxed), tempo, now))
    }

    /// Whether one more launch may go. While little is known of a kernel few may be under way, or many
    /// would have gone before the first tells how long it is.
    pub(crate) fn may_go(&self) -> bool {
        let most = match self.measured.load(Relaxed) {
            0 => 1,
            count if count < FIRST => YOUNG,
            _ => return true,
        };
        self.under_way.load(Relaxed) < most
    }

    /// The launches under way that are measured are more or fewer.
    pub(crate) fn goes(&self, by: i16) {
        let _ = self.under_way.fetch_update(Relaxed, Relaxed, |count| count.checked_add_signed(by));
    }

    /// A launch took so many nanoseconds of the device, of the `length` that it ran: what it is to be charged. One that took much
    /// longer than the others is believed step by step: kernels of neighbours may have cut in. It is charged in full all the
    /// same, unless the node watches and it is one of few.
    pub(crate) fn learn(&self, took: u64, length: u64, is_watched: bool) -> u64 {
        let all = self.measured.load(Relaxed).min(MEAN);
        self.measured.store(all + 1, Relaxed);
        let count = all.min(FIRST);
        // Those before it were cut, or waited for their turn: what they say would have each launch wait for its turn again.
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
        // Estimates are of nanoseconds, and four centuries are no overflow.
        let seen = if count < FIRST { counts } else { counts.min(old.wrapping_mul(4)) };
        self.estimate.store(towards(old, seen, count).max(1), Relaxed);
        counts
    }

    /// Of a launch that counts as less than it took: what more may be its own, in nanoseconds.
    pub(crate) fn spared(&self, took: u64, counts: u64) -> u64 {
        let centre = u64::from(self.centre.load(Relaxed));
        if !FITTING.contains(&centre) {
            return 0;
        }
        let most = if took <= centre * NEAR / 4 { took } else { took.min(counts + counts / 4) };
        most.wrapping_sub(counts)
    }

    /// Whether its launches count as more than a time slice, on the mean.
    pub(super) fn is_long(&self) -> bool {
        u64::from(self.counted.load(Relaxed)) >= FITTING.end
    }

    /// What a launch that counts as so much is to be charged where others cut in: nanoseconds, of a kernel that is longer
    /// than a slice and about as long as ever.
    pub(super) fn usually(&self, counts: u64) -> Option<u64> {
        let mean = u64::from(self.counted.load(Relaxed));
        let is_usual = counts <= mean * FAR && mean <= counts * FAR;
        (self.is_long() && is_usual && self.measured.load(Relaxed) >= FIRST).then_some(mean)
    }

    /// Whether what is too long may count for less, where so many of 65536 are.
    fn may_leave_out(&self, centre: u64, far: u64) -> bool {
        let few = (centre * 65536 / SLICED).clamp(SOME, MANY);
        let is_counted = || self.counted.load(Relaxed) >= self.took.load(Relaxed) / COUNTED;
        far <= few || FITTING.contains(&centre) && is_counted()
    }

    /// The centre, and how many of 65536 are far from it, with one more measured launch of that length.
    fn place(&self, length: u64, count: u16) -> (u64, u64) {
        let length = length.clamp(1, u32::MAX.into());
        let (old, far) = (u64::from(self.centre.load(Relaxed)), u64::from(self.far.load(Relaxed)));
        let centre = match old {
            0 => length,
            // It was found when slices came: by one of the first, or by most of those since.
            _ if length * FAR < old && count < FIRST => length,
            _ if length * FAR < old => old / 2,
            _ => {
                let step = (old / (u64::from(count) + 1)).max(1);
                // It rests where as many times more take longer as it moves less for one of these.
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

/// The mean of so many with one more.
fn towards(mean: u64, now: u64, count: u16) -> u64 {
    (mean as i64 + (now as i64 - mean as i64) / (i64::from(count) + 1)) as u64
}

/// What is longer is too long for a kernel of that centre.
fn longest(centre: u64) -> u64 {
    if FITTING.contains(&centre) { centre + VARY.max(centre / 2) } else { centre * FAR }
}

/// What such a one counts as.
fn usual(centre: u64) -> u64 {
    if FITTING.contains(&centre) { centre + centre / 4 } else { centre }
}

#[cfg(test)]
mod tests;
