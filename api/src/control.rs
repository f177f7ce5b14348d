//! The control socket of the node daemon: `divvy node` sends one request as a line of JSON and reads one
//! line as the answer. Only root can connect.

use crate::GpuUuid;
use serde::{Deserialize, Serialize};

/// Name of the socket, below the run directory.
pub const SOCKET: &str = "control.sock";
/// Longest request and answer, in bytes. An answer has a few hundred bytes for each GPU.
pub const LINE_MAX_BYTES: u64 = 1 << 20;

/// A request. GPUs are named by UUID, or by number: `gpu-3` or `3`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "camelCase", deny_unknown_fields)]
pub enum Request {
    /// The health of all GPUs.
    Health,
    /// Let go of a GPU, so that it can be reset or replaced.
    Release { gpu: String },
    /// Use a released GPU again.
    TakeBack { gpu: String },
    /// Forget a missing GPU: its number and its devices.
    Forget { gpu: String },
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    Health(Vec<GpuHealth>),
    /// The request was carried out; for people.
    Done(String),
    /// The request was refused, with the cause and the remedy.
    Refused(String),
}

/// The health of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuHealth {
    pub number: u32,
    pub uuid: GpuUuid,
    pub product: String,
    /// `present`, `unread` or `missing`.
    pub presence: String,
    /// `healthy`, `degraded`, `needs-reset`, `stuck` or `lost`.
    pub state: String,
    /// Why it is not healthy or not handed out.
    pub conditions: Vec<String>,
    /// Claims that hold it or a part of it, as `namespace/name`.
    pub claims: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A daemon and a `divvy` of different versions must understand each other.
    #[test]
    fn format_of_requests_does_not_change() {
        for (request, line) in [
            (Request::Health, r#"{"do":"health"}"#),
            (Request::Release { gpu: "gpu-3".into() }, r#"{"do":"release","gpu":"gpu-3"}"#),
            (Request::TakeBack { gpu: "3".into() }, r#"{"do":"takeBack","gpu":"3"}"#),
            (Request::Forget { gpu: "GPU-1".into() }, r#"{"do":"forget","gpu":"GPU-1"}"#),
        ] {
            assert_eq!(serde_json::to_string(&request).expect("json"), line);
            assert_eq!(serde_json::from_str::<Request>(line).expect("reads"), request);
        }
    }
}
