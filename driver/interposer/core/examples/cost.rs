//! Measures the cost of the rules per call, without a driver: `cargo run --release -p
//! divvy-interposer-core --example cost`.
//!
//! Prints nanoseconds for charging, recording and freeing an allocation, by the number of live
//! allocations and the order of frees, and for `cuMemGetInfo`. Each value is the 10th percentile of
//! many short rounds, which excludes interruptions by other processes.

use divvy_interposer_core::table::Class;
use divvy_interposer_core::{
    AccountPage, AllocationKind, DeviceAccess, GpuUuid, Identity, MountedPolicy, PolicyPage, ProcessState,
    System,
};
use divvy_pages::sync::AtomicU32;
use divvy_pages::{Compute, Flags, Memory, Policy, Text, account, policy};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::hint::black_box;
use std::time::Instant;

struct Alone(&'static PolicyPage, &'static AccountPage);

#[allow(unsafe_code)]
impl System for Alone {
    fn identity(&self) -> Option<Identity> {
        Some(Identity { pid: 1, namespace: 7, start: 1, image: 1 })
    }

    fn gone(&self, _me: &Identity, _peer: &Identity) -> bool {
        false
    }

    fn now(&self) -> u64 {
        0
    }

    fn sleep(&self, _nanoseconds: u64) {
        std::thread::yield_now();
    }

    fn wait(&self, _word: &AtomicU32, _value: u32, _until: u64) {}

    fn wake(&self, _word: &AtomicU32) {}

    fn print(&self, _line: &[u8]) {}

    fn map(&self, bytes: usize, _wiped: bool) -> *mut u8 {
        // SAFETY: not of size zero.
        Layout::from_size_align(bytes, 64)
            .map_or(std::ptr::null_mut(), |layout| unsafe { alloc_zeroed(layout) })
    }

    unsafe fn unmap(&self, address: *mut u8, bytes: usize) {
        if let Ok(layout) = Layout::from_size_align(bytes, 64) {
            // SAFETY: the caller promises that it comes from `map`.
            unsafe { dealloc(address, layout) };
        }
    }

    fn pages(&self, mut each: impl FnMut(MountedPolicy)) {
        each(MountedPolicy::Trusted(self.0));
    }

    fn account(&self, _policy: &Policy) -> Option<&'static AccountPage> {
        Some(self.1)
    }
}

#[allow(unsafe_code)]
fn pages() -> Option<Alone> {
    let limit = 1 << 40;
    let policy = Policy {
        claim: Text::new("claim")?,
        share: Text::new("share")?,
        gpu: GpuUuid([1; 16]),
        mig: None,
        pci: Text::EMPTY,
        memory: Memory { limit, physical: limit, ..Memory::default() },
        compute: Compute::default(),
        codec: Default::default(),
        flags: Flags::default(),
    };
    let mapped = |size: usize, head: &[u8]| {
        let layout = Layout::from_size_align(size, 4096).ok()?;
        // SAFETY: not of size zero, never freed, longer than its head.
        unsafe {
            let address = alloc_zeroed(layout);
            address.copy_from_nonoverlapping(head.as_ptr(), head.len());
            Some(address)
        }
    };
    // SAFETY: never freed, and of these sizes.
    unsafe {
        let page = PolicyPage::at(mapped(policy::SIZE, &policy.encode())?, policy::SIZE)?;
        Some(Alone(page, AccountPage::at(mapped(account::SIZE, &account::fresh())?, account::SIZE).ok()?))
    }
}

fn quiet(mut round: impl FnMut() -> f64) -> f64 {
    let mut rounds: Vec<f64> = (0..300).map(|_| round()).collect();
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 10]
}

fn main() {
    let Some(alone) = pages() else { return };
    let process = ProcessState::new(alone);
    let DeviceAccess::Share(device) = process.device(0, || Some([GpuUuid([1; 16]); 2])) else { return };
    let alloc = |pointer: u64| {
        let kept = device
            .reserve(2 << 20)
            .and_then(|reserved| reserved.commit_all(AllocationKind::Linear { pointer, context: 1 }));
        black_box(kept).ok();
    };
    let free = |pointer: u64| {
        if let Some(freeing) = process.begin_free(Class::Pointer, pointer) {
            freeing.commit();
        }
    };
    let address = |number: u64| 0x7f00_0000_0000 + number * (2 << 20);
    const TURNS: u64 = 1_000;

    println!("{:>8} {:>6} {:>10}", "live", "order", "alloc+free");
    for live in [0_u64, 1_000, 10_000, 100_000] {
        (0..live).for_each(|number| alloc(address(number)));
        for order in ["lifo", "fifo", "random"] {
            let mut ring: Vec<u64> = (0..live).map(address).collect();
            let (mut oldest, mut seed) = (0, 1_u64);
            let cost = quiet(|| {
                let start = Instant::now();
                for _ in 0..TURNS {
                    if live == 0 || order == "lifo" {
                        let next = address(live);
                        alloc(next);
                        free(next);
                        continue;
                    }
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let at = if order == "fifo" { oldest } else { (seed >> 33) as usize % ring.len() };
                    oldest = (oldest + 1) % ring.len();
                    free(ring[at]);
                    alloc(ring[at]);
                }
                start.elapsed().as_nanos() as f64 / TURNS as f64
            });
            println!("{live:>8} {order:>6} {cost:>10.1}");
            ring.clear();
        }
        (0..live).for_each(|number| free(address(number)));
    }
    let info = quiet(|| {
        let start = Instant::now();
        for _ in 0..TURNS {
            black_box(device.mem_info(black_box(1 << 36), 1 << 40));
        }
        start.elapsed().as_nanos() as f64 / TURNS as f64
    });
    println!("{:>15} {info:>10.1}", "mem_info");
}
