//! The cluster controller. It maintains one DeviceClass per MIG profile that a node offers. Its
//! webhook rejects claims and pods that the node plugin could not prepare. A second webhook ports the
//! requests of other GPU schedulers.
//!
//! The [`slice_watch`] feeds [`device_index`]; DeviceClasses feed [`classes`] and [`class_index`].
//! The leader writes classes, the [`templates`] of ported pods and the webhook's [`certificate`]. It
//! decides the [`removal`] of devices whose mode is off. Every replica answers reviews.
//! [`decommission`] reverts all of it before Divvy is uninstalled.

pub mod args;
pub mod certificate;
pub mod class_index;
pub mod classes;
pub mod decommission;
pub mod device_index;
pub mod leader;
pub mod metrics;
pub mod profile;
pub mod readiness;
pub mod removal;
pub mod run;
pub mod slice_watch;
pub mod templates;
pub mod webhook;

use args::{Args, Command};
use clap::Parser;
use divvy_daemon::{logging, malloc};
use std::process::ExitCode;

/// Entry point of the binary.
pub fn main() -> ExitCode {
    let args = Args::parse();
    malloc::reexec_with_settings("divvy-controller");
    let log = match &args.command {
        Command::Run(args) => &args.log,
        Command::Decommission(args) => &args.log,
    };
    if let Err(error) = logging::init(log) {
        eprintln!("divvy-controller: {error:#}");
        return ExitCode::FAILURE;
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(cause) => {
            tracing::error!(%cause, "cannot start the async runtime");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(async {
        match &args.command {
            Command::Run(args) => run::run(args).await,
            Command::Decommission(args) => decommission::decommission(args).await,
        }
    });
    // A CEL evaluation that does not end must not keep the process alive.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
