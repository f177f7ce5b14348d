//! The program `divvy-container`: enters new namespaces, mounts what the CDI file of a claim names,
//! and executes a program there. This is a container without an image: the program sees the
//! machine's files, but only the GPUs and the shares of its claim.
//!
//! Without root, the demo enters a user namespace as rootless container tools do.

use anyhow::{Context, Result, bail};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, mount_remount, unmount,
};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Exit code if the container could not be created. No program of the demo uses it.
pub(crate) const NO_CONTAINER: u8 = 125;

/// The container, as JSON in the first argument.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Container {
    /// Directory of the demo's node, which stays visible.
    pub(crate) node: PathBuf,
    /// The simulated driver's `/dev`, and the device nodes in it that are visible.
    pub(crate) dev: PathBuf,
    pub(crate) devices: Vec<PathBuf>,
    pub(crate) mounts: Vec<Mount>,
}

/// A file that is mounted below `/run`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Mount {
    pub(crate) host: PathBuf,
    pub(crate) container: PathBuf,
    pub(crate) read_only: bool,
}

/// Executes the program in the arguments. Returns only on failure.
pub(crate) fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let container = arguments.next().unwrap_or_default();
    let program = arguments.next().unwrap_or_default();
    let entered = serde_json::from_slice::<Container>(container.as_encoded_bytes())
        .context("the first argument is not a container")
        .and_then(|container| enter(&container));
    let error = match entered {
        Ok(()) => {
            // Again, because a new user namespace clears the setting.
            super::node::end_with_demo();
            let cause = Command::new(&program).args(arguments).exec();
            anyhow::Error::new(cause).context(format!("cannot execute {}", Path::new(&program).display()))
        }
        Err(error) => error,
    };
    eprintln!("{error:#}");
    ExitCode::from(NO_CONTAINER)
}

fn enter(container: &Container) -> Result<()> {
    unshare()?;
    // A node below /run is hidden by the next mount, and reached by its descriptor.
    let node = rustix::fs::open(&container.node, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .with_context(|| format!("cannot open {}", container.node.display()))?;
    tmpfs(Path::new("/run"))?;
    if container.node.starts_with("/run") {
        fs::create_dir_all(&container.node)?;
        bind(Path::new(&format!("/proc/self/fd/{}", node.as_raw_fd())), &container.node, true)?;
    }
    restrict_devices(container)?;
    for Mount { host, container, read_only } in &container.mounts {
        file_at(container)?;
        bind(host, container, false)?;
        let options = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
        let options = if *read_only { options | MountFlags::RDONLY } else { options };
        mount_remount(container, options, c"")
            .with_context(|| format!("cannot set the options of {}", container.display()))?;
    }
    Ok(())
}

/// Without root: enters a user namespace in which this user is root. The node daemon expects to be
/// root, and reads the processes of containers only in its own user namespace.
///
/// It must be called before the process has a second thread. Where user namespaces are forbidden,
/// the demo goes on, and its containers fail with the remedy.
pub(crate) fn become_root() {
    if !rustix::process::geteuid().is_root() {
        // The containers report the error.
        let _ = unshare_user(UnshareFlags::NEWUSER);
    }
}

/// Enters a new user namespace, and other ones.
fn unshare_user(flags: UnshareFlags) -> Result<()> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    unshare_now(flags)?;
    let files = [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("0 {user} 1")),
        ("/proc/self/gid_map", format!("0 {group} 1")),
    ];
    for (file, text) in files {
        fs::write(file, text).with_context(|| format!("cannot write {file}"))?;
    }
    Ok(())
}

/// New mount namespace, where needed in a new user namespace.
fn unshare() -> Result<()> {
    const REMEDY: &str = "programs of the demo run in namespaces of their own, and this machine forbids \
                          them; run the demo as root, or allow user namespaces (on Ubuntu: sysctl \
                          kernel.apparmor_restrict_unprivileged_userns=0)";
    if unshare_now(UnshareFlags::NEWNS).is_err() {
        unshare_user(UnshareFlags::NEWUSER | UnshareFlags::NEWNS).context(REMEDY)?;
    }
    if mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).is_err() {
        bail!(REMEDY);
    }
    Ok(())
}

#[allow(unsafe_code, reason = "unshare may break invariants of shared file descriptors")]
fn unshare_now(flags: UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: this process has one thread, and the flags do not include FILES.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Hides the nodes of the other GPUs in the simulated driver's `/dev`.
fn restrict_devices(container: &Container) -> Result<()> {
    let all = Path::new("/run/dev");
    fs::create_dir_all(all)?;
    bind(&container.dev, all, true)?;
    tmpfs(&container.dev)?;
    for node in &container.devices {
        let (from, to) = (all.join(node), container.dev.join(node));
        // A CDI file names nodes of the kernel that the simulated driver does not have.
        if from.exists() {
            file_at(&to)?;
            bind(&from, &to, false)?;
        }
    }
    unmount(all, UnmountFlags::DETACH).context("cannot unmount the devices")
}

fn tmpfs(at: &Path) -> Result<()> {
    mount("tmpfs", at, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=755")
        .with_context(|| format!("cannot mount over {}", at.display()))
}

fn bind(from: &Path, to: &Path, recursive: bool) -> Result<()> {
    let bound = match recursive {
        true => rustix::mount::mount_bind_recursive(from, to),
        false => mount_bind(from, to),
    };
    bound.with_context(|| format!("cannot mount {} at {}", from.display(), to.display()))
}

fn file_at(path: &Path) -> Result<()> {
    let created = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(path, ""));
    created.with_context(|| format!("cannot create {}", path.display()))
}
