//! The real `divvy-node` on simulated GPUs, between a fake kubelet and a fake
//! API server: what a kubelet's own tests ask of a DRA driver, and what bad
//! input gets.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)] // An account page is mapped, as in a container.

#[path = "harness/mod.rs"]
mod harness;

#[path = "agent/account.rs"]
mod account;
#[path = "node/audit.rs"]
mod audit;
#[path = "node/bad_input.rs"]
mod bad_input;
#[path = "node/classes.rs"]
mod classes;
#[path = "node/health.rs"]
mod health;
#[path = "node/instances.rs"]
mod instances;
#[path = "harness/keeper.rs"]
mod keeper;
#[path = "node/leave.rs"]
mod leave;
#[path = "node/mps.rs"]
mod mps;
#[path = "node/nodeconfig.rs"]
mod nodeconfig;
#[path = "node/observation.rs"]
mod observation;
#[path = "node/prepare.rs"]
mod prepare;
#[path = "harness/programs.rs"]
mod programs;
#[path = "node/reconcile.rs"]
mod reconcile;
#[path = "node/registration.rs"]
mod registration;
#[path = "node/slices.rs"]
mod slices;
#[path = "agent/tenant.rs"]
mod tenant;
#[path = "node/unprepare.rs"]
mod unprepare;
