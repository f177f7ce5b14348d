//! Programs that measure what a call costs, in turns of a few milliseconds.
//!
//! A processor that is shared with other machines may be half as fast a second later, as an ordinary one whose clock
//! changes, and may be so beside another that is not. What is measured one after the other in the same few milliseconds on
//! the same processor meets it in the same state, so that a difference is one of the programs.

use crate::program::{hear, start};
use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io::{BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command};

/// Calls in a turn: long enough that most of them find in the caches what the ones before have brought there.
const CALLS: u64 = 16_384;

/// How many turns so many calls are, and the calls of each.
pub(crate) fn of(calls: u64) -> (u64, String) {
    let each = calls.clamp(1, CALLS);
    (calls.div_ceil(each).max(1), each.to_string())
}

/// Starts programs that say "ready" and then a figure for each byte of their input, and has them take turns: the
/// figures of each.
pub(crate) fn take(commands: Vec<Command>, turns: u64) -> Result<Vec<Vec<f64>>> {
    let mut programs: Vec<Program> = {
        let _one = OneProcessor::choose()?;
        commands.into_iter().map(Program::start).collect::<Result<_>>()?
    };
    let mut took = vec![Vec::new(); programs.len()];
    for turn in 0..turns {
        for at in 0..programs.len() {
            // There and back: nobody is always behind the same one.
            let at = if turn % 2 == 0 { at } else { programs.len() - 1 - at };
            if let (Some(program), Some(took)) = (programs.get_mut(at), took.get_mut(at)) {
                took.push(program.turn()?);
            }
        }
    }
    programs.into_iter().try_for_each(Program::end)?;
    Ok(took)
}

/// What the second took more than the first, turn by turn.
pub(crate) fn differences(first: &[f64], second: &[f64]) -> Vec<f64> {
    first.iter().zip(second).map(|(first, second)| second - first).collect()
}

/// This thread, and so what it starts meanwhile, on one processor: the last, as the first serves most interrupts.
struct OneProcessor {
    before: CpuSet,
}

impl OneProcessor {
    fn choose() -> Result<Self> {
        let before = sched_getaffinity(None).context("cannot ask for its processors")?;
        let mut one = CpuSet::new();
        (0..CpuSet::MAX_CPU).rev().filter(|at| before.is_set(*at)).take(1).for_each(|at| one.set(at));
        sched_setaffinity(None, &one).context("cannot choose a processor")?;
        Ok(Self { before })
    }
}

impl Drop for OneProcessor {
    fn drop(&mut self) {
        // It had them.
        let _ = sched_setaffinity(None, &self.before);
    }
}

struct Program {
    child: Child,
    /// Where it is told; none of one that is told no more.
    input: Option<ChildStdin>,
    said: BufReader<ChildStdout>,
}

impl Drop for Program {
    fn drop(&mut self) {
        // It has ended, or is of no use any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Program {
    fn start(command: Command) -> Result<Self> {
        let mut child = start(command)?;
        let input = child.stdin.take();
        let said = BufReader::new(child.stdout.take().context("no output")?);
        let mut program = Self { child, input, said };
        if hear(&mut program.said)? == "ready\n" { Ok(program) } else { bail!("{}", program.wrong()) }
    }

    fn turn(&mut self) -> Result<f64> {
        let told = self.input.as_mut().context("no input")?.write_all(b".");
        ensure!(told.is_ok(), "{}", self.wrong());
        let line = hear(&mut self.said)?;
        let figure = line.split_once(' ').and_then(|(_, value)| value.trim().parse().ok());
        figure.with_context(|| self.wrong())
    }

    /// What it says of its end.
    fn wrong(&mut self) -> String {
        self.input = None;
        let _ = self.child.kill();
        let mut words = String::new();
        if let Some(mut wrong) = self.child.stderr.take() {
            let _ = wrong.read_to_string(&mut words);
        }
        format!("a program that measures has ended: {}", words.trim())
    }

    fn end(mut self) -> Result<()> {
        self.input = None;
        ensure!(hear(&mut self.said)?.is_empty(), "a program says more than it was asked");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts its turns.
    const COUNTS: &str = "echo ready; at=0; while [ -n \"$(dd bs=1 count=1 2> /dev/null)\" ]; do at=$((at + 1)); echo \"turn $at\"; done";

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn each_program_measures_once_in_each_turn() {
        let took = take(vec![shell(COUNTS), shell(COUNTS)], 3).expect("figures");
        assert_eq!(took, [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]);
    }

    #[test]
    fn programs_share_one_processor_and_who_starts_them_keeps_its_own() {
        let before = sched_getaffinity(None).expect("its processors");
        let counts = "echo ready; dd bs=1 count=1 > /dev/null 2> /dev/null; echo turn $(nproc)";
        assert_eq!(take(vec![shell(counts), shell(counts)], 1).expect("figures"), [[1.0], [1.0]]);
        assert!(sched_getaffinity(None).expect("its processors") == before);
    }

    #[test]
    fn a_program_that_ends_is_told_with_its_own_words() {
        for fails in ["echo no GPU >&2; exit 1", "echo ready; echo no GPU >&2; exit 1"] {
            let error = take(vec![shell(fails)], 1).expect_err("it has ended");
            assert!(error.to_string().contains("no GPU"), "{error}");
        }
    }

    #[test]
    fn turns_have_as_many_calls_as_were_asked_for_or_a_few_more() {
        for (calls, expected) in [(0, (1, "1")), (10, (1, "10")), (200_000, (13, "16384"))] {
            let (turns, each) = of(calls);
            assert_eq!((turns, each.as_str()), expected, "{calls}");
        }
    }
}
