//! The state of a process: its shares, slots and allocations.
//!
//! The state lives in one mapping that the kernel zeroes in a forked child (`MADV_WIPEONFORK`). A
//! child finds it empty, so it opens its own slots and does not have its parent's allocations,
//! which it cannot free. This needs no fork handler and no system call per operation: one load
//! tells. Only the list of policy pages survives a fork ([`PolicyList`]). All pages of one device
//! form one [`Device`], in the order of their share names; every process has the same order, which
//! charging several pages needs.

use crate::pages::{DevicePages, SharePages, UuidMatch, match_uuids};
use crate::peers::{LimitedPeers, PEER_WAIT_TIMEOUT_NS, PeerProcesses};
use crate::policies::PolicyList;
use crate::quanta::Pipeline;
use crate::system::System;
use crate::table::{Class, EXTRA_MAX, Table};
use crate::throttle::{Costs, FastPathCache, Throttle};
use core::cell::Cell;
use divvy_pages::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use divvy_pages::{Fault, Flags, GpuUuid, Identity, Policy, PolicyPage};

/// Maximum number of devices with shares in one container.
pub const MAX_DEVICES: usize = 32;
const MAX_ORDINALS: usize = 64;
/// Number of locks shared by all pools.
pub(crate) const POOL_LOCKS: usize = 16;
/// The pools' locks, followed by one lock for the graph memory of each device.
const ALL_LOCKS: usize = POOL_LOCKS + MAX_DEVICES;

/// How a device is treated.
#[derive(Debug)]
pub enum DeviceAccess<'a, S: System> {
    /// No page names it: nothing is counted or refused.
    Unmanaged,
    /// Its pages cannot be used: every allocation is refused.
    Denied,
    Share(Device<'a, S>),
}

/// One device with a share, as this process sees it.
#[derive(Debug)]
pub struct Device<'a, S: System> {
    pub(crate) process: &'a ProcessState<S>,
    pub(crate) local: &'a LocalState,
    pub(crate) pages: &'a DevicePages,
    pub(crate) index: u32,
}

impl<S: System> Clone for Device<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: System> Copy for Device<'_, S> {}

/// The state of the process, shared by its threads. The library has one in a `static`.
#[derive(Debug)]
pub struct ProcessState<S> {
    pub(crate) system: S,
    local: AtomicPtr<LocalState>,
    policies: PolicyList,
    /// Nonzero after the message was printed ([`crate::messages`]). A forked child inherits both.
    pub(crate) printed_refusal: AtomicU32,
    pub(crate) printed_throttling: AtomicU32,
}

/// The state that a forked child must not inherit. Fields that are used at start come first, on few
/// memory pages; the other memory pages are allocated only when they are touched.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct LocalState {
    state: AtomicU32,
    /// Whether the process has registered its slots.
    registered: AtomicU32,
    /// All policy pages, or all account pages, were refused.
    denied: AtomicU32,
    /// Number of devices in use.
    count: AtomicU32,
    /// There are more devices or pages than fit.
    overflowed: AtomicU32,
    /// A thread has taken responsibility for trim requests ([`ProcessState::claim_trim_thread`]).
    trim_claimed: AtomicU32,
    /// See [`crate::throttle`].
    pub(crate) fast_path: FastPathCache,
    identity: [AtomicU64; 4],
    /// Index plus 2, by the ordinal of a CUDA device; 0 if not looked up yet, 1 if it has no share.
    ordinals: [AtomicU32; MAX_ORDINALS],
    pub(crate) table: Table,
    pub(crate) devices: [DevicePages; MAX_DEVICES],
    /// The contexts with allocations, at index `number - 1`.
    pub(crate) contexts: [AtomicU64; EXTRA_MAX as usize],
    /// See [`crate::pools`].
    pub(crate) pool_locks: [AtomicU32; ALL_LOCKS],
    /// See [`crate::throttle`].
    pub(crate) costs: Costs,
    pub(crate) throttles: [Throttle; MAX_DEVICES],
    /// See [`crate::quanta`].
    pub(crate) pipelines: [Pipeline; MAX_DEVICES],
    /// Number of the last physical allocation ([`crate::vmm`]).
    pub(crate) last_object: AtomicU64,
}

/// How long to wait for a trim request if one futex covers all devices, in nanoseconds.
const TRIM_WAIT_NS: u64 = 60_000_000_000;
/// Poll interval if several shares overcommit, in nanoseconds: the futex covers only the first.
const TRIM_POLL_INTERVAL_NS: u64 = 200_000_000;

const EMPTY: u32 = 0;
const BUILDING: u32 = 1;
const READY: u32 = 2;

