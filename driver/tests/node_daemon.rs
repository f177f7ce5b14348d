//! The real `divvy-node` on simulated GPUs, between a fake kubelet and a fake API server: the
//! behaviour that kubelet tests require of a DRA driver, and the handling of bad input.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)] // The tests map an account page, as a container does.

#[path = "harness/mod.rs"]
mod harness;

#[path = "agent/account.rs"]
mod account;
#[path = "node/audit.rs"]
mod audit;
#[path = "node/bad_input.rs"]
mod bad_input;
#[path = "node/control.rs"]
mod control;
#[path = "node/decommission.rs"]
mod decommission;
#[path = "node/device_classes.rs"]
mod device_classes;
#[path = "node/driver_upgrade.rs"]
mod driver_upgrade;
#[path = "node/health.rs"]
mod health;
#[path = "node/mps.rs"]
mod mps;
#[path = "node/node_config.rs"]
mod node_config;
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
#[path = "node/removal.rs"]
mod removal;
#[path = "node/rolling_update.rs"]
mod rolling_update;
#[path = "node/slices.rs"]
mod slices;
#[path = "harness/supervisor.rs"]
mod supervisor;
#[path = "agent/tenant.rs"]
mod tenant;
#[path = "node/unprepare.rs"]
mod unprepare;
