//! The quota on sessions of the video engines: above it, opening fails as if the driver had no
//! more.

mod common;

use common::container::{Container, Node};
use divvy_pages::policy::{Codec, Flags};
use divvy_pages::{Policy, account};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// The libraries of the encoder and the decoder, and the program.
fn built() -> &'static [PathBuf; 3] {
    static BUILT: OnceLock<[PathBuf; 3]> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("codec");
        std::fs::create_dir_all(&out).expect("a directory");
        let build = |file: &str, source: &str, flags: &[&str]| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/codec").join(source);
            let mut cc = Command::new("cc");
            cc.args(["-O1", "-Wall", "-Werror", "-o"]).arg(out.join(file)).arg(source).args(flags);
            assert!(cc.status().expect("a C compiler").success(), "{file}");
            out.join(file)
        };
        let library = ["-shared", "-fPIC"];
        [
            build(
                "libnvidia-encode.so.1",
                "library.c",
                &[&library[..], &["-DENCODE", "-Wl,-soname,libnvidia-encode.so.1"]].concat(),
            ),
            build("libnvcuvid.so.1", "library.c", &[&library[..], &["-Wl,-soname,libnvcuvid.so.1"]].concat()),
            build("program", "program.c", &["-ldl"]),
        ]
    })
}

/// A program that has executed its commands and keeps its sessions open.
struct Program {
    child: Child,
    output: String,
}

impl Program {
    fn run(container: &Container<'_>, commands: &str) -> Self {
        let [encode, cuvid, program] = built();
        let mut command = container.command(program);
        command.arg(encode).arg(cuvid).arg(container.driver()).arg(commands);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("unshare starts");
        let mut output = String::new();
        let stdout = child.stdout.as_mut().expect("its output");
        BufReader::new(stdout).read_line(&mut output).expect("a line");
        Self { child, output: output.trim().to_owned() }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may already have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn policy(node: &Node, encoders: Option<u32>, decoders: Option<u32>) -> Policy {
    Policy { codec: Codec { encoders, decoders }, ..node.policy(0, 4000) }
}

#[test]
fn sessions_above_the_quota_are_refused() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", policy(&node, Some(2), Some(1)));
    let container = node.container(std::slice::from_ref(&share));
    let check = |commands: &str, output: &str| {
        assert_eq!(Program::run(&container, commands).output, output, "{commands}")
    };
    check("exe", "0 0 10");
    check("ddDd", "0 2 0 0");
    check("eeExEd", "0 0 0 0 0 0");
}

#[test]
fn processes_share_the_quota_and_dead_ones_do_not_count() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", policy(&node, Some(2), None));
    let other = node.share("other", "share", policy(&node, Some(1), Some(0)));
    let container = node.container(std::slice::from_ref(&share));
    let first = Program::run(&container, "eed");
    assert_eq!(first.output, "0 0 0");
    let page = std::fs::read(share.directory.join("account")).expect("an account page");
    let snapshot = account::Snapshot::new(&page).expect("a page");
    let slots = snapshot.slots().map(|slot| (slot.encoders, slot.decoders));
    assert_eq!(slots.collect::<Vec<_>>(), [(2, 1)], "the node sees them");
    assert_eq!(Program::run(&container, "ed").output, "10 0");
    assert_eq!(Program::run(&node.container(&[other]), "eed").output, "0 10 2");
    drop(first);
    assert_eq!(Program::run(&container, "ee").output, "0 0");
}

#[test]
fn sessions_are_unlimited_without_an_enforced_quota() {
    let node = Node::up("L4");
    let observed = policy(&node, Some(0), Some(0));
    let observed = Policy { flags: observed.flags.with(Flags::OBSERVE_ONLY), ..observed };
    for policy in [observed, policy(&node, None, None)] {
        let share = node.share("claim", "share", policy);
        assert_eq!(Program::run(&node.container(&[share]), "exd").output, "0 0 0");
    }
    assert_eq!(Program::run(&node.container(&[]), "exdED").output, "0 0 0 0 0");
}
