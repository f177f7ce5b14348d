//! `divvy top`: the shares of a node, what each asked for and what it gets.
//!
//! The node daemon audits every share once a second and leaves what it saw in files of the run directory
//! ([`divvy_api::top`]); this shows them. So it needs no GPU driver and opens no page that a tenant can write, and what it
//! shows is what the daemon went by. A share that is gone is left out, one that nobody looks at is told of as such.
//!
//! It runs on the node; for another one it has kubectl run it there. In a terminal it is a live view: [`screen`] decides what
//! stands where and what keys do, [`terminal`] does it.

mod elsewhere;
mod look;
mod screen;
mod terminal;
mod view;

use anyhow::Result;
use look::{Shown, look};
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use terminal::{Event, Terminal};
use view::{Moment, Order};

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
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// What the node daemon has for --run-dir
    #[arg(long, value_name = "DIR", default_value = "/run/divvy")]
    run_dir: PathBuf,
}

/// Between two looks: the daemon's own.
const EVERY: Duration = Duration::from_secs(1);

/// Shows the shares.
pub(crate) fn run(arguments: &TopArguments) -> Result<ExitCode> {
    if let Some(node) = &arguments.node {
        return elsewhere::run(node, arguments);
    }
    if arguments.once || !io::stdout().is_terminal() {
        return once(arguments);
    }
    if arguments.json {
        loop {
            once(arguments)?;
            std::thread::sleep(EVERY);
        }
    }
    // Signals and keys are waited for together.
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(live(arguments))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints what there is; what cannot be shown fails it, after all that can.
fn once(arguments: &TopArguments) -> Result<ExitCode> {
    let shown = look(&arguments.run_dir)?;
    print(&mut io::stdout().lock(), &shown, arguments.json)?;
    shown.unreadable.iter().for_each(|why| eprintln!("divvy: {why}"));
    Ok(if shown.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(out: &mut impl Write, shown: &Shown, json: bool) -> Result<()> {
    if !json {
        return Ok(out.write_all(view::text(shown, &Moment::now(), Order::Claim).as_bytes())?);
    }
    for share in &shown.shares {
        writeln!(out, "{}", serde_json::to_string(share)?)?;
    }
    Ok(())
}

async fn live(arguments: &TopArguments) -> Result<()> {
    let mut screen = screen::Screen::default();
    let mut terminal = Terminal::enter()?;
    loop {
        let shown = look(&arguments.run_dir)?;
        terminal.show(&screen.lines(&shown, &Moment::now(), terminal.size()))?;
        match terminal.event(EVERY).await? {
            Event::End => return Ok(()),
            Event::Keys(keys) if screen.press(&keys) => return Ok(()),
            Event::Keys(_) | Event::Again => {}
        }
    }
}

#[cfg(test)]
mod tests;
