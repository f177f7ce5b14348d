//! Making a simulator: the driver root with its first state.

use crate::sim::Sim;
use crate::state::Host;
use std::path::{Path, PathBuf};

/// How to make a simulator.
#[derive(Clone, Debug)]
pub struct Options {
    /// `libdivvy_sim_nvml.so`, see [`library`].
    pub library: PathBuf,
    /// A program whose main is [`crate::command::main`].
    pub multicall: PathBuf,
    /// Version of the GPU driver.
    pub driver: String,
    pub cuda: (u32, u32),
    /// Two nodes with different seeds have different GPUs.
    pub seed: u64,
    pub numa_nodes: u32,
    pub host: Host,
}

/// Makes the simulator in `dir` with GPUs such as `8xH100-SXM5-80GB,2xL4`.
pub fn up(_dir: &Path, _gpus: &str, _options: &Options) -> anyhow::Result<Sim> {
    anyhow::bail!("not yet")
}

/// The simulated `libnvidia-ml` where cargo leaves it: beside this program or in `deps`.
pub fn library() -> anyhow::Result<PathBuf> {
    anyhow::bail!("not yet")
}
