//! Charging one device, and the figures that a program sees of it.
//!
//! What is charged, by the call that is about to be made:
//!
//! | event | charge |
//! |---|---|
//! | linear, pitched memory | what the driver granted; asked for before the call |
//! | managed memory | its size, wherever its pages are; where memory is over-committed it does not count as the device's |
//! | arrays and mipmaps | `cuArrayGetMemoryRequirements` where the driver has it, otherwise the computed size |
//! | a context | the policy's figure, until the node has measured the process |
//! | pools, graphs | what the driver has reserved ([`crate::growing`]) |
//! | handles of physical memory | their size while a reference or a mapping lives ([`crate::vmm`]) |
//! | imported and opened memory | nothing: its owner is charged |
//! | pinned host memory | nothing |
//!
//! Modules, local memory and workspaces of libraries have no call whose cost could be
//! known before it: the node measures the whole process and writes the difference into its
//! slot, where it counts like a charge ([`divvy_pages::account::NodeLine`]).

use crate::ledger::{Ledger, Local};
use crate::neighbours::Neighbours;
use crate::place::{Place, Places};
use crate::system::System;
use crate::table::{Class, Entry};
use core::mem::MaybeUninit;
use divvy_pages::sync::Ordering::Relaxed;
use divvy_pages::{Fault, Flags, Full, SEATS, Seat, charge, charge_fixed, force, uncharge};

/// One device with a share, seen from this process.
#[derive(Debug)]
pub struct Device<'a, S: System> {
    pub(crate) ledger: &'a Ledger<S>,
    pub(crate) local: &'a Local,
    pub(crate) places: &'a Places,
    pub(crate) index: u32,
}

impl<S: System> Clone for Device<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: System> Copy for Device<'_, S> {}

/// What was allocated, with the key under which its free will name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAlloc`, `cuMemAllocPitch`: the pointer; and the context it was made in.
    Linear { pointer: u64, context: u64 },
    /// `cuMemAllocManaged`.
    Managed { pointer: u64, context: u64 },
    /// Managed memory in place of what the program asked for.
    StandIn { pointer: u64, context: u64 },
    /// `cuArrayCreate`, `cuArray3DCreate`: the `CUarray`.
    Array { handle: u64, context: u64 },
    /// `cuMipmappedArrayCreate`.
    Mipmap { handle: u64, context: u64 },
    /// A context itself, primary or not.
    Context { handle: u64 },
    /// `cuModuleLoad…`, `cuLibraryLoad…`, where a figure is known.
    Module { handle: u64, context: u64 },
}

/// The limit and the use of all pages of a device, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// What the share may use, in bytes.
    pub limit: u64,
    /// What its processes use.
    pub used: u64,
    /// The device's own memory, by the policy; 0: not said.
    pub physical: u64,
    /// It may be more than the device has.
    pub over_commits: bool,
}

/// Bytes that are charged for a call which is being made. Dropped, they are given back.
#[derive(Debug)]
#[must_use = "dropping it gives the bytes back"]
pub struct Reservation<'a, S: System> {
    device: Device<'a, S>,
    bytes: u64,
    /// It can move, wherever the share's other memory is.
    managed: bool,
}

