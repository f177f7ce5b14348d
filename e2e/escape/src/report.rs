//! Runs each case with its protection and without, and writes the table of the results.

use crate::case_run::{CaseRun, Enforcement, Outcome};
use crate::isolation_cases::{Expectation, ISOLATION_CASES, IsolationCase};
use crate::programs::Programs;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// The table of a page is between these marks.
const TABLE_BEGIN: &str = "<!-- written by e2e/escape/run --table -->\n";
const TABLE_END: &str = "<!-- end of the table -->";

/// The result of a case with its protection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The limit held.
    Prevented,
    /// The agent reported it, and the gain is gone. With `killed`, the agent killed a process.
    Detected {
        kinds: BTreeSet<&'static str>,
        killed: bool,
    },
    /// The GPU driver refused the excess, and the agent reported the process.
    HeldByDriver {
        kinds: BTreeSet<&'static str>,
        killed: bool,
    },
    /// The gain is at most the bound of the case; with the kinds of findings that the agent reported.
    Bounded {
        kinds: BTreeSet<&'static str>,
    },
    LimitExceeded,
    BoundExceeded,
    /// A process of another share was killed.
    NeighbourHarmed,
    /// The case cannot run on this machine; with the reason.
    Skipped(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prevented => f.write_str("prevented"),
            Self::Detected { kinds, killed } => {
                write!(f, "detected: {}; {}", join(kinds), remedy(*killed))
            }
            Self::HeldByDriver { kinds, killed } => {
                write!(f, "held by the GPU driver: {}; {}", join(kinds), remedy(*killed))
            }
            Self::Bounded { kinds } if kinds.is_empty() => f.write_str("bounded"),
            Self::Bounded { kinds } => write!(f, "bounded; reported: {}", join(kinds)),
            Self::LimitExceeded => f.write_str("**limit exceeded**"),
            Self::BoundExceeded => f.write_str("**bound exceeded**"),
            Self::NeighbourHarmed => f.write_str("**harms a neighbour**"),
            Self::Skipped(reason) => write!(f, "skipped: {reason}"),
        }
    }
}

fn join(kinds: &BTreeSet<&'static str>) -> String {
    kinds.iter().copied().collect::<Vec<_>>().join(", ")
}

/// The remedy of the agent.
fn remedy(killed: bool) -> &'static str {
    if killed { "process killed" } else { "reported" }
}

/// Runs a case with its protection. The node's agent has until the timeout to act; a library other
/// than Divvy's runs without an agent.
pub fn run_protected(
    case: &IsolationCase,
    programs: &Programs,
    enforcement: &Enforcement,
    timeout: Duration,
) -> Result<Verdict> {
    let mut run = CaseRun::start(case, programs, Some(enforcement), enforcement.is_divvy())?;
    let findings = match &run.outcome {
        Outcome::LimitHeld if matches!(case.expected, Expectation::HeldByDriver(_)) => {
            run.findings(case, timeout)
        }
        Outcome::LimitHeld => Vec::new(),
        Outcome::Skipped(reason) => return Ok(Verdict::Skipped(reason.clone())),
        Outcome::Escaped | Outcome::Killed => run.findings(case, timeout),
    };
    let killed = findings.iter().any(|finding| finding.killed);
    let kinds: BTreeSet<&'static str> = findings.iter().map(|finding| finding.kind).collect();
    let has_bound = matches!(case.expected, Expectation::Bounded(_));
    Ok(if !run.neighbour_lives()? {
        Verdict::NeighbourHarmed
    } else if has_bound && !run.is_bounded(case)? {
        Verdict::BoundExceeded
    } else if has_bound && run.gained(case)? {
        Verdict::Bounded { kinds }
    } else if run.gained(case)? || (findings.is_empty() && run.outcome != Outcome::LimitHeld) {
        Verdict::LimitExceeded
    } else if run.outcome != Outcome::LimitHeld {
        Verdict::Detected { kinds, killed }
    } else if findings.is_empty() {
        Verdict::Prevented
    } else {
        Verdict::HeldByDriver { kinds, killed }
    })
}

