//! The GPU driver's `nvidia-cuda-mps-control`: found in the driver root, started as a daemon, and
//! run as the client that sends commands to a daemon.
//!
//! It does not run under chroot, because a driver root that is an image has no /proc and no /dev.
//! It loads the GPU driver's libraries from the driver root but the C library from this container,
//! since a foreign C library would not match the loader. So the library path is a directory of
//! links to `libcuda`, `libnvidia-*` and a few others.

use crate::files::Dirs;
use crate::process::{DEVICE, PIPE, ProcessHandle};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use rustix::thread::UnshareFlags;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const PROGRAM: &str = "nvidia-cuda-mps-control";
/// Directories of the program below the driver root, in distributions, driver containers and
/// managed nodes.
const PROGRAM_DIRS: [&str; 5] =
    ["usr/bin", "bin", "usr/local/nvidia/bin", "home/kubernetes/bin/nvidia/bin", "run/current-system/sw/bin"];
/// Directories of the libraries below the driver root.
const LIBRARY_DIRS: [&str; 8] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",
    "run/opengl-driver/lib",
];
/// A directory with this file holds the GPU driver's libraries.
const LIBRARY_MARKER: &str = "libcuda.so.1";
/// File name prefixes of the GPU driver's libraries.
const LIBRARY_PREFIXES: [&str; 3] = ["libcuda.so", "libcudadebugger.so", "libnvidia-"];
/// Where clients and servers share memory.
const SHM: &str = "/dev/shm";
/// Output of a daemon until it opens its own log.
const STARTUP_LOG: &str = "start.log";
/// Stack of every thread: enough to read small files and to start programs.
pub(crate) const THREAD_STACK_BYTES: usize = 256 * 1024;
/// Bytes read of an answer; real answers are far shorter.
const MAX_ANSWER_BYTES: u64 = 64 * 1024;

/// Why running the program failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProgramError {
    #[error("no {PROGRAM} below {}; check --driver-root: is the GPU driver installed there?", root.display())]
    Missing { root: PathBuf },
    #[error("{} cannot be prepared: {cause}", dir.display())]
    Dir { dir: PathBuf, cause: io::Error },
    #[error("{} cannot be mounted over {SHM}: {cause}; the supervisor needs CAP_SYS_ADMIN", shm.display())]
    Shm { shm: PathBuf, cause: io::Error },
    #[error("{PROGRAM} cannot be started: {0}")]
    Start(io::Error),
    #[error("{PROGRAM} exited at its start: {output}")]
    Exited { output: String },
    #[error("the control daemon did not answer within {} s", timeout.as_secs())]
    Timeout { timeout: Duration },
    #[error("the control daemon does not answer: {output}")]
    Failed { output: String },
    #[error("the control daemon refused {command:?}: {answer}")]
    Refused { command: String, answer: String },
}

/// The program and the directories it uses.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    file: PathBuf,
    dirs: Dirs,
}

impl Program {
    /// Finds the program, creates the directories of the target and links the libraries.
    pub(crate) fn find(root: &Path, dirs: &Dirs) -> Result<Self, ProgramError> {
        let missing = || ProgramError::Missing { root: root.to_owned() };
        let opened = File::open(root).map_err(|_| missing())?;
        let found =
            PROGRAM_DIRS.iter().find_map(|dir| resolve_in_root(&opened, &Path::new(dir).join(PROGRAM)));
        let file = found.filter(|file| file.is_file()).ok_or_else(missing)?;
        let failed = |cause| ProgramError::Dir { dir: dirs.dir.clone(), cause };
        dirs.create().map_err(failed)?;
        link_libraries(&opened, &dirs.lib).map_err(failed)?;
        Ok(Self { file, dirs: dirs.clone() })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        let own = self.file.parent().unwrap_or(Path::new("/"));
        let usual = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(Path::new);
        let path = std::env::join_paths(std::iter::once(own).chain(usual)).unwrap_or_default();
        command.env_clear().env("PATH", path).env("LD_LIBRARY_PATH", &self.dirs.lib);
        command.env(PIPE, &self.dirs.pipe).env("CUDA_MPS_LOG_DIRECTORY", &self.dirs.log);
        command
    }

    /// Starts a daemon that outlives this process and uses the shared memory of its target.
    pub(crate) fn start(
        &self,
        device: &str,
        multi_user: bool,
    ) -> Result<(Child, ProcessHandle), ProgramError> {
        let output = File::create(self.dirs.log.join(STARTUP_LOG))
            .map_err(|cause| ProgramError::Dir { dir: self.dirs.log.clone(), cause })?;
        let errors = output.try_clone().map_err(ProgramError::Start)?;
        let mut command = self.command();
        command.arg("-f").args(multi_user.then_some("-M")).env(DEVICE, device);
        // A process group of its own: signals from the supervisor's terminal do not reach it.
        command.process_group(0).stdin(Stdio::null()).stdout(output).stderr(errors);
        let child = in_mount_namespace(&self.dirs.shm, || command.spawn().map_err(ProgramError::Start))?;
        let handle = ProcessHandle::open(child.id()).map_err(ProgramError::Start)?;
        Ok((child, handle))
    }

    /// The last line that a daemon printed before it exited.
    pub(crate) fn startup_output(&self) -> String {
        last_line(&fs::read(self.dirs.log.join(STARTUP_LOG)).unwrap_or_default())
    }

