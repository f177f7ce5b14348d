//! Shares that may hold more memory than they have on the device.

use super::fixture::{FakeSystem, PagesSpec, TestContainer, allocate, device};
use crate::table::Class;
use crate::{AllocationKind, Device, PoolKind};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const MIB: u64 = 1 << 20;
const OVER: PagesSpec = PagesSpec::Over { soft: 10 * MIB, limit: 30 * MIB };

fn managed(device: Device<'_, FakeSystem>, bytes: u64, pointer: u64) {
    let reserved = device.reserve_managed(bytes).expect("it fits");
    reserved.commit_all(AllocationKind::Substitute { pointer, context: 1 }).expect("it is recorded");
}

#[test]
fn device_memory_has_its_own_quota_within_the_limit() {
    let container = TestContainer::new(&[OVER]);
    let process = container.process(1);
    let device = device(&process);
    assert!(device.overcommits());
    assert!(device.reserve(10 * MIB + 1).is_err());
    assert_eq!(device.mem_info(8 * MIB, 20 * MIB), (30 * MIB, 30 * MIB));
    managed(device, 20 * MIB, 0x1000);
    assert_eq!(container.reported_bytes(), (0, 20 * MIB));
    assert!(device.reserve_managed(10 * MIB + 1).is_err());
    allocate(device, 10 * MIB, 0x2000);
    assert!(device.reserve(1).is_err());
    assert_eq!(device.mem_info(8 * MIB, 20 * MIB), (0, 30 * MIB));
    assert!(process.is_substitute(0x1000) && !process.is_substitute(0x2000));
    process.take(Class::Pointer, 0x1000).expect("it is there").commit();
    process.take(Class::Substitute, 0x1000).expect("it is there").commit();
    assert_eq!((container.used(), container.reported_bytes()), (vec![10 * MIB], (0, 0)));
    assert!(!process.is_substitute(0x1000));
    assert!(device.reserve(1).is_err(), "what was managed left no room for it");
    // A pool cannot grow beyond the physical quota.
    assert!(device.open_pool(PoolKind::Pool(0x5000)).reserve_growth(MIB, 0, 0).is_err());
    process.take(Class::Pointer, 0x2000).expect("it is there").commit();
    assert!(device.open_pool(PoolKind::Pool(0x5000)).reserve_growth(10 * MIB, 0, 0).is_ok());
}

#[test]
fn larger_grant_is_charged_to_its_own_limit() {
    let container = TestContainer::new(&[OVER]);
    let process = container.process(1);
    let device = device(&process);
    let fixed = device.reserve(9 * MIB).expect("it fits");
    assert!(fixed.commit(AllocationKind::Linear { pointer: 0x1000, context: 1 }, 11 * MIB).is_err());
    let moves = device.reserve_managed(9 * MIB).expect("it fits");
    assert!(moves.commit(AllocationKind::Substitute { pointer: 0x1000, context: 1 }, 11 * MIB).is_ok());
    assert_eq!(container.used(), [11 * MIB]);
}

#[test]
fn dead_managed_memory_does_not_extend_the_quota() {
    let container = TestContainer::new(&[OVER]);
    let (one, other) = (container.process(1), container.process(2));
    managed(device(&one), 20 * MIB, 0x1000);
    allocate(device(&other), 10 * MIB, 0x1000);
    container.kill(1);
    assert!(device(&other).reserve(MIB).is_err());
    assert_eq!(container.used(), [10 * MIB]);
}

#[test]
fn destroyed_context_refunds_substituted_memory() {
    let container = TestContainer::new(&[OVER]);
    let process = container.process(1);
    managed(device(&process), 20 * MIB, 0x1000);
    process.begin_teardown(1).expect("it is looked at").commit();
    assert_eq!((container.used(), process.is_substitute(0x1000)), (vec![0], false));
}

/// Threads of several processes allocate both kinds for a moment. The device memory never exceeds
/// the physical quota, and the sum never exceeds the limit.
#[test]
fn no_order_of_charges_exceeds_either_limit() {
    let container = TestContainer::new(&[OVER]);
    let processes = [1, 2, 3].map(|pid| container.process(pid));
    let (fixed, all) = (AtomicU64::new(0), AtomicU64::new(0));
    let holdings = |sum: &AtomicU64, bytes: u64, most: u64| {
        assert!(sum.fetch_add(bytes, SeqCst) + bytes <= most);
    };
    std::thread::scope(|scope| {
        for (process, seed) in processes.iter().zip(1_u64..).flat_map(|one| [one, (one.0, one.1 + 7)]) {
            let (fixed, all) = (&fixed, &all);
            scope.spawn(move || {
                let device = device(process);
                for turn in 0..2_000_u64 {
                    let number = (turn * 31 + seed * 17) % 23;
                    let (bytes, pointer) = ((1 + number % 12) * MIB, (seed << 40) + (turn << 12));
                    let is_managed = number % 2 == 0;
                    let reserved =
                        if is_managed { device.reserve_managed(bytes) } else { device.reserve(bytes) };
                    let Ok(reserved) = reserved else { continue };
                    holdings(all, bytes, 30 * MIB);
                    let kind = if is_managed {
                        AllocationKind::Substitute { pointer, context: 1 }
                    } else {
                        holdings(fixed, bytes, 10 * MIB);
                        AllocationKind::Linear { pointer, context: 1 }
                    };
                    reserved.commit_all(kind).expect("it is recorded");
                    if !is_managed {
                        fixed.fetch_sub(bytes, SeqCst);
                    }
                    all.fetch_sub(bytes, SeqCst);
                    process.take(Class::Pointer, pointer).expect("it is there").commit();
                }
            });
        }
    });
    assert_eq!((container.used(), container.reported_bytes()), (vec![0], (0, 0)));
}
