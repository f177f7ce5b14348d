//! The launch that needs nothing but to be charged: most of them, where something is paced at all.
//!
//! A process sees one device as a rule, which has one share; the gate is open, the policy is the one that was read, the
//! kernel is known and this launch of it is not measured, nothing is owed and there is credit. All that is a few loads,
//! for which what was looked up by the launch before is remembered, and one locked addition. Whatever is different, the
//! launch goes the long way ([`crate::Device::launch`]), which remembers anew.
//!
//! The driver's answer is not looked at, so that it may be called by a jump with the program's own registers and stack:
//! who launches what the driver refuses has paid for it. As an unknown kernel is measured, it goes the long way as long
//! as it is refused, and is charged nothing.

use super::Pace;
use super::costs::Work;
use crate::Device;
use crate::ledger::Ledger;
use crate::system::System;
use core::ptr;
use divvy_pages::PolicyPage;
use divvy_pages::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

/// What the last launch found on the only device. Zeros: nothing.
#[derive(Debug)]
pub(crate) struct Quick {
    page: AtomicPtr<PolicyPage>,
    pace: AtomicPtr<Pace>,
    /// The page's stamp when its policy was read.
    stamp: AtomicU64,
    /// What the page said of the pace: not 0, where something is remembered.
    word: AtomicU32,
}

impl<S: System> Device<'_, S> {
    /// Remembers what was found by a launch that is paced and finds the gate open.
    pub(super) fn remember(&self, pace: &Pace) {
        let mut places = self.places.places();
        let (Some(place), None) = (places.next(), places.next()) else { return };
        let Some((page, stamp, word)) = place.heeded() else { return };
        let quick = &self.local.quick;
        quick.page.store(ptr::from_ref(page).cast_mut(), Relaxed);
        quick.pace.store(ptr::from_ref(pace).cast_mut(), Relaxed);
        quick.stamp.store(stamp, Relaxed);
        quick.word.store(word, Release);
    }
}

impl<S: System> Ledger<S> {
    /// Whether a launch on the current device may go at once. Then it is charged.
    #[inline]
    pub fn goes(&self, work: Work) -> bool {
        let Some(local) = self.made() else { return false };
        let quick = &local.quick;
        let word = quick.word.load(Acquire);
        // SAFETY: both were stored before the word was, of a page and a place that live as long as the process.
        #[allow(unsafe_code)]
        let (page, pace) = unsafe { (quick.page.load(Relaxed).as_ref(), quick.pace.load(Relaxed).as_ref()) };
        let (Some(page), Some(pace)) = (page, pace) else { return false };
        let is_same = page.pace_word() == word && page.stamp() == quick.stamp.load(Relaxed);
        if word == 0 || !is_same || page.gate().load(Relaxed) != 0 || pace.owed.load(Relaxed) > 0 {
            return false;
        }
        let Some(cost) = local.costs.known(work) else { return false };
        let nanoseconds = cost.charged();
        // Two threads may find the same credit: what the second takes too much is lacking to the next launch.
        if pace.credit.load(Relaxed) < nanoseconds || !cost.passes() {
            return false;
        }
        pace.credit.fetch_sub(nanoseconds, Relaxed);
        true
    }
}
