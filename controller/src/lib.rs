//! The voice of the whole cluster: keeps a DeviceClass for every MIG profile
//! that some node offers, and refuses at admission what prepare would have to
//! refuse later, when a pod already waits.
//!
//! ```text
//! ResourceSlices ─▶ seen ─▶ offer ─┬─▶ classes ─▶ DeviceClasses     (the leader)
//! DeviceClasses ─▶ classes ────────┴─▶ known ─┐
//! AdmissionReview ─▶ webhook ─▶ review ◀──────┘ ─▶ verdict          (every replica)
//! Secret ◀─ certificate ─▶ what handshakes show, what the API server trusts
//! ```
//!
//! [`leave`] undoes it all before Divvy is uninstalled.

pub mod args;
pub mod certificate;
pub mod classes;
pub mod known;
pub mod leader;
pub mod leave;
pub mod metrics;
pub mod profile;
pub mod run;
pub mod seen;
pub mod webhook;

use args::{Args, Command};
use clap::Parser;
use divvy_daemon::{frugal, logging};
use std::process::ExitCode;

/// The command.
pub fn main() -> ExitCode {
    let args = Args::parse();
    frugal::begin_again("divvy-controller");
    let log = match &args.command {
        Command::Run(args) => &args.log,
        Command::Leave(args) => &args.log,
    };
    if let Err(error) = logging::begin(log) {
        eprintln!("divvy-controller: {error:#}");
        return ExitCode::FAILURE;
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(cause) => {
            tracing::error!(%cause, "cannot start");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(async {
        match &args.command {
            Command::Run(args) => run::run(args).await,
            Command::Leave(args) => leave::leave(args).await,
        }
    });
    // A selector that takes for ever must not keep the process.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
