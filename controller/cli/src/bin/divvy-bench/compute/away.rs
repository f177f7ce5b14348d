//! What shares lose while nobody arbitrates, by who hosts the arbiter.
//!
//! Shares with a guarantee and no more need no arbiter: their library keeps them to it. Weights, what is lent and priority do. Each
//! is played for five seconds with the arbiter there; with another one that takes its place when it is killed, as when a
//! node daemon is replaced, which overlaps with the next; and with none in its place, as when a keeper is replaced, of
//! which there is one at a time. The differences are what an upgrade of either costs, and why the daemon is the host.

use super::policies::{Agent, by_weight, lend, off_by_weight, precede};
use super::tenants::Stage;
use crate::stats::{line, percentile};
use anyhow::Result;
use std::time::Duration;

/// So long nobody arbitrates, where nobody does.
const AWAY: Duration = Duration::from_secs(5);
/// So long before that the next one has begun, where there is one.
const OVERLAP: Duration = Duration::from_secs(1);
/// The owner of what is lent rests so long before the arbiter goes, and is back so long after.
const RESTS: u64 = 1_500_000_000;
const BACK: u64 = 500_000_000;

#[derive(Clone, Copy, PartialEq)]
enum Then {
    Stays,
    IsReplaced,
    IsGone,
}

/// The arbiter of a run, and what becomes of it.
struct Host<'a> {
    stage: &'a Stage,
    then: Then,
    agent: Option<Agent>,
    next: Option<Agent>,
}

impl<'a> Host<'a> {
    fn new(stage: &'a Stage, then: Then) -> Result<Self> {
        Ok(Self { stage, then, agent: Some(Agent::start(stage)?), next: None })
    }

    fn at(&mut self, since: Duration) -> Result<()> {
        let goes = self.stage.before;
        if self.then == Then::IsReplaced && self.next.is_none() && since + OVERLAP >= goes {
            self.next = Some(Agent::start(self.stage)?);
        }
        if self.then != Then::Stays && since >= goes {
            // Killed, the first time.
            self.agent = None;
        }
        Ok(())
    }
}

/// A node without an agent of its own.
pub(super) fn all(stage: &Stage) -> Result<()> {
    let stage = &stage.lasting(AWAY);
    let before = stage.before.as_nanos() as u64;
    for (name, then) in [("stays", Then::Stays), ("is_replaced", Then::IsReplaced), ("is_gone", Then::IsGone)]
    {
        let name = |what: &str| format!("arbiter_{name}_{what}");
        let mut host = Host::new(stage, then)?;
        let got = by_weight(stage, |since| host.at(since))?;
        line(&name("weights_error"), percentile(&off_by_weight(&got), 1.0), "points");
        let mut host = Host::new(stage, then)?;
        let rests = |since: u64| (before - RESTS..before + BACK).contains(&since);
        for lent in lend(stage, rests, |since| host.at(since))? {
            line(&name("borrower_over"), lent.borrower_over, "points");
            line(&name("owner_lacks"), lent.owner_lacks, "points");
        }
        let mut host = Host::new(stage, then)?;
        let late = precede(stage, 1, |since| host.at(since))?;
        line(&name("high_late_p99"), late.p99, "ms");
    }
    Ok(())
}
