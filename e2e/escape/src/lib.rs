//! The escape suite: every trick we know by which a container may try to hold more of a GPU than its share, of memory or of time, played
//! against a library that is to keep the limit; Divvy's own, or another one.
//!
//! A trick is a small program in a real container on a simulated GPU. Whether it won is read from the simulator's
//! ledger, never from the program, the library or its pages (but for a forged balance, which is nowhere else). A suite that cannot fail proves nothing, so every row is
//! also played with what should stop it taken away, and must then win.
//!
//! - [`rows`]: the tricks, and what must become of each.
//! - [`node`]: a simulated GPU with shares; [`container`]: namespaces, mounts and capabilities as a pod has them;
//!   [`cdi`]: what the driver has mounted there; [`cgroup`]: one of its own, where it must have one.
//! - [`programs`]: the programs, in C under `programs/`; [`raw`]: the one that needs no driver library.
//! - [`watch`]: the node's agent, which must find what the library cannot prevent.
//! - [`corpus`]: programs of all sorts, which the library must not disturb.
//! - [`trial`]: one row played once; [`time`]: what it has of the GPU's time; [`report`]: all of them, and the table for the documentation.

pub mod cdi;
pub mod cgroup;
pub mod command;
pub mod container;
pub mod corpus;
pub mod node;
pub mod programs;
pub mod raw;
pub mod report;
pub mod rows;
mod time;
pub mod trial;
pub mod watch;
