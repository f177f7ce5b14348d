//! Runs the scheduler's own table of allocator tests, of each supported release, with the features
//! that the release turns on by default.
//!
//! The cases and upstream's answers are committed. `DIVVY_REGENERATE=1 cargo test -p divvy-alloc
//! --test upstream_table` regenerates them with `e2e/oracle/table`, which needs Go.
#![allow(clippy::unwrap_used, reason = "test helpers")]

use divvy_alloc::{AllocationError, ClusterView, Release, allocate_pod};
use divvy_api::Quantity;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use serde::{Deserialize, Serialize};
use serde_json::{Value, from_value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

/// A release whose table is run.
struct Table {
    /// Version of `k8s.io/dynamic-resource-allocation`.
    name: &'static str,
    module: &'static str,
    toolchain: &'static str,
    /// The allocator features that are on by default, from `pkg/features/kube_features.go`.
    features: &'static str,
    cases: usize,
    /// Cases whose answers differ, with the reason.
    different: &'static [(&'static str, &'static str)],
}

const RELEASES: [Table; 3] = [
    Table {
        name: "1.38.0-beta.0",
        module: "go-1.38.mod",
        toolchain: "go1.27.0",
        features: "AdminAccess,ConsumableCapacity,DeviceBindingAndStatus,DeviceTaints,\
            FractionalCapacityRange,PartitionableDevices,PrioritizedList",
        cases: 318,
        different: &[],
    },
    Table {
        name: "1.37.2",
        module: "go.mod",
        toolchain: "auto",
        features: "AdminAccess,ConsumableCapacity,DeviceBindingAndStatus,DeviceTaints,\
            FractionalCapacityRange,PartitionableDevices,PrioritizedList",
        cases: 279,
        different: &[(
            "consumable-capacity-requests-are-not-modified",
            "Go writes the amount 1e21 as 1, so the recorded input is not that of the case",
        )],
    },
    Table {
        name: "1.36.6",
        module: "go-1.36.mod",
        toolchain: "auto",
        features: "AdminAccess,ConsumableCapacity,DeviceBindingAndStatus,DeviceTaints,\
            PartitionableDevices,PrioritizedList",
        cases: 233,
        different: &[(
            "consumable-capacity-multi-allocatable-device-allocation-mode-all-in-use-insufficient",
            "1.36 leaves full devices out of All, which 1.37 fixed",
        )],
    },
];

/// The input of a case. Devices are `driver/pool/device`.
#[derive(Clone, Deserialize, Serialize)]
struct Case {
    name: String,
    node: Value,
    classes: Value,
    slices: Value,
    claims: Value,
    /// Devices that other claims hold: exclusively, and with shares.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    exclusive: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shared: Vec<String>,
    /// The amounts that shares of a device consume, by capacity name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    consumed: BTreeMap<String, BTreeMap<String, String>>,
    /// By release: "none", "error", or the devices of each claim.
    answers: BTreeMap<String, Value>,
}

fn oracle() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/oracle")
}

fn file() -> PathBuf {
    oracle().join("vectors/allocator-table.json")
}

/// The cases of a release, by name.
fn record(release: &Table) -> BTreeMap<String, Value> {
    let out = std::env::temp_dir().join(format!("allocator-table-{}.json", std::process::id()));
    let run = Command::new("go")
        .args(["test", "-count=1", "-modfile", release.module, "."])
        .current_dir(oracle().join("table"))
        .env("GOTOOLCHAIN", release.toolchain)
        .env("FEATURES", release.features)
        .env("OUT", &out)
        .output()
        .expect("go must be installed");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
    let cases = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    std::fs::remove_file(&out).unwrap();
    cases
}

/// Removes fields without information, which some releases write and others do not.
fn tidy(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(tidy),
        Value::Object(fields) => {
            fields.values_mut().for_each(tidy);
            fields.retain(|name, field| {
                let off = ["allNodes", "bindsToNode"].contains(&name.as_str()) && *field == json!(false);
                !off && !field.is_null() && (name != "status" || *field != json!({}))
            });
        }
        _ => {}
    }
}

