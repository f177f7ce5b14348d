//! `divvy-bench`: what preparing a claim costs, against what it cannot avoid.
//!
//! One line per figure, `name<TAB>value<TAB>unit`. Machines are noisy, so every
//! figure is the median of interleaved rounds of the thing and its floor, with
//! the tenth and ninetieth percentile beside it; ratios are what to compare.
//!
//! The daemon is the binary as the image ships it, built first; the API server
//! is another process, and the kubelet's part is played by this one.

mod agent;
mod api;
mod compute;
mod controller;
mod figures;
mod fleet;
mod floor;
mod overcommit;
mod program;
mod shared;
mod shares;
mod stats;
mod turns;
mod world;

use anyhow::{Context, Result, bail};
use clap::Parser;
use std::path::PathBuf;
use std::process::Command;

/// Measure divvy-node against its floor; one line per figure: name, value, unit.
#[derive(Parser)]
#[command(name = "divvy-bench", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Part>,
    /// Measure this divvy-node instead of building the shipping one
    #[arg(long, value_name = "FILE")]
    node: Option<PathBuf>,
    /// Measure this divvy-controller instead of building the shipping one
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
    /// Run this divvy-keeper instead of building one
    #[arg(long, value_name = "FILE")]
    keeper: Option<PathBuf>,
    /// Where files on a disk are measured
    #[arg(long, value_name = "DIR", default_value = "target")]
    disk_dir: PathBuf,
    /// Where files in memory are measured
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    tmpfs_dir: PathBuf,
    /// Rounds of each figure
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Samples of each round
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(5..))]
    samples: u32,
    /// Only these parts
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = [
            "gpu", "mig", "shared", "parallel", "held", "burst",
            "memory", "start", "pool", "controller", "webhook",
        ]
    )]
    only: Vec<String>,
    /// Serve the API in this directory until standard input ends (for the benchmark's own use)
    #[arg(long, value_name = "DIR", hide = true)]
    serve_api: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Part {
    /// What the library of a share costs a CUDA program, and whether its limit is exact
    Shares(shares::Arguments),
    /// Whether shares of compute time are what was asked: a matrix of requests, kernels and tenants
    Compute(compute::Arguments),
    /// Shares that hold more memory than their GPU has: what gets done, and how soon idle pools give back theirs
    Overcommit(overcommit::Arguments),
    /// What the node's agent costs, and how soon it gives back what the dead had
    Agent(agent::Arguments),
}

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let Some(code) = divvy_sim::command::multicall() {
        std::process::exit(if code == std::process::ExitCode::SUCCESS { 0 } else { 1 });
    }
    let arguments = Arguments::parse();
    match &arguments.command {
        Some(Part::Shares(part)) => return shares::all(part),
        Some(Part::Compute(part)) => return compute::all(part),
        Some(Part::Overcommit(part)) => return overcommit::all(part),
        Some(Part::Agent(part)) => return agent::all(part),
        None => {}
    }
    if let Some(dir) = &arguments.serve_api {
        return runtime.block_on(api::serve(dir));
    }
    let node = match &arguments.node {
        Some(node) => node.clone(),
        None => shipped()?,
    };
    let size = std::fs::metadata(&node).with_context(|| format!("no {}", node.display()))?.len();
    stats::line("node_binary_mib", size as f64 / (1024.0 * 1024.0), "MiB");
    runtime.block_on(figures::all(&figures::Plan {
        node,
        disk: std::path::absolute(&arguments.disk_dir)?,
        tmpfs: arguments.tmpfs_dir,
        rounds: arguments.rounds,
        samples: arguments.samples,
        only: arguments.only,
        controller: arguments.controller,
        keeper: arguments.keeper,
    }))
}

/// Builds the daemon and the hook as the image ships them.
fn shipped() -> Result<PathBuf> {
    build("divvy-hook", "divvy-hook")?;
    build("divvy-driver", "divvy-node")
}

/// Builds a program as the image ships it.
pub(crate) fn build(package: &str, binary: &str) -> Result<PathBuf> {
    built(cargo().args(["--profile", "ship", "-p", package]), binary)
}

/// Builds a program that brings its C library, as the image ships it.
pub(crate) fn build_static(package: &str, binary: &str) -> Result<PathBuf> {
    // With a target the flags are the program's alone, not those of build scripts.
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut cargo = cargo();
    cargo.args(["--release", "--target", &target, "-p", package]);
    built(cargo.env("RUSTFLAGS", "-C target-feature=+crt-static"), binary)
}

fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--message-format", "json-render-diagnostics"]);
    cargo
}

fn built(cargo: &mut Command, binary: &str) -> Result<PathBuf> {
    eprintln!("building {binary} as it ships (a few minutes the first time)");
    let out = cargo
        .args(["--bin", binary])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !out.status.success() {
        bail!("building {binary} failed");
    }
    let messages = String::from_utf8_lossy(&out.stdout);
    let executable = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == binary)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    executable.with_context(|| format!("cargo did not say where {binary} is"))
}
