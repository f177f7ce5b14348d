//! Leader election with a Lease, so that one replica writes. The rules are those of client-go
//! (k8s.io/client-go/tools/leaderelection). Clocks of different machines are never compared:
//! a holder has failed when its lease did not change for the lease's duration by the local clock.

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The lease, and the candidate.
#[derive(Clone, Debug)]
pub struct Election {
    pub namespace: String,
    pub lease: String,
    /// Unique among all replicas that ever ran.
    pub identity: String,
    /// A lease that was not renewed for this time is taken over.
    pub duration: Duration,
}

impl Election {
    /// A leader that could not renew for this time steps down, before another replica takes over.
    fn renew_deadline(&self) -> Duration {
        self.duration * 2 / 3
    }

    /// Interval between attempts. The ratios of 15 : 10 : 2 are client-go's defaults.
    fn retry_period(&self) -> Duration {
        self.duration * 2 / 15
    }
}

/// Time to release the lease at the end; the pod has 30 s to stop.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The next action on a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeaseAction {
    Renew,
    Take,
    Wait,
}

/// `unchanged` is the time since this lease was last observed to change. Pure.
fn next_action(lease: &LeaseSpec, me: &str, unchanged: Duration) -> LeaseAction {
    let holder = lease.holder_identity.as_deref().unwrap_or_default();
    let seconds = lease.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    match holder {
        "" => LeaseAction::Take,
        holder if holder == me => LeaseAction::Renew,
        _ if unchanged >= Duration::from_secs(seconds.unwrap_or(0)) => LeaseAction::Take,
        _ => LeaseAction::Wait,
    }
}

/// The lease with this candidate as its holder.
fn acquired_spec(before: Option<&LeaseSpec>, election: &Election, now: Timestamp) -> LeaseSpec {
    let mine = before.is_some_and(|spec| spec.holder_identity.as_deref() == Some(&election.identity));
    let transitions = before.and_then(|spec| spec.lease_transitions);
    LeaseSpec {
        holder_identity: Some(election.identity.clone()),
        lease_duration_seconds: Some(i32::try_from(election.duration.as_secs().max(1)).unwrap_or(i32::MAX)),
        renew_time: Some(MicroTime(now)),
        acquire_time: match before {
            Some(spec) if mine => spec.acquire_time.clone(),
            _ => Some(MicroTime(now)),
        },
        lease_transitions: match (transitions, mine) {
            (transitions, true) => transitions,
            (None, false) => Some(0),
            (Some(count), false) => Some(count.saturating_add(1)),
        },
        ..before.cloned().unwrap_or_default()
    }
}

/// Campaigns until `stop` is cancelled, then releases the lease.
pub async fn run(
    client: kube::Client,
    election: Election,
    leads: watch::Sender<bool>,
    stop: CancellationToken,
) {
    let api: Api<Lease> = Api::namespaced(client, &election.namespace);
    let mut candidate = Candidate { api, election, observed: None, renewed: None };
    let mut ticks = tokio::time::interval(candidate.election.retry_period());
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut last_error = String::new();
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => break,
        }
        // A hanging request must not outlive the lease that it would renew.
        let attempt =
            tokio::time::timeout(candidate.election.renew_deadline() / 2, candidate.acquire_or_renew()).await;
        let why = match attempt {
            Ok(Ok(())) => String::new(),
            Ok(Err(cause)) => cause.to_string(),
            Err(_) => "the API server did not answer in time".to_owned(),
        };
        if why != last_error {
            if !why.is_empty() {
                tracing::warn!(
                    why,
                    lease = candidate.election.lease,
                    "cannot update the lease for leader election"
                );
            }
            last_error = why;
        }
        let now = candidate.leads();
        if leads.send_if_modified(|leads| std::mem::replace(leads, now) != now) {
            tracing::info!(leads = now, identity = candidate.election.identity, "leadership changed");
        }
    }
    if leads.send_replace(false) {
        candidate.release().await;
    }
}

