//! The isolation suite: runs every known attack on the limits of a share, in memory or in compute
//! time. The limits are enforced by Divvy's library, or by another one.
//!
//! An attack is a small program in a real container on a simulated GPU. The verdict comes from the
//! simulator's state, never from the program, the library or its pages (except a forged balance,
//! which only a page contains). Every case is also run without its protection and must then
//! succeed: a suite that cannot fail proves nothing.

/// One run of a case.
pub mod case_run;
/// CDI files that the driver writes, applied as a container runtime applies them.
pub mod cdi;
/// Cgroups of containers, for cases that need one.
pub mod cgroup;
pub mod command;
/// Containers: namespaces, mounts and capabilities as a pod has them.
pub mod container;
/// Ordinary programs, which the library must not disturb.
pub mod corpus;
/// The attacks, and the result that each must have.
pub mod isolation_cases;
/// A simulated GPU with shares.
pub mod node;
/// The programs in C under `programs/`.
pub mod programs;
/// The program that needs no driver library.
pub mod raw;
/// All cases, and the table for the documentation.
pub mod report;
mod time;
/// The node's agent, which must detect what the library cannot prevent.
pub mod watch;
