//! CRC-32C (Castagnoli, RFC 3720 appendix B.4), bit by bit: a page is checked a few
//! times in the life of a process, and a table would be a kilobyte in every one.

/// The checksum of the bytes.
pub(crate) fn crc32c(bytes: impl IntoIterator<Item = u8>) -> u32 {
    !bytes.into_iter().fold(!0, |sum, byte| {
        (0..8).fold(sum ^ u32::from(byte), |sum, _| (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg()))
    })
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
