//! `ResourceClaim.status.devices`: what the claim's devices turned out to be,
//! for people and exporters that cannot ask the node (KEP-4817).
//!
//! It is told after the kubelet has its answer and never holds one up: a short
//! queue, one writer, server-side apply of our entries alone, so that other
//! drivers' entries stay theirs. The UID goes with the write, so a claim that was
//! replaced under the same name is not touched. A server that refuses is
//! reported once, because the claim works all the same.

use crate::events::{Events, Reason};
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

/// What is known of a device of a prepared claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    pub pool: PoolName,
    pub device: DeviceName,
    pub share_id: Option<ShareId>,
    pub data: DeviceData,
}

/// What the agent has had to say, by claim and share: it stands whenever the status of
/// the claim is written.
type Limits = BTreeMap<(ClaimUid, ShareId), LimitKept>;

/// The condition `LimitKept` of a share: whether its processes keep to its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitKept {
    pub kept: bool,
    /// One word, for programs.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    pub since: Timestamp,
}

/// The device's `data`, so that an exporter can join a claim with what it measures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceData {
    /// Of the physical GPU.
    pub uuid: GpuUuid,
    #[serde(rename = "migUUID", skip_serializing_if = "Option::is_none")]
    pub mig_uuid: Option<String>,
    pub mode: Mode,
    /// What the claim may use of the device's memory; absent where the GPU does not say.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "written")]
    pub memory: Option<Quantity>,
    /// Of a time-slice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

fn written<S: serde::Serializer>(memory: &Option<Quantity>, out: S) -> Result<S::Ok, S::Error> {
    memory.as_ref().map(ToString::to_string).serialize(out)
}

/// Tells of prepared claims; a clone is the same.
#[derive(Clone)]
pub struct Statuses {
    queue: mpsc::Sender<(ClaimRef, Vec<DeviceFacts>)>,
    limits: Arc<Mutex<Limits>>,
}

/// The hand that writes what [`Statuses`] were told; run by the node.
pub struct StatusWriter {
    queue: mpsc::Receiver<(ClaimRef, Vec<DeviceFacts>)>,
    limits: Arc<Mutex<Limits>>,
    client: Client,
    events: Events,
    metrics: Metrics,
}

/// A node holds fewer claims; more are told only after an outage.
const QUEUE: usize = 128;
/// The kubelet's answer goes first.
const AFTER_THE_ANSWER: Duration = Duration::from_millis(100);
const WRITE: Duration = Duration::from_secs(10);

/// A teller and its writer.
pub fn statuses(client: Client, events: Events, metrics: Metrics) -> (Statuses, StatusWriter) {
    let (sender, queue) = mpsc::channel(QUEUE);
    let limits = Arc::<Mutex<Limits>>::default();
    let statuses = Statuses { queue: sender, limits: Arc::clone(&limits) };
    (statuses, StatusWriter { queue, limits, client, events, metrics })
}

impl Statuses {
    /// Has the claim's status written soon; left out where too much waits already.
    pub fn prepared(&self, claim: &ClaimRef, devices: Vec<DeviceFacts>) {
        if self.queue.try_send((claim.clone(), devices)).is_err() {
            tracing::debug!(%claim, "its status is not written: too many wait");
        }
    }

    /// Has the condition of a share be that from now on; what is known of claims that are not
    /// `held` any more is forgotten. It is written with the claim's devices ([`Self::prepared`]).
    pub fn limit(
        &self,
        claim: &ClaimUid,
        share: &ShareId,
        limit: LimitKept,
        held: impl Fn(&ClaimUid) -> bool,
    ) {
        let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        limits.retain(|(claim, _), _| held(claim));
        limits.insert((claim.clone(), share.clone()), limit);
    }
}

impl StatusWriter {
    /// Writes until every [`Statuses`] is gone.
    pub async fn run(mut self) {
        let mut reported = false;
        while let Some((claim, devices)) = self.queue.recv().await {
            sleep(AFTER_THE_ANSWER).await;
            let Err(why) = self.write(&claim, &devices).await else {
                self.metrics.status_written(true);
                continue;
            };
            self.metrics.status_written(false);
            tracing::debug!(%claim, why, "status not written");
            if !std::mem::replace(&mut reported, true) {
                tracing::warn!(%claim, why, "the status of claims cannot be written; claims work all the same, said once");
                let note = format!("status.devices of claim {claim} cannot be written: {why}; said once");
                self.events.node(Reason::StatusRefused, &note);
            }
        }
    }

    async fn write(&self, claim: &ClaimRef, devices: &[DeviceFacts]) -> Result<(), String> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let params = PatchParams::apply(DRIVER).force();
        let patch = {
            let limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
            Patch::Apply(patch(claim, devices, &limits))
        };
        match timeout(WRITE, api.patch_status(&claim.name, &params, &patch)).await {
            Ok(Ok(_)) => Ok(()),
            // Released or replaced since: there is nobody left to tell.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(()),
            Ok(Err(cause)) => Err(cause.to_string()),
            Err(_) => Err(format!("no answer within {WRITE:?}")),
        }
    }
}

fn patch(claim: &ClaimRef, devices: &[DeviceFacts], limits: &Limits) -> Value {
    let entry = |facts: &DeviceFacts| {
        let mut entry = json!({
            "driver": DRIVER, "pool": facts.pool, "device": facts.device, "data": facts.data,
        });
        if let Some(share) = &facts.share_id {
            entry["shareID"] = json!(share);
        }
        let share = facts.share_id.as_ref().map(|share| (claim.uid.clone(), share.clone()));
        if let Some(LimitKept { kept, reason, message, since }) = share.and_then(|share| limits.get(&share)) {
            let status = if *kept { "True" } else { "False" };
            // In the API's own shape of a time, which has whole seconds.
            let since = Timestamp::from_second(since.as_second()).unwrap_or(*since).to_string();
            entry["conditions"] = json!([{
                "type": "LimitKept", "status": status, "reason": reason, "message": message,
                "lastTransitionTime": since,
            }]);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_names_our_devices_and_the_claim_by_uid() {
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
                  "data": { "uuid": "GPU-0", "migUUID": "MIG-0", "mode": "mig", "memory": "9728Mi" } },
                { "driver": "gpu.divvy.dev", "pool": "n1", "device": "gpu-1-timeslice", "shareID": "s",
                  "data": { "uuid": "GPU-1", "mode": "timeslice", "interval": "Short" },
                  "conditions": [{ "type": "LimitKept", "status": "False", "reason": "Hidden",
                    "message": "process 7", "lastTransitionTime": "1970-01-01T00:00:01Z" }] },
            ] },
        });
        let limit = LimitKept {
            kept: false,
            reason: "Hidden",
            message: "process 7".to_owned(),
            since: Timestamp::from_millisecond(1500).unwrap(),
        };
        // Another share has troubles of its own.
        let limits = [("u", "s"), ("u", "t"), ("v", "s")].map(|(claim, share)| {
            let message = if (claim, share) == ("u", "s") { limit.message.clone() } else { String::new() };
            ((claim.into(), share.into()), LimitKept { message, ..limit.clone() })
        });
        assert_eq!(patch(&claim, &devices, &limits.into()), expected);
    }
}
