//! Handles of the driver's that the program made, and which device each is of, for those of which the driver does not tell it.
//!
//! A few, in a static of the library whose empty state is zeros, and without a lock: who writes down a handle first takes a
//! place by its device, and only then says whose place it is; who takes a handle out takes it from that place first,
//! and frees the place then. So a handle that is found has its device beside it, and of two who take it out one has it. The driver may
//! give a handle away again before the old one is taken out: then both have a place, and each takes out one.
//!
//! One that finds no room is not known.

use divvy_pages::sync::{AtomicU64, Ordering::*};

/// A place. Zeros are a free one.
#[derive(Debug)]
pub struct Known {
    handle: AtomicU64,
    /// Plus one.
    device: AtomicU64,
}

impl Known {
    pub const fn none() -> Self {
        Self { handle: AtomicU64::new(0), device: AtomicU64::new(0) }
    }
}

/// After the driver has made it.
#[cold]
pub fn remember(places: &[Known], handle: u64, device: i32) {
    let free = |place: &&Known| {
        place.device.compare_exchange(0, u64::from(device as u32) + 1, Acquire, Relaxed).is_ok()
    };
    if let Some(place) = places.iter().find(free) {
        place.handle.store(handle, Release);
    }
}

/// The device of a handle that is known.
#[cfg(test)]
fn device_of(places: &[Known], handle: u64) -> Option<i32> {
    let place = places.iter().find(|place| place.handle.load(Acquire) == handle)?;
    Some(place.device.load(Relaxed).checked_sub(1)? as i32)
}

/// After the driver has ended it; the device that it was of.
#[cold]
pub fn forget(places: &[Known], handle: u64) -> Option<i32> {
    let is_it = |place: &&Known| place.handle.compare_exchange(handle, 0, Acquire, Relaxed).is_ok();
    let place = places.iter().filter(|_| handle != 0).find(is_it)?;
    Some(place.device.swap(0, Release).checked_sub(1)? as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_has_the_device_that_it_was_made_on_until_it_is_forgotten() {
        let places = [const { Known::none() }; 2];
        remember(&places, 7, 0);
        remember(&places, 8, 3);
        remember(&places, 9, 1);
        assert_eq!([7, 8, 9].map(|handle| device_of(&places, handle)), [Some(0), Some(3), None]);
        assert_eq!([forget(&places, 7), forget(&places, 7), forget(&places, 0)], [Some(0), None, None]);
        remember(&places, 9, 1);
        assert_eq!([7, 8, 9].map(|handle| device_of(&places, handle)), [None, Some(3), Some(1)]);
    }
}

#[cfg(all(test, loom))]
mod threads {
    use super::*;
    use divvy_pages::sync::Model;
    use std::sync::Arc;

    /// What two threads do to so many places, of which the first is free if there are several, and one has the handle 7 of device 1; `end` is told what they were answered.
    fn check<A: Send + 'static>(count: usize, acts: [fn(&[Known]) -> A; 2], end: fn(&[Known], [A; 2])) {
        Model::default().check(move || {
            let places: Arc<[Known]> = (0..count).map(|_| Known::none()).collect();
            if count > 1 {
                remember(&places, 6, 0);
            }
            remember(&places, 7, 1);
            forget(&places, 6);
            let other = loom::thread::spawn({
                let places = Arc::clone(&places);
                move || acts[1](&places)
            });
            let answers = [acts[0](&places), other.join().expect("no panic")];
            end(&places, answers);
        });
    }

    #[test]
    fn one_handle_is_forgotten_by_one() {
        check(3, [|places| forget(places, 7), |places| forget(places, 7)], |places, forgotten| {
            assert!(forgotten == [Some(1), None] || forgotten == [None, Some(1)], "{forgotten:?}");
            assert_eq!(device_of(places, 7), None);
        });
    }

    #[test]
    fn two_that_are_made_at_once_are_both_known() {
        check(3, [|places| remember(places, 8, 2), |places| remember(places, 9, 3)], |places, _| {
            assert_eq!([7, 8, 9].map(|handle| device_of(places, handle)), [Some(1), Some(2), Some(3)]);
        });
    }

    #[test]
    fn a_handle_that_is_another_ones_at_once_is_none_of_both_lost() {
        let again = |places: &[Known]| {
            remember(places, 7, 2);
            None
        };
        check(3, [|places| forget(places, 7), again], |places, forgotten| {
            let mut devices = [forgotten[0], forget(places, 7)];
            devices.sort_unstable();
            assert_eq!(devices, [Some(1), Some(2)]);
        });
    }

    #[test]
    fn what_is_found_has_its_own_device_beside_it() {
        let made = |places: &[Known]| {
            forget(places, 7);
            remember(places, 8, 2);
            None
        };
        check(1, [|places| device_of(places, 8), made], |_, found| {
            assert!(found[0].is_none_or(|device| device == 2), "{found:?}");
        });
    }

    #[test]
    fn who_comes_too_late_to_forget_takes_nothing_of_anothers() {
        let ends_and_makes = |places: &[Known]| {
            let device = forget(places, 7);
            remember(places, 8, 2);
            device
        };
        check(1, [|places| forget(places, 7), ends_and_makes], |places, forgotten| {
            assert!(forgotten == [Some(1), None] || forgotten == [None, Some(1)], "{forgotten:?}");
            let is_taken = places[0].device.load(Relaxed) != 0;
            assert_eq!(device_of(places, 8), is_taken.then_some(2));
        });
    }

    #[test]
    fn a_place_is_another_ones_only_when_it_is_free() {
        let made = |places: &[Known]| {
            remember(places, 8, 2);
            None
        };
        check(1, [|places| forget(places, 7), made], |places, forgotten| {
            assert_eq!((forgotten[0], device_of(places, 7)), (Some(1), None));
            let is_taken = places[0].device.load(Relaxed) != 0;
            assert_eq!(device_of(places, 8), is_taken.then_some(2));
        });
    }
}
