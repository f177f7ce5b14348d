//! Maps driver handles to devices, for handles of which the driver does not report the device.
//!
//! The map is a small static array whose empty state is zeros, used without a lock. An insert
//! claims a slot by its device field and then publishes the handle. A removal clears the handle and
//! then frees the slot. So a handle that is found always has its own device, and only one of two
//! concurrent removals succeeds. The driver may reuse a handle before its old entry is removed:
//! then both entries exist, and each removal takes one. If the array is full, the handle is not
//! recorded.

use divvy_pages::sync::{AtomicU64, Ordering::*};

/// One slot of the map. Zeros are a free slot.
#[derive(Debug)]
pub struct HandleDevice {
    handle: AtomicU64,
    /// The device's ordinal plus 1; 0 if the slot is free.
    device: AtomicU64,
}

impl HandleDevice {
    pub const fn none() -> Self {
        Self { handle: AtomicU64::new(0), device: AtomicU64::new(0) }
    }
}

/// Records a handle after the driver has created it.
#[cold]
pub fn insert(slots: &[HandleDevice], handle: u64, device: i32) {
    let free = |slot: &&HandleDevice| {
        slot.device.compare_exchange(0, u64::from(device as u32) + 1, Acquire, Relaxed).is_ok()
    };
    if let Some(slot) = slots.iter().find(free) {
        slot.handle.store(handle, Release);
    }
}

/// Returns the device of a recorded handle.
#[cfg(test)]
fn device_of(slots: &[HandleDevice], handle: u64) -> Option<i32> {
    let slot = slots.iter().find(|slot| slot.handle.load(Acquire) == handle)?;
    Some(slot.device.load(Relaxed).checked_sub(1)? as i32)
}

/// Removes a handle after the driver has destroyed it, and returns its device.
#[cold]
pub fn remove(slots: &[HandleDevice], handle: u64) -> Option<i32> {
    let is_it = |slot: &&HandleDevice| slot.handle.compare_exchange(handle, 0, Acquire, Relaxed).is_ok();
    let slot = slots.iter().filter(|_| handle != 0).find(is_it)?;
    Some(slot.device.swap(0, Release).checked_sub(1)? as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_keeps_its_device_until_it_is_removed() {
        let slots = [const { HandleDevice::none() }; 2];
        insert(&slots, 7, 0);
        insert(&slots, 8, 3);
        insert(&slots, 9, 1);
        assert_eq!([7, 8, 9].map(|handle| device_of(&slots, handle)), [Some(0), Some(3), None]);
        assert_eq!([remove(&slots, 7), remove(&slots, 7), remove(&slots, 0)], [Some(0), None, None]);
        insert(&slots, 9, 1);
        assert_eq!([7, 8, 9].map(|handle| device_of(&slots, handle)), [None, Some(3), Some(1)]);
    }
}

#[cfg(all(test, loom))]
mod threads {
    use super::*;
    use divvy_pages::sync::Model;
    use std::sync::Arc;

    /// Runs `acts` in two threads on a map of `count` slots. One slot has handle 7 of device 1; the
    /// others are free. `end` checks the map and the two results.
    fn check<A: Send + 'static>(
        count: usize,
        acts: [fn(&[HandleDevice]) -> A; 2],
        end: fn(&[HandleDevice], [A; 2]),
    ) {
        Model::default().check(move || {
            let slots: Arc<[HandleDevice]> = (0..count).map(|_| HandleDevice::none()).collect();
            if count > 1 {
                insert(&slots, 6, 0);
            }
            insert(&slots, 7, 1);
            remove(&slots, 6);
            let other = loom::thread::spawn({
                let slots = Arc::clone(&slots);
                move || acts[1](&slots)
            });
            let answers = [acts[0](&slots), other.join().expect("no panic")];
            end(&slots, answers);
        });
    }

    #[test]
    fn concurrent_removals_succeed_once() {
        check(3, [|slots| remove(slots, 7), |slots| remove(slots, 7)], |slots, removed| {
            assert!(removed == [Some(1), None] || removed == [None, Some(1)], "{removed:?}");
            assert_eq!(device_of(slots, 7), None);
        });
    }

    #[test]
    fn concurrent_inserts_are_both_kept() {
        check(3, [|slots| insert(slots, 8, 2), |slots| insert(slots, 9, 3)], |slots, _| {
            assert_eq!([7, 8, 9].map(|handle| device_of(slots, handle)), [Some(1), Some(2), Some(3)]);
        });
    }

    #[test]
    fn reused_handle_keeps_both_entries() {
        let again = |slots: &[HandleDevice]| {
            insert(slots, 7, 2);
            None
        };
        check(3, [|slots| remove(slots, 7), again], |slots, removed| {
            let mut devices = [removed[0], remove(slots, 7)];
            devices.sort_unstable();
            assert_eq!(devices, [Some(1), Some(2)]);
        });
    }

    #[test]
    fn found_handle_has_its_own_device() {
        let made = |slots: &[HandleDevice]| {
            remove(slots, 7);
            insert(slots, 8, 2);
            None
        };
        check(1, [|slots| device_of(slots, 8), made], |_, found| {
            assert!(found[0].is_none_or(|device| device == 2), "{found:?}");
        });
    }

    #[test]
    fn late_removal_does_not_remove_another_entry() {
        let ends_and_makes = |slots: &[HandleDevice]| {
            let device = remove(slots, 7);
            insert(slots, 8, 2);
            device
        };
        check(1, [|slots| remove(slots, 7), ends_and_makes], |slots, removed| {
            assert!(removed == [Some(1), None] || removed == [None, Some(1)], "{removed:?}");
            let is_taken = slots[0].device.load(Relaxed) != 0;
            assert_eq!(device_of(slots, 8), is_taken.then_some(2));
        });
    }

    #[test]
    fn slot_is_reused_only_after_removal() {
        let made = |slots: &[HandleDevice]| {
            insert(slots, 8, 2);
            None
        };
        check(1, [|slots| remove(slots, 7), made], |slots, removed| {
            assert_eq!((removed[0], device_of(slots, 7)), (Some(1), None));
            let is_taken = slots[0].device.load(Relaxed) != 0;
            assert_eq!(device_of(slots, 8), is_taken.then_some(2));
        });
    }
}
