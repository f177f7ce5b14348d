//! `libcuda.so.1` over simulated GPUs.
//!
//! The C face of CUDA's driver library on the GPUs of [`divvy_sim`]: every function that the headers of CUDA 12.9 to 13.5
//! declare (`symbols.txt`), so that programs, the CUDA runtime and libraries that interpose themselves run on it. What no
//! module here implements answers NOT_SUPPORTED.
//!
//! It is there to test those who stand between a program and the driver, so it is strict where they may err: each
//! variant of a function is a function of its own, `cuGetProcAddress` answers by version and flags, what fails leaves
//! its outputs untouched, and the library finds its own functions in a static table, never through the dynamic linker.
//! `divvy_sim_cuda_calls`, the one symbol of its own, tells how often which function was entered.
//!
//! - [`symbols`]: the table, and `cuGetProcAddress` on it.
//! - [`frame`]: what every call passes through; [`argument`]: what crosses the boundary.
//! - [`process`]: what `cuInit` makes; [`device`], [`context`]: GPUs and contexts.
//! - [`memory`]: allocations and their addresses, and [`content`] that stands for what is in them; [`linear`], [`pool`]
//!   and its [`figures`], [`array`], [`physical`], [`shareable`], [`ipc`], [`copy`]: the kinds of memory.
//! - [`stream`], [`event`], [`module`], [`launch`]: work, which takes time and computes nothing; [`graph`], [`node`],
//!   [`executable`] and its [`steps`], [`update`], [`capture`]: work that is noted first.
//! - [`rules`]: calls that fail, wait, or kill the process.
//!
//! The library finds its simulator from the path of its own file, as the simulated NVML does.
#![allow(unsafe_code, reason = "the C boundary: exported symbols, and pointers that C programs give")]
#![allow(non_snake_case, reason = "entry points have the names of CUDA's headers")]

mod argument;
mod array;
mod capture;
mod code;
mod content;
mod context;
mod contexts;
mod copy;
mod device;
mod entry;
mod event;
mod executable;
mod export;
mod external;
mod figures;
mod frame;
mod graph;
mod handle;
mod holders;
mod ipc;
mod launch;
mod linear;
mod memory;
mod module;
mod node;
mod physical;
mod pool;
mod process;
mod rules;
mod shareable;
mod steps;
mod stream;
mod symbols;
mod update;
