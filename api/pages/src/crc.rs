//! CRC-32C (Castagnoli, RFC 3720 appendix B.4), by half bytes: a table of bytes would be a kilobyte in
//! every process, and bit by bit a page is a good part of what a process's start costs.

/// What four bits do to a sum.
const NIBBLES: [u32; 16] = {
    let mut table = [0; 16];
    let mut at = 0;
    while at < 16 {
        let mut sum = at as u32;
        let mut bit = 0;
        while bit < 4 {
            sum = (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg());
            bit += 1;
        }
        table[at] = sum;
        at += 1;
    }
    table
};

/// The checksum of the bytes.
pub(crate) fn crc32c(bytes: impl IntoIterator<Item = u8>) -> u32 {
    let half = |sum: u32| (sum >> 4) ^ NIBBLES[(sum & 15) as usize];
    !bytes.into_iter().fold(!0, |sum, byte| half(half(sum ^ u32::from(byte))))
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn agrees_with_the_rfc() {
        // RFC 3720, B.4: 32 bytes of zeros, of ones, and rising; and the usual check value.
        assert_eq!(crc32c([0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c([0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(0..32), 0x46dd_794e);
        assert_eq!(crc32c(*b"123456789"), 0xe306_9283);
    }
}
