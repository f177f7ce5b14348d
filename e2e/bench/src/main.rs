//! `divvy-bench`: benchmarks on simulated GPUs. Without a subcommand it measures the node daemon
//! and the controller.
//!
//! Each figure is the median of several rounds, with p10 and p90. A round measures the operation
//! and its floor in turns, so that their ratio is comparable on a noisy machine. The output format
//! is described in [`stats`].
//!
//! The daemon under test is the binary that the image ships. The API server is a separate process,
//! and this process acts as the kubelet.

mod agent;
mod api_server;
mod artifacts;
mod compute;
mod controller;
mod daemon;
mod interleave;
mod large_cluster;
mod node;
mod overcommit;
mod program;
mod shares;
mod stats;

use anyhow::{Context, Result};
use clap::Parser;
use daemon::Plan;
use std::path::PathBuf;

/// Benchmark divvy-node and the controller; prints one line per figure: name, value, unit
#[derive(Parser)]
#[command(name = "divvy-bench", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Subcommand>,
    /// Measure this divvy-node instead of building the one that the image ships
    #[arg(long, value_name = "FILE")]
    node: Option<PathBuf>,
    /// Measure this divvy-controller instead of building the one that the image ships
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
    /// Run this divvy-mps-supervisor instead of building one
    #[arg(long, value_name = "FILE")]
    supervisor: Option<PathBuf>,
    /// Directory for the measurements of files on a disk
    #[arg(long, value_name = "DIR", default_value = "target")]
    disk_dir: PathBuf,
    /// Directory for the measurements of files in memory
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    tmpfs_dir: PathBuf,
    /// Number of rounds per figure
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of samples per round
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(5..))]
    samples: u32,
    /// Run only these parts
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = [
            "gpu", "mig", "release", "shared", "parallel", "held", "burst",
            "memory", "start", "pool", "controller", "webhook",
        ]
    )]
    only: Vec<String>,
    /// Run as the API server, with its files in this directory (used by the benchmark itself)
    #[arg(long, value_name = "DIR", hide = true)]
    serve_api: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Subcommand {
    /// Overhead of the interposer library in a CUDA program, and exactness of the memory limit
    Shares(shares::Arguments),
    /// Accuracy of compute-time shares, for combinations of kernels, requests and tenants
    Compute(compute::Arguments),
    /// Memory overcommitment: throughput of shares that exceed the GPU's memory, and reclaim of idle pools
    Overcommit(overcommit::Arguments),
    /// CPU time of the node's agent, and how soon it releases the memory of a dead container
    Agent(agent::Arguments),
}

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let Some(code) = divvy_sim::command::multicall() {
        std::process::exit(if code == std::process::ExitCode::SUCCESS { 0 } else { 1 });
    }
    let arguments = Arguments::parse();
    match &arguments.command {
        Some(Subcommand::Shares(part)) => return shares::run(part),
        Some(Subcommand::Compute(part)) => return compute::run(part),
        Some(Subcommand::Overcommit(part)) => return overcommit::run(part),
        Some(Subcommand::Agent(part)) => return agent::run(part),
        None => {}
    }
    if let Some(dir) = &arguments.serve_api {
        return runtime.block_on(api_server::serve(dir));
    }
    let node = match &arguments.node {
        Some(node) => node.clone(),
        None => artifacts::node_daemon()?,
    };
    let size = std::fs::metadata(&node).with_context(|| format!("no {}", node.display()))?.len();
    stats::line("node_binary_mib", size as f64 / (1024.0 * 1024.0), "MiB");
    runtime.block_on(run(&Plan {
        node,
        disk: std::path::absolute(&arguments.disk_dir)?,
        tmpfs: arguments.tmpfs_dir,
        rounds: arguments.rounds,
        samples: arguments.samples,
        only: arguments.only,
        controller: arguments.controller,
        supervisor: arguments.supervisor,
    }))
}

/// Runs the selected parts of the default benchmark.
async fn run(plan: &Plan) -> Result<()> {
    let selected = |part: &str| program::is_selected(&plan.only, part);
    if selected("gpu") {
        daemon::gpu(plan, &plan.tmpfs, "tmpfs").await.context("gpu on tmpfs")?;
        daemon::gpu(plan, &plan.disk, "disk").await.context("gpu on disk")?;
    }
    if selected("mig") {
        daemon::mig(plan).await.context("mig")?;
    }
    if selected("release") {
        daemon::release(plan).await.context("release")?;
    }
    if selected("shared") {
        daemon::shared(plan).await.context("shared")?;
    }
    if selected("parallel") {
        daemon::parallel(plan).await.context("parallel")?;
    }
    if selected("held") {
        daemon::held(plan).await.context("held")?;
    }
    if selected("burst") {
        daemon::burst(plan).await.context("burst")?;
    }
    if selected("memory") {
        daemon::memory(plan).await.context("memory")?;
    }
    if selected("start") {
        daemon::start(plan).await.context("start")?;
    }
    if selected("pool") {
        daemon::pool(plan).await.context("pool")?;
    }
    if selected("controller") {
        controller::memory(plan).await.context("controller")?;
    }
    if selected("webhook") {
        controller::webhook(plan).await.context("webhook")?;
    }
    Ok(())
}
