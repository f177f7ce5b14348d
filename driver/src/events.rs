//! Kubernetes events: what the owner of a claim or of the node can act on.
//!
//! Saying something never delays anybody: an event is put into a short queue
//! and dropped when that is full, when the same was said lately, or when too
//! much was said lately. A log line has been written in any case. Repetitions are
//! left out instead of counted, because a claim that is refused is tried again
//! every few seconds and each count would be a write to the API server.

use crate::metrics::Metrics;
use divvy_api::ClaimRef;
use divvy_api::names::DRIVER;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// What happened; the names appear as the event's reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    PrepareFailed,
    UnprepareFailed,
    RecordQuarantined,
    ClaimNotRecovered,
    UnexplainedInstances,
    GpuStuck,
    GpuLost,
    GpuMissing,
    MpsUnhealthy,
    MpsRestarted,
    /// A process of a claim with a share goes round its limit, or was ended for that.
    ShareBroken,
    /// Something about a share is not as it must be; nobody is harmed by it.
    ShareDoubtful,
    /// A process that belongs to no claim is on a GPU with shares.
    StrangerOnGpu,
    StatusRefused,
    ConfigRefused,
    DevicePlugin,
    PoolDegraded,
    NotReady,
}

impl Reason {
    fn action(self) -> &'static str {
        match self {
            Self::PrepareFailed => "Prepare",
            Self::UnprepareFailed => "Unprepare",
            Self::RecordQuarantined | Self::ClaimNotRecovered | Self::UnexplainedInstances => "Recover",
            Self::GpuStuck | Self::GpuLost | Self::GpuMissing | Self::MpsUnhealthy | Self::MpsRestarted => {
                "WatchGpus"
            }
            Self::ShareBroken | Self::ShareDoubtful | Self::StrangerOnGpu => "Audit",
            Self::PoolDegraded | Self::StatusRefused | Self::DevicePlugin => "Publish",
            Self::NotReady => "Start",
            Self::ConfigRefused => "Configure",
        }
    }
}

/// What an event is about, what it says and how.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Said {
    about: About,
    reason: Reason,
    note: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum About {
    Claim(ClaimRef),
    Pod { namespace: String, name: String, uid: String },
    Node,
}

/// The mouth; a clone is the same.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Said>,
    metrics: Metrics,
}

/// The hand that writes what [`Events`] were told; run by the node.
pub struct Scribe {
    queue: mpsc::Receiver<Said>,
    client: Client,
    node: String,
    metrics: Metrics,
}

const QUEUE: usize = 64;
const WRITE: Duration = Duration::from_secs(10);
/// The API server refuses a note of more than 1 KiB.
const NOTE: usize = 1000;

/// A mouth and its hand.
pub fn events(client: Client, node: &str, metrics: Metrics) -> (Events, Scribe) {
    let (sender, queue) = mpsc::channel(QUEUE);
    let events = Events { queue: sender, metrics: metrics.clone() };
    (events, Scribe { queue, client, node: node.to_owned(), metrics })
}

impl Events {
    /// Says something about a claim, to its owner; where it concerns its containers,
    /// to their pods too.
    pub fn claim(&self, claim: &ClaimRef, reason: Reason, note: &str) {
        self.say(About::Claim(claim.clone()), reason, note);
    }

    /// Says something about the node.
    pub fn node(&self, reason: Reason, note: &str) {
        self.say(About::Node, reason, note);
    }

    fn say(&self, about: About, reason: Reason, note: &str) {
        let said = Said { about, reason, note: cut(note).to_owned() };
        if self.queue.try_send(said).is_err() {
            self.metrics.event_dropped();
        }
    }
}

fn cut(note: &str) -> &str {
    note.get(..note.floor_char_boundary(NOTE)).unwrap_or(note)
}

impl Scribe {
    /// Writes until every [`Events`] is gone.
    pub async fn run(mut self) {
        let mut gate = Gate::default();
        while let Some(said) = self.queue.recv().await {
            match gate.admit(&said, Instant::now()) {
                Verdict::Write => {
                    self.write(&said).await;
                    for about in self.pods(&said).await {
                        self.write(&Said { about, ..said.clone() }).await;
                    }
                }
                Verdict::Repeated => {}
                Verdict::TooMany => self.metrics.event_dropped(),
            }
        }
    }

