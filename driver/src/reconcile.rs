//! Records against the API server, after registration: what the kubelet and
//! this driver lost sight of.
//!
//! A record is released when its claim is surely gone, replaced by another of
//! its name, or no longer allocated to this node, and no pod of this node uses
//! it: a kubelet that lost its own memory will never ask for that. A claim that
//! a running pod holds and that has no record (quarantined, or lost with the
//! disk) is prepared again, so that nobody else gets its devices.
//!
//! Silence proves nothing: an API server that does not answer ends the round,
//! and it is tried again. Each decision is made while holding the claim's turn
//! ([`crate::turns`]), with the pods read last, so a prepare cannot come between.
//! Nothing here is on anybody's way: it reads the pods of this node and single claims.

use crate::claims::{Claims, ReadError};
use crate::engine::{Engine, HeldClaim, PrepareError, UnprepareError};
use crate::events::{Events, Reason};
use crate::metrics::Metrics;
use crate::service::chain;
use crate::turns::Turns;
use divvy_api::names::DRIVER;
use divvy_api::{ClaimRef, ClaimUid, PoolName};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::{Api, Client};
use std::collections::BTreeSet;
use std::time::Duration;

/// What a round needs.
#[derive(Clone)]
pub struct Reconciler {
    pub engine: Engine,
    pub claims: Claims,
    pub client: Client,
    pub node: String,
    pub pool: PoolName,
    pub turns: Turns,
    pub events: Events,
    pub metrics: Metrics,
    /// Deadline of one read.
    pub read_within: Duration,
}

/// Between rounds that went well.
const EVERY: Duration = Duration::from_secs(600);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

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

/// What of a pod matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User {
    uid: String,
    namespace: String,
    /// Names of the claims it uses.
    claims: BTreeSet<String>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its containers may run or may be about to.
    Alive,
    /// Its containers run and nobody has asked for its end.
    Running,
    /// Nothing of it runs any more.
    Over,
}

impl From<&Pod> for User {
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
            Some("Succeeded" | "Failed") => Stage::Over,
            Some("Running") if pod.metadata.deletion_timestamp.is_none() => Stage::Running,
            _ => Stage::Alive,
        };
        Self {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            claims: named.chain(made).chain(extended).collect(),
            stage,
        }
    }
}

/// Why a record has no claim behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Orphan {
    Gone,
    Replaced,
    NotAllocatedHere,
}

/// Whether the record's claim is surely not ours any more.
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

/// Whether a pod still uses the claim that the record is of. A pod for which
/// the present claim of that name is reserved uses that one, not its predecessor.
fn is_used(held: &HeldClaim, current: Option<&ResourceClaim>, users: &[User]) -> bool {
    let successor = current.filter(|claim| claim.metadata.uid.as_deref() != Some(held.claim.uid.as_str()));
    users.iter().any(|user| {
        user.stage != Stage::Over
            && user.namespace == held.claim.namespace
            && user.claims.contains(&held.claim.name)
            && !successor.is_some_and(|claim| is_reserved_for(claim, &user.uid))
    })
}

/// The claim a running pod holds here although no record says so.
fn is_missing(
    claim: &ResourceClaim,
    pod: &User,
    pool: &PoolName,
    held: &BTreeSet<ClaimUid>,
) -> Option<ClaimUid> {
    let uid = ClaimUid::from(claim.metadata.uid.as_deref()?);
    let in_use = is_reserved_for(claim, &pod.uid) && is_allocated_here(claim, pool);
    (in_use && !held.contains(&uid)).then_some(uid)
}

