//! Builds the attacking programs with the machine's C compiler, because applications are C programs
//! too, and installs them where containers see them.

use crate::node::Node;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The directory of the C sources.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs");
/// The version script with the functions that the driver exports.
const EXPORTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../driver/interposer/exports/cuda.map");
/// The file name of the driver library with symbol versions.
const VERSIONED: &str = "versioned.so";
/// The sources of `escape`; the other C files are separate programs.
const ESCAPE: &[&str] = &["main.c", "loader.c", "pages.c", "memory.c", "spaces.c", "time.c"];

/// The programs, compiled once and copied to each node.
#[derive(Clone, Debug)]
pub struct Programs {
    directory: PathBuf,
}

impl Programs {
    /// Compiles the programs into a directory. `archive` is the simulated driver as a static
    /// library, `raw` the executable of this crate.
    pub fn build(directory: &Path, archive: Option<&Path>, raw: &Path) -> Result<Self> {
        std::fs::create_dir_all(directory)?;
        compile(ESCAPE, &directory.join("escape"), &["-ldl"])?;
        // Linked to an empty stub of the driver library; the loader resolves the functions at run
        // time.
        let stub = directory.join("libcuda.so.1");
        compile(&[], &stub, &["-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null"])?;
        let link =
            ["-shared", "-fPIC", "-Wl,--no-as-needed", stub.to_str().context("the path is not UTF-8")?];
        compile(&["user.c"], &directory.join("libuser.so"), &link)?;
        std::fs::remove_file(&stub)?;
        if let Some(archive) = archive {
            let archive = archive.to_str().context("the archive's path is not UTF-8")?;
            compile(
                &["static.c"],
                &directory.join("static"),
                &["-static", archive, "-lpthread", "-ldl", "-lm"],
            )?;
            let whole =
                ["-shared", "-Wl,--whole-archive", archive, "-Wl,--no-whole-archive", "-Wl,--version-script"];
            let names = ["-Wl,-soname,libcuda.so.1", "-Wl,--default-symver,-Bsymbolic"];
            let needed = ["-lpthread", "-ldl", "-lm", "-lgcc_s"];
            compile(&[], &directory.join(VERSIONED), &[&whole[..], &[EXPORTS], &names, &needed].concat())?;
        }
        std::fs::copy(raw, directory.join("raw"))
            .with_context(|| format!("cannot copy {}", raw.display()))?;
        Ok(Self { directory: directory.to_owned() })
    }

    /// Replaces the node's driver by one with symbol versions.
    pub fn install_versioned_driver(&self, node: &Node) -> Result<()> {
        let versioned = self.directory.join(VERSIONED);
        std::fs::copy(versioned, node.libcuda())
            .context("cannot copy the driver with symbol versions (is --archive missing?)")?;
        Ok(())
    }

    /// Copies the programs to a node, and a copy of its driver under another name and SONAME.
    pub fn install(&self, node: &Node) -> Result<()> {
        for entry in std::fs::read_dir(&self.directory)? {
            let entry = entry?;
            if entry.file_name() == VERSIONED {
                continue;
            }
            // The driver finds its GPUs by the path of its own file. In a static program, that file
            // is the program.
            let to = if entry.file_name() == "static" { node.libraries() } else { node.programs() };
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
        let driver = std::fs::read(node.libcuda())?;
        std::fs::write(driver_copy(node), replaced(&driver, b"libcuda.so.1\0", b"libmycu.so.1\0"))?;
        Ok(())
    }
}

/// The copy of the driver's library under another name.
pub(crate) fn driver_copy(node: &Node) -> PathBuf {
    node.libraries().join("libmycu.so")
}

/// Compiles C sources of this crate.
pub fn compile(sources: &[&str], out: &Path, flags: &[&str]) -> Result<()> {
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let sources = sources.iter().map(|source| Path::new(SOURCES).join(source));
    let ran = Command::new(compiler).args(["-O2", "-Wall", "-o"]).arg(out).args(sources).args(flags).output();
    let ran = ran.context("cannot start the C compiler")?;
    ensure!(
        ran.status.success(),
        "cannot compile {}: {}",
        out.display(),
        String::from_utf8_lossy(&ran.stderr)
    );
    Ok(())
}

/// The bytes with every occurrence of `from` replaced by `to`, which has the same length.
fn replaced(library: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut bytes = library.to_owned();
    let places: Vec<usize> = library
        .windows(from.len())
        .enumerate()
        .filter(|(_, window)| *window == from)
        .map(|(at, _)| at)
        .collect();
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
    bytes
}
