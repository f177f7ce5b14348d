//! What the kubelet's calls do to the hardware.

use crate::calls::Call;
use crate::model::{Part, Shared};
use crate::operations::{PREPARES, UNPREPARES};

impl Call {
    /// One of the calls that it may make for such devices.
    pub(crate) fn hardware(self, devices: &[Part], nth: usize) -> &'static str {
        let all = match self {
            Self::Prepare => PREPARES,
            Self::Unprepare => UNPREPARES,
        };
        let shared = |mode| devices.iter().any(|part| part.shared == Some(mode));
        let may_come = |call: &&&str| match **call {
            "compute-policy" => shared(Shared::Timeslice),
            "nvmlDeviceSetComputeMode" => shared(Shared::Mps),
            _ => devices.iter().any(|part| part.instance.is_some()),
        };
        let likely: Vec<&str> = all.iter().filter(may_come).copied().collect();
        if likely.is_empty() { all[nth % all.len()] } else { likely[nth % likely.len()] }
    }
}
