//! Byte-level golden files of the pages: lines of `offset: hex`, without lines that are all zero.
//!
//! There is one per page in the current version, and one of the policy page in version 1.1, the
//! last with a shorter record. Pages of 1.2 to 1.4 differ only in the version number, so those
//! of 1.2 and 1.3 have none.

use std::fmt::Write as _;

/// Compares the page with the golden file; with `UPDATE_GOLDEN=1` writes the file.
pub(crate) fn check(path: &str, page: &[u8]) {
    let mut text = String::new();
    for (line, bytes) in page.chunks(16).enumerate().filter(|(_, bytes)| bytes.iter().any(|byte| *byte != 0))
    {
        let hex = bytes.iter().fold(String::new(), |hex, byte| hex + &format!(" {byte:02x}"));
        writeln!(text, "{:04x}:{hex}", line * 16).expect("a string takes it");
    }
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(path, &text).expect("the golden is written");
    }
    assert_eq!(text, std::fs::read_to_string(path).expect("the golden is there"), "{path}");
}

/// The page that a golden file describes.
pub(crate) fn bytes(text: &str) -> Vec<u8> {
    let mut page = vec![0; crate::policy::SIZE];
    for line in text.lines() {
        let (offset, bytes) = line.split_once(':').expect("offset: hex");
        let offset = usize::from_str_radix(offset, 16).expect("an offset");
        for (at, byte) in bytes.split_whitespace().enumerate() {
            page[offset + at] = u8::from_str_radix(byte, 16).expect("hex");
        }
    }
    page
}
