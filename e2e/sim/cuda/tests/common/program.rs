//! A test that is also a program: it starts itself again as a child, sends it commands line by
//! line, and reads an answer to each.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The name of the test that runs as a program, if `DRIVER` is set to the driver library that it loads.
const TEST: &str = "scenario_program";
const DRIVER: &str = "DIVVY_TEST_DRIVER";

/// In a child, the driver's library; `None` in a test.
pub(crate) fn driver() -> Option<PathBuf> {
    std::env::var_os(DRIVER).map(PathBuf::from)
}

/// In a child: executes each command line and prints the answer.
pub(crate) fn answer_each(mut run: impl FnMut(&[&str]) -> String) {
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split(' ').collect();
        println!("> {}", run(&words));
    }
}

/// A child process that executes commands line by line.
pub(crate) struct Program {
    pub(crate) child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Program {
    /// Starts the program of this test file, by a command that runs this test's executable.
    pub(crate) fn start(mut command: Command, driver: &Path) -> Self {
        command
            .args([TEST, "--exact", "--nocapture", "--quiet"])
            .env(DRIVER, driver)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("this test starts again");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, stdin, stdout }
    }

    /// Sends a command and returns its answer.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer()
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").expect("the program reads");
    }

    pub(crate) fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            let read = self.stdout.read_line(&mut line).expect("the program writes");
            assert_ne!(read, 0, "the program has ended");
            // The test runner prints lines too.
            if let Some((_, answer)) = line.trim_end().split_once("> ") {
                return answer.to_owned();
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it, like `kill -9`.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("the program runs");
        self.child.wait().expect("the program exits");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
