//! The policy and account pages of one device, with this process's slots.
//!
//! Values read from a policy page are cached beside it. They are read again when the page's stamp
//! changes, which one load detects.

use crate::peers::DeclaredDeaths;
use crate::system::System;
use crate::throttle;
use core::ptr;
use divvy_pages::policy::UNBOUNDED;
use divvy_pages::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};
use divvy_pages::{AccountPage, Flags, GpuUuid, MAX_PAGES, Memory, Policy, PolicyPage, SlotRef};

/// The pages of one device, in the order of share and claim names.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct DevicePages {
    pub(crate) count: AtomicU32,
    /// The UUIDs that the pages name, of the GPU and of the MIG instance; zeros if none.
    uuids: [[AtomicU64; 2]; 2],
    pub(crate) shares: [SharePages; MAX_PAGES],
}

/// One pair of policy and account page, with this process's slot.
#[derive(Debug)]
pub(crate) struct SharePages {
    policy: AtomicPtr<PolicyPage>,
    /// Null until a slot is registered.
    account: AtomicPtr<AccountPage>,
    slot: AtomicU32,
    /// The page's stamp when the policy was read, plus 1; or [`UNREAD`].
    stamp: AtomicU64,
    limit: AtomicU64,
    /// If memory is overcommitted, the part of the limit for memory that cannot migrate; otherwise
    /// 0.
    physical_quota: AtomicU64,
    physical: AtomicU64,
    context: AtomicU64,
    flags: AtomicU32,
    /// The policy's compute rate, in nanoseconds of GPU time per second, and the burst in
    /// nanoseconds.
    rate: AtomicU64,
    burst: AtomicU64,
    attention: AtomicU64,
    /// The last doorbell request of the node that this process has answered.
    acknowledged: AtomicU32,
    /// The last trim request of the node that was served.
    served_trim: AtomicU32,
}

/// The node's state for a launch on one share.
pub(crate) struct LaunchGate<'a> {
    pub(crate) is_throttled: bool,
    pub(crate) is_open: bool,
    /// The account page, if the node wants to be notified of launches and this process has not yet
    /// done so.
    pub(crate) doorbell_page: Option<&'a AccountPage>,
}

/// Value of `stamp` before the policy was read.
const UNREAD: u64 = 0;
/// Value of `slot` if the page had no free slot.
const NO_SLOT: u32 = u32::MAX;

/// Where memory is over-committed, what of a share's limit may be memory that cannot move.
pub(crate) fn physical_quota(policy: &Policy) -> Option<u64> {
    let Memory { limit, soft, .. } = policy.memory;
    (policy.flags.has(Flags::UVM) && soft < limit).then_some(soft)
}

impl DevicePages {
    pub(crate) fn shares(&self) -> impl Iterator<Item = &SharePages> {
        self.shares.iter().take(self.count.load(Relaxed) as usize)
    }

    /// The first share whose launches need a quantum, with its page.
    #[inline]
    pub(crate) fn exclusive(&self) -> Option<(&SharePages, &PolicyPage)> {
        self.shares().find_map(|share| Some((share, share.page()?))).filter(|(_, page)| page.is_exclusive())
    }

    /// The limit for memory that cannot migrate, if the total limit is higher. Only if the device
    /// has one share here: managed bytes are reported for all pages together, so with several
    /// shares none could be attributed.
    #[inline]
    pub(crate) fn physical_quota(&self) -> Option<u64> {
        let [first, ..] = &self.shares;
        let soft = first.physical_quota.load(Relaxed);
        (soft != 0 && self.count.load(Relaxed) == 1).then_some(soft)
    }

    /// The total limit of a share. If the device has several shares here, it is the physical part.
    #[inline]
    fn limit_of(&self, share: &SharePages) -> u64 {
        let (limit, soft) = (share.limit.load(Relaxed), share.physical_quota.load(Relaxed));
        if soft != 0 && self.count.load(Relaxed) > 1 { soft } else { limit }
    }

