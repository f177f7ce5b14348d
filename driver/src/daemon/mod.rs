//! The node daemon: command line, start and stop, readiness, monitors, decommissioning.

pub mod args;
pub mod control;
pub mod decommission;
pub mod drain;
pub mod monitors;
pub mod run;
