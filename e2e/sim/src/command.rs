//! The command line.
use std::process::ExitCode;
/// Main of `divvy-sim`, and of `nvidia-smi` and `nvidia-modprobe` when called by these names.
pub fn main() -> ExitCode {
    multicall().unwrap_or(ExitCode::SUCCESS)
}
/// Runs the stand-in whose name this process was called by, if it is one.
pub fn multicall() -> Option<ExitCode> {
    None
}
