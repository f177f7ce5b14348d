//! Reconciles records and files with the API server and the kubelet after registration.
//!
//! A record is released when its claim is gone, replaced by another of the same name, or allocated
//! elsewhere, and no container uses it ([`crate::claims::uses`]). The API server alone is not
//! believed: a deletion by force says nothing about containers. A claim in use without a record is
//! prepared again, so that its devices go to no other claim. Files without a record are removed
//! once they are unused. Without an answer of the kubelet, nothing is released or removed.

use crate::claims::claim_mutex::ClaimMutexes;
use crate::claims::engine::{Engine, HeldClaim, PrepareError, UnprepareError};
use crate::claims::fetch::{Claims, ReadError};
use crate::claims::leftovers::Leftover;
use crate::claims::records::RecordError;
use crate::claims::uses::{self, KubeletView, Listed, Owner, ScanError, Uses, ViewError};
use crate::cluster::consumers::{ConsumerKind, consumers};
use crate::cluster::events::{EventSender, Reason};
use crate::metrics::Metrics;
use divvy_api::names::DRIVER;
use divvy_api::text::error_chain;
use divvy_api::{ClaimRef, ClaimUid, PoolName};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedMutexGuard;

/// Dependencies of the reconciliation.
#[derive(Clone)]
pub struct Reconciler {
    pub engine: Engine,
    pub claims: Claims,
    pub kubelet: Arc<dyn KubeletView>,
    /// The `/proc` of the host's processes.
    pub process_root: PathBuf,
    pub pool: PoolName,
    pub claim_mutexes: ClaimMutexes,
    pub events: EventSender,
    pub metrics: Metrics,
}

