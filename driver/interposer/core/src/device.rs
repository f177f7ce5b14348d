//! Charges memory of one device, and computes the memory figures that a program sees.
//!
//! Modules, local memory and library workspaces have no call whose cost is known in advance. The
//! node measures the whole process and writes the difference into its slot, where it counts like a
//! charge ([`divvy_pages::account::NodeLine`]). [`AllocationKind`] lists what each event is
//! charged.

use crate::pages::SharePages;
use crate::peers::PeerProcesses;
use crate::process_state::{Device, LocalState, ProcessState};
use crate::system::System;
use crate::table::{Class, Entry};
use core::mem::MaybeUninit;
use divvy_pages::account::Slot;
use divvy_pages::sync::Ordering::Relaxed;
use divvy_pages::{Fault, Flags, MAX_PAGES, Refused, SlotRef, charge, charge_fixed, force_charge, uncharge};

/// An allocation, with the key that its free call names.
///
/// | event | charge |
/// |---|---|
/// | linear, pitched memory | the size that the driver granted; the requested size before the call |
/// | managed memory | its size, on whichever processor its pages are; not physical if overcommitted |
/// | arrays and mipmaps | `cuArrayGetMemoryRequirements` if available, else the computed size |
/// | a context | the policy's figure, until the node has measured the process |
/// | pools, graphs | the bytes that the driver has reserved ([`crate::pools`]) |
/// | handles of physical memory | their size while a reference or mapping exists ([`crate::vmm`]) |
/// | imported and opened memory | nothing: its owner is charged |
/// | pinned host memory | nothing |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationKind {
    /// `cuMemAlloc`, `cuMemAllocPitch`: the pointer, and the context that was current.
    Linear { pointer: u64, context: u64 },
    /// `cuMemAllocManaged`.
    Managed { pointer: u64, context: u64 },
    /// Managed memory that was allocated instead of the device memory that the program requested.
    Substitute { pointer: u64, context: u64 },
    /// `cuArrayCreate`, `cuArray3DCreate`: the `CUarray`.
    Array { handle: u64, context: u64 },
    /// `cuMipmappedArrayCreate`.
    Mipmap { handle: u64, context: u64 },
    /// A context itself, primary or not.
    Context { handle: u64 },
    /// `cuModuleLoad…`, `cuLibraryLoad…`, if the size is known.
    Module { handle: u64, context: u64 },
}

/// The sums of limit and usage over all pages of a device, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// The share's limit, in bytes.
    pub limit: u64,
    /// The usage of all the share's processes, in bytes.
    pub used: u64,
    /// The device's physical memory in bytes, from the policy; 0 if the policy does not state it.
    pub physical: u64,
    /// The share may hold more memory than the device has.
    pub overcommits: bool,
}

/// Bytes charged for a driver call in progress. Dropping it refunds them.
#[derive(Debug)]
#[must_use = "dropping it gives the bytes back"]
pub struct Reservation<'a, S: System> {
    device: Device<'a, S>,
    bytes: u64,
    /// The bytes are managed memory, which can migrate to the host.
    managed: bool,
}

