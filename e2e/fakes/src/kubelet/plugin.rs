//! A registered plugin: prepare and unprepare calls with the kubelet's checks of the answer, and
//! the health stream.

use divvy_kubelet::dra::{v1, v1beta1};
use divvy_kubelet::health::{v1 as health_v1, v1alpha1 as health_v1alpha1};
use divvy_kubelet::registration::PluginInfo;
use hyper_util::rt::TokioIo;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::Instant;
use tonic::codegen::http::Uri;
use tonic::transport::Channel;

/// A registered plugin and the one connection to its service socket.
#[derive(Clone)]
pub struct Plugin {
    pub info: PluginInfo,
    pub registration_socket: PathBuf,
    pub service: Service,
    pub health_service: Option<HealthService>,
    pub(super) channel: Channel,
    pub(super) cache: Arc<HealthCache>,
    pub(super) dials: Arc<AtomicUsize>,
}

impl Plugin {
    /// The number of connections that were opened to the service socket.
    pub fn connections(&self) -> usize {
        self.dials.load(Ordering::Relaxed)
    }
}

/// The DRA service that is used to call a plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    V1,
    V1beta1,
}

/// The result for one claim: its devices (none for unprepare) or the driver's error.
pub type Outcome = Result<Vec<v1::Device>, String>;
/// Results by claim UID.
pub type Outcomes = BTreeMap<String, Outcome>;

/// The reason why the kubelet treats a whole call as failed.
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
                    let request = v1beta1::NodePrepareResourcesRequest { claims: to_v1beta1(claims) };
                    let answer = client.node_prepare_resources(request).await?.into_inner();
                    Ok(answer.claims.into_iter().map(|(uid, result)| (uid, from_v1beta1(result))).collect())
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
                    let request = v1beta1::NodeUnprepareResourcesRequest { claims: to_v1beta1(claims) };
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
    // Dropping the call at the timeout cancels the stream, like the kubelet's context.
    match tokio::time::timeout(timeout, call).await {
        Err(_) => Err(CallError::Deadline(timeout)),
        Ok(Err(status)) => Err(CallError::Status(format!("{}: {}", status.code(), status.message()))),
        Ok(Ok(answer)) => Ok(answer),
    }
}

/// Checks that the answer has one entry per requested UID and no other, and that devices have names.
fn check(claims: &[v1::Claim], outcomes: Outcomes) -> Result<Outcomes, CallError> {
    let requested: BTreeSet<&str> = claims.iter().map(|claim| claim.uid.as_str()).collect();
    if let Some(uid) = outcomes.keys().find(|uid| !requested.contains(uid.as_str())) {
        return Err(CallError::Unknown(uid.clone()));
    }
    if outcomes.len() < requested.len() {
        return Err(CallError::Skipped(requested.len() - outcomes.len()));
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

fn to_v1beta1(claims: &[v1::Claim]) -> Vec<v1beta1::Claim> {
    let one = |claim: &v1::Claim| v1beta1::Claim {
        namespace: claim.namespace.clone(),
        uid: claim.uid.clone(),
        name: claim.name.clone(),
    };
    claims.iter().map(one).collect()
}

fn from_v1beta1(result: v1beta1::NodePrepareResourceResponse) -> v1::NodePrepareResourceResponse {
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

/// Pool and device name.
pub type HealthKey = (String, String);

/// The health that the kubelet would write into a pod's status now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceHealth {
    Unknown,
    Healthy,
    Unhealthy { message: String },
}

/// The health service that a plugin offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthService {
    V1,
    V1alpha1,
}

/// The last reported health of each device, with the time of its receipt. It is cleared when the stream ends.
#[derive(Default)]
pub(super) struct HealthCache {
    entries: Mutex<BTreeMap<HealthKey, (health_v1::DeviceHealth, Instant)>>,
}

/// The kubelet's default for devices without a timeout.
const DEFAULT_HEALTH_TIMEOUT: Duration = Duration::from_secs(30);

impl HealthCache {
    fn replace(&self, devices: Vec<health_v1::DeviceHealth>) {
        let now = Instant::now();
        let Ok(mut entries) = self.entries.lock() else { return };
        for health in devices {
            let device = health.device.clone().unwrap_or_default();
            entries.insert((device.pool_name, device.device_name), (health, now));
        }
    }

    fn clear(&self) {
        if let Ok(mut entries) = self.entries.lock() {
            entries.clear();
        }
    }

    fn all(&self) -> BTreeMap<HealthKey, DeviceHealth> {
        let Ok(entries) = self.entries.lock() else { return BTreeMap::new() };
        entries
            .iter()
            .map(|(key, (health, at))| (key.clone(), current_health(health, at.elapsed())))
            .collect()
    }
}

fn current_health(health: &health_v1::DeviceHealth, age: Duration) -> DeviceHealth {
    let timeout = match u64::try_from(health.health_check_timeout_seconds) {
        Ok(seconds) if seconds > 0 => Duration::from_secs(seconds),
        _ => DEFAULT_HEALTH_TIMEOUT,
    };
    match health.health() {
        _ if age > timeout => DeviceHealth::Unknown,
        health_v1::HealthStatus::Unknown => DeviceHealth::Unknown,
        health_v1::HealthStatus::Healthy => DeviceHealth::Healthy,
        health_v1::HealthStatus::Unhealthy => DeviceHealth::Unhealthy { message: health.message.clone() },
    }
}

impl Plugin {
    /// The health of every device of this plugin.
    pub fn health(&self) -> BTreeMap<HealthKey, DeviceHealth> {
        self.cache.all()
    }

    /// Follows the health stream until the plugin is removed; reopens it when it ends.
    pub(super) async fn follow_health(self, service: HealthService, reopen: Duration) {
        loop {
            let ended = match service {
                HealthService::V1 => self.stream_v1().await,
                HealthService::V1alpha1 => self.stream_v1alpha1().await,
            };
            self.cache.clear();
            if let Err(status) = ended {
                tracing::debug!(%status, "health stream ended");
            }
            tokio::time::sleep(reopen).await;
        }
    }

    async fn stream_v1(&self) -> Result<(), tonic::Status> {
        let mut client =
            health_v1::dra_resource_health_client::DraResourceHealthClient::new(self.channel.clone());
        let mut stream =
            client.node_watch_resources(health_v1::NodeWatchResourcesRequest {}).await?.into_inner();
        while let Some(message) = stream.message().await? {
            self.cache.replace(message.devices);
        }
        Ok(())
    }

    async fn stream_v1alpha1(&self) -> Result<(), tonic::Status> {
        let mut client =
            health_v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(self.channel.clone());
        let request = health_v1alpha1::NodeWatchResourcesRequest {};
        let mut stream = client.node_watch_resources(request).await?.into_inner();
        while let Some(message) = stream.message().await? {
            self.cache.replace(message.devices.into_iter().map(from_v1alpha1).collect());
        }
        Ok(())
    }
}

fn from_v1alpha1(health: health_v1alpha1::DeviceHealth) -> health_v1::DeviceHealth {
    health_v1::DeviceHealth {
        device: health
            .device
            .map(|it| health_v1::DeviceIdentifier { pool_name: it.pool_name, device_name: it.device_name }),
        health: health.health,
        last_updated_time: health.last_updated_time,
        health_check_timeout_seconds: health.health_check_timeout_seconds,
        message: health.message,
    }
}

/// A connector to one Unix socket that counts its connections.
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
