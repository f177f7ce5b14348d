//! `divvy top` as somebody has it: the live view in a terminal, which is given back however it ends, and the view of another
//! node by a kubectl that is found on the PATH.

#[path = "top/pty.rs"]
mod pty;

use divvy_api::top::{DIRECTORY, GpuNow, ShareNow, VERSION};
use pty::{GIVE_BACK, Pty, TAKE};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

const GPU: &str = "GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11";

/// Writes what the daemon would: these claims, and what per cent of the GPU's time each had.
fn had(run_dir: &Path, claims: &[(&str, u32)]) {
    let share = |(claim, busy): &(&str, u32)| ShareNow {
        at_ms: u64::MAX,
        namespace: Some("team-a".to_owned()),
        claim: Some((*claim).to_owned()),
        claim_uid: format!("uid-{claim}").into(),
        share: "b7a9d3c2-0a1b-4c2d-8e3f-405162738495".into(),
        gpu: GPU.to_owned(),
        mig: None,
        memory_limit_bytes: 8 << 30,
        memory_used_bytes: Some(4 << 30),
        memory_measured_bytes: None,
        guarantee_percent: 30,
        ceiling_percent: 60,
        weight: 100,
        priority: 0,
        busy_percent: Some(*busy),
        charged_percent: None,
        throttled_ms: Some(0),
        processes: 1,
    };
    let shares: Vec<ShareNow> = claims.iter().map(share).collect();
    for one in &shares {
        let pages = run_dir.join("shares").join(one.claim_uid.as_str()).join(one.share.as_str());
        fs::create_dir_all(pages).expect("pages");
    }
    fs::create_dir_all(run_dir.join(DIRECTORY)).expect("a directory");
    let now = serde_json::to_string(&GpuNow { version: VERSION, gpu: GPU.to_owned(), shares }).expect("JSON");
    let file = run_dir.join(DIRECTORY).join(format!("{GPU}.json"));
    fs::write(file.with_extension("part"), now).expect("a file");
    fs::rename(file.with_extension("part"), file).expect("renamed");
}

fn divvy() -> Command {
    Command::new(env!("CARGO_BIN_EXE_divvy"))
}

/// The live view of a node with two shares, drawn once.
fn live() -> (TempDir, Pty) {
    let dir = tempfile::tempdir().expect("a directory");
    had(dir.path(), &[("idle", 1), ("train", 30)]);
    let pty = Pty::start(divvy().args(["top", "--run-dir"]).arg(dir.path()).env("NODE_NAME", "n1"));
    pty.until("it is drawn", |pty| pty.screen().contains("team-a/train"));
    assert!(pty.is_taken(), "the terminal is not taken");
    (dir, pty)
}

/// Which of both stands above.
fn first(pty: &Pty) -> Option<bool> {
    let screen = pty.screen();
    Some(screen.find("team-a/idle")? < screen.find("team-a/train")?)
}

fn given_back(pty: &Pty) {
    assert!(pty.is_as_before(), "the modes of the terminal are others");
    pty.until("its screen is back", |pty| {
        let all = pty.written();
        all.rfind(GIVE_BACK) > all.rfind(TAKE) && all.rfind("\x1b[?25h") > all.rfind("\x1b[?25l")
    });
}

#[test]
fn it_is_live_and_obeys_keys() {
    let (dir, mut pty) = live();
    assert!(pty.screen().starts_with("n1, "), "{:?}", pty.screen());
    assert_eq!(first(&pty), Some(true));
    pty.press("g");
    pty.until("who had most is first", |pty| first(pty) == Some(false));
    had(dir.path(), &[("idle", 77), ("train", 30)]);
    pty.until("what is new is shown", |pty| pty.screen().contains("77%") && first(pty) == Some(true));
    pty.press("q");
    assert!(pty.ended().success());
    given_back(&pty);
}

#[test]
fn a_signal_gives_the_terminal_back() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let (_dir, mut pty) = live();
        pty.signal(signal);
        assert!(pty.ended().success(), "{signal:?}");
        given_back(&pty);
    }
}

#[test]
fn a_stop_gives_the_terminal_back_until_it_goes_on() {
    let (_dir, mut pty) = live();
    pty.signal(Signal::TSTP);
    pty.until("the terminal is given back", Pty::is_as_before);
    given_back(&pty);
    // A signal that comes before it has stopped is lost.
    pty.until("it goes on", |pty| {
        pty.signal(Signal::CONT);
        pty.is_taken()
    });
    pty.press("q");
    assert!(pty.ended().success());
    given_back(&pty);
}

