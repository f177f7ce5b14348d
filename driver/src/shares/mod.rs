//! Shares of a GPU: the pages that hold their limits, and the agent that enforces them.

pub mod agent;
mod contexts;
pub(crate) mod enforcement;
pub(crate) mod memory_pressure;
mod pages;
pub mod policy;
pub mod report;
pub(crate) mod scheduler;
pub(crate) mod snapshot;

pub(crate) use contexts::Contexts;
pub use pages::*;
