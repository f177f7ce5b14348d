//! What is shown of files as the daemon leaves them.

use super::screen::{Screen, Size};
use super::*;
use divvy_api::top::{DIRECTORY, GpuNow, ShareNow, VERSION};
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

fn text(shown: &Shown, ms: u64) -> String {
    view::text(shown, &moment(ms), Order::Claim)
}

fn moment(ms: u64) -> Moment {
    Moment { node: "n1".to_owned(), ms }
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
    insta::assert_snapshot!(text(&shown(&dir), 101_000), @"
    n1, 00:01:41 UTC: 5 shares

    GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11
    CLAIM             ASKED  GOT  HELD UP  USED MIB  LIMIT MIB  BY NVML  WEIGHT  PRIORITY  PROCESSES  SHARE
    uid-old          30-60%  29%   412 ms      4096       8192     4100       1       Low          2  b7a9d3c2
    team-a/notebook  0-100%  29%        -      4096       8192        -       3      High          2  b7a9d3c2
    team-a/train     30-60%  29%   412 ms      4096       8192     4100       1       Low          2  b7a9d3c2

    GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11 MIG-0a1b2c3d-7d52-4a51-9d3c-0a4f3f1f2b11
    CLAIM           ASKED   GOT  HELD UP  USED MIB  LIMIT MIB  BY NVML  WEIGHT  PRIORITY  PROCESSES  SHARE
    team-a/on-mig  30-60%  ~31%   412 ms      4096       8192     4100       1       Low          2  b7a9d3c2

    uid-new/b7a9d3c2-0a1b-4c2d-8e3f-405162738495: not looked at yet
    ");
    insta::assert_snapshot!(text(&shown(&dir), 112_000).lines().nth(2).expect("a line"), @"GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11 (as of 12 s ago: nobody looks at its shares; is divvy-node running?)");
}

#[test]
fn a_file_that_cannot_be_read_hides_its_gpu_and_no_other() {
    let check = |file: &str, said: &str| {
        let dir = node(&[share("train")], &["train"]);
        fs::write(dir.path().join(DIRECTORY).join("GPU-x.json"), file).expect("a file");
        let shown = shown(&dir);
        assert_eq!(shown.shares, [share("train")]);
        let [why] = &shown.unreadable[..] else { panic!("{:?}", shown.unreadable) };
        assert!(why.contains("GPU-x.json") && why.contains(said), "{why}");
        assert!(text(&shown, 100_000).ends_with(&format!("\n\n{why}\n")));
    };
    let whole = serde_json::to_string(&GpuNow { version: VERSION, gpu: GPU.to_owned(), shares: vec![] })
        .expect("JSON");
    check(&whole[..whole.len() - 1], "writes it anew each second");
    check("", "writes it anew each second");
    check(r#"{"version": 2, "shares": 7}"#, "`kubectl divvy top --node NAME` has the daemon's own");
    check(r#"{"shares": []}"#, "missing field `version`");
    check(r#"{"version": 1, "gpu": "GPU-x", "shares": [{"atMs": NaN}]}"#, "writes it anew each second");
    check(r#"{"version": 1, "gpu": "GPU-x", "shares": [{"atMs": -1}]}"#, "invalid value: integer `-1`");
    check(r#"{"version": 1, "gpu": "GPU-x", "shares": [{"atMs": 1e99}]}"#, "invalid type: floating point");
}

#[test]
fn amounts_as_large_as_they_can_be_are_shown() {
    let most = ShareNow {
        at_ms: u64::MAX,
        memory_limit_bytes: u64::MAX,
        memory_used_bytes: Some(u64::MAX),
        memory_measured_bytes: Some(u64::MAX),
        guarantee_percent: u32::MAX,
        ceiling_percent: u32::MAX,
        weight: u32::MAX,
        priority: u32::MAX,
        busy_percent: Some(u32::MAX),
        throttled_ms: Some(u64::MAX),
        processes: u32::MAX,
        ..share("most")
    };
    let dir = node(&[most], &["most"]);
    insta::assert_snapshot!(text(&shown(&dir), 101_000).lines().last().expect("a line"), @"team-a/most  4294967295%  4294967295%  18446744073709551615 ms  17592186044416  17592186044416  17592186044416  4294967295  4294967295  4294967295  b7a9d3c2");
}

/// The claims, top down, on a screen after these keys.
fn after(screen: &mut Screen, keys: &str) -> Vec<String> {
    assert!(!screen.press(keys.as_bytes()), "{keys:?} ended it");
    let most = |claim, got, held_up, used| ShareNow {
        busy_percent: got,
        charged_percent: None,
        throttled_ms: held_up,
        memory_used_bytes: used,
        ..share(claim)
    };
    let shares = vec![
        most("a", Some(10), Some(0), Some(20 * MIB)),
        most("b", None, Some(70), Some(30 * MIB)),
        most("c", Some(90), None, Some(10 * MIB)),
    ];
    let shown = Shown { shares, ..Shown::default() };
    let lines = screen.lines(&shown, &moment(100_000), Size { rows: 0, columns: 0 });
    let claims = lines.iter().filter_map(|line| line.strip_prefix("team-a/")?.get(..1));
    claims.map(str::to_owned).collect()
}

#[test]
fn keys_sort_by_who_has_most() {
    let mut screen = Screen::default();
    assert_eq!(after(&mut screen, ""), ["a", "b", "c"]);
    assert_eq!(after(&mut screen, "g"), ["c", "a", "b"]);
    assert_eq!(after(&mut screen, "h"), ["b", "a", "c"]);
    assert_eq!(after(&mut screen, "u"), ["b", "a", "c"]);
    assert_eq!(after(&mut screen, "x\u{0}\r \u{1b}[5~"), ["b", "a", "c"], "other keys do nothing");
    assert_eq!(after(&mut screen, "guc"), ["a", "b", "c"], "the last of several holds");
}

#[test]
fn q_ends_it_whatever_came_with_it() {
    for keys in ["q", "Q", "gjq", "\u{1b}[Bq", "\u{1b}q"] {
        assert!(Screen::default().press(keys.as_bytes()), "{keys:?}");
    }
}

fn shot(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[test]
fn a_screen_has_no_more_than_there_is_room_for() {
    let many: Vec<String> = (0..20).map(|number| format!("c{number:02}")).collect();
    let shown = Shown { shares: many.iter().map(|name| share(name)).collect(), ..Shown::default() };
    let mut screen = Screen::default();
    let mut lines = |keys: &str, rows, columns| {
        screen.press(keys.as_bytes());
        screen.lines(&shown, &moment(100_000), Size { rows, columns })
    };
    insta::assert_snapshot!(shot(&lines("", 8, 40)), @"
    n1, 00:01:40 UTC: 20 shares
    
    GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11
    CLAIM        ASKED  GOT  HELD UP  USED M
    team-a/c00  30-60%  29%   412 ms      40
    team-a/c01  30-60%  29%   412 ms      40
    team-a/c02  30-60%  29%   412 ms      40
    q quit | sort by  c claim*  g got  h hel
    ");
    insta::assert_snapshot!(shot(&lines("jj\u{1b}[B\u{1b}OBk", 6, 90)), @"
    n1, 00:01:40 UTC: 20 shares
    team-a/c00  30-60%  29%   412 ms      4096       8192     4100       1       Low
    team-a/c01  30-60%  29%   412 ms      4096       8192     4100       1       Low
    team-a/c02  30-60%  29%   412 ms      4096       8192     4100       1       Low
    team-a/c03  30-60%  29%   412 ms      4096       8192     4100       1       Low
    q quit | sort by  c claim*  g got  h held up  u used | j k lines 4-7 of 23
    ");
    // As far as the end and no farther, so that one step back is seen at once.
    let end = lines(&"j".repeat(100), 6, 20);
    assert!(end[4].starts_with("team-a/c19"), "{end:?}");
    assert!(lines("k", 6, 20)[4].starts_with("team-a/c18"));
    assert!(lines("g", 6, 20)[3].starts_with("CLAIM"), "another order starts at the top");
    for rows in 1..30 {
        assert_eq!(lines("", rows, 3).len(), usize::from(rows.min(25)), "of {rows} rows");
    }
    assert!(lines("", 24, 7).iter().all(|line| line.chars().count() <= 7));
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
    assert_eq!(text(&shown(&dir), 3_723_000), "n1, 01:02:03 UTC: 0 shares\n");
}

#[path = "../../tests/top/pty.rs"]
mod pty;

/// This test again, in a terminal, is the program that panics.
#[test]
fn a_panic_gives_the_terminal_back_before_it_is_told() {
    const AGAIN: &str = "DIVVY_TEST_PANICS";
    if std::env::var_os(AGAIN).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let _terminal = Terminal::enter().expect("taken");
            panic!("to be told");
        });
    }
    let name = "top::tests::a_panic_gives_the_terminal_back_before_it_is_told";
    let this = std::env::current_exe().expect("this program");
    let again = ["--exact", name, "--nocapture"];
    let mut pty = pty::Pty::start(std::process::Command::new(this).args(again).env(AGAIN, "yes"));
    assert!(!pty.ended().success());
    assert!(pty.is_as_before());
    pty.until("the panic is told on the screen that was there before", |pty| {
        let all = pty.written();
        all.contains(pty::TAKE)
            && all.rsplit(pty::GIVE_BACK).next().is_some_and(|last| last.contains("to be told"))
    });
}
