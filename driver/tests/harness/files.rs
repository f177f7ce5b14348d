//! What lies in the directories of a node.

use std::collections::BTreeSet;
use std::path::Path;

/// Tells of a directory that has other entries than these.
pub(crate) fn expect(dir: &Path, wanted: &BTreeSet<String>, found: &mut Vec<String>) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let there: BTreeSet<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    if there != *wanted {
        found.push(format!("{} has {there:?} instead of {wanted:?}", dir.display()));
    }
}

/// A file's text, or why there is none.
pub(crate) fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| format!("({error})"))
}
