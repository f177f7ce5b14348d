//! Placements of GPU instances on the memory slices of a GPU. The number of slices is what the GPU
//! reports: 4 on an A30, 8 on most, 12 on an RTX PRO 6000. No width or power of two is assumed.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A range of memory slices: `start..start + size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Placement {
    pub start: u32,
    pub size: u32,
}

impl Placement {
    /// The covered slices.
    pub fn slices(self) -> std::ops::Range<u32> {
        self.start..self.start.saturating_add(self.size)
    }

    /// Whether both cover a common slice.
    pub fn overlaps(self, other: Self) -> bool {
        self.slices().start < other.slices().end && other.slices().start < self.slices().end
    }
}

/// The candidates that overlap no taken placement, in their order.
pub fn free<'a>(candidates: &'a [Placement], taken: &'a [Placement]) -> impl Iterator<Item = Placement> + 'a {
    let is_free = |candidate: &Placement| !taken.iter().any(|other| other.overlaps(*candidate));
    candidates.iter().copied().filter(is_free)
}

impl fmt::Display for Placement {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.start, self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn placement() -> impl Strategy<Value = Placement> {
        (0u32..24, 0u32..13).prop_map(|(start, size)| Placement { start, size })
    }

    proptest! {
        #[test]
        fn overlap_means_a_common_slice(a in placement(), b in placement()) {
            let common = a.slices().any(|slice| b.slices().contains(&slice));
            let empty = a.size == 0 || b.size == 0;
            prop_assert_eq!(a.overlaps(b) && !empty, common);
            prop_assert_eq!(a.overlaps(b), b.overlaps(a));
        }

        #[test]
        fn free_placements_overlap_no_taken_one(
            candidates in prop::collection::vec(placement(), 0..12),
            taken in prop::collection::vec(placement(), 0..6),
        ) {
            let found: Vec<_> = free(&candidates, &taken).collect();
            for candidate in &candidates {
                let touches = taken.iter().any(|other| other.overlaps(*candidate));
                prop_assert_eq!(found.contains(candidate), !touches);
            }
        }

        #[test]
        fn no_placement_overflows(start in any::<u32>(), size in any::<u32>(), other in placement()) {
            let placement = Placement { start, size };
            prop_assert!(placement.slices().start <= placement.slices().end);
            let _ = placement.overlaps(other);
        }
    }
}
