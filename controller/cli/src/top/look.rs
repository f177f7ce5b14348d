//! What the daemon left in its run directory, read.

use anyhow::{Context, Result, ensure};
use divvy_api::top::{DIRECTORY, GpuNow, ShareNow, VERSION};
use std::io;
use std::path::Path;

/// Where shares have their pages, below the run directory.
const PAGES: &str = "shares";

/// What is shown.
#[derive(Debug, Default)]
pub(super) struct Shown {
    /// By device, and in it by claim.
    pub(super) shares: Vec<ShareNow>,
    /// Shares that nobody has looked at yet, as `claim UID/share`.
    pub(super) unseen: Vec<String>,
    /// Why the shares of a GPU are not among them, each with its file.
    pub(super) unreadable: Vec<String>,
}

/// Reads all files. One that cannot be read hides the shares of its GPU and no others.
///
/// # Errors
/// The run directory is not there, or not for this user.
pub(super) fn look(run_dir: &Path) -> Result<Shown> {
    let how = "run it on the node as root or, from anywhere, as `kubectl divvy top --node NAME`";
    let pages = match std::fs::read_dir(run_dir.join(PAGES)) {
        Ok(entries) => names(entries)?,
        // A node without shares so far.
        Err(cause) if cause.kind() == io::ErrorKind::NotFound && run_dir.is_dir() => Vec::new(),
        Err(cause) => {
            return Err(cause).with_context(|| {
                format!("{} cannot be read, where divvy-node has its shares; {how}", run_dir.display())
            });
        }
    };
    let mut held = Vec::new();
    for claim in pages {
        // One that is released meanwhile is gone.
        let Ok(shares) = std::fs::read_dir(run_dir.join(PAGES).join(&claim)) else { continue };
        held.extend(names(shares)?.into_iter().map(|share| format!("{claim}/{share}")));
    }
    let mut shown = Shown::default();
    let files = std::fs::read_dir(run_dir.join(DIRECTORY)).into_iter().flatten();
    for path in files.filter_map(|file| Some(file.ok()?.path())) {
        if path.extension().is_none_or(|end| end != "json") {
            continue;
        }
        match read(&path) {
            Ok(now) => shown.shares.extend(now.shares),
            Err(why) => shown.unreadable.push(format!("{}: {why:#}", path.display())),
        }
    }
    shown.unreadable.sort();
    let name = |share: &ShareNow| format!("{}/{}", share.claim_uid, share.share);
    shown.shares.retain(|share| held.contains(&name(share)));
    shown.unseen = held;
    shown.unseen.retain(|held| shown.shares.iter().all(|share| name(share) != *held));
    shown.unseen.sort();
    shown.shares.sort_by(|one, other| {
        let key = |share: &ShareNow| {
            let ShareNow { gpu, mig, namespace, claim, claim_uid, share, .. } = share.clone();
            (gpu, mig, namespace, claim, claim_uid, share)
        };
        key(one).cmp(&key(other))
    });
    Ok(shown)
}

fn names(entries: std::fs::ReadDir) -> Result<Vec<String>> {
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

fn read(path: &Path) -> Result<GpuNow> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    let text = std::fs::read(path).context("cannot be read")?;
    let damaged = "is damaged, divvy-node writes it anew each second";
    // The version first: of another one, nothing else need be as it is here.
    let Versioned { version } = serde_json::from_slice(&text).context(damaged)?;
    ensure!(
        version == VERSION,
        "is of version {version}, and this divvy knows version {VERSION}; `kubectl divvy top --node NAME` has the daemon's own"
    );
    serde_json::from_slice(&text).context(damaged)
}
