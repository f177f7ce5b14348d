//! The conditions of /readyz.

use divvy_daemon::http::{Condition, Readiness};

/// Conditions for complete answers to reviews.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReadyCondition {
    /// DeviceClasses were listed.
    Classes,
    /// ResourceSlices were listed, and the kinds of their devices are known.
    Slices,
    /// The webhook has a certificate to serve.
    Certificate,
}

impl Condition for ReadyCondition {
    const ALL: &'static [Self] = &[Self::Classes, Self::Slices, Self::Certificate];
    fn name(self) -> &'static str {
        match self {
            Self::Classes => "classes",
            Self::Slices => "slices",
            Self::Certificate => "certificate",
        }
    }
}

/// Readiness of this replica.
pub type ControllerReadiness = Readiness<ReadyCondition>;
