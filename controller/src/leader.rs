//! One replica writes: who holds the Lease. The rules are those of client-go's
//! leader election (k8s.io/client-go/tools/leaderelection), so that clocks of
//! different machines are never compared: a holder is gone when its lease has not
//! changed for the lease's duration by *our* clock.

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Which lease, and who asks.
#[derive(Clone, Debug)]
pub struct Election {
    pub namespace: String,
    pub lease: String,
    /// Unique among all that ever ran.
    pub identity: String,
    /// After so long without a sign of life another takes over.
    pub duration: Duration,
}

impl Election {
    /// A leader that could not renew for so long stops being one, well before another begins.
    fn renew_within(&self) -> Duration {
        self.duration * 2 / 3
    }

    fn every(&self) -> Duration {
        self.duration * 2 / 15
    }
}

/// What to do about a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Renew,
    Take,
    Wait,
}

/// Pure: `unchanged` is for how long this lease was seen as it is.
fn step(lease: &LeaseSpec, me: &str, unchanged: Duration) -> Step {
    let holder = lease.holder_identity.as_deref().unwrap_or_default();
    let seconds = lease.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    match holder {
        "" => Step::Take,
        holder if holder == me => Step::Renew,
        _ if unchanged >= Duration::from_secs(seconds.unwrap_or(0)) => Step::Take,
        _ => Step::Wait,
    }
}

/// The lease after a step of ours.
fn written(before: Option<&LeaseSpec>, election: &Election, now: Timestamp) -> LeaseSpec {
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

/// Takes part until told to stop; the lease is given back at the end.
pub async fn run(
    client: kube::Client,
    election: Election,
    leads: watch::Sender<bool>,
    stop: CancellationToken,
) {
    let api: Api<Lease> = Api::namespaced(client, &election.namespace);
    let mut candidate = Candidate { api, election, seen: None, renewed: None };
    let mut ticks = tokio::time::interval(candidate.election.every());
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut complaint = String::new();
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => break,
        }
        // A request that hangs must not outlive the lease it would renew.
        let turn = tokio::time::timeout(candidate.election.renew_within() / 2, candidate.turn()).await;
        let why = match turn {
            Ok(Ok(())) => String::new(),
            Ok(Err(cause)) => cause.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        if why != complaint {
            if !why.is_empty() {
                tracing::warn!(why, lease = candidate.election.lease, "leader election cannot go on");
            }
            complaint = why;
        }
        let now = candidate.leads();
        if leads.send_if_modified(|leads| std::mem::replace(leads, now) != now) {
            tracing::info!(leads = now, identity = candidate.election.identity, "leadership");
        }
    }
    if leads.send_replace(false) {
        candidate.give_back().await;
    }
}

struct Candidate {
    api: Api<Lease>,
    election: Election,
    /// The lease as last seen, and since when it is so.
    seen: Option<(LeaseSpec, Instant)>,
    /// Last time the lease was ours for certain.
    renewed: Option<Instant>,
}

impl Candidate {
    fn leads(&self) -> bool {
        self.renewed.is_some_and(|at| at.elapsed() < self.election.renew_within())
    }

    async fn turn(&mut self) -> kube::Result<()> {
        let now = Timestamp::now();
        let Some(mut lease) = self.api.get_opt(&self.election.lease).await? else {
            let metadata = ObjectMeta { name: Some(self.election.lease.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(written(None, &self.election, now)) };
            return self.won(self.api.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.take().unwrap_or_default();
        let since = match &self.seen {
            Some((before, since)) if *before == spec => *since,
            _ => Instant::now(),
        };
        self.seen = Some((spec.clone(), since));
        match step(&spec, &self.election.identity, since.elapsed()) {
            Step::Wait => {
                self.renewed = None;
                Ok(())
            }
            Step::Renew | Step::Take => {
                lease.spec = Some(written(Some(&spec), &self.election, now));
                let done = self.api.replace(&self.election.lease, &PostParams::default(), &lease).await;
                self.won(done)
            }
        }
    }

    /// A conflict means that somebody was quicker.
    fn won(&mut self, done: kube::Result<Lease>) -> kube::Result<()> {
        match done {
            Ok(lease) => {
                let now = Instant::now();
                self.seen = lease.spec.map(|spec| (spec, now));
                self.renewed = Some(now);
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(cause) => Err(cause),
        }
    }

    /// Lets the next one begin at once; failing that it waits for the duration.
    async fn give_back(&self) {
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
        match tokio::time::timeout(Duration::from_secs(5), released).await {
            Ok(Ok(())) => {}
            Ok(Err(cause)) => tracing::debug!(%cause, "lease not given back"),
            Err(_) => tracing::debug!("lease not given back in time"),
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
    fn a_lease_is_taken_only_when_it_is_free_or_its_holder_is_silent() {
        let check = |holder: &str, unchanged: u64, expected: Step| {
            let spec = LeaseSpec {
                holder_identity: Some(holder.into()),
                lease_duration_seconds: Some(15),
                ..Default::default()
            };
            assert_eq!(step(&spec, "me", Duration::from_secs(unchanged)), expected, "{holder} {unchanged}");
        };
        check("", 0, Step::Take);
        check("me", 0, Step::Renew);
        check("me", 100, Step::Renew);
        check("other", 14, Step::Wait);
        check("other", 15, Step::Take);
    }

    #[test]
    fn a_change_of_holder_is_counted_and_a_renewal_is_not() {
        let now = Timestamp::now();
        let first = written(None, &election("a"), now);
        let renewed = written(Some(&first), &election("a"), now);
        let second = written(Some(&renewed), &election("b"), now);
        let count = |spec: &LeaseSpec| spec.lease_transitions;
        assert_eq!((count(&first), count(&renewed), count(&second)), (Some(0), Some(0), Some(1)));
        assert_eq!(second.holder_identity.as_deref(), Some("b"));
    }
}
