//! The agent against simulated GPUs and processes that really run: who they are in
//! `/proc` is the kernel's word, but for their cgroup and mounts, which a test without
//! root cannot make.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)] // An account page is mapped, as in a container.

#[path = "harness/programs.rs"]
mod programs;

#[path = "agent/account.rs"]
mod account;
#[path = "agent/figure.rs"]
mod figure;
#[path = "agent/findings.rs"]
mod findings;
#[path = "agent/tenant.rs"]
mod tenant;
#[path = "agent/world.rs"]
mod world;
