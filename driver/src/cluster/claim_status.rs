//! Writes `ResourceClaim.status.devices` (KEP-4817): data about the claim's devices for people and
//! exporters without access to the node.
//!
//! The status is written after the kubelet has its answer and never delays one. One writer with a
//! short queue applies only this driver's entries (server-side apply), so those of other drivers
//! stay. The UID is part of the write, so a claim that was replaced is not changed. A refusing API
//! server is reported once, because claims work without a status.

use crate::cluster::events::{EventSender, Reason};
use crate::metrics::Metrics;
use divvy_api::names::DRIVER;
use divvy_api::sharing::{Interval, Mode};
use divvy_api::{ClaimRef, ClaimUid, DeviceName, GpuUuid, PoolName, Quantity, ShareId};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// Facts about a device of a prepared claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    pub pool: PoolName,
    pub device: DeviceName,
    pub share_id: Option<ShareId>,
    pub data: DeviceData,
}

/// A device of a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceKey {
    pub claim: ClaimUid,
    pub device: DeviceName,
    pub share_id: Option<ShareId>,
}

/// The reported conditions. They are part of every later write of the claim's status.
#[derive(Debug, Default)]
struct Conditions {
    /// `LimitEnforced` by claim and share: whether its processes stay within its limits.
    limits: BTreeMap<(ClaimUid, ShareId), DeviceCondition>,
    /// `DeviceHealthy` by device.
    health: BTreeMap<DeviceKey, DeviceCondition>,
}

/// The type of the condition that tells whether a device is healthy.
pub const DEVICE_HEALTHY: &str = "DeviceHealthy";

/// A condition of a device in the status of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceCondition {
    pub is_true: bool,
    /// One word, for programs.
    pub reason: String,
    /// An explanation, for people.
    pub message: String,
    pub since: Timestamp,
}

/// The `data` of a device, by which an exporter can relate a claim to its measurements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceData {
    /// UUID of the physical GPU.
    pub uuid: GpuUuid,
    #[serde(rename = "migUUID", skip_serializing_if = "Option::is_none")]
    pub mig_uuid: Option<String>,
    pub mode: Mode,
    /// Memory of the device that the claim may use; absent if the GPU does not report it.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "format_quantity")]
    pub memory: Option<Quantity>,
    /// Interval of a time-slice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

fn format_quantity<S: serde::Serializer>(memory: &Option<Quantity>, out: S) -> Result<S::Ok, S::Error> {
    memory.as_ref().map(ToString::to_string).serialize(out)
}

/// Queues the status of prepared claims; a clone has the same queue.
#[derive(Clone)]
pub struct ClaimStatusSender {
    queue: mpsc::Sender<(ClaimRef, Vec<DeviceFacts>)>,
    conditions: Arc<Mutex<Conditions>>,
}

/// Writes the queued statuses; run by the daemon.
pub struct ClaimStatusWriter {
    queue: mpsc::Receiver<(ClaimRef, Vec<DeviceFacts>)>,
    conditions: Arc<Mutex<Conditions>>,
    client: Client,
    events: EventSender,
    metrics: Metrics,
}

/// More than the claims of a node; the queue fills only during an outage of the API server.
const QUEUE_LENGTH: usize = 128;
/// Delay before a write, so that the kubelet's answer goes first.
const WRITE_DELAY: Duration = Duration::from_millis(100);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Creates a sender and its writer.
pub fn claim_status_channel(
    client: Client,
    events: EventSender,
    metrics: Metrics,
) -> (ClaimStatusSender, ClaimStatusWriter) {
    let (sender, queue) = mpsc::channel(QUEUE_LENGTH);
    let conditions = Arc::<Mutex<Conditions>>::default();
    let statuses = ClaimStatusSender { queue: sender, conditions: Arc::clone(&conditions) };
    (statuses, ClaimStatusWriter { queue, conditions, client, events, metrics })
}

impl ClaimStatusSender {
    /// Queues a write of the claim's status; dropped if the queue is full.
    pub fn prepared(&self, claim: &ClaimRef, devices: Vec<DeviceFacts>) {
        if self.queue.try_send((claim.clone(), devices)).is_err() {
            tracing::debug!(%claim, "status not written: the queue is full");
        }
    }

