//! Kubernetes events for the owners of claims and of the node.
//!
//! Sending never blocks. An event is dropped when the queue is full, when the same event was written
//! recently, or when too many were written recently; it is also in the log in any case. Repetitions
//! are dropped and not counted, because a refused claim is retried every few seconds and each count
//! would be a write to the API server.

use crate::cluster::consumers::{Consumer, consumers};
use crate::metrics::Metrics;
use divvy_api::ClaimRef;
use divvy_api::names::DRIVER;
use divvy_model::HealthState;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// The reason of an event; the names are part of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    PrepareFailed,
    UnprepareFailed,
    RecordQuarantined,
    ClaimNotRecovered,
    UnmanagedMigInstances,
    GpuStuck,
    GpuLost,
    GpuNeedsReset,
    GpuDegraded,
    /// The findings about a GPU have ended.
    GpuHealthy,
    GpuMissing,
    GpuHandedOver,
    MigUnreadable,
    /// State of a released claim could not be undone yet.
    NotUndone,
    MpsUnhealthy,
    MpsRestarted,
    /// A process of a share evades its limit, or was killed for it.
    ShareLimitViolated,
    /// A share could not be verified completely; no other claim is harmed.
    ShareUnverified,
    /// A process without a claim uses a GPU that has shares.
    UnmanagedGpuProcess,
    StatusRefused,
    ConfigRefused,
    DevicePlugin,
    /// The GPU driver is being replaced; NVML is closed.
    DriverUpgrade,
    PoolDegraded,
    /// The policy of GPUs offers shares, and the node cannot enforce their limits.
    SharesNotOffered,
    NotReady,
}

impl Reason {
    fn action(self) -> &'static str {
        match self {
            Self::PrepareFailed => "Prepare",
            Self::UnprepareFailed => "Unprepare",
            Self::RecordQuarantined | Self::ClaimNotRecovered | Self::UnmanagedMigInstances => "Recover",
            Self::GpuStuck
            | Self::GpuLost
            | Self::GpuNeedsReset
            | Self::GpuDegraded
            | Self::GpuHealthy
            | Self::GpuMissing
            | Self::GpuHandedOver
            | Self::MigUnreadable
            | Self::NotUndone
            | Self::MpsUnhealthy
            | Self::MpsRestarted
            | Self::DriverUpgrade => "WatchGpus",
            Self::ShareLimitViolated | Self::ShareUnverified | Self::UnmanagedGpuProcess => "Audit",
            Self::PoolDegraded | Self::SharesNotOffered | Self::StatusRefused | Self::DevicePlugin => {
                "Publish"
            }
            Self::NotReady => "Start",
            Self::ConfigRefused => "Configure",
        }
    }

    /// The reason for a health state.
    pub fn of_health(state: HealthState) -> Self {
        match state {
            HealthState::Healthy => Self::GpuHealthy,
            HealthState::Degraded => Self::GpuDegraded,
            HealthState::NeedsReset => Self::GpuNeedsReset,
            HealthState::Stuck => Self::GpuStuck,
            HealthState::Lost => Self::GpuLost,
        }
    }

    /// Whether the pods of a claim get its event too.
    fn concerns_pods(self) -> bool {
        matches!(
            self,
            Self::MpsRestarted
                | Self::ShareLimitViolated
                | Self::ShareUnverified
                | Self::GpuStuck
                | Self::GpuLost
                | Self::GpuNeedsReset
                | Self::GpuDegraded
                | Self::GpuHealthy
                | Self::GpuMissing
        )
    }
}

/// An event before it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EventRecord {
    regarding: Regarding,
    reason: Reason,
    note: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Regarding {
    Claim(ClaimRef),
    Consumer { namespace: String, consumer: Consumer },
    Node,
}

/// Sends events to the writer; a clone has the same queue.
#[derive(Clone)]
pub struct EventSender {
    queue: mpsc::Sender<EventRecord>,
    metrics: Metrics,
}

/// Writes the events of all senders; run by the daemon.
pub struct EventWriter {
    queue: mpsc::Receiver<EventRecord>,
    client: Client,
    node: String,
    metrics: Metrics,
}

const QUEUE_LENGTH: usize = 64;
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// The API server refuses notes of more than 1 KiB.
const NOTE_MAX_BYTES: usize = 1000;

/// Creates a sender and its writer.
pub fn event_channel(client: Client, node: &str, metrics: Metrics) -> (EventSender, EventWriter) {
    let (sender, queue) = mpsc::channel(QUEUE_LENGTH);
    let events = EventSender { queue: sender, metrics: metrics.clone() };
    (events, EventWriter { queue, client, node: node.to_owned(), metrics })
}

