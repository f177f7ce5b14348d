//! `divvy demo`: serves claims on a simulated node, by default one GPU in each of its modes.
//!
//! The node daemon and the MPS supervisor are real; they run in this binary as other processes. The
//! GPUs with their MPS, the kubelet, the API server and the scheduler are simulated. The daemon
//! publishes over TLS, is called over the kubelet's sockets, and changes GPUs through NVML's C ABI.
//!
//! The exit code is 0 if every claim was allocated, prepared and released, or refused where it must
//! be, and the GPUs are in their initial state.

mod claims;
mod container;
pub(crate) mod map;
mod node;
mod report;
mod steps;

use anyhow::{Context, Result, bail};
use std::cell::Cell;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;

/// See the demo's help.
#[derive(clap::Args)]
pub(crate) struct DemoArguments {
    /// GPUs of the node, for example 8xH100-SXM5-80GB,2xL4; `divvy-sim catalogue` lists the models
    #[arg(long, default_value = "2xH100-SXM5-80GB")]
    gpus: String,
    /// YAML file with DeviceClasses, ResourceClaims, templates and pods, instead of the built-in
    /// tour of one GPU's modes; the claims of a file are released before the next file
    #[arg(long, value_name = "FILE")]
    claims: Vec<PathBuf>,
    /// Keep the node and its API server running until Ctrl-C, for kubectl get, describe and apply
    #[arg(long)]
    keep: bool,
    /// Directory of the simulated node; by default a temporary directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Make an NVML call fail, to see the errors that users see: CALL=CODE, for example
    /// nvmlGpuInstanceCreateComputeInstance=INSUFFICIENT_RESOURCES
    #[arg(long, value_name = "CALL=CODE")]
    fault: Vec<String>,
}

/// Runs the program under whose name this binary was started; `None` if that is `divvy`.
pub(crate) fn as_another_program() -> Option<ExitCode> {
    let name = std::env::args_os().next()?;
    match std::path::Path::new(&name).file_name()?.to_str()? {
        "divvy-node" => Some(divvy_driver::daemon::run::main()),
        // Installed copies have a hash of their content after the name.
        name if name.starts_with("divvy-hook") => Some(divvy_hook::main()),
        "divvy-mps-supervisor" => Some(divvy_mps_supervisor::main()),
        "divvy-sim" => Some(divvy_sim::command::main()),
        _ => divvy_sim::command::multicall(),
    }
}

/// The built-in claims: titles and YAML files for each mode of one GPU.
const TOUR: &[(&str, &str)] = &[
    ("Time-slicing: slots of one GPU, until none is free", include_str!("tour/timeslice.yaml")),
    ("MPS: clients of one control daemon, with limits", include_str!("tour/mps.yaml")),
    ("MIG: instances, created on demand", include_str!("tour/mig.yaml")),
    ("Whole GPU: one claim gets all of it", include_str!("tour/whole.yaml")),
];

/// Runs the demo.
pub(crate) fn run(arguments: &DemoArguments) -> Result<ExitCode> {
    let read = |file: &PathBuf| {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        claims::parse(&text, &file.display().to_string())
    };
    let claim_sets = match arguments.claims.as_slice() {
        [] => TOUR.iter().map(|(title, text)| claims::parse(text, title)).collect::<Result<_>>()?,
        files => files.iter().map(read).collect::<Result<Vec<_>>>()?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Only this process receives Ctrl-C; the processes that it started are killed when the node
        // is dropped.
        let is_waiting = Cell::new(false);
        let mut steps = pin!(steps::run(arguments, claim_sets, &is_waiting));
        loop {
            tokio::select! {
                outcome = &mut steps => return outcome,
                interrupt = tokio::signal::ctrl_c() => {
                    interrupt?;
                    if !is_waiting.get() {
                        bail!("interrupted");
                    }
                }
            }
        }
    })
}
