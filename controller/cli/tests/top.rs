//! `divvy top` as a program: the live view in a terminal, which it restores on every kind of exit,
//! and `--node` with a kubectl on the PATH.

#[path = "top/pty.rs"]
mod pty;

use divvy_api::top::{DIRECTORY, GpuUsage, ShareUsage, VERSION};
use pty::{ENTER_SCREEN, LEAVE_SCREEN, Pty};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

const GPU: &str = "GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11";

/// Writes the daemon's files for these claims, with the compute time that each used in per cent.
fn write_usage(run_dir: &Path, claims: &[(&str, u32)]) {
    let share = |(claim, used): &(&str, u32)| ShareUsage {
        sampled_at_ms: u64::MAX,
        namespace: Some("team-a".to_owned()),
        claim: Some((*claim).to_owned()),
        claim_uid: format!("uid-{claim}").into(),
        share: "b7a9d3c2-0a1b-4c2d-8e3f-405162738495".into(),
        gpu: GPU.to_owned(),
        mig: None,
        memory_limit_bytes: 8 << 30,
        memory_used_bytes: Some(4 << 30),
        memory_used_nvml_bytes: None,
        compute_request_percent: 30,
        compute_limit_percent: 60,
        weight: 100,
        priority: 0,
        compute_used_nvml_percent: Some(*used),
        compute_used_percent: None,
        throttled_ms: Some(0),
        processes: 1,
        gpu_time_attribution: None,
        totals: None,
    };
    let shares: Vec<ShareUsage> = claims.iter().map(share).collect();
    for one in &shares {
        let pages = run_dir.join("shares").join(one.claim_uid.as_str()).join(one.share.as_str());
        fs::create_dir_all(pages).expect("pages");
    }
    fs::create_dir_all(run_dir.join(DIRECTORY)).expect("a directory");
    let now =
        serde_json::to_string(&GpuUsage { version: VERSION, gpu: GPU.to_owned(), shares }).expect("JSON");
    let file = run_dir.join(DIRECTORY).join(format!("{GPU}.json"));
    fs::write(file.with_extension("part"), now).expect("a file");
    fs::rename(file.with_extension("part"), file).expect("renamed");
}

fn divvy() -> Command {
    Command::new(env!("CARGO_BIN_EXE_divvy"))
}

/// Starts the live view of a node with two shares, and waits until it is drawn.
fn live() -> (TempDir, Pty) {
    let dir = tempfile::tempdir().expect("a directory");
    write_usage(dir.path(), &[("idle", 1), ("train", 30)]);
    let pty = Pty::start(divvy().args(["top", "--run-dir"]).arg(dir.path()).env("DIVVY_NODE_NAME", "n1"));
    pty.until("it is drawn", |pty| pty.screen().contains("team-a/train"));
    assert!(pty.is_raw(), "the terminal is not in raw mode");
    (dir, pty)
}

/// Whether `idle` is above `train`.
fn idle_is_first(pty: &Pty) -> Option<bool> {
    let screen = pty.screen();
    Some(screen.find("team-a/idle")? < screen.find("team-a/train")?)
}

fn expect_restored(pty: &Pty) {
    assert!(pty.is_restored(), "the terminal modes are not restored");
    pty.until("the normal screen is back", |pty| {
        let all = pty.written();
        all.rfind(LEAVE_SCREEN) > all.rfind(ENTER_SCREEN) && all.rfind("\x1b[?25h") > all.rfind("\x1b[?25l")
    });
}

#[test]
fn live_view_updates_and_handles_keys() {
    let (dir, mut pty) = live();
    assert!(pty.screen().starts_with("n1, "), "{:?}", pty.screen());
    assert_eq!(idle_is_first(&pty), Some(true));
    pty.press("u");
    pty.until("the largest usage is first", |pty| idle_is_first(pty) == Some(false));
    write_usage(dir.path(), &[("idle", 77), ("train", 30)]);
    pty.until("the update is shown", |pty| pty.screen().contains("77%") && idle_is_first(pty) == Some(true));
    pty.press("q");
    assert!(pty.wait().success());
    expect_restored(&pty);
}

#[test]
fn a_signal_restores_the_terminal() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let (_dir, mut pty) = live();
        pty.signal(signal);
        assert!(pty.wait().success(), "{signal:?}");
        expect_restored(&pty);
    }
}

