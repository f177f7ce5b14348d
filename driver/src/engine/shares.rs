//! The shares that prepared claims have: for whoever measures them, and their settings, which may change
//! while containers run.

use super::claim::{Unlocked, is_of};
use super::{Engine, HeldState, Inner};
use crate::execute::StepError;
use crate::plan::Access;
use crate::records::{ClaimRecord, LockError, RecordError};
use crate::shares::Shares;
use crate::sharing::ShareLimits;
use divvy_api::sharing::ShareSettings;
use divvy_api::{AllocatedClaim, ClaimRef, DeviceName, ShareId};
use std::collections::BTreeSet;

/// A share of a prepared claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldShare {
    pub claim: ClaimRef,
    pub device: DeviceName,
    pub share: ShareId,
    /// Bytes that it may have.
    pub limit: u64,
    pub settings: ShareSettings,
    /// Bytes that its own account says it has; none where that cannot be read.
    pub used: Option<u64>,
}

/// Why shares do not go by the settings that they should have; every message names the claim. They go on by those that
/// they had, and whoever asks again has it tried again.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    #[error("claim {claim}, {devices}: its shares are not changed")]
    Locked {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: LockError,
    },
    #[error("claim {claim}, {devices}: the pages of its shares cannot be changed")]
    Pages {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: StepError,
    },
    #[error("claim {claim}: its record cannot be kept")]
    Record {
        claim: ClaimRef,
        #[source]
        cause: RecordError,
    },
    #[error("claim {claim}: changing its shares crashed; see the log")]
    Crashed { claim: ClaimRef },
}

impl Engine {
    /// All of them.
    pub fn shares(&self) -> Vec<HeldShare> {
        let pages = Shares::new(&self.inner.options.paths);
        let (records, _) = self.inner.records.all().unwrap_or_default();
        let of_claim = |record: &ClaimRecord| {
            let held = record.shares().map(|(device, share, limits)| HeldShare {
                claim: record.claim.clone(),
                device: device.device.clone(),
                share: share.clone(),
                limit: limits.memory,
                settings: limits.settings,
                used: pages.used(&record.claim.uid, share),
            });
            held.collect::<Vec<_>>()
        };
        let prepared = records.iter().filter(|record| record.state == HeldState::Prepared);
        prepared.flat_map(of_claim).collect()
    }

    /// Has the shares of a prepared claim go by the settings that it has now, without a container's doing; says
    /// whether any had others. Of a claim that is not prepared, or otherwise allocated, nothing is touched.
    pub async fn change_shares(&self, claim: &AllocatedClaim) -> Result<bool, ChangeError> {
        let (inner, owned) = (self.inner.clone(), claim.clone());
        // To its end, whoever waits.
        let task = self.inner.tasks.spawn(async move { inner.change_shares(&owned).await });
        task.await.map_err(|_| ChangeError::Crashed { claim: claim.claim.clone() })?
    }
}

impl Inner {
    async fn change_shares(&self, claim: &AllocatedClaim) -> Result<bool, ChangeError> {
        let uid = &claim.claim.uid;
        let no_record = |cause| ChangeError::Record { claim: claim.claim.clone(), cause };
        let names =
            || claim.devices.iter().map(|device| device.device.as_str()).collect::<Vec<_>>().join(", ");
        let _claim = self.claims.lock(uid).await;
        let (mut locked, record) =
            self.lock(uid, BTreeSet::new()).await.map_err(|unlocked| match unlocked {
                Unlocked::Lock(cause) => {
                    ChangeError::Locked { claim: claim.claim.clone(), devices: names(), cause }
                }
                Unlocked::Record(cause) => no_record(cause),
            })?;
        let Some(mut record) =
            record.filter(|record| record.state == HeldState::Prepared && is_of(record, claim))
        else {
            return Ok(false);
        };
        let mut changed = false;
        for (held, device) in record.devices.iter_mut().zip(&claim.devices) {
            let (Access::Share(limits), Ok(settings)) = (held.access, device.share_settings()) else {
                continue;
            };
            // The library lies in its containers already.
            let settings = ShareSettings { injection: limits.settings.injection, ..settings };
            changed |= settings != limits.settings;
            held.access = Access::Share(ShareLimits { settings, ..limits });
        }
        if changed {
            // The record last: as long as it says what was before, this is tried again.
            self.hands().write_pages(&mut record).await.map_err(|cause| ChangeError::Pages {
                claim: claim.claim.clone(),
                devices: names(),
                cause,
            })?;
            self.records.write(&mut locked, &record).map_err(no_record)?;
        }
        Ok(changed)
    }
}
