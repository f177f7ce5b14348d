//! `divvy demo`: the whole journey of a few claims on one simulated node.
//!
//! Everything that matters is the real thing: the node daemon is this binary
//! in another process, it publishes to an API server over TLS, it is called by
//! a kubelet over its sockets, and it changes GPUs through NVML's C ABI. What
//! stands in: the GPUs, the kubelet, the API server, and the scheduler, whose
//! part a first-fit allocator with the same rules plays.
//!
//! The exit code tells the truth: 0 if every claim was allocated, prepared and
//! released and the GPUs ended as they began; 1 otherwise.

mod claims;
mod journey;
pub(crate) mod map;
mod report;
mod world;

use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::ExitCode;

/// See the demo's help.
#[derive(clap::Args)]
pub(crate) struct DemoArguments {
    /// The node's GPUs, for example 8xH100-SXM5-80GB,2xL4; `divvy-sim catalogue` lists the models
    #[arg(long, default_value = "2xH100-SXM5-80GB")]
    gpus: String,
    /// YAML file with DeviceClasses, ResourceClaims, templates and pods, instead of the built-in examples
    #[arg(long, value_name = "FILE")]
    claims: Option<PathBuf>,
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
        "divvy-sim" => Some(divvy_sim::command::main()),
        _ => divvy_sim::command::multicall(),
    }
}

/// Runs the demo.
pub(crate) fn run(arguments: &DemoArguments) -> Result<ExitCode> {
    let wanted = match &arguments.claims {
        Some(file) => {
            let text =
                std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            claims::parse(&text, &file.display().to_string())?
        }
        None => claims::parse(include_str!("examples.yaml"), "the built-in examples")?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(journey::travel(arguments, wanted))
}
