//! `divvy`, the command people run; also a kubectl plugin when it is linked as
//! `kubectl-divvy`.
//!
//! With the feature `demo` it is a multi-call binary as well: under the name of
//! the node daemon, the OCI hook or one of the GPU driver's own programs it is
//! that program, so that the demo's simulated node can hold links to it and
//! `cargo run` need build nothing else.

mod allocate;
#[cfg(feature = "demo")]
mod demo;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Any GPU, cut any way, per claim.
#[derive(Parser)]
#[command(name = "divvy", version, about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A simulated node with the real driver: publish, allocate, prepare, draw, release
    #[cfg(feature = "demo")]
    Demo(demo::DemoArguments),
    /// Draw the demo's GPUs
    #[cfg(feature = "demo")]
    #[command(hide = true)]
    Map(demo::map::MapArguments),
    /// Say which devices claims would get, or why none, from slices and classes in files
    Allocate(allocate::AllocateArguments),
}

fn main() -> ExitCode {
    #[cfg(feature = "demo")]
    if let Some(code) = demo::as_another_program() {
        return code;
    }
    let outcome = match Arguments::parse().command {
        #[cfg(feature = "demo")]
        Command::Demo(arguments) => demo::run(&arguments),
        #[cfg(feature = "demo")]
        Command::Map(arguments) => demo::map::run(&arguments),
        Command::Allocate(arguments) => allocate::run(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("divvy: {error:#}");
            ExitCode::FAILURE
        }
    }
}
