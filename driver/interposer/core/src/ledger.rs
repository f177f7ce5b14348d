//! What a process knows of its shares.
//!
//! Made at the first call and kept in one mapping that the kernel zeroes in a child of fork
//! (`MADV_WIPEONFORK`): a child finds nothing, so it looks for its pages and takes slots of its
//! own, and the parent's allocations, which it cannot free, are not in its table. No handler
//! and no system call per operation is needed for that, one load tells.
//!
//! All pages that name one device are one [`Device`], its places in the order of their
//! shareIDs. The order is the same in every process of the share, which the protocol of
//! several pages rests on.

use crate::device::Device;
use crate::neighbours::{Few, Neighbours, PATIENCE};
use crate::pace::{Costs, Pace};
use crate::place::{Place, Places};
use crate::system::System;
use crate::table::{Class, Entry, MANY, Table};
use core::cell::Cell;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use divvy_pages::{AccountPage, Fault, GpuUuid, Identity, Policy, PolicyPage, Text};

/// The most devices with shares in one container, and the highest ordinal of a CUDA device that is known.
pub const DEVICES: usize = 32;
const ORDINALS: usize = 64;

/// One pair of pages that the container has mounted.
#[derive(Clone, Copy, Debug)]
pub enum Found {
    Pair(&'static PolicyPage, &'static AccountPage),
    /// There is a pair, but not one to trust: not root's, not on a read-only mount, not a page.
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
}

/// All that a child of fork must not inherit.
#[derive(Debug)]
pub(crate) struct Local {
    state: AtomicU32,
    /// All pages were refused.
    closed: AtomicU32,
    me: [AtomicU64; 4],
    pub(crate) devices: [Places; DEVICES],
    /// By the ordinal of a CUDA device: 0 not asked yet, 1 none, otherwise its index here plus 2.
    ordinals: [AtomicU32; ORDINALS],
    pub(crate) table: Table,
    /// The contexts in which something is allocated, at their numbers less one.
    pub(crate) contexts: [AtomicU64; MANY as usize],
    /// See [`crate::growing`].
    pub(crate) locks: [AtomicU32; 16],
    /// See [`crate::pace`].
    pub(crate) costs: Costs,
    pub(crate) paces: [Pace; DEVICES],
    /// See [`crate::vmm`]: the number of the next physical allocation.
    pub(crate) objects: AtomicU64,
}

const EMPTY: u32 = 0;
const BUILDING: u32 = 1;
const READY: u32 = 2;

/// A pair while the ledger is made.
#[derive(Clone, Copy)]
struct Pair {
    policy: &'static PolicyPage,
    account: &'static AccountPage,
    read: Policy,
}

impl<S: System> Ledger<S> {
    pub const fn new(system: S) -> Self {
        Self { system, local: AtomicPtr::new(core::ptr::null_mut()) }
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
        let known = usize::try_from(ordinal).ok().and_then(|ordinal| local.ordinals.get(ordinal));
        let index = match known.map_or(0, |known| known.load(Acquire)) {
            0 => {
                let Some(uuids) = uuids() else { return self.unnamed(local) };
                let found = local.find(uuids);
                if let Some(known) = known {
                    known.store(found.map_or(1, |index| index + 2), Release);
                }
                found
            }
            1 => None,
            index => Some(index - 2),
        };
        let Some(places) = index.and_then(|index| local.devices.get(index as usize)) else {
            return Standing::Free;
        };
        self.standing(local, places, index.unwrap_or_default())
    }

