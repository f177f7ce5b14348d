//! Runs a few isolation cases of each kind. `e2e/escape/run` runs all of them.

mod common;

use common::built;
use divvy_escape::isolation_cases::{self, Expectation, ISOLATION_CASES};
use divvy_escape::report::{self, Controls};
use std::collections::BTreeSet;
use std::time::Duration;

/// The documented five seconds, with a margin for a machine that runs other tests.
const DETECTION_TIMEOUT: Duration = Duration::from_secs(60);

/// Each of the cases has its expected result, and succeeds without its protection.
fn check(names: &[&str]) {
    let (programs, enforcement) = built();
    for name in names {
        let case = isolation_cases::named(name).unwrap_or_else(|| panic!("no case {name}"));
        let result = report::run(case, programs, enforcement, DETECTION_TIMEOUT, &Controls::default());
        assert!(result.passed(), "{result}");
    }
}

#[test]
fn library_prevents_attacks() {
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
fn agent_detects_attacks() {
    check(&["own-libcuda", "account-zeroed", "own-libcuda@mig", "real-path@shim"]);
    check(&["time-endless", "time-mismeasured@mig"]);
}

#[test]
fn case_names_are_unique() {
    let names: BTreeSet<&str> = ISOLATION_CASES.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), ISOLATION_CASES.len());
}

/// Compares only the expected results: `e2e/escape/run --check` compares the whole table, in
/// minutes.
#[test]
fn documented_table_has_the_expected_results() {
    let page = include_str!("../../../docs/src/share-escapes.md");
    let rows: Vec<&str> =
        page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| attack")).collect();
    assert_eq!(rows.len(), ISOLATION_CASES.len());
    for (row, case) in rows.into_iter().zip(ISOLATION_CASES) {
        let result = match case.expected {
            Expectation::Prevented => "prevented".to_owned(),
            Expectation::Detected(kind) => format!("detected: `{kind}`"),
            Expectation::Bounded(bound) => format!("bounded: {bound}"),
            Expectation::HeldByDriver(kind) => format!("held by the GPU driver: `{kind}`"),
        };
        assert!(row.starts_with(&format!("| {} | {result}", case.attack)), "{row}");
    }
}
