//! The whole suite: each row against the library, each row with its guard taken away, and the table of both.

use crate::programs::Programs;
use crate::rows::{Must, ROWS, Row};
use crate::trial::{Enforcement, Outcome, Trial};
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// Between these stands the table in a page.
const BEGIN: &str = "<!-- written by e2e/escape/run --table -->\n";
const END: &str = "<!-- end of the table -->";

/// What a row came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The limit held.
    Prevented,
    /// The node found that, and what was won is lost again; it may have ended somebody for it.
    Detected {
        found: BTreeSet<&'static str>,
        ended: bool,
    },
    /// The GPU driver refused it, and the node told of it.
    Held {
        found: BTreeSet<&'static str>,
        ended: bool,
    },
    /// What was won is no more than the bound that is named; and what the node told of it.
    Bounded {
        told: BTreeSet<&'static str>,
    },
    NotHeld,
    /// Nor is the bound kept that is named.
    Unbounded,
    /// A process of somebody else's share was ended.
    Harmed,
    Cannot(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prevented => f.write_str("prevented"),
            Self::Detected { found, ended } => {
                let found = found.iter().copied().collect::<Vec<_>>().join(", ");
                write!(f, "detected: {found}; {}", done(*ended))
            }
            Self::Held { found, ended } => {
                let found = found.iter().copied().collect::<Vec<_>>().join(", ");
                write!(f, "held by the GPU driver: {found}; {}", done(*ended))
            }
            Self::Bounded { told } if told.is_empty() => f.write_str("bounded"),
            Self::Bounded { told } => {
                write!(f, "bounded; told: {}", told.iter().copied().collect::<Vec<_>>().join(", "))
            }
            Self::NotHeld => f.write_str("**not held**"),
            Self::Unbounded => f.write_str("**beyond its bound**"),
            Self::Harmed => f.write_str("**harms a neighbour**"),
            Self::Cannot(why) => write!(f, "not tried: {why}"),
        }
    }
}

/// Plays one row with everything that should stop it; the node's agent has so long to do so. Another library than
/// Divvy's has no agent.
pub fn judge(row: &Row, programs: &Programs, enforcement: &Enforcement, within: Duration) -> Result<Verdict> {
    let mut trial = Trial::play(row, programs, Some(enforcement), enforcement.is_divvy())?;
    let found = match &trial.outcome {
        Outcome::Held if matches!(row.must, Must::BeHeld(_)) => trial.found(row, within),
        Outcome::Held => Vec::new(),
        Outcome::Cannot(why) => return Ok(Verdict::Cannot(why.clone())),
        Outcome::Escaped | Outcome::Ended => trial.found(row, within),
    };
    let ended = found.iter().any(|told| told.ended);
    let kinds = found.iter().map(|told| told.kind).collect();
    Ok(if !trial.neighbour_lives()? {
        Verdict::Harmed
    } else if matches!(row.must, Must::BeNamed(_)) && !trial.is_bounded(row)? {
        Verdict::Unbounded
    } else if matches!(row.must, Must::BeNamed(_)) && trial.gained(row)? {
        Verdict::Bounded { told: kinds }
    } else if trial.gained(row)? || (found.is_empty() && trial.outcome != Outcome::Held) {
        Verdict::NotHeld
    } else if trial.outcome != Outcome::Held {
        Verdict::Detected { found: kinds, ended }
    } else if found.is_empty() {
        Verdict::Prevented
    } else {
        Verdict::Held { found: kinds, ended }
    })
}

/// What was done about what was found.
fn done(ended: bool) -> &'static str {
    if ended { "the process is ended" } else { "reported" }
}

/// Plays one row without what should stop it: the library and the pages, or the agent that looks on. True if it wins
/// then, as it must.
pub fn wins_unguarded(row: &Row, programs: &Programs, enforcement: &Enforcement) -> Result<bool> {
    let left = match row.must {
        Must::BePrevented | Must::BeNamed(_) => None,
        Must::BeDetected(_) | Must::BeHeld(_) => Some(enforcement),
    };
    let trial = Trial::play(row, programs, left, false)?;
    Ok(trial.outcome == Outcome::Escaped)
}