    /// Sends commands to the daemon and returns the whole answer. The client is killed after
    /// `timeout`.
    pub(crate) fn send(&self, commands: &str, timeout: Duration) -> Result<String, ProgramError> {
        let mut command = self.command();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(ProgramError::Start)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A client that finds no daemon does not read its input, so an error is ignored here.
            // Its exit status reports the failure.
            drop(stdin.write_all(format!("{commands}\n").as_bytes()));
        }
        let handle = ProcessHandle::open(child.id()).map_err(ProgramError::Start)?;
        let exited = handle.wait_exit(timeout);
        if !exited {
            handle.kill();
        }
        let status = child.wait().map_err(ProgramError::Start)?;
        let output = read(child.stdout.take());
        if !exited {
            return Err(ProgramError::Timeout { timeout });
        }
        if status.success() {
            return Ok(String::from_utf8_lossy(&output).into_owned());
        }
        let errors = read(child.stderr.take());
        Err(ProgramError::Failed { output: last_line(if errors.is_empty() { &output } else { &errors }) })
    }
}

fn read(from: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    // After a read error, the bytes read so far are returned.
    let _ = from.map(|from| from.take(MAX_ANSWER_BYTES).read_to_end(&mut bytes));
    bytes
}

fn last_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no output").trim().to_owned()
}

/// The real path of a file below a root, as this process sees it. Absolute symbolic links are
/// resolved resolve_in_root the root.
fn resolve_in_root(root: &File, path: &Path) -> Option<PathBuf> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::openat2(root, path, flags, Mode::empty(), resolve).ok()?;
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

/// Updates the directory of links to the libraries that the driver root has now.
fn link_libraries(root: &File, links: &Path) -> io::Result<()> {
    let libraries = LIBRARY_DIRS.iter().map(Path::new).find_map(|dir| {
        resolve_in_root(root, &dir.join(LIBRARY_MARKER))?;
        Some((dir, resolve_in_root(root, dir)?))
    });
    // Without the libraries, the program itself reports which one is missing.
    let Some((dir, real)) = libraries else { return Ok(()) };
    for old in fs::read_dir(links)?.flatten() {
        fs::remove_file(old.path())?;
    }
    for entry in fs::read_dir(real)?.flatten() {
        let name = entry.file_name();
        let is_driver_library =
            LIBRARY_PREFIXES.iter().any(|prefix| name.to_str().is_some_and(|name| name.starts_with(prefix)));
        if let Some(file) = is_driver_library.then(|| resolve_in_root(root, &dir.join(&name))).flatten() {
            symlink(file, links.join(name))?;
        }
    }
    Ok(())
}

/// Runs `run` in a mount namespace in which the target's shared memory is mounted at /dev/shm.
/// Processes that it starts stay in that namespace. Without root, as in tests, /dev/shm is shared
/// by all.
fn in_mount_namespace<T: Send>(
    shm: &Path,
    run: impl FnOnce() -> Result<T, ProgramError> + Send,
) -> Result<T, ProgramError> {
    if !rustix::process::geteuid().is_root() {
        return run();
    }
    let failed = |cause: io::Error| ProgramError::Shm { shm: shm.to_owned(), cause };
    // A mount namespace belongs to a thread and is inherited by its children. This thread exits
    // after `run`.
    let in_thread = || {
        unshare_mounts().map_err(failed)?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .and_then(|()| mount_bind(shm, SHM))
            .map_err(|errno| failed(errno.into()))?;
        run()
    };
    std::thread::scope(|scope| {
        let thread =
            std::thread::Builder::new().stack_size(THREAD_STACK_BYTES).spawn_scoped(scope, in_thread);
        let result = thread.map_err(ProgramError::Start)?.join();
        result.unwrap_or_else(|_| Err(ProgramError::Start(io::Error::other("the starting thread panicked"))))
    })
}

#[allow(unsafe_code, reason = "rustix marks the call unsafe because of another flag")]
fn unshare_mounts() -> io::Result<()> {
    // SAFETY: only CLONE_FILES is unsafe, as it gives the thread its own descriptor table; it is
    // not set.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may panic.

    use super::*;

    #[test]
    fn only_gpu_driver_libraries_are_linked() {
        let root = tempfile::tempdir().unwrap();
        let (lib, links) = (root.path().join("usr/lib64"), root.path().join("links"));
        fs::create_dir_all(&lib).unwrap();
        fs::create_dir(&links).unwrap();
        symlink("gone", links.join("libcuda.so.old")).unwrap();
        for name in ["libcuda.so.580.1", "libnvidia-ml.so.1", "libc.so.6", "libcrypto.so.3"] {
            fs::write(lib.join(name), name).unwrap();
        }
        // As in a driver image: an absolute link that stays resolve_in_root the root.
        symlink("/usr/lib64/libcuda.so.580.1", lib.join("libcuda.so.1")).unwrap();
        link_libraries(&File::open(root.path()).unwrap(), &links).unwrap();
        let mut names: Vec<_> =
            fs::read_dir(&links).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["libcuda.so.1", "libcuda.so.580.1", "libnvidia-ml.so.1"]);
        assert_eq!(fs::read(links.join("libcuda.so.1")).unwrap(), b"libcuda.so.580.1");
    }

    #[test]
    fn error_names_the_driver_root() {
        let root = tempfile::tempdir().unwrap();
        let error = Program::find(root.path(), &Dirs::new(root.path())).unwrap_err().to_string();
        assert!(error.contains(&root.path().display().to_string()), "{error}");
    }
}
