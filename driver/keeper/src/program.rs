//! The GPU driver's `nvidia-cuda-mps-control`: found in the driver root, started
//! as a daemon, and run as the client that carries commands to one.
//!
//! It runs in this process's world and not under chroot: a driver root that is an
//! image has no /proc and no /dev of its own. Its libraries come from the driver
//! root all the same, but only the GPU driver's: a C library from there would not
//! fit this world's loader. So the library path is a directory of links to
//! `libcuda`, `libnvidia-*` and the like.

use crate::files::Dirs;
use crate::process::{DEVICE, Held, PIPE};
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
/// Where distributions, driver containers and managed nodes install it, below the driver root.
const PROGRAM_DIRS: [&str; 5] =
    ["usr/bin", "bin", "usr/local/nvidia/bin", "home/kubernetes/bin/nvidia/bin", "run/current-system/sw/bin"];
/// The same for libraries.
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
/// What a directory of the GPU driver's libraries has in it.
const MARK: &str = "libcuda.so.1";
/// What the GPU driver's libraries are called.
const PREFIXES: [&str; 3] = ["libcuda.so", "libcudadebugger.so", "libnvidia-"];
/// Where clients and servers share memory.
const SHM: &str = "/dev/shm";
/// What a daemon says before it has its log.
const OUTPUT: &str = "start.log";
/// No answer is longer.
const MOST: u64 = 64 * 1024;

/// Why a program did not do what it was run for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProgramError {
    #[error("no {PROGRAM} below {}; is the GPU driver installed there?", root.display())]
    Missing { root: PathBuf },
    #[error("{} cannot be prepared: {cause}", dir.display())]
    Dir { dir: PathBuf, cause: io::Error },
    #[error("{} cannot be mounted over {SHM}, which takes CAP_SYS_ADMIN: {cause}", shm.display())]
    Shm { shm: PathBuf, cause: io::Error },
    #[error("{PROGRAM} cannot be started: {0}")]
    Start(io::Error),
    #[error("{PROGRAM} ended at once: {said}")]
    Ended { said: String },
    #[error("the control daemon has not answered within {} s", within.as_secs())]
    Late { within: Duration },
    #[error("the control daemon does not answer: {said}")]
    Failed { said: String },
    #[error("the control daemon has refused {command:?}: {said}")]
    Refused { command: String, said: String },
}

/// The program, and the directories it runs in.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    file: PathBuf,
    dirs: Dirs,
}

impl Program {
    /// Finds it and the libraries it needs.
    pub(crate) fn find(root: &Path, dirs: &Dirs) -> Result<Self, ProgramError> {
        let missing = || ProgramError::Missing { root: root.to_owned() };
        let opened = File::open(root).map_err(|_| missing())?;
        let found = PROGRAM_DIRS.iter().find_map(|dir| inside(&opened, &Path::new(dir).join(PROGRAM)));
        let file = found.filter(|file| file.is_file()).ok_or_else(missing)?;
        let failed = |cause| ProgramError::Dir { dir: dirs.dir.clone(), cause };
        dirs.make().map_err(failed)?;
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

    /// Starts a daemon that outlives this process, with the target's shared memory.
    pub(crate) fn start(&self, device: &str, multi_user: bool) -> Result<(Child, Held), ProgramError> {
        let output = File::create(self.dirs.log.join(OUTPUT))
            .map_err(|cause| ProgramError::Dir { dir: self.dirs.log.clone(), cause })?;
        let errors = output.try_clone().map_err(ProgramError::Start)?;
        let mut command = self.command();
        command.arg("-f").args(multi_user.then_some("-M")).env(DEVICE, device);
        // A group of its own: what is sent to the keeper's terminal is not for it.
        command.process_group(0).stdin(Stdio::null()).stdout(output).stderr(errors);
        let child = in_own_namespace(&self.dirs.shm, || command.spawn().map_err(ProgramError::Start))?;
        let held = Held::of(child.id()).map_err(ProgramError::Start)?;
        Ok((child, held))
    }

    /// What a daemon that ended at once said last.
    pub(crate) fn said_at_start(&self) -> String {
        last_line(&fs::read(self.dirs.log.join(OUTPUT)).unwrap_or_default())
    }

    /// Carries commands to the daemon; all that is answered.
    pub(crate) fn ask(&self, commands: &str, within: Duration) -> Result<String, ProgramError> {
        let mut command = self.command();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(ProgramError::Start)?;
        if let Some(mut stdin) = child.stdin.take() {
            // It does not read them where it finds no daemon; its end tells.
            drop(stdin.write_all(format!("{commands}\n").as_bytes()));
        }
        let held = Held::of(child.id()).map_err(ProgramError::Start)?;
        let ended = held.ends_within(within);
        if !ended {
            held.kill();
        }
        let status = child.wait().map_err(ProgramError::Start)?;
        let said = read(child.stdout.take());
        if !ended {
            return Err(ProgramError::Late { within });
        }
        if status.success() {
            return Ok(String::from_utf8_lossy(&said).into_owned());
        }
        let errors = read(child.stderr.take());
        Err(ProgramError::Failed { said: last_line(if errors.is_empty() { &said } else { &errors }) })
    }
}

fn read(from: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    // What was read before an error is what there is.
    let _ = from.map(|from| from.take(MOST).read_to_end(&mut bytes));
    bytes
}

fn last_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("nothing said").trim().to_owned()
}

