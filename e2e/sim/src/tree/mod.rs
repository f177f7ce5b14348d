//! `/proc`, `/sys` and `/dev` as the driver and the kernel show them.
//!
//! The trees are a pure function of the state ([`proc`], [`sys`], [`dev`]). A change writes only
//! the difference between two trees. It happens under the state's lock, so that a new instance has
//! its capability files before any process can see it.

mod dev;
mod entry;
mod proc;
mod sys;

pub use entry::major;

use crate::state::{Gpu, State};
use entry::{Entry, Tree};
use rustix::fs::{CWD, FileType, Mode};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// An entry of the trees that cannot be written or removed.
#[derive(Debug, thiserror::Error)]
#[error("cannot render {path}")]
pub struct RenderError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// The changes that lead from the trees of one state to those of the next.
#[derive(Debug, PartialEq, Eq)]
pub struct Edits(Kind);

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// Only instances were created or destroyed.
    Some {
        write: Vec<(String, Entry)>,
        /// In reverse order, so that children come before their parents.
        remove: Vec<(String, Entry)>,
    },
    /// Other things changed: renders all trees.
    All(Tree),
}

/// All trees of a state.
fn tree(state: &State) -> Tree {
    let mut tree = Tree::new();
    proc::node(state, &mut tree);
    sys::node(state, &mut tree);
    dev::node(state, &mut tree);
    for (slot, gpu) in state.listed() {
        if state.modules.nvidia {
            proc::gpu(state, gpu, &mut tree);
        }
        sys::gpu(slot, gpu, state.modules.nvidia, &mut tree);
        instances(state, gpu, &mut tree);
    }
    tree
}

/// The entries that depend on a GPU's instances.
fn instances(state: &State, gpu: &Gpu, tree: &mut Tree) {
    if state.modules.nvidia && !gpu.missing {
        proc::instances(gpu, tree);
        dev::instances(state, gpu, tree);
    }
}

/// The changes between the trees of two states.
pub fn changes(before: &State, after: &State) -> Edits {
    let same_node = before.driver == after.driver
        && before.boot == after.boot
        && before.modules == after.modules
        && before.host == after.host
        && before.gpus.len() == after.gpus.len();
    let pairs = || before.gpus.iter().zip(&after.gpus);
    let same_gpus = pairs().all(|(old, new)| {
        (old.minor, old.missing, old.node, &old.uuid) == (new.minor, new.missing, new.node, &new.uuid)
    });
    if !same_node || !same_gpus {
        return Edits(Kind::All(tree(after)));
    }
    let (mut old_tree, mut new_tree) = (Tree::new(), Tree::new());
    for (old, new) in pairs().filter(|(old, new)| old.instances != new.instances) {
        instances(before, old, &mut old_tree);
        instances(after, new, &mut new_tree);
    }
    difference(&old_tree, &new_tree)
}

/// Whether the module `nvidia` of one state is not that of the next.
pub(crate) fn replaces_module(before: &State, after: &State) -> bool {
    let module = |state: &State| (state.boot, state.module_loads, state.modules.nvidia);
    before.modules.nvidia && module(before) != module(after)
}

/// Moves the module's directory away, so that the next module has a new one. The old one is kept,
/// because file systems use the inode numbers of removed directories again.
pub(crate) fn retire_module(root: &Path, dir: &Path) -> Result<(), RenderError> {
    let (path, old) = (root.join("sys/module/nvidia"), dir.join("old-module"));
    drop(std::fs::remove_dir_all(&old));
    match std::fs::rename(&path, old) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(RenderError { path, source }),
        _ => Ok(()),
    }
}

fn difference(before: &Tree, after: &Tree) -> Edits {
    let write = after.iter().filter(|(path, entry)| before.get(*path) != Some(entry));
    let remove = before.iter().rev().filter(|(path, _)| !after.contains_key(*path));
    let own = |(path, entry): (&String, &Entry)| (path.clone(), entry.clone());
    Edits(Kind::Some { write: write.map(own).collect(), remove: remove.map(own).collect() })
}

/// Renders all trees and removes what does not belong to them.
pub fn render(root: &Path, state: &State) -> Result<(), RenderError> {
    render_tree(root, &tree(state))
}

