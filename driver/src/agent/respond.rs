//! What follows from findings: who is ended, and what is told.
//!
//! A finding counts when two looks in a row see it, or at once where one is proof. It is told once, and again after a
//! while as long as it lasts; that a share is well again is told too.

use super::end::{self, Ended};
use super::finding::Key;
use super::{AGAIN, Done, Finding, Memory, Report, Sources};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// So many processes of a share are told of at once; who is ended is told of always.
const MOST: usize = 256;

impl Sources {
    /// Ends and tells, and remembers what was.
    pub(super) fn respond(&self, findings: Vec<Finding>, memory: Memory) -> (Memory, Vec<Report>) {
        let now = Instant::now();
        let Memory { seen, mut told, .. } = memory;
        let mut reports = Vec::new();
        let keys: BTreeSet<Key> = findings.iter().map(Finding::key).collect();
        for finding in findings {
            let key = finding.key();
            // By sort and share: processes that take turns are one finding.
            let again = seen.iter().any(|known| known.is_like(&key));
            if !finding.certain && !again {
                continue;
            }
            let of_share = |other: &&Key| other.claim == key.claim && other.share == key.share;
            // A claim that shows one process after the other fills neither memory nor log.
            let is_kept = told.contains_key(&key) || told.keys().filter(of_share).take(MOST).count() < MOST;
            let is_new = is_kept && told.get(&key).is_none_or(|at| now.duration_since(*at) >= AGAIN);
            let done = match &finding.process {
                Some(suspect) if self.response.ends(&finding) => {
                    match end::end(&self.process_root, suspect) {
                        Ok(Ended::Killed) => Done::Ended,
                        Ok(Ended::Gone) => Done::Reported,
                        Err(error) => {
                            if is_new {
                                tracing::error!(error = &error as &dyn std::error::Error, %finding, "not ended");
                            }
                            Done::NotEnded
                        }
                    }
                }
                _ => Done::Reported,
            };
            if is_new || done == Done::Ended {
                let claim = finding.claim.as_ref().map(ToString::to_string).unwrap_or_default();
                tracing::warn!(kind = finding.kind.name(), claim, ?done, %finding, "a share is not kept");
                if is_kept {
                    told.insert(key, now);
                }
                reports.push(Report::Found { finding: Box::new(finding), done });
            }
        }
        let (mut still, over): (BTreeMap<_, _>, BTreeMap<_, _>) =
            told.into_iter().partition(|(key, _)| keys.iter().any(|now| now.is_like(key)));
        let share = |key: &Key| Some((key.claim.clone()?, key.share.clone()?));
        let troubled: BTreeSet<_> = still.keys().filter_map(share).collect();
        let well: BTreeSet<_> = over.keys().filter_map(share).collect();
        let well = well.difference(&troubled).cloned();
        reports.extend(well.map(|(claim, share)| Report::Well { claim, share }));
        // And is told again some time.
        still.retain(|_, at| now.duration_since(*at) < AGAIN);
        (Memory { seen: keys, told: still, ..memory }, reports)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Contexts, Files, HostPaths, Kind, Shares, Suspect, bell::Bell};
    use super::*;
    use std::path::PathBuf;

    fn hidden(pid: u32) -> Finding {
        let process = Some(Suspect { pid, start: 1, name: String::new() });
        let (claim, share) = (Some("c".into()), Some("s".into()));
        let text = String::new();
        Finding { kind: Kind::Hidden, claim, share, process, text, report_only: false, certain: false }
    }

    fn sources() -> Sources {
        Sources {
            shares: Shares::new(&HostPaths::below(&PathBuf::new())),
            contexts: Contexts::new(&HostPaths::below(&PathBuf::new())),
            files: Files::default(),
            process_root: PathBuf::new(),
            cgroup_root: PathBuf::new(),
            locks: Default::default(),
            response: "none".parse().unwrap(),
            bell: Bell::default(),
        }
    }

    #[test]
    fn a_share_that_shows_one_process_after_the_other_fills_no_memory() {
        let (sources, mut memory, mut told) = (sources(), Memory::default(), 0);
        for pid in (0..4000).step_by(100) {
            let findings = (pid..pid + 100).map(hidden).collect();
            let (after, reports) = sources.respond(findings, memory);
            (memory, told) = (after, told + reports.len());
        }
        assert_eq!((memory.told.len(), told), (MOST, MOST));
        // And nobody else is silent for it.
        let other = || Finding { share: Some("t".into()), ..hidden(1) };
        let (memory, _) = sources.respond(vec![other()], memory);
        let (_, reports) = sources.respond(vec![other()], memory);
        assert!(matches!(reports[..], [Report::Found { .. }, ..]), "{reports:?}");
    }

    #[test]
    fn what_was_told_of_the_processes_of_a_share_is_forgotten_in_time() {
        let sources = sources();
        let told = |memory: &Memory| memory.told.keys().filter_map(|key| key.process).collect::<Vec<_>>();
        let now = Instant::now();
        let earlier = [(1, now.checked_sub(AGAIN).unwrap()), (2, now)];
        let memory = Memory {
            seen: [hidden(2).key()].into(),
            told: earlier.map(|(pid, at)| (hidden(pid).key(), at)).into(),
            ..Memory::default()
        };
        let (memory, reports) = sources.respond(vec![hidden(3)], memory);
        assert_eq!(told(&memory), [(2, 1), (3, 1)]);
        assert!(matches!(reports[..], [Report::Found { done: Done::Reported, .. }]), "{reports:?}");
        let (memory, reports) = sources.respond(Vec::new(), memory);
        assert_eq!(told(&memory), []);
        assert!(matches!(reports[..], [Report::Well { .. }]), "{reports:?}");
    }
}
