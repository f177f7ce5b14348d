//! The index of each function of the library, its name, and how often it was called.
//!
//! `build.rs` writes the indices from `symbols.txt`. Unlike [`crate::symbols`], this module knows
//! no addresses, so every function can refer to its own index.

use std::sync::atomic::{AtomicU64, Ordering};

include!(concat!(env!("OUT_DIR"), "/indices.rs"));

static CALLS: [AtomicU64; COUNT] = [const { AtomicU64::new(0) }; COUNT];

/// Counts a call; two simultaneous calls may count as one.
#[inline]
pub(crate) fn count(at: usize) {
    let calls = &CALLS[at];
    calls.store(calls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// How often the function with that name was called in this process; `None` if there is no such function.
pub(crate) fn calls(name: &str) -> Option<u64> {
    let at = NAMES.iter().position(|known| *known == name)?;
    Some(CALLS[at].load(Ordering::Relaxed))
}
