//! Bad input: the claim gets an error that names the cause, and no state is left behind that would
//! block a later prepare or unprepare.

use crate::harness::{DRIVER, Daemon, H100, NODE, TestNode, until};
use divvy_kubelet::dra::v1::Claim;
use serde_json::{Value, json};

fn result(driver: &str, pool: &str, device: &str) -> Value {
    json!({"request": "r", "driver": driver, "pool": pool, "device": device})
}

/// Checks that the claim is refused with these texts, leaves no files, and can be unprepared.
async fn check_refused(node: &TestNode, claim: &Claim, texts: &[&str]) {
    let error = node.prepare(claim).await.unwrap_err();
    for text in texts {
        assert!(error.contains(text), "{text:?} is not in {error:?}");
    }
    node.unprepare(claim).await.unwrap();
    node.expect_hardware(&["off"]);
    assert_eq!(node.claim_files(), [""; 0]);
}

#[tokio::test]
async fn claim_that_differs_from_the_kubelet_call_is_refused() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    check_refused(&node, &crate::harness::claim_ref("a"), &["claim ns/a", "does not exist"]).await;
    check_refused(&node, &node.put_claim("b", json!({})), &["claim ns/b", "not allocated"]).await;
    let replaced = Claim { uid: "old".to_owned(), ..node.claim("c", &["gpu-0"]) };
    check_refused(&node, &replaced, &["claim ns/c", "replaced", "old"]).await;
    let invalid = Claim { uid: "../../x".to_owned(), ..node.claim("d", &["gpu-0"]) };
    check_refused(&node, &invalid, &["uid"]).await;
}

#[tokio::test]
async fn claim_of_unknown_or_foreign_devices_is_refused() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = |name, result| node.claim_with(name, vec![result], json!([]));
    check_refused(&node, &claim("a", result(DRIVER, NODE, "gpu-9")), &["claim ns/a", "gpu-9"]).await;
    check_refused(&node, &claim("b", result(DRIVER, NODE, "disk")), &["claim ns/b", "disk"]).await;
    check_refused(&node, &claim("c", result("other.dev", NODE, "gpu-0")), &["claim ns/c", DRIVER]).await;
    check_refused(&node, &claim("d", result(DRIVER, "node-2", "gpu-0")), &["claim ns/d", "node-2"]).await;
}

#[tokio::test]
async fn invalid_configuration_is_refused_naming_the_field() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let api_version = divvy_api::names::CONFIG_API_VERSION;
    for (name, parameters, text) in [
        ("kind", json!({"apiVersion": api_version, "kind": "GpuConfiguration"}), "GpuConfiguration"),
        ("field", json!({"apiVersion": api_version, "kind": "GpuConfig", "sharing": {}}), "sharing"),
        ("version", json!({"apiVersion": "resource.divvy.dev/v9", "kind": "GpuConfig"}), "v9"),
    ] {
        let config = json!([{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}}]);
        let claim = node.claim_with(name, vec![result(DRIVER, NODE, "gpu-0")], config);
        check_refused(&node, &claim, &[&format!("claim ns/{name}"), text]).await;
    }
}

#[tokio::test]
async fn prepare_fails_until_the_cdi_directory_exists() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    std::fs::remove_dir(node.cdi_dir()).unwrap();
    let claim = node.claim("a", &["gpu-0-mig-1g10gb-19-2"]);
    check_refused(&node, &claim, &["claim ns/a", "cdi"]).await;
    std::fs::write(node.cdi_dir(), "not a directory").unwrap();
    check_refused(&node, &claim, &["claim ns/a", "cdi"]).await;
    std::fs::remove_file(node.cdi_dir()).unwrap();
    std::fs::create_dir(node.cdi_dir()).unwrap();
    node.prepare(&claim).await.unwrap();
    drop(daemon);
}

#[tokio::test]
async fn full_disk_refuses_new_claims_and_keeps_prepared_ones() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let node = TestNode::new(H100).await;
    // A file-size limit of zero simulates a full disk for one process.
    let without_trap = node.command(&[]);
    let mut command = std::process::Command::new("/bin/sh");
    command.env_clear().args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]);
    command.arg(without_trap.get_program()).args(without_trap.get_args());
    let daemon = Daemon::spawn(command, &node.path("log"));
    node.kubelet.wait_registered(DRIVER, 1, crate::harness::WAIT_TIMEOUT).await.unwrap();
    let held = node.claim("held", &["gpu-0-mig-1g10gb-19-0"]);
    let devices = node.prepare(&held).await.unwrap();
    let pid = Pid::from_raw(daemon.pid() as i32);
    let full = Rlimit { current: Some(0), maximum: None };
    prlimit(pid, Resource::Fsize, full).unwrap();
    let claim = node.claim("a", &["gpu-0-mig-1g10gb-19-2"]);
    let error = node.prepare(&claim).await.unwrap_err();
    assert!(error.contains("claim ns/a"), "{error}");
    node.expect_hardware(&["mig 19@0"]);
    assert_eq!(node.prepare(&held).await.unwrap(), devices);
    prlimit(pid, Resource::Fsize, Rlimit { current: None, maximum: None }).unwrap();
    node.prepare_until_ok(&claim).await;
    for claim in [claim, held] {
        node.unprepare(&claim).await.unwrap();
    }
    assert_eq!(node.claim_files(), [""; 0]);
}

#[tokio::test]
async fn lost_gpu_refuses_new_claims_and_releases_old_ones() {
    let node = TestNode::new("2xH100-SXM5-80GB").await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &["gpu-0-mig-1g10gb-19-2"]);
    node.prepare(&claim).await.unwrap();
    node.update_sim(|state| state.lose(0, false).unwrap());
    let other = node.claim("b", &["gpu-0-mig-1g10gb-19-3"]);
    let error = node.prepare(&other).await.unwrap_err();
    assert!(error.contains("claim ns/b"), "{error}");
    node.unprepare(&other).await.unwrap();
    // A claim on a lost GPU can be released once the daemon knows of the loss.
    let deadline = std::time::Instant::now() + crate::harness::WAIT_TIMEOUT;
    while let Err(error) = node.unprepare(&claim).await {
        assert!(std::time::Instant::now() < deadline, "{error}");
    }
    assert_eq!(node.claim_files(), [""; 0]);
    node.prepare(&node.claim("c", &["gpu-1"])).await.unwrap();
}

#[tokio::test]
async fn damaged_record_is_quarantined_and_the_daemon_starts() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    node.prepare(&node.claim("a", &["gpu-0"])).await.unwrap();
    daemon.kill();
    let record = std::fs::read_dir(node.state_dir().join("claims")).unwrap().next().unwrap().unwrap().path();
    let bytes = std::fs::read(&record).unwrap();
    std::fs::write(&record, &bytes[..bytes.len() / 2]).unwrap();
    let _daemon = node.spawn_daemon(&[]);
    until("the record is quarantined", || !record.exists()).await;
    let reported = || {
        let events = node.api.list::<k8s_openapi::api::events::v1::Event>();
        events.iter().any(|event| event.reason.as_deref() == Some("RecordQuarantined"))
    };
    until("an event reports it", reported).await;
}
