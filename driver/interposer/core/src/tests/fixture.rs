//! Test containers: pages in memory, and processes that have them mounted.

use crate::{
    AccountPage, AllocationKind, Device, DeviceAccess, GpuUuid, Identity, MountedPolicy, PolicyPage,
    ProcessState, System,
};
use divvy_pages::{Compute, Flags, Memory, Policy, SlotState, Text, account, policy, sync};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

pub(super) const GPU: GpuUuid = GpuUuid([1; 16]);
pub(super) const CONTEXT: u64 = 100 << 10;

pub(super) type Process = ProcessState<FakeSystem>;

/// A pair of pages to create.
#[derive(Clone, Copy, Debug)]
pub(super) enum PagesSpec {
    With {
        limit: u64,
        flags: Flags,
    },
    Instance {
        limit: u64,
        mig: GpuUuid,
    },
    /// Overcommitted: the limit for memory that cannot migrate, and the total limit.
    Over {
        soft: u64,
        limit: u64,
    },
    Compute {
        compute: Compute,
        flags: Flags,
    },
    Refused,
}

impl PagesSpec {
    pub(super) fn share(limit: u64) -> Self {
        Self::With { limit, flags: Flags::default() }
    }
}

type Pair = (&'static PolicyPage, &'static AccountPage);

/// The pages of a container (`None`: not trusted), and its dead processes.
#[derive(Clone)]
pub(super) struct TestContainer {
    found: Vec<Option<Pair>>,
    dead: Arc<Mutex<HashSet<u32>>>,
    clock: Arc<AtomicU64>,
}

/// The operating system of one process.
pub(super) struct FakeSystem {
    found: Vec<Option<Pair>>,
    dead: Arc<Mutex<HashSet<u32>>>,
    pid: AtomicU32,
    wiped: Mutex<Option<(usize, usize)>>,
    /// By address.
    mapped: Mutex<HashMap<usize, (AtomicPtr<u8>, usize)>>,
    none_left: AtomicBool,
    /// The lines on standard error.
    printed: Mutex<Vec<String>>,
    /// Number of wakes, and of waits that returned at once.
    wakes: AtomicU32,
    immediate_returns: AtomicU32,
    /// At the next wait, the page's gate is closed until that time.
    closes: Mutex<Option<(&'static PolicyPage, u64)>>,
    /// The account that is read at each wait, and the wait time that it reported last.
    watched: Mutex<Option<(&'static AccountPage, u64)>>,
    /// Shared by the container; it advances only by waiting.
    clock: Arc<AtomicU64>,
}

impl Default for FakeSystem {
    fn default() -> Self {
        TestContainer::new(&[]).system(1)
    }
}

impl FakeSystem {
    /// Does to the memory what fork does in a child with pid `pid`.
    #[allow(unsafe_code)]
    pub(super) fn fork(&self, pid: u32) {
        let (address, bytes) = self.wiped.lock().expect("no panic").expect("it was mapped");
        // SAFETY: mapped below with that size; the test uses nothing of it at this moment.
        unsafe { (address as *mut u8).write_bytes(0, bytes) };
        self.pid.store(pid, SeqCst);
    }

    /// Advances the clock.
    pub(super) fn advance(&self, nanoseconds: u64) {
        self.clock.fetch_add(nanoseconds, SeqCst);
    }

    /// Closes the page's gate until that time at the next wait of any kind.
    pub(super) fn close_at_wait(&self, page: &'static PolicyPage, until: u64) {
        *self.closes.lock().expect("no panic") = Some((page, until));
    }

    /// Reads the account's reported wait time at every wait from now on.
    pub(super) fn watch_waits(&self, page: &'static AccountPage) {
        *self.watched.lock().expect("no panic") = Some((page, 0));
    }

    /// The wait time that the account reported last, in nanoseconds.
    pub(super) fn watched_waits(&self) -> u64 {
        self.watched.lock().expect("no panic").map_or(0, |(_, waited)| waited)
    }

    fn meanwhile(&self) {
        if let Some((page, waited)) = self.watched.lock().expect("no panic").as_mut() {
            *waited = report(page).waited_ns;
        }
        if let Some((page, until)) = self.closes.lock().expect("no panic").take() {
            page.close_gate_until(until);
        }
    }

    /// Number of waits that returned at once because the word had changed.
    pub(super) fn immediate_returns(&self) -> u32 {
        self.immediate_returns.load(SeqCst)
    }

    /// The lines that were printed since the last call.
    pub(super) fn printed(&self) -> Vec<String> {
        std::mem::take(&mut *self.printed.lock().expect("no panic"))
    }

    pub(super) fn wakes(&self) -> u32 {
        self.wakes.load(SeqCst)
    }

    pub(super) fn no_memory(&self, none: bool) {
        self.none_left.store(none, SeqCst);
    }
}

/// Frees its memory.
impl Drop for FakeSystem {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        let mapped = std::mem::take(&mut *self.mapped.lock().expect("no panic"));
        for (address, bytes) in mapped.into_values() {
            let layout = Layout::from_size_align(bytes, 64).expect("a layout");
            // SAFETY: allocated by `map`; all references come from `self`.
            unsafe { dealloc(address.into_inner(), layout) };
        }
    }
}

#[allow(unsafe_code)]
impl System for FakeSystem {
    fn identity(&self) -> Option<Identity> {
        let pid = self.pid.load(SeqCst);
        Some(Identity { pid, namespace: 7, start: u64::from(pid) * 10, image: 1 })
    }