impl<'a, S: System> Device<'a, S> {
    /// Which of the container's devices with shares it is.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Charges `bytes` before the driver is asked for them. `Err`: `CUDA_ERROR_OUT_OF_MEMORY` is the
    /// answer, and no output is touched.
    #[inline]
    pub fn reserve(&self, bytes: u64) -> Result<Reservation<'a, S>, Full> {
        self.charge(bytes)?;
        Ok(Reservation { device: *self, bytes, managed: false })
    }

    /// The same of managed memory: only the share's limit counts, not what it has of the device.
    pub fn reserve_managed(&self, bytes: u64) -> Result<Reservation<'a, S>, Full> {
        self.charge_managed(bytes)?;
        Ok(Reservation { device: *self, bytes, managed: true })
    }

    /// Whether the share may hold more than it has of the device, as managed memory.
    pub fn over_commits(&self) -> bool {
        self.places.soft().is_some() && !self.lenient()
    }

    /// Charges a context before it is made, by the policy's figure.
    pub fn reserve_context(&self) -> Result<Reservation<'a, S>, Full> {
        self.reserve(self.places.places().map(Place::context).max().unwrap_or_default())
    }

    /// The limit and what is used of it now.
    #[inline]
    pub fn figures(&self) -> Figures {
        let mut figures = Figures { over_commits: self.over_commits(), ..Figures::default() };
        for place in self.places.places() {
            if let Some(seat) = self.seat(place) {
                figures.limit = figures.limit.saturating_add(seat.limit);
                figures.used = figures.used.saturating_add(seat.page.used());
                figures.physical = figures.physical.max(place.physical());
            }
        }
        figures
    }

    /// `cuMemGetInfo`: free and total, from the driver's own.
    #[inline]
    pub fn mem_info(&self, free: u64, total: u64) -> (u64, u64) {
        let figures = self.figures();
        (figures.free(free), figures.total(total))
    }

    /// Any flag of any of the pages.
    pub fn has(&self, flag: Flags) -> bool {
        self.places.places().any(|place| place.flags().has(flag))
    }

    pub(crate) fn neighbours(&self) -> Neighbours<'a, S> {
        Neighbours::new(&self.ledger.system, self.local.me())
    }

    /// True where nothing is refused: the driver holds the limit by itself, or nobody does.
    fn lenient(&self) -> bool {
        let lenient = |place: &Place| {
            let flags = place.flags();
            flags.has(Flags::OBSERVE_ONLY) || flags.has(Flags::NATIVE_MEMORY)
        };
        self.places.places().all(lenient)
    }

    /// The process's seat on a page whose policy and accounts are as the node last wrote them.
    #[inline]
    fn seat<'p>(&self, place: &'p Place) -> Option<Seat<'p>> {
        let seat = self.places.seat(place)?;
        place.heed(&seat, &self.ledger.system);
        Some(seat)
    }

    /// Calls with the seats on all pages, in their order.
    #[inline]
    fn seated<R>(&self, run: impl FnOnce(&[Seat<'_>]) -> R) -> R {
        let mut places = self.places.places();
        let mut room = [const { MaybeUninit::uninit() }; SEATS];
        let first = places.next().and_then(|place| self.seat(place));
        let only;
        run(match (first, self.places.count.load(Relaxed)) {
            (Some(seat), 1) => {
                only = seat;
                core::slice::from_ref(&only)
            }
            (first, _) => self.seats(first, &mut room),
        })
    }

    /// Those of a device with several pages.
    #[cold]
    fn seats<'p>(
        &'p self,
        first: Option<Seat<'p>>,
        room: &'p mut [MaybeUninit<Seat<'p>>; SEATS],
    ) -> &'p [Seat<'p>] {
        let rest = self.places.places().skip(1).filter_map(|place| self.seat(place));
        let mut count = 0;
        for (room, seat) in room.iter_mut().zip(first.into_iter().chain(rest)) {
            room.write(seat);
            count += 1;
        }
        // SAFETY: so many were written.
        #[allow(unsafe_code)]
        unsafe {
            core::slice::from_raw_parts(room.as_ptr().cast(), count)
        }
    }

    #[inline]
    pub(crate) fn charge(&self, bytes: u64) -> Result<(), Full> {
        self.seated(|seats| {
            if self.lenient() {
                force(seats, bytes);
                return Ok(());
            }
            match (seats, self.places.soft()) {
                ([seat], Some(soft)) => charge_fixed(seat, soft, bytes, &self.neighbours()),
                _ => charge(seats, bytes, &self.neighbours()),
            }
        })
    }

    fn charge_managed(&self, bytes: u64) -> Result<(), Full> {
        self.seated(|seats| {
            if self.lenient() {
                force(seats, bytes);
                return Ok(());
            }
            charge(seats, bytes, &self.neighbours())
        })
    }

    /// Charges what is there already, whatever the limit says.
    pub(crate) fn force(&self, bytes: u64) {
        self.seated(|seats| force(seats, bytes));
    }

    #[inline]
    pub(crate) fn uncharge(&self, bytes: u64) {
        if bytes > 0 {
            self.seated(|seats| uncharge(seats, bytes));
        }
    }

    /// Gives back what an entry was charged.
    #[inline]
    pub(crate) fn give_back(&self, entry: &Entry) {
        self.note(entry, -1);
        self.uncharge(entry.bytes());
    }

    /// Tells the node and the share's other processes which of the bytes are for contexts and which are managed memory.
    /// Both are on the first page: they are told apart by the process, not by the page. What is managed is said once
    /// it is charged, and taken back before that is ([`charge_fixed`]).
    #[inline]
    fn note(&self, entry: &Entry, sign: i64) {
        let bytes = entry.bytes() as i64 * sign;
        let (context, managed) = match entry.class() {
            Some(Class::Context) => (bytes, 0),
            _ if entry.is_managed() => (0, bytes),
            _ => return,
        };
        self.tell(|slot| slot.note(context, managed));
    }

    fn insert(&self, entry: Entry) -> Result<(), Full> {
        match self.local.table.insert(&self.ledger.system, entry) {
            Ok(old) => {
                self.note(&entry, 1);
                // The driver gave an address that we believed in use: its free was not seen.
                if let Some(old) = old {
                    self.ledger.uncharge(self.local, &old);
                }
                Ok(())
            }
            Err(_) => {
                self.ledger.fault(Fault::NoTable);
                Err(Full)
            }
        }
    }
}

