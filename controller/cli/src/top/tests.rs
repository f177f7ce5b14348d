//! Rendering of the daemon's files, keys of the live view, and the terminal after a panic.

use super::live_view::{LiveView, Size};
use super::*;
use divvy_api::top::{DIRECTORY, GpuTimeAttribution, GpuUsage, ShareTotals, ShareUsage, VERSION};
use std::fs;

const GPU: &str = "GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11";
const MIG: &str = "MIG-0a1b2c3d-7d52-4a51-9d3c-0a4f3f1f2b11";
const MIB: u64 = 1 << 20;

fn share(claim: &str) -> ShareUsage {
    ShareUsage {
        sampled_at_ms: 100_000,
        namespace: Some("team-a".to_owned()),
        claim: Some(claim.to_owned()),
        claim_uid: format!("uid-{claim}").into(),
        share: "b7a9d3c2-0a1b-4c2d-8e3f-405162738495".into(),
        gpu: GPU.to_owned(),
        mig: None,
        memory_limit_bytes: 8192 * MIB,
        memory_used_bytes: Some(4096 * MIB),
        memory_used_nvml_bytes: Some(4100 * MIB),
        compute_request_percent: 30,
        compute_limit_percent: 60,
        weight: 1,
        priority: 0,
        compute_used_nvml_percent: Some(29),
        compute_used_percent: Some(31),
        throttled_ms: Some(412),
        processes: 2,
        gpu_time_attribution: Some(GpuTimeAttribution::Events),
        totals: Some(ShareTotals {
            gpu_time_used_ms: 1_234_567,
            throttled_ms: 89_012,
            granted_ms: Some(1_300_050),
            hand_overs: Some(65_002),
            late_hand_overs: Some(3),
        }),
    }
}

/// A run directory with these sampled shares, and with the pages of the held ones.
fn run_dir(sampled: &[ShareUsage], held: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for claim in held {
        let pages = dir.path().join(format!("shares/uid-{claim}/b7a9d3c2-0a1b-4c2d-8e3f-405162738495"));
        fs::create_dir_all(pages).expect("pages");
    }
    fs::create_dir(dir.path().join(DIRECTORY)).expect("a directory");
    let now = GpuUsage { version: VERSION, gpu: GPU.to_owned(), shares: sampled.to_vec() };
    let text = serde_json::to_string(&now).expect("JSON");
    fs::write(dir.path().join(DIRECTORY).join(format!("{GPU}.json")), text).expect("a file");
    dir
}

fn snapshot(dir: &tempfile::TempDir) -> Snapshot {
    read_snapshot(dir.path()).expect("a snapshot")
}

fn text(snapshot: &Snapshot, unix_ms: u64) -> String {
    table::render(snapshot, &n1_at(unix_ms), SortKey::Claim, Period::LastSecond)
}

fn n1_at(unix_ms: u64) -> NodeTime {
    NodeTime { node: "n1".to_owned(), unix_ms }
}

#[test]
fn each_device_has_a_table() {
    let unlimited = ShareUsage {
        compute_request_percent: 0,
        compute_limit_percent: 100,
        weight: 3,
        priority: 1,
        memory_used_nvml_bytes: None,
        compute_used_percent: None,
        throttled_ms: None,
        ..share("notebook")
    };
    let instance =
        ShareUsage { mig: Some(MIG.to_owned()), compute_used_nvml_percent: None, ..share("on-mig") };
    let nameless = ShareUsage { namespace: None, claim: None, ..share("old") };
    let dir = run_dir(
        &[instance, unlimited, share("train"), nameless, share("gone")],
        &["notebook", "train", "on-mig", "old", "new"],
    );
    insta::assert_snapshot!("table_per_device", text(&snapshot(&dir), 101_000));
    let outdated = text(&snapshot(&dir), 112_000);
    let outdated = outdated.lines().nth(2).and_then(|line| line.strip_prefix(GPU));
    assert_eq!(outdated, Some(" (outdated: 12 s old; is divvy-node running?)"));
}

