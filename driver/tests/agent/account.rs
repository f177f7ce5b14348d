//! An account page as the processes of a container have it: mapped.
#![allow(dead_code)]

use divvy_pages::account::{SIZE, SlotReport, Snapshot};
use divvy_pages::{AccountPage, Identity, Peers, Seat, charge};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub(crate) struct Page {
    path: PathBuf,
    page: &'static AccountPage,
    limit: u64,
}

/// Nobody of this namespace has died.
struct Nobody;

impl Peers for Nobody {
    fn gone(&self, _who: &Identity) -> bool {
        false
    }

    fn pause(&self, _round: u32) -> bool {
        false
    }

    fn now(&self) -> u64 {
        0
    }
}

impl Page {
    pub(crate) fn map(path: &Path, limit: u64) -> Self {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a whole page, never unmapped while the test runs.
        let page = unsafe { mmap(std::ptr::null_mut(), SIZE, access, MapFlags::SHARED, &file, 0).unwrap() };
        // SAFETY: the same.
        let page = unsafe { AccountPage::at(page.cast(), SIZE).unwrap() };
        Self { path: path.to_owned(), page, limit }
    }

    /// Registers a process, as the library in it does.
    pub(crate) fn register(&self, who: &Identity) -> u16 {
        self.page.register(who, &Nobody).unwrap()
    }

    /// Charges so many bytes to a process's slot; false where they do not fit.
    pub(crate) fn charge(&self, slot: u16, bytes: u64) -> bool {
        charge(&[Seat { page: self.page, slot, limit: self.limit }], bytes, &Nobody).is_ok()
    }

    /// What the library does when the node has written something.
    pub(crate) fn tidy(&self) {
        self.page.tidy(None, &Nobody);
    }

    /// Says how much of what is charged is for contexts.
    pub(crate) fn note(&self, slot: u16, context: u64) {
        self.page.slots()[usize::from(slot)].note(context.cast_signed(), 0);
    }

    /// Writes over a word of the page, as any process of the container can.
    pub(crate) fn forge(&self, offset: u64, word: u64) {
        let file = File::options().write(true).open(&self.path).unwrap();
        file.write_all_at(&word.to_le_bytes(), offset).unwrap();
    }

    pub(crate) fn resize(&self, length: u64) {
        File::options().write(true).open(&self.path).unwrap().set_len(length).unwrap();
    }

    /// Whether the page is one, of the right length, with a balance that somebody may have granted
    /// and a total that is what its slots say, once its processes have seen to that.
    pub(crate) fn is_right(&self) -> bool {
        let bytes = fs::read(&self.path).unwrap();
        let whole = bytes.len() == SIZE && Snapshot::new(&bytes).is_ok_and(|page| page.balance() == 0);
        // Not before: it is mapped.
        whole && {
            self.tidy();
            let bytes = fs::read(&self.path).unwrap();
            Snapshot::new(&bytes).is_ok_and(|page| page.used() == page.sum())
        }
    }

    pub(crate) fn report(&self, slot: u16) -> Option<SlotReport> {
        let bytes = fs::read(&self.path).unwrap();
        Snapshot::new(&bytes).unwrap().slots().find(|found| found.index == usize::from(slot))
    }

    /// The processes on the host that the node found for the slots.
    pub(crate) fn lines(&self) -> Vec<u32> {
        let bytes = fs::read(&self.path).unwrap();
        Snapshot::new(&bytes).unwrap().slots().map(|slot| slot.line.host_pid).collect()
    }

    pub(crate) fn used(&self) -> u64 {
        self.page.used()
    }

    pub(crate) fn attention(&self) -> u64 {
        self.page.attention()
    }
}
