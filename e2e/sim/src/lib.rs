//! Simulated GPUs whose state outlives every process that uses it.
//!
//! A simulator is a directory made by [`up`]: a driver root as the NVIDIA
//! driver installs it (libraries, binaries, `/dev`, `/proc`, `/sys`) and one
//! state file that stands for the silicon. Processes share nothing else: the
//! library `libnvidia-ml.so.1` in that root, the stand-ins for `nvidia-smi` and
//! `nvidia-modprobe`, the command line and tests all open the same file through
//! [`Sim`]. Killing any of them leaves the GPUs as they were, as with hardware.
//!
//! - [`catalogue`]: what a GPU model is, as data with sources.
//! - [`state`]: what the GPUs of a node are like now.
//! - [`mig`]: what hardware and driver allow, pure functions on one GPU.
//! - [`store`]: the locked file; [`tree`]: `/proc`, `/sys` and `/dev` rendered from it.
//! - [`mps`]: the stand-ins for the MPS control daemon, its servers and their clients.
//! - [`ledger`]: what CUDA processes use, for calls too frequent for the locked file.
//! - [`control`]: latency, faults, holds and the trace, applied by [`Sim::call`].

mod alive;
pub mod catalogue;
pub mod code;
pub mod command;
pub mod control;
pub mod draw;
mod elf;
pub mod ledger;
mod limits;
pub mod mig;
mod modprobe;
pub mod mps;
pub mod operate;
mod sim;
pub mod smi;
pub mod state;
pub mod store;
pub mod tree;
pub mod up;
pub mod visible;

pub use alive::Alive;
pub use code::Code;
pub use control::Call;
pub use draw::draw;
pub use ledger::{Guest, Ledger};
pub use sim::{Failure, Sim};
pub use state::State;
pub use up::{Options, library, up};
