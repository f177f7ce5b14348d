//! Byte-level goldens of the pages: lines of `offset: hex`, without the lines that are zero.

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
