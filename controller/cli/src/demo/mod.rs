//! `divvy demo`: the whole journey of a few claims on one simulated node, by
//! default one GPU through all of its modes.
//!
//! Everything that matters is the real thing: the node daemon and the keeper are
//! this binary in other processes, the daemon publishes to an API server over
//! TLS, it is called by a kubelet over its sockets, and it changes GPUs through
//! NVML's C ABI. What stands in: the GPUs with their MPS, the kubelet, the API
//! server, and the scheduler, whose part a first-fit allocator with the same
//! rules plays.
//!
//! The exit code tells the truth: 0 if every claim was allocated, prepared and
//! released, those that must get nothing got nothing, and the GPUs ended as they
//! began; 1 otherwise.

mod claims;
mod client;
mod journey;
pub(crate) mod map;
mod report;
mod view;
mod world;

use anyhow::{Context, Result, bail};
use std::cell::Cell;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;

/// See the demo's help.
#[derive(clap::Args)]
pub(crate) struct DemoArguments {
    /// The node's GPUs, for example 8xH100-SXM5-80GB,2xL4; `divvy-sim catalogue` lists the models
    #[arg(long, default_value = "2xH100-SXM5-80GB")]
    gpus: String,
    /// YAML file with DeviceClasses, ResourceClaims, templates and pods, instead of the built-in tour of
    /// one GPU's modes; of several files each is released before the next
    #[arg(long, value_name = "FILE")]
    claims: Vec<PathBuf>,
    /// Leave the node and its API server running until Ctrl-C, for kubectl get, describe and apply
    #[arg(long)]
    keep: bool,
    /// Where the simulated node lives; a temporary directory otherwise
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Let an NVML call fail, to see what a user would: CALL=CODE, for example
    /// nvmlGpuInstanceCreateComputeInstance=INSUFFICIENT_RESOURCES
    #[arg(long, value_name = "CALL=CODE")]
    fault: Vec<String>,
}

/// Runs the program under whose name this binary was called, if it is another one.
pub(crate) fn as_another_program() -> Option<ExitCode> {
    let name = std::env::args_os().next()?;
    match std::path::Path::new(&name).file_name()?.to_str()? {
        "divvy-node" => Some(divvy_driver::node::main()),
        // Installed copies carry a hash of their content behind the name.
        name if name.starts_with("divvy-hook") => Some(divvy_hook::main()),
        "divvy-keeper" => Some(divvy_keeper::main()),
        "divvy-sim" => Some(divvy_sim::command::main()),
        _ => divvy_sim::command::multicall(),
    }
}

/// One GPU in each of its modes, one after the other.
const TOUR: &[(&str, &str)] = &[
    ("Time-slice: slots of one GPU, until they run out", include_str!("tour/timeslice.yaml")),
    ("MPS: clients of one control daemon, each with its part", include_str!("tour/mps.yaml")),
    ("MIG: instances, made as they are asked for", include_str!("tour/mig.yaml")),
    ("Whole: all of it for one claim", include_str!("tour/whole.yaml")),
];

/// Runs the demo.
pub(crate) fn run(arguments: &DemoArguments) -> Result<ExitCode> {
    let read = |file: &PathBuf| {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        claims::parse(&text, &file.display().to_string())
    };
    let acts = match arguments.claims.as_slice() {
        [] => TOUR.iter().map(|(title, text)| claims::parse(text, title)).collect::<Result<_>>()?,
        files => files.iter().map(read).collect::<Result<Vec<_>>>()?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Ctrl-C reaches this process alone; what it started ends with the world.
        let kept = Cell::new(false);
        let mut journey = pin!(journey::travel(arguments, acts, &kept));
        loop {
            tokio::select! {
                outcome = &mut journey => return outcome,
                interrupt = tokio::signal::ctrl_c() => {
                    interrupt?;
                    if !kept.get() {
                        bail!("interrupted");
                    }
                }
            }
        }
    })
}