impl<S: System> ProcessState<S> {
    pub const fn new(system: S) -> Self {
        Self {
            system,
            local: AtomicPtr::new(core::ptr::null_mut()),
            policies: PolicyList::new(),
            printed_refusal: AtomicU32::new(0),
            printed_throttling: AtomicU32::new(0),
        }
    }

    /// The system that was passed to [`ProcessState::new`].
    pub fn system(&self) -> &S {
        &self.system
    }

    /// Returns how the CUDA device with this ordinal is treated. `uuids` asks the driver, once per
    /// device and process: `cuDeviceGetUuid_v2` (the instance's own UUID on MIG) and
    /// `cuDeviceGetUuid` (the GPU's).
    pub fn device(&self, ordinal: i32, uuids: impl FnOnce() -> Option<[GpuUuid; 2]>) -> DeviceAccess<'_, S> {
        let Some(local) = self.local() else { return DeviceAccess::Denied };
        if local.denied.load(Relaxed) != 0 {
            return DeviceAccess::Denied;
        }
        match local.ordinal_index(ordinal, uuids) {
            Some(Some(index)) => self.access(local, index),
            _ if local.overflowed.load(Relaxed) != 0 => DeviceAccess::Denied,
            Some(None) => DeviceAccess::Unmanaged,
            // The driver reports no UUID: refused if any device has a share.
            None if local.devices().next().is_some() => DeviceAccess::Denied,
            None => DeviceAccess::Unmanaged,
        }
    }

    /// Returns the device with this ordinal if it was looked up before and this process has a slot
    /// there.
    #[inline]
    pub fn known_device(&self, ordinal: i32) -> Option<Device<'_, S>> {
        let local = self.allocated()?;
        let is_made = local.state.load(Acquire) == READY && local.registered.load(Acquire) == READY;
        let number = local.ordinals.get(usize::try_from(ordinal).ok()?)?.load(Acquire);
        let index = number.checked_sub(2).filter(|_| is_made)?;
        let pages = local.devices.get(index as usize)?;
        pages.shares().any(SharePages::has_slot).then_some(Device { process: self, local, pages, index })
    }

    /// The value for `cuDeviceTotalMem` of the device with these UUIDs, from the driver's `total`.
    /// Many programs ask only this, so it creates no state and takes no slot.
    pub fn total_mem(&self, uuids: impl FnOnce() -> Option<[GpuUuid; 2]>, total: u64) -> u64 {
        if self.allocated().is_some_and(|local| local.denied.load(Relaxed) != 0) {
            return total;
        }
        let visible_total = || {
            self.policies.get(&self.system).filter(|found| !found.are_none())?.visible_total(uuids()?, total)
        };
        visible_total().unwrap_or(total)
    }

    /// Returns how a device is treated that NVML or a page names by the UUID of a GPU or MIG
    /// instance.
    pub fn device_by_uuid(&self, uuid: GpuUuid) -> DeviceAccess<'_, S> {
        let Some(local) = self.local() else { return DeviceAccess::Denied };
        match local.find_by_uuid([uuid, uuid]) {
            Some(index) => self.access(local, index),
            None if local.denied.load(Relaxed) | local.overflowed.load(Relaxed) != 0 => DeviceAccess::Denied,
            None => DeviceAccess::Unmanaged,
        }
    }

    #[inline]
    fn access<'a>(&'a self, local: &'a LocalState, index: u32) -> DeviceAccess<'a, S> {
        let Some(pages) = local.devices.get(index as usize) else { return DeviceAccess::Unmanaged };
        let registered = local.registered.load(Acquire) == READY
            || self.run_once(&local.registered, || self.register_slots(local));
        if registered && pages.shares().any(SharePages::has_slot) {
            DeviceAccess::Share(Device { process: self, local, pages, index })
        } else {
            DeviceAccess::Denied
        }
    }

    /// Returns true if no page is mounted: every call may go directly to the driver.
    #[cold]
    pub fn has_no_policies(&self) -> bool {
        self.policies.get(&self.system).is_some_and(PolicyList::are_none)
    }

    /// Returns true if the allocation at this address is managed memory that replaces device
    /// memory.
    pub fn is_substitute(&self, pointer: u64) -> bool {
        let entry = |local: &LocalState| local.table.get(&self.system, Class::Substitute, pointer);
        self.local().and_then(entry).is_some()
    }

    /// Calls `each` with every device whose share overcommits.
    pub fn for_each_overcommitted<'a>(&'a self, mut each: impl FnMut(Device<'a, S>)) {
        let Some(local) = self.local() else { return };
        for (pages, index) in local.devices().zip(0..) {
            if pages.shares().any(|share| share.flags().has(Flags::UVM))
                && let DeviceAccess::Share(device) = self.access(local, index)
            {
                each(device);
            }
        }
    }

    /// Returns true for the first caller in this process. That caller must serve trim requests
    /// while the program makes no calls.
    pub fn claim_trim_thread(&self) -> bool {
        self.local().is_some_and(|local| {
            local.trim_claimed.load(Relaxed) == 0
                && local.trim_claimed.compare_exchange(0, 1, Relaxed, Relaxed).is_ok()
        })
    }

    /// Sleeps until the node requests a trim, or until a timeout.
    pub fn wait_for_trim_request(&self) {
        let over = |share: &&SharePages| share.flags().has(Flags::UVM);
        let mut pages =
            self.local().into_iter().flat_map(|local| local.devices().flat_map(DevicePages::shares));
        let first = pages.by_ref().find(over).and_then(SharePages::trim_request);
        let pause = if pages.any(|share| over(&share)) { TRIM_POLL_INTERVAL_NS } else { TRIM_WAIT_NS };
        match first {
            Some((word, known)) => self.system.wait(word, known, self.system.now().saturating_add(pause)),
            None => self.system.sleep(pause),
        }
    }

    /// Increments a fault counter on the first page.
    pub fn count_fault(&self, fault: Fault) {
        let pages = self.local().and_then(|local| local.devices().next());
        if let Some(account) = pages.and_then(|pages| pages.shares().next()?.account()) {
            account.count_fault(fault);
        }
    }

    /// Returns the state if it has been allocated; it may not be complete yet.
    #[inline]
    pub(crate) fn allocated(&self) -> Option<&LocalState> {
        // SAFETY: only `initialize` stores here: a mapping of this size that is never unmapped.
        // Zeros are a valid `LocalState`.
        #[allow(unsafe_code)]
        unsafe {
            self.local.load(Acquire).as_ref()
        }
    }

    /// Returns the state, and creates it at the first call. `None` if it cannot be created.
    #[inline]
    pub(crate) fn local(&self) -> Option<&LocalState> {
        match self.allocated() {
            Some(local) if local.state.load(Acquire) == READY => Some(local),
            _ => self.initialize(),
        }
    }

    #[cold]
    fn initialize(&self) -> Option<&LocalState> {
        if self.local.load(Acquire).is_null() {
            let mapped = self.system.map(size_of::<LocalState>(), true).cast::<LocalState>();
            if mapped.is_null() || !mapped.is_aligned() {
                return None;
            }
            if self.local.compare_exchange(core::ptr::null_mut(), mapped, AcqRel, Acquire).is_err() {
                // SAFETY: mapped above and not published, because another thread's mapping was
                // stored first.
                #[allow(unsafe_code)]
                unsafe {
                    self.system.unmap(mapped.cast(), size_of::<LocalState>())
                };
            }
        }
        // SAFETY: not null, see above; and as in `allocated`.
        #[allow(unsafe_code)]
        let local = unsafe { self.local.load(Acquire).as_ref() }?;
        self.run_once(&local.state, || self.build(local)).then_some(local)
    }

    /// Runs `make` in one thread while the others wait. Returns false if that takes too long.
    #[cold]
    fn run_once(&self, state: &AtomicU32, make: impl FnOnce()) -> bool {
        if state.compare_exchange(EMPTY, BUILDING, AcqRel, Acquire).is_ok() {
            make();
            state.store(READY, Release);
        }
        // The clock is a system call: only a waiting thread reads it.
        let mut start = None;
        while state.load(Acquire) != READY {
            let now = self.system.now();
            if now.saturating_sub(*start.get_or_insert(now)) > PEER_WAIT_TIMEOUT_NS {
                return false;
            }
            self.system.sleep(50_000);
        }
        true
    }

    /// Returns the word that is nonzero while launches must be intercepted
    /// ([`PolicyPage::launch_word`]). `Some(None)`: nothing has a share, so launches are never
    /// intercepted. `None`: several pages, so launches are always intercepted.
    pub fn launch_word(&self) -> Option<Option<*const u64>> {
        let local = self.local()?;
        let mut pages = local.devices().flat_map(DevicePages::shares);
        match (pages.next(), pages.next()) {
            (None, _) => Some(None),
            (Some(only), None) => only.policy().map(|(page, _)| Some(page.launch_word())),
            (Some(_), Some(_)) => None,
        }
    }

    fn build(&self, local: &LocalState) {
        let policies = self.policies.get(&self.system);
        let mut refused = policies.is_none_or(PolicyList::has_refused);
        policies
            .into_iter()
            .flat_map(PolicyList::pages)
            .for_each(|page| refused |= !local.add_if_valid(page));
        if policies.is_some_and(PolicyList::overflowed) {
            local.overflowed.store(1, Relaxed);
        }
        local.denied.store((refused && local.count.load(Relaxed) == 0).into(), Relaxed);
    }

    /// Opens the account pages and registers a slot on each. This is the most expensive part of a
    /// start, and a process without allocations needs no slot. So it runs when a device is first
    /// charged or its usage is first read.
    fn register_slots(&self, local: &LocalState) {
        let me = self.system.identity();
        if let Some(me) = me {
            let words = [u64::from(me.pid), me.namespace, me.start, me.image];
            local.identity.iter().zip(words).for_each(|(target, word)| target.store(word, Relaxed));
        }
        let peers = PeerProcesses::new(&self.system, me);
        let mut closed = true;
        for share in local.devices().flat_map(DevicePages::shares) {
            let account = share.policy().and_then(|(_, policy)| self.system.account(&policy));
            let slot = account.zip(me).and_then(|(account, me)| account.register(&me, &peers).ok());
            closed &= account.is_none();
            // Refund dead peers before the first figure is shown. Only some peers are checked, so
            // that the cost of a start does not grow with their number.
            if let Some(account) = account.filter(|account| account.used() > 0) {
                account.reconcile(slot, &LimitedPeers { peers: &peers, checked: Cell::new(0) });
            }
            share.register_slot(account, slot);
        }
        local.denied.store(closed.into(), Relaxed);
    }
}