/// Runs a case without its protection: without library and pages, or without the agent. Returns
/// true if the attack succeeds then, as it must.
pub fn succeeds_unprotected(
    case: &IsolationCase,
    programs: &Programs,
    enforcement: &Enforcement,
) -> Result<bool> {
    let remaining = match case.expected {
        Expectation::Prevented | Expectation::Bounded(_) => None,
        Expectation::Detected(_) | Expectation::HeldByDriver(_) => Some(enforcement),
    };
    let run = CaseRun::start(case, programs, remaining, false)?;
    Ok(run.outcome == Outcome::Escaped)
}

/// The cases whose names contain a word; all cases without one.
pub fn selected(only: Option<&str>) -> impl Iterator<Item = &'static IsolationCase> {
    ISOLATION_CASES.iter().filter(move |case| only.is_none_or(|word| case.name.contains(word)))
}

/// The results of a case, with its protection and without.
pub struct CaseResult {
    pub case: &'static IsolationCase,
    verdict: Result<Verdict>,
    succeeds_unprotected: Result<bool>,
}

/// Runs a case with its protection, and without it unless an earlier run of the same case is recorded.
pub fn run(
    case: &'static IsolationCase,
    programs: &Programs,
    enforcement: &Enforcement,
    timeout: Duration,
    recorded: &Controls,
) -> CaseResult {
    let verdict = run_protected(case, programs, enforcement, timeout);
    let succeeds_unprotected = match recorded.has(case) {
        true => Ok(true),
        false => succeeds_unprotected(case, programs, enforcement),
    };
    CaseResult { case, verdict, succeeds_unprotected }
}

/// Cases whose attack succeeded without the protection, with a digest of the case and of all attack
/// programs: one line `NAME DIGEST` each. While the digest is the same, the run without the
/// protection need not be repeated.
#[derive(Debug, Default)]
pub struct Controls {
    programs: String,
    digests: BTreeMap<String, String>,
}

impl Controls {
    /// Reads a file of controls; `None` records nothing.
    pub fn read(file: Option<&Path>) -> Result<Self> {
        let text = match file {
            None => String::new(),
            Some(file) => std::fs::read_to_string(file)
                .with_context(|| format!("cannot read the controls in {}", file.display()))?,
        };
        let line =
            |line: &str| line.split_once(' ').map(|(name, digest)| (name.to_owned(), digest.to_owned()));
        Ok(Self { programs: digest_of_programs()?, digests: text.lines().filter_map(line).collect() })
    }

    /// Whether the attack of this very case is recorded.
    fn has(&self, case: &IsolationCase) -> bool {
        self.digests.get(case.name) == Some(&self.digest(case))
    }

    fn digest(&self, case: &IsolationCase) -> String {
        hex(&Sha256::new().chain_update(&self.programs).chain_update(format!("{case:?}")).finalize())
    }

    /// The file for the cases whose attack succeeded.
    pub fn text(&self, results: &[CaseResult]) -> String {
        let succeeded = results.iter().filter(|result| matches!(result.succeeds_unprotected, Ok(true)));
        succeeded.map(|result| format!("{} {}\n", result.case.name, self.digest(result.case))).collect()
    }
}

