//! Helpers for texts: error chains in one line, and names that are safe as file names.

use std::error::Error;

/// An error and its causes in one line, separated by `: `, for logs, events and gRPC statuses.
pub fn error_chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

/// Whether an untrusted text may become a file name: 1 to `max_bytes` bytes of ASCII letters,
/// digits, `-`, `_` and `.`, and no leading `.`. So it is neither a path nor a hidden file.
pub fn is_file_name(text: &str, max_bytes: usize) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=max_bytes).contains(&text.len()) && !text.starts_with('.') && text.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_plain_and_short() {
        for good in ["a", "GPU-1a_2.json", "abcd-efgh"] {
            assert!(is_file_name(good, 13), "{good}");
        }
        for bad in ["", ".", "..", ".a", "a/b", "a b", "ä", "a\n", "fourteen-bytes"] {
            assert!(!is_file_name(bad, 13), "{bad}");
        }
    }
}
