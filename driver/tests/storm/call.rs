//! What the kubelet's calls do to the hardware.

use crate::calls::Call;
use crate::model::{Modelled, Shared};

impl Call {
    /// Calls of the GPU driver and its programs that it may make for such a claim.
    pub(crate) fn hardware(self, claim: &Modelled) -> Vec<&'static str> {
        let mut calls = Vec::new();
        for part in claim.parts() {
            calls.extend_from_slice(match (self, part.place.is_some()) {
                (_, false) => &["nvmlDeviceSetMigMode"],
                (Self::Prepare, true) => &[
                    "nvmlDeviceSetMigMode",
                    "nvmlDeviceCreateGpuInstanceWithPlacement",
                    "nvmlGpuInstanceCreateComputeInstance",
                    "nvmlDeviceGetGpuInstances",
                ],
                (Self::Unprepare, true) => &[
                    "nvmlDeviceSetMigMode",
                    "nvmlComputeInstanceDestroy",
                    "nvmlGpuInstanceDestroy",
                    "nvmlDeviceGetGpuInstances",
                ],
            });
            calls.extend_from_slice(match part.sharing {
                None => &[],
                Some(Shared::Turns) => &["compute-policy", "compute-policy"],
                Some(Shared::Mps) => &["nvmlDeviceSetComputeMode", "mps-control-start", "mps-control"],
            });
        }
        calls
    }
}