#[test]
fn totals_have_a_table_of_100_columns() {
    let by_rates = ShareUsage {
        gpu_time_attribution: Some(GpuTimeAttribution::Reported),
        totals: Some(ShareTotals { gpu_time_used_ms: 90, ..ShareTotals::default() }),
        ..share("notebook")
    };
    let of_older_daemon = ShareUsage { gpu_time_attribution: None, totals: None, ..share("old") };
    let dir = run_dir(&[by_rates, share("train"), of_older_daemon], &["notebook", "train", "old"]);
    let render = |sort| table::render(&snapshot(&dir), &n1_at(101_000), sort, Period::Total);
    let text = render(SortKey::Claim);
    insta::assert_snapshot!("totals", text);
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    for sort in [SortKey::Used, SortKey::Throttled] {
        let text = render(sort);
        let claims = text.lines().filter_map(|line| line.strip_prefix("team-a/")?.split(' ').next());
        assert_eq!(claims.collect::<Vec<_>>(), ["train", "notebook", "old"], "{sort:?}");
    }
}

/// A share as the daemon wrote it before it had totals.
const WITHOUT_TOTALS: &str = r#"
{"sampledAtMs":100000,"namespace":"team-a","claim":"notebook","claimUid":"uid-notebook",
"share":"b7a9d3c2-0a1b-4c2d-8e3f-405162738495","gpu":"GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11",
"mig":null,"memoryLimitBytes":8589934592,"memoryUsedBytes":4294967296,
"memoryUsedNvmlBytes":4299161600,"computeRequestPercent":30,"computeLimitPercent":60,"weight":1,
"priority":0,"computeUsedNvmlPercent":29,"computeUsedPercent":31,"throttledMs":412,"processes":2}"#;

#[test]
fn files_of_earlier_and_later_daemons_are_read() {
    let check = |share: serde_json::Value, expected: ShareUsage| {
        let dir = run_dir(&[], &["notebook"]);
        let file = serde_json::json!({"version": 1, "gpu": GPU, "shares": [share]});
        fs::write(dir.path().join(DIRECTORY).join(format!("{GPU}.json")), file.to_string()).expect("a file");
        assert_eq!(snapshot(&dir).shares, [expected]);
    };
    let earlier = serde_json::from_str(WITHOUT_TOTALS).expect("JSON");
    check(earlier, ShareUsage { gpu_time_attribution: None, totals: None, ..share("notebook") });
    let mut later = serde_json::to_value(share("notebook")).expect("JSON");
    later["new"] = 7.into();
    later["totals"]["new"] = 7.into();
    check(later, share("notebook"));
}

#[test]
fn earlier_readers_find_all_their_fields() {
    let mut now = serde_json::to_value(share("notebook")).expect("JSON");
    for field in ["gpuTimeAttribution", "totals"] {
        assert!(now.as_object_mut().expect("a share").remove(field).is_some(), "{field}");
    }
    let earlier: serde_json::Value = serde_json::from_str(WITHOUT_TOTALS).expect("JSON");
    assert_eq!((now, VERSION), (earlier, 1));
}

