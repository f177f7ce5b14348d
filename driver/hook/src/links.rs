//! Links to the libraries, and the text files by which `ldconfig` and musl's
//! loader know directories.

use crate::args::Work;
use crate::root::{Root, RootError};
use std::path::Path;

const LARGEST_TEXT: u64 = 64 << 10;
#[cfg(target_arch = "x86_64")]
const MUSL: &str = "ld-musl-x86_64";
#[cfg(not(target_arch = "x86_64"))]
const MUSL: &str = "ld-musl-aarch64";

/// Makes the links beside the mounted libraries.
pub fn make(root: &Root, work: &Work) -> Result<(), RootError> {
    for link in &work.links {
        root.dir(&link.dir)?.link(&link.name, &link.target)?;
    }
    Ok(())
}

/// Names the directories for an `ldconfig` that the container may run later.
pub fn configure(root: &Root, work: &Work) -> Result<(), RootError> {
    let lines: String = work.dirs().iter().map(|dir| format!("{}\n", dir.display())).collect();
    root.dir(Path::new("/etc/ld.so.conf.d"))?.replace("00-divvy.conf", lines.as_bytes())
}

/// Names the directories for musl's loader, where the image has one. It has no
/// cache, only this list, which replaces its built-in one.
pub fn configure_musl(root: &Root, work: &Work) -> Result<(), RootError> {
    if !root.exists(&Path::new("/lib").join(format!("{MUSL}.so.1"))) {
        return Ok(());
    }
    let name = format!("{MUSL}.path");
    let have = root.read(&Path::new("/etc").join(&name), LARGEST_TEXT)?;
    let have = have.unwrap_or_else(|| b"/lib\n/usr/local/lib\n/usr/lib\n".to_vec());
    let mut text = String::from_utf8_lossy(&have).into_owned();
    for dir in work.dirs() {
        let dir = dir.to_string_lossy();
        // Both separators are musl's own.
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
