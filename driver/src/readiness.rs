//! What `/readyz` asks of a node daemon. Ready means: a claim that the scheduler
//! places here would be prepared.

use divvy_daemon::http;

/// What must be true before claims can be prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// Local recovery has ended.
    Recovered,
    /// The GPU driver is there.
    GpuDriver,
    /// CDI files can be written and have what they need.
    Cdi,
    /// The pool is published.
    Published,
    /// The kubelet knows us.
    Registered,
}

impl http::Condition for Condition {
    const ALL: &'static [Self] =
        &[Self::Recovered, Self::GpuDriver, Self::Cdi, Self::Published, Self::Registered];

    fn name(self) -> &'static str {
        match self {
            Self::Recovered => "recovered",
            Self::GpuDriver => "gpu-driver",
            Self::Cdi => "cdi",
            Self::Published => "published",
            Self::Registered => "registered",
        }
    }
}

/// All conditions of this node.
pub type Readiness = http::Readiness<Condition>;
