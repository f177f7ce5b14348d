//! A container's cgroup: of version 2, made below the one that this process is in, and removed with the container.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The kernel buries the last process of a container after whoever killed it goes on.
const BURIAL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Cgroup {
    directory: PathBuf,
    /// As `/proc/<pid>/cgroup` has it.
    path: String,
}

impl Cgroup {
    /// An empty one; it takes root, as a rule.
    pub fn make() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::")).context("no cgroups of version 2")?;
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = format!("{}/divvy-escape-{}-{number}", own.trim_end_matches('/'), std::process::id());
        let directory = root()?.join(path.trim_start_matches('/'));
        std::fs::create_dir(&directory).with_context(|| {
            format!("no cgroup can be made here (root is needed): {}", directory.display())
        })?;
        Ok(Self { directory, path })
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The line of a process in it.
    pub fn line(&self) -> String {
        format!("0::{}\n", self.path)
    }

    pub fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// The file that takes the numbers of processes.
    pub fn processes(&self) -> PathBuf {
        self.directory.join("cgroup.procs")
    }
}

/// Where the hierarchy of version 2 is mounted.
pub fn root() -> Result<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = fields.find(|fields| fields.get(2) == Some(&"cgroup2"));
    found.and_then(|fields| fields.get(1).map(PathBuf::from)).context("no cgroups of version 2 are mounted")
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let begun = Instant::now();
        // One that stays is empty and harms nobody.
        while std::fs::remove_dir(&self.directory).is_err() && begun.elapsed() < BURIAL {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
