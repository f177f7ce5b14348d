//! What each kernel costs, learned by measuring some of its launches.
//!
//! Kernels are told apart by their function and the order of magnitude of their grid; an
//! executable graph is one kernel. A kernel that is long is measured at each launch, so that
//! what it is charged is what it took. A short one, of which there are many, is measured in runs of
//! [`RUN`] launches in each [`PERIOD`], each time at another place, so that a program with a rhythm of its own
//! is not met at the same beat for ever; each measured launch then stands for others. (A program that means
//! to can count along and be long where nobody looks. What it has is for the node to see.) Charges are corrected by what was measured
//! ([`super::samples`]), so the estimate need not be good for the sum to be right.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Kernels that are told apart; all further ones are one.
const KERNELS: usize = 1024;
const PROBES: usize = 8;
/// From here on a launch is worth its own measurement, in nanoseconds.
const LONG: u64 = 100_000;
/// What an unknown kernel is charged until it was measured, in nanoseconds.
const UNKNOWN: u64 = 200_000;
/// So many first launches are all measured.
const FIRST: u32 = 16;
/// So many of these may be under way at once.
const YOUNG: u32 = 3;
const PERIOD: u32 = 128;
const RUN: u32 = 8;
/// How many launches one measured launch of a run stands for; the first of a run is not counted.
const STANDS_FOR: u32 = PERIOD / (RUN - 1);

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
pub(crate) struct Costs([Cost; KERNELS]);

/// One kernel.
#[derive(Debug)]
pub(crate) struct Cost {
    key: AtomicU64,
    /// Nanoseconds; 0: never measured.
    estimate: AtomicU64,
    measured: AtomicU32,
    turn: AtomicU32,
    /// Measured launches under way.
    under_way: AtomicU32,
}

/// One launch.
#[derive(Debug)]
pub(crate) struct Charge<'a> {
    pub(crate) cost: &'a Cost,
    pub(crate) number: u32,
    pub(crate) nanoseconds: i64,
    pub(crate) measure: Measure,
}

/// Whether and how a launch is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    No,
    /// The first of a run: from its end on the next are measured.
    Lead,
    /// It stands for so many launches.
    For(u32),
}

impl Work {
    fn key(self) -> u64 {
        let size = u64::from(64 - self.blocks.leading_zeros());
        (self.function ^ size << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
    }
}

impl Costs {
    /// What the next launch of a kernel is charged, and how it is measured.
    #[inline]
    pub(crate) fn charge(&self, work: Work) -> Charge<'_> {
        let number = self.number(work);
        let cost = &self.0[number];
        let (nanoseconds, measure) = cost.next();
        Charge { cost, number: number as u32, nanoseconds: nanoseconds as i64, measure }
    }

    /// Where a kernel is kept; made if it is new.
    #[inline]
    fn number(&self, work: Work) -> usize {
        let key = work.key();
        let start = (key >> 54) as usize;
        for probe in 0..PROBES {
            let at = (start + probe) % KERNELS;
            let known = &self.0[at].key;
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
        self.0.get(number as usize)
    }
}

impl Cost {
    /// What the next launch is charged, in nanoseconds, and how it is measured.
    #[inline]
    pub(crate) fn next(&self) -> (u64, Measure) {
        let estimate = self.estimate.load(Relaxed);
        // Two threads may count one turn: nothing rests on it.
        let turn = self.turn.load(Relaxed);
        self.turn.store(turn.wrapping_add(1), Relaxed);
        let measure = if estimate >= LONG || self.measured.load(Relaxed) < FIRST {
            Measure::For(1)
        } else {
            in_run(turn)
        };
        (if estimate == 0 { UNKNOWN } else { estimate }, measure)
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
    pub(crate) fn goes(&self, by: i32) {
        let _ = self.under_way.fetch_update(Relaxed, Relaxed, |count| count.checked_add_signed(by));
    }

    /// A launch took so many nanoseconds of the device. One that took much longer than the others is
    /// believed step by step: kernels of neighbours may have cut in. It is charged in full all the same.
    pub(crate) fn learn(&self, took: u64) {
        let count = self.measured.load(Relaxed).min(FIRST);
        self.measured.store(count + 1, Relaxed);
        let old = self.estimate.load(Relaxed);
        let took = if count < FIRST { took } else { took.min(old.saturating_mul(4)) };
        let part = i64::from(count) + 1;
        let new = old as i64 + (took as i64 - old as i64) / part;
        self.estimate.store(new.max(1) as u64, Relaxed);
    }
}

/// Where in its period the run lies is different for each.
fn in_run(turn: u32) -> Measure {
    let (period, at) = (turn / PERIOD, turn % PERIOD);
    let begin = period.wrapping_mul(0x9e37_79b9) >> 16;
    match at.wrapping_sub(begin % (PERIOD - RUN)) {
        0 => Measure::Lead,
        place if place < RUN => Measure::For(STANDS_FOR),
        _ => Measure::No,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_kernel_is_measured_in_one_run_of_each_period() {
        for period in 0..1000 {
            let all: Vec<Measure> = (period * PERIOD..(period + 1) * PERIOD).map(in_run).collect();
            let stands: u32 =
                all.iter().map(|measure| if let Measure::For(count) = measure { *count } else { 0 }).sum();
            assert_eq!(all.iter().filter(|measure| **measure == Measure::Lead).count(), 1);
            assert_eq!(stands, STANDS_FOR * (RUN - 1), "nearly all of them");
        }
    }

    #[test]
    fn a_kernel_is_known_by_its_function_and_the_size_of_its_grid() {
        // SAFETY: atomics throughout, for which zeros are valid.
        #[allow(unsafe_code)]
        let costs: Box<Costs> = unsafe { Box::new_zeroed().assume_init() };
        let at = |function, blocks| costs.number(Work { function, blocks });
        assert_eq!(at(1, 1000), at(1, 1000));
        assert_eq!(at(1, 1000), at(1, 1023));
        assert_ne!(at(1, 1000), at(1, 20));
        assert_ne!(at(1, 1000), at(2, 1000));
        let highest = (0..10_000).map(|function| at(function << 8, 1)).max();
        assert_eq!(highest, Some(KERNELS - 1), "too many are one");
    }
}