#[test]
fn an_error_is_said_on_a_terminal_that_was_given_back() {
    let (dir, mut pty) = live();
    fs::remove_dir_all(dir.path()).expect("removed");
    assert!(!pty.ended().success());
    given_back(&pty);
    let why = "cannot be read, where divvy-node has its shares";
    pty.until("it says why", |pty| {
        pty.written().rsplit(GIVE_BACK).next().is_some_and(|last| last.contains(why))
    });
}

#[test]
fn it_is_drawn_for_the_size_that_the_terminal_has() {
    let (_dir, mut pty) = live();
    assert!(pty.screen().contains("SHARE"), "{:?}", pty.screen());
    pty.resize(4, 20);
    pty.signal(Signal::WINCH);
    pty.until("it is cut", |pty| {
        let screen = pty.screen();
        screen.lines().count() == 4 && !screen.contains("SHARE") && screen.contains("q quit")
    });
    pty.press("q");
    assert!(pty.ended().success());
}

/// `divvy top` with these arguments where `kubectl get` and `kubectl exec` are these scripts. What kubectl was called with
/// stands in the second text, a line for each call.
fn with_kubectl([get, exec]: [&str; 2], arguments: &[&str]) -> (Output, String) {
    let dir = tempfile::tempdir().expect("a directory");
    // A shell runs the file that its first argument names. A script of our own as kubectl may be busy when it is started:
    // another thread that starts a program has what is written here open for a moment.
    std::os::unix::fs::symlink("/bin/sh", dir.path().join("kubectl")).expect("a link");
    for (name, script) in [("get", get), ("exec", exec)] {
        let script = format!("printf '%s\\n' \"$0 $*\" >>calls\n{script}\n");
        fs::write(dir.path().join(name), script).expect("a script");
    }
    let mut divvy = divvy();
    divvy.arg("top").args(arguments).current_dir(dir.path()).env("PATH", dir.path());
    let out = divvy.output().expect("divvy starts");
    (out, fs::read_to_string(dir.path().join("calls")).unwrap_or_default())
}

fn says(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn another_node_is_looked_at_in_the_pod_of_its_daemon() {
    let found = ["echo gpus divvy-node-x7k2p", "echo \"there: $*\""];
    let (out, calls) = with_kubectl(found, &["--node", "n7", "--once", "--json"]);
    assert!(out.status.success(), "{}", says(&out));
    let there = "--namespace gpus divvy-node-x7k2p -- divvy top --run-dir /run/divvy --once --json";
    assert_eq!(String::from_utf8_lossy(&out.stdout), format!("there: {there}\n"));
    assert!(calls.contains("--field-selector spec.nodeName=n7,status.phase=Running"), "{calls}");
    assert!(calls.ends_with(&format!("\nexec {there}\n")), "{calls}");
    let (_, calls) = with_kubectl(found, &["--node", "n7", "--run-dir", "/run/gpus"]);
    assert!(calls.ends_with("-- divvy top --run-dir /run/gpus\n"), "{calls}");
}

#[test]
fn another_node_that_cannot_be_looked_at_says_why() {
    let check = |get: &str, exec: &str, said: &[&str]| {
        let (out, _) = with_kubectl([get, exec], &["--node", "n7"]);
        assert!(!out.status.success(), "{get}: {}", says(&out));
        assert!(said.iter().all(|said| says(&out).contains(said)), "{get}: {}", says(&out));
    };
    check("exit 0", "", &["no pod of divvy-node runs on a node n7", "kubectl get pods"]);
    check("echo forbidden >&2; exit 1", "", &["forbidden", "kubectl cannot list the pods of node n7"]);
    check("echo gpus divvy-node-x7k2p", "echo 'pod is gone' >&2; exit 1", &["pod is gone"]);
    let nothing = tempfile::tempdir().expect("a directory");
    let out =
        divvy().args(["top", "--node", "n7"]).env("PATH", nothing.path()).output().expect("divvy starts");
    assert!(!out.status.success() && says(&out).contains("--node needs on the PATH"), "{}", says(&out));
}

#[test]
fn a_file_that_cannot_be_read_fails_the_command_after_all_others_are_shown() {
    let dir = tempfile::tempdir().expect("a directory");
    had(dir.path(), &[("train", 30)]);
    fs::write(dir.path().join(DIRECTORY).join("GPU-x.json"), r#"{"version": 1, "gpu""#).expect("a file");
    for arguments in [&["--once"][..], &["--once", "--json"]] {
        let out = divvy()
            .arg("top")
            .args(arguments)
            .arg("--run-dir")
            .arg(dir.path())
            .output()
            .expect("divvy starts");
        assert!(!out.status.success());
        assert!(says(&out).contains("GPU-x.json: is damaged"), "{}", says(&out));
        assert!(String::from_utf8_lossy(&out.stdout).contains("train"));
    }
}
