//! Reconciles records with the API server after registration.
//!
//! A record is released when its claim is gone, replaced by another of the same name, or allocated
//! elsewhere, and no pod of this node uses it. A kubelet that lost its state never asks for that. A
//! claim without a record that a running pod uses is prepared again, so that its devices go to no
//! other claim. If the API server does not answer, the round stops and is retried. Each decision is
//! made under the claim's mutex, with the pods read last, so that no prepare can come in between.

use crate::claims::claim_mutex::ClaimMutexes;
use crate::claims::engine::{Engine, HeldClaim, PrepareError, UnprepareError};
use crate::claims::fetch::{Claims, ReadError};
use crate::cluster::events::{EventSender, Reason};
use crate::metrics::Metrics;
use divvy_api::names::DRIVER;
use divvy_api::text::error_chain;
use divvy_api::{ClaimRef, ClaimUid, PoolName};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::{Api, Client};
use std::collections::BTreeSet;
use std::time::Duration;

/// Dependencies of the reconciliation.
#[derive(Clone)]
pub struct Reconciler {
    pub engine: Engine,
    pub claims: Claims,
    pub client: Client,
    pub node: String,
    pub pool: PoolName,
    pub claim_mutexes: ClaimMutexes,
    pub events: EventSender,
    pub metrics: Metrics,
    /// Deadline of one read from the API server.
    pub read_timeout: Duration,
}