#[test]
fn a_stop_restores_the_terminal_until_continued() {
    let (_dir, mut pty) = live();
    pty.signal(Signal::TSTP);
    pty.until("the terminal is restored", Pty::is_restored);
    expect_restored(&pty);
    // SIGCONT has no effect before the process has stopped, so it is sent repeatedly.
    pty.until("the view continues", |pty| {
        pty.signal(Signal::CONT);
        pty.is_raw()
    });
    pty.press("q");
    assert!(pty.wait().success());
    expect_restored(&pty);
}

#[test]
fn an_error_is_printed_after_the_terminal_is_restored() {
    let (dir, mut pty) = live();
    fs::remove_dir_all(dir.path()).expect("removed");
    assert!(!pty.wait().success());
    expect_restored(&pty);
    let error = "cannot read the run directory of divvy-node";
    pty.until("the error is printed", |pty| {
        pty.written().rsplit(LEAVE_SCREEN).next().is_some_and(|last| last.contains(error))
    });
}

#[test]
fn live_view_follows_the_terminal_size() {
    let (_dir, mut pty) = live();
    assert!(pty.screen().contains("WEIGHT"), "{:?}", pty.screen());
    pty.resize(4, 20);
    pty.signal(Signal::WINCH);
    pty.until("the view is cut off", |pty| {
        let screen = pty.screen();
        screen.lines().count() == 4 && !screen.contains("WEIGHT") && screen.contains("q quit")
    });
    pty.press("q");
    assert!(pty.wait().success());
}

/// Runs `divvy top` with these arguments, with these scripts as `kubectl get` and `kubectl exec`.
///
/// Returns its output, and the arguments of each kubectl call, one line each.
fn with_kubectl([get, exec]: [&str; 2], arguments: &[&str]) -> (Output, String) {
    let dir = tempfile::tempdir().expect("a directory");
    // The shell is linked as kubectl and runs the file that its first argument names. Executing a
    // script that was just written can fail with ETXTBSY: another thread's fork holds it open for a
    // moment.
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

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn node_option_runs_in_the_pod_of_the_nodes_daemon() {
    let found = ["echo gpus divvy-node-x7k2p", "echo \"exec: $*\""];
    let (out, calls) = with_kubectl(found, &["--node", "n7", "--once", "--json"]);
    assert!(out.status.success(), "{}", stderr(&out));
    let exec = "--namespace gpus divvy-node-x7k2p -- divvy top --run-dir /run/divvy --once --json";
    assert_eq!(String::from_utf8_lossy(&out.stdout), format!("exec: {exec}\n"));
    assert!(calls.contains("--field-selector spec.nodeName=n7,status.phase=Running"), "{calls}");
    assert!(calls.ends_with(&format!("\nexec {exec}\n")), "{calls}");
    let (_, calls) = with_kubectl(found, &["--node", "n7", "--run-dir", "/run/gpus", "--totals"]);
    assert!(calls.ends_with("-- divvy top --run-dir /run/gpus --totals\n"), "{calls}");
}

#[test]
fn node_option_reports_why_it_failed() {
    let check = |get: &str, exec: &str, expected: &[&str]| {
        let (out, _) = with_kubectl([get, exec], &["--node", "n7"]);
        assert!(!out.status.success(), "{get}: {}", stderr(&out));
        assert!(expected.iter().all(|text| stderr(&out).contains(text)), "{get}: {}", stderr(&out));
    };
    check("exit 0", "", &["no pod of divvy-node runs on node n7", "kubectl get pods"]);
    check("echo forbidden >&2; exit 1", "", &["forbidden", "kubectl cannot list the pods of node n7"]);
    check("echo gpus divvy-node-x7k2p", "echo 'pod is gone' >&2; exit 1", &["pod is gone"]);
    let nothing = tempfile::tempdir().expect("a directory");
    let out =
        divvy().args(["top", "--node", "n7"]).env("PATH", nothing.path()).output().expect("divvy starts");
    assert!(
        !out.status.success() && stderr(&out).contains("--node needs it on the PATH"),
        "{}",
        stderr(&out)
    );
}

#[test]
fn an_unreadable_file_fails_after_the_others_are_shown() {
    let dir = tempfile::tempdir().expect("a directory");
    write_usage(dir.path(), &[("train", 30)]);
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
        assert!(stderr(&out).contains("GPU-x.json: damaged"), "{}", stderr(&out));
        assert!(String::from_utf8_lossy(&out.stdout).contains("train"));
    }
}
