//! A program that uses the GPU without any library of the driver's, as one that speaks to the device node by ioctl
//! would: it enters itself into the simulator's ledger.

use crate::node::{CONTEXT, MIB};
use anyhow::{Context, Result};
use divvy_sim::ledger::Place;
use divvy_sim::{Guest, Ledger, Sim};
use std::path::Path;
use std::sync::Arc;

/// Takes up to so many MiB of the first GPU, says how much, and stays.
pub fn hold(goal_mib: u64, root: &Path) -> Result<()> {
    let sim = Sim::open(root)?;
    let ledger = Arc::new(Ledger::open(sim.dir())?);
    let guest = Guest::enter(&ledger, Place { slot: 0, instance: None }).context("the GPU refuses")?;
    let mut got = 0;
    if guest.charge(CONTEXT) {
        while got < goal_mib && guest.charge(16 * MIB) {
            got += 16;
        }
    }
    println!("held {got}");
    loop {
        std::thread::park();
    }
}