/// Pause after a round that left nothing to do.
const ROUND_INTERVAL: Duration = Duration::from_secs(600);
/// Pause after a round that kept a record or files only because a container uses them. As long as
/// the interval at which recovery compares records with the hardware.
const KEPT_INTERVAL: Duration = Duration::from_secs(10);
/// Longest wait for a claim's mutex. Others are held meanwhile, so a hanging call must not stop them.
const MUTEX_TIMEOUT: Duration = Duration::from_secs(10);
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Why a round was not finished.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error(transparent)]
    Claim(#[from] ReadError),
    #[error("nothing is released, because the containers of this node are not known")]
    Kubelet(#[from] ViewError),
    #[error("nothing is released, because the mounts of processes are not known")]
    Mounts(#[from] ScanError),
    #[error("nothing is released: reading the mounts of processes panicked")]
    Panicked,
    #[error("nothing is released, because the held claims are not known")]
    Records(#[from] RecordError),
    #[error("claim {claim}: another call still works on it")]
    Busy { claim: ClaimRef },
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Unprepare(#[from] UnprepareError),
}

/// Why a record has no claim any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Orphan {
    Gone,
    Replaced,
    NotAllocatedHere,
}

/// Whether the record's claim certainly does not belong to this node any more.
fn orphan(held: &HeldClaim, current: Option<&ResourceClaim>, pool: &PoolName) -> Option<Orphan> {
    match current {
        None => Some(Orphan::Gone),
        Some(claim) if claim.metadata.uid.as_deref() != Some(held.claim.uid.as_str()) => {
            Some(Orphan::Replaced)
        }
        Some(claim) if !is_allocated_here(claim, pool) => Some(Orphan::NotAllocatedHere),
        Some(_) => None,
    }
}

fn is_allocated_here(claim: &ResourceClaim, pool: &PoolName) -> bool {
    let results = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref()?.devices.as_ref()?.results.as_ref())
        .into_iter()
        .flatten();
    results.into_iter().any(|result| result.driver == DRIVER && result.pool == pool.as_str())
}

/// The UID of the claim of that name, if it is allocated here, has no record, and is the one that the
/// containers use. Any consumer counts, also one of a kind that this version does not know.
fn find_unrecorded(
    claim: &ResourceClaim,
    is_used: impl Fn(&ClaimUid) -> bool,
    pool: &PoolName,
    held: &BTreeSet<ClaimUid>,
) -> Option<ClaimUid> {
    let uid = ClaimUid::from(claim.metadata.uid.as_deref()?);
    let in_use = is_allocated_here(claim, pool) && is_used(&uid);
    (in_use && !held.contains(&uid)).then_some(uid)
}

/// Whether the kubelet lists a pod for which the claim is reserved, and no claim at all: it is older
/// than 1.34, or its gate is off. Only mounts show uses then.
fn hides_claims(listed: &Listed, claim: &ResourceClaim) -> bool {
    let namespace = claim.metadata.namespace.clone().unwrap_or_default();
    let pods = consumers(claim).into_iter().filter(|consumer| consumer.kind == ConsumerKind::Pod);
    !listed.reports_claims && pods.into_iter().any(|pod| listed.pods.contains(&(namespace.clone(), pod.name)))
}

/// A record that may be released, with the claim's mutex: no prepare comes in between.
struct Candidate {
    held: HeldClaim,
    why: Orphan,
    mutex: OwnedMutexGuard<()>,
}

/// Records and files that a round kept only because containers use them, each with a description.
type Kept = BTreeMap<Owner, String>;

/// The result of the first part of a round.
#[derive(Default)]
struct Found {
    candidates: Vec<Candidate>,
    /// Claims that belong to this node, as the API server has them.
    current: Vec<ResourceClaim>,
}

impl Reconciler {
    /// Runs rounds for the life of the daemon.
    pub async fn run(self) {
        let (mut retry, mut reported) = (RETRY_MIN, Kept::new());
        loop {
            let pause = match self.round().await {
                Ok(kept) => {
                    tracing::debug!(
                        kept = kept.len(),
                        "records reconciled with the API server and the kubelet"
                    );
                    for (owner, what) in kept.iter().filter(|(owner, _)| !reported.contains_key(owner)) {
                        tracing::info!(%owner, "{what} kept: a container uses it");
                    }
                    retry = RETRY_MIN;
                    reported = kept;
                    if reported.is_empty() { ROUND_INTERVAL } else { KEPT_INTERVAL }
                }
                Err(error) => {
                    tracing::warn!(error = error_chain(&error), ?retry, "records not reconciled; retrying");
                    let pause = retry;
                    retry = (retry * 2).min(RETRY_MAX);
                    pause
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// One round. A failed claim does not stop the others; the first error is returned.
    async fn round(&self) -> Result<Kept, RoundError> {
        let (found, mut first) = self.find_candidates().await?;
        let leftovers = self.engine.leftovers();
        // Read after the mutexes were locked: later no container of a candidate can start.
        let uses = self.read_uses(&found.candidates, &leftovers).await?;
        if found.current.iter().any(|claim| hides_claims(&uses.listed, claim)) {
            tracing::info!(
                "the kubelet does not list claims (gate KubeletPodResourcesDynamicResources); only \
                 mounts show which claims are in use"
            );
        }
        let mut kept = Kept::new();
        for candidate in found.candidates {
            match uses.of_claim(&candidate.held.claim) {
                Some(sign) => {
                    let Candidate { held: HeldClaim { claim, .. }, why, .. } = candidate;
                    let what = format!("record of {why:?} claim {claim} ({sign:?})");
                    kept.insert(Owner::Claim(claim.uid), what);
                }
                None => first = first.and(self.release(candidate).await),
            }
        }
        let held: BTreeSet<ClaimUid> = self.engine.held()?.into_iter().map(|held| held.claim.uid).collect();
        for claim in self.used_without_record(&uses, &leftovers, &held) {
            first = first.and(self.prepare_missing(&claim, &held).await);
        }
        for (owner, sign) in self.engine.remove_leftovers(&leftovers, &uses).await {
            kept.insert(owner, format!("files without a record ({sign:?})"));
        }
        first.map(|()| kept)
    }

    /// The records whose claim is gone from this node, each with its claim's mutex locked. All
    /// mutexes are held at once, so that one reading of the node's uses decides for all of them.
    async fn find_candidates(&self) -> Result<(Found, Result<(), RoundError>), RoundError> {
        let (mut found, mut first) = (Found::default(), Ok(()));
        for held in self.engine.held()? {
            match self.find_orphan(&held, &mut found.current).await {
                Ok(None) => continue,
                Ok(Some(_)) => {}
                Err(error) => {
                    first = first.and(Err(error));
                    continue;
                }
            }
            let mutex = tokio::time::timeout(MUTEX_TIMEOUT, self.claim_mutexes.lock(&held.claim.uid));
            let Ok(mutex) = mutex.await else {
                first = first.and(Err(RoundError::Busy { claim: held.claim }));
                continue;
            };
            // The claim may have been allocated here again in between.
            match self.find_orphan(&held, &mut found.current).await {
                Ok(None) => {}
                Ok(Some(why)) => found.candidates.push(Candidate { held, why, mutex }),
                Err(error) => first = first.and(Err(error)),
            }
        }
        Ok((found, first))
    }

    async fn find_orphan(
        &self,
        held: &HeldClaim,
        current: &mut Vec<ResourceClaim>,
    ) -> Result<Option<Orphan>, RoundError> {
        let claim = self.claims.current(&held.claim).await?;
        let why = orphan(held, claim.as_ref(), &self.pool);
        current.extend(claim.filter(|_| why.is_none()));
        Ok(why)
    }

    /// The kubelet's list, then the mounts: a container that starts in between has both.
    async fn read_uses(&self, candidates: &[Candidate], leftovers: &[Leftover]) -> Result<Uses, RoundError> {
        let listed = self.kubelet.list().await?;
        let claims = candidates.iter().map(|candidate| Owner::Claim(candidate.held.claim.uid.clone()));
        let owners = leftovers.iter().map(|leftover| leftover.owner.clone());
        let wanted: BTreeSet<Owner> = claims.chain(owners).collect();
        let root = self.process_root.clone();
        // On a thread of its own, because a tenant can make it take seconds.
        let scan = tokio::task::spawn_blocking(move || uses::mounted(&root, &wanted));
        let mounted = scan.await.map_err(|_| RoundError::Panicked)??;
        Ok(Uses { listed, mounted })
    }

    async fn release(&self, candidate: Candidate) -> Result<(), RoundError> {
        let Candidate { held, why, mutex: _mutex } = candidate;
        tracing::info!(
            claim = %held.claim, uid = %held.claim.uid, ?why,
            "releasing a claim that no container uses"
        );
        let result = self.engine.unprepare(&held.claim.uid).await;
        self.metrics.reconciled(result.is_ok());
        if let Err(error) = &result {
            self.events.claim(&held.claim, Reason::UnprepareFailed, &error_chain(error));
        }
        Ok(result?)
    }

    /// Namespace and name of the claims without a record that containers use: from the kubelet's
    /// list, and from the metadata of claims whose files processes have mounted.
    fn used_without_record(
        &self,
        uses: &Uses,
        leftovers: &[Leftover],
        held: &BTreeSet<ClaimUid>,
    ) -> BTreeSet<(String, String)> {
        let prepared = uses.listed.claims.iter().filter(|listed| !listed.cdi_ids.is_empty());
        let listed = prepared.filter(|listed| !held.iter().any(|uid| listed.has_device_of(uid)));
        let listed = listed.map(|listed| (listed.namespace.clone(), listed.name.clone()));
        let mounted = leftovers.iter().filter_map(|leftover| match &leftover.owner {
            Owner::Claim(uid) if uses.mounted.contains_key(&leftover.owner) => {
                let claim = self.engine.described_claim(uid)?;
                Some((claim.namespace, claim.name))
            }
            _ => None,
        });
        listed.chain(mounted).collect()
    }

    async fn prepare_missing(
        &self,
        (namespace, name): &(String, String),
        held: &BTreeSet<ClaimUid>,
    ) -> Result<(), RoundError> {
        let named = |uid| ClaimRef { namespace: namespace.clone(), name: name.clone(), uid };
        let Some(current) = self.claims.current(&named(ClaimUid::from(""))).await? else { return Ok(()) };
        let Some(uid) = find_unrecorded(&current, |_| true, &self.pool, held) else { return Ok(()) };
        let claim = named(uid);
        let _claim = self.claim_mutexes.lock(&claim.uid).await;
        // Read again under the mutex: the kubelet may have unprepared the claim in between.
        let leftovers: Vec<Leftover> = self.engine.leftovers();
        let uses = self.read_uses(&[], &leftovers).await?;
        let is_used = |uid: &ClaimUid| uses.of_owner(&Owner::Claim(uid.clone())).is_some();
        if find_unrecorded(&current, is_used, &self.pool, held).is_none() {
            return Ok(());
        }
        let result = match self.claims.allocated(&claim).await {
            Ok(allocated) => self.engine.prepare(&allocated).await,
            Err(error) if error.is_outage() => return Err(error.into()),
            // A claim that a prepare of the kubelet would refuse is not prepared here either.
            Err(error) => {
                let error = error_chain(&error);
                tracing::warn!(%claim, error, "a claim in use has no record and cannot be prepared again");
                return Ok(());
            }
        };
        self.metrics.reconciled(result.is_ok());
        match &result {
            Ok(_) => {
                tracing::info!(%claim, uid = %claim.uid, "a claim in use without a record was prepared again")
            }
            Err(error) => self.events.claim(&claim, Reason::PrepareFailed, &error_chain(error)),
        }
        result.map(|_| ()).map_err(RoundError::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::records::HeldState;
    use crate::claims::uses::ListedClaim;
    use serde_json::{Value, json};

    const POOL: &str = "node-1";

    fn held() -> HeldClaim {
        let claim = ClaimRef { namespace: "ns".to_owned(), name: "c".to_owned(), uid: "old".into() };
        HeldClaim { claim, state: HeldState::Prepared, devices: vec!["gpu-0".into()] }
    }

    /// A claim with that UID, allocated in that pool and reserved for these consumers.
    fn claim(uid: &str, pool: Option<&str>, consumers: &[Value]) -> ResourceClaim {
        let allocation = pool.map(|pool| {
            let result = json!({"driver": DRIVER, "pool": pool, "device": "gpu-0", "request": "r"});
            json!({"devices": {"results": [result]}})
        });
        serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": "c", "uid": uid},
            "spec": {},
            "status": {"allocation": allocation, "reservedFor": consumers},
        }))
        .unwrap()
    }

    fn consumer(group: &str, resource: &str) -> Value {
        json!({"apiGroup": group, "resource": resource, "name": "p", "uid": "p"})
    }

    /// The kubelet's list with one claim, whose CDI device belongs to that UID.
    fn listing(uid: &str) -> Listed {
        let cdi_ids = vec![format!("gpu.divvy.dev/claim={uid}-gpu-0")];
        let claim = ListedClaim { namespace: "ns".to_owned(), name: "c".to_owned(), cdi_ids };
        Listed { claims: vec![claim], reports_claims: true, ..Listed::default() }
    }

    fn check(current: Option<ResourceClaim>, uses: &Uses, expected: Option<Orphan>) {
        let (held, pool) = (held(), PoolName::from(POOL));
        let why = orphan(&held, current.as_ref(), &pool).filter(|_| uses.of_claim(&held.claim).is_none());
        assert_eq!(why, expected, "{current:?} {uses:?}");
    }

    #[test]
    fn only_record_without_claim_and_use_is_released() {
        let unused = Uses::default();
        let listed = |uid| Uses { listed: listing(uid), ..Uses::default() };
        let mounted = Uses { mounted: [(Owner::Claim("old".into()), 1)].into(), ..Uses::default() };
        check(None, &unused, Some(Orphan::Gone));
        check(None, &listed("old"), None);
        check(None, &mounted, None);
        check(Some(claim("old", Some(POOL), &[])), &unused, None);
        check(Some(claim("old", None, &[])), &unused, Some(Orphan::NotAllocatedHere));
        check(Some(claim("old", Some("node-2"), &[])), &unused, Some(Orphan::NotAllocatedHere));
        check(Some(claim("old", None, &[])), &listed("old"), None);
        check(Some(claim("new", Some(POOL), &[])), &unused, Some(Orphan::Replaced));
        check(Some(claim("new", Some(POOL), &[])), &listed("new"), Some(Orphan::Replaced));
        check(Some(claim("new", Some(POOL), &[])), &listed("old"), None);
        check(Some(claim("new", Some(POOL), &[])), &mounted, None);
    }

    fn check_missing(current: ResourceClaim, used: &str, held: &[&str], expected: Option<&str>) {
        let held = held.iter().map(|uid| ClaimUid::from(*uid)).collect();
        let uses = Uses { listed: listing(used), ..Uses::default() };
        let is_used = |uid: &ClaimUid| uses.of_owner(&Owner::Claim(uid.clone())).is_some();
        let found = find_unrecorded(&current, is_used, &POOL.into(), &held);
        assert_eq!(found, expected.map(ClaimUid::from), "{current:?}");
    }

    #[test]
    fn claim_in_use_without_record_is_found() {
        let groups = [("", "pods"), ("scheduling.k8s.io", "podgroups"), ("example.com", "machines")];
        for (group, resource) in groups {
            check_missing(claim("u", Some(POOL), &[consumer(group, resource)]), "u", &[], Some("u"));
        }
        check_missing(claim("u", Some(POOL), &[]), "u", &["u"], None);
        check_missing(claim("u", Some(POOL), &[]), "predecessor", &[], None);
        check_missing(claim("u", Some("node-2"), &[]), "u", &[], None);
        check_missing(claim("u", None, &[]), "u", &[], None);
    }

    fn check_hidden(listed: Listed, consumer: Value, expected: bool) {
        let listed = Listed { pods: [("ns".to_owned(), "p".to_owned())].into(), ..listed };
        assert_eq!(hides_claims(&listed, &claim("u", Some(POOL), &[consumer])), expected);
    }

    #[test]
    fn kubelet_that_lists_pods_without_claims_is_recognised() {
        check_hidden(Listed::default(), consumer("", "pods"), true);
        check_hidden(listing("u"), consumer("", "pods"), false);
        check_hidden(Listed::default(), consumer("scheduling.k8s.io", "podgroups"), false);
        let elsewhere = json!({"resource": "pods", "name": "q", "uid": "q"});
        check_hidden(Listed::default(), elsewhere, false);
    }
}
