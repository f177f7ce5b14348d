//! What a process knows of its shares.
//!
//! Made when a device is first charged or looked at and kept in one mapping that the kernel zeroes in a child of fork
//! (`MADV_WIPEONFORK`): a child finds nothing, so it looks for its pages and takes slots of its
//! own, and the parent's allocations, which it cannot free, are not in its table. No handler
//! and no system call per operation is needed for that, one load tells. Which policy pages there are it keeps: they are
//! the container's ([`Policies`]), and all that a program needs which only asks what there is.
//!
//! All pages that name one device are one [`Device`], its places in the order of their
//! shareIDs. The order is the same in every process of the share, which the protocol of
//! several pages rests on.

use crate::device::Device;
use crate::growing::LOCKS;
use crate::neighbours::{Few, Neighbours, PATIENCE};
use crate::pace::{Costs, Pace, Quick};
use crate::place::{Place, Places};
use crate::policies::Policies;
use crate::system::System;
use crate::table::{Class, Entry, MANY, Table};
use core::cell::Cell;
use divvy_pages::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use divvy_pages::{Fault, Flags, GpuUuid, Identity, Policy, PolicyPage};

/// The most devices with shares in one container, and the highest ordinal of a CUDA device that is known.
pub const DEVICES: usize = 32;
const ORDINALS: usize = 64;

/// The policy page of one pair that the container has mounted.
#[derive(Clone, Copy, Debug)]
pub enum Found {
    Policy(&'static PolicyPage),
    /// There is one, but not one to trust: not root's, not on a read-only mount, not a page.
    Refused,
}

/// What holds for a device.
#[derive(Debug)]
pub enum Standing<'a, S: System> {
    /// No page names it: nothing is counted and nothing refused.
    Free,
    /// Its pages cannot be used: every allocation is refused.
    Closed,
    Share(Device<'a, S>),
}

/// The process's view, shared by its threads. A `static` of the library.
#[derive(Debug)]
pub struct Ledger<S> {
    pub(crate) system: S,
    local: AtomicPtr<Local>,
    policies: Policies,
}

/// All that a child of fork must not inherit. What a start touches comes first, on few pages: the others
/// are none as long as nobody touches them.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Local {
    state: AtomicU32,
    /// Whether it has slots.
    seated: AtomicU32,
    /// All pages of one of the two kinds were refused.
    closed: AtomicU32,
    /// How many of the devices there are.
    count: AtomicU32,
    /// There are more, for which there is no room.
    full: AtomicU32,
    /// Somebody has set out to do what the node wishes ([`Ledger::serve`]).
    served: AtomicU32,
    /// See [`crate::pace::quick`].
    pub(crate) quick: Quick,
    me: [AtomicU64; 4],
    /// By the ordinal of a CUDA device: 0 not asked yet, 1 none, otherwise its index here plus 2.
    ordinals: [AtomicU32; ORDINALS],
    pub(crate) table: Table,
    devices: [Places; DEVICES],
    /// The contexts in which something is allocated, at their numbers less one.
    pub(crate) contexts: [AtomicU64; MANY as usize],
    /// See [`crate::growing`].
    pub(crate) locks: [AtomicU32; LOCKS],
    /// See [`crate::pace`].
    pub(crate) costs: Costs,
    pub(crate) paces: [Pace; DEVICES],
    /// See [`crate::vmm`]: the number of the next physical allocation.
    pub(crate) objects: AtomicU64,
}

/// How long to sleep while the node wishes nothing: where one word tells, and where there are several devices, of
/// which only the first does; in nanoseconds.
const WISH: u64 = 60_000_000_000;
const WISHES: u64 = 200_000_000;

const EMPTY: u32 = 0;
const BUILDING: u32 = 1;
const READY: u32 = 2;

impl<S: System> Ledger<S> {
    pub const fn new(system: S) -> Self {
        Self { system, local: AtomicPtr::new(core::ptr::null_mut()), policies: Policies::new() }
    }

    /// The system that was given to [`Ledger::new`].
    pub fn system(&self) -> &S {
        &self.system
    }

