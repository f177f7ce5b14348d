//! The `divvy-escape` command line.

use crate::case_run::Enforcement;
use crate::corpus::{Corpus, SAMPLES};
use crate::isolation_cases::IsolationCase;
use crate::node::{self, MIB};
use crate::programs::Programs;
use crate::report::{self, CaseResult, Controls};
use crate::watch::Watch;
use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use divvy_pages::GpuUuid;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

/// The time in which the node's agent must act on an attack that cannot be prevented: the
/// documented five seconds.
const DETECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// Run every known attack against the limits of a share.
#[derive(Parser)]
#[command(name = "divvy-escape", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the isolation cases, each with its protection and without
    Run(Run),
    /// Run ordinary programs with the library and without, and compare their output
    Corpus {
        /// The library to preload
        #[arg(long, value_name = "FILE")]
        library: PathBuf,
        /// Run only programs with this word in their name
        #[arg(long, value_name = "WORD")]
        only: Option<String>,
    },
    /// Write the pages of a share into a directory
    Pages {
        directory: PathBuf,
        /// UUID of the GPU
        #[arg(long)]
        gpu: String,
        #[arg(long)]
        limit_mib: u64,
        #[arg(long)]
        physical_mib: u64,
        /// The claim of the share: the name of the directory above its pages
        #[arg(long, default_value = "claim")]
        claim: String,
        /// Ceiling of the share, in per cent of the GPU's time; 0 for no ceiling
        #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100))]
        cores: u32,
    },
    /// Run the node's agent until standard input ends, and print its findings
    Agent {
        /// Directory that contains the pages, in shares/CLAIM/SHARE
        directory: PathBuf,
        /// Root of the GPU driver's files
        #[arg(long, default_value = "/")]
        driver_root: PathBuf,
        /// Also print the measured compute time of each share
        #[arg(long)]
        audits: bool,
    },
    /// Use the GPU without a driver library (internal to the suite)
    #[command(hide = true)]
    Raw { goal_mib: u64, root: PathBuf },
}

#[derive(clap::Args)]
struct Run {
    /// The library to preload, which enforces the limit
    #[arg(long, value_name = "FILE")]
    library: PathBuf,
    /// Variable that sets the limit of another library: NAME=VALUE with {mib} or {bytes}; repeatable
    #[arg(long = "limit", value_name = "NAME=VALUE", value_parser = assignment)]
    limit: Vec<(String, String)>,
    /// The simulated driver as a static library, for the cases with static binaries
    #[arg(long, value_name = "FILE")]
    archive: Option<PathBuf>,
    /// Run only cases with this word in their name
    #[arg(long, value_name = "WORD")]
    only: Option<String>,
    /// Number of cases to run in parallel, each on its own node
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    jobs: usize,
    /// Skip the run without the protection for cases that are recorded in this file and unchanged
    #[arg(long, value_name = "FILE")]
    controls: Option<PathBuf>,
    /// Record the cases whose attack succeeded without the protection in this file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "controls"])]
    record_controls: Option<PathBuf>,
    /// Write the table into this page of the documentation
    #[arg(long, value_name = "PAGE", conflicts_with = "only")]
    table: Option<PathBuf>,
    /// Fail if the table in this page differs from the results of the run
    #[arg(long, value_name = "PAGE", conflicts_with = "only")]
    check: Option<PathBuf>,
}

fn assignment(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Parses the command line and runs the command.
pub fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Raw { goal_mib, root } => crate::raw::hold(goal_mib, &root),
        Command::Run(run) => self::run(&run),
        Command::Pages { directory, gpu, limit_mib, physical_mib, claim, cores } => {
            let gpu = GpuUuid::parse(&gpu).context("--gpu is not a UUID")?;
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
    let library =
        run.library.canonicalize().with_context(|| format!("cannot find {}", run.library.display()))?;
    let enforcement = Enforcement { library, environment: run.limit.clone() };
    let (mut good, mut bad) = (0, 0);
    let controls = Controls::read(run.controls.as_deref())?;
    let run_case = |case| report::run(case, &programs, &enforcement, DETECTION_TIMEOUT, &controls);
    let mut results = run_all(report::selected(run.only.as_deref()), run.jobs, run_case);
    // Parallel cases slow each other down, and stalls delay the agent: retry failures one by one.
    for result in results.iter_mut().filter(|result| !result.passed()) {
        *result = run_case(result.case);
        println!("retried alone: {result}");
    }
    for result in &results {
        if result.passed() { good += 1 } else { bad += 1 }
    }
    println!("{good} passed, {bad} failed");
    if let Some(file) = &run.record_controls {
        std::fs::write(file, controls.text(&results))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    if let Some(page) = run.table.as_ref().or(run.check.as_ref()) {
        let before =
            std::fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
        let after = report::with_table(&before, &report::table(&results))?;
        if run.table.is_some() {
            std::fs::write(page, after)?;
        } else {
            ensure!(before == after, "the table in {} differs from the results of this run", page.display());
        }
    }
    ensure!(good + bad > 0, "no case has that word in its name");
    ensure!(bad == 0, "{bad} cases failed");
    Ok(())
}

/// Runs cases, `jobs` at a time, and prints the results in the order of the cases.
fn run_all(
    cases: impl Iterator<Item = &'static IsolationCase> + Send,
    jobs: usize,
    run_case: impl Fn(&'static IsolationCase) -> CaseResult + Sync,
) -> Vec<CaseResult> {
    let cases = Mutex::new(cases.enumerate());
    let (send, finished) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            let send = send.clone();
            scope.spawn(|| {
                let (cases, send) = (&cases, send);
                // The lock is released before a case runs, so a panic in a case does not poison it.
                let next = || cases.lock().ok()?.next();
                while let Some((index, case)) = next() {
                    // The receiver lives until all threads have ended.
                    let _ = send.send((index, run_case(case)));
                }
            });
        }
        drop(send);
        let (mut out_of_order, mut results) = (BTreeMap::new(), Vec::new());
        for (index, result) in finished {
            out_of_order.insert(index, result);
            while let Some(result) = out_of_order.remove(&results.len()) {
                println!("{result}");
                results.push(result);
            }
        }
        results
    })
}

fn corpus(library: &Path, only: Option<&str>) -> Result<()> {
    let library = library.canonicalize().with_context(|| format!("cannot find {}", library.display()))?;
    let corpus = Corpus::start(&library)?;
    let (mut good, mut bad) = (0, 0);
    for sample in SAMPLES.iter().filter(|sample| only.is_none_or(|word| sample.name.contains(word))) {
        match corpus.compare(sample) {
            Ok(None) => {
                println!("ok   {}", sample.name);
                good += 1;
            }
            Ok(Some(difference)) => {
                println!("FAIL {}\n{difference}", sample.name);
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
