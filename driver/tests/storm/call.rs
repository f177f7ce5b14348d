//! The kubelet's calls.

use crate::harness::{DRIVER, PATIENCE, World};
use crate::model::{Modelled, Shared};
use divvy_fakes::kubelet::{CallError, Outcome};
use divvy_kubelet::dra::v1::Claim;
use std::time::{Duration, Instant};

pub(crate) const PAUSE: Duration = Duration::from_millis(2);

/// What the kubelet asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Prepare,
    Unprepare,
}

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

    /// One answered call; a daemon that is just starting is asked again.
    pub(crate) async fn answer(self, world: &World, claim: &Claim) -> Result<Outcome, String> {
        let begun = Instant::now();
        loop {
            match self.ask(world, claim).await {
                Ok(outcome) => return Ok(outcome),
                Err(CallError::Status(_) | CallError::NotRegistered { .. }) if begun.elapsed() < PATIENCE => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(format!("{self:?} of {}: {error}", claim.uid)),
            }
        }
    }

    async fn ask(self, world: &World, claim: &Claim) -> Result<Outcome, CallError> {
        let claims = std::slice::from_ref(claim);
        let outcomes = match self {
            Self::Prepare => world.kubelet.prepare(DRIVER, claims).await?,
            Self::Unprepare => world.kubelet.unprepare(DRIVER, claims).await?,
        };
        Ok(outcomes.into_values().next().unwrap_or_else(|| Ok(Vec::new())))
    }
}
