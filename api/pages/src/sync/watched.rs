//! Atomics whose operations loom controls.
//!
//! The words of a page lie where the file has them, and a table is a mapping of zeros. Loom's
//! atomics are larger and need a constructor, so they cannot be there. These types have the layout
//! of core's. During a model, an operation on one is done on a loom atomic that is bound to its
//! address. All loom atomics start as zero before any thread starts, as loom requires, so a bound
//! one holds the difference to the initial word. Memory itself is unchanged, and the model can
//! restart at will. Outside a model, and for constants, these are core's.

use core::ops::Range;
use core::sync::atomic::Ordering::{self, Relaxed};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64 as Loom;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Most words that one run of a model may touch, and most addresses for [`assert_exclusive`].
const MAX_WORDS: usize = 160;
const MAX_PLACES: usize = 4;
/// Most preemptions in one run. With four, the largest model takes half a minute instead of
/// seconds. `LOOM_MAX_PREEMPTIONS` overrides it.
const MAX_PREEMPTIONS: usize = 3;

thread_local! {
    /// Loom runs all threads of a model on one thread of the system.
    static RUN: RefCell<Option<Run>> = const { RefCell::new(None) };
}

struct Run {
    words: Vec<Rc<Loom>>,
    places: Vec<Rc<UnsafeCell<()>>>,
    constant: Rc<[Range<usize>]>,
    /// By address: the loom atomic and the initial word.
    bound: HashMap<usize, (Rc<Loom>, u64)>,
    guarded: HashMap<usize, Rc<UnsafeCell<()>>>,
}

/// A model: threads that loom runs in every order.
#[derive(Clone, Debug, Default)]
pub struct Model {
    constant: Vec<Range<usize>>,
}

impl Model {
    /// Declares a value that no thread writes, so reading it is not a step of the model.
    #[must_use]
    pub fn constant<T>(mut self, what: &T) -> Self {
        let start = core::ptr::from_ref(what) as usize;
        self.constant.push(start..start + size_of::<T>());
        self
    }

    pub fn check(self, run: impl Fn() + Send + Sync + 'static) {
        let constant = self.constant;
        let mut model = loom::model::Builder::new();
        model.preemption_bound = model.preemption_bound.or(Some(MAX_PREEMPTIONS));
        model.max_branches = 10_000;
        model.check(move || {
            let started = Run {
                words: (0..MAX_WORDS).map(|_| Rc::new(Loom::new(0))).collect(),
                places: (0..MAX_PLACES).map(|_| Rc::new(UnsafeCell::new(()))).collect(),
                constant: constant.clone().into(),
                bound: HashMap::new(),
                guarded: HashMap::new(),
            };
            RUN.with(|place| *place.borrow_mut() = Some(started));
            run();
            RUN.with(|place| place.borrow_mut().take());
        });
    }
}

/// The loom atomic of an address, if a model runs and the word is not constant. `now` is the word
/// in memory.
fn bound(address: usize, now: impl FnOnce() -> u64) -> Option<(Rc<Loom>, u64)> {
    RUN.with(|run| {
        let mut run = run.borrow_mut();
        let Run { words, constant, bound, .. } = run.as_mut()?;
        if constant.iter().any(|range| range.contains(&address)) {
            return None;
        }
        let bind = || (words.pop().expect("a model touches no more than MAX_WORDS words"), now());
        Some(bound.entry(address).or_insert_with(bind).clone())
    })
}

/// See the function of that name without loom.
pub fn assert_exclusive<T>(word: &T) {
    let address = core::ptr::from_ref(word) as usize;
    let place = RUN.with(|run| {
        let mut run = run.borrow_mut();
        let Run { places, guarded, .. } = run.as_mut()?;
        let bind = || places.pop().expect("a model has no more than MAX_PLACES places");
        Some(Rc::clone(guarded.entry(address).or_insert_with(bind)))
    });
    if let Some(place) = place {
        place.with_mut(|_| ());
    }
}

/// Lets another thread run first, since the caller waits for it.
pub fn spin_loop() {
    if RUN.with(|run| run.borrow().is_some()) {
        loom::thread::yield_now();
    } else {
        core::hint::spin_loop();
    }
}

macro_rules! atomic {
    ($name:ident $(<$of:ident>)?, $value:ty, $to:expr, $from:expr) => {
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name $(<$of>)? (core::sync::atomic::$name $(<$of>)?);

        impl $(<$of>)? $name $(<$of>)? {
            pub const fn new(value: $value) -> Self {
                Self(core::sync::atomic::$name::new(value))
            }

            fn bound(&self) -> Option<(Rc<Loom>, u64)> {
                let now = || $to(self.0.load(Relaxed));
                bound(core::ptr::from_ref(self) as usize, now)
            }

            pub fn load(&self, order: Ordering) -> $value {
                let Some((word, first)) = self.bound() else { return self.0.load(order) };
                $from(word.load(order).wrapping_add(first))
            }

            pub fn store(&self, value: $value, order: Ordering) {
                let Some((word, first)) = self.bound() else { return self.0.store(value, order) };
                word.store($to(value).wrapping_sub(first), order);
            }

            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                let Some((word, first)) = self.bound() else { return self.0.swap(value, order) };
                $from(word.swap($to(value).wrapping_sub(first), order).wrapping_add(first))
            }

            pub fn compare_exchange(
                &self,
                old: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                let Some((word, first)) = self.bound() else {
                    return self.0.compare_exchange(old, new, success, failure);
                };
                let [old, new] = [old, new].map(|value| $to(value).wrapping_sub(first));
                let was = |was: u64| $from(was.wrapping_add(first));
                word.compare_exchange(old, new, success, failure).map(was).map_err(was)
            }

            pub fn compare_exchange_weak(
                &self,
                old: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(old, new, success, failure)
            }

            /// As core's: a load, then exchanges until one succeeds.
            pub fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                next: impl Fn($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                let mut now = self.load(failure);
                while let Some(new) = next(now) {
                    match self.compare_exchange(now, new, success, failure) {
                        Ok(was) => return Ok(was),
                        Err(other) => now = other,
                    }
                }
                Err(now)
            }
        }
    };
}

/// 64-bit additions are one step. No model uses the others, so they are a loop.
macro_rules! number {
    ($name:ident, $value:ty) => {
        atomic!($name, $value, |value| value as u64, |word: u64| word as $value);

        impl $name {
            pub fn fetch_add(&self, more: $value, order: Ordering) -> $value {
                let Some((word, first)) = self.bound().filter(|_| size_of::<$value>() == 8) else {
                    let sum = |value: $value| Some(value.wrapping_add(more));
                    return self.fetch_update(order, Relaxed, sum).unwrap_or_else(|value| value);
                };
                word.fetch_add(more as u64, order).wrapping_add(first) as $value
            }

            pub fn fetch_sub(&self, less: $value, order: Ordering) -> $value {
                self.fetch_add((0 as $value).wrapping_sub(less), order)
            }
        }
    };
}

number!(AtomicI32, i32);
number!(AtomicI64, i64);
number!(AtomicU16, u16);
number!(AtomicU32, u32);
number!(AtomicU64, u64);
atomic!(AtomicPtr<T>, *mut T, |value: *mut T| value as usize as u64, |word: u64| word as usize as *mut T);
