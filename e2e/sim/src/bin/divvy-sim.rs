//! `divvy-sim`: simulated GPUs from the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    divvy_sim::command::main()
}
