//! The pages of one device, with the slots that this process has there.
//!
//! What was read of a policy page is kept beside it, and read again when the page's stamp says that
//! the node has replaced it: one load tells.

use crate::pace;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};
use divvy_pages::{AccountPage, Flags, Policy, PolicyPage, SEATS, Seat};

/// The pages of one device.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) count: AtomicU32,
    pub(crate) places: [Place; SEATS],
    /// Bytes charged for contexts and for managed memory, told to the node.
    pub(crate) context: AtomicU64,
    pub(crate) managed: AtomicU64,
}

/// One pair of pages with the slot that this process has there.
#[derive(Debug)]
pub(crate) struct Place {
    policy: AtomicPtr<PolicyPage>,
    account: AtomicPtr<AccountPage>,
    slot: AtomicU32,
    /// What was read of the policy, and at which stamp. A stamp of ours is the page's plus one.
    stamp: AtomicU64,
    limit: AtomicU64,
    physical: AtomicU64,
    context: AtomicU64,
    flags: AtomicU32,
    /// Of compute time: nanoseconds a second by the record, and nanoseconds that are kept.
    rate: AtomicU64,
    burst: AtomicU64,
    attention: AtomicU64,
}

/// In place of a slot: all were taken.
const NO_SLOT: u32 = u32::MAX;

impl Places {
    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().take(self.count.load(Relaxed) as usize)
    }
}

impl Place {
    /// Once, while the ledger is made: a pair of pages, and this process's slot there if one was free.
    pub(crate) fn fill(&self, policy: &'static PolicyPage, account: &'static AccountPage, slot: Option<u16>) {
        self.slot.store(slot.map_or(NO_SLOT, u32::from), Relaxed);
        self.attention.store(account.attention(), Relaxed);
        self.policy.store(core::ptr::from_ref(policy).cast_mut(), Relaxed);
        self.account.store(core::ptr::from_ref(account).cast_mut(), Relaxed);
        self.refresh();
    }

    pub(crate) fn has_slot(&self) -> bool {
        self.slot.load(Relaxed) != NO_SLOT
    }

    /// The policy page and what it says at this moment.
    pub(crate) fn policy(&self) -> Option<(&PolicyPage, Policy)> {
        let page = self.page()?;
        page.read().ok().map(|(_, policy)| (page, policy))
    }

    pub(crate) fn account(&self) -> Option<&AccountPage> {
        // SAFETY: as above.
        #[allow(unsafe_code)]
        unsafe {
            self.account.load(Relaxed).as_ref()
        }
    }

    /// Reads the policy again where the page says that it was replaced. A page that cannot be read
    /// at this moment leaves the limits as they were.
    #[inline]
    pub(crate) fn refresh(&self) {
        if let Some(page) = self.page()
            && page.stamp().wrapping_add(1) != self.stamp.load(Relaxed)
        {
            self.read_again(page);
        }
    }

    #[cold]
    fn read_again(&self, page: &PolicyPage) {
        let stamp = page.stamp().wrapping_add(1);
        if let Ok((_, policy)) = page.read() {
            self.limit.store(policy.memory.limit, Relaxed);
            self.physical.store(policy.memory.physical, Relaxed);
            self.context.store(policy.memory.context, Relaxed);
            self.flags.store(policy.flags.0, Relaxed);
            self.rate.store(policy.compute.rate(), Relaxed);
            self.burst.store(pace::burst(policy.compute.burst_us), Relaxed);
            self.stamp.store(stamp, Relaxed);
        }
    }

    #[inline]
    pub(crate) fn seat(&self) -> Option<Seat<'_>> {
        self.refresh();
        let slot = u16::try_from(self.slot.load(Relaxed)).ok()?;
        Some(Seat { page: self.account()?, slot, limit: self.limit.load(Relaxed) })
    }

    /// The device's own memory, by the policy.
    pub(crate) fn physical(&self) -> u64 {
        self.physical.load(Relaxed)
    }

    pub(crate) fn flags(&self) -> Flags {
        Flags(self.flags.load(Relaxed))
    }

    fn page(&self) -> Option<&PolicyPage> {
        // SAFETY: only `fill` stores here, a page that lives as long as the process.
        #[allow(unsafe_code)]
        unsafe {
            self.policy.load(Relaxed).as_ref()
        }
    }

    /// The futex that is not zero while the share's launches are held back.
    pub(crate) fn gate(&self) -> Option<&AtomicU32> {
        self.page().map(PolicyPage::gate)
    }

    pub(crate) fn is_paced(&self) -> bool {
        self.page().is_some_and(PolicyPage::is_paced)
    }

    /// Compute time a second, in nanoseconds: what the node grants at the moment, or else the record's.
    pub(crate) fn rate(&self) -> u64 {
        match self.page().map_or(0, PolicyPage::rate) {
            0 => self.rate.load(Relaxed),
            granted => granted,
        }
    }

    /// Unused compute time that is kept, in nanoseconds.
    pub(crate) fn burst(&self) -> u64 {
        self.burst.load(Relaxed)
    }

    /// What the policy charges a context, in bytes.
    pub(crate) fn context(&self) -> u64 {
        self.context.load(Relaxed)
    }

    /// Takes up what the node has written into the accounts since the last time.
    #[inline]
    pub(crate) fn heed(&self, seat: &Seat<'_>, tidy: impl FnOnce() -> bool) {
        let now = seat.page.attention();
        if now != self.attention.load(Relaxed) && tidy() {
            self.attention.store(now, Relaxed);
        }
    }
}