    fn gone(&self, _me: &Identity, peer: &Identity) -> bool {
        self.dead.lock().expect("no panic").contains(&peer.pid)
    }

    fn now(&self) -> u64 {
        self.clock.load(SeqCst)
    }

    fn sleep(&self, nanoseconds: u64) {
        self.meanwhile();
        self.clock.fetch_add(nanoseconds.max(100_000), SeqCst);
        std::thread::yield_now();
        sync::spin_loop();
    }

    fn wait(&self, word: &sync::AtomicU32, value: u32, until: u64) {
        self.meanwhile();
        if word.load(SeqCst) == value {
            self.clock.fetch_max(until, SeqCst);
        } else {
            self.immediate_returns.fetch_add(1, SeqCst);
            self.clock.fetch_add(1000, SeqCst);
        }
    }

    fn print(&self, line: &[u8]) {
        self.printed.lock().expect("no panic").push(String::from_utf8_lossy(line).into_owned());
    }

    fn wake(&self, _word: &sync::AtomicU32) {
        self.wakes.fetch_add(1, SeqCst);
    }

    fn map(&self, bytes: usize, wiped: bool) -> *mut u8 {
        if self.none_left.load(SeqCst) {
            return std::ptr::null_mut();
        }
        let layout = Layout::from_size_align(bytes, 64).expect("a layout");
        // SAFETY: not of size zero.
        let address = unsafe { alloc_zeroed(layout) };
        self.mapped.lock().expect("no panic").insert(address as usize, (AtomicPtr::new(address), bytes));
        if wiped {
            *self.wiped.lock().expect("no panic") = Some((address as usize, bytes));
        }
        address
    }

    unsafe fn unmap(&self, address: *mut u8, bytes: usize) {
        let known = self.mapped.lock().expect("no panic").remove(&(address as usize));
        assert_eq!(known.map(|(_, bytes)| bytes), Some(bytes), "it is mapped");
        // SAFETY: allocated by `map`, as it was recorded, and the caller promises that nothing
        // refers to it.
        unsafe { dealloc(address, Layout::from_size_align(bytes, 64).expect("a layout")) };
    }

    fn pages(&self, each: impl FnMut(MountedPolicy)) {
        let found = |pair: &Option<Pair>| {
            pair.map_or(MountedPolicy::Untrusted, |(policy, _)| MountedPolicy::Trusted(policy))
        };
        self.found.iter().map(found).for_each(each);
    }

    fn account(&self, policy: &Policy) -> Option<&'static AccountPage> {
        let is = |(page, _): &&Pair| page.read().is_ok_and(|(_, read)| read.share == policy.share);
        self.found.iter().flatten().find(is).map(|(_, account)| *account)
    }
}

/// The report of the first slot.
#[allow(unsafe_code)]
fn report(page: &AccountPage) -> account::SlotReport {
    // SAFETY: a page has this size, and no thread writes it during the call.
    let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(page).cast(), account::SIZE) };
    account::Snapshot::new(bytes).expect("a page").slots().next().expect("a slot")
}

impl TestContainer {
    pub(super) fn new(pages: &[PagesSpec]) -> Self {
        let found = pages.iter().zip(b'!'..).map(|(pages, letter)| pair(*pages, letter)).collect();
        Self { found, dead: Arc::default(), clock: Arc::default() }
    }

    /// The same pages, found in the opposite order.
    pub(super) fn reversed(mut self) -> Self {
        self.found.reverse();
        self
    }

    fn system(&self, pid: u32) -> FakeSystem {
        FakeSystem {
            found: self.found.clone(),
            dead: Arc::clone(&self.dead),
            pid: AtomicU32::new(pid),
            wiped: Mutex::default(),
            mapped: Mutex::default(),
            none_left: AtomicBool::new(false),
            wakes: AtomicU32::default(),
            immediate_returns: AtomicU32::default(),
            closes: Mutex::default(),
            watched: Mutex::default(),
            printed: Mutex::default(),
            clock: Arc::clone(&self.clock),
        }
    }

    pub(super) fn process(&self, pid: u32) -> Process {
        ProcessState::new(self.system(pid))
    }