impl<'a, S: System> Device<'a, S> {
    /// The device's index among the container's devices with shares.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Charges `bytes` before the driver allocates them.
    ///
    /// # Errors
    /// [`Refused`] if they exceed the limit. The hook then returns `CUDA_ERROR_OUT_OF_MEMORY` and
    /// leaves the outputs untouched.
    #[inline]
    pub fn reserve(&self, bytes: u64) -> Result<Reservation<'a, S>, Refused> {
        self.charge(bytes)?;
        Ok(Reservation { device: *self, bytes, managed: false })
    }

    /// Charges managed memory. Only the share's limit applies, not its physical quota.
    pub fn reserve_managed(&self, bytes: u64) -> Result<Reservation<'a, S>, Refused> {
        self.charge_managed(bytes)?;
        Ok(Reservation { device: *self, bytes, managed: true })
    }

    /// Returns true if the share may hold managed memory beyond its physical quota.
    pub fn overcommits(&self) -> bool {
        self.pages.physical_quota().is_some() && !self.is_unenforced()
    }

    /// Charges the policy's figure for a context before the context is created.
    pub fn reserve_context(&self) -> Result<Reservation<'a, S>, Refused> {
        self.reserve(self.pages.shares().map(SharePages::context).max().unwrap_or_default())
    }

    /// Returns the current limit and usage.
    #[inline]
    pub fn memory_usage(&self) -> MemoryUsage {
        let mut memory_usage = MemoryUsage { overcommits: self.overcommits(), ..MemoryUsage::default() };
        for share in self.pages.shares() {
            if let Some(slot) = self.slot_ref(share) {
                memory_usage.limit = memory_usage.limit.saturating_add(slot.limit);
                memory_usage.used = memory_usage.used.saturating_add(slot.page.used());
                memory_usage.physical = memory_usage.physical.max(share.physical());
            }
        }
        memory_usage
    }

    /// The free and total bytes for `cuMemGetInfo`, from the driver's values.
    #[inline]
    pub fn mem_info(&self, free: u64, total: u64) -> (u64, u64) {
        let memory_usage = self.memory_usage();
        (memory_usage.free(free), memory_usage.total(total))
    }

    /// Returns true if any page has this flag.
    pub fn has(&self, flag: Flags) -> bool {
        self.pages.shares().any(|share| share.flags().has(flag))
    }

    pub(crate) fn peer_processes(&self) -> PeerProcesses<'a, S> {
        PeerProcesses::new(&self.process.system, self.local.identity())
    }

    /// Returns true if no allocation is refused: the driver enforces the limit itself, or the
    /// policy only observes.
    fn is_unenforced(&self) -> bool {
        let lenient = |share: &SharePages| {
            let flags = share.flags();
            flags.has(Flags::OBSERVE_ONLY) || flags.has(Flags::NATIVE_MEMORY)
        };
        self.pages.shares().all(lenient)
    }

    /// Returns the process's slot on a page, after applying the node's latest policy and
    /// corrections.
    #[inline]
    fn slot_ref<'p>(&self, share: &'p SharePages) -> Option<SlotRef<'p>> {
        let slot = self.pages.slot_ref(share)?;
        share.apply_corrections(&slot, &self.process.system);
        Some(slot)
    }

    /// Calls `run` with the process's slots on all pages, in page order.
    #[inline]
    fn with_slots<R>(&self, run: impl FnOnce(&[SlotRef<'_>]) -> R) -> R {
        let mut pages = self.pages.shares();
        let mut room = [const { MaybeUninit::uninit() }; MAX_PAGES];
        let first = pages.next().and_then(|share| self.slot_ref(share));
        let only;
        run(match (first, self.pages.count.load(Relaxed)) {
            (Some(slot), 1) => {
                only = slot;
                core::slice::from_ref(&only)
            }
            (first, _) => self.collect_slots(first, &mut room),
        })
    }

    /// Collects the slots of a device with several pages.
    #[cold]
    fn collect_slots<'p>(
        &'p self,
        first: Option<SlotRef<'p>>,
        room: &'p mut [MaybeUninit<SlotRef<'p>>; MAX_PAGES],
    ) -> &'p [SlotRef<'p>] {
        let rest = self.pages.shares().skip(1).filter_map(|share| self.slot_ref(share));
        let mut count = 0;
        for (room, slot) in room.iter_mut().zip(first.into_iter().chain(rest)) {
            room.write(slot);
            count += 1;
        }
        // SAFETY: the first `count` elements were initialised above.
        #[allow(unsafe_code)]
        unsafe {
            core::slice::from_raw_parts(room.as_ptr().cast(), count)
        }
    }

    #[inline]
    pub(crate) fn charge(&self, bytes: u64) -> Result<(), Refused> {
        self.with_slots(|slots| {
            if self.is_unenforced() {
                force_charge(slots, bytes);
                return Ok(());
            }
            match (slots, self.pages.physical_quota()) {
                ([slot], Some(soft)) => charge_fixed(slot, soft, bytes, &self.peer_processes()),
                _ => charge(slots, bytes, &self.peer_processes()),
            }
        })
    }

    fn charge_managed(&self, bytes: u64) -> Result<(), Refused> {
        self.with_slots(|slots| {
            if self.is_unenforced() {
                force_charge(slots, bytes);
                return Ok(());
            }
            charge(slots, bytes, &self.peer_processes())
        })
    }

    /// Charges memory that is already allocated, regardless of the limit.
    pub(crate) fn force(&self, bytes: u64) {
        self.with_slots(|slots| force_charge(slots, bytes));
    }

    #[inline]
    pub(crate) fn uncharge(&self, bytes: u64) {
        if bytes > 0 {
            self.with_slots(|slots| uncharge(slots, bytes));
        }
    }

    /// Refunds the charge of an entry.
    #[inline]
    pub(crate) fn uncharge_entry(&self, entry: &Entry) {
        self.report_bytes(entry, -1);
        self.uncharge(entry.bytes());
    }

    /// Reports to the node and to the share's other processes how many bytes are contexts and how
    /// many are managed memory. Both are reported on the first page, because they are per process.
    /// Managed bytes are reported after they are charged and withdrawn before they are refunded
    /// ([`charge_fixed`]).
    #[inline]
    fn report_bytes(&self, entry: &Entry, sign: i64) {
        let bytes = entry.bytes() as i64 * sign;
        let (context, managed) = match entry.class() {
            Some(Class::Context) => (bytes, 0),
            _ if entry.is_managed() => (0, bytes),
            _ => return,
        };
        self.update_slot(|slot| slot.add_memory_use(context, managed));
    }

    /// Updates the process's slot on the first page, which the node reads.
    pub(crate) fn update_slot(&self, tell: impl FnOnce(&Slot)) {
        let Some(slot) = self.pages.shares().next().and_then(SharePages::slot_ref) else { return };
        if let Some(slot) = slot.page.slots().get(usize::from(slot.slot)) {
            tell(slot);
        }
    }

    fn insert(&self, entry: Entry) -> Result<(), Refused> {
        match self.local.table.insert(&self.process.system, entry) {
            Ok(old) => {
                self.report_bytes(&entry, 1);
                // The table still had this address, so its free was missed.
                if let Some(old) = old {
                    self.process.uncharge(self.local, &old);
                }
                Ok(())
            }
            Err(_) => {
                self.process.count_fault(Fault::TableFull);
                Err(Refused)
            }
        }
    }
}

