//! The hands: what runs on a node. One claim goes through it like this:
//!
//! ```text
//! kubelet ─▶ service ─▶ claims ─▶ plan ─▶ records ─▶ execute ─▶ records ─▶ CDI ids
//!                       (GET,     (pure)  (Intent)   (hardware,  (Prepared)
//!                        typed)                       pages,
//!                                                     CDI file)
//! ```
//!
//! Only [`execute`] changes hardware, and only what a record already announces.
//! [`gpus`] owns the NVML session and the inventory that the publisher watches;
//! [`node`] starts everything, owns every task and stops them in reverse order.

pub mod paths;

pub mod discover;
pub mod gpus;
pub mod sysfs;

pub mod engine;
pub mod execute;
pub mod mps;
pub mod plan;
pub mod records;
pub mod recover;
pub mod shares;
pub mod sharing;
pub mod step;
pub mod timeslice;

pub mod cdi;

pub mod agent;

pub mod args;
mod changes;
pub mod claims;
pub mod classes;
pub mod cri;
pub mod deviceplugin;
pub mod events;
pub mod health;
pub mod leave;
pub mod metrics;
pub mod node;
pub mod nodeconfig;
pub mod readiness;
pub mod reconcile;
pub mod registration;
pub mod service;
pub mod status;
pub mod top;
pub mod turns;
pub mod watching;
