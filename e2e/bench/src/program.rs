//! Helpers of all benchmarks: selected parts, programs and their output, and the memory of processes.

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Longest pause between two lines of a program, in seconds: every step of a program takes less.
const LINE_TIMEOUT_SECONDS: i64 = 60;

/// Whether a part of the benchmark runs. An empty `only` selects all parts.
pub(crate) fn is_selected(only: &[String], part: &str) -> bool {
    only.is_empty() || only.iter().any(|only| only == part)
}

/// Environment variable of a program on the simulated GPU: its kernels take up to 20 % more or less
/// than asked.
pub(crate) fn jitter() -> (String, String) {
    ("DIVVY_SIM_CUDA".to_owned(), "jitter=20".to_owned())
}

/// Starts a program in a container with its input, output and errors piped.
pub(crate) fn spawn_piped(mut command: Command) -> Result<Child> {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    piped.spawn().context("cannot start nsenter")
}

/// A value of `/proc/<pid>/status`, such as `VmRSS`, in KiB.
pub(crate) fn memory_kib(pid: u32, key: &str) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find(|line| line.starts_with(key)).with_context(|| format!("no {key}"))?;
    let number = line.split_whitespace().nth(1).context("no number")?;
    Ok(number.parse()?)
}

/// Reads the next line of a program; empty at the end of its output.
///
/// Only the start of a line is waited for with a timeout: programs write whole lines, one or several at once.
///
/// # Errors
/// The program writes nothing for [`LINE_TIMEOUT_SECONDS`].
pub(crate) fn read_line(stdout: &mut BufReader<ChildStdout>) -> Result<String> {
    if stdout.buffer().is_empty() {
        let mut output = [PollFd::new(stdout.get_ref(), PollFlags::IN)];
        let timeout = Timespec { tv_sec: LINE_TIMEOUT_SECONDS, tv_nsec: 0 };
        ensure!(
            poll(&mut output, Some(&timeout))? > 0,
            "a program wrote nothing for {LINE_TIMEOUT_SECONDS} s"
        );
    }
    let mut line = String::new();
    stdout.read_line(&mut line)?;
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_written_together_are_read_one_by_one() {
        let mut command = Command::new("sh");
        command.args(["-c", "printf 'one\\ntwo\\n'"]);
        let mut child = spawn_piped(command).expect("a shell");
        let mut stdout = BufReader::new(child.stdout.take().expect("its output"));
        let lines = [(); 3].map(|()| read_line(&mut stdout).expect("a line"));
        assert_eq!(lines, ["one\n", "two\n", ""]);
        assert!(child.wait().expect("its exit status").success());
    }
}
