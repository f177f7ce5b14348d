//! Throttles kernel launches to the share's compute limit.
//!
//! The unit is one nanosecond of the whole device's time. A share has a token `bucket`. Each
//! launch is charged its kernel's estimated cost (`cost_model`) in advance. Events around some
//! launches measure the real cost (`samples`), and the difference is charged or refunded later. A
//! process takes tokens in grants and spends them locally. A launch without tokens sleeps on the
//! gate's futex, where the node can wake it. The node corrects measurements by granting a rate.

mod bucket;
mod cost_model;
mod fast_path;
mod launch;
mod samples;
mod sampling;
mod state;
#[cfg(all(test, loom))]
mod threads;

pub(crate) use bucket::{Bucket, SECOND_NS, burst_ns};
pub(crate) use cost_model::Costs;
pub use cost_model::Work;
pub use samples::Timer;
pub(crate) use state::{FastPathCache, Throttle};
