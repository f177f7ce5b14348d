//! The entries of the rendered trees.

use std::collections::BTreeMap;

/// Major numbers of the character devices, as in `/proc/devices`.
pub mod major {
    pub const NVIDIA: u32 = 195;
    pub const UVM: u32 = 508;
    pub const CAPS: u32 = 509;
    pub const CAPS_IMEX: u32 = 510;
}

/// A directory, file, symlink or device node of the trees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Dir,
    File(Vec<u8>),
    Link(String),
    /// A character device, or an empty regular file in its place if `real` is false.
    Node {
        major: u32,
        minor: u32,
        mode: u32,
        real: bool,
    },
}

/// Entries by their path relative to the root.
pub(super) type Tree = BTreeMap<String, Entry>;
