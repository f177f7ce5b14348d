//! Our answers are those of the scheduler's own allocator, of Kubernetes 1.37
//! and 1.36, over the slices that we publish: what is taken and released in long
//! sequences, and that modes keep each other out.
//!
//! The answers are committed. `DIVVY_REGENERATE=1 cargo test -p divvy-alloc --test
//! upstream` asks for them anew (`e2e/oracle/allocation`; it needs Go).
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;
#[path = "../../slices/tests/common/mod.rs"]
mod gpus;
#[path = "common/nodes.rs"]
mod nodes;
#[path = "upstream/sequences.rs"]
mod sequences;

use common::{NODE, node};
use divvy_alloc::WhyNot;
use divvy_api::Quantity;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceRequestAllocationResult};
use sequences::{Sequence, Step, World, worlds};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// The newest release first; ours follows it where they differ. The module file
/// names what `go run` is to build with.
const RELEASES: [(&str, &str); 2] = [("1.37.0", "go.mod"), ("1.36.6", "go-1.36.mod")];

/// Of each step of a sequence, what it does and the answer of each release.
type Committed = BTreeMap<String, Vec<Vec<String>>>;

fn oracle() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/oracle")
}

fn file() -> PathBuf {
    oracle().join("vectors/allocation.json")
}

/// `request=device`, and what a share takes of each capacity unless it is nothing.
fn told(result: &Result<AllocationResult, WhyNot>) -> String {
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
        Err(WhyNot::NoFit { .. }) => "refused".to_owned(),
        Err(_) => "error".to_owned(),
    }
}

/// What the allocator of a release answers to every step of every sequence.
fn ask(module: &str, worlds: &[World]) -> Vec<Vec<Vec<String>>> {
    let wire: Vec<Value> = worlds
        .iter()
        .map(|world| {
            let cluster = nodes::published(&world.node);
            let sequences: Vec<Vec<Value>> =
                world.sequences.iter().map(|sequence| sequence.steps.iter().map(Step::wire).collect()).collect();
            json!({
                "node": node(NODE), "slices": cluster.slices, "classes": cluster.classes, "sequences": sequences,
            })
        })
        .collect();
    let mut go = Command::new("go")
        .args(["run", "-modfile", module, "./allocation"])
        .current_dir(oracle())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("go starts");
    let input = serde_json::to_vec(&wire).unwrap();
    go.stdin.take().unwrap().write_all(&input).unwrap();
    let output = go.wait_with_output().unwrap();
    assert!(output.status.success(), "the oracle failed");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn regenerate(worlds: &[World]) {
    let answers = RELEASES.map(|(_, module)| ask(module, worlds));
    let mut lines = Vec::new();
    for (index, world) in worlds.iter().enumerate() {
        for (number, sequence) in world.sequences.iter().enumerate() {
            let row = |(step, what): (usize, &Step)| {
                let mut row = vec![what.text()];
                let answer = |release: usize| answers[release][index][number][step].clone();
                row.push(answer(0));
                // The second release speaks where it says something else.
                row.extend(Some(answer(1)).filter(|other| *other != answer(0)));
                row
            };
            let rows: Vec<Vec<String>> = sequence.steps.iter().enumerate().map(row).collect();
            lines.push(format!("{}: {}", json!(name(world, sequence)), json!(rows)));
        }
    }
    std::fs::write(file(), format!("{{\n{}\n}}\n", lines.join(",\n"))).unwrap();
}

fn name(world: &World, sequence: &Sequence) -> String {
    format!("{}, {}", world.name, sequence.name)
}

/// The worlds, and what upstream said of them.
static COMMITTED: LazyLock<(Vec<World>, Committed)> = LazyLock::new(|| {
    let worlds = worlds();
    if std::env::var_os("DIVVY_REGENERATE").is_some() {
        regenerate(&worlds);
    }
    (worlds, serde_json::from_slice(&std::fs::read(file()).unwrap()).unwrap())
});

#[test]
fn our_answers_are_those_of_the_scheduler() {
    let (worlds, committed) = &*COMMITTED;
    let mut asked = 0;
    for world in worlds {
        let published = nodes::published(&world.node);
        for sequence in &world.sequences {
            let name = name(world, sequence);
            let rows = committed.get(&name).unwrap_or_else(|| panic!("{name}: regenerate the answers"));
            assert_eq!(rows.len(), sequence.steps.len(), "{name}: regenerate the answers");
            let mut cluster = published.clone();
            for (step, row) in sequence.steps.iter().zip(rows) {
                assert_eq!(step.text(), row[0], "{name}: regenerate the answers");
                match step {
                    Step::Take { name: holder, claim, .. } => {
                        asked += 1;
                        let ours = told(&cluster.take(holder, claim));
                        assert_eq!(ours, row[1], "{name}: {}", row[0]);
                    }
                    Step::Held { .. } => cluster.hold(&step.wire()["held"]),
                    Step::Release(holder) => cluster.release(holder),
                }
            }
        }
    }
    assert!(asked > 2000, "{asked} claims");
}

#[test]
fn both_releases_keep_the_modes_of_a_gpu_apart() {
    let (worlds, committed) = &*COMMITTED;
    let mut expected = 0;
    for world in worlds {
        for sequence in &world.sequences {
            let name = name(world, sequence);
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
