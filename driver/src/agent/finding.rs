//! What the agent finds, and what it does about it.

use divvy_api::{ClaimUid, ShareId};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A sort of finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A process of the claim has memory of the GPU and no slot of its own on the
    /// account page: the library is not in it, or is deceived.
    Hidden,
    /// The claim's processes have more than its limit, by more than the GPU driver
    /// itself can have taken.
    OverLimit,
    /// The claim's processes have more than its limit, but no more than the GPU driver
    /// may take for their contexts.
    Overhead,
    /// The claim's processes have more of a GPU's time than its ceiling though their rate is cut: they are not paced.
    OverTime,
    /// A process sees something else where the policy page is mounted for it.
    Pages,
    /// A process does not see its pages at all.
    NoPages,
    /// A process has more memory than its slot says, by more than a context.
    Understated,
    /// The account page says something that no honest process writes.
    Account,
    /// A process on the GPU that belongs to no claim with a share of it.
    Stranger,
}

impl Kind {
    pub const ALL: [Self; 9] = [
        Self::Hidden,
        Self::OverLimit,
        Self::Overhead,
        Self::OverTime,
        Self::Pages,
        Self::NoPages,
        Self::Understated,
        Self::Account,
        Self::Stranger,
    ];

    /// Whether the limit is not kept, or nobody can say that it is.
    pub fn breaks(self) -> bool {
        matches!(self, Self::Hidden | Self::OverLimit | Self::OverTime | Self::Pages)
    }

    /// In conditions.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Hidden => "HiddenProcess",
            Self::OverLimit => "OverLimit",
            Self::Overhead => "DriverOverhead",
            Self::OverTime => "OverTime",
            Self::Pages => "PagesCovered",
            Self::NoPages => "PagesMissing",
            Self::Understated => "Understated",
            Self::Account => "AccountDisagrees",
            Self::Stranger => "Stranger",
        }
    }

    /// In flags and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hidden => "hidden",
            Self::OverLimit => "over-limit",
            Self::Overhead => "overhead",
            Self::OverTime => "over-time",
            Self::Pages => "pages",
            Self::NoPages => "no-pages",
            Self::Understated => "understated",
            Self::Account => "account",
            Self::Stranger => "stranger",
        }
    }
}

/// Something that is not as it must be. The same finding is equal from one look to
/// the next: amounts stand in its text alone.
#[derive(Clone, Debug)]
pub struct Finding {
    pub kind: Kind,
    /// None of a stranger.
    pub claim: Option<ClaimUid>,
    pub share: Option<ShareId>,
    pub process: Option<Suspect>,
    /// A sentence without its subject: what is seen and what it should be.
    pub text: String,
    /// Never more than a report: the share is only observed, or the GPU driver keeps the limit anyway.
    pub report_only: bool,
    /// One look is enough to be sure; and a second may come too late, as what is found
    /// is put right at once.
    pub certain: bool,
}

/// A process, with what tells it from another that gets its number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Suspect {
    pub pid: u32,
    /// Clock ticks since boot.
    pub start: u64,
    /// As it calls itself.
    pub name: String,
}

/// What a finding is about, without amounts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) kind: Kind,
    pub(super) claim: Option<ClaimUid>,
    pub(super) share: Option<ShareId>,
    pub(super) process: Option<(u32, u64)>,
}

impl Key {
    /// Whether both are of one sort and one share, whichever the process.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        (self.kind, &self.claim, &self.share) == (other.kind, &other.claim, &other.share)
    }
}

impl Finding {
    pub(super) fn key(&self) -> Key {
        Key {
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

/// What is done about findings of each sort.
///
/// Ended by default is what takes from neighbours or hides from the limit: whoever
/// did that has no claim to go on, and a process ended is what an honest one gets
/// that asks for too much of the machine's memory. The rest is told: a page that
/// disagrees with the GPU driver harms nobody while the sum stays within the limit,
/// and a stranger may be an administrator's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    end: BTreeSet<Kind>,
}

impl Default for Response {
    fn default() -> Self {
        Self { end: BTreeSet::from([Kind::Hidden, Kind::OverLimit, Kind::OverTime, Kind::Pages]) }
    }
}

impl Response {
    /// Whether the process of such a finding is ended.
    pub(super) fn ends(&self, finding: &Finding) -> bool {
        self.end.contains(&finding.kind) && !finding.report_only && finding.process.is_some()
    }
}

impl fmt::Display for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.end.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&self.end.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(",")),
        }
    }
}

impl FromStr for Response {
    type Err = String;

    /// Names with commas between them, or "none".
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self { end: BTreeSet::new() });
        }
        let kind = |name: &str| {
            let known = Kind::ALL.into_iter().filter(|kind| kind.has_offender());
            known.clone().find(|kind| kind.name() == name).ok_or_else(|| {
                let names: Vec<&str> = known.map(Kind::name).collect();
                format!(
                    "{name:?} is no finding with a process to end; there are {}, or none",
                    names.join(", ")
                )
            })
        };
        text.split(',').map(|name| kind(name.trim())).collect::<Result<_, _>>().map(|end| Self { end })
    }
}

impl Kind {
    /// Whether such a finding names a process that may be ended: not one that may be
    /// an administrator's, nor one of several of which nobody can say which did it.
    fn has_offender(self) -> bool {
        !matches!(self, Self::Overhead | Self::Account | Self::Stranger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<&[Kind], &str>) {
        match (text.parse::<Response>(), expected) {
            (Ok(response), Ok(kinds)) => {
                assert_eq!(response.end, kinds.iter().copied().collect::<BTreeSet<_>>(), "{text}");
                assert_eq!(response.to_string().parse::<Response>(), Ok(response), "and back");
            }
            (Err(error), Err(part)) => assert!(error.contains(part), "{text}: {error}"),
            (found, _) => panic!("{text}: {found:?}"),
        }
    }

    #[test]
    fn what_is_ended_is_chosen_by_name() {
        check("none", Ok(&[]));
        check("hidden", Ok(&[Kind::Hidden]));
        check("over-limit, understated", Ok(&[Kind::OverLimit, Kind::Understated]));
        let default = [Kind::Hidden, Kind::OverLimit, Kind::OverTime, Kind::Pages];
        check(&Response::default().to_string(), Ok(&default));
        check("everything", Err("\"everything\""));
        check("stranger", Err("no finding with a process to end"));
        check("", Err("or none"));
    }
}
