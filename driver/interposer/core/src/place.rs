//! The pages of one device, with the slots that this process has there.
//!
//! What was read of a policy page is kept beside it, and read again when the page's stamp says that
//! the node has replaced it: one load tells.

use crate::neighbours::Unasked;
use crate::pace;
use crate::system::System;
use core::ptr;
use divvy_pages::policy::UNBOUNDED;
use divvy_pages::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};
use divvy_pages::{AccountPage, Flags, GpuUuid, Memory, Policy, PolicyPage, SEATS, Seat};

/// The pages of one device, in the order of the names of their shares and claims.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Places {
    pub(crate) count: AtomicU32,
    /// The UUIDs that the pages name, of the GPU and of the MIG instance; zeros: none.
    uuids: [[AtomicU64; 2]; 2],
    pub(crate) places: [Place; SEATS],
}

/// One pair of pages with the slot that this process has there.
#[derive(Debug)]
pub(crate) struct Place {
    policy: AtomicPtr<PolicyPage>,
    /// Null until the process sits there.
    account: AtomicPtr<AccountPage>,
    slot: AtomicU32,
    /// What was read of the policy, and at which stamp: the page's plus one, or [`UNREAD`].
    stamp: AtomicU64,
    limit: AtomicU64,
    /// Where memory is over-committed, what of the limit may be memory that cannot move; otherwise 0.
    soft: AtomicU64,
    physical: AtomicU64,
    context: AtomicU64,
    flags: AtomicU32,
    /// Of compute time: nanoseconds a second by the record, and nanoseconds that are kept.
    rate: AtomicU64,
    burst: AtomicU64,
    attention: AtomicU64,
    /// The node's last call that this process has answered.
    answered: AtomicU32,
    /// The node's last wish that was done.
    trimmed: AtomicU32,
}

/// What the node says to a launch on one share.
pub(crate) struct AtLaunch<'a> {
    pub(crate) is_paced: bool,
    pub(crate) is_open: bool,
    /// The account page, where the node wants to hear of a launch and this process has not told it of one.
    pub(crate) called: Option<&'a AccountPage>,
}

/// In place of a stamp: nothing was read of the policy.
const UNREAD: u64 = 0;
/// In place of a slot: all were taken.
const NO_SLOT: u32 = u32::MAX;

/// Where memory is over-committed, what of a share's limit may be memory that cannot move.
pub(crate) fn soft(policy: &Policy) -> Option<u64> {
    let Memory { limit, soft, .. } = policy.memory;
    (policy.flags.has(Flags::UVM) && soft < limit).then_some(soft)
}

impl Places {
    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().take(self.count.load(Relaxed) as usize)
    }

    /// What a share may have of memory that cannot move, where it may have more in all. Only where the device has
    /// one share here: what is managed is told to the node for all of them together, so of several none
    /// could tell what cannot move of its own.
    #[inline]
    pub(crate) fn soft(&self) -> Option<u64> {
        let [first, ..] = &self.places;
        let soft = first.soft.load(Relaxed);
        (soft != 0 && self.count.load(Relaxed) == 1).then_some(soft)
    }

    /// What a share may have in all: beside others of its device, what it has of the device.
    #[inline]
    fn limit_of(&self, place: &Place) -> u64 {
        let (limit, soft) = (place.limit.load(Relaxed), place.soft.load(Relaxed));
        if soft != 0 && self.count.load(Relaxed) > 1 { soft } else { limit }
    }

    /// The process's seat on a page, by its policy as the node last wrote it.
    #[inline]
    pub(crate) fn seat<'p>(&self, place: &'p Place) -> Option<Seat<'p>> {
        let seat = place.seat()?;
        Some(Seat { limit: self.limit_of(place), ..seat })
    }

    /// The GPU and the MIG instance that it is.
    pub(crate) fn is(&self) -> (GpuUuid, Option<GpuUuid>) {
        let [gpu, mig] = self.uuids.each_ref().map(|words| {
            let mut uuid = GpuUuid([0; 16]);
            for (word, room) in words.iter().zip(uuid.0.as_chunks_mut().0) {
                *room = word.load(Relaxed).to_ne_bytes();
            }
            uuid
        });
        (gpu, mig.none_if_zero())
    }

    /// While the ledger is made, before any account is looked for: one pair of pages more. Of too many the last by
    /// their names are left out. What was read of its policy is gone by at once: to read one is much of a start.
    pub(crate) fn add(&self, policy: &'static PolicyPage, (read, stamp): (&Policy, u64)) {
        let name = |policy: &Policy| (policy.share, policy.claim);
        let later = |place: &Place| place.policy().is_some_and(|(_, other)| name(&other) > name(read));
        let mut policy = ptr::from_ref(policy).cast_mut();
        let count = self.count.load(Relaxed);
        let from = self.places().position(later).unwrap_or(count as usize);
        for place in self.places.iter().take(count as usize + 1).skip(from) {
            policy = place.policy.swap(policy, Relaxed);
            place.stamp.store(UNREAD, Relaxed);
        }
        if let Some(place) = self.places.get(from) {
            place.take_up(read, stamp);
        }
        self.count.store((count + 1).min(SEATS as u32), Relaxed);
        for (words, uuid) in self.uuids.iter().zip([read.gpu, read.mig.unwrap_or(GpuUuid([0; 16]))]) {
            for (word, bytes) in words.iter().zip(uuid.0.as_chunks().0) {
                word.store(u64::from_ne_bytes(*bytes), Relaxed);
            }
        }
    }
}

