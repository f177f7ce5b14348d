//! Claims on simulated GPUs: the engine with the real NVML queue, records and
//! CDI files, over the simulator's library.
#![allow(clippy::unwrap_used)] // Helpers of tests fail as tests do.

#[path = "engine/faults.rs"]
mod faults;
#[path = "engine/life.rs"]
mod life;
#[path = "engine/recovery.rs"]
mod recovery;
#[path = "engine/world.rs"]
mod world;
