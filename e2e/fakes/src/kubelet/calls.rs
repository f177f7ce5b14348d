//! Prepare and unprepare as the kubelet calls them, and what it demands of the answer.

use super::registry::Plugin;
use divvy_kubelet::dra::{v1, v1beta1};
use hyper_util::rt::TokioIo;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::codegen::http::Uri;

/// One claim's result: its devices (none for unprepare) or the driver's error.
pub type Outcome = Result<Vec<v1::Device>, String>;
/// Results by claim UID.
pub type Outcomes = BTreeMap<String, Outcome>;

/// Why a whole call failed in the kubelet's eyes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    #[error("DRA driver {driver} is not registered ({errors})")]
    NotRegistered { driver: String, errors: String },
    #[error("call did not answer within {0:?}")]
    Deadline(Duration),
    #[error("call failed: {0}")]
    Status(String),
    #[error("answer has a result for unknown claim UID {0}")]
    Unknown(String),
    #[error("answer skipped {0} ResourceClaims")]
    Skipped(usize),
    #[error("device {device:?} of claim {uid} lacks its pool or its name")]
    Nameless { uid: String, device: String },
}

/// Which DRA service a plugin is called by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    V1,
    V1beta1,
}

impl Plugin {
    /// NodePrepareResources with the kubelet's checks.
    pub async fn prepare(&self, claims: &[v1::Claim], timeout: Duration) -> Result<Outcomes, CallError> {
        let call = async {
            match self.service {
                Service::V1 => {
                    let mut client = v1::dra_plugin_client::DraPluginClient::new(self.channel.clone());
                    let request = v1::NodePrepareResourcesRequest { claims: claims.to_vec() };
                    client.node_prepare_resources(request).await.map(|answer| answer.into_inner().claims)
                }
                Service::V1beta1 => {
                    let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(self.channel.clone());
                    let request = v1beta1::NodePrepareResourcesRequest { claims: older(claims) };
                    let answer = client.node_prepare_resources(request).await?.into_inner();
                    Ok(answer.claims.into_iter().map(|(uid, result)| (uid, newer(result))).collect())
                }
            }
        };
        let answer = within(timeout, call).await?;
        let results = answer.into_iter().map(|(uid, result)| {
            let outcome = if result.error.is_empty() { Ok(result.devices) } else { Err(result.error) };
            (uid, outcome)
        });
        check(claims, results.collect())
    }

    /// NodeUnprepareResources with the kubelet's checks.
    pub async fn unprepare(&self, claims: &[v1::Claim], timeout: Duration) -> Result<Outcomes, CallError> {
        let call = async {
            Ok(match self.service {
                Service::V1 => {
                    let mut client = v1::dra_plugin_client::DraPluginClient::new(self.channel.clone());
                    let request = v1::NodeUnprepareResourcesRequest { claims: claims.to_vec() };
                    let answer = client.node_unprepare_resources(request).await?.into_inner();
                    answer.claims.into_iter().map(|(uid, result)| (uid, result.error)).collect::<Vec<_>>()
                }
                Service::V1beta1 => {
                    let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(self.channel.clone());
                    let request = v1beta1::NodeUnprepareResourcesRequest { claims: older(claims) };
                    let answer = client.node_unprepare_resources(request).await?.into_inner();
                    answer.claims.into_iter().map(|(uid, result)| (uid, result.error)).collect()
                }
            })
        };
        let answer = within(timeout, call).await?;
        let results = answer
            .into_iter()
            .map(|(uid, error)| (uid, if error.is_empty() { Ok(Vec::new()) } else { Err(error) }));
        check(claims, results.collect())
    }
}

async fn within<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, tonic::Status>>,
) -> Result<T, CallError> {
    // Dropping the call on time-out cancels the stream, as the kubelet's context does.
    match tokio::time::timeout(timeout, call).await {
        Err(_) => Err(CallError::Deadline(timeout)),
        Ok(Err(status)) => Err(CallError::Status(format!("{}: {}", status.code(), status.message()))),
        Ok(Ok(answer)) => Ok(answer),
    }
}

/// One entry per requested UID, no other, and named devices.
fn check(claims: &[v1::Claim], outcomes: Outcomes) -> Result<Outcomes, CallError> {
    let asked: BTreeSet<&str> = claims.iter().map(|claim| claim.uid.as_str()).collect();
    if let Some(uid) = outcomes.keys().find(|uid| !asked.contains(uid.as_str())) {
        return Err(CallError::Unknown(uid.clone()));
    }
    if outcomes.len() < asked.len() {
        return Err(CallError::Skipped(asked.len() - outcomes.len()));
    }
    for (uid, outcome) in &outcomes {
        let nameless = |device: &&v1::Device| device.pool_name.is_empty() || device.device_name.is_empty();
        if let Some(device) = outcome.iter().flatten().find(nameless) {
            let (uid, device) = (uid.clone(), format!("{}/{}", device.pool_name, device.device_name));
            return Err(CallError::Nameless { uid, device });
        }
    }
    Ok(outcomes)
}

fn older(claims: &[v1::Claim]) -> Vec<v1beta1::Claim> {
    let one = |claim: &v1::Claim| v1beta1::Claim {
        namespace: claim.namespace.clone(),
        uid: claim.uid.clone(),
        name: claim.name.clone(),
    };
    claims.iter().map(one).collect()
}

fn newer(result: v1beta1::NodePrepareResourceResponse) -> v1::NodePrepareResourceResponse {
    let one = |device: v1beta1::Device| v1::Device {
        request_names: device.request_names,
        pool_name: device.pool_name,
        device_name: device.device_name,
        cdi_device_ids: device.cdi_device_ids,
        share_id: None,
    };
    v1::NodePrepareResourceResponse {
        devices: result.devices.into_iter().map(one).collect(),
        error: result.error,
    }
}

/// A connector to one Unix socket, counting the connections it makes.
pub(super) fn unix(
    path: PathBuf,
    dials: Option<Arc<AtomicUsize>>,
) -> impl tower::Service<
    Uri,
    Response = TokioIo<UnixStream>,
    Error = std::io::Error,
    Future = impl Future<Output = std::io::Result<TokioIo<UnixStream>>> + Send,
> + Send
+ 'static {
    tower::service_fn(move |_: Uri| {
        let (path, dials) = (path.clone(), dials.clone());
        async move {
            let stream = UnixStream::connect(path).await?;
            if let Some(dials) = dials {
                dials.fetch_add(1, Ordering::Relaxed);
            }
            Ok(TokioIo::new(stream))
        }
    })
}
