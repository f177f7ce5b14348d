//! Compares our allocations with those of the scheduler's own allocator, of Kubernetes 1.37 and
//! 1.36, on published slices: long sequences of claims and releases, and exclusion of modes.
//!
//! The upstream answers are committed. `DIVVY_REGENERATE=1 cargo test -p divvy-alloc --test
//! upstream` regenerates them with `e2e/oracle/allocation`, which needs Go.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;
#[path = "common/dice.rs"]
mod dice;
#[path = "../../slices/tests/common/mod.rs"]
mod gpus;
#[path = "common/nodes.rs"]
mod nodes;
#[path = "upstream/sequences.rs"]
mod sequences;

use common::{NODE, node};
use divvy_alloc::AllocationError;
use divvy_api::Quantity;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceRequestAllocationResult};
use sequences::{Scenario, Sequence, Step, scenarios};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// Releases and the module files to build their allocators with. The newest comes first: our
/// allocator follows it if the releases differ.
const RELEASES: [(&str, &str); 2] = [("1.37.0", "go.mod"), ("1.36.6", "go-1.36.mod")];

/// By sequence: for each step, its text and the answer of each release.
type Committed = BTreeMap<String, Vec<Vec<String>>>;

fn oracle() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/oracle")
}

fn file() -> PathBuf {
    oracle().join("vectors/allocation.json")
}

/// The answer as `request=device`, with the non-zero amounts of a share.
fn answer_text(result: &Result<AllocationResult, AllocationError>) -> String {
    let device = |result: &DeviceRequestAllocationResult| {
        let mut text = format!("{}={}", result.request, result.device);
        for (name, amount) in result.consumed_capacity.iter().flatten() {
            let amount = Quantity::try_from(amount).unwrap().value().unwrap();
            if amount != 0 {
                write!(text, " {name}:{amount}").unwrap();
            }
        }
        text
    };
    match result {
        Ok(allocation) => {
            let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
            results.map(device).collect::<Vec<_>>().join(", ")
        }
        Err(AllocationError::NoFit { .. }) => "refused".to_owned(),
        Err(_) => "error".to_owned(),
    }
}

/// The answers of a release's allocator to every step of every sequence.
fn upstream_answers(module: &str, scenarios: &[Scenario]) -> Vec<Vec<Vec<String>>> {
    let wire: Vec<Value> = scenarios
        .iter()
        .map(|scenario| {
            let cluster = scenario.published();
            let sequences: Vec<Vec<Value>> = scenario
                .sequences
                .iter()
                .map(|sequence| sequence.steps.iter().map(Step::wire).collect())
                .collect();
            json!({
                "node": node(NODE), "slices": cluster.slices, "classes": cluster.classes,
                "sequences": sequences,
            })
        })
        .collect();
    let mut go = Command::new("go")
        .args(["run", "-modfile", module, "./allocation"])
        .current_dir(oracle())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("go must be installed");
    let input = serde_json::to_vec(&wire).unwrap();
    go.stdin.take().unwrap().write_all(&input).unwrap();
    let output = go.wait_with_output().unwrap();
    assert!(output.status.success(), "the oracle failed");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn regenerate(scenarios: &[Scenario]) {
    let answers = RELEASES.map(|(_, module)| upstream_answers(module, scenarios));
    let mut lines = Vec::new();
    for (index, scenario) in scenarios.iter().enumerate() {
        for (number, sequence) in scenario.sequences.iter().enumerate() {
            let row = |(step, what): (usize, &Step)| {
                let mut row = vec![what.text()];
                let answer = |release: usize| answers[release][index][number][step].clone();
                row.push(answer(0));
                // The second release's answer is stored only if it differs.
                row.extend(Some(answer(1)).filter(|other| *other != answer(0)));
                row
            };
            let rows: Vec<Vec<String>> = sequence.steps.iter().enumerate().map(row).collect();
            lines.push(format!("{}: {}", json!(name(scenario, sequence)), json!(rows)));
        }
    }
    std::fs::write(file(), format!("{{\n{}\n}}\n", lines.join(",\n"))).unwrap();
}

fn name(scenario: &Scenario, sequence: &Sequence) -> String {
    format!("{}, {}", scenario.name, sequence.name)
}

/// The scenarios and the committed upstream answers.
static COMMITTED: LazyLock<(Vec<Scenario>, Committed)> = LazyLock::new(|| {
    let scenarios = scenarios();
    if std::env::var_os("DIVVY_REGENERATE").is_some() {
        regenerate(&scenarios);
    }
    (scenarios, serde_json::from_slice(&std::fs::read(file()).unwrap()).unwrap())
});

#[test]
fn allocations_equal_those_of_the_scheduler() {
    let (scenarios, committed) = &*COMMITTED;
    let mut compared = 0;
    for scenario in scenarios {
        let published = scenario.published();
        for sequence in &scenario.sequences {
            let name = name(scenario, sequence);
            let rows = committed.get(&name).unwrap_or_else(|| panic!("{name}: regenerate the answers"));
            assert_eq!(rows.len(), sequence.steps.len(), "{name}: regenerate the answers");
            let mut cluster = published.clone();
            for (step, row) in sequence.steps.iter().zip(rows) {
                assert_eq!(step.text(), row[0], "{name}: regenerate the answers");
                match step {
                    Step::Take { name: holder, claim, .. } => {
                        compared += 1;
                        let ours = answer_text(&cluster.take(holder, claim));
                        assert_eq!(ours, row[1], "{name}: {}", row[0]);
                    }
                    Step::Held { .. } => cluster.hold(&step.wire()["held"]),
                    Step::Release(holder) => cluster.release(holder),
                }
            }
        }
    }
    assert!(compared > 2000, "{compared} claims");
}

#[test]
fn both_releases_exclude_the_modes_of_a_gpu() {
    let (scenarios, committed) = &*COMMITTED;
    let mut expected = 0;
    for scenario in scenarios {
        for sequence in &scenario.sequences {
            let name = name(scenario, sequence);
            for (step, row) in sequence.steps.iter().zip(&committed[&name]) {
                let Step::Take { accepted: Some(accepted), .. } = step else { continue };
                expected += 1;
                let refused = row[1] == "refused";
                assert_eq!(row.len(), 2, "{name}: {}: the releases differ", row[0]);
                assert_eq!(refused, !accepted, "{name}: {}: {}", row[0], row[1]);
            }
        }
    }
    assert!(expected > 500, "{expected} answers");
}
