//! A test that is also a program: it starts itself again, tells the child what to do, line by line, and reads an answer
//! to each.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The test of each file that is its program, if this is set to the driver's library that it is to load.
const TEST: &str = "it_is_a_program_too";
const DRIVER: &str = "DIVVY_TEST_DRIVER";

/// In a child, the driver's library; none in a test.
pub(crate) fn driver() -> Option<PathBuf> {
    std::env::var_os(DRIVER).map(PathBuf::from)
}

/// In a child: says what comes of each line that it is told.
pub(crate) fn answer_each(mut run: impl FnMut(&[&str]) -> String) {
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split(' ').collect();
        println!("> {}", run(&words));
    }
}

/// A child that is told what to do, line by line, and answers each.
pub(crate) struct Program {
    pub(crate) child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Program {
    /// The program of this test's file, by a command that runs this test's executable.
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

    /// Sends a line; the answer.
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
            // The test runner writes lines of its own.
            if let Some((_, answer)) = line.trim_end().split_once("> ") {
                return answer.to_owned();
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// As `kill -9`.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it has ended");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
