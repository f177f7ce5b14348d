//! Simulated GPUs whose state outlives the processes that use it.
//!
//! A simulator is a directory that [`create`] makes: a driver root as the NVIDIA driver installs
//! it, and one state file in place of the hardware. The libraries, the command-line tools and the
//! tests share nothing else; all of them open that file through [`Sim`]. Killing any of them leaves
//! the GPUs as they were.

mod board;
mod call;
mod cgroup_limits;
pub mod code;
pub mod command;
pub mod control;
pub mod driver_root;
mod elf;
pub mod energy;
mod file_lock;
pub mod gpu_map;
pub mod kernel_log;
mod live_process;
pub mod mig;
mod modprobe;
mod module_users;
pub mod mps;
pub mod operations;
mod sim;
pub mod smi;
pub mod state;
pub mod store;
pub mod tree;
pub mod usage;
pub mod visible_devices;

/// The GPU models.
pub use divvy_catalogue as catalogue;

pub use code::Code;
pub use control::Call;
pub use driver_root::{Options, create, library};
pub use gpu_map::draw_gpus;
pub use live_process::LiveProcess;
pub use module_users::ModuleUser;
pub use sim::{Sim, SimError};
pub use state::State;
pub use usage::{GpuProcess, GpuUsage};
