//! Device addresses: one range, in cells of power-of-two sizes.
//!
//! The cell follows from any address in it, so that lookup, allocation and freeing cost the same at
//! any count.

use divvy_sim::usage::GRANULE_BYTES;

/// Start of the device addresses: above the programs' own addresses, below the kernel's mappings of
/// files.
pub(crate) const BASE: u64 = 1 << 44;
/// Addresses per cell size, as a power of two.
pub(crate) const REGION_BITS: u32 = 41;
/// The smallest cell is a granule.
const SMALLEST_BITS: u32 = GRANULE_BYTES.trailing_zeros();
/// The number of cell sizes.
pub(crate) const REGIONS: usize = 32;
/// End of the device addresses. Reserved addresses follow, see [`crate::physical_store`].
pub(crate) const END: u64 = BASE + ((REGIONS as u64) << REGION_BITS);

/// The region and the cell of an address.
pub(crate) fn cell_of(address: u64) -> Option<(usize, usize)> {
    let offset = address.checked_sub(BASE)?;
    let region = usize::try_from(offset >> REGION_BITS).ok().filter(|region| *region < REGIONS)?;
    let within = offset & ((1 << REGION_BITS) - 1);
    Some((region, (within >> cell_bits(region)) as usize))
}

/// The size of a region's cells, as a power of two.
pub(crate) const fn cell_bits(region: usize) -> u32 {
    SMALLEST_BITS + region as u32
}

/// The region with the smallest sufficient cells.
pub(crate) fn region_for(size: u64) -> Option<usize> {
    let bits = size.checked_next_power_of_two()?.trailing_zeros().max(SMALLEST_BITS);
    let region = (bits - SMALLEST_BITS) as usize;
    (region < REGIONS).then_some(region)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_address_in_a_cell_gives_the_cell(size in 1..=1_u64 << 40, cell in 0..1000_u64, within: u64) {
            let region = region_for(size).expect("a region");
            prop_assert!(size <= 1 << cell_bits(region));
            prop_assert!(region == 0 || size > 1 << (cell_bits(region) - 1));
            let cells = 1 << (REGION_BITS - cell_bits(region));
            let cell = cell % cells;
            let begin = BASE + ((region as u64) << REGION_BITS) + (cell << cell_bits(region));
            let address = begin + within % size;
            prop_assert_eq!(cell_of(address), Some((region, cell as usize)));
        }
    }

    #[test]
    fn addresses_outside_give_no_cell() {
        assert_eq!(cell_of(BASE - 1), None);
        assert_eq!(cell_of(END), None);
        assert_eq!(region_for(u64::MAX), None);
        assert_eq!(region_for((1 << 40) + 1), None);
    }
}
