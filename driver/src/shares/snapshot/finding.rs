//! The kinds of findings, and the policy that says which of them kill a process.

use super::process::Process;
use super::{Share, ShareKey};
use divvy_api::{ClaimUid, ShareId};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// The kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A process of the claim uses GPU memory but has no slot on the account page: it does not use
    /// the library, or deceives it.
    Unregistered,
    /// The claim's processes use more memory than the limit, by more than the GPU driver itself can
    /// account for.
    OverMemoryLimit,
    /// The claim's processes use more memory than the limit, by no more than the GPU driver may use
    /// for their contexts.
    DriverOverhead,
    /// The claim's processes use more GPU time than their ceiling although their rate was cut: they
    /// are not throttled.
    OverComputeLimit,
    /// A process sees something else at the mount point of the policy page.
    PagesMasked,
    /// A process does not see its pages at all.
    PagesMissing,
    /// A process uses more memory than its slot reports, by more than a context.
    UnderReported,
    /// The account page holds values that an honest process never writes.
    AccountMismatch,
    /// A process on the GPU belongs to no claim with a share of it.
    UnmanagedProcess,
}

impl Kind {
    pub const ALL: [Self; 9] = [
        Self::Unregistered,
        Self::OverMemoryLimit,
        Self::DriverOverhead,
        Self::OverComputeLimit,
        Self::PagesMasked,
        Self::PagesMissing,
        Self::UnderReported,
        Self::AccountMismatch,
        Self::UnmanagedProcess,
    ];

    /// Whether the limit is violated or cannot be verified.
    pub fn violates_limit(self) -> bool {
        matches!(
            self,
            Self::Unregistered | Self::OverMemoryLimit | Self::OverComputeLimit | Self::PagesMasked
        )
    }

    /// The reason in conditions.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Unregistered => "UnregisteredProcess",
            Self::OverMemoryLimit => "OverMemoryLimit",
            Self::DriverOverhead => "DriverOverhead",
            Self::OverComputeLimit => "OverComputeLimit",
            Self::PagesMasked => "PagesMasked",
            Self::PagesMissing => "PagesMissing",
            Self::UnderReported => "UnderReported",
            Self::AccountMismatch => "AccountMismatch",
            Self::UnmanagedProcess => "UnmanagedProcess",
        }
    }

    /// The name in flags and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unregistered => "unregistered",
            Self::OverMemoryLimit => "over-memory-limit",
            Self::DriverOverhead => "overhead",
            Self::OverComputeLimit => "over-compute-limit",
            Self::PagesMasked => "pages-masked",
            Self::PagesMissing => "pages-missing",
            Self::UnderReported => "under-reported",
            Self::AccountMismatch => "account",
            Self::UnmanagedProcess => "unmanaged",
        }
    }

    /// Whether such a finding names a process that may be killed. An unmanaged process may be an
    /// administrator's tool, and other kinds concern several processes of which any may be
    /// responsible.
    fn has_offender(self) -> bool {
        !matches!(self, Self::DriverOverhead | Self::AccountMismatch | Self::UnmanagedProcess)
    }
}

/// A violation or an irregularity that an audit found. It is the same finding in the next audit if
/// its key is equal; amounts appear only in its text.
#[derive(Clone, Debug)]
pub struct Finding {
    pub kind: Kind,
    /// `None` for an unmanaged process.
    pub claim: Option<ClaimUid>,
    pub share: Option<ShareId>,
    pub process: Option<Suspect>,
    /// The finding and the allowed value; the subject is the process or the claim.
    pub text: String,
    /// No process is killed for it: the share is observe-only, or the GPU driver enforces the limit anyway.
    pub report_only: bool,
    /// One audit is proof, so no second audit has to confirm it. A second one might also come too
    /// late, because the agent repairs the cause at once.
    pub certain: bool,
}

/// A process, identified by its start time as well, because pids are reused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Suspect {
    pub pid: u32,
    /// Clock ticks since boot.
    pub start: u64,
    /// The command name, which the process chooses itself.
    pub name: String,
}

impl Suspect {
    pub(crate) fn of(process: &Process) -> Self {
        Self { pid: process.pid, start: process.identity.start, name: process.name.clone() }
    }
}