impl Reconciler {
    /// Round after round, for as long as the daemon runs.
    pub async fn run(self) {
        let mut retry = FIRST_RETRY;
        loop {
            let pause = match self.round().await {
                Ok(()) => {
                    tracing::debug!("records were held against the API server");
                    retry = FIRST_RETRY;
                    EVERY
                }
                Err(error) => {
                    tracing::warn!(error = chain(&error), ?retry, "records not reconciled");
                    let pause = retry;
                    retry = (retry * 2).min(LONGEST_RETRY);
                    pause
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// One round. One claim's failure does not keep it from the others; the first is told.
    async fn round(&self) -> Result<(), RoundError> {
        let mut first = Ok(());
        for held in self.engine.held() {
            first = first.and(self.release_orphan(&held).await);
        }
        let held: BTreeSet<ClaimUid> = self.engine.held().into_iter().map(|held| held.claim.uid).collect();
        for user in self.users().await?.iter().filter(|user| user.stage == Stage::Running) {
            for name in &user.claims {
                first = first.and(self.prepare_missing(user, name, &held).await);
            }
        }
        first
    }

    async fn release_orphan(&self, held: &HeldClaim) -> Result<(), RoundError> {
        let _turn = self.turns.take(&held.claim.uid).await;
        let current = self.claims.current(&held.claim).await?;
        let Some(why) = orphan(held, current.as_ref(), &self.pool) else { return Ok(()) };
        if is_used(held, current.as_ref(), &self.users().await?) {
            return Ok(());
        }
        tracing::info!(claim = %held.claim, uid = %held.claim.uid, ?why, "releasing a claim that nobody has");
        let result = self.engine.unprepare(&held.claim.uid).await;
        self.metrics.reconciled(result.is_ok());
        if let Err(error) = &result {
            self.events.claim(&held.claim, Reason::UnprepareFailed, &chain(error));
        }
        Ok(result?)
    }

    async fn prepare_missing(
        &self,
        user: &User,
        name: &str,
        held: &BTreeSet<ClaimUid>,
    ) -> Result<(), RoundError> {
        let named = |uid| ClaimRef { namespace: user.namespace.clone(), name: name.to_owned(), uid };
        let Some(current) = self.claims.current(&named(ClaimUid::from(""))).await? else { return Ok(()) };
        let Some(uid) = is_missing(&current, user, &self.pool, held) else { return Ok(()) };
        let claim = named(uid);
        let _turn = self.turns.take(&claim.uid).await;
        let result = match self.claims.allocated(&claim).await {
            Ok(allocated) => self.engine.prepare(&allocated).await,
            Err(error) if error.is_outage() => return Err(error.into()),
            // A claim that the kubelet's prepare would refuse is not ours to force.
            Err(error) => {
                tracing::warn!(%claim, error = chain(&error), "a claim in use cannot be prepared again");
                return Ok(());
            }
        };
        self.metrics.reconciled(result.is_ok());
        match &result {
            Ok(_) => {
                tracing::info!(%claim, uid = %claim.uid, "a claim in use without a record was prepared again")
            }
            Err(error) => self.events.claim(&claim, Reason::PrepareFailed, &chain(error)),
        }
        result.map(|_| ()).map_err(RoundError::from)
    }

    async fn users(&self) -> Result<Vec<User>, RoundError> {
        let api: Api<Pod> = Api::all(self.client.clone());
        let here = ListParams::default().fields(&format!("spec.nodeName={}", self.node));
        match tokio::time::timeout(self.read_within, api.list(&here)).await {
            Err(_) => Err(RoundError::Deadline { within: self.read_within }),
            Ok(Err(cause)) => Err(RoundError::Pods(Box::new(cause))),
            Ok(Ok(pods)) => Ok(pods.iter().map(User::from).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::HeldState;
    use serde_json::json;

    const POOL: &str = "node-1";

    fn held() -> HeldClaim {
        let claim = ClaimRef { namespace: "ns".to_owned(), name: "c".to_owned(), uid: "old".into() };
        HeldClaim { claim, state: HeldState::Prepared, devices: vec!["gpu-0".into()] }
    }

    /// A claim of that UID, allocated in that pool, reserved for these pods.
    fn claim(uid: &str, pool: Option<&str>, pods: &[&str]) -> ResourceClaim {
        let allocation = pool.map(|pool| {
            json!({"devices": {"results": [{"driver": DRIVER, "pool": pool, "device": "gpu-0", "request": "r"}]}})
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

    fn pod(uid: &str, phase: &str, ending: bool) -> User {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {
                "namespace": "ns", "name": uid, "uid": uid,
                "deletionTimestamp": ending.then_some("2026-01-01T00:00:00Z"),
            },
            "spec": {"containers": [], "resourceClaims": [{"name": "x", "resourceClaimTemplateName": "t"}]},
            "status": {"phase": phase, "resourceClaimStatuses": [{"name": "x", "resourceClaimName": "c"}]},
        }))
        .unwrap();
        User::from(&pod)
    }

    fn check(current: Option<ResourceClaim>, users: &[User], expected: Option<Orphan>) {
        let (held, pool) = (held(), PoolName::from(POOL));
        let why = orphan(&held, current.as_ref(), &pool).filter(|_| !is_used(&held, current.as_ref(), users));
        assert_eq!(why, expected, "{current:?} {users:?}");
    }

    #[test]
    fn only_a_record_without_a_claim_and_without_a_pod_is_released() {
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
    fn a_pod_of_the_new_claim_does_not_keep_the_record_of_the_old_one() {
        let pods = [pod("p", "Pending", false)];
        check(Some(claim("new", Some(POOL), &["p"])), &pods, Some(Orphan::Replaced));
        check(Some(claim("new", Some(POOL), &["other"])), &pods, None);
    }

    fn check_missing(current: ResourceClaim, held: &[&str], expected: Option<&str>) {
        let held = held.iter().map(|uid| ClaimUid::from(*uid)).collect();
        let found = is_missing(&current, &pod("p", "Running", false), &POOL.into(), &held);
        assert_eq!(found, expected.map(ClaimUid::from));
    }

    #[test]
    fn a_claim_in_use_without_a_record_is_found() {
        check_missing(claim("u", Some(POOL), &["p"]), &[], Some("u"));
        check_missing(claim("u", Some(POOL), &["p"]), &["u"], None);
        check_missing(claim("u", Some(POOL), &["q"]), &[], None);
        check_missing(claim("u", Some("node-2"), &["p"]), &[], None);
        check_missing(claim("u", None, &["p"]), &[], None);
        assert_eq!(pod("p", "Running", false).stage, Stage::Running);
        assert_eq!(pod("p", "Running", true).stage, Stage::Alive);
    }

    #[test]
    fn every_way_to_name_a_claim_is_known() {
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
        assert_eq!(User::from(&pod).claims, BTreeSet::from(names));
    }
}
