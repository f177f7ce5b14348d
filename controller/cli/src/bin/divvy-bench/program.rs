//! What benches of programs in containers have in common: which parts are asked for, the library that is measured, and how
//! a program is spoken to.

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Whatever a program does before its next line is done by then, in s.
const PATIENCE: i64 = 60;

/// Whether a part is asked for; all are where none is named.
pub(crate) fn is_wanted(only: &[String], part: &str) -> bool {
    only.is_empty() || only.iter().any(|only| only == part)
}

/// The library that was named, or the shipping one, built into that directory.
pub(crate) fn library(named: Option<&Path>, out: &Path) -> Result<PathBuf> {
    if let Some(named) = named {
        return named.canonicalize().with_context(|| format!("no {}", named.display()));
    }
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../driver/interposer/build");
    eprintln!("building libdivvy.so as it ships");
    let status = Command::new(&build).arg(out).status().context("cannot start driver/interposer/build")?;
    ensure!(status.success(), "driver/interposer/build failed");
    Ok(out.join("libdivvy.so"))
}

/// Of a program's environment: its kernels take up to 20 % more or less than they should, on the simulated GPU.
pub(crate) fn jitter() -> (String, String) {
    ("DIVVY_SIM_CUDA".to_owned(), "jitter=20".to_owned())
}

/// Starts a program in a container, of which everything is heard and which waits to be told.
pub(crate) fn start(mut command: Command) -> Result<Child> {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    piped.spawn().context("cannot start nsenter")
}

/// The next line of a program; empty where it has ended. Of a line that has begun the rest comes at once, as programs
/// write lines whole or many together.
pub(crate) fn hear(said: &mut BufReader<ChildStdout>) -> Result<String> {
    if said.buffer().is_empty() {
        let mut output = [PollFd::new(said.get_ref(), PollFlags::IN)];
        let patience = Timespec { tv_sec: PATIENCE, tv_nsec: 0 };
        ensure!(poll(&mut output, Some(&patience))? > 0, "a program says nothing for {PATIENCE} s");
    }
    let mut line = String::new();
    said.read_line(&mut line)?;
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_came_together_are_heard_one_by_one_and_then_the_end() {
        let mut command = Command::new("sh");
        command.args(["-c", "printf 'one\\ntwo\\n'"]);
        let mut child = start(command).expect("a shell");
        let mut said = BufReader::new(child.stdout.take().expect("its output"));
        let heard = [(); 3].map(|()| hear(&mut said).expect("a line"));
        assert_eq!(heard, ["one\n", "two\n", ""]);
        assert!(child.wait().expect("its end").success());
    }
}