    /// The pods of a claim, where what happened concerns their containers.
    async fn pods(&self, said: &Said) -> Vec<About> {
        let About::Claim(claim) = &said.about else { return Vec::new() };
        if !matches!(said.reason, Reason::MpsRestarted | Reason::ShareBroken | Reason::ShareDoubtful) {
            return Vec::new();
        }
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        // Without an answer the claim's own event has to do.
        let Ok(Ok(found)) = tokio::time::timeout(WRITE, api.get(&claim.name)).await else {
            return Vec::new();
        };
        let is_same = found.metadata.uid.as_deref() == Some(claim.uid.as_str());
        let users = found.status.filter(|_| is_same).and_then(|status| status.reserved_for);
        let pods = users.into_iter().flatten().filter(|user| user.resource == "pods");
        let pod = |user: ResourceClaimConsumerReference| About::Pod {
            namespace: claim.namespace.clone(),
            name: user.name,
            uid: user.uid,
        };
        pods.map(pod).collect()
    }

    async fn write(&self, said: &Said) {
        let event = said.event(&self.node, Timestamp::now());
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let written = tokio::time::timeout(WRITE, api.create(&PostParams::default(), &event)).await;
        let failed = match written {
            Ok(Ok(_)) => return,
            Ok(Err(cause)) => cause.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        tracing::debug!(reason = ?said.reason, failed, "event not written");
        self.metrics.event_dropped();
    }
}

impl Said {
    fn event(&self, node: &str, now: Timestamp) -> Event {
        let regarding = match &self.about {
            About::Claim(claim) => ObjectReference {
                api_version: Some("resource.k8s.io/v1".to_owned()),
                kind: Some("ResourceClaim".to_owned()),
                namespace: Some(claim.namespace.clone()),
                name: Some(claim.name.clone()),
                uid: Some(claim.uid.to_string()),
                ..ObjectReference::default()
            },
            About::Pod { namespace, name, uid } => ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                namespace: Some(namespace.clone()),
                name: Some(name.clone()),
                uid: Some(uid.clone()),
                ..ObjectReference::default()
            },
            // `kubectl describe node` finds events of a node by its name in the place of a UID.
            About::Node => ObjectReference {
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
            type_: Some("Warning".to_owned()),
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

/// Decides what is written. Pure: time is passed in.
#[derive(Default)]
struct Gate {
    /// What was written lately, oldest first.
    lately: VecDeque<(Instant, Said)>,
}

/// The same is said again after this time.
const REPEAT: Duration = Duration::from_secs(600);
/// At most this many events in [`BURST_TIME`].
const BURST: usize = 30;
const BURST_TIME: Duration = Duration::from_secs(60);
const REMEMBERED: usize = 256;

impl Gate {
    fn admit(&mut self, said: &Said, now: Instant) -> Verdict {
        while self.lately.len() >= REMEMBERED
            || self.lately.front().is_some_and(|(at, _)| now.duration_since(*at) >= REPEAT)
        {
            self.lately.pop_front();
        }
        if self.lately.iter().any(|(_, other)| other == said) {
            return Verdict::Repeated;
        }
        let burst = self.lately.iter().rev().take_while(|(at, _)| now.duration_since(*at) < BURST_TIME);
        if burst.count() >= BURST {
            return Verdict::TooMany;
        }
        self.lately.push_back((now, said.clone()));
        Verdict::Write
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(note: &str) -> Said {
        Said { about: About::Node, reason: Reason::GpuLost, note: note.to_owned() }
    }

    fn check(gate: &mut Gate, start: Instant, second: u64, note: &str, expected: Verdict) {
        assert_eq!(
            gate.admit(&said(note), start + Duration::from_secs(second)),
            expected,
            "{note} at {second} s"
        );
    }

    #[test]
    fn the_same_is_said_once_in_ten_minutes() {
        let (mut gate, start) = (Gate::default(), Instant::now());
        check(&mut gate, start, 0, "a", Verdict::Write);
        check(&mut gate, start, 1, "a", Verdict::Repeated);
        check(&mut gate, start, 2, "b", Verdict::Write);
        check(&mut gate, start, 599, "a", Verdict::Repeated);
        check(&mut gate, start, 600, "a", Verdict::Write);
    }

    #[test]
    fn a_flood_of_different_events_is_cut() {
        let (mut gate, start) = (Gate::default(), Instant::now());
        for number in 0..BURST {
            check(&mut gate, start, 0, &number.to_string(), Verdict::Write);
        }
        check(&mut gate, start, 59, "more", Verdict::TooMany);
        check(&mut gate, start, 60, "more", Verdict::Write);
    }

    #[test]
    fn a_long_note_is_cut_between_characters() {
        let long = "é".repeat(NOTE);
        assert_eq!(cut(&long).len(), NOTE);
        assert_eq!(cut("short"), "short");
        assert_eq!(cut(&format!("a{long}")).len(), NOTE - 1);
    }
}
