//! Tests of the crate on simulated GPUs, through the C library as in production.

mod gpm;
mod session;
mod stuck;
mod test_node;
mod usage;
