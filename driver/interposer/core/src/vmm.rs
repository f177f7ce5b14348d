//! Physical memory by handle (`cuMemCreate` and what follows it).
//!
//! The memory lives as long as the program holds a reference to its handle *or* has it mapped:
//! a program may release the handle right after mapping, and many do. So the memory is an
//! object of its own, numbered by us, with one count of references and mappings together; a
//! handle and a mapping each name an object. A handle's number may be used again by the driver
//! as soon as it is released, when the object still lives in its mappings: hence the numbers.
//!
//! Imported handles belong to their exporter and are not in the table. The exporter may be this very process, under a
//! handle that tells nothing of where it is from, and what was exported lives as long as a descriptor of it does: so
//! each export is one reference more, which goes only with the process. What the table does
//! not know is let through.

use crate::device::{Device, Reservation};
use crate::ledger::{Ledger, Local};
use crate::system::System;
use crate::table::{Class, Entry, Then};
use divvy_pages::sync::Ordering::Relaxed;
use divvy_pages::{Fault, Full};

impl<S: System> Reservation<'_, S> {
    /// `cuMemCreate` succeeded with this handle. `Err`: as for [`Reservation::keep`].
    pub fn keep_handle(self, handle: u64) -> Result<(), Full> {
        let Device { ledger, local, index, .. } = self.device();
        let object = local.objects.fetch_add(1, Relaxed) + 1;
        let entries = [
            Entry::new(Class::Object, object, index, self.bytes(), 1),
            Entry::new(Class::Handle, handle, index, object, 1),
        ];
        for entry in entries {
            match local.table.insert(&ledger.system, entry) {
                Ok(None) => {}
                // A handle that we believed in use: its release was not seen.
                Ok(Some(old)) => ledger.drop_reference(local, old.bytes(), old.extra()),
                Err(_) => {
                    local.table.remove(&ledger.system, Class::Object, object);
                    ledger.fault(Fault::NoTable);
                    return Err(Full);
                }
            }
        }
        self.settled();
        Ok(())
    }
}

/// A reference that is out of the table while the driver drops it. Dropped, it is back.
#[derive(Debug)]
#[must_use = "dropping it keeps the reference"]
pub struct Release<'a, S: System> {
    ledger: &'a Ledger<S>,
    local: &'a Local,
    handle: u64,
    object: u64,
    done: bool,
}

impl<S: System> Release<'_, S> {
    /// The driver dropped the reference.
    pub fn released(mut self) {
        self.done = true;
        self.ledger.drop_reference(self.local, self.object, 1);
    }
}

impl<S: System> Drop for Release<'_, S> {
    fn drop(&mut self) {
        if !self.done {
            self.ledger.hold(self.local, self.handle, self.object);
        }
    }
}

/// An export that the driver is asked for. Dropped, its reference stays: too much at worst, never too little.
#[derive(Debug)]
pub struct Export<'a, S: System> {
    ledger: &'a Ledger<S>,
    local: &'a Local,
    object: u64,
}

impl<S: System> Export<'_, S> {
    /// The driver made none.
    pub fn refused(self) {
        self.ledger.drop_reference(self.local, self.object, 1);
    }
}

impl<S: System> Ledger<S> {
    /// Before `cuMemExportToShareableHandle`: one reference more to the memory, for good. `None`: not ours.
    pub fn export(&self, handle: u64) -> Option<Export<'_, S>> {
        let local = self.local()?;
        let object = local.table.get(&self.system, Class::Handle, handle)?.bytes();
        self.add_reference(local, object).then_some(Export { ledger: self, local, object })
    }

    /// Before `cuMemRelease`. `None`: not ours, let it through.
    pub fn release(&self, handle: u64) -> Option<Release<'_, S>> {
        let local = self.local()?;
        let before = local.table.change(&self.system, Class::Handle, handle, |entry| entry.let_go(1))?;
        Some(Release { ledger: self, local, handle, object: before.bytes(), done: false })
    }

    /// After `cuMemRetainAllocationHandle` answered with `handle` for `address`.
    pub fn retained(&self, handle: u64, address: u64) {
        let Some(local) = self.local() else { return };
        let known = local.table.get(&self.system, Class::Handle, handle);
        let object = known.or_else(|| self.mapping_at(local, address)).map(|entry| entry.bytes());
        if let Some(object) = object
            && self.add_reference(local, object)
        {
            self.hold(local, handle, object);
        }
    }

    /// After `cuMemMap` mapped `length` bytes of `handle` at `address`.
    pub fn mapped(&self, address: u64, length: u64, handle: u64) {
        let Some(local) = self.local() else { return };
        let Some(entry) = local.table.get(&self.system, Class::Handle, handle) else { return };
        let object = entry.bytes();
        if !self.add_reference(local, object) {
            return;
        }
        let length = Entry::new(Class::Length, address, entry.device(), length, 0);
        let mapping = Entry::new(Class::Mapping, address, entry.device(), object, 0);
        let known = local.table.insert(&self.system, length);
        match known.and_then(|_| local.table.insert(&self.system, mapping)) {
            Ok(None) => {}
            Ok(Some(old)) => self.drop_reference(local, old.bytes(), 1),
            // The reference stays: charged until the process ends, never too little.
            Err(_) => self.fault(Fault::NoTable),
        }
    }

    /// After `cuMemUnmap` of a range, which holds whole mappings. (The addresses stay reserved
    /// by the program, so no other thread maps there before this.)
    pub fn unmapped(&self, address: u64, length: u64) {
        let Some(local) = self.local() else { return };
        let end = address.saturating_add(length);
        let mut at = address;
        while at < end {
            let Some(entry) = local.table.remove(&self.system, Class::Mapping, at) else {
                return self.unmapped_all(local, at, end);
            };
            let length = local.table.remove(&self.system, Class::Length, at).map_or(0, |entry| entry.bytes());
            self.drop_reference(local, entry.bytes(), 1);
            at = at.saturating_add(length.max(1));
        }
    }

    /// A range that begins with memory that is not ours: every mapping in it, one by one.
    #[cold]
    fn unmapped_all(&self, local: &Local, start: u64, end: u64) {
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

    /// The mapping that an address lies in: at its start, as a rule.
    fn mapping_at(&self, local: &Local, address: u64) -> Option<Entry> {
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

    /// One reference of the program more: on the handle if it is there, else it is made.
    fn hold(&self, local: &Local, handle: u64, object: u64) {
        let held = local.table.change(&self.system, Class::Handle, handle, |entry| {
            entry.hold();
            Then::Keep
        });
        if held.is_none() {
            let device =
                local.table.get(&self.system, Class::Object, object).map_or(0, |entry| entry.device());
            let entry = Entry::new(Class::Handle, handle, device, object, 1);
            if local.table.insert(&self.system, entry).is_err() {
                self.fault(Fault::NoTable);
            }
        }
    }

    /// False where there is no such object.
    fn add_reference(&self, local: &Local, object: u64) -> bool {
        let added = local.table.change(&self.system, Class::Object, object, |entry| {
            entry.hold();
            Then::Keep
        });
        added.is_some()
    }

    pub(crate) fn drop_reference(&self, local: &Local, object: u64, count: u64) {
        let after = local.table.change(&self.system, Class::Object, object, |entry| entry.let_go(count));
        if let Some(entry) = after.filter(|entry| entry.extra() == 0) {
            self.uncharge(local, &entry);
        }
    }
}
