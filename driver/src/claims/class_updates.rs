//! Applies changes of DeviceClasses to the shares of prepared claims.
//!
//! An allocated claim carries a copy of its class's configuration, so a later change of the class
//! would not reach running shares without this task.

use crate::claims::claim_mutex::ClaimMutexes;
use crate::claims::engine::{Engine, HeldShare};
use crate::claims::fetch::Claims;
use crate::cluster::classes::{ClassIndex, Classes, now, resolve, since_epoch, until_next_minute};
use divvy_api::sharing::ShareSettings;
use divvy_api::text::error_chain;
use divvy_api::{AllocatedClaim, ClaimRef, ClaimUid, ShareId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Retry interval after the API server did not answer.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Keeps the share settings of prepared claims in line with their classes.
pub struct ClassUpdater {
    pub classes: Classes,
    pub engine: Engine,
    pub claims: Claims,
    pub claim_mutexes: ClaimMutexes,
}

impl ClassUpdater {
    /// Runs for the life of the daemon. It acts when the classes are first known, after each change
    /// of a class, and each minute while a class has a schedule.
    pub async fn run(mut self) {
        let mut cache = BTreeMap::new();
        let mut timeout = Duration::MAX;
        loop {
            tokio::select! {
                changed = self.classes.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = tokio::time::sleep(timeout) => {}
            }
            let classes = self.classes.borrow_and_update().clone();
            let all_applied = self.apply(&classes, &mut cache).await;
            timeout = match (all_applied, classes.has_schedules()) {
                (false, _) => RETRY_INTERVAL,
                (true, true) => until_next_minute(since_epoch()),
                (true, false) => Duration::MAX,
            };
        }
    }

    /// Applies the classes to all prepared shares. Returns false if a claim could not be read or
    /// changed.
    async fn apply(&self, classes: &ClassIndex, cache: &mut BTreeMap<ClaimUid, Allocated>) -> bool {
        let mut held: BTreeMap<ClaimUid, PreparedShares> = BTreeMap::new();
        for HeldShare { claim, share, settings, .. } in self.engine.shares() {
            let of_claim = held.entry(claim.uid.clone()).or_insert_with(|| PreparedShares::of(claim));
            of_claim.has_defaults &= settings == ShareSettings::default();
            of_claim.shares.insert(share);
        }
        cache.retain(|uid, allocated| held.get(uid).is_some_and(|held| held.shares == allocated.shares));
        // Common case: no class configures shares, so claims with default settings need not be read.
        let no_class_configs = classes.has_no_configs();
        let mut all_applied = true;
        for (uid, held) in held.into_iter().filter(|(_, held)| !(no_class_configs && held.has_defaults)) {
            let PreparedShares { claim, shares, .. } = held;
            let _claim = self.claim_mutexes.lock(&uid).await;
            if !cache.contains_key(&uid) {
                match self.claims.as_allocated(&claim).await {
                    Ok(read) => drop(cache.insert(uid.clone(), Allocated { claim: read, shares })),
                    Err(error) => {
                        all_applied &= !error.is_outage();
                        tracing::debug!(
                            %claim, error = error_chain(&error),
                            "cannot read the claim; share settings not checked"
                        );
                        continue;
                    }
                }
            }
            let Some(Allocated { claim: allocated, .. }) = cache.get(&uid) else { continue };
            let mut allocated = allocated.clone();
            resolve(&mut allocated, classes, now());
            match self.engine.change_shares(&allocated).await {
                Ok(true) => tracing::info!(%claim, %uid, "share settings updated from the DeviceClass"),
                Ok(false) => {}
                Err(error) => {
                    all_applied = false;
                    let error = error_chain(&error);
                    tracing::warn!(%claim, %uid, error, "cannot update share settings from the DeviceClass");
                }
            }
        }
        all_applied
    }
}

/// A claim as it was allocated. The copy stays valid while the claim has these share IDs: a new
/// allocation has others.
struct Allocated {
    claim: AllocatedClaim,
    shares: BTreeSet<ShareId>,
}

/// The shares of one prepared claim.
struct PreparedShares {
    claim: ClaimRef,
    shares: BTreeSet<ShareId>,
    /// Whether all shares have the default settings.
    has_defaults: bool,
}

impl PreparedShares {
    fn of(claim: ClaimRef) -> Self {
        Self { claim, shares: BTreeSet::new(), has_defaults: true }
    }
}
