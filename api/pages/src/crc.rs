//! CRC-32C (Castagnoli, RFC 3720 appendix B.4), four bytes at a time by table lookups of half
//! bytes.
//!
//! The eight lookups of a word are independent, unlike those of a bytewise loop. The checksum is a
//! large part of the start-up time of a process. Tables of whole bytes would cost four kilobytes
//! per process, and detecting the CPU instruction costs more in a virtual machine than it saves.

/// The effect of four bits on a checksum, by the number of half bytes that follow them.
const HALF_BYTE_TABLES: [[u32; 16]; 8] = {
    let mut tables = [[0; 16]; 8];
    let mut at = 0;
    while at < 16 {
        let mut sum = at as u32;
        let mut behind = 0;
        while behind < 8 {
            let mut bit = 0;
            while bit < 4 {
                sum = (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg());
                bit += 1;
            }
            tables[behind][at] = sum;
            behind += 1;
        }
        at += 1;
    }
    tables
};

/// The checksum of the concatenated parts.
pub(crate) fn crc32c(parts: &[&[u8]]) -> u32 {
    !parts.iter().fold(!0, |sum, part| {
        let (words, rest) = part.as_chunks();
        let sum = words.iter().fold(sum, |sum, word| advance(sum ^ u32::from_le_bytes(*word), 8));
        rest.iter().fold(sum, |sum, byte| advance(sum ^ u32::from(*byte), 2))
    })
}

/// A checksum advanced by `count` half bytes.
#[inline]
fn advance(sum: u32, count: usize) -> u32 {
    let tables = HALF_BYTE_TABLES.iter().take(count).rev().enumerate();
    let done = tables.fold(0, |done, (at, table)| done ^ table[(sum >> (4 * at) & 15) as usize]);
    done ^ sum.checked_shr(4 * count as u32).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn checksums_match_the_rfc() {
        // RFC 3720, B.4: 32 bytes of zeros, of ones, and ascending; and the usual check value.
        assert_eq!(crc32c(&[&[0; 32]]), 0x8a91_36aa);
        assert_eq!(crc32c(&[&[0xff; 32]]), 0x62a8_ab43);
        let rising: [u8; 32] = core::array::from_fn(|at| at as u8);
        assert_eq!(crc32c(&[&rising]), 0x46dd_794e);
        assert_eq!(crc32c(&[b"123456789"]), 0xe306_9283);
    }

    #[test]
    fn parts_are_concatenated() {
        let text: [u8; 23] = core::array::from_fn(|at| (at * 41) as u8);
        for cut in 0..=text.len() {
            let (head, tail) = text.split_at(cut);
            assert_eq!(crc32c(&[head, tail]), crc32c(&[&text]), "{cut}");
        }
    }
}
