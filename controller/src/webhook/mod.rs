//! The validating admission webhook.

mod review;
mod server;
mod wire;

pub use review::Reviewer;
pub use server::{PATH, serve};
