//! `divvy top`: the shares of a node, what each asked for and what it gets.
//!
//! The node daemon audits every share once a second and leaves what it saw in files of the run directory
//! ([`divvy_api::top`]); this shows them. So it needs no GPU driver and opens no page that a tenant can write, and what it
//! shows is what the daemon went by. A share that is gone is left out, one that nobody looks at is told of as such.
//!
//! It runs on the node; for another one it has kubectl run it there.

mod elsewhere;
mod terminal;
mod view;

use anyhow::{Context, Result, bail};
use divvy_api::top::{DIRECTORY, GpuNow, ShareNow, VERSION};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

/// See the command's help.
#[derive(clap::Args)]
pub(crate) struct TopArguments {
    /// Print once instead of again each second; so it is where the output is no terminal
    #[arg(long)]
    once: bool,
    /// One JSON object for each share, a line each
    #[arg(long)]
    json: bool,
    /// A node of the cluster, instead of this machine: kubectl runs the command in the pod of its daemon
    #[arg(long, value_name = "NAME", conflicts_with = "run_dir")]
    node: Option<String>,
    /// What the node daemon has for --run-dir
    #[arg(long, value_name = "DIR", default_value = "/run/divvy")]
    run_dir: PathBuf,
}

/// Between two looks: the daemon's own.
const EVERY: Duration = Duration::from_secs(1);
/// Where shares have their pages, below the run directory.
const PAGES: &str = "shares";

/// What is shown.
#[derive(Debug, Default)]
struct Shown {
    /// By device, and in it by claim.
    shares: Vec<ShareNow>,
    /// Shares that nobody has looked at yet, as `claim UID/share`.
    unseen: Vec<String>,
}

/// Shows the shares.
pub(crate) fn run(arguments: &TopArguments) -> Result<ExitCode> {
    if let Some(node) = &arguments.node {
        return elsewhere::run(node, arguments);
    }
    if arguments.once || !io::stdout().is_terminal() {
        print(&mut io::stdout().lock(), &look(&arguments.run_dir)?, arguments.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let keys = terminal::Keys::read();
    loop {
        let mut text = Vec::new();
        print(&mut text, &look(&arguments.run_dir)?, arguments.json)?;
        if arguments.json {
            io::stdout().write_all(&text)?;
        } else {
            terminal::show(&text)?;
        }
        if keys.ends_within(EVERY) {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn print(out: &mut impl Write, shown: &Shown, json: bool) -> Result<()> {
    if !json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        return Ok(out.write_all(view::text(shown, now.as_millis() as u64).as_bytes())?);
    }
    for share in &shown.shares {
        writeln!(out, "{}", serde_json::to_string(share)?)?;
    }
    Ok(())
}

/// Reads what the daemon left.
fn look(run_dir: &Path) -> Result<Shown> {
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
        if path.extension().is_some_and(|end| end == "json") {
            shown.shares.extend(read(&path)?.shares);
        }
    }
    let name = |share: &ShareNow| format!("{}/{}", share.claim_uid, share.share);
    shown.shares.retain(|share| held.contains(&name(share)));
    shown.unseen = held;
    shown.unseen.retain(|held| shown.shares.iter().all(|share| name(share) != *held));
    shown.unseen.sort();
    let order = |share: &ShareNow| {
        let ShareNow { gpu, mig, namespace, claim, claim_uid, share, .. } = share.clone();
        (gpu, mig, namespace, claim, claim_uid, share)
    };
    shown.shares.sort_by_key(order);
    Ok(shown)
}

fn names(entries: std::fs::ReadDir) -> Result<Vec<String>> {
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

fn read(path: &Path) -> Result<GpuNow> {
    let text = std::fs::read(path).with_context(|| path.display().to_string())?;
    let version = serde_json::from_slice::<serde_json::Value>(&text)
        .with_context(|| path.display().to_string())?["version"]
        .as_u64();
    if version != Some(VERSION.into()) {
        bail!("{} is of another version of divvy-node; use the divvy in its image", path.display());
    }
    serde_json::from_slice(&text).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests;
