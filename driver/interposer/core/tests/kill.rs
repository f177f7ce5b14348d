//! Processes that charge two pages of one device at full speed and are killed at random. No total
//! ever exceeds its limit, and at the end the whole limit is available and not a byte more.
//!
//! It has its own `main`, because it starts itself as its child processes.

#![allow(unsafe_code, reason = "mapped files, and the calls that the ledger leaves to its library")]

use divvy_interposer_core::liveness::{self, Signal, Stat};
use divvy_interposer_core::table::Class;
use divvy_interposer_core::{
    AccountPage, AllocationKind, DeviceAccess, GpuUuid, Identity, MountedPolicy, PolicyPage, ProcessState,
    System,
};
use divvy_pages::sync::AtomicU32;
use divvy_pages::{Compute, Flags, Memory, Policy, Text, account, policy};
use std::fs::{File, read, read_link};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const LIMITS: [u64; 2] = [6 << 20, 4 << 20];
const ROUNDS: u32 = 100;
const GPU: GpuUuid = GpuUuid([1; 16]);

struct Kernel(PathBuf);

impl System for Kernel {
    fn identity(&self) -> Option<Identity> {
        let stat = Stat::parse(&read("/proc/self/stat").ok()?)?;
        let namespace = read_link("/proc/self/ns/pid").ok()?;
        let namespace = namespace.to_str()?.trim_start_matches("pid:[").trim_end_matches(']').parse().ok()?;
        Some(Identity { pid: stat.pid, namespace, start: stat.start, image: stat.image })
    }

    fn gone(&self, me: &Identity, peer: &Identity) -> bool {
        // SAFETY: signal 0 only tests for the process.
        let sent = unsafe { libc::kill(peer.pid as i32, 0) };
        let missing = sent != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        let signal = if missing { Signal::NoSuchProcess } else { Signal::Exists };
        let stat = read(format!("/proc/{}/stat", peer.pid)).ok().and_then(|text| Stat::parse(&text));
        liveness::gone(me, peer, signal, true, stat)
    }

    fn now(&self) -> u64 {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes the timespec.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    fn sleep(&self, nanoseconds: u64) {
        std::thread::sleep(Duration::from_nanos(nanoseconds));
    }

    fn wait(&self, _word: &AtomicU32, _value: u32, _until: u64) {}

    fn wake(&self, _word: &AtomicU32) {}

    fn print(&self, _line: &[u8]) {}

    fn map(&self, bytes: usize, wiped: bool) -> *mut u8 {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let advice = if wiped { libc::MADV_WIPEONFORK } else { libc::MADV_DONTFORK };
        // SAFETY: new memory, and advice on it.
        unsafe {
            let address = libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0);
            assert_ne!(address, libc::MAP_FAILED);
            assert_eq!(libc::madvise(address, bytes, advice), 0);
            address.cast()
        }
    }

    unsafe fn unmap(&self, address: *mut u8, bytes: usize) {
        // SAFETY: as the caller promises.
        unsafe { libc::munmap(address.cast(), bytes) };
    }

    fn pages(&self, mut each: impl FnMut(MountedPolicy)) {
        for index in 0..LIMITS.len() {
            let policy = mapped(&self.0.join(format!("policy{index}")), policy::SIZE);
            // SAFETY: never unmapped, and of this size.
            each(MountedPolicy::Trusted(
                unsafe { PolicyPage::at(policy, policy::SIZE) }.expect("a policy page"),
            ));
        }
    }

    fn account(&self, policy: &Policy) -> Option<&'static AccountPage> {
        let index = policy.share.as_str().strip_prefix("share")?;
        let account = mapped(&self.0.join(format!("account{index}")), account::SIZE);
        // SAFETY: never unmapped, and of this size.
        unsafe { AccountPage::at(account, account::SIZE) }.ok()
    }
}

fn mapped(path: &Path, bytes: usize) -> *mut u8 {
    let file = File::options().read(true).write(true).open(path).expect("the page is there");
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a file that is never truncated.
    let address =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(address, libc::MAP_FAILED);
    address.cast()
}

