//! Scenarios against a real cluster: pods that request GPUs as users do, while parts of the node fail.
//!
//! A scenario creates objects in the cluster and compares three independent sources: the API server, the
//! output of `nvidia-smi` in the containers, and the state of the simulated GPUs. Afterwards its objects are
//! deleted. It passes only if every GPU is then in its initial state again.

mod cluster;
mod objects;
mod observations;
mod scenarios;

use anyhow::{Context, Result};
use clap::Parser;
use cluster::Cluster;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Runs scenarios against the cluster that e2e/cluster/run has started.
#[derive(Clone, Debug, Parser)]
#[command(name = "divvy-e2e", version)]
pub struct Args {
    /// The cluster's directory, created by e2e/cluster/run
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// The script that starts and kills parts of the cluster
    #[arg(long, value_name = "FILE", default_value = "e2e/cluster/ctl")]
    pub ctl: PathBuf,
    /// The simulator's command-line tool
    #[arg(long, value_name = "FILE", default_value = "target/debug/divvy-sim")]
    pub sim: PathBuf,
    /// The repository's manifests
    #[arg(long, value_name = "DIR", default_value = "manifests")]
    pub manifests: PathBuf,
    /// Kubeconfig of an administrator [default: admin.kubeconfig in DIR]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Run the scenarios for a cluster without partitionable devices and consumable capacity
    #[arg(long)]
    pub gates_off: bool,
    /// Run the upgrade scenario; the cluster has an installed version without shares
    #[arg(long, conflicts_with = "gates_off")]
    pub from: bool,
    /// Run the scenarios of the example for Kueue, which is installed
    #[arg(long, conflicts_with_all = ["gates_off", "from"])]
    pub kueue: bool,
    /// Run only scenarios whose name contains TEXT
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
    /// Print the names of the scenarios and exit
    #[arg(long)]
    pub list: bool,
}

/// Runs the command: prints one line per scenario and a summary. The exit code is a failure if a
/// scenario failed.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("divvy-e2e: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(args)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("divvy-e2e: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the selected scenarios. Returns the number of failures.
async fn run(args: Args) -> Result<usize> {
    let all = match (args.gates_off, args.from, args.kueue) {
        (true, ..) => scenarios::GATES_OFF,
        (_, true, _) => scenarios::FROM,
        (.., true) => scenarios::KUEUE,
        _ => scenarios::ALL,
    };
    let selected: Vec<_> = all.iter().filter(|scenario| scenario.name.contains(&args.only)).collect();
    if args.list {
        selected.iter().for_each(|scenario| println!("{}", scenario.name));
        return Ok(0);
    }
    anyhow::ensure!(
        !selected.is_empty(),
        "no scenario name contains {:?}; --list prints the names",
        args.only
    );
    let cluster = Cluster::connect(&args).await?;
    cluster.wait_for_slices().await.context("waiting for the first ResourceSlices")?;
    let mut failed = 0;
    for scenario in &selected {
        let began = Instant::now();
        let mut result = (scenario.run)(&cluster).await;
        if result.is_err() {
            eprintln!("{}", cluster.describe_warnings().await);
        }
        let cleaned = cluster.clean_up().await;
        result = result.and(cleaned.context("cleaning up after the scenario"));
        let seconds = began.elapsed().as_secs_f32();
        match result {
            Ok(()) => println!("ok      {:5.1} s  {}", seconds, scenario.name),
            Err(error) => {
                failed += 1;
                println!("FAILED  {:5.1} s  {}: {error:#}", seconds, scenario.name);
            }
        }
    }
    println!("{} passed, {failed} failed", selected.len() - failed);
    Ok(failed)
}