impl<S: System> ProcessState<S> {
    /// Refunds the charge of an entry.
    #[inline]
    pub(crate) fn uncharge(&self, local: &LocalState, entry: &Entry) {
        let index = entry.device();
        if let Some(pages) = local.devices.get(index as usize) {
            Device { process: self, local, pages, index }.uncharge_entry(entry);
        }
    }
}

impl<'a, S: System> Reservation<'a, S> {
    pub fn device(&self) -> Device<'a, S> {
        self.device
    }

    /// Records an allocation of `bytes` after the driver's call has succeeded.
    ///
    /// # Errors
    /// [`Refused`] if `bytes` exceed the limit or the table is full. The charge is refunded. The
    /// caller frees the memory and returns out of memory.
    #[inline]
    pub fn commit(mut self, kind: AllocationKind, bytes: u64) -> Result<(), Refused> {
        self.resize(bytes)?;
        let (class, key, context) = match kind {
            AllocationKind::Linear { pointer, context }
            | AllocationKind::Managed { pointer, context }
            | AllocationKind::Substitute { pointer, context } => (Class::Pointer, pointer, context),
            AllocationKind::Array { handle, context } => (Class::Array, handle, context),
            AllocationKind::Mipmap { handle, context } => (Class::Mipmap, handle, context),
            AllocationKind::Context { handle } => (Class::Context, handle, 0),
            AllocationKind::Module { handle, context } => (Class::Module, handle, context),
        };
        let managed = matches!(kind, AllocationKind::Managed { .. } | AllocationKind::Substitute { .. });
        let number = self.device.local.context_number(context);
        if let AllocationKind::Substitute { .. } = kind {
            self.device.insert(Entry::new(Class::Substitute, key, self.device.index, 0, number))?;
        }
        self.device.insert(Entry::new(class, key, self.device.index, bytes, number).managed(managed))?;
        self.bytes = 0;
        Ok(())
    }

    /// [`Reservation::commit`] for an allocation of exactly the requested size.
    pub fn commit_all(self, kind: AllocationKind) -> Result<(), Refused> {
        let bytes = self.bytes;
        self.commit(kind, bytes)
    }

    /// Records the context that a call returned. A primary context is created once and retained
    /// many times: if the table already has it, the reservation is refunded.
    pub fn commit_context(self, handle: u64) -> Result<(), Refused> {
        let known = self.device.local.table.get(&self.device.process.system, Class::Context, handle);
        if known.is_some() { Ok(()) } else { self.commit_all(AllocationKind::Context { handle }) }
    }

    /// Changes the charge to the size that the driver granted.
    pub(crate) fn resize(&mut self, bytes: u64) -> Result<(), Refused> {
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

    /// Keeps the charge. The caller has recorded it in an entry of its own.
    pub(crate) fn transfer(mut self) {
        self.bytes = 0;
    }
}

impl<S: System> Drop for Reservation<'_, S> {
    fn drop(&mut self) {
        self.device.uncharge(self.bytes);
    }
}

impl MemoryUsage {
    /// The total that the share sees of a device with `total` bytes.
    pub fn total(&self, total: u64) -> u64 {
        if self.overcommits { self.limit } else { self.limit.min(total) }
    }

    /// The free bytes that the share sees of a device with `free` bytes free.
    pub fn free(&self, free: u64) -> u64 {
        let left = self.limit.saturating_sub(self.used);
        if self.overcommits { left } else { left.min(free) }
    }

    /// The share's usage, capped at the total that it sees.
    pub fn used(&self, total: u64) -> u64 {
        self.used.min(self.total(total))
    }
}