fn render_tree(root: &Path, tree: &Tree) -> Result<(), RenderError> {
    for (path, entry) in tree {
        write(root, path, entry)?;
    }
    for dir in ["proc", "sys"] {
        sweep(root, dir, tree)?;
    }
    for name in children(&root.join("dev")) {
        if name.starts_with("nvidia") {
            sweep(root, &format!("dev/{name}"), tree)?;
        }
    }
    Ok(())
}

/// Creates a device node of the state if it was removed by hand. Returns whether the state has the
/// node.
pub(crate) fn ensure_node(root: &Path, state: &State, path: &str) -> Result<bool, RenderError> {
    match tree(state).get(path) {
        Some(entry @ Entry::Node { .. }) => write(root, path, entry).map(|()| true),
        _ => Ok(false),
    }
}

impl Edits {
    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        matches!(&self.0, Kind::Some { write, remove } if write.is_empty() && remove.is_empty())
    }

    /// Writes the changes.
    pub fn apply(&self, root: &Path) -> Result<(), RenderError> {
        match &self.0 {
            Kind::All(tree) => render_tree(root, tree),
            Kind::Some { write: new, remove: old } => {
                old.iter().try_for_each(|(path, entry)| remove(root, path, *entry == Entry::Dir))?;
                new.iter().try_for_each(|(path, entry)| write(root, path, entry))
            }
        }
    }
}

fn write(root: &Path, path: &str, entry: &Entry) -> Result<(), RenderError> {
    let full = root.join(path);
    match make(&full, entry) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = full.parent().unwrap_or(root);
            std::fs::create_dir_all(parent).and_then(|()| make(&full, entry))
        }
        other => other,
    }
    .map_err(|source| RenderError { path: full, source })
}

fn make(path: &Path, entry: &Entry) -> io::Result<()> {
    let exists = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    };
    match entry {
        Entry::Dir => std::fs::create_dir(path).or_else(exists),
        Entry::Link(target) => {
            if std::fs::read_link(path).is_ok_and(|old| old == Path::new(target)) {
                return Ok(());
            }
            drop(std::fs::remove_file(path));
            std::os::unix::fs::symlink(target, path)
        }
        Entry::File(bytes) => match std::fs::read(path) {
            Ok(old) if old == *bytes => Ok(()),
            // Replaced atomically, because another process may be reading the file.
            Ok(_) => {
                let new = path.with_extension("new");
                std::fs::write(&new, bytes)?;
                std::fs::rename(&new, path)
            }
            Err(_) => std::fs::write(path, bytes),
        },
        Entry::Node { major, minor, mode, real } => {
            if path.symlink_metadata().is_ok() {
                return Ok(());
            }
            if *real {
                let device = rustix::fs::makedev(*major, *minor);
                rustix::fs::mknodat(
                    CWD,
                    path,
                    FileType::CharacterDevice,
                    Mode::from_raw_mode(*mode),
                    device,
                )?;
            } else {
                std::fs::write(path, [])?;
            }
            // Set explicitly, because the umask restricts the mode of a new file.
            std::fs::set_permissions(path, PermissionsExt::from_mode(*mode))
        }
    }
}

fn remove(root: &Path, path: &str, dir: bool) -> Result<(), RenderError> {
    let full = root.join(path);
    let result = if dir { std::fs::remove_dir_all(&full) } else { std::fs::remove_file(&full) };
    match result {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(RenderError { path: full, source }),
        _ => Ok(()),
    }
}

/// Removes everything below `path` that is not in the tree.
fn sweep(root: &Path, path: &str, tree: &Tree) -> Result<(), RenderError> {
    let below = format!("{path}/");
    let parent = || tree.range(below.clone()..).next().is_some_and(|(next, _)| next.starts_with(&below));
    let is_dir = root.join(path).symlink_metadata().is_ok_and(|meta| meta.is_dir());
    if !tree.contains_key(path) && !parent() {
        return remove(root, path, is_dir);
    }
    if is_dir {
        for name in children(&root.join(path)) {
            sweep(root, &format!("{path}/{name}"), tree)?;
        }
    }
    Ok(())
}

fn children(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}
