//! Removes Divvy from a node before an uninstall: `--decommission`.
//!
//! The daemon serves as usual until no claim is held, because pods with claims could not terminate
//! without it. `/readyz` names the remaining claims, so a roll-out over all nodes waits for them.
//! Then it stops serving, disables MIG mode, deletes slices and files, and becomes ready. A restart
//! after that finds no record and has nothing to do.

use crate::claims::engine::Engine;
use crate::paths::HostPaths;
use divvy_api::names::DRIVER;
use divvy_api::text::error_chain;
use divvy_daemon::http;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, ListParams};
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Interval at which claims are checked and failed steps are retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of claims named in one message.
const NAMED_CLAIMS_MAX: usize = 5;

/// Readiness condition of a daemon that is being decommissioned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// Nothing of Divvy is left on the node except this process.
    Decommissioned,
}

impl http::Condition for Condition {
    const ALL: &'static [Self] = &[Self::Decommissioned];

    fn name(self) -> &'static str {
        match self {
            Self::Decommissioned => "decommissioned",
        }
    }
}

/// Readiness of a daemon that is being decommissioned.
pub type Readiness = http::Readiness<Condition>;

/// Removes Divvy from a node, step by step.
pub struct Decommission {
    engine: Engine,
    client: kube::Client,
    paths: HostPaths,
    node: String,
    readiness: Readiness,
    /// The last reported reason for waiting.
    last_reason: String,
}

/// Why something could not be removed.
#[derive(Debug, thiserror::Error)]
enum DecommissionError {
    #[error("{path} cannot be removed")]
    File {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("ResourceSlices of node {node} cannot be deleted")]
    Slices {
        node: String,
        #[source]
        cause: Box<kube::Error>,
    },
}

impl Decommission {
    /// Creates the steps; nothing is done yet.
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
            last_reason: String::new(),
        }
    }

    /// Waits until no claim is held on this node.
    pub async fn wait_for_release(&mut self) {
        while let Some(held) = self.held() {
            self.wait(held).await;
        }
    }

    /// A message about the claims that are held on this node, or that they are not known; `None` if there
    /// are none.
    pub fn held(&self) -> Option<String> {
        let held = match self.engine.held() {
            Ok(held) => held,
            Err(error) => {
                return Some(format!("the claims on this node are not known: {}", error_chain(&error)));
            }
        };
        let mut text = String::from("waiting for the release of claims on this node:");
        for (at, held) in held.iter().take(NAMED_CLAIMS_MAX).enumerate() {
            // Writing to a string cannot fail.
            let _ = write!(text, "{} {}", if at == 0 { "" } else { "," }, held.claim);
        }
        if let more @ 1.. = held.len().saturating_sub(NAMED_CLAIMS_MAX) {
            let _ = write!(text, " and {more} more");
        }
        (!held.is_empty()).then_some(text)
    }

    /// Disables MIG mode where Divvy enabled it, and retries until that succeeds.
    pub async fn disable_mig(&mut self) {
        loop {
            let on = self.engine.disable_idle_mig().await;
            if on.is_empty() {
                return;
            }
            let gpus = on.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            self.wait(format!("MIG mode cannot be disabled on {gpus}; see the log")).await;
        }
    }

    /// Deletes the node's slices and all files of Divvy, and retries until that succeeds. Tasks that
    /// could create them again must have stopped.
    pub async fn remove_state(&mut self) {
        while let Err(error) = self.remove().await {
            self.wait(error_chain(&error)).await;
        }
        tracing::info!(node = self.node, "node decommissioned: nothing of Divvy is left");
        self.readiness.set(Condition::Decommissioned, Ok(()));
    }

    /// Reports a new reason for waiting, then waits for the retry interval.
    async fn wait(&mut self, why: String) {
        if self.last_reason != why {
            tracing::warn!(why, "not decommissioned yet");
            self.readiness.set(Condition::Decommissioned, Err(why.clone()));
            self.last_reason = why;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }

    async fn remove(&self) -> Result<(), DecommissionError> {
        self.remove_slices()
            .await
            .map_err(|cause| DecommissionError::Slices { node: self.node.clone(), cause: Box::new(cause) })?;
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

    /// Removes CDI files of claims whose record was lost.
    fn remove_claim_files(&self) -> Result<(), DecommissionError> {
        let dir = &self.paths.cdi_dir;
        let prefix = format!("{DRIVER}-claim_");
        let entries = match std::fs::read_dir(dir) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(|cause| DecommissionError::File { path: dir.clone(), cause })?,
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)) {
                std::fs::remove_file(&path).map_err(|cause| DecommissionError::File { path, cause })?;
            }
        }
        Ok(())
    }
}

/// Removes a directory and its contents. In a pod it may be a mount point, which stays as an empty
/// directory.
fn remove_dir(dir: &Path) -> Result<(), DecommissionError> {
    match divvy_mps_supervisor::tree::remove(dir) {
        Ok(()) => Ok(()),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(cause) if is_mount_point(&cause) && is_empty(dir) => Ok(()),
        Err(cause) => Err(DecommissionError::File { path: dir.to_owned(), cause }),
    }
}

/// Whether the directory cannot be removed because it is a mount point or its parent is read-only.
fn is_mount_point(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::ReadOnlyFilesystem)
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}
