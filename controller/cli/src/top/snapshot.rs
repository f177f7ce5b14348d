//! Reads the daemon's files about shares from its run directory.

use anyhow::{Context, Result, ensure};
use divvy_api::top::{DIRECTORY, GpuUsage, ShareUsage, VERSION};
use std::io;
use std::path::Path;

/// Directory of the shares' pages, below the run directory.
const PAGES: &str = "shares";

/// The shares of a node at one time.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    /// Sorted by device, then by claim.
    pub(super) shares: Vec<ShareUsage>,
    /// Shares that the agent has not sampled yet, as `claim UID/share`.
    pub(super) not_sampled: Vec<String>,
    /// Errors of files that cannot be read, with the path. The shares of those GPUs are missing.
    pub(super) unreadable: Vec<String>,
}

/// Reads all files. A file that cannot be read does not affect the shares of other GPUs.
///
/// # Errors
/// The run directory does not exist, or this user cannot read it.
pub(super) fn read_snapshot(run_dir: &Path) -> Result<Snapshot> {
    let remedy = "run this as root on the node, or `kubectl divvy top --node NAME` anywhere";
    let pages = match std::fs::read_dir(run_dir.join(PAGES)) {
        Ok(entries) => names(entries)?,
        // The node has had no shares so far.
        Err(cause) if cause.kind() == io::ErrorKind::NotFound && run_dir.is_dir() => Vec::new(),
        Err(cause) => {
            return Err(cause).with_context(|| {
                format!("cannot read the run directory of divvy-node, {}; {remedy}", run_dir.display())
            });
        }
    };
    let mut held = Vec::new();
    for claim in pages {
        // The directory is gone if the claim was released meanwhile.
        let Ok(shares) = std::fs::read_dir(run_dir.join(PAGES).join(&claim)) else { continue };
        held.extend(names(shares)?.into_iter().map(|share| format!("{claim}/{share}")));
    }
    let mut snapshot = Snapshot::default();
    let files = std::fs::read_dir(run_dir.join(DIRECTORY)).into_iter().flatten();
    for path in files.filter_map(|file| Some(file.ok()?.path())) {
        if path.extension().is_none_or(|end| end != "json") {
            continue;
        }
        match read(&path) {
            Ok(usage) => snapshot.shares.extend(usage.shares),
            Err(error) => snapshot.unreadable.push(format!("{}: {error:#}", path.display())),
        }
    }
    snapshot.unreadable.sort();
    let name = |share: &ShareUsage| format!("{}/{}", share.claim_uid, share.share);
    snapshot.shares.retain(|share| held.contains(&name(share)));
    snapshot.not_sampled = held;
    snapshot.not_sampled.retain(|held| snapshot.shares.iter().all(|share| name(share) != *held));
    snapshot.not_sampled.sort();
    snapshot.shares.sort_by(|one, other| {
        let key = |share: &ShareUsage| {
            let ShareUsage { gpu, mig, namespace, claim, claim_uid, share, .. } = share.clone();
            (gpu, mig, namespace, claim, claim_uid, share)
        };
        key(one).cmp(&key(other))
    });
    Ok(snapshot)
}

fn names(entries: std::fs::ReadDir) -> Result<Vec<String>> {
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

fn read(path: &Path) -> Result<GpuUsage> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    let text = std::fs::read(path).context("cannot be read")?;
    let damaged = "damaged; divvy-node writes it again every second";
    // The version first: the other fields of another version may differ.
    let Versioned { version } = serde_json::from_slice(&text).context(damaged)?;
    ensure!(
        version == VERSION,
        "has version {version}, but this divvy reads version {VERSION}; \
         `kubectl divvy top --node NAME` uses the divvy of the daemon's image"
    );
    serde_json::from_slice(&text).context(damaged)
}
