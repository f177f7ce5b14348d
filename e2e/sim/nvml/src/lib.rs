//! `libnvidia-ml.so.1` for simulated GPUs: the C API of [`divvy_sim`].
//!
//! It exports every symbol of the library in CUDA 13.3, with its soname, so that programs for the
//! real one run unchanged. `symbols.txt` lists the symbols; those marked as real are implemented
//! here, the others return NOT_SUPPORTED. The library finds its simulator from its own path: the
//! closest parent directory with `run/divvy-sim`, which is `/` in a container. All unsafe code is
//! in [`argument`], [`abi`], [`handle`], [`library`] and [`fork_lock`].
#![allow(unsafe_code, reason = "the C boundary: exported symbols, and pointers that C programs give")]
#![allow(non_snake_case, reason = "entry points have the names of NVML's header")]

mod abi;
mod argument;
mod cgroup_limits;
mod clocks;
mod compute_instance;
mod device_nodes;
mod discovery;
mod events;
mod fields;
mod fork_lock;
mod gpm;
mod gpu_instance;
mod handle;
mod health;
mod identity;
mod library;
mod mig;
mod processes;
mod stubs;
mod system;
mod tables;
mod topology;
