//! An account page, mapped as in the processes of a container.
#![allow(dead_code)]

use divvy_pages::account::{QuantumState, SIZE, SlotReport, Snapshot};
use divvy_pages::{AccountPage, Identity, Peers, SlotRef, charge};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;

pub(crate) struct Page {
    path: PathBuf,
    page: &'static AccountPage,
    limit: u64,
}

/// No process of this namespace is dead.
struct NoPeers;

impl Peers for NoPeers {
    fn is_dead(&self, _identity: &Identity) -> bool {
        false
    }

    fn back_off(&self, _round: u32) -> bool {
        false
    }

    fn now_ns(&self) -> u64 {
        0
    }
}

impl Page {
    pub(crate) fn map(path: &Path, limit: u64) -> Self {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: this is a new mapping of a whole page that is never unmapped.
        let page = unsafe { mmap(std::ptr::null_mut(), SIZE, access, MapFlags::SHARED, &file, 0).unwrap() };
        // SAFETY: see above.
        let page = unsafe { AccountPage::at(page.cast(), SIZE).unwrap() };
        Self { path: path.to_owned(), page, limit }
    }

    /// Registers a process, as the library does.
    pub(crate) fn register(&self, identity: &Identity) -> u16 {
        self.page.register(identity, &NoPeers).unwrap()
    }

    /// Charges bytes to a slot. Returns false if the limit does not allow it.
    pub(crate) fn charge(&self, slot: u16, bytes: u64) -> bool {
        charge(&[SlotRef { page: self.page, slot, limit: self.limit }], bytes, &NoPeers).is_ok()
    }

    /// Applies what the node wrote, as the library does.
    pub(crate) fn reconcile(&self) {
        self.page.reconcile(None, &NoPeers);
    }

    /// Sets the part of the charge that is for contexts, in bytes.
    pub(crate) fn set_context(&self, slot: u16, context: u64) {
        self.page.slots()[usize::from(slot)].add_memory_use(context.cast_signed(), 0);
    }

    /// Charges GPU time and throttled time in nanoseconds, as the library does under quanta.
    pub(crate) fn charge_time(&self, slot: u16, charged: u64, throttled: u64) {
        self.page.charge_interval(1, 1 + charged);
        self.page.slots()[usize::from(slot)].add_gpu_time(charged.cast_signed(), throttled);
    }

    /// Says that a launch waits for a quantum, and rings.
    pub(crate) fn wait_for_quantum(&self, slot: u16) {
        self.page.slots()[usize::from(slot)].set_quantum(QuantumState::Waiting, 0);
        self.page.doorbell().fetch_add(1, SeqCst);
    }

    /// Overwrites a word of the page, as any process of the container can.
    pub(crate) fn forge(&self, offset: u64, word: u64) {
        let file = File::options().write(true).open(&self.path).unwrap();
        file.write_all_at(&word.to_le_bytes(), offset).unwrap();
    }

    pub(crate) fn resize(&self, length: u64) {
        File::options().write(true).open(&self.path).unwrap().set_len(length).unwrap();
    }

    /// Whether the page is valid, has the right length and no balance, and has a total that equals
    /// its slots after its processes have reconciled it.
    pub(crate) fn is_intact(&self) -> bool {
        let bytes = fs::read(&self.path).unwrap();
        let whole = bytes.len() == SIZE && Snapshot::new(&bytes).is_ok_and(|page| page.balance() == 0);
        // The page is mapped, so it must not be touched while the file is too short.
        whole && {
            self.reconcile();
            let bytes = fs::read(&self.path).unwrap();
            Snapshot::new(&bytes).is_ok_and(|page| page.used() == page.live_sum())
        }
    }

    pub(crate) fn report(&self, slot: u16) -> Option<SlotReport> {
        let bytes = fs::read(&self.path).unwrap();
        Snapshot::new(&bytes).unwrap().slots().find(|found| found.index == usize::from(slot))
    }

    /// The host pids that the node wrote for the slots.
    pub(crate) fn host_pids(&self) -> Vec<u32> {
        let bytes = fs::read(&self.path).unwrap();
        Snapshot::new(&bytes).unwrap().slots().map(|slot| slot.node_line.host_pid).collect()
    }

    pub(crate) fn used(&self) -> u64 {
        self.page.used()
    }

    pub(crate) fn attention(&self) -> u64 {
        self.page.attention()
    }
}
