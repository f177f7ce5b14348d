//! Containers that the hook tells of, as soon as it does.
//!
//! Limits that the GPU driver keeps are set for a cgroup, which is there when the hook runs and nothing of the image does.
//! An audit sets them as well, but up to a second later, in which a program could take what it likes.
//! So the directories are watched in which pages and tellings appear. Of tenants nobody can make an entry there, and
//! what they write to accounts wakes nobody.

use super::gather::{self, Found};
use super::{Agent, Shares};
use crate::changes::Changes;
use crate::shares::CGROUPS;
use divvy_nvml::{GpuQueue, NvmlError};
use divvy_pages::GpuUuid;
use futures::future::join_all;
use std::collections::{BTreeMap, BTreeSet};

/// The directories of all shares. Without inotify nothing is heard, and audits do.
pub(super) struct Tellings {
    changes: Option<Changes>,
    /// The directory of all shares is, which comes with the first of them.
    is_watched: bool,
}

impl Tellings {
    pub(super) fn new() -> Self {
        let changes = Changes::new().inspect_err(|cause| {
            tracing::warn!(%cause, "limits that the GPU driver keeps stand a second after a container's start");
        });
        Self { changes: changes.ok(), is_watched: false }
    }

    /// What has come is watched from now on, if it has not been; to be called before it is looked at.
    pub(super) fn watch(&mut self, shares: &Shares) {
        let Some(changes) = &self.changes else { return };
        let root = shares.root();
        self.is_watched = changes.watch_entries(root).is_ok();
        // Each before it is listed, so that what comes meanwhile is listed or heard; what has gone is no loss.
        for claim in shares.claims() {
            let _ = changes.watch_entries(&root.join(claim.as_str()));
        }
        for (claim, share) in shares.all() {
            let dir = shares.of(&claim, &share);
            let _ = changes.watch_entries(&dir);
            let _ = changes.watch_entries(&dir.join(CGROUPS));
        }
    }

    /// Whether there is nothing that [`Tellings::next`] would hear.
    pub(super) fn is_deaf(&self) -> bool {
        !self.is_watched
    }

    /// Returns when something has come or gone; never where nothing is heard.
    pub(super) async fn next(&self) {
        match &self.changes {
            Some(changes) if changes.next().await.is_ok() => {}
            _ => std::future::pending().await,
        }
    }
}

impl Agent {
    /// Has GPU drivers keep the limits of what containers there are.
    pub(super) async fn hold_all(&self, by_gpu: BTreeMap<GpuUuid, Vec<Found>>) {
        let hold = async |(gpu, found): (GpuUuid, Vec<Found>)| {
            if let Some(queue) = self.queue(gpu)
                && let Err(error) = self.hold(&queue, &found).await
            {
                tracing::debug!(%gpu, %error, "no limits set in the GPU driver");
            }
        };
        join_all(by_gpu.into_iter().map(hold)).await;
    }

    /// The same of one GPU: the containers whose limit its driver keeps.
    pub(super) async fn hold(
        &self,
        queue: &GpuQueue,
        found: &[Found],
    ) -> Result<BTreeSet<String>, NvmlError> {
        let mut kept = BTreeSet::new();
        for (id, dir, limit) in gather::limits(found, &self.sources.cgroup_root) {
            match queue.hold_cgroup(dir, limit).await {
                Ok(true) => drop(kept.insert(id)),
                // This GPU driver keeps none.
                Ok(false) => break,
                // The container may just have ended; its processes are looked at all the same.
                Err(error @ NvmlError::Call { .. }) => {
                    tracing::debug!(container = id, %error, "the GPU driver does not keep the limit of a container");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::HostPaths;
    use futures::FutureExt;
    use std::fs;

    #[tokio::test]
    async fn what_comes_is_heard_at_every_depth_and_writing_to_an_account_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let shares = Shares::new(&HostPaths::below(dir.path()));
        let mut tellings = Tellings::new();
        tellings.watch(&shares);
        assert!(tellings.is_deaf(), "no share has been");
        fs::create_dir_all(shares.root()).unwrap();
        tellings.watch(&shares);
        assert!(!tellings.is_deaf());
        let share = shares.of(&"c".into(), &"s".into());
        let cgroups = share.join(CGROUPS);
        for dir in [share.parent().unwrap(), &share, &cgroups, &cgroups.join("container")] {
            assert!(tellings.next().now_or_never().is_none());
            fs::create_dir(dir).unwrap();
            tellings.next().await;
            tellings.watch(&shares);
        }
        let account = share.join("account");
        fs::write(&account, "").unwrap();
        tellings.next().await;
        fs::write(&account, "more").unwrap();
        assert!(tellings.next().now_or_never().is_none());
    }
}