/// Identifies a finding from one audit to the next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FindingKey {
    pub(crate) kind: Kind,
    pub(crate) claim: Option<ClaimUid>,
    pub(crate) share: Option<ShareId>,
    /// Pid and start time.
    pub(crate) process: Option<(u32, u64)>,
}

impl FindingKey {
    /// Whether both have the same kind and share, whichever the process.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        (self.kind, &self.claim, &self.share) == (other.kind, &other.claim, &other.share)
    }

    /// The share; `None` for an unmanaged process.
    pub(crate) fn share_key(&self) -> Option<ShareKey> {
        self.claim.clone().zip(self.share.clone())
    }
}

impl Finding {
    /// A finding about a share.
    pub(crate) fn about(share: &Share, kind: Kind, process: Option<Suspect>, text: String) -> Self {
        Self {
            kind,
            claim: Some(share.claim.clone()),
            share: Some(share.id.clone()),
            process,
            text,
            report_only: share.is_observe_only(),
            certain: false,
        }
    }

    pub(crate) fn key(&self) -> FindingKey {
        FindingKey {
            kind: self.kind,
            claim: self.claim.clone(),
            share: self.share.clone(),
            process: self.process.as_ref().map(|process| (process.pid, process.start)),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(Suspect { pid, name, .. }) = &self.process {
            write!(f, "process {pid} ({}): ", name.escape_debug())?;
        }
        f.write_str(&self.text)
    }
}

/// The kinds of findings for which the offending process is killed.
///
/// By default these are the kinds that take from neighbours or evade the limit, and the process
/// gets the signal that an honest process gets from the kernel when memory runs out. All other
/// kinds are only reported. An account page that disagrees with the GPU driver harms no neighbour
/// while the total stays within the limit. An unmanaged process may be an administrator's tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillPolicy {
    kinds: BTreeSet<Kind>,
}

impl Default for KillPolicy {
    fn default() -> Self {
        let kinds = [Kind::Unregistered, Kind::OverMemoryLimit, Kind::OverComputeLimit, Kind::PagesMasked];
        Self { kinds: BTreeSet::from(kinds) }
    }
}

impl KillPolicy {
    /// Whether the process of this finding is killed.
    pub(crate) fn kills(&self, finding: &Finding) -> bool {
        self.kinds.contains(&finding.kind) && !finding.report_only && finding.process.is_some()
    }
}

impl fmt::Display for KillPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kinds.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&self.kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(",")),
        }
    }
}

impl FromStr for KillPolicy {
    type Err = String;

    /// Parses a comma-separated list of kinds, or "none".
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self { kinds: BTreeSet::new() });
        }
        let kind = |name: &str| {
            let known = Kind::ALL.into_iter().filter(|kind| kind.has_offender());
            known.clone().find(|kind| kind.name() == name).ok_or_else(|| {
                let names: Vec<&str> = known.map(Kind::name).collect();
                format!(
                    "{name:?} is not a finding with a process to kill; use \"none\" or a list of {}",
                    names.join(", ")
                )
            })
        };
        text.split(',').map(|name| kind(name.trim())).collect::<Result<_, _>>().map(|kinds| Self { kinds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<&[Kind], &str>) {
        match (text.parse::<KillPolicy>(), expected) {
            (Ok(policy), Ok(kinds)) => {
                assert_eq!(policy.kinds, kinds.iter().copied().collect::<BTreeSet<_>>(), "{text}");
                assert_eq!(policy.to_string().parse::<KillPolicy>(), Ok(policy), "and back");
            }
            (Err(error), Err(part)) => assert!(error.contains(part), "{text}: {error}"),
            (found, _) => panic!("{text}: {found:?}"),
        }
    }

    #[test]
    fn kill_policy_is_parsed_by_name() {
        check("none", Ok(&[]));
        check("unregistered", Ok(&[Kind::Unregistered]));
        check("over-memory-limit, under-reported", Ok(&[Kind::OverMemoryLimit, Kind::UnderReported]));
        let default = [Kind::Unregistered, Kind::OverMemoryLimit, Kind::OverComputeLimit, Kind::PagesMasked];
        check(&KillPolicy::default().to_string(), Ok(&default));
        check("everything", Err("\"everything\""));
        check("unmanaged", Err("not a finding with a process to kill"));
        check("", Err("use \"none\""));
    }
}
