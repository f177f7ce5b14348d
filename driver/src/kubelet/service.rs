//! The DRA service: NodePrepareResources and NodeUnprepareResources.
//!
//! The claims of a call are handled concurrently, each in its own task: a kubelet that disconnects
//! does not stop one half-way, and a failure or panic concerns only its own claim. The answer has an
//! entry for each requested UID, and the gRPC status is never an error. Prepare reads the claim each
//! time, because it can be allocated again under the same UID; only if the API server does not
//! answer, the record of a prepared claim is used. Unprepare works from records alone.

use crate::claims::claim_mutex::ClaimMutexes;
use crate::claims::engine::{Engine, PrepareError, UnprepareError};
use crate::claims::fetch::{Claims, ReadError, reference, unchecked};
use crate::claims::records::PreparedDevice;
use crate::cluster::claim_status::ClaimStatusSender;
use crate::cluster::events::{EventSender, Reason};
use crate::metrics::Metrics;
use divvy_api::ClaimRef;
use divvy_api::text::error_chain;
use divvy_kubelet::dra::{v1, v1beta1};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};

/// The DRA service, in both versions; a clone is the same.
#[derive(Clone)]
pub struct Service {
    pub engine: Engine,
    pub claims: Claims,
    pub claim_mutexes: ClaimMutexes,
    pub events: EventSender,
    pub metrics: Metrics,
    pub statuses: ClaimStatusSender,
    /// Owns the task of each claim.
    pub tasks: TaskTracker,
    /// Time limit for every answer.
    pub answer_timeout: Duration,
}

/// Why a claim was not prepared or not unprepared. Every message names the claim.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Unprepare(#[from] UnprepareError),
    #[error("claim {claim}: no answer within {within:?}; work on it continues, retry")]
    Timeout { claim: ClaimRef, within: Duration },
    #[error("claim {claim}: the driver panicked; see its log")]
    Panicked { claim: ClaimRef },
}

/// The two calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Prepare,
    Unprepare,
}

/// Results of either call, by UID. Unprepare returns no devices.
type Answers = BTreeMap<String, Result<Vec<PreparedDevice>, String>>;

impl Service {
    async fn all(&self, call: Call, claims: Vec<v1::Claim>) -> Answers {
        let by_uid: BTreeMap<_, _> = claims.into_iter().map(|claim| (claim.uid.clone(), claim)).collect();
        let answers = by_uid.into_iter().map(async |(uid, claim)| (uid, self.one(call, &claim).await));
        futures::future::join_all(answers).await.into_iter().collect()
    }

    async fn one(&self, call: Call, claim: &v1::Claim) -> Result<Vec<PreparedDevice>, String> {
        let begun = Instant::now();
        let reference = match call {
            Call::Prepare => reference(claim),
            // A claim with an invalid name must still be released.
            Call::Unprepare => Ok(unchecked(claim)),
        };
        let result = match &reference {
            Ok(reference) => self.spawn(call, reference).await.map_err(|error| error_chain(&error)),
            Err(error) => Err(format!("claim {}/{}: {error}", claim.namespace, claim.name)),
        };
        let reason = match call {
            Call::Prepare => {
                self.metrics.prepared(result.is_ok(), begun.elapsed());
                Reason::PrepareFailed
            }
            Call::Unprepare => {
                self.metrics.unprepared(result.is_ok(), begun.elapsed());
                Reason::UnprepareFailed
            }
        };
        if let Err(error) = &result {
            let (namespace, name, uid) = (&claim.namespace, &claim.name, &claim.uid);
            tracing::warn!(?call, claim = %name, %namespace, %uid, error, "call failed");
            if let Ok(reference) = &reference {
                self.events.claim(reference, reason, error);
            }
        }
        result
    }

