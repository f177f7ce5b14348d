//! Finds the GPU driver's files for containers in the directories below the driver root that
//! distributions, driver images and managed Kubernetes use.
//!
//! A library of driver version V is named `*.so.V`. Its soname is read from the file, because links
//! may be missing. All paths are resolved inside the driver root: an absolute link in a driver
//! image means a file of that image.

use super::elf::{self, Object};
use crate::paths::{HostPaths, open_inside};
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Directories with libraries, below the driver root. A file in an earlier directory hides one of the
/// same name in a later directory.
const LIBRARY_DIRS: &[&str] = &[
    MULTIARCH,
    "usr/lib64",
    "usr/lib",
    "lib64",
    NVIDIA_CURRENT,
    "usr/local/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",
    "run/opengl-driver/lib",
];
#[cfg(target_arch = "x86_64")]
const MULTIARCH: &str = "usr/lib/x86_64-linux-gnu";
#[cfg(target_arch = "x86_64")]
const NVIDIA_CURRENT: &str = "usr/lib/x86_64-linux-gnu/nvidia/current";
#[cfg(not(target_arch = "x86_64"))]
const MULTIARCH: &str = "usr/lib/aarch64-linux-gnu";
#[cfg(not(target_arch = "x86_64"))]
const NVIDIA_CURRENT: &str = "usr/lib/aarch64-linux-gnu/nvidia/current";

const BINARY_DIRS: &[&str] = &[
    "usr/bin",
    "usr/sbin",
    "usr/local/nvidia/bin",
    "home/kubernetes/bin/nvidia/bin",
    "run/current-system/sw/bin",
];
const BINARIES: &[&str] =
    &["nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];
/// Libraries of the GPU driver without its version in their names.
const UNVERSIONED: &[&str] = &["libnvidia-nvvm70.so.4", "libnvidia-api.so.1"];
const DATA: &[&str] = &[
    "usr/share/nvidia/nvoptix.bin",
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "usr/share/vulkan/icd.d/nvidia_icd.json",
    "etc/vulkan/icd.d/nvidia_icd.json",
];

/// Why the driver's files cannot be determined.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error(
        "no libnvidia-ml.so.<version> or libcuda.so.<version> below {root}; is the GPU driver installed \
         there?"
    )]
    NoDriver { root: PathBuf },
    #[error(
        "kernel module is version {kernel}, but only {found} is installed below {root}; finish the driver \
         update"
    )]
    Version { root: PathBuf, kernel: String, found: String },
    #[error("{path} cannot be read")]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// A file on the host and its path in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountedFile {
    pub host: PathBuf,
    pub container: PathBuf,
}

/// A library and its soname, by which programs load it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    pub file: MountedFile,
    pub soname: Option<String>,
}

/// A link that the GPU driver's installer creates next to its libraries.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Link {
    /// Path in the container.
    pub path: PathBuf,
    /// File name in the same directory.
    pub target: String,
}

/// All files to mount, in a stable order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    pub version: String,
    pub libraries: Vec<Library>,
    pub links: Vec<Link>,
    /// Binaries, at `/usr/bin` in the container, and data files.
    pub others: Vec<MountedFile>,
}

/// State on which a [`DriverFiles`] depends: the version of the kernel module and the existing
/// directories. Cheap to compare. A new directory needs no check: it comes with another version or
/// changes one of the known directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    kernel: Option<String>,
    dirs: Vec<(PathBuf, Change)>,
}

/// Device, inode and modification time of a directory.
type Change = (u64, u64, i64, i64);

impl Fingerprint {
    /// Records the current state.
    pub fn take(driver_root: &Path, proc_root: &Path) -> Self {
        let dirs = LIBRARY_DIRS.iter().chain(BINARY_DIRS).map(|dir| driver_root.join(dir));
        let dirs = dirs.filter_map(|dir| change(&dir).map(|change| (dir, change))).collect();
        Self { kernel: kernel_version(proc_root), dirs }
    }

    /// Whether the state is unchanged.
    pub fn is_current(&self, proc_root: &Path) -> bool {
        let unchanged = |(dir, then): &(PathBuf, Change)| change(dir).is_some_and(|now| now == *then);
        self.dirs.iter().all(unchanged) && self.kernel == kernel_version(proc_root)
    }
}

