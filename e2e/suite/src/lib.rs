//! Scenarios against a real cluster: pods that ask for GPUs as users do, and
//! what happens to them when parts of the node die.
//!
//! A scenario is a function that puts objects into the cluster and looks at
//! three things that cannot agree by chance: what the API server says, what a
//! container sees through `nvidia-smi`, and what the GPUs themselves hold. After
//! each one its objects are deleted, and it has passed only when every GPU is
//! whole again.

mod objects;
mod scenarios;
mod seen;
mod world;

use anyhow::{Context, Result};
use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;
use world::World;

/// Runs scenarios against the cluster that e2e/cluster/run has started.
#[derive(Clone, Debug, Parser)]
#[command(name = "divvy-e2e", version)]
pub struct Args {
    /// The cluster's directory, as e2e/cluster/run made it
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Starts and kills parts of the cluster
    #[arg(long, value_name = "FILE", default_value = "e2e/cluster/ctl")]
    pub ctl: PathBuf,
    /// The simulator's command
    #[arg(long, value_name = "FILE", default_value = "target/debug/divvy-sim")]
    pub sim: PathBuf,
    /// The repository's manifests
    #[arg(long, value_name = "DIR", default_value = "manifests")]
    pub manifests: PathBuf,
    /// Kubeconfig of an administrator [default: admin.kubeconfig in DIR]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The scenarios for a cluster without partitionable devices and consumable capacity
    #[arg(long)]
    pub gates_off: bool,
    /// The scenarios of an upgrade from a version before shares, which is installed
    #[arg(long, conflicts_with = "gates_off")]
    pub from: bool,
    /// Only scenarios whose name holds this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
    /// Print the scenarios' names and end
    #[arg(long)]
    pub list: bool,
}

/// The command: one line per scenario, a sum, and an exit code that says the same.
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

/// Runs what is asked for and answers how many scenarios failed.
async fn run(args: Args) -> Result<usize> {
    let all = match (args.gates_off, args.from) {
        (true, _) => scenarios::GATES_OFF,
        (_, true) => scenarios::FROM,
        _ => scenarios::ALL,
    };
    let chosen: Vec<_> = all.iter().filter(|scenario| scenario.name.contains(&args.only)).collect();
    if args.list {
        chosen.iter().for_each(|scenario| println!("{}", scenario.name));
        return Ok(0);
    }
    anyhow::ensure!(!chosen.is_empty(), "no scenario has {:?} in its name; --list prints them", args.only);
    let world = World::connect(&args).await?;
    world.published().await.context("waiting for the first ResourceSlices")?;
    let mut failed = 0;
    for scenario in &chosen {
        let began = Instant::now();
        let mut result = (scenario.run)(&world).await;
        if result.is_err() {
            eprintln!("{}", world.describe().await);
        }
        let cleaned = world.clean().await;
        result = result.and(cleaned.context("giving everything back"));
        let seconds = began.elapsed().as_secs_f32();
        match result {
            Ok(()) => println!("ok      {:5.1} s  {}", seconds, scenario.name),
            Err(error) => {
                failed += 1;
                println!("FAILED  {:5.1} s  {}: {error:#}", seconds, scenario.name);
            }
        }
    }
    println!("{} passed, {failed} failed", chosen.len() - failed);
    Ok(failed)
}
