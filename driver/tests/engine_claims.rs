//! Claims on simulated GPUs: the claim engine with the real NVML queue, claim records and CDI files,
//! on the simulator's NVML library.
#![allow(clippy::unwrap_used)] // Test helpers may panic, as tests do.

#[path = "engine/debts.rs"]
mod debts;
#[path = "engine/faults.rs"]
mod faults;
#[path = "engine/health.rs"]
mod health;
#[path = "engine/lifecycle.rs"]
mod lifecycle;
#[path = "engine/mps_end_to_end.rs"]
mod mps_end_to_end;
#[path = "harness/programs.rs"]
mod programs;
#[path = "engine/recovery.rs"]
mod recovery;
#[path = "engine/shares.rs"]
mod shares;
#[path = "harness/supervisor.rs"]
mod supervisor;
#[path = "engine/test_node.rs"]
mod test_node;
#[path = "engine/timeslice_mps.rs"]
mod timeslice_mps;
#[path = "engine/withheld.rs"]
mod withheld;
