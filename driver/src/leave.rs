//! Leaving a node for good, before an uninstall: `--leave`.
//!
//! ```text
//! serve as always ─▶ no claim is held ─▶ stop serving ─▶ MIG mode off ─▶ slices, files ─▶ ready, idle
//! ```
//!
//! While a claim is held the daemon goes on as always: without it the claim's
//! pod could not end. `/readyz` says which claims they are, so whoever rolls this
//! out to all nodes waits where it has to. A daemon that is started again after
//! it has left finds no record, serves nothing and has nothing left to do.

use crate::engine::Engine;
use crate::paths::HostPaths;
use divvy_api::names::DRIVER;
use divvy_daemon::http;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, ListParams};
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often claims are looked for, and what failed is tried again.
const EVERY: Duration = Duration::from_secs(1);
/// Claims named in one line.
const NAMED: usize = 5;

/// What `/readyz` asks of a daemon that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// Nothing of Divvy is on the node but this daemon.
    Left,
}

impl http::Condition for Condition {
    const ALL: &'static [Self] = &[Self::Left];

    fn name(self) -> &'static str {
        match self {
            Self::Left => "left",
        }
    }
}

/// The one condition of a daemon that leaves.
pub type Readiness = http::Readiness<Condition>;

/// Leaves a node.
pub struct Leave {
    engine: Engine,
    client: kube::Client,
    paths: HostPaths,
    node: String,
    readiness: Readiness,
    /// What was last said to be in the way.
    said: String,
}

/// Why something is still here.
#[derive(Debug, thiserror::Error)]
enum LeaveError {
    #[error("{path} cannot be removed")]
    File {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("slices of node {node} cannot be deleted")]
    Slices {
        node: String,
        #[source]
        cause: Box<kube::Error>,
    },
}

impl Leave {
    /// With the engine whose claims are waited for; nothing is done yet.
    pub fn new(
        engine: &Engine,
        client: &kube::Client,
        paths: &HostPaths,
        node: &str,
        readiness: Readiness,
    ) -> Self {
        Self {
            engine: engine.clone(),
            client: client.clone(),
            paths: paths.clone(),
            node: node.to_owned(),
            readiness,
            said: String::new(),
        }
    }

    /// Waits until no claim is held here.
    pub async fn released(&mut self) {
        while let Some(held) = self.held() {
            self.wait(held).await;
        }
    }

    /// The claims that are held here; none if there are none.
    pub fn held(&self) -> Option<String> {
        let held = self.engine.held();
        let mut said = String::from("claims are held here, leaving when they are released:");
        for (at, held) in held.iter().take(NAMED).enumerate() {
            // Writing to a string cannot fail.
            let _ = write!(said, "{} {}", if at == 0 { "" } else { "," }, held.claim);
        }
        if let more @ 1.. = held.len().saturating_sub(NAMED) {
            let _ = write!(said, " and {more} more");
        }
        (!held.is_empty()).then_some(said)
    }

    /// Turns MIG mode off where we turned it on; until that works.
    pub async fn hardware(&mut self) {
        loop {
            let on = self.engine.rest_now().await;
            if on.is_empty() {
                return;
            }
            let gpus = on.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            self.wait(format!("MIG mode cannot be turned off on {gpus}; the log says why")).await;
        }
    }

    /// Removes the node's slices and every file of ours; until that works. Nothing may run
    /// that would make them again.
    pub async fn traces(&mut self) {
        while let Err(error) = self.remove().await {
            self.wait(crate::service::chain(&error)).await;
        }
        tracing::info!(node = self.node, "nothing of Divvy is left on this node");
        self.readiness.set(Condition::Left, Ok(()));
    }

    /// Says once what is in the way, and waits for a moment.
    async fn wait(&mut self, why: String) {
        if self.said != why {
            tracing::warn!(why, "not left yet");
            self.readiness.set(Condition::Left, Err(why.clone()));
            self.said = why;
        }
        tokio::time::sleep(EVERY).await;
    }

    async fn remove(&self) -> Result<(), LeaveError> {
        self.remove_slices()
            .await
            .map_err(|cause| LeaveError::Slices { node: self.node.clone(), cause: Box::new(cause) })?;
        self.remove_claim_files()?;
        for dir in [&self.paths.run_dir, &self.paths.state_dir, &self.paths.plugin_dir()] {
            remove_dir(dir)?;
        }
        Ok(())
    }

    async fn remove_slices(&self) -> Result<(), kube::Error> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let ours = ListParams::default().fields(&format!("spec.nodeName={},spec.driver={DRIVER}", self.node));
        for slice in api.list(&ours).await? {
            let name = slice.metadata.name.unwrap_or_default();
            match api.delete(&name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                deleted => drop(deleted?),
            }
        }
        Ok(())
    }

    /// Of claims whose record was lost.
    fn remove_claim_files(&self) -> Result<(), LeaveError> {
        let dir = &self.paths.cdi_dir;
        let prefix = format!("{DRIVER}-claim_");
        let entries = match std::fs::read_dir(dir) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(|cause| LeaveError::File { path: dir.clone(), cause })?,
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)) {
                std::fs::remove_file(&path).map_err(|cause| LeaveError::File { path, cause })?;
            }
        }
        Ok(())
    }
}

/// Removes a directory with all that is in it. In a pod it may be a mount, which stays, empty.
fn remove_dir(dir: &Path) -> Result<(), LeaveError> {
    match divvy_tree::remove(dir) {
        Ok(()) => Ok(()),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(cause) if is_mount_point(&cause) && is_empty(dir) => Ok(()),
        Err(cause) => Err(LeaveError::File { path: dir.to_owned(), cause }),
    }
}

/// In a pod it is mounted: it is busy, or what it is mounted on is read-only.
fn is_mount_point(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::ReadOnlyFilesystem)
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}
