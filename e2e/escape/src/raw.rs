//! A program that uses the GPU without any library of the driver, like one that calls ioctl on the
//! device node: it registers itself in the simulator's usage file.

use crate::node::{CONTEXT, MIB};
use anyhow::{Context, Result};
use divvy_sim::usage::Place;
use divvy_sim::{GpuProcess, GpuUsage, Sim};
use std::path::Path;
use std::sync::Arc;

/// Allocates up to `goal_mib` MiB of the first GPU, prints the amount, and stays alive.
pub fn hold(goal_mib: u64, root: &Path) -> Result<()> {
    let sim = Sim::open(root)?;
    let usage = Arc::new(GpuUsage::open(sim.dir())?);
    let gpu_process = GpuProcess::attach(&usage, Place { slot: 0, instance: None })
        .context("the GPU refused the process")?;
    let mut got = 0;
    if gpu_process.charge(CONTEXT) {
        while got < goal_mib && gpu_process.charge(16 * MIB) {
            got += 16;
        }
    }
    println!("held {got}");
    loop {
        std::thread::park();
    }
}
