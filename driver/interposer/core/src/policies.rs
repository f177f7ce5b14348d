//! The container's policy pages, as found at the first call.
//!
//! A forked child keeps the list: it is in the same container and has the same mappings. A program
//! that only initialises CUDA and reads the GPU's size needs nothing else. Threads that call
//! concurrently each scan for pages; the first result is kept, and the other mappings stay unused.
//! If one thread scanned for all, a child forked during the scan would wait for a thread that it
//! does not have.

use crate::pages::{UuidMatch, match_uuids, physical_quota};
use crate::peers::PEER_WAIT_TIMEOUT_NS;
use crate::system::{MountedPolicy, System};
use core::mem::MaybeUninit;
use divvy_pages::sync::{AtomicPtr, AtomicU32, Ordering::*};
use divvy_pages::{GpuUuid, MAX_PAGES, Policy, PolicyPage};

/// Maximum number of policy pages in one container.
const MAX_PAGES_FOUND: usize = 64;

const EMPTY: u32 = 0;
const WRITING: u32 = 1;
const READY: u32 = 2;

#[derive(Debug)]
pub(crate) struct PolicyList {
    state: AtomicU32,
    count: AtomicU32,
    refused: AtomicU32,
    /// Number of pages that did not fit.
    overflow: AtomicU32,
    pages: [AtomicPtr<PolicyPage>; MAX_PAGES_FOUND],
}

impl PolicyList {
    pub(crate) const fn new() -> Self {
        Self {
            state: AtomicU32::new(EMPTY),
            count: AtomicU32::new(0),
            refused: AtomicU32::new(0),
            overflow: AtomicU32::new(0),
            pages: [const { AtomicPtr::new(core::ptr::null_mut()) }; MAX_PAGES_FOUND],
        }
    }

    /// Returns the list, and scans for pages at the first call. `None` if another thread's scan
    /// takes too long.
    pub(crate) fn get(&self, system: &impl System) -> Option<&Self> {
        if self.state.load(Acquire) != READY {
            self.scan(system)?;
        }
        Some(self)
    }

    #[cold]
    fn scan(&self, system: &impl System) -> Option<()> {
        let mut list = FoundPages {
            pages: [const { MaybeUninit::uninit() }; MAX_PAGES_FOUND],
            count: 0,
            refused: 0,
            overflow: 0,
        };
        system.pages(|found| list.add(found));
        if self.state.compare_exchange(EMPTY, WRITING, AcqRel, Acquire).is_ok() {
            for (page, found) in self.pages.iter().zip(list.pages.iter().take(list.count)) {
                // SAFETY: the first `count` elements were written by `add`.
                #[allow(unsafe_code)]
                page.store(unsafe { found.assume_init() }, Relaxed);
            }
            self.count.store(list.count as u32, Relaxed);
            self.refused.store(list.refused, Relaxed);
            self.overflow.store(list.overflow, Relaxed);
            self.state.store(READY, Release);
        }
        let mut start = None;
        while self.state.load(Acquire) != READY {
            let now = system.now();
            if now.saturating_sub(*start.get_or_insert(now)) > PEER_WAIT_TIMEOUT_NS {
                return None;
            }
            system.sleep(50_000);
        }
        Some(())
    }

    pub(crate) fn are_none(&self) -> bool {
        self.count.load(Relaxed) == 0 && !self.has_refused()
    }

    pub(crate) fn has_refused(&self) -> bool {
        self.refused.load(Relaxed) != 0
    }

    pub(crate) fn overflowed(&self) -> bool {
        self.overflow.load(Relaxed) != 0
    }

    pub(crate) fn pages(&self) -> impl Iterator<Item = &'static PolicyPage> {
        let found = self.pages.iter().take(self.count.load(Relaxed) as usize);
        // SAFETY: `scan` stores mappings that are never unmapped.
        #[allow(unsafe_code)]
        found.filter_map(|page| unsafe { page.load(Relaxed).as_ref() })
    }

    /// The total memory that a program sees of the device with these UUIDs (its own and its GPU's),
    /// from the driver's `total`. `None` if no page names it. Equals
    /// [`crate::device::MemoryUsage::total`], but needs no slots.
    #[cold]
    pub(crate) fn visible_total(&self, uuids: [GpuUuid; 2], total: u64) -> Option<u64> {
        let mut sums = [LimitSum::default(); 2];
        for policy in self.pages().filter_map(|page| page.read().ok()).map(|(_, policy)| policy) {
            match match_uuids((policy.gpu, policy.mig), uuids) {
                Some(UuidMatch::Instance) => sums[0].add(&policy),
                Some(UuidMatch::Gpu) => sums[1].add(&policy),
                None => {}
            }
        }
        Some(sums.iter().find(|sum| sum.count > 0)?.visible_total(total))
    }
}

/// The pages that one thread has found.
struct FoundPages {
    pages: [MaybeUninit<*mut PolicyPage>; MAX_PAGES_FOUND],
    count: usize,
    refused: u32,
    overflow: u32,
}

impl FoundPages {
    #[cold]
    fn add(&mut self, found: MountedPolicy) {
        match (found, self.pages.get_mut(self.count)) {
            (MountedPolicy::Trusted(page), Some(pages)) => {
                pages.write(core::ptr::from_ref(page).cast_mut());
                self.count += 1;
            }
            (MountedPolicy::Trusted(_), None) => self.overflow += 1,
            (MountedPolicy::Untrusted, _) => self.refused += 1,
        }
    }
}

/// The sum of limits of several pages.
#[derive(Clone, Copy, Default)]
struct LimitSum {
    count: usize,
    limits: u64,
    /// The part for memory that cannot migrate; equals `limits` without overcommit.
    physical_quota: u64,
}

impl LimitSum {
    #[inline(always)]
    fn add(&mut self, policy: &Policy) {
        if self.count < MAX_PAGES {
            self.count += 1;
            self.limits = self.limits.saturating_add(policy.memory.limit);
            self.physical_quota =
                self.physical_quota.saturating_add(physical_quota(policy).unwrap_or(policy.memory.limit));
        }
    }

    /// Returns the visible total. Only a single overcommitting share sees more than the device has.
    #[inline(always)]
    fn visible_total(&self, total: u64) -> u64 {
        if self.count == 1 && self.physical_quota < self.limits {
            self.limits
        } else {
            self.physical_quota.min(total)
        }
    }
}
