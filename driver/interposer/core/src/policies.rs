//! The policy pages of the container, as they were found at the first call.
//!
//! A child of fork has them too, and needs not look again: it is in the same container, and the mappings are its own. So they
//! are all that a process keeps outside of what the kernel zeroes in a child ([`crate::ledger`]), and a program that
//! initialises CUDA and asks how large its GPU is needs nothing else.
//!
//! Threads that call at once each look, and the first to have looked says what there is; the others' mappings stay unused. If one
//! looked for all, a child that is forked meanwhile would wait for a thread that it does not have.

use crate::ledger::{Found, Names, names_of};
use crate::neighbours::PATIENCE;
use crate::place::soft;
use crate::system::System;
use core::mem::MaybeUninit;
use divvy_pages::sync::{AtomicPtr, AtomicU32, Ordering::*};
use divvy_pages::{GpuUuid, Policy, PolicyPage, SEATS};

/// The most pages in one container.
const MOST: usize = 64;

const EMPTY: u32 = 0;
const WRITING: u32 = 1;
const READY: u32 = 2;

#[derive(Debug)]
pub(crate) struct Policies {
    state: AtomicU32,
    count: AtomicU32,
    refused: AtomicU32,
    /// How many there was no room for.
    left_out: AtomicU32,
    pages: [AtomicPtr<PolicyPage>; MOST],
}

impl Policies {
    pub(crate) const fn new() -> Self {
        Self {
            state: AtomicU32::new(EMPTY),
            count: AtomicU32::new(0),
            refused: AtomicU32::new(0),
            left_out: AtomicU32::new(0),
            pages: [const { AtomicPtr::new(core::ptr::null_mut()) }; MOST],
        }
    }

    /// What there is: looked for if this is the first call. `None` where that takes too long.
    pub(crate) fn look(&self, system: &impl System) -> Option<&Self> {
        if self.state.load(Acquire) != READY {
            self.first(system)?;
        }
        Some(self)
    }

    #[cold]
    fn first(&self, system: &impl System) -> Option<()> {
        let mut list =
            List { room: [const { MaybeUninit::uninit() }; MOST], count: 0, refused: 0, left_out: 0 };
        system.pages(|found| list.add(found));
        if self.state.compare_exchange(EMPTY, WRITING, AcqRel, Acquire).is_ok() {
            for (page, found) in self.pages.iter().zip(list.room.iter().take(list.count)) {
                // SAFETY: so many were written.
                #[allow(unsafe_code)]
                page.store(unsafe { found.assume_init() }, Relaxed);
            }
            self.count.store(list.count as u32, Relaxed);
            self.refused.store(list.refused, Relaxed);
            self.left_out.store(list.left_out, Relaxed);
            self.state.store(READY, Release);
        }
        let mut start = None;
        while self.state.load(Acquire) != READY {
            let now = system.now();
            if now.saturating_sub(*start.get_or_insert(now)) > PATIENCE {
                return None;
            }
            system.nap(50_000);
        }
        Some(())
    }

    pub(crate) fn are_none(&self) -> bool {
        self.count.load(Relaxed) == 0 && !self.has_refused()
    }

    pub(crate) fn has_refused(&self) -> bool {
        self.refused.load(Relaxed) != 0
    }

    pub(crate) fn are_too_many(&self) -> bool {
        self.left_out.load(Relaxed) != 0
    }

    pub(crate) fn pages(&self) -> impl Iterator<Item = &'static PolicyPage> {
        let found = self.pages.iter().take(self.count.load(Relaxed) as usize);
        // SAFETY: `first` stores mappings that are never taken away.
        #[allow(unsafe_code)]
        found.filter_map(|page| unsafe { page.load(Relaxed).as_ref() })
    }

    /// What is seen of a device with these UUIDs, its own and its GPU's, and `total` bytes; `None`: no page names it. What
    /// [`crate::device::Figures::total`] has of the process's seats, here without any.
    #[cold]
    pub(crate) fn seen(&self, uuids: [GpuUuid; 2], total: u64) -> Option<u64> {
        let mut sums = [Sum::default(); 2];
        for policy in self.pages().filter_map(|page| page.read().ok()).map(|(_, policy)| policy) {
            match names_of((policy.gpu, policy.mig), uuids) {
                Some(Names::Instance) => sums[0].add(&policy),
                Some(Names::Gpu) => sums[1].add(&policy),
                None => {}
            }
        }
        Some(sums.iter().find(|sum| sum.count > 0)?.seen(total))
    }
}

/// What one thread has found.
struct List {
    room: [MaybeUninit<*mut PolicyPage>; MOST],
    count: usize,
    refused: u32,
    left_out: u32,
}

impl List {
    #[cold]
    fn add(&mut self, found: Found) {
        match (found, self.room.get_mut(self.count)) {
            (Found::Policy(page), Some(room)) => {
                room.write(core::ptr::from_ref(page).cast_mut());
                self.count += 1;
            }
            (Found::Policy(_), None) => self.left_out += 1,
            (Found::Refused, _) => self.refused += 1,
        }
    }
}

/// The limits of some pages.
#[derive(Clone, Copy, Default)]
struct Sum {
    count: usize,
    limits: u64,
    /// What of them is the device's, where one is more than that.
    soft: u64,
}

impl Sum {
    #[inline(always)]
    fn add(&mut self, policy: &Policy) {
        if self.count < SEATS {
            self.count += 1;
            self.limits = self.limits.saturating_add(policy.memory.limit);
            self.soft = self.soft.saturating_add(soft(policy).unwrap_or(policy.memory.limit));
        }
    }

    /// More than the device has where one over-commits by itself.
    #[inline(always)]
    fn seen(&self, total: u64) -> u64 {
        if self.count == 1 && self.soft < self.limits { self.limits } else { self.soft.min(total) }
    }
}
