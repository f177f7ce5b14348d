//! The atomics that the pages, and the tables of the injected library, are made of.
//!
//! They are core's. With `--cfg loom` they are watched ones (`watched`), and the models of threads that race
//! run the same code on them: loom has two threads go on in every order, but for those in which one has to stop more often
//! than a few times, and every load answer whatever older store its ordering allows. What is sequentially consistent
//! it takes for a little less than that, so it may be too strict there and never too lenient. The exploration of the charge
//! (`explore`) has processes killed at every point instead, and knows one order of all operations only, each of which is
//! one step.
//!
//! What loom cannot stand in for, and is left to the tests of processes (`driver/interposer/core/tests/kill.rs`, `e2e`):
//! a futex, which the kernel keeps; a mapping that two processes share, of which a model's threads have one; and a child of fork,
//! in which words are zero again.

pub use core::sync::atomic::Ordering;
#[cfg(not(loom))]
pub use core::{
    hint::spin_loop,
    sync::atomic::{AtomicI32, AtomicI64, AtomicPtr, AtomicU16, AtomicU32, AtomicU64},
};
#[cfg(loom)]
pub use watched::{
    AtomicI32, AtomicI64, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Model, alone, spin_loop,
};

/// Says that the caller has what `word` points to for itself, until it does its next atomic operation: a model
/// fails where another thread had it last and nothing orders the two.
#[cfg(not(loom))]
#[inline(always)]
pub fn alone<T>(_word: &T) {}

#[cfg(loom)]
mod watched;