/// The real path of a file below a root, as this process sees it: an absolute link of the root's is meant inside it.
fn inside(root: &File, path: &Path) -> Option<PathBuf> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::openat2(root, path, flags, Mode::empty(), resolve).ok()?;
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

/// Makes the directory of links what the driver root's libraries are now.
fn link_libraries(root: &File, links: &Path) -> io::Result<()> {
    let libraries = LIBRARY_DIRS.iter().map(Path::new).find_map(|dir| {
        inside(root, &dir.join(MARK))?;
        Some((dir, inside(root, dir)?))
    });
    // Without any the program says what it misses.
    let Some((dir, real)) = libraries else { return Ok(()) };
    for old in fs::read_dir(links)?.flatten() {
        fs::remove_file(old.path())?;
    }
    for entry in fs::read_dir(real)?.flatten() {
        let name = entry.file_name();
        let ours = PREFIXES.iter().any(|prefix| name.to_str().is_some_and(|name| name.starts_with(prefix)));
        if let Some(file) = ours.then(|| inside(root, &dir.join(&name))).flatten() {
            symlink(file, links.join(name))?;
        }
    }
    Ok(())
}

/// Runs it in a mount namespace with the target's memory at /dev/shm; what it starts lives there. Without root, in a
/// test, /dev/shm is everybody's.
fn in_own_namespace<T: Send>(
    shm: &Path,
    run: impl FnOnce() -> Result<T, ProgramError> + Send,
) -> Result<T, ProgramError> {
    if !rustix::process::geteuid().is_root() {
        return run();
    }
    let failed = |cause: io::Error| ProgramError::Shm { shm: shm.to_owned(), cause };
    // A namespace is a thread's, and a child has that of the thread that started it; this one ends here.
    let in_thread = || {
        unshare_mounts().map_err(failed)?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .and_then(|()| mount_bind(shm, SHM))
            .map_err(|errno| failed(errno.into()))?;
        run()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(crate::STACK).spawn_scoped(scope, in_thread);
        let ended = thread.map_err(ProgramError::Start)?.join();
        ended.unwrap_or_else(|_| Err(ProgramError::Start(io::Error::other("the starting thread panicked"))))
    })
}

#[allow(unsafe_code, reason = "rustix has this call as unsafe for the sake of another of its flags")]
fn unshare_mounts() -> io::Result<()> {
    // SAFETY: what can go wrong is a descriptor table of its own (FILES), which is not asked for.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test that cannot go on stops here.

    use super::*;

    #[test]
    fn only_the_gpu_drivers_libraries_are_linked() {
        let root = tempfile::tempdir().unwrap();
        let (lib, links) = (root.path().join("usr/lib64"), root.path().join("links"));
        fs::create_dir_all(&lib).unwrap();
        fs::create_dir(&links).unwrap();
        symlink("gone", links.join("libcuda.so.old")).unwrap();
        for name in ["libcuda.so.580.1", "libnvidia-ml.so.1", "libc.so.6", "libcrypto.so.3"] {
            fs::write(lib.join(name), name).unwrap();
        }
        // As a driver image has it: absolute, and inside.
        symlink("/usr/lib64/libcuda.so.580.1", lib.join("libcuda.so.1")).unwrap();
        link_libraries(&File::open(root.path()).unwrap(), &links).unwrap();
        let mut names: Vec<_> =
            fs::read_dir(&links).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["libcuda.so.1", "libcuda.so.580.1", "libnvidia-ml.so.1"]);
        assert_eq!(fs::read(links.join("libcuda.so.1")).unwrap(), b"libcuda.so.580.1");
    }

    #[test]
    fn a_driver_root_without_the_program_is_named() {
        let root = tempfile::tempdir().unwrap();
        let error = Program::find(root.path(), &Dirs::new(root.path())).unwrap_err().to_string();
        assert!(error.contains(&root.path().display().to_string()), "{error}");
    }
}
