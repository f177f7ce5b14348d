//! Hooks of `libcuda.so.1`, by subject.
//!
//! An allocation is charged before the driver's call, so that no other process takes the same bytes
//! meanwhile; if the driver refuses, the charge is refunded. A refusal by this library is
//! CUDA_ERROR_OUT_OF_MEMORY and leaves the outputs untouched: the driver writes to a local, which
//! is copied on success. A free looks its key up in the table, so any function can free it.
//! Functions without a hook go straight to the driver, as do copies, imported or IPC memory, and
//! pinned memory.

mod allocate;
mod array;
pub(crate) mod call;
mod context;
pub(crate) mod driver;
mod graph;
mod launch;
mod mem_info;
mod memory;
mod overcommit;
mod pool;
mod proc_address;
mod synchronize;
mod trim;
mod virtual_memory;

pub(crate) use array::*;
pub(crate) use context::*;
pub(crate) use graph::*;
pub(crate) use launch::*;
pub(crate) use mem_info::*;
pub(crate) use memory::*;
pub(crate) use overcommit::*;
pub(crate) use pool::*;
pub(crate) use proc_address::*;
pub(crate) use synchronize::*;
pub(crate) use virtual_memory::*;
