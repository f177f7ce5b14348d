//! The fast path of a launch that only has to be charged.
//!
//! It applies to a process with one device and one share. The gate must be open, the policy
//! unchanged, the kernel known and not measured this time, and there must be credit and no debt.
//! The launch then costs a few loads of cached data and one atomic addition. Otherwise it takes the
//! slow path ([`Device::launch`]), which refreshes the cache. The hook jumps to the driver with the
//! program's registers and stack, so it cannot see a refusal by the driver: such a launch is
//! charged, too.

use super::cost_model::Work;
use super::state::Throttle;
use crate::process_state::{Device, ProcessState};
use crate::quanta::Pipeline;
use crate::system::System;
use core::ptr;
use divvy_pages::PolicyPage;
use divvy_pages::sync::Ordering::*;

impl<S: System> Device<'_, S> {
    /// Caches the data of a throttled launch that found the gate open.
    pub(super) fn fill_fast_path(&self, throttle: &Throttle) {
        let mut pages = self.pages.shares();
        let (Some(share), None) = (pages.next(), pages.next()) else { return };
        let Some((page, stamp, word)) = share.cacheable() else { return };
        let fast_path = &self.local.fast_path;
        fast_path.page.store(ptr::from_ref(page).cast_mut(), Relaxed);
        fast_path.throttle.store(ptr::from_ref(throttle).cast_mut(), Relaxed);
        fast_path.pipeline.store(ptr::null_mut(), Relaxed);
        fast_path.stamp.store(stamp, Relaxed);
        fast_path.word.store(word, Release);
    }

    /// The same for a launch under exclusive quanta.
    pub(crate) fn fill_fast_path_exclusive(&self, page: &PolicyPage, pipeline: &Pipeline) {
        let fast_path = &self.local.fast_path;
        if fast_path.word.load(Relaxed) == page.throttle_word() && !fast_path.pipeline.load(Relaxed).is_null()
        {
            return;
        }
        fast_path.page.store(ptr::from_ref(page).cast_mut(), Relaxed);
        fast_path.pipeline.store(ptr::from_ref(pipeline).cast_mut(), Relaxed);
        fast_path.word.store(page.throttle_word(), Release);
    }
}

impl<S: System> ProcessState<S> {
    /// Charges a launch on the current device and returns true if it may go to the driver at once.
    #[inline]
    pub fn try_fast_launch(&self, work: Work) -> bool {
        let Some(local) = self.allocated() else { return false };
        let fast_path = &local.fast_path;
        let word = fast_path.word.load(Acquire);
        // SAFETY: all were stored before the word, of a page and states that live as long as the
        // process.
        #[allow(unsafe_code)]
        let (page, throttle, pipeline) = unsafe {
            (
                fast_path.page.load(Relaxed).as_ref(),
                fast_path.throttle.load(Relaxed).as_ref(),
                fast_path.pipeline.load(Relaxed).as_ref(),
            )
        };
        let Some(page) = page else { return false };
        if let Some(pipeline) = pipeline {
            return page.throttle_word() == word && pipeline.join_batch(page);
        }
        let Some(throttle) = throttle else { return false };
        let is_same = page.throttle_word() == word && page.stamp() == fast_path.stamp.load(Relaxed);
        if word == 0 || !is_same || page.gate().load(Relaxed) != 0 || throttle.debt.load(Relaxed) > 0 {
            return false;
        }
        let Some(cost) = local.costs.known(work) else { return false };
        let nanoseconds = cost.charged();
        // Two threads may read the same credit; the next launch then finds it overdrawn.
        if throttle.credit.load(Relaxed) < nanoseconds || !cost.passes() {
            return false;
        }
        throttle.credit.fetch_sub(nanoseconds, Relaxed);
        true
    }
}
