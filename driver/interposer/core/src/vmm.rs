//! Physical memory by handle (`cuMemCreate` and the calls that use it).
//!
//! The memory exists while the program has a reference to its handle *or* a mapping. So it is an
//! object with a number of its own and one count of references and mappings; handles and mappings
//! name the object. The driver may reuse a released handle while the old object is still mapped. A
//! reference is counted before the driver's call and dropped after the driver has dropped it,
//! because other threads may export, map or retain the same memory meanwhile. Unknown handles are
//! passed to the driver.

use crate::device::Reservation;
use crate::process_state::{Device, LocalState, ProcessState};
use crate::system::System;
use crate::table::{Class, Entry, EntryAction, TableFull};
use divvy_pages::sync::Ordering::Relaxed;
use divvy_pages::{Fault, Refused};

impl<S: System> Reservation<'_, S> {
    /// Records the handle after `cuMemCreate` has succeeded.
    ///
    /// # Errors
    /// As [`Reservation::commit`].
    pub fn commit_handle(self, handle: u64) -> Result<(), Refused> {
        let Device { process, local, index, .. } = self.device();
        let object = local.last_object.fetch_add(1, Relaxed) + 1;
        let entry = Entry::new(Class::Object, object, index, self.bytes(), 1);
        let kept = local.table.insert(&process.system, entry);
        if kept.and_then(|_| process.add_handle_reference(local, handle, index, object)).is_err() {
            local.table.remove(&process.system, Class::Object, object);
            process.count_fault(Fault::TableFull);
            return Err(Refused);
        }
        self.transfer();
        Ok(())
    }
}

/// A new reference to physical memory, counted before the driver's call. Dropping it keeps the
/// reference until the process exits: the charge may be too high, never too low.
#[derive(Debug)]
pub struct PendingReference<'a, S: System> {
    process: &'a ProcessState<S>,
    local: &'a LocalState,
    device: u32,
    object: u64,
}

impl<S: System> PendingReference<'_, S> {
    /// Drops the reference after the driver has refused the call.
    pub fn cancel(self) {
        self.process.drop_reference(self.local, self.object, 1);
    }

    /// Assigns the reference to a mapping of `length` bytes at `address`.
    pub fn mapped(self, address: u64, length: u64) {
        let Self { process, local, device, object } = self;
        let length = Entry::new(Class::Length, address, device, length, 0);
        let mapping = Entry::new(Class::Mapping, address, device, object, 0);
        let known = local.table.insert(&process.system, length);
        match known.and_then(|_| local.table.insert(&process.system, mapping)) {
            Ok(None) => {}
            Ok(Some(old)) => process.drop_reference(local, old.bytes(), 1),
            Err(TableFull) => process.count_fault(Fault::TableFull),
        }
    }

    /// Assigns the reference to the program's handle.
    pub fn retained(self, handle: u64) {
        if self.process.add_handle_reference(self.local, handle, self.device, self.object).is_err() {
            self.process.count_fault(Fault::TableFull);
        }
    }
}

/// A reference during the driver's release call. Dropping it keeps the reference: the driver
/// refused.
#[derive(Debug)]
#[must_use = "dropping it keeps the reference"]
pub struct PendingRelease<'a, S: System> {
    process: &'a ProcessState<S>,
    local: &'a LocalState,
    handle: u64,
    object: u64,
}

impl<S: System> PendingRelease<'_, S> {
    /// Drops the reference after the driver's call has succeeded. If the handle now names other
    /// memory, the thread that recorded that memory has already dropped this reference.
    pub fn commit(self) {
        let mut is_it = false;
        self.local.table.change(&self.process.system, Class::Handle, self.handle, |entry| {
            is_it = entry.bytes() == self.object;
            if is_it { entry.decrement(1) } else { EntryAction::Keep }
        });
        if is_it {
            self.process.drop_reference(self.local, self.object, 1);
        }
    }
}