    async fn spawn(&self, call: Call, claim: &ClaimRef) -> Result<Vec<PreparedDevice>, Refusal> {
        let (service, owned) = (self.clone(), claim.clone());
        let task = self.tasks.spawn(async move {
            let _claim = service.claim_mutexes.lock(&owned.uid).await;
            match call {
                Call::Prepare => service.prepare(&owned).await,
                Call::Unprepare => {
                    Ok(service.engine.unprepare_unused(&owned.uid).await.map(|()| Vec::new())?)
                }
            }
        });
        match timeout(self.answer_timeout, task).await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) => Err(Refusal::Panicked { claim: claim.clone() }),
            Err(_) => Err(Refusal::Timeout { claim: claim.clone(), within: self.answer_timeout }),
        }
    }

    async fn prepare(&self, claim: &ClaimRef) -> Result<Vec<PreparedDevice>, Refusal> {
        match self.claims.allocated(claim).await {
            Ok(allocated) => {
                let devices = self.engine.prepare(&allocated).await?;
                self.statuses.prepared(claim, self.engine.facts(&claim.uid));
                Ok(devices)
            }
            Err(error) if error.is_outage() => match self.engine.prepared(&claim.uid) {
                Some(devices) => {
                    let error = error_chain(&error);
                    tracing::info!(%claim, error, "cannot read the claim; answered from its record");
                    Ok(devices)
                }
                None => Err(error.into()),
            },
            Err(error) => Err(error.into()),
        }
    }
}

#[tonic::async_trait]
impl v1::dra_plugin_server::DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
        let answers = self.all(Call::Prepare, request.into_inner().claims).await;
        let entry = |result| match result {
            Ok(devices) => v1::NodePrepareResourceResponse {
                devices: Vec::into_iter(devices).map(device).collect(),
                error: String::new(),
            },
            Err(error) => v1::NodePrepareResourceResponse { devices: Vec::new(), error },
        };
        let claims = answers.into_iter().map(|(uid, result)| (uid, entry(result))).collect();
        Ok(Response::new(v1::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        let answers = self.all(Call::Unprepare, request.into_inner().claims).await;
        let entry = |result: Result<_, String>| v1::NodeUnprepareResourceResponse {
            error: result.err().unwrap_or_default(),
        };
        let claims = answers.into_iter().map(|(uid, result)| (uid, entry(result))).collect();
        Ok(Response::new(v1::NodeUnprepareResourcesResponse { claims }))
    }
}

fn device(device: PreparedDevice) -> v1::Device {
    v1::Device {
        request_names: device.requests.iter().map(ToString::to_string).collect(),
        pool_name: device.pool.to_string(),
        device_name: device.device.to_string(),
        cdi_device_ids: device.cdi_ids,
        share_id: device.share_id.map(|id| id.to_string()),
    }
}

/// The same as v1, for kubelets without share IDs.
#[tonic::async_trait]
impl v1beta1::dra_plugin_server::DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodePrepareResourcesResponse>, Status> {
        use v1::dra_plugin_server::DraPlugin;
        let claims = request.into_inner().claims.into_iter().map(claim).collect();
        let request = Request::new(v1::NodePrepareResourcesRequest { claims });
        let answer = DraPlugin::node_prepare_resources(self, request).await?.into_inner();
        let older = |device: v1::Device| v1beta1::Device {
            request_names: device.request_names,
            pool_name: device.pool_name,
            device_name: device.device_name,
            cdi_device_ids: device.cdi_device_ids,
        };
        let entry = |result: v1::NodePrepareResourceResponse| v1beta1::NodePrepareResourceResponse {
            devices: result.devices.into_iter().map(older).collect(),
            error: result.error,
        };
        let claims = answer.claims.into_iter().map(|(uid, result)| (uid, entry(result))).collect();
        Ok(Response::new(v1beta1::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodeUnprepareResourcesResponse>, Status> {
        use v1::dra_plugin_server::DraPlugin;
        let claims = request.into_inner().claims.into_iter().map(claim).collect();
        let request = Request::new(v1::NodeUnprepareResourcesRequest { claims });
        let answer = DraPlugin::node_unprepare_resources(self, request).await?.into_inner();
        let entry = |result: v1::NodeUnprepareResourceResponse| v1beta1::NodeUnprepareResourceResponse {
            error: result.error,
        };
        let claims = answer.claims.into_iter().map(|(uid, result)| (uid, entry(result))).collect();
        Ok(Response::new(v1beta1::NodeUnprepareResourcesResponse { claims }))
    }
}

fn claim(claim: v1beta1::Claim) -> v1::Claim {
    v1::Claim { namespace: claim.namespace, uid: claim.uid, name: claim.name }
}
