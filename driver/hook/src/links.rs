//! Creates links to the libraries, and the text files that name library directories for `ldconfig`
//! and for musl's loader.

use crate::args::HookArgs;
use crate::root::{Root, RootError};
use std::path::Path;

const MAX_LIST_BYTES: u64 = 64 << 10;
#[cfg(target_arch = "x86_64")]
const MUSL: &str = "ld-musl-x86_64";
#[cfg(not(target_arch = "x86_64"))]
const MUSL: &str = "ld-musl-aarch64";

/// Creates the links beside the mounted libraries.
pub fn make(root: &Root, args: &HookArgs) -> Result<(), RootError> {
    for link in &args.links {
        root.dir(&link.dir)?.link(&link.name, &link.target)?;
    }
    Ok(())
}

/// Adds the directories for an `ldconfig` that the container may run later.
pub fn configure(root: &Root, args: &HookArgs) -> Result<(), RootError> {
    let lines: String = args.dirs().iter().map(|dir| format!("{}\n", dir.display())).collect();
    root.dir(Path::new("/etc/ld.so.conf.d"))?.replace("00-divvy.conf", lines.as_bytes())
}

/// Adds the directories for musl's loader, if the image has one. It has no cache, only this list,
/// which replaces its built-in one.
pub fn configure_musl(root: &Root, args: &HookArgs) -> Result<(), RootError> {
    if !root.exists(&Path::new("/lib").join(format!("{MUSL}.so.1"))) {
        return Ok(());
    }
    let name = format!("{MUSL}.path");
    let have = root.read(&Path::new("/etc").join(&name), MAX_LIST_BYTES)?;
    let have = have.unwrap_or_else(|| b"/lib\n/usr/local/lib\n/usr/lib\n".to_vec());
    let mut text = String::from_utf8_lossy(&have).into_owned();
    for dir in args.dirs() {
        let dir = dir.to_string_lossy();
        // musl accepts both separators.
        if !text.split(['\n', ':']).any(|line| line == dir) {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&dir);
            text.push('\n');
        }
    }
    root.dir(Path::new("/etc"))?.replace(&name, text.as_bytes())
}
