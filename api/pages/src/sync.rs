//! The atomics of the pages and of the tables in the injected library.
//!
//! Normally they are those of core. With `--cfg loom` they are instrumented (`watched`): loom runs
//! the threads of a test in every order, up to a bound of preemptions, and returns any value that
//! the memory ordering allows. Loom models sequential consistency as slightly weaker, so it may
//! report false errors but misses none. Unlike `explore`, it does not kill processes. Futexes,
//! shared mappings and fork are left to tests with processes
//! (`driver/interposer/core/tests/kill.rs`, `e2e`).

pub use core::sync::atomic::Ordering;
#[cfg(not(loom))]
pub use core::{
    hint::spin_loop,
    sync::atomic::{AtomicI32, AtomicI64, AtomicPtr, AtomicU16, AtomicU32, AtomicU64},
};
#[cfg(loom)]
pub use watched::{
    AtomicI32, AtomicI64, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Model, assert_exclusive, spin_loop,
};

/// Asserts that no other thread accesses the target of `word` until the next atomic operation of
/// the caller. A loom model fails if another thread accessed it last and nothing orders the two.
#[cfg(not(loom))]
#[inline(always)]
pub fn assert_exclusive<T>(_word: &T) {}

#[cfg(loom)]
mod watched;