impl LocalState {
    pub(crate) fn devices(&self) -> impl Iterator<Item = &DevicePages> {
        self.devices.iter().take(self.count.load(Relaxed) as usize)
    }

    /// Adds a policy page during creation. Returns false if the page cannot be used.
    #[cold]
    fn add_if_valid(&self, policy: &'static PolicyPage) -> bool {
        let stamp = policy.stamp();
        let read = policy.read();
        if let Ok((_, read)) = &read {
            self.add(policy, (read, stamp));
        }
        read.is_ok()
    }

    /// Adds a valid policy during creation.
    #[cold]
    fn add(&self, policy: &'static PolicyPage, read: (&Policy, u64)) {
        let count = self.count.load(Relaxed);
        let known = self.devices().find(|device| device.uuid_pair() == (read.0.gpu, read.0.mig));
        let Some(device) = known.or_else(|| self.devices.get(count as usize)) else {
            return self.overflowed.store(1, Relaxed);
        };
        device.add(policy, read);
        if known.is_none() {
            self.count.store(count + 1, Relaxed);
        }
    }

    /// Returns the index of this ordinal's device, or `Some(None)` if it has no share. `None` if
    /// the driver reports no UUID.
    fn ordinal_index(
        &self,
        ordinal: i32,
        uuids: impl FnOnce() -> Option<[GpuUuid; 2]>,
    ) -> Option<Option<u32>> {
        let known = usize::try_from(ordinal).ok().and_then(|ordinal| self.ordinals.get(ordinal));
        match known.map_or(0, |known| known.load(Acquire)) {
            0 => {
                let found = self.find_by_uuid(uuids()?);
                if let Some(known) = known {
                    known.store(found.map_or(1, |index| index + 2), Release);
                }
                Some(found)
            }
            1 => Some(None),
            index => Some(Some(index - 2)),
        }
    }

