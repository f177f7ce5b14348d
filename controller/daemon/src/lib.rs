//! What every long-running program of Divvy does the same way, so that who
//! knows one knows all: the command line of probes and logs, the log itself,
//! a small memory, the connection to the API server, `/livez`, `/readyz` and `/metrics`, the
//! metrics of the process, and the order in which parts start and stop.
//!
//! Nothing here knows a GPU or a claim.

pub mod args;
pub mod client;
pub mod frugal;
pub mod http;
pub mod logging;
pub mod process;
pub mod stages;

pub use stages::Stages;
