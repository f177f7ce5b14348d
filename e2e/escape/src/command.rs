//! `divvy-escape`: the suite from the command line.

use crate::corpus::{Corpus, SAMPLES};
use crate::node::{self, MIB};
use crate::programs::Programs;
use crate::report::{self, Line};
use crate::rows::Row;
use crate::trial::Enforcement;
use crate::watch::Watch;
use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use divvy_pages::GpuUuid;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

/// How long the node's agent has to act upon what cannot be prevented.
const DEADLINE: Duration = Duration::from_secs(5);

/// Try every known way past the limits of a share.
#[derive(Parser)]
#[command(name = "divvy-escape", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Play the rows, each with what should stop it and without
    Run(Run),
    /// Run programs of all sorts with the library and without, and compare what they say
    Corpus {
        /// The library, to be preloaded
        #[arg(long, value_name = "FILE")]
        library: PathBuf,
        /// Only programs with this word in their name
        #[arg(long, value_name = "WORD")]
        only: Option<String>,
    },
    /// Write the pages of a share of a GPU into a directory
    Pages {
        directory: PathBuf,
        /// UUID of the GPU
        #[arg(long)]
        gpu: String,
        #[arg(long)]
        limit_mib: u64,
        #[arg(long)]
        physical_mib: u64,
        /// Whose share it is: what the directory above its pages is called
        #[arg(long, default_value = "claim")]
        claim: String,
        /// Per cent of the GPU's time that the share has, and no more; 0: no limit of time
        #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100))]
        cores: u32,
    },
    /// Be the node's agent until standard input ends, and print what it finds
    Agent {
        /// Where pages lie, below shares/CLAIM/SHARE
        directory: PathBuf,
        /// Root of the GPU driver's files
        #[arg(long, default_value = "/")]
        driver_root: PathBuf,
        /// Print what it sees of each share's compute time too
        #[arg(long)]
        audits: bool,
    },
    /// Use the GPU without a driver library (for the suite's own use)
    #[command(hide = true)]
    Raw { goal_mib: u64, root: PathBuf },
}

#[derive(clap::Args)]
struct Run {
    /// The library that keeps the limit, to be preloaded
    #[arg(long, value_name = "FILE")]
    library: PathBuf,
    /// How a library that is not Divvy's is told the limit: NAME=VALUE with {mib} or {bytes}; may be repeated
    #[arg(long = "limit", value_name = "NAME=VALUE", value_parser = assignment)]
    limit: Vec<(String, String)>,
    /// The simulated driver as a static library, for the row of static binaries
    #[arg(long, value_name = "FILE")]
    archive: Option<PathBuf>,
    /// Only rows with this word in their name
    #[arg(long, value_name = "WORD")]
    only: Option<String>,
    /// So many rows side by side; each has a node of its own
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    jobs: usize,
    /// Write the table into this page of the documentation
    #[arg(long, value_name = "PAGE", conflicts_with = "only")]
    table: Option<PathBuf>,
    /// Fail if the table in this page is not what came of the run
    #[arg(long, value_name = "PAGE", conflicts_with = "only")]
    check: Option<PathBuf>,
}

fn assignment(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write it as NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// The program.
pub fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Raw { goal_mib, root } => crate::raw::hold(goal_mib, &root),
        Command::Run(run) => self::run(&run),
        Command::Pages { directory, gpu, limit_mib, physical_mib, claim, cores } => {
            let gpu = GpuUuid::parse(&gpu).context("not a UUID")?;
            let compute = node::Compute { cores, ceiling: cores, ..node::Compute::default() };
            let (limit, physical) = (limit_mib * MIB, physical_mib * MIB);
            node::write_pages(&directory, &claim, "share", (gpu, None), limit, physical, compute)
        }
        Command::Agent { directory, driver_root, audits } => Watch::serve(&driver_root, &directory, audits),
        Command::Corpus { library, only } => self::corpus(&library, only.as_deref()),
    }
}

fn run(run: &Run) -> Result<()> {
    let work = tempfile::Builder::new().prefix("escape-").tempdir()?;
    let programs = Programs::build(work.path(), run.archive.as_deref(), &std::env::current_exe()?)?;
    let library = run.library.canonicalize().with_context(|| format!("no {}", run.library.display()))?;
    let enforcement = Enforcement { library, environment: run.limit.clone() };
    let (mut good, mut bad) = (0, 0);
    let play = |row| report::play(row, &programs, &enforcement, DEADLINE);
    let mut played = play_all(report::chosen(run.only.as_deref()), run.jobs, play);
    // A machine that stands still for a second makes a node late, and rows side by side are in each other's way.
    for line in played.iter_mut().filter(|line| !line.good()) {
        *line = play(line.row);
        println!("once more, alone: {line}");
    }
    for line in &played {
        if line.good() { good += 1 } else { bad += 1 }
    }
    println!("{good} passed, {bad} failed");
    if let Some(page) = run.table.as_ref().or(run.check.as_ref()) {
        let before = std::fs::read_to_string(page).with_context(|| format!("no {}", page.display()))?;
        let after = report::with_table(&before, &report::table(&played))?;
        if run.table.is_some() {
            std::fs::write(page, after)?;
        } else {
            ensure!(before == after, "the table in {} is not what came of this run", page.display());
        }
    }
    ensure!(good + bad > 0, "no row has that word in its name");
    ensure!(bad == 0, "{bad} rows failed");
    Ok(())
}

/// Plays rows, several at a time, and prints each when it and those before it are played.
fn play_all(
    rows: impl Iterator<Item = &'static Row> + Send,
    jobs: usize,
    play: impl Fn(&'static Row) -> Line + Sync,
) -> Vec<Line> {
    let rows = Mutex::new(rows.enumerate());
    let (send, played) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            let send = send.clone();
            scope.spawn(|| {
                let (rows, send) = (&rows, send);
                // A thread that panics has not held it while it played.
                let next = || rows.lock().ok()?.next();
                while let Some((at, row)) = next() {
                    // Whoever prints waits for all.
                    let _ = send.send((at, play(row)));
                }
            });
        }
        drop(send);
        let (mut early, mut lines) = (BTreeMap::new(), Vec::new());
        for (at, line) in played {
            early.insert(at, line);
            while let Some(line) = early.remove(&lines.len()) {
                println!("{line}");
                lines.push(line);
            }
        }
        lines
    })
}

fn corpus(library: &Path, only: Option<&str>) -> Result<()> {
    let library = library.canonicalize().with_context(|| format!("no {}", library.display()))?;
    let corpus = Corpus::start(&library)?;
    let (mut good, mut bad) = (0, 0);
    for sample in SAMPLES.iter().filter(|sample| only.is_none_or(|word| sample.name.contains(word))) {
        match corpus.compare(sample) {
            Ok(None) => {
                println!("ok   {}", sample.name);
                good += 1;
            }
            Ok(Some(why)) => {
                println!("FAIL {}\n{why}", sample.name);
                bad += 1;
            }
            Err(error) => {
                println!("FAIL {}: {error:#}", sample.name);
                bad += 1;
            }
        }
    }
    println!("{good} passed, {bad} failed");
    ensure!(good + bad > 0, "no program has that word in its name");
    ensure!(bad == 0, "{bad} programs differ");
    Ok(())
}
