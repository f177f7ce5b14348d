//! Tests the agent with simulated GPUs and real processes. Their `/proc` files are real, except for
//! their cgroup and mounts, which a test without root privileges cannot create.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)] // An account page is mapped, as in a container.

#[path = "harness/programs.rs"]
mod programs;

#[path = "agent/account.rs"]
mod account;
#[path = "agent/audit_cost.rs"]
mod audit_cost;
#[path = "agent/findings.rs"]
mod findings;
#[path = "agent/tenant.rs"]
mod tenant;
#[path = "agent/test_node.rs"]
mod test_node;
