//! What tests play with.

#![allow(dead_code, reason = "not every test plays with all of it")]

use divvy_escape::container::Container;
use divvy_escape::node::{MIB, Node};
use divvy_escape::programs::Programs;
use divvy_escape::trial::Enforcement;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

/// The programs, and the library as it ships.
pub(crate) fn built() -> &'static (Programs, Enforcement) {
    static BUILT: OnceLock<(Programs, Enforcement)> = OnceLock::new();
    BUILT.get_or_init(|| {
        // Of each test program its own: they may run at once.
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME"));
        let build = concat!(env!("CARGO_MANIFEST_DIR"), "/../../driver/interposer/build");
        let status = Command::new(build).arg(&out).status().expect("driver/interposer/build starts");
        assert!(status.success(), "driver/interposer/build failed");
        let raw = Path::new(env!("CARGO_BIN_EXE_divvy-escape"));
        let programs = Programs::build(&out.join("programs"), None, raw).expect("a C compiler");
        (programs, Enforcement { library: out.join("libdivvy.so"), environment: Vec::new() })
    })
}

/// A program in a container that takes what it is told to.
pub(crate) struct Program {
    child: Child,
    told: ChildStdin,
    says: BufReader<ChildStdout>,
}

impl Program {
    /// As that user; none: as who the container's programs are.
    pub(crate) fn start(node: &Node, container: &Container, user: Option<u32>) -> Self {
        let program = node.programs().join("escape");
        let mut command = match user {
            None => container.command(&program),
            Some(user) => {
                let mut command = container.command(Path::new("setpriv"));
                let ids = ["reuid", "regid"].map(|what| format!("--{what}={user}"));
                command.args(ids).arg("--clear-groups").arg(program);
                command
            }
        };
        command.args(["as-told", "0"]).arg(node.libcuda()).arg(node.libcuda());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("nsenter starts");
        let (told, says) = (child.stdin.take().expect("its input"), child.stdout.take().expect("its output"));
        Self { child, told, says: BufReader::new(says) }
    }

    /// How many bytes more it got.
    pub(crate) fn takes(&mut self, bytes: u64) -> u64 {
        writeln!(self.told, "{}", bytes / MIB).expect("it lives");
        let mut line = String::new();
        self.says.read_line(&mut line).expect("its output");
        let held = line.trim_end().strip_prefix("held ").unwrap_or_else(|| panic!("it said {line:?}"));
        held.parse::<u64>().expect("a number") * MIB
    }

    /// Kills it, of which `nsenter` is only the parent.
    pub(crate) fn kill(mut self) {
        let parent = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
        let pid = children.expect("its parent").trim().to_owned();
        let status = Command::new("kill").args(["-KILL", &pid]).status().expect("kill starts");
        assert!(status.success());
        self.child.wait().expect("its end");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It has ended, or ends with its input.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
