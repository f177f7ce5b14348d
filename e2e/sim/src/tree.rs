//! `/proc`, `/sys` and `/dev` as the driver and the kernel show them.

use crate::state::State;
use std::io;
use std::path::{Path, PathBuf};

/// A file of the trees that could not be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot render {path}")]
pub struct RenderError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// Files to write and to remove.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Edits {}

impl Edits {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        true
    }
    /// Does it.
    pub fn apply(&self, _root: &Path) -> Result<(), RenderError> {
        Ok(())
    }
}

/// What differs between the trees of two states.
pub fn changes(_before: &State, _after: &State) -> Edits {
    Edits::default()
}

/// Renders everything.
pub fn render(_root: &Path, _state: &State) -> Result<(), RenderError> {
    Ok(())
}
