//! The node plugin: prepares and releases claims on one node.
//!
//! Layers, from the bottom: [`gpu`], [`shares`], [`cdi`], [`cluster`], [`claims`], [`kubelet`],
//! [`daemon`]. A module imports only from lower layers; [`paths`], `containers`, `inotify` and
//! [`metrics`] are below all of them.

pub mod cdi;
pub mod claims;
pub mod cluster;
mod containers;
pub mod daemon;
pub mod gpu;
mod inotify;
pub mod kubelet;
pub mod metrics;
pub mod paths;
pub mod shares;
