//! The `divvy-escape` program. It acts as `nvidia-smi` when it is called by that name.

use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    if let Some(code) = divvy_sim::command::multicall() {
        return Ok(code);
    }
    divvy_escape::command::main()?;
    Ok(ExitCode::SUCCESS)
}
