//! Claims on simulated GPUs: the engine with the real NVML queue, records and
//! CDI files, over the simulator's library.
#![allow(clippy::unwrap_used)] // Helpers of tests fail as tests do.

#[path = "engine/daemons.rs"]
mod daemons;
#[path = "engine/faults.rs"]
mod faults;
#[path = "harness/keeper.rs"]
mod keeper;
#[path = "engine/life.rs"]
mod life;
#[path = "harness/programs.rs"]
mod programs;
#[path = "engine/recovery.rs"]
mod recovery;
#[path = "engine/shares.rs"]
mod shares;
#[path = "engine/sharing.rs"]
mod sharing;
#[path = "engine/world.rs"]
mod world;
