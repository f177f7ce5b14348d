//! Compares allocations of the storm with those of the upstream allocator, in one run of
//! `e2e/oracle/allocation`.

use divvy_alloc::{AllocationError, ClusterView};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A claim, what the scheduler knew, and what `divvy-alloc` answered.
pub(crate) struct Problem {
    input: Value,
    answer: String,
}

impl Problem {
    pub(crate) fn new(
        view: &ClusterView<'_>,
        claim: &ResourceClaim,
        answer: &Result<AllocationResult, AllocationError>,
    ) -> Self {
        let held = view.claims.iter().map(|claim| json!({"held": claim}));
        let mut wanted = json!(claim);
        // The defaults of the API server.
        let exactly = &mut wanted["spec"]["devices"]["requests"][0]["exactly"];
        exactly["allocationMode"] = json!("ExactCount");
        exactly["count"] = json!(1);
        let steps: Vec<Value> = held.chain([json!({"take": wanted})]).collect();
        let (slices, classes) = (view.slices, view.classes);
        let input = json!({"node": view.node, "slices": slices, "classes": classes, "sequences": [steps]});
        let device = |result: &AllocationResult| {
            let results = result.devices.as_ref().and_then(|devices| devices.results.as_ref());
            results.map(|results| format!("r={}", results[0].device)).unwrap_or_default()
        };
        Self { input, answer: answer.as_ref().map_or_else(|_| "refused".to_owned(), device) }
    }
}

/// Panics if upstream answers differently.
pub(crate) fn compare(problems: &[Problem]) {
    let input: Vec<&Value> = problems.iter().map(|problem| &problem.input).collect();
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../e2e/oracle");
    let mut go = Command::new("go")
        .args(["run", "-modfile", "go.mod", "./allocation"])
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("go must be installed");
    go.stdin.take().unwrap().write_all(&serde_json::to_vec(&input).unwrap()).unwrap();
    let output = go.wait_with_output().unwrap();
    assert!(output.status.success(), "the oracle failed");
    let answers: Vec<Vec<Vec<String>>> = serde_json::from_slice(&output.stdout).unwrap();
    for (problem, answer) in problems.iter().zip(&answers) {
        // The answer ends with the amounts of a share.
        let theirs = answer[0].last().unwrap().split(' ').next().unwrap_or_default();
        assert_eq!(problem.answer, theirs, "{}", problem.input);
    }
    println!("{} allocations equal those of upstream", problems.len());
}
