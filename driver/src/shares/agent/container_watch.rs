//! Watches for containers that the hook reports, so that the GPU driver's limits are set at once.
//!
//! The driver limits a cgroup, which exists when the hook runs and before any program of the image
//! does. An audit sets the limits too, but up to a second later. The watched directories hold pages
//! and the hook's files. A container cannot create entries there, and writes to an account page do
//! not wake the watch.

use crate::inotify::DirWatcher;
use crate::shares::{CGROUPS, Shares};

/// Inotify watches on the directories of all shares. Without inotify only audits set the limits.
pub(super) struct ContainerWatch {
    changes: Option<DirWatcher>,
    /// The directory of all shares is watched. It is created with the first share.
    is_active: bool,
}

impl ContainerWatch {
    pub(super) fn new() -> Self {
        let changes = DirWatcher::new().inspect_err(|cause| {
            tracing::warn!(
                %cause,
                "no inotify: the GPU driver's limits are set up to a second after a container starts"
            );
        });
        Self { changes: changes.ok(), is_active: false }
    }

    /// Watches the directories of all shares that exist now. Call this before the directories are read.
    pub(super) fn watch(&mut self, shares: &Shares) {
        let Some(changes) = &self.changes else { return };
        let root = shares.root();
        self.is_active = changes.watch_entries(root).is_ok();
        // Each directory is watched before it is listed, so that a new entry is either listed or
        // reported. A directory that was removed meanwhile needs no watch.
        for claim in shares.claims() {
            let _ = changes.watch_entries(&root.join(claim.as_str()));
        }
        for (claim, share) in shares.all() {
            let dir = shares.of(&claim, &share);
            let _ = changes.watch_entries(&dir);
            let _ = changes.watch_entries(&dir.join(CGROUPS));
        }
    }

    /// Whether [`ContainerWatch::changed`] has nothing to wait for.
    pub(super) fn is_inactive(&self) -> bool {
        !self.is_active
    }

    /// Returns when an entry was created or removed. Never returns if there is no inotify instance.
    pub(super) async fn changed(&self) {
        match &self.changes {
            Some(changes) if changes.next().await.is_ok() => {}
            _ => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::HostPaths;
    use futures::FutureExt;
    use std::fs;

    #[tokio::test]
    async fn new_entries_wake_the_watch_and_account_writes_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let shares = Shares::new(&HostPaths::below(dir.path()));
        let mut containers = ContainerWatch::new();
        containers.watch(&shares);
        assert!(containers.is_inactive(), "there is no share yet");
        fs::create_dir_all(shares.root()).unwrap();
        containers.watch(&shares);
        assert!(!containers.is_inactive());
        let share = shares.of(&"c".into(), &"s".into());
        let cgroups = share.join(CGROUPS);
        for dir in [share.parent().unwrap(), &share, &cgroups, &cgroups.join("container")] {
            assert!(containers.changed().now_or_never().is_none());
            fs::create_dir(dir).unwrap();
            containers.changed().await;
            containers.watch(&shares);
        }
        let account = share.join("account");
        fs::write(&account, "").unwrap();
        containers.changed().await;
        fs::write(&account, "more").unwrap();
        assert!(containers.changed().now_or_never().is_none());
    }
}
