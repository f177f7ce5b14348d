//! Divides the time of a GPU, or of a MIG instance, between its shares.
//!
//! An audit turns a snapshot into one status per share ([`controller_inputs`]). The [`controller`]
//! computes each share's rate, [`grants`] turns rates into page contents, and the [`grant_table`]
//! writes them. Between two audits the [`wakeup`] thread reacts to doorbells and to shares that
//! become idle.

pub(crate) mod balance_check;
pub(crate) mod controller;
pub(crate) mod controller_inputs;
pub(crate) mod device_totals;
pub(crate) mod doorbell;
pub(crate) mod explained;
pub(crate) mod fast_sampling;
pub(crate) mod grant_table;
pub(crate) mod grants;
pub(crate) mod preemption_inflation;
pub(crate) mod processor_sharing_model;
pub(crate) mod quanta;
pub(crate) mod quantum_table;
pub(crate) mod sample_attribution;
pub(crate) mod shortfall;
pub(crate) mod under_charge;
pub(crate) mod wakeup;

/// How the time of a device is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum TimeLaw {
    /// Every share launches at a rate that the agent corrects by measurements.
    #[default]
    Rates,
    /// One share at a time launches ([`quanta`]).
    Quanta,
}
