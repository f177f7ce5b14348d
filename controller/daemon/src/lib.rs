//! Infrastructure shared by the long-running programs of Divvy: command-line flags, logging,
//! malloc settings, the API server client, `/livez`, `/readyz` and `/metrics`, process metrics,
//! and the start and stop of tasks. It is independent of GPUs and claims.

pub mod args;
pub mod client;

pub mod http;
pub mod logging;
pub mod malloc;
pub mod process;
pub mod stages;

pub use stages::Stages;
