//! The voice of the whole cluster: keeps a DeviceClass for every MIG profile
//! that some node offers, and refuses at admission what prepare would have to
//! refuse later, when a pod already waits.

use std::process::ExitCode;

/// The command.
pub fn main() -> ExitCode {
    ExitCode::FAILURE
}
