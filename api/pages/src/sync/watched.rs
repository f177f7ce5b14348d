//! Atomics whose operations loom decides.
//!
//! A word of a page lies where the file has it, and a table of the library is a mapping of zeros. loom's own atomics are
//! larger than what they stand for and are made by a constructor, so they can be neither. So each of these has the
//! layout of core's, and while a model runs an operation on it is done on one of loom's that is bound to its
//! address. Those are made before any thread is, all of them zero, as loom wants every thread to have seen them made: a
//! bound one holds how far the word is from what it was when it was bound. Memory itself stays as it was before the model, which
//! may begin again with it as often as it likes.
//!
//! Outside a model, and where a model says that nobody writes, they are core's.

use core::ops::Range;
use core::sync::atomic::Ordering::{self, Relaxed};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64 as Loom;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Words that one run of a model may touch, and places that [`alone`] may be asked for.
const WORDS: usize = 160;
const PLACES: usize = 4;
/// How often in one run a thread that could go on has to let the other: with four the largest model takes half a minute in
/// place of seconds. `LOOM_MAX_PREEMPTIONS` is another number.
const PREEMPTIONS: usize = 3;

thread_local! {
    /// loom has a model's threads take turns on one thread of the system's.
    static RUN: RefCell<Option<Run>> = const { RefCell::new(None) };
}

struct Run {
    words: Vec<Rc<Loom>>,
    places: Vec<Rc<UnsafeCell<()>>>,
    constant: Rc<[Range<usize>]>,
    /// By address: which of loom's, and what the word was at first.
    bound: HashMap<usize, (Rc<Loom>, u64)>,
    guarded: HashMap<usize, Rc<UnsafeCell<()>>>,
}

/// What threads do, to be tried in every order.
#[derive(Clone, Debug, Default)]
pub struct Model {
    constant: Vec<Range<usize>>,
}

impl Model {
    /// In which nobody writes this: its words are read without a step.
    #[must_use]
    pub fn constant<T>(mut self, what: &T) -> Self {
        let start = core::ptr::from_ref(what) as usize;
        self.constant.push(start..start + size_of::<T>());
        self
    }

    pub fn check(self, run: impl Fn() + Send + Sync + 'static) {
        let constant = self.constant;
        let mut model = loom::model::Builder::new();
        model.preemption_bound = model.preemption_bound.or(Some(PREEMPTIONS));
        model.max_branches = 10_000;
        model.check(move || {
            let started = Run {
                words: (0..WORDS).map(|_| Rc::new(Loom::new(0))).collect(),
                places: (0..PLACES).map(|_| Rc::new(UnsafeCell::new(()))).collect(),
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

/// The word at an address, if a model runs and somebody may write it; `now` is what it is in memory.
fn bound(address: usize, now: impl FnOnce() -> u64) -> Option<(Rc<Loom>, u64)> {
    RUN.with(|run| {
        let mut run = run.borrow_mut();
        let Run { words, constant, bound, .. } = run.as_mut()?;
        if constant.iter().any(|range| range.contains(&address)) {
            return None;
        }
        let bind = || (words.pop().expect("a model touches no more than WORDS words"), now());
        Some(bound.entry(address).or_insert_with(bind).clone())
    })
}

/// See the function of that name without loom.
pub fn alone<T>(word: &T) {
    let address = core::ptr::from_ref(word) as usize;
    let place = RUN.with(|run| {
        let mut run = run.borrow_mut();
        let Run { places, guarded, .. } = run.as_mut()?;
        let bind = || places.pop().expect("a model has no more than PLACES places");
        Some(Rc::clone(guarded.entry(address).or_insert_with(bind)))
    });
    if let Some(place) = place {
        place.with_mut(|_| ());
    }
}

/// Has another thread go on first: who spins waits for one.
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

            /// As core's is: a load, and exchanges until one succeeds.
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

/// Sums of numbers of 64 bits are one step; of the others nobody in a model makes any.
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
