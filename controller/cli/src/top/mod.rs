//! `divvy top`: request, limit and usage of the shares of a node.
//!
//! The node daemon audits every share once a second and writes the results to files in its run
//! directory ([`divvy_api::top`]). This command only reads these files: it needs no GPU driver,
//! opens no page that a tenant can write, and shows the values on which the daemon acts. For
//! another node, kubectl runs it there.

mod live_view;
pub(crate) mod remote;
mod snapshot;
mod table;
mod terminal;

use anyhow::Result;
use live_view::LiveView;
use snapshot::{Snapshot, read_snapshot};
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use table::{NodeTime, Period, SortKey};
use terminal::{Event, Terminal};

const AFTER_HELP: &str = "\
Examples:
  divvy top
  divvy top --node node-1
  divvy top --once -o json | jq .claim";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct TopArguments {
    /// Print once instead of every second; the default if the output is not a terminal
    #[arg(long)]
    once: bool,
    /// Print one JSON object per line and share
    #[arg(long, hide = true)]
    json: bool,
    /// Format of the output; JSON has one object per line and share
    #[arg(short, long, value_enum, default_value = "text", conflicts_with = "json")]
    output: Output,
    /// Show running totals of GPU time and hand-overs, since the node daemon first saw each share.
    /// JSON always has them
    #[arg(long, conflicts_with = "json")]
    totals: bool,
    /// Show this node of the cluster instead of this machine: kubectl runs the command in the pod
    /// of its daemon
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// The node daemon's --run-dir
    #[arg(long, value_name = "DIR", default_value = "/run/divvy")]
    run_dir: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

impl TopArguments {
    fn json(&self) -> bool {
        self.json || self.output == Output::Json
    }

    fn period(&self) -> Period {
        if self.totals { Period::Total } else { Period::LastSecond }
    }
}

/// Time between two updates. The daemon writes its files as often.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);

/// Shows the shares.
pub(crate) fn run(arguments: &TopArguments) -> Result<ExitCode> {
    if let Some(node) = &arguments.node {
        return remote::run(node, arguments);
    }
    if arguments.once || !io::stdout().is_terminal() {
        return once(arguments);
    }
    if arguments.json() {
        loop {
            once(arguments)?;
            std::thread::sleep(UPDATE_INTERVAL);
        }
    }
    // The live view waits for signals and keys at once, hence the runtime.
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(live(arguments))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints all shares once. Fails afterwards if a file cannot be read.
fn once(arguments: &TopArguments) -> Result<ExitCode> {
    let snapshot = read_snapshot(&arguments.run_dir)?;
    print(&mut io::stdout().lock(), &snapshot, arguments.json(), arguments.period())?;
    snapshot.unreadable.iter().for_each(|error| eprintln!("divvy: {error}"));
    Ok(if snapshot.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(out: &mut impl Write, snapshot: &Snapshot, json: bool, period: Period) -> Result<()> {
    if !json {
        let text = table::render(snapshot, &NodeTime::now(), SortKey::Claim, period);
        return Ok(out.write_all(text.as_bytes())?);
    }
    for share in &snapshot.shares {
        writeln!(out, "{}", serde_json::to_string(share)?)?;
    }
    Ok(())
}

async fn live(arguments: &TopArguments) -> Result<()> {
    let mut view = LiveView::new(arguments.period());
    let mut terminal = Terminal::enter()?;
    loop {
        let snapshot = read_snapshot(&arguments.run_dir)?;
        terminal.show(&view.lines(&snapshot, &NodeTime::now(), terminal.size()))?;
        match terminal.event(UPDATE_INTERVAL).await? {
            Event::Quit => return Ok(()),
            Event::Keys(keys) if view.press(&keys) => return Ok(()),
            Event::Keys(_) | Event::Redraw => {}
        }
    }
}

#[cfg(test)]
mod tests;