impl<'a, S: System> Reservation<'a, S> {
    pub fn device(&self) -> Device<'a, S> {
        self.device
    }

    /// The call succeeded and granted `bytes`. `Err`: they do not fit, or cannot be kept in mind: the
    /// caller frees what it got and answers out of memory; everything is given back.
    #[inline]
    pub fn keep(mut self, kind: Kind, bytes: u64) -> Result<(), Full> {
        self.resize(bytes)?;
        let (class, key, context) = match kind {
            Kind::Linear { pointer, context }
            | Kind::Managed { pointer, context }
            | Kind::StandIn { pointer, context } => (Class::Pointer, pointer, context),
            Kind::Array { handle, context } => (Class::Array, handle, context),
            Kind::Mipmap { handle, context } => (Class::Mipmap, handle, context),
            Kind::Context { handle } => (Class::Context, handle, 0),
            Kind::Module { handle, context } => (Class::Module, handle, context),
        };
        let managed = matches!(kind, Kind::Managed { .. } | Kind::StandIn { .. });
        let number = self.device.local.context(context);
        if let Kind::StandIn { .. } = kind {
            self.device.insert(Entry::new(Class::StandIn, key, self.device.index, 0, number))?;
        }
        self.device.insert(Entry::new(class, key, self.device.index, bytes, number).managed(managed))?;
        self.bytes = 0;
        Ok(())
    }

    /// [`Reservation::keep`] for what granted just what was asked for.
    pub fn keep_all(self, kind: Kind) -> Result<(), Full> {
        let bytes = self.bytes;
        self.keep(kind, bytes)
    }

    /// A context that a call answered with. A primary context is made once and retained many
    /// times: if it is in the table already, the reservation is given back.
    pub fn keep_context(self, handle: u64) -> Result<(), Full> {
        let known = self.device.local.table.get(&self.device.ledger.system, Class::Context, handle);
        if known.is_some() { Ok(()) } else { self.keep_all(Kind::Context { handle }) }
    }

    /// Makes it as large as the driver's grant.
    pub(crate) fn resize(&mut self, bytes: u64) -> Result<(), Full> {
        if let Some(more) = bytes.checked_sub(self.bytes).filter(|more| *more > 0) {
            if self.managed {
                self.device.charge_managed(more)?;
            } else {
                self.device.charge(more)?;
            }
        } else {
            self.device.uncharge(self.bytes - bytes);
        }
        self.bytes = bytes;
        Ok(())
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Charged for good under an entry that somebody else keeps.
    pub(crate) fn settled(mut self) {
        self.bytes = 0;
    }
}

impl<S: System> Drop for Reservation<'_, S> {
    fn drop(&mut self) {
        self.device.uncharge(self.bytes);
    }
}

impl Figures {
    /// The total that the share sees of a device with `total` bytes.
    pub fn total(&self, total: u64) -> u64 {
        if self.over_commits { self.limit } else { self.limit.min(total) }
    }

    /// What is free for the share on a device with `free` bytes free.
    pub fn free(&self, free: u64) -> u64 {
        let left = self.limit.saturating_sub(self.used);
        if self.over_commits { left } else { left.min(free) }
    }

    /// What the share uses, never more than it sees in total.
    pub fn used(&self, total: u64) -> u64 {
        self.used.min(self.total(total))
    }
}
