//! The kubelet's calls.

use crate::harness::{DRIVER, PATIENCE, World};
use crate::model::{Part, Shared};
use crate::operations::{PREPARES, UNPREPARES};
use crate::run::PAUSE;
use divvy_fakes::kubelet::{CallError, Outcome};
use divvy_kubelet::dra::v1::Claim;
use std::time::Instant;

/// What the kubelet asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Prepare,
    Unprepare,
}

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
