//! The demo keeps its promise for claims that work, for claims that cannot, and
//! for hardware that fails: its exit code tells the truth and the GPUs end as
//! they began.

use std::process::{Command, Output};

fn demo(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_divvy")).arg("demo").args(arguments).output().expect("divvy starts")
}

fn claim(name: &str, class: &str, expression: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}}}
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: {class}
        selectors: [{{cel: {{expression: '{expression}'}}}}]
---
"
    )
}

fn profile(name: &str, profile: &str) -> String {
    claim(name, "mig.divvy.dev", &format!("device.attributes[\"gpu.divvy.dev\"].profile == \"{profile}\""))
}

fn check(gpus: &str, claims: &str, more: &[&str], succeeds: bool, says: &[&str]) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("claims.yaml");
    std::fs::write(&file, claims).expect("claims");
    let out = demo(&[&["--gpus", gpus, "--claims", &file.display().to_string()], more].concat());
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.success(), succeeds, "{text}");
    assert!(text.contains("the GPUs are as they began"), "{text}");
    for words in says {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    assert!(!text.contains('\x1b'), "colours without a terminal:\n{text}");
}

#[test]
fn the_built_in_examples_are_served() {
    let out = demo(&[]);
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}\n{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn seven_slices_fill_one_gpu() {
    let claims: String = (0..7).map(|i| profile(&format!("slice-{i}"), "1g.10gb")).collect();
    check("1xH100-SXM5-80GB", &claims, &[], true, &["slice-6: prepared"]);
}

#[test]
fn an_impossible_claim_is_told_and_harms_nobody() {
    let claims = profile("possible", "1g.10gb") + &profile("impossible", "9g.999gb");
    check("1xH100-SXM5-80GB", &claims, &[], false, &["possible: prepared", "impossible: no device"]);
}

#[test]
fn a_failing_call_is_told_with_claim_device_and_cause() {
    let claims = profile("unlucky", "1g.10gb");
    let fault = ["--fault", "nvmlGpuInstanceCreateComputeInstance=INSUFFICIENT_RESOURCES"];
    check(
        "1xH100-SXM5-80GB",
        &claims,
        &fault,
        false,
        &["unlucky", "gpu-0-mig-1g10gb", "nvmlGpuInstanceCreateComputeInstance"],
    );
}