    /// What holds for the CUDA device with this ordinal. `uuids` asks the driver, once per device and
    /// process: `cuDeviceGetUuid_v2` (the instance's own on MIG) and `cuDeviceGetUuid` (the GPU's).
    pub fn device(&self, ordinal: i32, uuids: impl FnOnce() -> Option<[GpuUuid; 2]>) -> Standing<'_, S> {
        let Some(local) = self.local() else { return Standing::Closed };
        if local.closed.load(Relaxed) != 0 {
            return Standing::Closed;
        }
        match local.index(ordinal, uuids) {
            Some(Some(index)) => self.standing(local, index),
            _ if local.full.load(Relaxed) != 0 => Standing::Closed,
            Some(None) => Standing::Free,
            // A device that the driver does not name: refused if anything here has a share.
            None if local.devices().next().is_some() => Standing::Closed,
            None => Standing::Free,
        }
    }

    /// The device with this ordinal, where it was asked for before and has a share that this process counts for.
    #[inline]
    pub fn known(&self, ordinal: i32) -> Option<Device<'_, S>> {
        let local = self.made()?;
        let is_made = local.state.load(Acquire) == READY && local.seated.load(Acquire) == READY;
        let number = local.ordinals.get(usize::try_from(ordinal).ok()?)?.load(Acquire);
        let index = number.checked_sub(2).filter(|_| is_made)?;
        let places = local.devices.get(index as usize)?;
        places.places().any(Place::has_slot).then_some(Device { ledger: self, local, places, index })
    }

    /// `cuDeviceTotalMem` of the device with these UUIDs, from the driver's own: all that many programs ask, so nothing is
    /// made and no slot is taken for it.
    pub fn total_mem(&self, uuids: impl FnOnce() -> Option<[GpuUuid; 2]>, total: u64) -> u64 {
        if self.made().is_some_and(|local| local.closed.load(Relaxed) != 0) {
            return total;
        }
        let seen =
            || self.policies.look(&self.system).filter(|found| !found.are_none())?.seen(uuids()?, total);
        seen().unwrap_or(total)
    }

    /// What holds for the device that NVML or a page names by a UUID, of a GPU or a MIG instance.
    pub fn device_of(&self, uuid: GpuUuid) -> Standing<'_, S> {
        let Some(local) = self.local() else { return Standing::Closed };
        match local.find([uuid, uuid]) {
            Some(index) => self.standing(local, index),
            None if local.closed.load(Relaxed) | local.full.load(Relaxed) != 0 => Standing::Closed,
            None => Standing::Free,
        }
    }

    #[inline]
    fn standing<'a>(&'a self, local: &'a Local, index: u32) -> Standing<'a, S> {
        let Some(places) = local.devices.get(index as usize) else { return Standing::Free };
        let seated = local.seated.load(Acquire) == READY || self.once(&local.seated, || self.sit(local));
        if seated && places.places().any(Place::has_slot) {
            Standing::Share(Device { ledger: self, local, places, index })
        } else {
            Standing::Closed
        }
    }

    /// True where no page is mounted at all: every call may go straight to the driver.
    #[cold]
    pub fn idle(&self) -> bool {
        self.policies.look(&self.system).is_some_and(Policies::are_none)
    }

    /// Takes an entry out of the table before the driver frees what it is for, since the
    /// driver may give the same address to another thread at once. `None`: nothing is charged for it.
    pub fn take(&self, class: Class, key: u64) -> Option<Taken<'_, S>> {
        let local = self.local()?;
        let entry = local.table.remove(&self.system, class, key)?;
        Some(Taken { ledger: self, local, entry: Some(entry) })
    }

    /// Whether what begins at this address is managed memory in place of what the program asked for.
    pub fn stands_in(&self, pointer: u64) -> bool {
        let entry = |local: &Local| local.table.get(&self.system, Class::StandIn, pointer);
        self.local().and_then(entry).is_some()
    }

    #[inline]
    pub(crate) fn uncharge(&self, local: &Local, entry: &Entry) {
        let index = entry.device();
        if let Some(places) = local.devices.get(index as usize) {
            Device { ledger: self, local, places, index }.give_back(entry);
        }
    }

    /// Calls with every device with a share that over-commits.
    pub fn over_committed<'a>(&'a self, mut each: impl FnMut(Device<'a, S>)) {
        let Some(local) = self.local() else { return };
        for (places, index) in local.devices().zip(0..) {
            if places.places().any(|place| place.flags().has(Flags::UVM))
                && let Standing::Share(device) = self.standing(local, index)
            {
                each(device);
            }
        }
    }

    /// Whether the caller is the first of this process that asks: then it has to see to it that what the node wishes
    /// is done while the program calls nothing.
    pub fn serve(&self) -> bool {
        self.local().is_some_and(|local| {
            local.served.load(Relaxed) == 0 && local.served.compare_exchange(0, 1, Relaxed, Relaxed).is_ok()
        })
    }

    /// Sleeps until the node wishes something, or for a while.
    pub fn wait_for_wish(&self) {
        let over = |place: &&Place| place.flags().has(Flags::UVM);
        let mut places = self.local().into_iter().flat_map(|local| local.devices().flat_map(Places::places));
        let first = places.by_ref().find(over).and_then(Place::wish);
        let pause = if places.any(|place| over(&place)) { WISHES } else { WISH };
        match first {
            Some((word, known)) => self.system.wait(word, known, self.system.now().saturating_add(pause)),
            None => self.system.nap(pause),
        }
    }

    /// Counts a fault on the first page that there is.
    pub fn fault(&self, fault: Fault) {
        let places = self.local().and_then(|local| local.devices().next());
        if let Some(account) = places.and_then(|places| places.places().next()?.account()) {
            account.count(fault);
        }
    }

    /// The process's own view, as far as something was made of it.
    #[inline]
    pub(crate) fn made(&self) -> Option<&Local> {
        // SAFETY: only `first` stores here, a mapping of this size that is never unmapped; zeros are a valid `Local`.
        #[allow(unsafe_code)]
        unsafe {
            self.local.load(Acquire).as_ref()
        }
    }

    /// The process's own view: made if this is its first call. `None` where it cannot be made.
    #[inline]
    pub(crate) fn local(&self) -> Option<&Local> {
        match self.made() {
            Some(local) if local.state.load(Acquire) == READY => Some(local),
            _ => self.first(),
        }
    }

    #[cold]
    fn first(&self) -> Option<&Local> {
        if self.local.load(Acquire).is_null() {
            let mapped = self.system.map(size_of::<Local>(), true).cast::<Local>();
            if mapped.is_null() || !mapped.is_aligned() {
                return None;
            }
            if self.local.compare_exchange(core::ptr::null_mut(), mapped, AcqRel, Acquire).is_err() {
                // SAFETY: mapped above, and another thread's mapping was taken in its place.
                #[allow(unsafe_code)]
                unsafe {
                    self.system.unmap(mapped.cast(), size_of::<Local>())
                };
            }
        }
        // SAFETY: not null as of above; see `made`.
        #[allow(unsafe_code)]
        let local = unsafe { self.local.load(Acquire).as_ref() }?;
        self.once(&local.state, || self.build(local)).then_some(local)
    }

    /// Has one thread `make` what the others wait for; false where that takes too long.
    #[cold]
    fn once(&self, state: &AtomicU32, make: impl FnOnce()) -> bool {
        if state.compare_exchange(EMPTY, BUILDING, AcqRel, Acquire).is_ok() {
            make();
            state.store(READY, Release);
        }
        // Asked for only by who has to wait: the clock is a system call.
        let mut start = None;
        while state.load(Acquire) != READY {
            let now = self.system.now();
            if now.saturating_sub(*start.get_or_insert(now)) > PATIENCE {
                return false;
            }
            self.system.nap(50_000);
        }
        true
    }

    /// The word that is not zero while launches have to be looked at ([`PolicyPage::at_launch`]), where
    /// one word can say that: `Some(None)` is never, as nothing here has a share; `None` is always.
    pub fn at_launch(&self) -> Option<Option<*const u64>> {
        let local = self.local()?;
        let mut places = local.devices().flat_map(Places::places);
        match (places.next(), places.next()) {
            (None, _) => Some(None),
            (Some(only), None) => only.policy().map(|(page, _)| Some(page.at_launch())),
            (Some(_), Some(_)) => None,
        }
    }

    fn build(&self, local: &Local) {
        let policies = self.policies.look(&self.system);
        let mut refused = policies.is_none_or(Policies::has_refused);
        policies.into_iter().flat_map(Policies::pages).for_each(|page| refused |= !local.takes(page));
        if policies.is_some_and(Policies::are_too_many) {
            local.full.store(1, Relaxed);
        }
        local.closed.store((refused && local.count.load(Relaxed) == 0).into(), Relaxed);
    }

    /// Looks for the account pages and takes a slot on each. That is worth more than all else of a start, and who
    /// never has memory needs none: so it is done when a device is first charged or its use is first looked at.
    fn sit(&self, local: &Local) {
        let me = self.system.identity();
        if let Some(me) = me {
            let words = [u64::from(me.pid), me.namespace, me.start, me.image];
            local.me.iter().zip(words).for_each(|(room, word)| room.store(word, Relaxed));
        }
        let peers = Neighbours::new(&self.system, me);
        let mut closed = true;
        for place in local.devices().flat_map(Places::places) {
            let account = place.policy().and_then(|(_, policy)| self.system.account(&policy));
            let slot = account.zip(me).and_then(|(account, me)| account.register(&me, &peers).ok());
            closed &= account.is_none();
            // What dead neighbours held is given back before the first figure is shown; if there are
            // many neighbours, only some are looked at, as a start must not cost more with their number.
            if let Some(account) = account.filter(|account| account.used() > 0) {
                account.tidy(slot, &Few { peers: &peers, asked: Cell::new(0) });
            }
            place.sit(account, slot);
        }
        local.closed.store(closed.into(), Relaxed);
    }
}

