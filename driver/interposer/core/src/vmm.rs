//! Physical memory by handle (`cuMemCreate` and what follows it).
//!
//! The memory lives as long as the program holds a reference to its handle *or* has it mapped:
//! a program may release the handle right after mapping, and many do. So the memory is an
//! object of its own, numbered by us, with one count of references and mappings together; a
//! handle and a mapping each name an object. A handle's number may be used again by the driver
//! as soon as it is released, when the object still lives in its mappings: hence the numbers.
//!
//! A reference that is taken is counted before the driver is asked for it, and one that is dropped after the driver has
//! dropped it: another thread may export, map or retain the same memory at the same moment, and memory that
//! anybody holds is charged. By the time that the driver has dropped a reference, the handle may already be that of
//! other memory, which another thread has made: the numbers tell that too.
//!
//! Imported handles belong to their exporter and are not in the table. The exporter may be this very process, under a
//! handle that tells nothing of where it is from, and what was exported lives as long as a descriptor of it does: so
//! each export is one reference more, which goes only with the process. What the table does
//! not know is let through.

use crate::device::{Device, Reservation};
use crate::ledger::{Ledger, Local};
use crate::system::System;
use crate::table::{Class, Entry, NoRoom, Then};
use divvy_pages::sync::Ordering::Relaxed;
use divvy_pages::{Fault, Full};

impl<S: System> Reservation<'_, S> {
    /// `cuMemCreate` succeeded with this handle. `Err`: as for [`Reservation::keep`].
    pub fn keep_handle(self, handle: u64) -> Result<(), Full> {
        let Device { ledger, local, index, .. } = self.device();
        let object = local.objects.fetch_add(1, Relaxed) + 1;
        let entry = Entry::new(Class::Object, object, index, self.bytes(), 1);
        let kept = local.table.insert(&ledger.system, entry);
        if kept.and_then(|_| ledger.refer(local, handle, index, object)).is_err() {
            local.table.remove(&ledger.system, Class::Object, object);
            ledger.fault(Fault::NoTable);
            return Err(Full);
        }
        self.settled();
        Ok(())
    }
}

/// One reference more to physical memory, counted before the driver is asked for what may hold the memory. Dropped, it stays
/// as long as the process: too much at worst, never too little.
#[derive(Debug)]
pub struct Held<'a, S: System> {
    ledger: &'a Ledger<S>,
    local: &'a Local,
    device: u32,
    object: u64,
}

impl<S: System> Held<'_, S> {
    /// The driver refused: nothing holds it.
    pub fn refused(self) {
        self.ledger.drop_reference(self.local, self.object, 1);
    }

    /// It is that of a mapping of so many bytes at that address.
    pub fn mapped(self, address: u64, length: u64) {
        let Self { ledger, local, device, object } = self;
        let length = Entry::new(Class::Length, address, device, length, 0);
        let mapping = Entry::new(Class::Mapping, address, device, object, 0);
        let known = local.table.insert(&ledger.system, length);
        match known.and_then(|_| local.table.insert(&ledger.system, mapping)) {
            Ok(None) => {}
            Ok(Some(old)) => ledger.drop_reference(local, old.bytes(), 1),
            Err(NoRoom) => ledger.fault(Fault::NoTable),
        }
    }

    /// It is one that the program has by this handle.
    pub fn retained(self, handle: u64) {
        if self.ledger.refer(self.local, handle, self.device, self.object).is_err() {
            self.ledger.fault(Fault::NoTable);
        }
    }
}

/// A reference of the program that the driver is asked to drop. Dropped, it stays: the driver did not.
#[derive(Debug)]
#[must_use = "dropping it keeps the reference"]
pub struct Release<'a, S: System> {
    ledger: &'a Ledger<S>,
    local: &'a Local,
    handle: u64,
    object: u64,
}

impl<S: System> Release<'_, S> {
    /// The driver dropped the reference. If the handle is that of other memory by now, whoever made that has dropped all
    /// references by the handle to this one.
    pub fn released(self) {
        let mut is_it = false;
        self.local.table.change(&self.ledger.system, Class::Handle, self.handle, |entry| {
            is_it = entry.bytes() == self.object;
            if is_it { entry.let_go(1) } else { Then::Keep }
        });
        if is_it {
            self.ledger.drop_reference(self.local, self.object, 1);
        }
    }
}

impl<S: System> Ledger<S> {
    /// Before a call by which something may hold the memory of a handle. `None`: not ours.
    pub fn hold(&self, handle: u64) -> Option<Held<'_, S>> {
        let local = self.local()?;
        self.held(local, local.table.get(&self.system, Class::Handle, handle)?)
    }

    /// Before a call by which something may hold the memory that is mapped at an address. `None`: not ours.
    pub fn hold_at(&self, address: u64) -> Option<Held<'_, S>> {
        let local = self.local()?;
        self.held(local, self.mapping_at(local, address)?)
    }

    /// One reference more to the object that an entry names; `None` where there is none any more.
    fn held<'a>(&'a self, local: &'a Local, entry: Entry) -> Option<Held<'a, S>> {
        let object = entry.bytes();
        let added = local.table.change(&self.system, Class::Object, object, |entry| {
            entry.hold();
            Then::Keep
        });
        added.map(|_| Held { ledger: self, local, device: entry.device(), object })
    }

    /// Before `cuMemRelease`. `None`: not ours, let it through.
    pub fn release(&self, handle: u64) -> Option<Release<'_, S>> {
        let local = self.local()?;
        let object = local.table.get(&self.system, Class::Handle, handle)?.bytes();
        Some(Release { ledger: self, local, handle, object })
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

    /// One reference of the program more by a handle, which may have been that of other memory: its release was not
    /// seen, or is being made.
    fn refer(&self, local: &Local, handle: u64, device: u32, object: u64) -> Result<(), NoRoom> {
        let entry = Entry::new(Class::Handle, handle, device, object, 1);
        let old = local.table.merge(&self.system, Class::Handle, entry, &|known| {
            let same = known.bytes() == object;
            if same {
                known.hold();
            }
            same
        })?;
        if let Some(old) = old {
            self.drop_reference(local, old.bytes(), old.extra());
        }
        Ok(())
    }

    fn drop_reference(&self, local: &Local, object: u64, count: u64) {
        let after = local.table.change(&self.system, Class::Object, object, |entry| entry.let_go(count));
        if let Some(entry) = after.filter(|entry| entry.extra() == 0) {
            self.uncharge(local, &entry);
        }
    }
}