    /// Sets the condition of a share, for the next write of the claim's status ([`Self::prepared`]).
    /// Conditions of claims that are not `held` any more are dropped.
    pub fn set_limit_condition(
        &self,
        claim: &ClaimUid,
        share: &ShareId,
        limit: DeviceCondition,
        held: impl Fn(&ClaimUid) -> bool,
    ) {
        let limits = &mut self.conditions.lock().unwrap_or_else(PoisonError::into_inner).limits;
        limits.retain(|(claim, _), _| held(claim));
        limits.insert((claim.clone(), share.clone()), limit);
    }

    /// Sets the health of a device, for the next write of the claim's status ([`Self::prepared`]).
    /// Conditions of claims that are not `held` any more are dropped.
    pub fn set_health_condition(
        &self,
        device: DeviceKey,
        mut now: DeviceCondition,
        held: impl Fn(&ClaimUid) -> bool,
    ) {
        let health = &mut self.conditions.lock().unwrap_or_else(PoisonError::into_inner).health;
        health.retain(|device, _| held(&device.claim));
        if let Some(before) = health.get(&device).filter(|before| before.is_true == now.is_true) {
            now.since = before.since;
        }
        health.insert(device, now);
    }
}

impl ClaimStatusWriter {
    /// Writes until every [`ClaimStatusSender`] is dropped.
    pub async fn run(mut self) {
        let mut reported = false;
        while let Some((claim, devices)) = self.queue.recv().await {
            sleep(WRITE_DELAY).await;
            let Err(why) = self.write(&claim, &devices).await else {
                self.metrics.status_written(true);
                continue;
            };
            self.metrics.status_written(false);
            tracing::debug!(%claim, why, "claim status not written");
            if !std::mem::replace(&mut reported, true) {
                tracing::warn!(
                    %claim, why,
                    "cannot write the status of claims; claims work without it; reported once"
                );
                let note = format!("status.devices of claim {claim} cannot be written: {why}; reported once");
                self.events.node(Reason::StatusRefused, &note);
            }
        }
    }

    async fn write(&self, claim: &ClaimRef, devices: &[DeviceFacts]) -> Result<(), String> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let params = PatchParams::apply(DRIVER).force();
        let patch = {
            let conditions = self.conditions.lock().unwrap_or_else(PoisonError::into_inner);
            Patch::Apply(patch(claim, devices, &conditions))
        };
        match timeout(WRITE_TIMEOUT, api.patch_status(&claim.name, &params, &patch)).await {
            Ok(Ok(_)) => Ok(()),
            // The claim was released or replaced in the meantime.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(()),
            Ok(Err(cause)) => Err(cause.to_string()),
            Err(_) => Err(format!("no answer within {WRITE_TIMEOUT:?}")),
        }
    }
}

fn patch(claim: &ClaimRef, devices: &[DeviceFacts], conditions: &Conditions) -> Value {
    let entry = |facts: &DeviceFacts| {
        let mut entry = json!({
            "driver": DRIVER, "pool": facts.pool, "device": facts.device, "data": facts.data,
        });
        if let Some(share) = &facts.share_id {
            entry["shareID"] = json!(share);
        }
        let share = facts.share_id.as_ref().map(|share| (claim.uid.clone(), share.clone()));
        let limit = share.and_then(|share| conditions.limits.get(&share));
        let key = DeviceKey {
            claim: claim.uid.clone(),
            device: facts.device.clone(),
            share_id: facts.share_id.clone(),
        };
        let limit = limit.map(|limit| condition("LimitEnforced", limit));
        let health = conditions.health.get(&key).map(|health| condition(DEVICE_HEALTHY, health));
        let all: Vec<Value> = limit.into_iter().chain(health).collect();
        if !all.is_empty() {
            entry["conditions"] = json!(all);
        }
        entry
    };
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": { "name": claim.name, "namespace": claim.namespace, "uid": claim.uid },
        "status": { "devices": devices.iter().map(entry).collect::<Vec<_>>() },
    })
}

