//! What is shown of files as the daemon leaves them.

use super::*;
use std::fs;

const GPU: &str = "GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11";
const MIG: &str = "MIG-0a1b2c3d-7d52-4a51-9d3c-0a4f3f1f2b11";
const MIB: u64 = 1 << 20;

fn share(claim: &str) -> ShareNow {
    ShareNow {
        at_ms: 100_000,
        namespace: Some("team-a".to_owned()),
        claim: Some(claim.to_owned()),
        claim_uid: format!("uid-{claim}").into(),
        share: "b7a9d3c2-0a1b-4c2d-8e3f-405162738495".into(),
        gpu: GPU.to_owned(),
        mig: None,
        memory_limit_bytes: 8192 * MIB,
        memory_used_bytes: Some(4096 * MIB),
        memory_measured_bytes: Some(4100 * MIB),
        guarantee_percent: 30,
        ceiling_percent: 60,
        weight: 1,
        priority: 0,
        busy_percent: Some(29),
        charged_percent: Some(31),
        throttled_ms: Some(412),
        processes: 2,
    }
}

/// A run directory with these shares looked at, and pages of those that are held.
fn node(looked_at: &[ShareNow], held: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for claim in held {
        let pages = dir.path().join(format!("shares/uid-{claim}/b7a9d3c2-0a1b-4c2d-8e3f-405162738495"));
        fs::create_dir_all(pages).expect("pages");
    }
    fs::create_dir(dir.path().join(DIRECTORY)).expect("a directory");
    let now = GpuNow { version: VERSION, gpu: GPU.to_owned(), shares: looked_at.to_vec() };
    let text = serde_json::to_string(&now).expect("JSON");
    fs::write(dir.path().join(DIRECTORY).join(format!("{GPU}.json")), text).expect("a file");
    dir
}

fn shown(dir: &tempfile::TempDir) -> Shown {
    look(dir.path()).expect("a look")
}

#[test]
fn a_node_with_shares_is_a_table_for_each_device() {
    let unlimited = ShareNow {
        guarantee_percent: 0,
        ceiling_percent: 100,
        weight: 3,
        priority: 1,
        memory_measured_bytes: None,
        charged_percent: None,
        throttled_ms: None,
        ..share("notebook")
    };
    let instance = ShareNow { mig: Some(MIG.to_owned()), busy_percent: None, ..share("on-mig") };
    let nameless = ShareNow { namespace: None, claim: None, ..share("old") };
    let dir = node(
        &[instance, unlimited, share("train"), nameless, share("gone")],
        &["notebook", "train", "on-mig", "old", "new"],
    );
    insta::assert_snapshot!(view::text(&shown(&dir), 101_000), @"
    GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11
    CLAIM            SHARE     USED MIB  LIMIT MIB  BY NVML   ASKED  WEIGHT  PRIO  GOT  HELD UP  PROCS
    uid-old          b7a9d3c2      4096       8192     4100  30-60%       1     0  29%   412 ms      2
    team-a/notebook  b7a9d3c2      4096       8192        -  0-100%       3     1  29%        -      2
    team-a/train     b7a9d3c2      4096       8192     4100  30-60%       1     0  29%   412 ms      2

    GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11 MIG-0a1b2c3d-7d52-4a51-9d3c-0a4f3f1f2b11
    CLAIM          SHARE     USED MIB  LIMIT MIB  BY NVML   ASKED  WEIGHT  PRIO   GOT  HELD UP  PROCS
    team-a/on-mig  b7a9d3c2      4096       8192     4100  30-60%       1     0  ~31%   412 ms      2
    uid-new/b7a9d3c2-0a1b-4c2d-8e3f-405162738495: not looked at yet
    ");
    insta::assert_snapshot!(view::text(&shown(&dir), 112_000).lines().next().expect("a line"), @"GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11 (as of 12 s ago: nobody looks at its shares; is divvy-node running?)");
}

#[test]
fn each_share_is_a_line_of_json_that_says_the_same() {
    let dir = node(&[share("train"), share("notebook")], &["train", "notebook"]);
    let mut out = Vec::new();
    print(&mut out, &shown(&dir), true).expect("printed");
    let text = String::from_utf8(out).expect("text");
    let lines: Vec<ShareNow> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines, [share("notebook"), share("train")]);
    insta::assert_snapshot!(text.lines().next().expect("a line"), @r#"{"atMs":100000,"namespace":"team-a","claim":"notebook","claimUid":"uid-notebook","share":"b7a9d3c2-0a1b-4c2d-8e3f-405162738495","gpu":"GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11","mig":null,"memoryLimitBytes":8589934592,"memoryUsedBytes":4294967296,"memoryMeasuredBytes":4299161600,"guaranteePercent":30,"ceilingPercent":60,"weight":1,"priority":0,"busyPercent":29,"chargedPercent":31,"throttledMs":412,"processes":2}"#);
}

#[test]
fn a_directory_that_is_none_says_how_to_run_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let why = look(&dir.path().join("none")).expect_err("nothing there");
    assert!(format!("{why:#}").contains("kubectl divvy top --node NAME"), "{why:#}");
    assert_eq!(view::text(&shown(&dir), 0), "no shares on this node\n");
    let other = node(&[], &[]);
    fs::write(other.path().join(DIRECTORY).join("GPU-x.json"), r#"{"version": 2}"#).expect("a file");
    let why = look(other.path()).expect_err("another version");
    assert!(why.to_string().contains("another version"), "{why:#}");
}
