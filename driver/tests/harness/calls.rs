//! The kubelet's calls for one claim, of tests that kill the daemon under them.

use crate::harness::{DRIVER, PATIENCE, World};
use divvy_fakes::kubelet::{CallError, Outcome};
use divvy_kubelet::dra::v1::Claim;
use std::time::{Duration, Instant};

/// Between two looks at what is not there yet.
pub(crate) const PAUSE: Duration = Duration::from_millis(2);

/// What the kubelet asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Prepare,
    Unprepare,
}

impl Call {
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
