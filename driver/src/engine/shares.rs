//! The shares that prepared claims have, for whoever measures them.

use super::{Engine, HeldState};
use crate::records::ClaimRecord;
use crate::shares::Shares;
use divvy_api::{ClaimRef, DeviceName, ShareId};

/// A share of a prepared claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldShare {
    pub claim: ClaimRef,
    pub device: DeviceName,
    pub share: ShareId,
    /// Bytes that it may have.
    pub limit: u64,
    /// Bytes that its own account says it has; none where that cannot be read.
    pub used: Option<u64>,
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
                used: pages.used(&record.claim.uid, share),
            });
            held.collect::<Vec<_>>()
        };
        let prepared = records.iter().filter(|record| record.state == HeldState::Prepared);
        prepared.flat_map(of_claim).collect()
    }
}