impl<S: System> ProcessState<S> {
    /// Adds a reference before a call that may keep the handle's memory. `None` if the handle is
    /// unknown.
    ///
    /// An imported handle belongs to its exporter and is not in the table. The exporter may be this
    /// process, with a handle that does not show its origin. Exported memory lives as long as a
    /// file descriptor of it. So each export is a reference that only ends with the process.
    pub fn add_reference(&self, handle: u64) -> Option<PendingReference<'_, S>> {
        let local = self.local()?;
        self.add_object_reference(local, local.table.get(&self.system, Class::Handle, handle)?)
    }

    /// Adds a reference before a call that may keep the memory mapped at an address. `None` if the
    /// mapping is unknown.
    pub fn add_reference_at(&self, address: u64) -> Option<PendingReference<'_, S>> {
        let local = self.local()?;
        self.add_object_reference(local, self.mapping_at(local, address)?)
    }

    /// Adds a reference to the object that an entry names. `None` if the object no longer exists.
    fn add_object_reference<'a>(
        &'a self,
        local: &'a LocalState,
        entry: Entry,
    ) -> Option<PendingReference<'a, S>> {
        let object = entry.bytes();
        let added = local.table.change(&self.system, Class::Object, object, |entry| {
            entry.increment();
            EntryAction::Keep
        });
        added.map(|_| PendingReference { process: self, local, device: entry.device(), object })
    }

    /// Starts a release before `cuMemRelease`. `None` if the handle is unknown: the driver decides.
    pub fn begin_release(&self, handle: u64) -> Option<PendingRelease<'_, S>> {
        let local = self.local()?;
        let object = local.table.get(&self.system, Class::Handle, handle)?.bytes();
        Some(PendingRelease { process: self, local, handle, object })
    }

    /// Removes mappings after `cuMemUnmap` of a range of whole mappings. The program still reserves
    /// the addresses, so no other thread can map there before this call.
    pub fn remove_mappings(&self, address: u64, length: u64) {
        let Some(local) = self.local() else { return };
        let end = address.saturating_add(length);
        let mut at = address;
        while at < end {
            let Some(entry) = local.table.remove(&self.system, Class::Mapping, at) else {
                return self.sweep_mappings(local, at, end);
            };
            let length = local.table.remove(&self.system, Class::Length, at).map_or(0, |entry| entry.bytes());
            self.drop_reference(local, entry.bytes(), 1);
            at = at.saturating_add(length.max(1));
        }
    }

    /// Removes every mapping in a range that starts with unknown memory, one by one.
    #[cold]
    fn sweep_mappings(&self, local: &LocalState, start: u64, end: u64) {
        let inside = |class, entry: &Entry| entry.class() == Some(class) && (start..end).contains(&entry.key);
        local.table.sweep(&self.system, |entry| inside(Class::Length, entry));
        loop {
            let mut found = None;
            local.table.sweep(&self.system, |entry| {
                let take = found.is_none() && inside(Class::Mapping, entry);
                if take {
                    found = Some(entry.bytes());
                }
                take
            });
            match found {
                Some(object) => self.drop_reference(local, object, 1),
                None => return,
            }
        }
    }

    /// Finds the mapping that contains an address, which is usually its start.
    fn mapping_at(&self, local: &LocalState, address: u64) -> Option<Entry> {
        if let Some(entry) = local.table.get(&self.system, Class::Mapping, address) {
            return Some(entry);
        }
        let mut start = None;
        local.table.sweep(&self.system, |entry| {
            if entry.class() == Some(Class::Length)
                && address.checked_sub(entry.key).is_some_and(|at| at < entry.bytes())
            {
                start = Some(entry.key);
            }
            false
        });
        local.table.get(&self.system, Class::Mapping, start?)
    }

    /// Adds a handle reference. If the handle still names other memory, its release was missed or
    /// is in progress; the old references are dropped.
    fn add_handle_reference(
        &self,
        local: &LocalState,
        handle: u64,
        device: u32,
        object: u64,
    ) -> Result<(), TableFull> {
        let entry = Entry::new(Class::Handle, handle, device, object, 1);
        let old = local.table.merge(&self.system, Class::Handle, entry, &|known| {
            let same = known.bytes() == object;
            if same {
                known.increment();
            }
            same
        })?;
        if let Some(old) = old {
            self.drop_reference(local, old.bytes(), old.extra());
        }
        Ok(())
    }

    fn drop_reference(&self, local: &LocalState, object: u64, count: u64) {
        let after = local.table.change(&self.system, Class::Object, object, |entry| entry.decrement(count));
        if let Some(entry) = after.filter(|entry| entry.extra() == 0) {
            self.uncharge(local, &entry);
        }
    }
}
