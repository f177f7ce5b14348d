//! The figures of a memory pool: how much it reserves, lends and releases.

use crate::code::{Code, Outcome};

/// Growth of a pool in bytes; near the end of the device's memory it grows by [`PAGE`].
pub(crate) const CHUNK: u64 = 32 << 20;
/// Reserved memory is a multiple of this, in bytes.
pub(crate) const PAGE: u64 = 2 << 20;

/// The figures of a pool, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    /// Release threshold: reserved memory that synchronisations keep.
    pub(crate) threshold: u64,
    /// The maximum to reserve; 0 for no limit.
    pub(crate) most: u64,
}

impl Figures {
    /// The bytes to reserve in addition for an allocation: the preferred amount, and the minimum.
    pub(crate) fn growth(&self, size: u64) -> Outcome<Option<(u64, u64)>> {
        let needed = self.used.checked_add(size).ok_or(Code::OutOfMemory)?;
        let Some(missing) = needed.checked_sub(self.reserved).filter(|missing| *missing > 0) else {
            return Ok(None);
        };
        let least = missing.checked_next_multiple_of(PAGE).ok_or(Code::OutOfMemory)?;
        let liked = missing.checked_next_multiple_of(CHUNK).ok_or(Code::OutOfMemory)?;
        let within = |grown: u64| self.most == 0 || self.reserved.saturating_add(grown) <= self.most;
        match (within(liked), within(least)) {
            (true, _) => Ok(Some((liked, least))),
            (false, true) => Ok(Some((least, least))),
            (false, false) => Err(Code::OutOfMemory),
        }
    }

    pub(crate) fn grow(&mut self, by: u64) {
        self.reserved += by;
        self.reserved_high = self.reserved_high.max(self.reserved);
    }

    pub(crate) fn take(&mut self, size: u64) {
        self.used += size;
        self.used_high = self.used_high.max(self.used);
    }

    pub(crate) fn give(&mut self, size: u64) {
        self.used = self.used.saturating_sub(size);
    }

    /// Releases memory that is neither used nor within `keep`. Returns the bytes.
    pub(crate) fn shrink(&mut self, keep: u64) -> u64 {
        // A program that keeps everything sets the largest number.
        let keep = keep.min(self.reserved);
        let wanted = self.used.max(keep).next_multiple_of(PAGE).min(self.reserved);
        let freed = self.reserved - wanted;
        self.reserved = wanted;
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    enum Operation {
        Take(u64),
        /// The live allocation of that number, modulo their count.
        Give(usize),
        Threshold(u64),
        Settle,
        Trim(u64),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        let size = || 1..256_u64 << 20;
        prop_oneof![
            4 => size().prop_map(Operation::Take),
            3 => any::<usize>().prop_map(Operation::Give),
            1 => prop_oneof![size(), Just(u64::MAX)].prop_map(Operation::Threshold),
            1 => Just(Operation::Settle),
            1 => size().prop_map(Operation::Trim),
        ]
    }

    proptest! {
        #[test]
        fn pool_reserves_what_it_lends_within_its_limit(
            most in prop_oneof![Just(0), 1..2_u64 << 30],
            operations in proptest::collection::vec(operation(), 0..200),
        ) {
            let mut figures = Figures { most, ..Figures::default() };
            let mut live: Vec<u64> = Vec::new();
            for operation in operations {
                let before = figures;
                match operation {
                    Operation::Take(size) => match figures.growth(size) {
                        Ok(growth) => {
                            if let Some((liked, least)) = growth {
                                let missing = before.used + size - before.reserved;
                                prop_assert!(least <= liked && least < missing + PAGE);
                                figures.grow(liked);
                            }
                            figures.take(size);
                            live.push(size);
                        }
                        Err(code) => {
                            prop_assert_eq!(code, Code::OutOfMemory);
                            prop_assert!((before.used + size).next_multiple_of(PAGE) > most);
                        }
                    },
                    Operation::Give(which) if !live.is_empty() => {
                        let size = live.swap_remove(which % live.len());
                        figures.give(size);
                        prop_assert_eq!(figures.reserved, before.reserved, "kept until a synchronisation");
                    }
                    Operation::Give(_) => {}
                    Operation::Threshold(threshold) => figures.threshold = threshold,
                    Operation::Settle | Operation::Trim(_) => {
                        let keep = match operation {
                            Operation::Trim(keep) => keep,
                            _ => figures.threshold,
                        };
                        let freed = figures.shrink(keep);
                        prop_assert_eq!(figures.reserved + freed, before.reserved);
                        let kept = figures.used.max(keep);
                        prop_assert!(freed == 0 || figures.reserved < kept.saturating_add(PAGE));
                        prop_assert!(figures.reserved >= keep.min(before.reserved));
                    }
                }
                prop_assert_eq!(figures.used, live.iter().sum::<u64>());
                prop_assert!(figures.used <= figures.reserved);
                prop_assert!(most == 0 || figures.reserved <= most);
                prop_assert!(figures.reserved_high >= figures.reserved && figures.used_high >= figures.used);
            }
        }
    }
}