    pub(super) fn kill(&self, pid: u32) {
        self.dead.lock().expect("no panic").insert(pid);
    }

    fn accounts(&self) -> impl Iterator<Item = &'static AccountPage> {
        self.found.iter().flatten().map(|(_, account)| *account)
    }

    pub(super) fn used(&self) -> Vec<u64> {
        self.accounts().map(AccountPage::used).collect()
    }

    /// Pid and bytes of each living process, from the slots of all pages.
    pub(super) fn held_bytes(&self) -> Vec<(u32, u64)> {
        let slots = self.accounts().flat_map(AccountPage::slots);
        let living = slots.filter(|slot| slot.owner().state() == SlotState::Live);
        living.map(|slot| (slot.owner().pid(), slot.effective_bytes())).collect()
    }

    /// Context and managed bytes that the first process reports to the node.
    pub(super) fn reported_bytes(&self) -> (u64, u64) {
        let report = self.report();
        (report.context, report.managed)
    }

    /// The slot of the first process, as the node reads it.
    pub(super) fn report(&self) -> account::SlotReport {
        report(self.accounts().next().expect("a page"))
    }

    /// Writes the host pid of the first process, as the node does.
    #[allow(unsafe_code)]
    pub(super) fn set_host_pid(&self, host_pid: u32) {
        let (_, page) = self.pages();
        let owner = page.slots().first().expect("a slot").owner();
        let line = account::NodeLine { owner, dead: false, correction: 0, host_pid }.encode();
        // SAFETY: within the page, in memory of this test; no other thread uses it at this moment.
        unsafe {
            let file = std::ptr::from_ref(page).cast_mut().cast::<u8>();
            file.add(account::NodeLine::offset(0) as usize)
                .copy_from_nonoverlapping(line.as_ptr(), line.len());
        }
    }

    /// The pages of the first share.
    pub(super) fn pages(&self) -> Pair {
        self.found.first().copied().flatten().expect("a page")
    }

    /// Changes a limit, as the node does.
    pub(super) fn set_limit(&self, index: usize, limit: u64) {
        let (page, _) = self.found[index].expect("a page");
        let (_, mut policy) = page.read().expect("a policy");
        policy.memory.limit = limit;
        page.replace(&policy).expect("it is replaced");
    }
}

#[allow(unsafe_code)]
fn pair(pages: PagesSpec, letter: u8) -> Option<Pair> {
    let none = Compute::default();
    let mut soft = 0;
    let (limit, mig, flags, compute) = match pages {
        PagesSpec::Over { soft: claimed, limit } => {
            soft = claimed;
            (limit, None, Flags::UVM, none)
        }
        PagesSpec::With { limit, flags } => (limit, None, flags, none),
        PagesSpec::Instance { limit, mig } => (limit, Some(mig), Flags::default(), none),
        PagesSpec::Compute { compute, flags } => (1 << 30, None, flags, compute),
        PagesSpec::Refused => return None,
    };
    let text = |letter: u8| Text::new(std::str::from_utf8(&[letter; 8]).expect("ASCII")).expect("fits");
    let memory = Memory { limit, soft, physical: 80 << 20, context: CONTEXT, ..Memory::default() };
    let policy = Policy {
        claim: text(b'z'),
        share: text(letter),
        gpu: GPU,
        mig,
        pci: Text::EMPTY,
        memory,
        compute,
        codec: Default::default(),
        flags,
    };
    let mapped = |size: usize, head: &[u8]| {
        // SAFETY: not of size zero, never freed, longer than its head.
        unsafe {
            let address = alloc_zeroed(Layout::from_size_align(size, 4096).expect("a layout"));
            address.copy_from_nonoverlapping(head.as_ptr(), head.len());
            address
        }
    };
    // SAFETY: never freed, and of these sizes.
    unsafe {
        let page = PolicyPage::at(mapped(policy::SIZE, &policy.encode()), policy::SIZE).expect("a page");
        let account =
            AccountPage::at(mapped(account::SIZE, &account::fresh()), account::SIZE).expect("a page");
        Some((page, account))
    }
}

/// The only device with a share.
pub(super) fn device(process: &Process) -> Device<'_, FakeSystem> {
    match process.device(0, || Some([GPU; 2])) {
        DeviceAccess::Share(device) => device,
        standing => panic!("{standing:?}"),
    }
}

/// Records linear memory at `pointer`, which the driver granted with the requested size.
pub(super) fn allocate(device: Device<'_, FakeSystem>, bytes: u64, pointer: u64) {
    let reserved = device.reserve(bytes).expect("it fits");
    reserved.commit_all(AllocationKind::Linear { pointer, context: 1 }).expect("it is recorded");
}

impl std::fmt::Debug for FakeSystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fake")
    }
}
