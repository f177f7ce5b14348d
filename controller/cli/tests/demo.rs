//! `divvy demo` with claims that fit, claims that do not, and failing hardware: its exit code is
//! right, and the GPUs are in their initial state at the end.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

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

fn check(gpus: &str, claims: &str, more: &[&str], succeeds: bool, expected: &[&str]) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("claims.yaml");
    std::fs::write(&file, claims).expect("claims");
    let out = demo(&[&["--gpus", gpus, "--claims", &file.display().to_string()], more].concat());
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.success(), succeeds, "{text}");
    assert!(text.contains("the GPUs are in their initial state"), "{text}");
    for words in expected {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
    assert!(!text.contains('\x1b'), "colours without a terminal:\n{text}");
}

#[test]
fn built_in_tour_serves_all_modes() {
    let out = demo(&[]);
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    let mut rest: &str = &text;
    for words in [
        "two-slots-more is refused: no device: claim default/two-slots-more does not fit",
        "1 without enough capacity",
        "all-of-it is refused",
        "1 overlapping devices in use",
        "time slice Long",
        "time-slice: notebook 1, video 2, the-last-slot 1",
        "the GPUs are in their initial state",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
        "/tmp/nvidia-mps is run/mps/GPU-",
        "30 % of the threads, at most 8192 MiB",
        "50 % of the threads, at most 10240 MiB",
        "more-threads-than-are-left is refused",
        "a-slice-of-it is refused",
        "exclusive process",
        "MPS: chat 30 % 8Gi, search 50 % 10Gi",
        "the GPUs are in their initial state",
        "a-slot-of-it is refused",
        "is GPU instance",
        "the GPUs are in their initial state",
        "a-client-of-it is refused",
        "whole: training",
        "the GPUs are in their initial state",
    ] {
        let at = rest.find(words).unwrap_or_else(|| panic!("no {words:?} where it should be in\n{text}"));
        rest = &rest[at + words.len()..];
    }
}

#[test]
fn a_served_claim_that_must_be_refused_is_an_error() {
    let claims = profile("welcome", "1g.10gb")
        .replace("{name: welcome}", "{name: welcome, annotations: {demo.divvy.dev/expect: refused}}");
    check("1xH100-SXM5-80GB", &claims, &[], false, &["welcome: it was served, but must be refused"]);
}

#[test]
fn a_refused_mps_client_is_an_error() {
    let claims = claim("unlucky", "mps.divvy.dev", "true");
    let fault = ["--fault", "mps-server-start=UNKNOWN"];
    check(
        "1xH100-SXM5-80GB",
        &claims,
        &fault,
        false,
        &["unlucky: its MPS client was refused", "the MPS server did not start"],
    );
}

#[test]
fn kept_claims_are_released_on_interrupt() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_divvy"))
        .args(["demo", "--gpus", "1xH100-SXM5-80GB", "--keep"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("divvy starts");
    let out = BufReader::new(child.stdout.take().expect("output"));
    let mut text = String::new();
    for line in out.lines() {
        let line = line.expect("a line");
        if line.contains("Ctrl-C releases everything") {
            let interrupt = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
            assert!(interrupt.expect("kill starts").success());
        }
        text.push_str(&line);
        text.push('\n');
    }
    assert!(child.wait().expect("an exit status").success(), "{text}");
    let (_, after) = text.split_once("Ctrl-C releases everything").expect("kept");
    assert!(after.contains("training released, the GPUs are in their initial state"), "{text}");
}

#[test]
fn seven_slices_fill_one_gpu() {
    let claims: String = (0..7).map(|i| profile(&format!("slice-{i}"), "1g.10gb")).collect();
    check("1xH100-SXM5-80GB", &claims, &[], true, &["slice-6: prepared"]);
}

#[test]
fn an_impossible_claim_does_not_affect_others() {
    let claims = profile("possible", "1g.10gb") + &profile("impossible", "9g.999gb");
    check("1xH100-SXM5-80GB", &claims, &[], false, &["possible: prepared", "impossible: no device"]);
}

#[test]
fn a_failing_call_names_claim_device_and_cause() {
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
