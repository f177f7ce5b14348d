//! `libcuda.so.1` over the simulated GPUs of [`divvy_sim`].
//!
//! It exports every function that the headers of CUDA 12.9 to 13.5 declare (`symbols.txt`), so that
//! programs, the CUDA runtime and interposing libraries run on it. A function that no module
//! implements returns NOT_SUPPORTED. It finds its simulator by the path of its own file, as the
//! simulated NVML does.
#![allow(unsafe_code, reason = "the C boundary: exported symbols, and pointers from C programs")]
#![allow(non_snake_case, reason = "entry points have the names of CUDA's headers")]

// Made for tests of libraries between a program and the driver, so it is strict where they may err. Each
// variant of a function is a separate function. `cuGetProcAddress` resolves by version and flags. A failing
// call does not touch its outputs. Internal calls never go through the dynamic linker.
// `divvy_sim_cuda_calls`, the only additional symbol, counts the calls of each function.

mod addresses;
mod argument;
mod array;
mod call_index;
mod capture;
mod code;
mod content;
mod context;
mod copy;
mod device;
mod entry;
mod event;
mod executable;
mod export;
mod external;
mod frame;
mod graph;
mod graph_objects;
mod handle;
mod ipc;
mod launch;
mod linear;
mod location;
mod module;
mod node;
mod objects;
mod physical;
mod physical_store;
mod pool;
mod pool_figures;
mod process;
mod rules;
mod stream;
mod symbols;
