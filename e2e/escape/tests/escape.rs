//! A row of each sort; all of them are played by `e2e/escape/run`.

mod common;

use common::built;
use divvy_escape::report;
use divvy_escape::rows::{self, Must, ROWS};
use std::collections::BTreeSet;
use std::time::Duration;

/// The node's five seconds, on a machine that does many other things.
const PATIENCE: Duration = Duration::from_secs(60);

/// Each of the rows holds, and wins where nothing stops it.
fn check(names: &[&str]) {
    let (programs, enforcement) = built();
    for name in names {
        let row = rows::named(name).unwrap_or_else(|| panic!("no row {name}"));
        let line = report::play(row, programs, enforcement, PATIENCE);
        assert!(line.good(), "{line}");
    }
}

#[test]
fn what_the_library_must_prevent_is_prevented() {
    check(&[
        "plain",
        "cugetprocaddress",
        "environment-cleared",
        "policy-file",
        "time-processes",
        "plain@shim",
    ]);
}

#[test]
fn what_the_node_must_detect_is_detected() {
    check(&["own-libcuda", "account-zeroed", "own-libcuda@mig", "real-path@shim"]);
    check(&["time-endless", "time-mismeasured@mig"]);
}

#[test]
fn every_row_has_a_name_of_its_own() {
    let names: BTreeSet<&str> = ROWS.iter().map(|row| row.name).collect();
    assert_eq!(names.len(), ROWS.len());
}

/// Whether it is as generated is for the whole suite to check, which takes minutes.
#[test]
fn the_page_tells_of_every_row_what_must_become_of_it() {
    let page = include_str!("../../../docs/src/share-escapes.md");
    let told: Vec<&str> =
        page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| trick")).collect();
    assert_eq!(told.len(), ROWS.len());
    for (line, row) in told.into_iter().zip(ROWS) {
        let what = match row.must {
            Must::BePrevented => "prevented".to_owned(),
            Must::BeDetected(what) => format!("detected: `{what}`"),
            Must::BeNamed(bound) => format!("bounded: {bound}"),
            Must::BeHeld(what) => format!("held by the GPU driver: `{what}`"),
        };
        assert!(line.starts_with(&format!("| {} | {what}", row.trick)), "{line}");
    }
}