impl EventSender {
    /// Sends an event about a claim. If it concerns containers, the claim's consumers get it too.
    pub fn claim(&self, claim: &ClaimRef, reason: Reason, note: &str) {
        self.send(Regarding::Claim(claim.clone()), reason, note);
    }

    /// Sends an event about the node.
    pub fn node(&self, reason: Reason, note: &str) {
        self.send(Regarding::Node, reason, note);
    }

    fn send(&self, regarding: Regarding, reason: Reason, note: &str) {
        let record = EventRecord { regarding, reason, note: truncate(note).to_owned() };
        if self.queue.try_send(record).is_err() {
            self.metrics.event_dropped();
        }
    }
}

fn truncate(note: &str) -> &str {
    note.get(..note.floor_char_boundary(NOTE_MAX_BYTES)).unwrap_or(note)
}

impl EventWriter {
    /// Writes until every [`EventSender`] is dropped.
    pub async fn run(mut self) {
        let mut limiter = RateLimiter::default();
        while let Some(record) = self.queue.recv().await {
            match limiter.admit(&record, Instant::now()) {
                Verdict::Write => {
                    self.write(&record).await;
                    for regarding in self.consumers(&record).await {
                        self.write(&EventRecord { regarding, ..record.clone() }).await;
                    }
                }
                Verdict::Repeated => {}
                Verdict::TooMany => self.metrics.event_dropped(),
            }
        }
    }

    /// The pods and PodGroups of the claim, if the event concerns their containers.
    async fn consumers(&self, record: &EventRecord) -> Vec<Regarding> {
        let Regarding::Claim(claim) = &record.regarding else { return Vec::new() };
        if !record.reason.concerns_pods() {
            return Vec::new();
        }
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        // Without an answer, only the claim gets the event.
        match tokio::time::timeout(WRITE_TIMEOUT, api.get(&claim.name)).await {
            Ok(Ok(found)) => recipients(claim, &found),
            _ => Vec::new(),
        }
    }