struct Candidate {
    api: Api<Lease>,
    election: Election,
    /// The lease as last observed, and when it was first observed in this state.
    observed: Option<(LeaseSpec, Instant)>,
    /// Time of the last successful renewal.
    renewed: Option<Instant>,
}

impl Candidate {
    fn leads(&self) -> bool {
        self.renewed.is_some_and(|at| at.elapsed() < self.election.renew_deadline())
    }

    async fn acquire_or_renew(&mut self) -> kube::Result<()> {
        let now = Timestamp::now();
        let Some(mut lease) = self.api.get_opt(&self.election.lease).await? else {
            let metadata = ObjectMeta { name: Some(self.election.lease.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(acquired_spec(None, &self.election, now)) };
            return self.record_write(self.api.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.take().unwrap_or_default();
        let since = match &self.observed {
            Some((before, since)) if *before == spec => *since,
            _ => Instant::now(),
        };
        self.observed = Some((spec.clone(), since));
        match next_action(&spec, &self.election.identity, since.elapsed()) {
            LeaseAction::Wait => {
                self.renewed = None;
                Ok(())
            }
            LeaseAction::Renew | LeaseAction::Take => {
                lease.spec = Some(acquired_spec(Some(&spec), &self.election, now));
                let done = self.api.replace(&self.election.lease, &PostParams::default(), &lease).await;
                self.record_write(done)
            }
        }
    }

    /// A conflict means that another replica wrote first.
    fn record_write(&mut self, done: kube::Result<Lease>) -> kube::Result<()> {
        match done {
            Ok(lease) => {
                let now = Instant::now();
                self.observed = lease.spec.map(|spec| (spec, now));
                self.renewed = Some(now);
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(cause) => Err(cause),
        }
    }

    /// Lets another replica take over at once. If this fails, that replica waits for the duration.
    async fn release(&self) {
        let released = async {
            let Some(mut lease) = self.api.get_opt(&self.election.lease).await? else { return Ok(()) };
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() != Some(&self.election.identity) {
                return Ok(());
            }
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            self.api.replace(&self.election.lease, &PostParams::default(), &lease).await.map(drop)
        };
        match tokio::time::timeout(RELEASE_TIMEOUT, released).await {
            Ok(Ok(())) => {}
            Ok(Err(cause)) => tracing::debug!(%cause, "lease not released"),
            Err(_) => tracing::debug!("lease not released in time"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn election(me: &str) -> Election {
        let text = |text: &str| text.to_owned();
        Election {
            namespace: text("ns"),
            lease: text("l"),
            identity: text(me),
            duration: Duration::from_secs(15),
        }
    }

    #[test]
    fn lease_is_taken_when_free_or_expired() {
        let check = |holder: &str, unchanged: u64, expected: LeaseAction| {
            let spec = LeaseSpec {
                holder_identity: Some(holder.into()),
                lease_duration_seconds: Some(15),
                ..Default::default()
            };
            assert_eq!(
                next_action(&spec, "me", Duration::from_secs(unchanged)),
                expected,
                "{holder} {unchanged}"
            );
        };
        check("", 0, LeaseAction::Take);
        check("me", 0, LeaseAction::Renew);
        check("me", 100, LeaseAction::Renew);
        check("other", 14, LeaseAction::Wait);
        check("other", 15, LeaseAction::Take);
    }

    #[test]
    fn only_a_change_of_holder_counts_as_transition() {
        let now = Timestamp::now();
        let first = acquired_spec(None, &election("a"), now);
        let renewed = acquired_spec(Some(&first), &election("a"), now);
        let second = acquired_spec(Some(&renewed), &election("b"), now);
        let count = |spec: &LeaseSpec| spec.lease_transitions;
        assert_eq!((count(&first), count(&renewed), count(&second)), (Some(0), Some(0), Some(1)));
        assert_eq!(second.holder_identity.as_deref(), Some("b"));
    }
}
