//! The kubelet's side of the health stream: a list of what was last said, by
//! the time it was received, forgotten when the stream ends.

use super::registry::Plugin;
use divvy_kubelet::health::{v1, v1alpha1};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// Pool and device.
pub type HealthKey = (String, String);

/// What the kubelet would write into a pod's status now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceHealth {
    Unknown,
    Healthy,
    Unhealthy { message: String },
}

/// Which health service a plugin offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthService {
    V1,
    V1alpha1,
}

#[derive(Default)]
pub(super) struct HealthCache {
    entries: Mutex<BTreeMap<HealthKey, (v1::DeviceHealth, Instant)>>,
}

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

impl HealthCache {
    fn replace(&self, devices: Vec<v1::DeviceHealth>) {
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
        entries.iter().map(|(key, (health, at))| (key.clone(), judge(health, at.elapsed()))).collect()
    }
}

fn judge(health: &v1::DeviceHealth, age: Duration) -> DeviceHealth {
    let timeout = match u64::try_from(health.health_check_timeout_seconds) {
        Ok(seconds) if seconds > 0 => Duration::from_secs(seconds),
        _ => DEFAULT_TIMEOUT,
    };
    match health.health() {
        _ if age > timeout => DeviceHealth::Unknown,
        v1::HealthStatus::Unknown => DeviceHealth::Unknown,
        v1::HealthStatus::Healthy => DeviceHealth::Healthy,
        v1::HealthStatus::Unhealthy => DeviceHealth::Unhealthy { message: health.message.clone() },
    }
}

impl Plugin {
    /// What is known of every device of this instance.
    pub fn health(&self) -> BTreeMap<HealthKey, DeviceHealth> {
        self.cache.all()
    }

    /// Follows the stream until the plugin goes; opens it again when it ends.
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
        let mut client = v1::dra_resource_health_client::DraResourceHealthClient::new(self.channel.clone());
        let mut stream = client.node_watch_resources(v1::NodeWatchResourcesRequest {}).await?.into_inner();
        while let Some(message) = stream.message().await? {
            self.cache.replace(message.devices);
        }
        Ok(())
    }

    async fn stream_v1alpha1(&self) -> Result<(), tonic::Status> {
        let mut client =
            v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(self.channel.clone());
        let request = v1alpha1::NodeWatchResourcesRequest {};
        let mut stream = client.node_watch_resources(request).await?.into_inner();
        while let Some(message) = stream.message().await? {
            self.cache.replace(message.devices.into_iter().map(newer).collect());
        }
        Ok(())
    }
}

fn newer(health: v1alpha1::DeviceHealth) -> v1::DeviceHealth {
    v1::DeviceHealth {
        device: health
            .device
            .map(|it| v1::DeviceIdentifier { pool_name: it.pool_name, device_name: it.device_name }),
        health: health.health,
        last_updated_time: health.last_updated_time,
        health_check_timeout_seconds: health.health_check_timeout_seconds,
        message: health.message,
    }
}