/// What a page names a device by.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    Instance,
    Gpu,
}

/// How a page of that GPU and instance names a device with these UUIDs, its own and its GPU's; `None`: it is another's.
pub(crate) fn names_of((gpu, mig): (GpuUuid, Option<GpuUuid>), [own, of_gpu]: [GpuUuid; 2]) -> Option<Names> {
    match mig {
        Some(mig) => (mig == own).then_some(Names::Instance),
        None => (gpu == own || gpu == of_gpu).then_some(Names::Gpu),
    }
}

impl Local {
    pub(crate) fn devices(&self) -> impl Iterator<Item = &Places> {
        self.devices.iter().take(self.count.load(Relaxed) as usize)
    }

    /// While it is made: a policy page that was found. False where it cannot be used.
    #[cold]
    fn takes(&self, policy: &'static PolicyPage) -> bool {
        let stamp = policy.stamp();
        let read = policy.read();
        if let Ok((_, read)) = &read {
            self.add(policy, (read, stamp));
        }
        read.is_ok()
    }

    /// While it is made: one policy more.
    #[cold]
    fn add(&self, policy: &'static PolicyPage, read: (&Policy, u64)) {
        let count = self.count.load(Relaxed);
        let known = self.devices().find(|device| device.is() == (read.0.gpu, read.0.mig));
        let Some(device) = known.or_else(|| self.devices.get(count as usize)) else {
            return self.full.store(1, Relaxed);
        };
        device.add(policy, read);
        if known.is_none() {
            self.count.store(count + 1, Relaxed);
        }
    }