impl Place {
    /// Once, before the first charge: the account if there is one, and this process's slot there if one was free.
    pub(crate) fn sit(&self, account: Option<&'static AccountPage>, slot: Option<u16>) {
        self.account.store(account.map_or(ptr::null_mut(), |page| ptr::from_ref(page).cast_mut()), Relaxed);
        self.slot.store(slot.map_or(NO_SLOT, u32::from), Relaxed);
        self.attention.store(account.map_or(0, AccountPage::attention), Relaxed);
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
        let stamp = page.stamp();
        if let Ok((_, policy)) = page.read() {
            self.take_up(&policy, stamp);
        }
    }

    /// Goes by a policy, which was read when the page had that stamp or a later one.
    fn take_up(&self, policy: &Policy, stamp: u64) {
        self.limit.store(policy.memory.limit, Relaxed);
        self.soft.store(soft(policy).unwrap_or(0), Relaxed);
        self.physical.store(policy.memory.physical, Relaxed);
        self.context.store(policy.memory.context, Relaxed);
        self.flags.store(policy.flags.0, Relaxed);
        let rate = if policy.compute.is_limited() { policy.compute.rate() } else { UNBOUNDED };
        self.rate.store(rate, Relaxed);
        self.burst.store(pace::burst(policy.compute.burst_us), Relaxed);
        self.stamp.store(stamp.wrapping_add(1), Relaxed);
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
        // SAFETY: only `add` stores here, a page that lives as long as the process.
        #[allow(unsafe_code)]
        unsafe {
            self.policy.load(Relaxed).as_ref()
        }
    }

    /// The futex that is not zero while the share's launches are held back.
    pub(crate) fn gate(&self) -> Option<&AtomicU32> {
        self.page().map(PolicyPage::gate)
    }

    /// Until when they are, where the gate is closed: 0 if the node has not said.
    pub(crate) fn closed_until(&self) -> u64 {
        self.page().map_or(0, PolicyPage::closed_until)
    }

    /// What the node says to a launch, with its policy taken up if it is another.
    #[inline]
    pub(crate) fn at_launch(&self) -> AtLaunch<'_> {
        let Some(page) = self.page() else {
            return AtLaunch { is_paced: false, is_open: true, called: None };
        };
        if page.stamp().wrapping_add(1) != self.stamp.load(Relaxed) {
            self.read_again(page);
        }
        let call = page.call();
        let called = if call == 0 || call == self.answered.load(Relaxed) { None } else { self.answer(call) };
        AtLaunch { is_paced: page.is_paced(), is_open: page.gate().load(Relaxed) == 0, called }
    }

    /// The page whose policy was read, at which stamp, and its word of the pace, if launches are paced
    /// and nothing of that is to be answered.
    pub(crate) fn heeded(&self) -> Option<(&PolicyPage, u64, u32)> {
        let page = self.page()?;
        let (word, stamp) = (page.pace_word(), self.stamp.load(Relaxed).checked_sub(1)?);
        let is_answered = page.call() == 0 || page.call() == self.answered.load(Relaxed);
        (is_answered && page.is_paced()).then_some((page, stamp, word))
    }

    #[cold]
    fn answer(&self, call: u32) -> Option<&AccountPage> {
        let is_first = self.answered.swap(call, Relaxed) != call;
        self.account().filter(|_| is_first)
    }

    /// Compute time a second, in nanoseconds: what the node grants at the moment, or else the record's.
    pub(crate) fn rate(&self, now: u64) -> u64 {
        let granted = self.page().and_then(|page| page.granted(now));
        granted.unwrap_or_else(|| self.rate.load(Relaxed))
    }

    /// Whether the node grants a rate at the moment and knows what the share really has.
    pub(crate) fn is_watched(&self, now: u64) -> bool {
        self.page().is_some_and(|page| page.granted(now).is_some() && !page.is_doubted())
    }

    /// The word that the node changes when it wishes pools trimmed, and what it was when that was done last.
    pub(crate) fn wish(&self) -> Option<(&AtomicU32, u32)> {
        Some((self.page()?.trim(), self.trimmed.load(Relaxed)))
    }

    /// Whether the node wishes something that is not done: then it is the caller's to do.
    #[inline]
    pub(crate) fn take_wish(&self) -> bool {
        let Some((word, known)) = self.wish() else { return false };
        let now = word.load(Relaxed);
        now != known && self.trimmed.compare_exchange(known, now, Relaxed, Relaxed).is_ok()
    }

    /// Unused compute time that is kept, in nanoseconds. At a rate that is less than the record's, as the node grants
    /// it to whose kernels are longer than they look, as much less: it would be too long a burst. Never nothing.
    pub(crate) fn burst(&self, rate: u64) -> u64 {
        let (burst, full) = (self.burst.load(Relaxed), self.rate.load(Relaxed).min(pace::SECOND));
        if rate >= full {
            return burst;
        }
        (u128::from(burst) * u128::from(rate) / u128::from(full)).max(1000) as u64
    }

    /// What the policy charges a context, in bytes.
    pub(crate) fn context(&self) -> u64 {
        self.context.load(Relaxed)
    }

    /// Takes up what the node has written into the accounts since the last time.
    #[inline]
    pub(crate) fn heed(&self, seat: &Seat<'_>, system: &impl System) {
        if seat.page.attention() != self.attention.load(Relaxed) {
            self.tidy(seat, system);
        }
    }

    #[cold]
    fn tidy(&self, seat: &Seat<'_>, system: &impl System) {
        let now = seat.page.attention();
        if seat.page.tidy(Some(seat.slot), &Unasked(system)) {
            self.attention.store(now, Relaxed);
        }
    }
}
