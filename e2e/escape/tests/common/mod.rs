//! Helpers of the tests: the built programs and library, and a program that allocates on demand.

#![allow(dead_code, reason = "not every test uses every helper")]

use divvy_escape::case_run::Enforcement;
use divvy_escape::container::Container;
use divvy_escape::node::{MIB, Node};
use divvy_escape::programs::Programs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

/// The programs, and the library as it is released.
pub(crate) fn built() -> &'static (Programs, Enforcement) {
    static BUILT: OnceLock<(Programs, Enforcement)> = OnceLock::new();
    BUILT.get_or_init(|| {
        // A directory per test program, because test programs may run in parallel.
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME"));
        let build = concat!(env!("CARGO_MANIFEST_DIR"), "/../../driver/interposer/build");
        let status = Command::new(build).arg(&out).status().expect("driver/interposer/build starts");
        assert!(status.success(), "driver/interposer/build failed");
        let raw = Path::new(env!("CARGO_BIN_EXE_divvy-escape"));
        let programs = Programs::build(&out.join("programs"), None, raw).expect("a C compiler");
        (programs, Enforcement { library: out.join("libdivvy.so"), environment: Vec::new() })
    })
}

/// A program in a container that allocates memory on demand.
pub(crate) struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Starts it as that user, or as the container's default user.
    pub(crate) fn start(node: &Node, container: &Container, user: Option<u32>) -> Self {
        let program = node.programs().join("escape");
        let mut command = match user {
            None => container.command(&program),
            Some(user) => {
                let mut command = container.command(Path::new("setpriv"));
                let ids = ["reuid", "regid"].map(|id| format!("--{id}={user}"));
                command.args(ids).arg("--clear-groups").arg(program);
                command
            }
        };
        command.args(["on-demand", "0"]).arg(node.libcuda()).arg(node.libcuda());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("nsenter starts");
        let input = child.stdin.take().expect("stdin is piped");
        let output = child.stdout.take().expect("stdout is piped");
        Self { child, input, output: BufReader::new(output) }
    }

    /// Allocates up to `bytes` more. Returns the bytes that it got.
    pub(crate) fn allocate(&mut self, bytes: u64) -> u64 {
        writeln!(self.input, "{}", bytes / MIB).expect("the program runs");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the program prints");
        let held =
            line.trim_end().strip_prefix("held ").unwrap_or_else(|| panic!("the program printed {line:?}"));
        held.parse::<u64>().expect("a number") * MIB
    }

    /// Kills the program itself, which is the child of `nsenter`.
    pub(crate) fn kill(mut self) {
        let parent = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
        let pid = children.expect("nsenter runs").trim().to_owned();
        let status = Command::new("kill").args(["-KILL", &pid]).status().expect("kill starts");
        assert!(status.success());
        self.child.wait().expect("nsenter exits");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The program has ended, or ends at the end of its input.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