    /// The process's slot on a page, with the node's current limit.
    #[inline]
    pub(crate) fn slot_ref<'p>(&self, share: &'p SharePages) -> Option<SlotRef<'p>> {
        let slot = share.slot_ref()?;
        Some(SlotRef { limit: self.limit_of(share), ..slot })
    }

    /// The UUIDs of the GPU and of the MIG instance.
    pub(crate) fn uuid_pair(&self) -> (GpuUuid, Option<GpuUuid>) {
        let [gpu, mig] = self.uuids.each_ref().map(|words| {
            let mut uuid = GpuUuid([0; 16]);
            for (word, target) in words.iter().zip(uuid.0.as_chunks_mut().0) {
                *target = word.load(Relaxed).to_ne_bytes();
            }
            uuid
        });
        (gpu, mig.none_if_zero())
    }

    /// Adds a pair of pages while the process state is created. If there are too many, the last by
    /// name are left out. `read` is the policy as already read, because reading a page is a large
    /// part of a start.
    pub(crate) fn add(&self, policy: &'static PolicyPage, (read, stamp): (&Policy, u64)) {
        let name = |policy: &Policy| (policy.share, policy.claim);
        let later = |share: &SharePages| share.policy().is_some_and(|(_, other)| name(&other) > name(read));
        let mut policy = ptr::from_ref(policy).cast_mut();
        let count = self.count.load(Relaxed);
        let from = self.shares().position(later).unwrap_or(count as usize);
        for share in self.shares.iter().take(count as usize + 1).skip(from) {
            policy = share.policy.swap(policy, Relaxed);
            share.stamp.store(UNREAD, Relaxed);
        }
        if let Some(share) = self.shares.get(from) {
            share.apply(read, stamp);
        }
        self.count.store((count + 1).min(MAX_PAGES as u32), Relaxed);
        for (words, uuid) in self.uuids.iter().zip([read.gpu, read.mig.unwrap_or(GpuUuid([0; 16]))]) {
            for (word, bytes) in words.iter().zip(uuid.0.as_chunks().0) {
                word.store(u64::from_ne_bytes(*bytes), Relaxed);
            }
        }
    }
}

impl SharePages {
    /// Sets the account page and this process's slot, once before the first charge. `account` is
    /// `None` if there is no page; `slot` is `None` if all slots are taken.
    pub(crate) fn register_slot(&self, account: Option<&'static AccountPage>, slot: Option<u16>) {
        self.account.store(account.map_or(ptr::null_mut(), |page| ptr::from_ref(page).cast_mut()), Relaxed);
        self.slot.store(slot.map_or(NO_SLOT, u32::from), Relaxed);
        self.attention.store(account.map_or(0, AccountPage::attention), Relaxed);
        self.refresh();
    }

    pub(crate) fn has_slot(&self) -> bool {
        self.slot.load(Relaxed) != NO_SLOT
    }

    /// The policy page and its current policy.
    pub(crate) fn policy(&self) -> Option<(&PolicyPage, Policy)> {
        let page = self.page()?;
        page.read().ok().map(|(_, policy)| (page, policy))
    }

    pub(crate) fn account(&self) -> Option<&AccountPage> {
        // SAFETY: only `register_slot` stores here, a page that is mapped as long as the process
        // lives.
        #[allow(unsafe_code)]
        unsafe {
            self.account.load(Relaxed).as_ref()
        }
    }

    /// Reads the policy again if the page's stamp has changed. If the page cannot be read at this
    /// moment, the cached limits stay.
    #[inline]
    pub(crate) fn refresh(&self) {
        if let Some(page) = self.page()
            && page.stamp().wrapping_add(1) != self.stamp.load(Relaxed)
        {
            self.reload(page);
        }
    }

    #[cold]
    fn reload(&self, page: &PolicyPage) {
        let stamp = page.stamp();
        if let Ok((_, policy)) = page.read() {
            self.apply(&policy, stamp);
        }
    }

    /// Caches a policy that was read when the page had this stamp or a later one.
    fn apply(&self, policy: &Policy, stamp: u64) {
        self.limit.store(policy.memory.limit, Relaxed);
        self.physical_quota.store(physical_quota(policy).unwrap_or(0), Relaxed);
        self.physical.store(policy.memory.physical, Relaxed);
        self.context.store(policy.memory.context, Relaxed);
        self.flags.store(policy.flags.0, Relaxed);
        let rate = if policy.compute.is_limited() { policy.compute.rate() } else { UNBOUNDED };
        self.rate.store(rate, Relaxed);
        self.burst.store(throttle::burst_ns(policy.compute.burst_us), Relaxed);
        self.stamp.store(stamp.wrapping_add(1), Relaxed);
    }

