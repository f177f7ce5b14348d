//! The admission webhooks: one validates objects, one ports the requests of other GPU schedulers.

mod foreign;
mod review;
mod server;
mod wire;

pub use foreign::ForeignRequests;
pub use review::Reviewer;
pub use server::{FOREIGN_REQUESTS_PATH, PATH, serve};
