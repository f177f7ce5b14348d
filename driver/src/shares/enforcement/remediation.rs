//! Acts on findings: kills offenders and reports.
//!
//! A finding counts if two audits in a row have it, or at once if it is certain. It is reported
//! once and then again at intervals while it lasts. When a share has no more findings, that is
//! reported too.

use super::kill::{self, Outcome};
use crate::shares::snapshot::finding::{Finding, FindingKey, KillPolicy};
use divvy_api::top::ShareUsage;
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::GpuUuid;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

/// A finding that lasts is reported again after this time.
const REPORT_INTERVAL: Duration = Duration::from_secs(600);
/// At most this many processes of a share are reported per interval, so that a claim that shows one
/// process after the other fills neither memory nor log. Kills are always reported.
const REPORTED_PER_SHARE_MAX: usize = 256;

/// A report of the agent.
#[derive(Clone, Debug)]
pub enum Report {
    Found {
        finding: Box<Finding>,
        action: Action,
    },
    /// The share has no more findings.
    Resolved {
        claim: ClaimUid,
        share: ShareId,
    },
    /// A GPU was audited. `shares` has their usage, without the names of claims.
    Audited {
        took: Duration,
        gpu: GpuUuid,
        shares: Vec<ShareUsage>,
    },
}

/// The action that the agent took on a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    Reported,
    Killed,
    /// The process should have been killed, but that failed.
    KillFailed,
}

impl Action {
    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reported => "reported",
            Self::Killed => "killed",
            Self::KillFailed => "kill-failed",
        }
    }
}

/// The findings of one GPU up to now.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// The findings of the last audit, whether they counted or not.
    seen: BTreeSet<FindingKey>,
    /// When each finding was last reported.
    reported: BTreeMap<FindingKey, Instant>,
}

impl State {
    /// Kills offenders and returns the reports of this audit.
    pub(crate) fn respond(
        &mut self,
        findings: Vec<Finding>,
        policy: &KillPolicy,
        process_root: &Path,
    ) -> Vec<Report> {
        let now = Instant::now();
        let mut reports = Vec::new();
        let keys: BTreeSet<FindingKey> = findings.iter().map(Finding::key).collect();
        for finding in findings {
            let key = finding.key();
            // By kind and share: processes that take turns are one finding.
            let is_confirmed = self.seen.iter().any(|known| known.is_like(&key));
            if !finding.certain && !is_confirmed {
                continue;
            }
            let is_remembered = self.can_remember(&key);
            let is_due = |at: &Instant| now.duration_since(*at) >= REPORT_INTERVAL;
            let is_new = is_remembered && self.reported.get(&key).is_none_or(is_due);
            let action = match &finding.process {
                Some(suspect) if policy.kills(&finding) => match kill::kill(process_root, suspect) {
                    Ok(Outcome::Killed) => Action::Killed,
                    Ok(Outcome::Gone) => Action::Reported,
                    Err(error) => {
                        if is_new {
                            let error = &error as &dyn std::error::Error;
                            tracing::error!(error, %finding, "process not killed");
                        }
                        Action::KillFailed
                    }
                },
                _ => Action::Reported,
            };
            if is_new || action == Action::Killed {
                let claim = finding.claim.as_ref().map(ToString::to_string).unwrap_or_default();
                tracing::warn!(kind = finding.kind.name(), claim, ?action, %finding, "audit finding");
                if is_remembered {
                    self.reported.insert(key, now);
                }
                reports.push(Report::Found { finding: Box::new(finding), action });
            }
        }
        reports.extend(self.resolve(&keys));
        // Expired entries are dropped, so that the finding is reported again.
        self.reported.retain(|_, at| now.duration_since(*at) < REPORT_INTERVAL);
        self.seen = keys;
        reports
    }

    /// Whether the finding is known or its share has fewer than [`REPORTED_PER_SHARE_MAX`].
    fn can_remember(&self, key: &FindingKey) -> bool {
        let of_share = |other: &&FindingKey| other.claim == key.claim && other.share == key.share;
        let count = || self.reported.keys().filter(of_share).take(REPORTED_PER_SHARE_MAX).count();
        self.reported.contains_key(key) || count() < REPORTED_PER_SHARE_MAX
    }

    /// Forgets the findings that are over, and returns the shares that have none left.
    fn resolve(&mut self, current: &BTreeSet<FindingKey>) -> Vec<Report> {
        let is_current = |key: &FindingKey| current.iter().any(|now| now.is_like(key));
        let (remaining, over): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.reported).into_iter().partition(|(key, _)| is_current(key));
        let shares = |keys: &BTreeMap<FindingKey, _>| keys.keys().filter_map(FindingKey::share_key).collect();
        let (affected, resolved): (BTreeSet<_>, BTreeSet<_>) = (shares(&remaining), shares(&over));
        self.reported = remaining;
        let resolved = resolved.difference(&affected).cloned();
        resolved.map(|(claim, share)| Report::Resolved { claim, share }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::snapshot::finding::{Kind, Suspect};

    fn unregistered(pid: u32) -> Finding {
        let process = Some(Suspect { pid, start: 1, name: String::new() });
        let (claim, share) = (Some("c".into()), Some("s".into()));
        let text = String::new();
        let kind = Kind::Unregistered;
        Finding { kind, claim, share, process, text, report_only: false, certain: false }
    }

    fn respond(state: &mut State, findings: Vec<Finding>) -> Vec<Report> {
        state.respond(findings, &"none".parse().unwrap(), Path::new(""))
    }

    #[test]
    fn a_share_with_many_processes_fills_no_memory() {
        let (mut state, mut count) = (State::default(), 0);
        for pid in (0..4000).step_by(100) {
            let findings = (pid..pid + 100).map(unregistered).collect();
            count += respond(&mut state, findings).len();
        }
        assert_eq!((state.reported.len(), count), (REPORTED_PER_SHARE_MAX, REPORTED_PER_SHARE_MAX));
        // Other shares are reported as usual.
        let other = || Finding { share: Some("t".into()), ..unregistered(1) };
        respond(&mut state, vec![other()]);
        let reports = respond(&mut state, vec![other()]);
        assert!(matches!(reports[..], [Report::Found { .. }, ..]), "{reports:?}");
    }

    #[test]
    fn reported_processes_are_forgotten_after_the_interval() {
        let reported =
            |state: &State| state.reported.keys().filter_map(|key| key.process).collect::<Vec<_>>();
        let now = Instant::now();
        let earlier = [(1, now.checked_sub(REPORT_INTERVAL).unwrap()), (2, now)];
        let mut state = State {
            seen: [unregistered(2).key()].into(),
            reported: earlier.map(|(pid, at)| (unregistered(pid).key(), at)).into(),
        };
        let reports = respond(&mut state, vec![unregistered(3)]);
        assert_eq!(reported(&state), [(2, 1), (3, 1)]);
        assert!(matches!(reports[..], [Report::Found { action: Action::Reported, .. }]), "{reports:?}");
        let reports = respond(&mut state, Vec::new());
        assert_eq!(reported(&state), []);
        assert!(matches!(reports[..], [Report::Resolved { .. }]), "{reports:?}");
    }
}