fn lay_pages(folder: &Path) {
    for (index, limit) in LIMITS.into_iter().enumerate() {
        let policy = Policy {
            claim: Text::new("claim").expect("fits"),
            share: Text::new(&format!("share{index}")).expect("fits"),
            gpu: GPU,
            mig: None,
            pci: Text::EMPTY,
            memory: Memory { limit, physical: 80 << 20, ..Memory::default() },
            compute: Compute::default(),
            codec: Default::default(),
            flags: Flags::default(),
        };
        std::fs::write(folder.join(format!("policy{index}")), policy.encode()).expect("written");
        let path = folder.join(format!("account{index}"));
        std::fs::write(&path, account::fresh()).expect("written");
        let file = File::options().write(true).open(path).expect("opened");
        file.set_len(account::SIZE as u64).expect("sized");
    }
}

fn random(seed: &mut u64, below: u64) -> u64 {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 33) % below
}

/// Allocates and frees until it is killed, and aborts if a total exceeds its limit.
fn tenant(folder: &str, seed: u64) -> ! {
    let process = ProcessState::new(Kernel(folder.into()));
    let mut pages = Vec::new();
    process.system().pages(|found| {
        if let MountedPolicy::Trusted(page) = found {
            let (_, policy) = page.read().expect("a policy");
            pages.extend(process.system().account(&policy));
        }
    });
    let DeviceAccess::Share(device) = process.device(0, || Some([GPU; 2])) else { std::process::abort() };
    let mut seed = seed;
    let mut held = [false; 8];
    loop {
        let pointer = random(&mut seed, 8);
        let held = &mut held[pointer as usize];
        if *held {
            *held = false;
            let Some(freeing) = process.begin_free(Class::Pointer, pointer) else { std::process::abort() };
            freeing.commit();
        } else if let Ok(reserved) = device.reserve(1 + random(&mut seed, 3 << 20)) {
            *held = true;
            if reserved.commit_all(AllocationKind::Linear { pointer, context: 0 }).is_err() {
                std::process::abort();
            }
        }
        if pages.iter().zip(LIMITS).any(|(page, limit)| page.used() > limit) {
            std::process::abort();
        }
    }
}

/// Killed when dropped, also if the test fails.
struct Tenant(Child);

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let [_, mode, folder, seed] = args.as_slice()
        && mode == "tenant"
    {
        tenant(folder, seed.parse().expect("a number"));
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kill-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    lay_pages(&folder);
    let own = std::env::current_exe().expect("it runs");
    let spawn = |seed: u32| {
        let seed = seed.to_string();
        let child = Command::new(&own).arg("tenant").arg(&folder).arg(seed).spawn().expect("it starts");
        Tenant(child)
    };
    let mut tenants = [1, 2, 3].map(spawn);
    let mut seed = 7;
    for round in 0..ROUNDS {
        std::thread::sleep(Duration::from_micros(random(&mut seed, 4000)));
        let index = random(&mut seed, 3) as usize;
        let ended = tenants[index].0.try_wait().expect("it is ours");
        assert!(ended.is_none(), "round {round}: a process exited by itself: {ended:?}");
        tenants[index].0.kill().expect("it is ours");
        // Every other process stays a zombie for a while.
        let dead = std::mem::replace(&mut tenants[index], spawn(10 + round));
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_micros(random(&mut seed, 500)));
        }
        drop(dead);
    }
    drop(tenants);
    let process = ProcessState::new(Kernel(folder.clone()));
    let DeviceAccess::Share(device) = process.device(0, || Some([GPU; 2])) else { panic!("no share") };
    let start = Instant::now();
    let all = device.reserve(LIMITS.iter().sum()).expect("the dead hold nothing");
    let after = start.elapsed();
    assert!(device.reserve(1).is_err(), "more than the limit");
    drop(all);
    std::fs::remove_dir_all(&folder).expect("it is ours");
    println!("{ROUNDS} kills; the whole limit was there again after {after:?}");
}
