//! Placements of GPU instances on a GPU's grid of memory slices.
//!
//! The grid is whatever the GPU says: 4 units on an A30, 8 on most, 12 on an
//! RTX PRO 6000. Nothing here assumes a width or a power of two.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A run of memory slices: `start..start + size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Placement {
    pub start: u32,
    pub size: u32,
}

impl Placement {
    /// The slices it covers.
    pub fn slices(self) -> std::ops::Range<u32> {
        self.start..self.start.saturating_add(self.size)
    }

    /// Whether the two share a slice.
    pub fn overlaps(self, other: Self) -> bool {
        self.slices().start < other.slices().end && other.slices().start < self.slices().end
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.start, self.size)
    }
}
