//! `libnvidia-ml.so.1` over simulated GPUs.
//!
//! The C face of [`divvy_sim`]: every symbol that the library of CUDA 13.3 exports, with its soname, so that programs
//! written for the real one run unchanged: Rust, Go and Python, several in one process, from many threads, after a fork.
//! `symbols.txt` lists the symbols; those it marks as real are implemented here, the rest answer NOT_SUPPORTED.
//!
//! - [`library`]: init, the frame that each call runs in, and what a process shares between calls.
//! - [`argument`], [`abi`], [`handle`]: what crosses the boundary: pointers, structures, handles. All unsafe code is
//!   there, in [`library`]'s look at its own file, and in the lock of [`fork`].
//! - the other modules: entry points by subject.
//!
//! The library finds its simulator from the path of its own file: the root above it that has `run/divvy-sim`. In a
//! container that is `/`. Nothing tells a program that uses it that the GPUs are simulated.
#![allow(unsafe_code, reason = "the C boundary: exported symbols, and pointers that C programs give")]
#![allow(non_snake_case, reason = "entry points have the names of NVML's header")]

mod abi;
mod argument;
mod clocks;
mod compute_instance;
mod discovery;
mod events;
mod fields;
mod fork;
mod gpm;
mod gpu_instance;
mod handle;
mod health;
mod identity;
mod library;
mod limits;
mod mig;
mod nodes;
mod processes;
mod stubs;
mod system;
mod topology;
