//! Claims on this node: fetch from the API server, plan, record, execute, release.
//!
//! `plan` is pure. Only [`execute`] changes hardware, and only after a record with the undo steps was
//! written ([`records`]).

pub mod claim_mutex;
pub mod class_updates;
mod debts;
pub mod engine;
pub mod execute;
pub mod fetch;
pub mod holding;
mod idle_mig;
pub mod leftovers;
pub mod mps_daemons;
pub mod plan;
pub mod reconcile;
pub mod records;
pub mod recover;
pub mod step;
pub mod uses;