fn digest_of_programs() -> Result<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
    let files =
        std::fs::read_dir(&directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut paths = files.map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    let mut digest = Sha256::new();
    for path in paths {
        digest.update(std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
    }
    Ok(hex(&digest.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the agent reported the finding that a bounded case must cause.
fn has_required_report(case: &IsolationCase, kinds: &BTreeSet<&'static str>) -> bool {
    case.reports.is_none_or(|kind| kinds.contains(kind))
}

impl CaseResult {
    /// Whether the attack had the expected result, and succeeded without the protection.
    pub fn passed(&self) -> bool {
        let as_expected = match (&self.verdict, self.case.expected) {
            (Ok(Verdict::Prevented), Expectation::Prevented) => true,
            (Ok(Verdict::Detected { kinds, .. }), Expectation::Detected(kind)) => kinds.contains(kind),
            (Ok(Verdict::Detected { kinds, killed: true }), Expectation::Prevented) => {
                self.case.reports.is_some_and(|kind| kinds.contains(kind))
            }
            // An attack that the agent ends is better than one that only its bound limits.
            (Ok(Verdict::Bounded { kinds } | Verdict::Detected { kinds, .. }), Expectation::Bounded(_)) => {
                has_required_report(self.case, kinds)
            }
            (Ok(Verdict::HeldByDriver { kinds, killed: false }), Expectation::HeldByDriver(kind)) => {
                kinds.contains(kind)
            }
            _ => false,
        };
        as_expected && matches!(self.succeeds_unprotected, Ok(true))
    }

    /// The cell of the table. It names only the expected kind of finding, so that the text is the
    /// same in every run.
    fn table_cell(&self) -> String {
        match (&self.verdict, self.case.expected) {
            (Ok(Verdict::Detected { kinds, killed }), Expectation::Detected(kind))
                if kinds.contains(kind) =>
            {
                format!("detected: `{kind}`; {}", remedy(*killed))
            }
            (Ok(Verdict::HeldByDriver { kinds, killed }), Expectation::HeldByDriver(kind))
                if kinds.contains(kind) =>
            {
                format!("held by the GPU driver: `{kind}`; {}", remedy(*killed))
            }
            (
                Ok(Verdict::Bounded { kinds } | Verdict::Detected { kinds, .. }),
                Expectation::Bounded(bound),
            ) if has_required_report(self.case, kinds) => {
                format!("bounded: {bound}")
            }
            (Ok(verdict), _) => verdict.to_string(),
            (Err(_), _) => "error".to_owned(),
        }
    }
}

impl fmt::Display for CaseResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:22} ", if self.passed() { "ok  " } else { "FAIL" }, self.case.name)?;
        match &self.verdict {
            Ok(verdict) => write!(f, "{verdict}")?,
            Err(error) => write!(f, "error: {error:#}")?,
        }
        match &self.succeeds_unprotected {
            Ok(true) => Ok(()),
            Ok(false) => f.write_str(" (proves nothing: the attack fails without the protection too)"),
            Err(error) => write!(f, " (proves nothing: without the protection, {error:#})"),
        }
    }
}

/// The table of the documentation, in Markdown.
pub fn table(results: &[CaseResult]) -> String {
    let mut table = "| attack | result | without the protection |\n|---|---|---|\n".to_owned();
    for result in results {
        let unprotected = match &result.succeeds_unprotected {
            Ok(true) => "succeeds",
            Ok(false) => "**fails**",
            Err(_) => "error",
        };
        table += &format!("| {} | {} | {unprotected} |\n", result.case.attack, result.table_cell());
    }
    table
}

/// The range between the two marks of a page; `None` if a mark is missing.
fn table_range(page: &str) -> Option<Range<usize>> {
    let begin = page.find(TABLE_BEGIN)? + TABLE_BEGIN.len();
    Some(begin..begin + page.get(begin..)?.find(TABLE_END)?)
}

/// A page with its table replaced.
pub fn with_table(page: &str, table: &str) -> Result<String> {
    let mut page = page.to_owned();
    let range = table_range(&page).context("the page has no marks of a table")?;
    page.replace_range(range, &format!("\n{table}"));
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_are_recorded_by_case_and_programs() {
        let case = &ISOLATION_CASES[0];
        let result = |succeeds| CaseResult {
            case,
            verdict: Ok(Verdict::Prevented),
            succeeds_unprotected: Ok(succeeds),
        };
        let mut controls = Controls::read(None).unwrap();
        assert!(!controls.has(case));
        assert_eq!(controls.text(&[result(false)]), "");
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("controls");
        std::fs::write(&file, controls.text(&[result(true)])).unwrap();
        controls = Controls::read(Some(&file)).unwrap();
        assert!(controls.has(case));
        assert!(!controls.has(&IsolationCase { attack: "another", ..*case }), "a changed case");
        controls.programs.push('x');
        assert!(!controls.has(case), "changed programs");
    }
}
