//! The keeper of MPS control daemons: a small process that holds what must
//! outlive the node daemon and its upgrades. It reads what is wanted from files
//! and writes what there is into files (see [`divvy_api::mps`]); it has no
//! network and knows no Kubernetes.

use std::process::ExitCode;

/// The command.
pub fn main() -> ExitCode {
    ExitCode::FAILURE
}