/// Pause after a round without errors.
const ROUND_INTERVAL: Duration = Duration::from_secs(600);
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Why a round was not finished.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error(transparent)]
    Claim(#[from] ReadError),
    #[error("the pods of this node cannot be listed")]
    Pods(#[source] Box<kube::Error>),
    #[error("the pods of this node were not listed within {within:?}")]
    Deadline { within: Duration },
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Unprepare(#[from] UnprepareError),
}

/// The fields of a pod that reconciliation needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PodUse {
    uid: String,
    namespace: String,
    /// Names of the claims that the pod uses.
    claims: BTreeSet<String>,
    stage: PodStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PodStage {
    /// Its containers run or may start.
    Active,
    /// Its containers run, and the pod is not being deleted.
    Running,
    /// All its containers have terminated.
    Finished,
}

impl From<&Pod> for PodUse {
    fn from(pod: &Pod) -> Self {
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let named = spec.and_then(|spec| spec.resource_claims.as_ref()).into_iter().flatten();
        let named = named.filter_map(|claim| claim.resource_claim_name.clone());
        let made = status.and_then(|status| status.resource_claim_statuses.as_ref()).into_iter().flatten();
        let made = made.filter_map(|claim| claim.resource_claim_name.clone());
        let extended = status.and_then(|status| status.extended_resource_claim_status.as_ref());
        let extended = extended.map(|claim| claim.resource_claim_name.clone());
        let stage = match status.and_then(|status| status.phase.as_deref()) {
            Some("Succeeded" | "Failed") => PodStage::Finished,
            Some("Running") if pod.metadata.deletion_timestamp.is_none() => PodStage::Running,
            _ => PodStage::Active,
        };
        Self {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            claims: named.chain(made).chain(extended).collect(),
            stage,
        }
    }
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

fn is_reserved_for(claim: &ResourceClaim, pod: &str) -> bool {
    let consumers = claim.status.as_ref().and_then(|status| status.reserved_for.as_ref());
    consumers.into_iter().flatten().any(|consumer| consumer.resource == "pods" && consumer.uid == pod)
}

/// Whether a pod still uses the claim of the record. If the current claim of that name is reserved
/// for a pod, the pod uses that claim and not its predecessor.
fn has_pod(held: &HeldClaim, current: Option<&ResourceClaim>, users: &[PodUse]) -> bool {
    let successor = current.filter(|claim| claim.metadata.uid.as_deref() != Some(held.claim.uid.as_str()));
    users.iter().any(|user| {
        user.stage != PodStage::Finished
            && user.namespace == held.claim.namespace
            && user.claims.contains(&held.claim.name)
            && !successor.is_some_and(|claim| is_reserved_for(claim, &user.uid))
    })
}

/// The UID of a claim that is reserved for the pod and allocated here, but has no record.
fn find_unrecorded(
    claim: &ResourceClaim,
    pod: &PodUse,
    pool: &PoolName,
    held: &BTreeSet<ClaimUid>,
) -> Option<ClaimUid> {
    let uid = ClaimUid::from(claim.metadata.uid.as_deref()?);
    let in_use = is_reserved_for(claim, &pod.uid) && is_allocated_here(claim, pool);
    (in_use && !held.contains(&uid)).then_some(uid)
}

impl Reconciler {
    /// Runs rounds for the life of the daemon.
    pub async fn run(self) {
        let mut retry = RETRY_MIN;
        loop {
            let pause = match self.round().await {
                Ok(()) => {
                    tracing::debug!("records reconciled with the API server");
                    retry = RETRY_MIN;
                    ROUND_INTERVAL
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
    async fn round(&self) -> Result<(), RoundError> {
        let mut first = Ok(());
        for held in self.engine.held() {
            first = first.and(self.release_orphan(&held).await);
        }
        let held: BTreeSet<ClaimUid> = self.engine.held().into_iter().map(|held| held.claim.uid).collect();
        for user in self.pods().await?.iter().filter(|user| user.stage == PodStage::Running) {
            for name in &user.claims {
                first = first.and(self.prepare_missing(user, name, &held).await);
            }
        }
        first
    }

    async fn release_orphan(&self, held: &HeldClaim) -> Result<(), RoundError> {
        let _claim = self.claim_mutexes.lock(&held.claim.uid).await;
        let current = self.claims.current(&held.claim).await?;
        let Some(why) = orphan(held, current.as_ref(), &self.pool) else { return Ok(()) };
        if has_pod(held, current.as_ref(), &self.pods().await?) {
            return Ok(());
        }
        tracing::info!(
            claim = %held.claim, uid = %held.claim.uid, ?why,
            "releasing a claim that no pod uses"
        );
        let result = self.engine.unprepare(&held.claim.uid).await;
        self.metrics.reconciled(result.is_ok());
        if let Err(error) = &result {
            self.events.claim(&held.claim, Reason::UnprepareFailed, &error_chain(error));
        }
        Ok(result?)
    }

    async fn prepare_missing(
        &self,
        user: &PodUse,
        name: &str,
        held: &BTreeSet<ClaimUid>,
    ) -> Result<(), RoundError> {
        let named = |uid| ClaimRef { namespace: user.namespace.clone(), name: name.to_owned(), uid };
        let Some(current) = self.claims.current(&named(ClaimUid::from(""))).await? else { return Ok(()) };
        let Some(uid) = find_unrecorded(&current, user, &self.pool, held) else { return Ok(()) };
        let claim = named(uid);
        let _claim = self.claim_mutexes.lock(&claim.uid).await;
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

    async fn pods(&self) -> Result<Vec<PodUse>, RoundError> {
        let api: Api<Pod> = Api::all(self.client.clone());
        let here = ListParams::default().fields(&format!("spec.nodeName={}", self.node));
        match tokio::time::timeout(self.read_timeout, api.list(&here)).await {
            Err(_) => Err(RoundError::Deadline { within: self.read_timeout }),
            Ok(Err(cause)) => Err(RoundError::Pods(Box::new(cause))),
            Ok(Ok(pods)) => Ok(pods.iter().map(PodUse::from).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::records::HeldState;
    use serde_json::json;

    const POOL: &str = "node-1";

    fn held() -> HeldClaim {
        let claim = ClaimRef { namespace: "ns".to_owned(), name: "c".to_owned(), uid: "old".into() };
        HeldClaim { claim, state: HeldState::Prepared, devices: vec!["gpu-0".into()] }
    }

    /// A claim with that UID, allocated in that pool and reserved for these pods.
    fn claim(uid: &str, pool: Option<&str>, pods: &[&str]) -> ResourceClaim {
        let allocation = pool.map(|pool| {
            let result = json!({"driver": DRIVER, "pool": pool, "device": "gpu-0", "request": "r"});
            json!({"devices": {"results": [result]}})
        });
        let consumer = |uid: &&str| json!({"resource": "pods", "name": uid, "uid": uid});
        let consumers: Vec<_> = pods.iter().map(consumer).collect();
        serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": "c", "uid": uid},
            "spec": {},
            "status": {"allocation": allocation, "reservedFor": consumers},
        }))
        .unwrap()
    }

    fn pod(uid: &str, phase: &str, ending: bool) -> PodUse {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {
                "namespace": "ns", "name": uid, "uid": uid,
                "deletionTimestamp": ending.then_some("2026-01-01T00:00:00Z"),
            },
            "spec": {"containers": [], "resourceClaims": [{"name": "x", "resourceClaimTemplateName": "t"}]},
            "status": {"phase": phase, "resourceClaimStatuses": [{"name": "x", "resourceClaimName": "c"}]},
        }))
        .unwrap();
        PodUse::from(&pod)
    }

    fn check(current: Option<ResourceClaim>, users: &[PodUse], expected: Option<Orphan>) {
        let (held, pool) = (held(), PoolName::from(POOL));
        let why = orphan(&held, current.as_ref(), &pool).filter(|_| !has_pod(&held, current.as_ref(), users));
        assert_eq!(why, expected, "{current:?} {users:?}");
    }

    #[test]
    fn only_record_without_claim_and_pod_is_released() {
        let alive = || [pod("p", "Pending", false)];
        let over = || [pod("p", "Succeeded", false)];
        check(None, &[], Some(Orphan::Gone));
        check(None, &over(), Some(Orphan::Gone));
        check(None, &alive(), None);
        check(Some(claim("old", Some(POOL), &[])), &[], None);
        check(Some(claim("old", None, &[])), &[], Some(Orphan::NotAllocatedHere));
        check(Some(claim("old", Some("node-2"), &["p"])), &[], Some(Orphan::NotAllocatedHere));
        check(Some(claim("old", None, &[])), &alive(), None);
        check(Some(claim("new", Some(POOL), &[])), &[], Some(Orphan::Replaced));
    }

    #[test]
    fn pod_of_new_claim_does_not_keep_the_old_record() {
        let pods = [pod("p", "Pending", false)];
        check(Some(claim("new", Some(POOL), &["p"])), &pods, Some(Orphan::Replaced));
        check(Some(claim("new", Some(POOL), &["other"])), &pods, None);
    }

    fn check_missing(current: ResourceClaim, held: &[&str], expected: Option<&str>) {
        let held = held.iter().map(|uid| ClaimUid::from(*uid)).collect();
        let found = find_unrecorded(&current, &pod("p", "Running", false), &POOL.into(), &held);
        assert_eq!(found, expected.map(ClaimUid::from));
    }

    #[test]
    fn claim_in_use_without_record_is_found() {
        check_missing(claim("u", Some(POOL), &["p"]), &[], Some("u"));
        check_missing(claim("u", Some(POOL), &["p"]), &["u"], None);
        check_missing(claim("u", Some(POOL), &["q"]), &[], None);
        check_missing(claim("u", Some("node-2"), &["p"]), &[], None);
        check_missing(claim("u", None, &["p"]), &[], None);
        assert_eq!(pod("p", "Running", false).stage, PodStage::Running);
        assert_eq!(pod("p", "Running", true).stage, PodStage::Active);
    }

    #[test]
    fn all_references_from_pods_to_claims_are_found() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": "p", "uid": "p"},
            "spec": {"containers": [], "resourceClaims": [{"name": "a", "resourceClaimName": "direct"}]},
            "status": {
                "resourceClaimStatuses": [{"name": "b", "resourceClaimName": "made"}, {"name": "none"}],
                "extendedResourceClaimStatus": {"resourceClaimName": "extended", "requestMappings": []},
            },
        }))
        .unwrap();
        let names = ["direct", "extended", "made"].map(str::to_owned);
        assert_eq!(PodUse::from(&pod).claims, BTreeSet::from(names));
    }
}
