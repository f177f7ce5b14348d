//! Tricks that are about the GPU's time: on what terms the share has it, what others want meanwhile, and what is too much.
//!
//! What counts is the time that all processes had that came with the trick. It is read from the simulated GPU's ledger when
//! they are under way: as what a library cannot hold is cut by the node, and what is found is ended, it is looked for in pieces.

use crate::node::Compute;
use crate::rows::{Gain, Must, Row, Terms};
use crate::trial::Trial;
use anyhow::Result;
use std::time::{Duration, Instant};

/// Per cent of the GPU, and what is more than that by any measure: five points or a fifth, as the node's agent has it. More
/// than what is granted on other terms, too.
const CEILING: u32 = 30;
pub(crate) const TOO_MUCH: f64 = 0.36;
/// The half that each of two processes at work has by turns, and as much.
const HALF: f64 = 0.5 + 0.06;
/// On an instance the node does not see what the other one lost, whose kernels look half as long again beside such a process.
const TWO_THIRDS: f64 = 0.667;
/// The node sees once a second what each had, and has given a share that lacks something its part by then.
const CORRECTED: Duration = Duration::from_secs(20);
/// When a program is under way, and for how long what it gets is measured then.
const SETTLED: Duration = Duration::from_secs(2);
const MEASURED: Duration = Duration::from_secs(3);
/// What is found is ended soon, so its gain is looked for in pieces.
const PIECE: Duration = Duration::from_millis(500);

/// Whether the neighbour wants all that it can have of the time.
pub(crate) fn works_beside(row: &Row) -> bool {
    row.gain == Gain::Time && row.terms != Terms::Ceiling
}

/// What the share's policy says of the time, and the neighbour's.
pub(crate) fn compute(row: &Row) -> [Compute; 2] {
    let all = Compute::default();
    match row.terms {
        _ if row.gain != Gain::Time => [all; 2],
        Terms::Ceiling => [Compute { cores: CEILING, ceiling: CEILING, ..all }, all],
        Terms::Weight => [Compute { weight: 1, ..all }, Compute { weight: 3, ..all }],
        Terms::Low => [all, Compute { priority: 1, ..all }],
        Terms::Beside => [CEILING, 2 * CEILING].map(|part| Compute { cores: part, ceiling: part, ..all }),
    }
}

impl Trial {
    /// Whether the programs have too much of the GPU's time once they are under way.
    pub(crate) fn takes_time(&self, row: &Row) -> Result<bool> {
        if !matches!(row.must, Must::BeDetected(_)) {
            std::thread::sleep(SETTLED);
            return Ok(self.part(MEASURED)? > TOO_MUCH);
        }
        while self.begun.elapsed() < SETTLED + MEASURED {
            if self.part(PIECE)? > TOO_MUCH {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What they have of the time that comes.
    fn part(&self, of: Duration) -> Result<f64> {
        let (begin, had) = self.node.busy(&self.before)?;
        std::thread::sleep(of);
        let (end, has) = self.node.busy(&self.before)?;
        Ok(has.saturating_sub(had) as f64 / (end - begin) as f64)
    }

    /// And had in the last sixth of a second.
    pub(crate) fn has_lately(&self) -> Result<f64> {
        self.node.busy_lately(&self.before)
    }

    /// Whether that comes down to half of the GPU, where another process wants as much, or two thirds of an instance.
    pub(crate) fn comes_to_its_turns(&self, row: &Row) -> Result<bool> {
        let most = if row.terms == Terms::Beside { TWO_THIRDS } else { HALF };
        let begun = Instant::now();
        while begun.elapsed() < CORRECTED {
            if self.part(MEASURED)? <= most {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
