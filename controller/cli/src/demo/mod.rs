//! `divvy demo`: serves claims on a simulated node, by default one GPU in each of its modes.
//!
//! The node daemon and the MPS supervisor are real; they run in this binary as other processes. The
//! GPUs with their MPS, the kubelet, the API server and the scheduler are simulated. The daemon
//! publishes over TLS, is called over the kubelet's sockets, and changes GPUs through NVML's C ABI.
//!
//! The exit code is 0 if every claim was allocated, prepared and released, or refused where it must
//! be, and the GPUs are in their initial state.

mod container;
mod cuda;
mod enter;
pub(crate) mod map;
mod node;
mod report;
mod serve;
mod session;
mod share_scene;
mod steps;
mod stop;
mod tour;
mod workloads;

use anyhow::Result;
use report::{Format, Report};
use std::path::PathBuf;
use std::process::ExitCode;
use stop::Stop;
use workloads::Workloads;

/// Exit code of a program whose output was closed, as a shell shows it for SIGPIPE.
const OUTPUT_CLOSED: u8 = 141;
/// GPUs of the tour, and of a node for files, which often have several replicas.
const TOUR_GPUS: &str = "2xH100-SXM5-80GB";
const FILE_GPUS: &str = "8xH100-SXM5-80GB";

/// See the demo's help.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  divvy demo                                   the tour: shares, MIG, MPS, time-slices, a whole GPU
  divvy demo --gpus 1xA30,2xRTX-PRO-6000       the same on other GPUs
  divvy demo --claims app.yaml                 your pods, deployments, jobs and claims
  divvy demo --keep                            a node for kubectl apply, until Ctrl-C")]
pub(crate) struct DemoArguments {
    /// GPUs of the node, for example 8xH100-SXM5-80GB,2xL4; `divvy-sim catalogue` lists the models
    /// [default: 2xH100-SXM5-80GB, with --claims 8xH100-SXM5-80GB]
    #[arg(long)]
    gpus: Option<String>,
    /// YAML file as for kubectl apply, instead of the built-in tour of one GPU's modes: claims,
    /// templates, classes, pods, Deployments, ReplicaSets, StatefulSets, DaemonSets, Jobs, CronJobs.
    /// The claims of a file are released before the next file
    #[arg(long, value_name = "FILE")]
    claims: Vec<PathBuf>,
    /// Keep the node running until Ctrl-C, and serve the pods of kubectl apply, without containers
    #[arg(long)]
    keep: bool,
    /// Wait for Enter before claims are released, to look at the node meanwhile
    #[arg(long, conflicts_with = "keep")]
    step: bool,
    /// Output format: text, or one JSON object per line
    #[arg(short, long, value_enum, default_value = "text", value_name = "FORMAT")]
    output: Format,
    /// Show the mounts and all variables of containers
    #[arg(short, long)]
    verbose: bool,
    /// Directory of the simulated node; by default a temporary directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Directory of the libraries for shares [default: those that were built with this program]
    #[arg(long, value_name = "DIR")]
    library_dir: Option<PathBuf>,
    /// Make an NVML call fail, to see the errors that users see: CALL=CODE, for example
    /// nvmlGpuInstanceCreateComputeInstance=INSUFFICIENT_RESOURCES
    #[arg(long, value_name = "CALL=CODE")]
    fault: Vec<String>,
}

impl DemoArguments {
    fn gpus(&self) -> &str {
        let default = if self.claims.is_empty() { TOUR_GPUS } else { FILE_GPUS };
        self.gpus.as_deref().unwrap_or(default)
    }
}

/// Runs the program under whose name this binary was started; `None` if that is `divvy`.
pub(crate) fn as_another_program() -> Option<ExitCode> {
    node::end_with_demo();
    let name = std::env::args_os().next()?;
    match std::path::Path::new(&name).file_name()?.to_str()? {
        "divvy-node" => Some(divvy_driver::daemon::run::main()),
        // Installed copies have a hash of their content after the name.
        name if name.starts_with("divvy-hook") => Some(divvy_hook::main()),
        "divvy-mps-supervisor" => Some(divvy_mps_supervisor::main()),
        "divvy-container" => Some(enter::main()),
        name if name.starts_with(cuda::PREFIX) => Some(cuda::main()),
        "divvy-sim" => Some(divvy_sim::command::main()),
        _ => divvy_sim::command::multicall(),
    }
}

/// Runs the demo.
pub(crate) fn run(arguments: &DemoArguments) -> Result<ExitCode> {
    let read = |file: &PathBuf| -> Result<Workloads> {
        Ok(workloads::parse(&crate::documents::text(file)?, &file.display().to_string())?)
    };
    let files = arguments.claims.iter().map(read).collect::<Result<Vec<_>>>()?;
    let report = Report::new(arguments.output, arguments.verbose);
    enter::become_root();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let stop = Stop::install(&report)?;
        steps::run(arguments, files, &report, &stop).await
    });
    // A read of standard input may never end.
    runtime.shutdown_background();
    if report.closed().is_cancelled() {
        return Ok(ExitCode::from(OUTPUT_CLOSED));
    }
    outcome?;
    Ok(if report.failures() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