    async fn write(&self, record: &EventRecord) {
        let event = record.event(&self.node, Timestamp::now());
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let written = tokio::time::timeout(WRITE_TIMEOUT, api.create(&PostParams::default(), &event)).await;
        let failed = match written {
            Ok(Ok(_)) => return,
            Ok(Err(cause)) => cause.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        tracing::debug!(reason = ?record.reason, failed, "event not written");
        self.metrics.event_dropped();
    }
}

/// The consumers of the claim that can get events. A claim of the same name with another UID has
/// other consumers.
fn recipients(claim: &ClaimRef, found: &ResourceClaim) -> Vec<Regarding> {
    if found.metadata.uid.as_deref() != Some(claim.uid.as_str()) {
        return Vec::new();
    }
    let known = consumers(found).into_iter();
    let known = known.filter(|consumer| consumer.event_object(&claim.namespace).is_some());
    known.map(|consumer| Regarding::Consumer { namespace: claim.namespace.clone(), consumer }).collect()
}

impl EventRecord {
    fn event(&self, node: &str, now: Timestamp) -> Event {
        let regarding = match &self.regarding {
            Regarding::Claim(claim) => ObjectReference {
                api_version: Some("resource.k8s.io/v1".to_owned()),
                kind: Some("ResourceClaim".to_owned()),
                namespace: Some(claim.namespace.clone()),
                name: Some(claim.name.clone()),
                uid: Some(claim.uid.to_string()),
                ..ObjectReference::default()
            },
            Regarding::Consumer { namespace, consumer } => {
                consumer.event_object(namespace).unwrap_or_default()
            }
            // `kubectl describe node` looks for the node's name in place of a UID.
            Regarding::Node => ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(node.to_owned()),
                uid: Some(node.to_owned()),
                ..ObjectReference::default()
            },
        };
        let name = regarding.name.clone().unwrap_or_default();
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{name}.{:x}", now.as_nanosecond())),
                namespace: Some(regarding.namespace.clone().unwrap_or_else(|| "default".to_owned())),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            reporting_controller: Some(DRIVER.to_owned()),
            reporting_instance: Some(node.to_owned()),
            action: Some(self.reason.action().to_owned()),
            reason: Some(format!("{:?}", self.reason)),
            type_: Some(if self.reason == Reason::GpuHealthy { "Normal" } else { "Warning" }.to_owned()),
            note: Some(self.note.clone()),
            regarding: Some(regarding),
            ..Event::default()
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Write,
    Repeated,
    TooMany,
}

/// Decides whether an event is written. Pure: the time is an argument.
#[derive(Default)]
struct RateLimiter {
    /// Recently written events, oldest first.
    recent: VecDeque<(Instant, EventRecord)>,
}

/// Time after which the same event is written again.
const REPEAT_INTERVAL: Duration = Duration::from_secs(600);
/// Maximum number of events in [`BURST_PERIOD`].
const BURST_MAX_EVENTS: usize = 30;
const BURST_PERIOD: Duration = Duration::from_secs(60);
const HISTORY_MAX_EVENTS: usize = 256;

impl RateLimiter {
    fn admit(&mut self, record: &EventRecord, now: Instant) -> Verdict {
        while self.recent.len() >= HISTORY_MAX_EVENTS
            || self.recent.front().is_some_and(|(at, _)| now.duration_since(*at) >= REPEAT_INTERVAL)
        {
            self.recent.pop_front();
        }
        if self.recent.iter().any(|(_, other)| other == record) {
            return Verdict::Repeated;
        }
        let burst = self.recent.iter().rev().take_while(|(at, _)| now.duration_since(*at) < BURST_PERIOD);
        if burst.count() >= BURST_MAX_EVENTS {
            return Verdict::TooMany;
        }
        self.recent.push_back((now, record.clone()));
        Verdict::Write
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(note: &str) -> EventRecord {
        EventRecord { regarding: Regarding::Node, reason: Reason::GpuLost, note: note.to_owned() }
    }

    fn check_recipients(uid: &str, expected: &[&str]) {
        let consumer = |group: &str, resource: &str, name: &str| {
            let uid = name;
            serde_json::json!({"apiGroup": group, "resource": resource, "name": name, "uid": uid})
        };
        let reserved = [
            consumer("", "pods", "p"),
            consumer("scheduling.k8s.io", "podgroups", "g"),
            consumer("example.com", "machines", "m"),
        ];
        let found = serde_json::from_value(serde_json::json!({
            "metadata": {"namespace": "ns", "name": "c", "uid": uid},
            "spec": {},
            "status": {"reservedFor": reserved},
        }))
        .unwrap();
        let claim = ClaimRef { namespace: "ns".to_owned(), name: "c".to_owned(), uid: "u".into() };
        let events = recipients(&claim, &found).into_iter().map(|regarding| {
            let event = EventRecord { regarding, ..record("note") }.event("node", Timestamp::now());
            let about = event.regarding.unwrap();
            format!("{} {}", about.kind.unwrap(), about.name.unwrap())
        });
        assert_eq!(events.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn pods_and_pod_groups_of_a_claim_get_its_events() {
        check_recipients("u", &["Pod p", "PodGroup g"]);
        check_recipients("other", &[]);
    }

    fn check(limiter: &mut RateLimiter, start: Instant, second: u64, note: &str, expected: Verdict) {
        assert_eq!(
            limiter.admit(&record(note), start + Duration::from_secs(second)),
            expected,
            "{note} at {second} s"
        );
    }

    #[test]
    fn same_event_is_written_once_in_ten_minutes() {
        let (mut limiter, start) = (RateLimiter::default(), Instant::now());
        check(&mut limiter, start, 0, "a", Verdict::Write);
        check(&mut limiter, start, 1, "a", Verdict::Repeated);
        check(&mut limiter, start, 2, "b", Verdict::Write);
        check(&mut limiter, start, 599, "a", Verdict::Repeated);
        check(&mut limiter, start, 600, "a", Verdict::Write);
    }

    #[test]
    fn burst_of_different_events_is_limited() {
        let (mut limiter, start) = (RateLimiter::default(), Instant::now());
        for number in 0..BURST_MAX_EVENTS {
            check(&mut limiter, start, 0, &number.to_string(), Verdict::Write);
        }
        check(&mut limiter, start, 59, "more", Verdict::TooMany);
        check(&mut limiter, start, 60, "more", Verdict::Write);
    }

    #[test]
    fn long_note_is_truncated_between_characters() {
        let long = "é".repeat(NOTE_MAX_BYTES);
        assert_eq!(truncate(&long).len(), NOTE_MAX_BYTES);
        assert_eq!(truncate("short"), "short");
        assert_eq!(truncate(&format!("a{long}")).len(), NOTE_MAX_BYTES - 1);
    }
}
