//! MPS: stand-ins for the control daemon, its servers, and the part of libcuda that talks to them.
//!
//! They simulate which processes may connect, when and with which limits, and the effect on the
//! state, logs and errors. Between each other they exchange lines of JSON over sockets in the pipe
//! directory, which is not the real protocol. Sources: docs.nvidia.com/deploy/mps (architecture,
//! tools and interface reference) of releases 570 to 590.

mod client;
mod control;
mod daemon;
mod protocol;
mod server;

pub(crate) use client::{ClientOptions, main as client_main};
pub(crate) use control::main as control_main;
pub(crate) use server::main as server_main;

pub use protocol::{CONTROL, CONTROL_START, SERVER, SERVER_START};