    /// Which device this ordinal is, if it has a share; `None`: the driver does not name it.
    fn index(&self, ordinal: i32, uuids: impl FnOnce() -> Option<[GpuUuid; 2]>) -> Option<Option<u32>> {
        let known = usize::try_from(ordinal).ok().and_then(|ordinal| self.ordinals.get(ordinal));
        match known.map_or(0, |known| known.load(Acquire)) {
            0 => {
                let found = self.find(uuids()?);
                if let Some(known) = known {
                    known.store(found.map_or(1, |index| index + 2), Release);
                }
                Some(found)
            }
            1 => Some(None),
            index => Some(Some(index - 2)),
        }
    }

    /// The device whose pages name this UUID: of the instance first, as an instance's pages name the GPU too.
    #[cold]
    fn find(&self, asked: [GpuUuid; 2]) -> Option<u32> {
        let of = |names: Names| {
            let mut devices = self.devices().zip(0..);
            devices.find_map(|(device, index)| (names_of(device.is(), asked) == Some(names)).then_some(index))
        };
        of(Names::Instance).or_else(|| of(Names::Gpu))
    }

    /// The number of a context, from 1; 0 where there are too many: what is allocated in those is given back
    /// by its own free or with the process.
    pub(crate) fn context(&self, context: u64) -> u64 {
        let known = |place: &AtomicU64| place.load(Acquire) == context;
        let claim = |place: &AtomicU64| match place.compare_exchange(0, context, AcqRel, Acquire) {
            Ok(_) => true,
            Err(now) => now == context,
        };
        let numbered = || self.contexts.iter().zip(1..);
        if context == 0 {
            return 0;
        }
        numbered()
            .find(|(place, _)| known(place))
            .or_else(|| numbered().find(|(place, _)| claim(place)))
            .map_or(0, |(_, number)| number)
    }

    pub(crate) fn me(&self) -> Option<Identity> {
        let [pid, namespace, start, image] = &self.me;
        let pid = u32::try_from(pid.load(Relaxed)).ok().filter(|pid| *pid > 0)?;
        Some(Identity {
            pid,
            namespace: namespace.load(Relaxed),
            start: start.load(Relaxed),
            image: image.load(Relaxed),
        })
    }
}

/// An entry that is out of the table while the driver frees what it is for. Dropped, it goes
/// back: the driver did not free it.
#[derive(Debug)]
pub struct Taken<'a, S: System> {
    ledger: &'a Ledger<S>,
    local: &'a Local,
    entry: Option<Entry>,
}

impl<S: System> Taken<'_, S> {
    /// The driver freed it: its bytes are given back.
    pub fn freed(self) {
        self.freed_but(0);
    }

    /// The driver freed it but for so many bytes, of whose end nobody will hear: they stay charged.
    pub fn freed_but(mut self, bytes: u64) {
        if let Some(entry) = self.entry.take() {
            let freed = entry.bytes().saturating_sub(bytes);
            self.ledger.uncharge(self.local, &entry.with_bytes(freed));
        }
    }

    /// It is gone, and nothing was charged for it.
    pub fn forgotten(mut self) {
        self.entry = None;
    }
}

impl<S: System> Drop for Taken<'_, S> {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.take() {
            // There was room for it a moment ago; without, it stays charged until the process ends.
            let _ = self.local.table.insert(&self.ledger.system, entry);
        }
    }
}