#[test]
fn an_unreadable_file_hides_only_its_gpu() {
    let check = |file: &str, expected: &str| {
        let dir = run_dir(&[share("train")], &["train"]);
        fs::write(dir.path().join(DIRECTORY).join("GPU-x.json"), file).expect("a file");
        let snapshot = snapshot(&dir);
        assert_eq!(snapshot.shares, [share("train")]);
        let [error] = &snapshot.unreadable[..] else { panic!("{:?}", snapshot.unreadable) };
        assert!(error.contains("GPU-x.json") && error.contains(expected), "{error}");
        assert!(text(&snapshot, 100_000).ends_with(&format!("\n\n{error}\n")));
    };
    let whole = serde_json::to_string(&GpuUsage { version: VERSION, gpu: GPU.to_owned(), shares: vec![] })
        .expect("JSON");
    check(&whole[..whole.len() - 1], "writes it again every second");
    check("", "writes it again every second");
    check(r#"{"version": 2, "shares": 7}"#, "`kubectl divvy top --node NAME` uses");
    check(r#"{"shares": []}"#, "missing field `version`");
    check(
        r#"{"version": 1, "gpu": "GPU-x", "shares": [{"sampledAtMs": NaN}]}"#,
        "writes it again every second",
    );
    check(
        r#"{"version": 1, "gpu": "GPU-x", "shares": [{"sampledAtMs": -1}]}"#,
        "invalid value: integer `-1`",
    );
    check(
        r#"{"version": 1, "gpu": "GPU-x", "shares": [{"sampledAtMs": 1e99}]}"#,
        "invalid type: floating point",
    );
}

#[test]
fn largest_values_are_shown() {
    let most = ShareUsage {
        sampled_at_ms: u64::MAX,
        memory_limit_bytes: u64::MAX,
        memory_used_bytes: Some(u64::MAX),
        memory_used_nvml_bytes: Some(u64::MAX),
        compute_request_percent: u32::MAX,
        compute_limit_percent: u32::MAX,
        weight: u32::MAX,
        priority: u32::MAX,
        compute_used_nvml_percent: Some(u32::MAX),
        throttled_ms: Some(u64::MAX),
        processes: u32::MAX,
        ..share("most")
    };
    let dir = run_dir(&[most], &["most"]);
    let text = text(&snapshot(&dir), 101_000);
    insta::assert_snapshot!("largest_values", text.lines().last().expect("a line"));
}

/// The claims from top to bottom after these key presses.
fn claims_after(view: &mut LiveView, keys: &str) -> Vec<String> {
    assert!(!view.press(keys.as_bytes()), "{keys:?} quit the view");
    let usage = |claim, compute, throttled, memory| ShareUsage {
        compute_used_nvml_percent: compute,
        compute_used_percent: None,
        throttled_ms: throttled,
        memory_used_bytes: memory,
        ..share(claim)
    };
    let shares = vec![
        usage("a", Some(10), Some(0), Some(20 * MIB)),
        usage("b", None, Some(70), Some(30 * MIB)),
        usage("c", Some(90), None, Some(10 * MIB)),
    ];
    let snapshot = Snapshot { shares, ..Snapshot::default() };
    let lines = view.lines(&snapshot, &n1_at(100_000), Size { rows: 0, columns: 0 });
    let claims = lines.iter().filter_map(|line| line.strip_prefix("team-a/")?.get(..1));
    claims.map(str::to_owned).collect()
}

#[test]
fn keys_select_the_sort_order() {
    let mut view = LiveView::default();
    assert_eq!(claims_after(&mut view, ""), ["a", "b", "c"]);
    assert_eq!(claims_after(&mut view, "u"), ["c", "a", "b"]);
    assert_eq!(claims_after(&mut view, "t"), ["b", "a", "c"]);
    assert_eq!(claims_after(&mut view, "m"), ["b", "a", "c"]);
    assert_eq!(claims_after(&mut view, "x\u{0}\r \u{1b}[5~"), ["b", "a", "c"], "other keys are ignored");
    assert_eq!(claims_after(&mut view, "umc"), ["a", "b", "c"], "the last key wins");
}

#[test]
fn q_quits_among_other_keys() {
    for keys in ["q", "Q", "ujq", "\u{1b}[Bq", "\u{1b}q"] {
        assert!(LiveView::default().press(keys.as_bytes()), "{keys:?}");
    }
}

fn trimmed(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[test]
fn lines_fit_the_terminal_and_scroll() {
    let many: Vec<String> = (0..20).map(|number| format!("c{number:02}")).collect();
    let shares = many.iter().map(|name| share(name)).collect();
    let snapshot = Snapshot { shares, ..Snapshot::default() };
    let mut view = LiveView::default();
    let mut lines = |keys: &str, rows, columns| {
        view.press(keys.as_bytes());
        view.lines(&snapshot, &n1_at(100_000), Size { rows, columns })
    };
    insta::assert_snapshot!(trimmed(&lines("", 8, 40)), @"
    n1, 00:01:40 UTC: 20 shares
    
    GPU-5b3c0b3e-7d52-4a51-9d3c-0a4f3f1f2b11
    CLAIM       REQUEST/LIMIT  USED  THROTTL
    team-a/c00         30/60%   29%     412
    team-a/c01         30/60%   29%     412
    team-a/c02         30/60%   29%     412
    q quit | sort by  c claim*  u used  t th
    ");
    insta::assert_snapshot!(trimmed(&lines("jj\u{1b}[B\u{1b}OBk", 6, 90)), @"
    n1, 00:01:40 UTC: 20 shares
    team-a/c00         30/60%   29%     412 ms      4096       8192         4100       1
    team-a/c01         30/60%   29%     412 ms      4096       8192         4100       1
    team-a/c02         30/60%   29%     412 ms      4096       8192         4100       1
    team-a/c03         30/60%   29%     412 ms      4096       8192         4100       1
    q quit | sort by  c claim*  u used  t throttled  m memory | j k lines 4-7 of 23
    ");
    // Scrolling stops at the end, so that the first step back is visible.
    let end = lines(&"j".repeat(100), 6, 20);
    assert!(end[4].starts_with("team-a/c19"), "{end:?}");
    assert!(lines("k", 6, 20)[4].starts_with("team-a/c18"));
    assert!(lines("u", 6, 20)[3].starts_with("CLAIM"), "a new sort order scrolls to the top");
    for rows in 1..30 {
        assert_eq!(lines("", rows, 3).len(), usize::from(rows.min(25)), "of {rows} rows");
    }
    assert!(lines("", 24, 7).iter().all(|line| line.chars().count() <= 7));
}

#[test]
fn json_has_one_line_per_share() {
    let dir = run_dir(&[share("train"), share("notebook")], &["train", "notebook"]);
    let mut out = Vec::new();
    print(&mut out, &snapshot(&dir), true, Period::LastSecond).expect("printed");
    let text = String::from_utf8(out).expect("text");
    let lines: Vec<ShareUsage> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines, [share("notebook"), share("train")]);
    insta::assert_snapshot!("share_as_json", text.lines().next().expect("a line"));
}

#[test]
fn a_missing_run_directory_names_the_remedy() {
    let dir = tempfile::tempdir().expect("a directory");
    let error = read_snapshot(&dir.path().join("none")).expect_err("no directory");
    assert!(format!("{error:#}").contains("kubectl divvy top --node NAME"), "{error:#}");
    assert_eq!(text(&snapshot(&dir), 3_723_000), "n1, 01:02:03 UTC: 0 shares\n");
}

#[path = "../../tests/top/pty.rs"]
mod pty;

/// The test runs itself again in a terminal, as the program that panics.
#[test]
fn a_panic_restores_the_terminal_first() {
    const PANICS: &str = "DIVVY_TEST_PANICS";
    if std::env::var_os(PANICS).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let _terminal = Terminal::enter().expect("a terminal");
            panic!("the panic message");
        });
    }
    let name = "top::tests::a_panic_restores_the_terminal_first";
    let this = std::env::current_exe().expect("this program");
    let again = ["--exact", name, "--nocapture"];
    let mut pty = pty::Pty::start(std::process::Command::new(this).args(again).env(PANICS, "yes"));
    assert!(!pty.wait().success());
    assert!(pty.is_restored());
    pty.until("the panic message is on the normal screen", |pty| {
        let all = pty.written();
        all.contains(pty::ENTER_SCREEN)
            && all.rsplit(pty::LEAVE_SCREEN).next().is_some_and(|last| last.contains("the panic message"))
    });
}