fn change(dir: &Path) -> Option<Change> {
    let meta = std::fs::metadata(dir).ok()?;
    Some((meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

/// Version of the loaded kernel module, for example `580.95.05`.
fn kernel_version(proc_root: &Path) -> Option<String> {
    let text = std::fs::read_to_string(proc_root.join("driver/nvidia/version")).ok()?;
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    line.split_whitespace().find(|word| is_version(word)).map(str::to_owned)
}

/// Whether it is a version like `580.95.05`: numbers separated by dots, with at least one dot.
fn is_version(word: &str) -> bool {
    word.contains('.')
        && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
}

impl DriverFiles {
    /// Finds the files below the driver root.
    pub fn find(paths: &HostPaths, fingerprint: &Fingerprint) -> Result<Self, FilesError> {
        let local_root = paths.local_path(&paths.driver_root);
        let opened = File::open(&local_root)
            .map_err(|cause| FilesError::Read { path: paths.driver_root.clone(), cause })?;
        let root = Root { paths, local_root, opened };
        let names = root.list()?;
        let version = version(&root, &names, fingerprint.kernel.as_deref())?;
        let suffix = format!(".so.{version}");
        let mut found = Self { version, ..Self::default() };
        for (name, dir) in &names {
            if !name.ends_with(&suffix) && !UNVERSIONED.contains(&name.as_str()) {
                continue;
            }
            let path = Path::new(dir).join(name);
            let Some((file, shared)) = root.open(&path) else { continue };
            match elf::inspect(&file) {
                Ok(Object::Library { soname }) => found.libraries.push(Library { file: shared, soname }),
                Ok(Object::Other) => {}
                Err(cause) => return Err(FilesError::Read { path: shared.host, cause }),
            }
        }
        found.links = root.links(&names, &found.libraries);
        for name in BINARIES {
            let paths = BINARY_DIRS.iter().map(|dir| Path::new(dir).join(name));
            if let Some((_, shared)) = paths.into_iter().find_map(|path| root.open(&path)) {
                found.others.push(MountedFile { container: Path::new("/usr/bin").join(name), ..shared });
            }
        }
        found.others.extend(DATA.iter().filter_map(|path| Some(root.open(Path::new(path))?.1)));
        Ok(found)
    }
}

/// The version whose files are mounted: that of the kernel module, or the newest installed one if the
/// module's version is unknown.
fn version(
    root: &Root<'_>,
    names: &BTreeMap<String, String>,
    kernel: Option<&str>,
) -> Result<String, FilesError> {
    let versions: BTreeSet<(Vec<u64>, &str)> = names
        .keys()
        .filter_map(|name| name.strip_prefix("libnvidia-ml.so.").or_else(|| name.strip_prefix("libcuda.so.")))
        .filter(|version| is_version(version))
        .map(|version| (version.split('.').filter_map(|part| part.parse().ok()).collect(), version))
        .collect();
    let Some((_, newest)) = versions.last() else {
        return Err(FilesError::NoDriver { root: root.paths.driver_root.clone() });
    };
    match kernel {
        None => Ok((*newest).to_owned()),
        Some(kernel) if versions.iter().any(|(_, version)| *version == kernel) => Ok(kernel.to_owned()),
        Some(kernel) => Err(FilesError::Version {
            root: root.paths.driver_root.clone(),
            kernel: kernel.to_owned(),
            found: (*newest).to_owned(),
        }),
    }
}

/// The driver root; links are resolved inside it.
struct Root<'a> {
    paths: &'a HostPaths,
    /// Its path in this process.
    local_root: PathBuf,
    opened: File,
}

impl Root<'_> {
    /// File names in the library directories, and the directory of each.
    fn list(&self) -> Result<BTreeMap<String, String>, FilesError> {
        let mut names = BTreeMap::new();
        for dir in LIBRARY_DIRS {
            let entries = match std::fs::read_dir(self.local_root.join(dir)) {
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => continue,
                entries => entries,
            };
            let read = |cause| FilesError::Read { path: self.paths.driver_root.join(dir), cause };
            for entry in entries.map_err(read)? {
                // The GPU driver has no file with a name that is not UTF-8.
                if let Ok(name) = entry.map_err(read)?.file_name().into_string() {
                    names.entry(name).or_insert_with(|| (*dir).to_owned());
                }
            }
        }
        Ok(names)
    }

    /// Opens a regular file, with links resolved inside the root.
    fn open(&self, path: &Path) -> Option<(File, MountedFile)> {
        // O_NONBLOCK, because opening a FIFO would block.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let (file, real) = open_inside(&self.opened, path, flags).ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        Some((file, MountedFile { host: self.paths.host_path(&real), container: Path::new("/").join(path) }))
    }

    /// Links in the library directories that lead to one of the libraries. `libcuda.so` is always added.
    fn links(&self, names: &BTreeMap<String, String>, libraries: &[Library]) -> Vec<Link> {
        let base = |library: &Library| Some(library.file.container.file_name()?.to_str()?.to_owned());
        let sonames: BTreeSet<String> =
            libraries.iter().filter_map(|library| library.soname.clone()).collect();
        let mut targets: BTreeSet<String> = libraries.iter().filter_map(base).collect();
        targets.extend(sonames.iter().cloned());
        let mut links = BTreeSet::new();
        for (name, dir) in names {
            if targets.contains(name) {
                continue;
            }
            let path = Path::new(dir).join(name);
            let Ok(target) = std::fs::read_link(self.local_root.join(&path)) else { continue };
            if let Some(target) = target.to_str().filter(|target| targets.contains(*target)) {
                links.insert(Link { path: Path::new("/").join(path), target: target.to_owned() });
            }
        }
        let cuda = libraries.iter().find(|library| library.soname.as_deref() == Some("libcuda.so.1"));
        if let Some(cuda) = cuda {
            let path = cuda.file.container.with_file_name("libcuda.so");
            links.insert(Link { path, target: "libcuda.so.1".to_owned() });
        }
        links.into_iter().collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn versions_are_numbers_with_dots() {
        for (word, expect) in [
            ("580.95.05", true),
            ("580.95", true),
            ("580", false),
            ("1", false),
            ("x.y", false),
            ("5..1", false),
        ] {
            assert_eq!(is_version(word), expect, "{word}");
        }
    }

    /// A minimal hand-made library from which only the soname can be read.
    pub(in super::super) fn library(soname: &str) -> Vec<u8> {
        let mut elf = vec![0; 64 + 2 * 56 + 3 * 16];
        let machine: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
        let strings = elf.len() as u64;
        let length = strings + soname.len() as u64 + 2;
        let mut put = |at: usize, bytes: &[u8]| elf[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"\x7fELF\x02\x01\x01");
        put(16, &3u16.to_le_bytes());
        put(18, &machine.to_le_bytes());
        put(32, &64u64.to_le_bytes());
        put(54, &56u16.to_le_bytes());
        put(56, &2u16.to_le_bytes());
        for (at, kind, offset, size) in [(64, 1u32, 0u64, length), (120, 2, 176, 48)] {
            put(at, &kind.to_le_bytes());
            put(at + 8, &offset.to_le_bytes());
            put(at + 16, &offset.to_le_bytes());
            put(at + 32, &size.to_le_bytes());
        }
        for (at, tag, value) in [(176, 5u64, strings), (192, 14, 1)] {
            put(at, &tag.to_le_bytes());
            put(at + 8, &value.to_le_bytes());
        }
        elf.push(0);
        elf.extend(soname.bytes());
        elf.push(0);
        elf
    }

    /// A driver root with (path, content); a content that starts with `->` is a link.
    fn root(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            match content.strip_prefix(b"->") {
                Some(target) => {
                    std::os::unix::fs::symlink(std::str::from_utf8(target).unwrap(), path).unwrap()
                }
                None => std::fs::write(path, content).unwrap(),
            }
        }
        dir
    }

    fn find(dir: &Path) -> Result<DriverFiles, FilesError> {
        let paths = HostPaths { driver_root: dir.to_owned(), ..HostPaths::below(dir) };
        DriverFiles::find(&paths, &Fingerprint::take(dir, &paths.proc_root))
    }

    #[test]
    fn libraries_of_the_loaded_version_are_found_with_sonames() {
        let cuda = library("libcuda.so.1");
        let core = library("libnvidia-glcore.so.580.1.2");
        let lib = |name: &str| format!("{MULTIARCH}/{name}");
        let dir = root(&[
            ("proc/driver/nvidia/version", b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.2  Mon\n"),
            (&lib("libcuda.so.580.1.2"), &cuda),
            (&lib("libcuda.so.590.1"), &cuda),
            (&lib("libcuda.so.1"), b"->libcuda.so.580.1.2"),
            (&lib("libnvidia-glcore.so.580.1.2"), &core),
            (&lib("libglindirect.so.0"), b"->libnvidia-glcore.so.580.1.2"),
            (&lib("libother.so.1"), b"->libother.so.1.0"),
            ("usr/lib/libcuda.so.580.1.2", b"a 32-bit library"),
            ("usr/bin/nvidia-smi", b"->/opt/nvidia/smi"),
            ("opt/nvidia/smi", b"#!"),
        ]);
        let found = find(dir.path()).unwrap();
        assert_eq!(found.version, "580.1.2");
        let names: Vec<_> = found
            .libraries
            .iter()
            .map(|l| (l.file.container.to_str().unwrap(), l.soname.as_deref()))
            .collect();
        let at = |name: &str| format!("/{MULTIARCH}/{name}");
        assert_eq!(
            names,
            [
                (at("libcuda.so.580.1.2").as_str(), Some("libcuda.so.1")),
                (at("libnvidia-glcore.so.580.1.2").as_str(), Some("libnvidia-glcore.so.580.1.2")),
            ]
        );
        let links: Vec<_> =
            found.links.iter().map(|l| (l.path.to_str().unwrap(), l.target.as_str())).collect();
        assert_eq!(
            links,
            [
                (at("libcuda.so").as_str(), "libcuda.so.1"),
                (at("libglindirect.so.0").as_str(), "libnvidia-glcore.so.580.1.2")
            ]
        );
        let root = dir.path().canonicalize().unwrap();
        let smi = MountedFile { host: root.join("opt/nvidia/smi"), container: "/usr/bin/nvidia-smi".into() };
        assert_eq!(found.others, [smi], "an absolute link is resolved inside the driver root");
    }

    #[test]
    fn files_below_a_prefix_are_reported_with_host_paths() {
        let dir = root(&[
            ("usr/lib64/libnvidia-ml.so.580.1", &library("libnvidia-ml.so.1")),
            ("usr/bin/nvidia-smi", b"->/opt/nvidia/smi"),
            ("opt/nvidia/smi", b"#!"),
        ]);
        let prefix = dir.path().canonicalize().unwrap();
        let paths = |driver_root: &str| HostPaths {
            driver_root: driver_root.into(),
            host_prefix: prefix.clone(),
            ..HostPaths::below(dir.path())
        };
        let take =
            |paths: &HostPaths| Fingerprint::take(&paths.local_path(&paths.driver_root), &paths.proc_root);
        let whole = paths("/");
        let found = DriverFiles::find(&whole, &take(&whole)).unwrap();
        assert_eq!(found.libraries[0].file.host, Path::new("/usr/lib64/libnvidia-ml.so.580.1"));
        assert_eq!(found.others[0].host, Path::new("/opt/nvidia/smi"), "a link is resolved below the prefix");
        let absent = paths("/run/nvidia/driver");
        let text = DriverFiles::find(&absent, &take(&absent)).unwrap_err().to_string();
        assert!(text.starts_with("/run/nvidia/driver "), "{text}");
    }

    #[test]
    fn driver_root_without_a_driver_is_named_in_the_error() {
        let dir = root(&[("usr/lib/libc.so.6", b"x")]);
        let text = find(dir.path()).unwrap_err().to_string();
        assert!(text.contains(dir.path().to_str().unwrap()), "{text}");
    }

    #[test]
    fn unfinished_driver_update_is_refused() {
        let dir = root(&[
            ("proc/driver/nvidia/version", b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.2  Mon\n"),
            ("usr/lib64/libnvidia-ml.so.590.3", b"x"),
        ]);
        let text = find(dir.path()).unwrap_err().to_string();
        assert!(text.contains("580.1.2") && text.contains("590.3"), "{text}");
    }

    #[test]
    fn changed_files_or_module_invalidate_the_fingerprint() {
        let dir = root(&[("usr/lib64/libnvidia-ml.so.590.3", b"x"), ("usr/bin/nvidia-smi", b"x")]);
        let proc_root = dir.path().join("proc");
        let check = |change: &dyn Fn()| {
            let fingerprint = Fingerprint::take(dir.path(), &proc_root);
            assert!(fingerprint.is_current(&proc_root));
            change();
            assert!(!fingerprint.is_current(&proc_root));
        };
        check(&|| std::fs::write(dir.path().join("usr/lib64/libcuda.so.590.3"), "x").unwrap());
        check(&|| std::fs::remove_file(dir.path().join("usr/bin/nvidia-smi")).unwrap());
        check(&|| {
            std::fs::create_dir_all(proc_root.join("driver/nvidia")).unwrap();
            std::fs::write(proc_root.join("driver/nvidia/version"), "NVRM version: NVIDIA 590.3 x").unwrap();
        });
        check(&|| std::fs::remove_dir_all(dir.path().join("usr/lib64")).unwrap());
    }
}
