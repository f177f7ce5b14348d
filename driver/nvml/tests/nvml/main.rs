//! The crate against simulated GPUs, through the C library as in production.

mod gpm;
mod session;
mod stuck;
mod usage;
mod world;