    #[inline]
    pub(crate) fn slot_ref(&self) -> Option<SlotRef<'_>> {
        self.refresh();
        let slot = u16::try_from(self.slot.load(Relaxed)).ok()?;
        Some(SlotRef { page: self.account()?, slot, limit: self.limit.load(Relaxed) })
    }

    /// The device's physical memory in bytes, from the policy.
    pub(crate) fn physical(&self) -> u64 {
        self.physical.load(Relaxed)
    }

    pub(crate) fn flags(&self) -> Flags {
        Flags(self.flags.load(Relaxed))
    }

    fn page(&self) -> Option<&PolicyPage> {
        // SAFETY: only `add` stores here, a page that is mapped as long as the process lives.
        #[allow(unsafe_code)]
        unsafe {
            self.policy.load(Relaxed).as_ref()
        }
    }

    /// The futex word that is nonzero while the share's launches are blocked.
    pub(crate) fn gate(&self) -> Option<&AtomicU32> {
        self.page().map(PolicyPage::gate)
    }

    /// The time until which the gate is closed, in nanoseconds; 0 if the node has not set it.
    pub(crate) fn gate_closed_until(&self) -> u64 {
        self.page().map_or(0, PolicyPage::gate_closed_until)
    }

    /// The node's state for a launch, after applying a changed policy.
    #[inline]
    pub(crate) fn launch_gate(&self) -> LaunchGate<'_> {
        let Some(page) = self.page() else {
            return LaunchGate { is_throttled: false, is_open: true, doorbell_page: None };
        };
        if page.stamp().wrapping_add(1) != self.stamp.load(Relaxed) {
            self.reload(page);
        }
        let call = page.wakeup_request();
        let doorbell_page =
            if call == 0 || call == self.acknowledged.load(Relaxed) { None } else { self.acknowledge(call) };
        LaunchGate {
            is_throttled: page.is_rate_limited(),
            is_open: page.gate().load(Relaxed) == 0,
            doorbell_page,
        }
    }

    /// The page, the stamp of the cached policy, and the page's throttle word. `None` if launches
    /// are not throttled or a doorbell request is unanswered.
    pub(crate) fn cacheable(&self) -> Option<(&PolicyPage, u64, u32)> {
        let page = self.page()?;
        let (word, stamp) = (page.throttle_word(), self.stamp.load(Relaxed).checked_sub(1)?);
        let is_answered =
            page.wakeup_request() == 0 || page.wakeup_request() == self.acknowledged.load(Relaxed);
        (is_answered && page.is_rate_limited()).then_some((page, stamp, word))
    }

    #[cold]
    fn acknowledge(&self, call: u32) -> Option<&AccountPage> {
        let is_first = self.acknowledged.swap(call, Relaxed) != call;
        self.account().filter(|_| is_first)
    }

    /// The compute rate, in nanoseconds of GPU time per second: the node's current grant, or else
    /// the policy's rate.
    pub(crate) fn rate(&self, now: u64) -> u64 {
        let granted = self.page().and_then(|page| page.granted(now));
        granted.unwrap_or_else(|| self.rate.load(Relaxed))
    }

    /// Returns true if the node currently grants a rate from trusted measurements of the share.
    pub(crate) fn is_measured(&self, now: u64) -> bool {
        self.page().is_some_and(|page| page.granted(now).is_some() && !page.is_unattributed())
    }

    /// The futex word of trim requests, and its value at the last request that was served.
    pub(crate) fn trim_request(&self) -> Option<(&AtomicU32, u32)> {
        Some((self.page()?.trim(), self.served_trim.load(Relaxed)))
    }

    /// Takes a pending trim request. If it returns true, the caller must serve it.
    #[inline]
    pub(crate) fn take_trim_request(&self) -> bool {
        let Some((word, known)) = self.trim_request() else { return false };
        let now = word.load(Relaxed);
        now != known && self.served_trim.compare_exchange(known, now, Relaxed, Relaxed).is_ok()
    }

    /// The burst (unused compute time that is kept) at this rate, in nanoseconds. If the granted
    /// rate is below the policy's, the burst is lowered in proportion; the node grants such rates
    /// to shares whose kernels run longer than measured. At least 1000 ns.
    pub(crate) fn burst_ns(&self, rate: u64) -> u64 {
        let (burst, full) = (self.burst.load(Relaxed), self.rate.load(Relaxed).min(throttle::SECOND_NS));
        if rate >= full {
            return burst;
        }
        (u128::from(burst) * u128::from(rate) / u128::from(full)).max(1000) as u64
    }

    /// The policy's charge for a context, in bytes.
    pub(crate) fn context(&self) -> u64 {
        self.context.load(Relaxed)
    }

    /// Applies what the node has written into the account page since the last call.
    #[inline]
    pub(crate) fn apply_corrections(&self, slot: &SlotRef<'_>, system: &impl System) {
        if slot.page.attention() != self.attention.load(Relaxed) {
            self.reconcile(slot, system);
        }
    }

    #[cold]
    fn reconcile(&self, slot: &SlotRef<'_>, system: &impl System) {
        let now = slot.page.attention();
        if slot.page.reconcile(Some(slot.slot), &DeclaredDeaths(system)) {
            self.attention.store(now, Relaxed);
        }
    }
}

/// The UUID by which a page names a device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum UuidMatch {
    Instance,
    Gpu,
}

/// Returns how a page with this GPU and MIG UUID names the device with these UUIDs (its own and its
/// GPU's). `None` if the page names another device.
pub(crate) fn match_uuids(
    (gpu, mig): (GpuUuid, Option<GpuUuid>),
    [own, of_gpu]: [GpuUuid; 2],
) -> Option<UuidMatch> {
    match mig {
        Some(mig) => (mig == own).then_some(UuidMatch::Instance),
        None => (gpu == own || gpu == of_gpu).then_some(UuidMatch::Gpu),
    }
}