/// The rows whose names contain a word.
pub fn chosen(only: Option<&str>) -> impl Iterator<Item = &'static Row> {
    ROWS.iter().filter(move |row| only.is_none_or(|word| row.name.contains(word)))
}

/// A row and what it came to, with its guards and without.
pub struct Line {
    /// What was played.
    pub row: &'static Row,
    verdict: Result<Verdict>,
    wins_unguarded: Result<bool>,
}

/// Plays a row both ways.
pub fn play(row: &'static Row, programs: &Programs, enforcement: &Enforcement, within: Duration) -> Line {
    let verdict = judge(row, programs, enforcement, within);
    Line { row, verdict, wins_unguarded: wins_unguarded(row, programs, enforcement) }
}

/// Whether that is told which is to be told of a row that is named with its bound.
fn row_tells(row: &Row, told: &BTreeSet<&'static str>) -> bool {
    row.tells.is_none_or(|kind| told.contains(kind))
}

impl Line {
    /// The trick came to what it must, and wins where nothing stops it.
    pub fn good(&self) -> bool {
        let held = match (&self.verdict, self.row.must) {
            (Ok(Verdict::Prevented), Must::BePrevented) => true,
            (Ok(Verdict::Detected { found, .. }), Must::BeDetected(what)) => found.contains(what),
            (Ok(Verdict::Bounded { told }), Must::BeNamed(_)) => row_tells(self.row, told),
            (Ok(Verdict::Held { found, ended: false }), Must::BeHeld(what)) => found.contains(what),
            _ => false,
        };
        held && matches!(self.wins_unguarded, Ok(true))
    }

    /// In the table: as short as it is true of every run.
    fn words(&self) -> String {
        match (&self.verdict, self.row.must) {
            (Ok(Verdict::Detected { found, ended }), Must::BeDetected(what)) if found.contains(what) => {
                format!("detected: `{what}`; {}", done(*ended))
            }
            (Ok(Verdict::Held { found, ended }), Must::BeHeld(what)) if found.contains(what) => {
                format!("held by the GPU driver: `{what}`; {}", done(*ended))
            }
            (Ok(Verdict::Bounded { told }), Must::BeNamed(bound)) if row_tells(self.row, told) => {
                format!("bounded: {bound}")
            }
            (Ok(verdict), _) => verdict.to_string(),
            (Err(_), _) => "not judged".to_owned(),
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:22} ", if self.good() { "ok  " } else { "FAIL" }, self.row.name)?;
        match &self.verdict {
            Ok(verdict) => write!(f, "{verdict}")?,
            Err(error) => write!(f, "cannot be judged: {error:#}")?,
        }
        match &self.wins_unguarded {
            Ok(true) => Ok(()),
            Ok(false) => f.write_str(" (proves nothing: it does not win without its guard either)"),
            Err(error) => write!(f, " (proves nothing: without its guard, {error:#})"),
        }
    }
}

/// The table of the documentation, in Markdown.
pub fn table(lines: &[Line]) -> String {
    let mut table = "| trick | what becomes of it | with nothing to stop it |\n|---|---|---|\n".to_owned();
    for line in lines {
        let unguarded = match &line.wins_unguarded {
            Ok(true) => "wins",
            Ok(false) => "**does not win**",
            Err(_) => "not judged",
        };
        table += &format!("| {} | {} | {unguarded} |\n", line.row.trick, line.words());
    }
    table
}

/// What a page has between its two marks; `None`: it lacks one.
fn marked(page: &str) -> Option<Range<usize>> {
    let begin = page.find(BEGIN)? + BEGIN.len();
    Some(begin..begin + page.get(begin..)?.find(END)?)
}

/// A page with its table replaced.
pub fn with_table(page: &str, table: &str) -> Result<String> {
    let mut page = page.to_owned();
    page.replace_range(marked(&page).context("no marks of a table")?, &format!("\n{table}"));
    Ok(page)
}
