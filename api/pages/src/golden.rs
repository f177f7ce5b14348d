//! Byte-level goldens of the pages: lines of `offset: hex`, without the lines that are zero.
//!
//! There is one of each page as this version writes it, and of the policy page of 1.1, which is the last with a shorter
//! record. 1.2 has none: its pages have the bytes of those of 1.3, but for the number itself. What 1.3 added are two words
//! of a slot, zero until a process of the share writes them, and no page that is kept from before has to be told apart by
//! them. (Nor was any version before this one released.)

use std::fmt::Write as _;

/// Compares the page with the committed text; with `UPDATE_GOLDEN=1` writes it.
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

/// The page of which a text tells.
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