/// Writes the cases of all releases, each input once.
fn regenerate() {
    let mut all: Vec<Case> = Vec::new();
    for release in &RELEASES {
        for (name, mut case) in record(release) {
            let answer = case["answer"].take();
            case["name"] = json!(name);
            case["answers"] = json!({});
            tidy(&mut case);
            for list in ["classes", "slices", "claims"] {
                case[list] = case.get(list).cloned().unwrap_or_else(|| json!([]));
            }
            case["node"] = json!({"metadata": case["node"]["metadata"]});
            let mut case: Case = from_value(case).unwrap();
            case.answers.insert(release.name.to_owned(), answer.clone());
            let same = |other: &&mut Case| {
                let input = |case: &Case| json!(Case { answers: BTreeMap::new(), ..case.clone() });
                other.name == case.name && input(other) == input(&case)
            };
            match all.iter_mut().find(same) {
                Some(known) => drop(known.answers.insert(release.name.to_owned(), answer)),
                None => all.push(case),
            }
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let lines: Vec<String> = all.iter().map(|case| json!(case).to_string()).collect();
    std::fs::write(file(), format!("[\n{}\n]\n", lines.join(",\n"))).unwrap();
}

fn committed() -> Vec<Case> {
    if std::env::var_os("DIVVY_REGENERATE").is_some() {
        regenerate();
    }
    serde_json::from_slice(&std::fs::read(file()).unwrap()).unwrap()
}

/// Claims that hold what the case says is held.
fn held(case: &Case) -> Vec<ResourceClaim> {
    let result = |device: &str, more: Value| {
        let parts: Vec<&str> = device.splitn(3, '/').collect();
        let mut result = json!({"request": "r", "driver": parts[0], "pool": parts[1], "device": parts[2]});
        for (name, field) in more.as_object().unwrap() {
            result[name] = field.clone();
        }
        result
    };
    let mut results: Vec<Value> = case.exclusive.iter().map(|device| result(device, json!({}))).collect();
    results.extend(case.shared.iter().map(|device| result(device, json!({"shareID": "s"}))));
    results.extend(
        case.consumed
            .iter()
            .map(|(device, amounts)| result(device, json!({"shareID": "s", "consumedCapacity": amounts}))),
    );
    let status = json!({"allocation": {"devices": {"results": results}}});
    vec![from_value(json!({"metadata": {"name": "held"}, "spec": {}, "status": status})).unwrap()]
}

fn answer(results: &Result<Vec<AllocationResult>, AllocationError>) -> Value {
    match results {
        // Upstream answers an empty list of claims with an empty list of allocations.
        Ok(claims) if claims.is_empty() => json!("none"),
        Ok(claims) => {
            let claims = claims.iter().map(|claim| {
                let results = claim.devices.iter().flat_map(|devices| devices.results.iter().flatten());
                let device = |result: &k8s_openapi::api::resource::v1::DeviceRequestAllocationResult| {
                    let mut text =
                        format!("{}={}/{}/{}", result.request, result.driver, result.pool, result.device);
                    for (name, amount) in result.consumed_capacity.iter().flatten() {
                        write!(text, " {name}:{}", decimal(Quantity::try_from(amount).unwrap())).unwrap();
                    }
                    text
                };
                results.map(device).collect::<Vec<_>>()
            });
            json!(claims.collect::<Vec<_>>())
        }
        Err(AllocationError::NoFit { .. }) => json!("none"),
        Err(_) => json!("error"),
    }
}

/// The exact amount, without a unit.
fn decimal(amount: Quantity) -> String {
    let nano = amount.as_nano();
    let (whole, part) = (nano / 1_000_000_000, nano % 1_000_000_000);
    let text = format!("{whole}.{part:09}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn run(case: &Case, release: Release) -> Result<Vec<AllocationResult>, AllocationError> {
    let slices: Vec<ResourceSlice> = from_value(case.slices.clone()).unwrap();
    let classes: Vec<DeviceClass> = from_value(case.classes.clone()).unwrap();
    let claims: Vec<ResourceClaim> = from_value(case.claims.clone()).unwrap();
    let node: Node = from_value(case.node.clone()).unwrap();
    let held = held(case);
    let view = ClusterView { slices: &slices, classes: &classes, claims: &held, node: &node, release };
    let claims: Vec<&ResourceClaim> = claims.iter().collect();
    allocate_pod(&view, &claims, &mut || "share".to_owned())
}

/// Equal means the same devices, or that both refuse: upstream does not promise whether it answers
/// with an error or with nothing.
#[test]
fn answers_equal_those_of_the_scheduler() {
    let committed = committed();
    for table in &RELEASES {
        let release = Release::of_version(table.name).unwrap();
        let (mut all, mut refused) = (0, 0);
        let mut different = Vec::new();
        for case in &committed {
            let Some(expected) = case.answers.get(table.name) else { continue };
            all += 1;
            let ours = answer(&run(case, release));
            if ours != *expected && ours.is_string() && expected.is_string() {
                refused += 1;
            } else if ours != *expected {
                println!("{}, {}: {ours} instead of {expected}", table.name, case.name);
                different.push(case.name.as_str());
            }
        }
        let same = all - refused - different.len();
        println!("{}: {all} cases, {same} same, {refused} both refuse, {different:?} differ", table.name);
        let expected: Vec<&str> = table.different.iter().map(|(case, _)| *case).collect();
        assert_eq!((all, different), (table.cases, expected), "{}", table.name);
    }
}
