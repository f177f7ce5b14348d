//! A cgroup (version 2) for a container, created below the cgroup of this process and removed with
//! the container.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long to wait for the kernel to remove the last process of a killed container from its cgroup.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Cgroup {
    directory: PathBuf,
    /// The path as in `/proc/<pid>/cgroup`.
    path: String,
}

impl Cgroup {
    /// Creates an empty cgroup. This usually needs root.
    pub fn create() -> Result<Self> {
        static CREATED: AtomicU32 = AtomicU32::new(0);
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let own = own
            .lines()
            .find_map(|line| line.strip_prefix("0::"))
            .context("this machine has no cgroups of version 2")?;
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
        let path = format!("{}/divvy-escape-{}-{number}", own.trim_end_matches('/'), std::process::id());
        let directory = root()?.join(path.trim_start_matches('/'));
        std::fs::create_dir(&directory)
            .with_context(|| format!("cannot create the cgroup {} (this needs root)", directory.display()))?;
        Ok(Self { directory, path })
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The content of `/proc/<pid>/cgroup` for a process in it.
    pub fn line(&self) -> String {
        format!("0::{}\n", self.path)
    }

    pub fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// The file to which process ids are written.
    pub fn processes(&self) -> PathBuf {
        self.directory.join("cgroup.procs")
    }
}

/// The mount point of the version 2 hierarchy.
pub fn root() -> Result<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = fields.find(|fields| fields.get(2) == Some(&"cgroup2"));
    found
        .and_then(|fields| fields.get(1).map(PathBuf::from))
        .context("no cgroup hierarchy of version 2 is mounted")
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let begun = Instant::now();
        // A cgroup that stays is empty and does no harm.
        while std::fs::remove_dir(&self.directory).is_err() && begun.elapsed() < REMOVAL_TIMEOUT {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