fn condition(kind: &str, condition: &DeviceCondition) -> Value {
    let DeviceCondition { is_true, reason, message, since } = condition;
    // Times in the Kubernetes API have whole seconds.
    let since = Timestamp::from_second(since.as_second()).unwrap_or(*since).to_string();
    json!({
        "type": kind, "status": if *is_true { "True" } else { "False" }, "reason": reason,
        "message": message, "lastTransitionTime": since,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transition_time_changes_only_with_the_status() {
        let (queue, _receiver) = mpsc::channel(1);
        let statuses = ClaimStatusSender { queue, conditions: Arc::default() };
        let key = DeviceKey { claim: "u".into(), device: "gpu-0".into(), share_id: None };
        let set = |is_true, reason: &str, second| {
            let since = Timestamp::from_second(second).unwrap();
            let now = DeviceCondition { is_true, reason: reason.into(), message: String::new(), since };
            statuses.set_health_condition(key.clone(), now, |uid| uid.as_str() == "u");
            let conditions = statuses.conditions.lock().unwrap();
            conditions.health[&key].since.as_second()
        };
        assert_eq!(set(false, "GpuNeedsReset", 1), 1);
        assert_eq!(set(false, "GpuLost", 2), 1);
        assert_eq!(set(true, "GpuHealthy", 3), 3);
    }

    #[test]
    fn status_has_own_devices_and_the_uid_of_the_claim() {
        let claim = ClaimRef { namespace: "team".into(), name: "a".into(), uid: "u".into() };
        let facts = |device: &str, data| DeviceFacts {
            pool: "n1".into(),
            device: device.into(),
            share_id: (device == "gpu-1-timeslice").then(|| "s".into()),
            data,
        };
        let devices = [
            facts(
                "gpu-0-mig-1g10gb-19-0",
                DeviceData {
                    uuid: "GPU-0".into(),
                    mig_uuid: Some("MIG-0".into()),
                    mode: Mode::Mig,
                    memory: Some(Quantity::bytes(9728 << 20)),
                    interval: None,
                },
            ),
            facts(
                "gpu-1-timeslice",
                DeviceData {
                    uuid: "GPU-1".into(),
                    mig_uuid: None,
                    mode: Mode::Timeslice,
                    memory: None,
                    interval: Some(Interval::Short),
                },
            ),
        ];
        let expected = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "name": "a", "namespace": "team", "uid": "u" },
            "status": { "devices": [
                { "driver": "gpu.divvy.dev", "pool": "n1", "device": "gpu-0-mig-1g10gb-19-0",
                  "data": { "uuid": "GPU-0", "migUUID": "MIG-0", "mode": "mig", "memory": "9728Mi" },
                  "conditions": [{ "type": "DeviceHealthy", "status": "False", "reason": "GpuLost",
                    "message": "GPU is lost: x", "lastTransitionTime": "1970-01-01T00:00:01Z" }] },
                { "driver": "gpu.divvy.dev", "pool": "n1", "device": "gpu-1-timeslice", "shareID": "s",
                  "data": { "uuid": "GPU-1", "mode": "timeslice", "interval": "Short" },
                  "conditions": [{ "type": "LimitEnforced", "status": "False", "reason": "Hidden",
                    "message": "process 7", "lastTransitionTime": "1970-01-01T00:00:01Z" }] },
            ] },
        });
        let false_since = |reason: &str, message: &str| DeviceCondition {
            is_true: false,
            reason: reason.to_owned(),
            message: message.to_owned(),
            since: Timestamp::from_millisecond(1500).unwrap(),
        };
        let mut conditions = Conditions::default();
        // Conditions of another share, another device and another claim must not appear.
        for (uid, share) in [("u", "s"), ("u", "t"), ("v", "s")] {
            let message = if (uid, share) == ("u", "s") { "process 7" } else { "" };
            conditions.limits.insert((uid.into(), share.into()), false_since("Hidden", message));
        }
        let key =
            |uid: &str, device: &str| DeviceKey { claim: uid.into(), device: device.into(), share_id: None };
        let own = key("u", "gpu-0-mig-1g10gb-19-0");
        conditions.health.insert(own, false_since("GpuLost", "GPU is lost: x"));
        for other in [key("v", "gpu-0-mig-1g10gb-19-0"), key("u", "gpu-1-timeslice")] {
            conditions.health.insert(other, false_since("GpuLost", ""));
        }
        assert_eq!(patch(&claim, &devices, &conditions), expected);
    }
}
