//! Programs that measure the cost of a call, in alternating turns of a few milliseconds on one CPU.
//!
//! The speed of a shared CPU changes from second to second, and differs between CPUs. Programs that
//! measure within the same few milliseconds on the same CPU see the same speed, so that their
//! difference comes from the programs.

use crate::program::{read_line, spawn_piped};
use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io::{BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command};

/// Calls in a turn: enough that most calls run with warm caches.
const CALLS_PER_TURN: u64 = 16_384;

/// Splits calls into turns: the number of turns, and the calls of each as an argument.
pub(crate) fn split(calls: u64) -> (u64, String) {
    let each = calls.clamp(1, CALLS_PER_TURN);
    (calls.div_ceil(each).max(1), each.to_string())
}

/// Runs programs in alternating turns and returns the figures of each program.
///
/// A program prints `ready`, and then one figure for each byte of its input.
pub(crate) fn run(commands: Vec<Command>, turns: u64) -> Result<Vec<Vec<f64>>> {
    let mut programs: Vec<Program> = {
        let _pinned = PinnedCpu::pin()?;
        commands.into_iter().map(Program::start).collect::<Result<_>>()?
    };
    let mut figures = vec![Vec::new(); programs.len()];
    for turn in 0..turns {
        for at in 0..programs.len() {
            // The order alternates, so that no program always follows the same one.
            let at = if turn % 2 == 0 { at } else { programs.len() - 1 - at };
            if let (Some(program), Some(figures)) = (programs.get_mut(at), figures.get_mut(at)) {
                figures.push(program.measure()?);
            }
        }
    }
    programs.into_iter().try_for_each(Program::finish)?;
    Ok(figures)
}

/// The difference of the second to the first, turn by turn.
pub(crate) fn differences(first: &[f64], second: &[f64]) -> Vec<f64> {
    first.iter().zip(second).map(|(first, second)| second - first).collect()
}

/// Pins this thread, and the processes that it starts meanwhile, to one CPU until dropped.
///
/// It picks the last CPU, since the first one serves most interrupts.
struct PinnedCpu {
    before: CpuSet,
}

impl PinnedCpu {
    fn pin() -> Result<Self> {
        let before = sched_getaffinity(None).context("cannot read the CPU affinity")?;
        let mut one = CpuSet::new();
        (0..CpuSet::MAX_CPU).rev().filter(|at| before.is_set(*at)).take(1).for_each(|at| one.set(at));
        sched_setaffinity(None, &one).context("cannot set the CPU affinity")?;
        Ok(Self { before })
    }
}

impl Drop for PinnedCpu {
    fn drop(&mut self) {
        // The thread had this affinity before, so that setting it again does not fail.
        let _ = sched_setaffinity(None, &self.before);
    }
}

struct Program {
    child: Child,
    /// `None` after the last turn.
    input: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Drop for Program {
    fn drop(&mut self) {
        // The program has exited, or its results are not needed any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Program {
    fn start(command: Command) -> Result<Self> {
        let mut child = spawn_piped(command)?;
        let input = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().context("no output")?);
        let mut program = Self { child, input, stdout };
        if read_line(&mut program.stdout)? == "ready\n" {
            Ok(program)
        } else {
            bail!("{}", program.failure())
        }
    }

    fn measure(&mut self) -> Result<f64> {
        let sent = self.input.as_mut().context("no input")?.write_all(b".");
        ensure!(sent.is_ok(), "{}", self.failure());
        let line = read_line(&mut self.stdout)?;
        let figure = line.split_once(' ').and_then(|(_, value)| value.trim().parse().ok());
        figure.with_context(|| self.failure())
    }

    /// Kills the program and returns an error message with its standard error.
    fn failure(&mut self) -> String {
        self.input = None;
        let _ = self.child.kill();
        let mut message = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut message);
        }
        format!("a measuring program exited: {}", message.trim())
    }

    fn finish(mut self) -> Result<()> {
        self.input = None;
        ensure!(read_line(&mut self.stdout)?.is_empty(), "a program printed more figures than requested");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prints the number of its turn in each turn.
    const COUNTS: &str = "echo ready; at=0; while [ -n \"$(dd bs=1 count=1 2> /dev/null)\" ]; do \
        at=$((at + 1)); echo \"turn $at\"; done";

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn each_program_measures_once_per_turn() {
        let figures = run(vec![shell(COUNTS), shell(COUNTS)], 3).expect("figures");
        assert_eq!(figures, [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]);
    }

    #[test]
    fn programs_share_one_cpu_and_the_caller_keeps_its_own() {
        let before = sched_getaffinity(None).expect("its CPUs");
        let counts = "echo ready; dd bs=1 count=1 > /dev/null 2> /dev/null; echo turn $(nproc)";
        assert_eq!(run(vec![shell(counts), shell(counts)], 1).expect("figures"), [[1.0], [1.0]]);
        assert!(sched_getaffinity(None).expect("its CPUs") == before);
    }

    #[test]
    fn a_failing_program_is_reported_with_its_stderr() {
        for fails in ["echo no GPU >&2; exit 1", "echo ready; echo no GPU >&2; exit 1"] {
            let error = run(vec![shell(fails)], 1).expect_err("it exits");
            assert!(error.to_string().contains("no GPU"), "{error}");
        }
    }

    #[test]
    fn calls_are_split_into_turns_and_rounded_up() {
        for (calls, expected) in [(0, (1, "1")), (10, (1, "10")), (200_000, (13, "16384"))] {
            let (turns, each) = split(calls);
            assert_eq!((turns, each.as_str()), expected, "{calls}");
        }
    }
}
