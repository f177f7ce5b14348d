//! The node daemon: command line, start and stop, readiness, monitors, decommissioning.

pub mod args;
pub mod decommission;
pub mod monitors;
pub mod run;