    /// Returns the device whose pages name this UUID. MIG instances are matched first, because
    /// their pages name the GPU too.
    #[cold]
    fn find_by_uuid(&self, uuids: [GpuUuid; 2]) -> Option<u32> {
        let of = |names: UuidMatch| {
            let mut devices = self.devices().zip(0..);
            devices.find_map(|(device, index)| {
                (match_uuids(device.uuid_pair(), uuids) == Some(names)).then_some(index)
            })
        };
        of(UuidMatch::Instance).or_else(|| of(UuidMatch::Gpu))
    }

    /// Returns the number of a context, from 1. 0 if there are too many contexts: allocations in
    /// those are refunded only by their own free or when the process exits.
    pub(crate) fn context_number(&self, context: u64) -> u64 {
        let known = |entry: &AtomicU64| entry.load(Acquire) == context;
        let claim = |entry: &AtomicU64| match entry.compare_exchange(0, context, AcqRel, Acquire) {
            Ok(_) => true,
            Err(now) => now == context,
        };
        let numbered = || self.contexts.iter().zip(1..);
        if context == 0 {
            return 0;
        }
        numbered()
            .find(|(entry, _)| known(entry))
            .or_else(|| numbered().find(|(entry, _)| claim(entry)))
            .map_or(0, |(_, number)| number)
    }

    pub(crate) fn identity(&self) -> Option<Identity> {
        let [pid, namespace, start, image] = &self.identity;
        let pid = u32::try_from(pid.load(Relaxed)).ok().filter(|pid| *pid > 0)?;
        Some(Identity {
            pid,
            namespace: namespace.load(Relaxed),
            start: start.load(Relaxed),
            image: image.load(Relaxed),
        })
    }
}