    /// What holds for the device that NVML or a page names by a UUID, of a GPU or a MIG instance.
    pub fn device_of(&self, uuid: GpuUuid) -> Standing<'_, S> {
        let Some(local) = self.local() else { return Standing::Closed };
        match local.find([uuid, uuid]) {
            Some(index) => match local.devices.get(index as usize) {
                Some(places) => self.standing(local, places, index),
                None => Standing::Free,
            },
            None if local.closed.load(Relaxed) != 0 => Standing::Closed,
            None => Standing::Free,
        }
    }

    fn standing<'a>(&'a self, local: &'a Local, places: &'a Places, index: u32) -> Standing<'a, S> {
        let usable = places.places().any(Place::has_slot);
        if usable { Standing::Share(Device { ledger: self, local, places, index }) } else { Standing::Closed }
    }

    /// A device that the driver does not name: refused if anything here has a share.
    fn unnamed<'a>(&'a self, local: &'a Local) -> Standing<'a, S> {
        if local.devices.iter().any(|device| device.count.load(Relaxed) > 0) {
            Standing::Closed
        } else {
            Standing::Free
        }
    }

    /// True where no page is mounted at all: every call may go straight to the driver.
    pub fn idle(&self) -> bool {
        self.local().is_some_and(|local| {
            local.closed.load(Relaxed) == 0
                && local.devices.iter().all(|device| device.count.load(Relaxed) == 0)
        })
    }

    /// Takes an entry out of the table before the driver frees what it is for, since the
    /// driver may give the same address to another thread at once. `None`: nothing is charged for it.
    pub fn take(&self, class: Class, key: u64) -> Option<Taken<'_, S>> {
        let local = self.local()?;
        let entry = local.table.remove(&self.system, class, key)?;
        Some(Taken { ledger: self, local, entry: Some(entry) })
    }

    pub(crate) fn uncharge(&self, local: &Local, entry: &Entry) {
        let index = entry.device();
        if let Some(places) = local.devices.get(index as usize) {
            Device { ledger: self, local, places, index }.give_back(entry);
        }
    }

    /// Counts a fault on the first page that there is.
    pub fn fault(&self, fault: Fault) {
        let places = self.local().and_then(|local| local.devices.first());
        if let Some(account) = places.and_then(|places| places.places().next()?.account()) {
            account.count(fault);
        }
    }

    /// The process's own view: made if this is its first call. `None` where it cannot be made.
    pub(crate) fn local(&self) -> Option<&Local> {
        let local = self.local.load(Acquire);
        // SAFETY: only `first` stores here, a mapping of this size that is never unmapped; zeros are a valid `Local`.
        #[allow(unsafe_code)]
        let local = unsafe { local.as_ref() };
        match local {
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
        // SAFETY: not null as of above; see `local`.
        #[allow(unsafe_code)]
        let local = unsafe { self.local.load(Acquire).as_ref() }?;
        if local.state.compare_exchange(EMPTY, BUILDING, AcqRel, Acquire).is_ok() {
            self.build(local);
            local.state.store(READY, Release);
        }
        let start = self.system.now();
        while local.state.load(Acquire) != READY {
            if self.system.now().saturating_sub(start) > PATIENCE {
                return None;
            }
            self.system.nap(50_000);
        }
        Some(local)
    }

    /// The word that is not zero while launches have to be looked at ([`PolicyPage::at_launch`]), where
    /// one word can say that: `Some(None)` is never, as nothing here has a share; `None` is always.
    pub fn at_launch(&self) -> Option<Option<*const u64>> {
        let local = self.local()?;
        let mut places = local.devices.iter().flat_map(Places::places);
        match (places.next(), places.next()) {
            (None, _) => Some(None),
            (Some(only), None) => only.policy().map(|(page, _)| Some(page.at_launch())),
            (Some(_), Some(_)) => None,
        }
    }

    fn build(&self, local: &Local) {
        let mut pairs = [None::<Pair>; DEVICES * 2];
        let mut count = 0;
        let mut refused = false;
        self.system.pages(&mut |found| match found {
            Found::Pair(policy, account) => match (policy.read(), pairs.get_mut(count)) {
                (Ok((_, read)), Some(room)) => {
                    *room = Some(Pair { policy, account, read });
                    count += 1;
                }
                _ => refused = true,
            },
            Found::Refused => refused = true,
        });
        let me = self.system.identity();
        if let Some(me) = me {
            let words = [u64::from(me.pid), me.namespace, me.start, me.image];
            local.me.iter().zip(words).for_each(|(room, word)| room.store(word, Relaxed));
        }
        let peers = Neighbours::new(&self.system, me);
        // In the order of their names; with so few, looking for the next beats the code of a sort.
        let mut last = None;
        let next = |last| {
            pairs.iter().flatten().filter(|pair| Some(pair.name()) > last).min_by_key(|pair| pair.name())
        };
        while let Some(pair) = next(last) {
            last = Some(pair.name());
            let named = |device: &&Places| match device.places().next().and_then(Place::policy) {
                Some((_, first)) => (first.gpu, first.mig) == (pair.read.gpu, pair.read.mig),
                None => true,
            };
            let Some(device) = local.devices.iter().find(named) else { continue };
            let next = device.count.load(Relaxed) as usize;
            let Some(place) = device.places.get(next) else { continue };
            let slot = me.and_then(|me| pair.account.register(&me, &peers).ok());
            // What dead neighbours held is given back before the first figure is shown; if there are
            // many neighbours, only some are looked at, as a start must not cost more with their number.
            if pair.account.used() > 0 {
                pair.account.tidy(&Few { peers: &peers, asked: Cell::new(0) });
            }
            place.fill(pair.policy, pair.account, slot);
            device.count.store(next as u32 + 1, Relaxed);
        }
        local.closed.store((refused && count == 0).into(), Relaxed);
    }
}

impl Pair {
    fn name(&self) -> (Text<64>, Text<64>) {
        (self.read.share, self.read.claim)
    }
}

impl Local {
    /// The device whose pages name this UUID: of the instance first, as an instance's pages name the GPU too.
    fn find(&self, [own, gpu]: [GpuUuid; 2]) -> Option<u32> {
        let of = |matches: &dyn Fn(&Policy) -> bool| {
            self.devices.iter().zip(0..).find_map(|(device, index)| {
                let (_, policy) = device.places().next()?.policy()?;
                matches(&policy).then_some(index)
            })
        };
        of(&|policy| policy.mig == Some(own))
            .or_else(|| of(&|policy| policy.mig.is_none() && (policy.gpu == own || policy.gpu == gpu)))
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
}

impl<S: System> Drop for Taken<'_, S> {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.take() {
            // There was room for it a moment ago; without, it stays charged until the process ends.
            let _ = self.local.table.insert(&self.ledger.system, entry);
        }
    }
}
