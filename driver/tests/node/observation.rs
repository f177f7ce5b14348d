//! Outputs of the daemon: metrics, probes, events, claim status and exit codes.

use crate::harness::{Daemon, H100, TestNode, until};
use k8s_openapi::api::events::v1::Event;
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A free address for the daemon. Each test process uses its own loopback address, so that no other process
/// takes the port first.
pub(crate) fn address() -> String {
    static PORT: AtomicU16 = AtomicU16::new(10_000);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    format!("127.{high}.{middle}.{low}:{}", PORT.fetch_add(1, Ordering::Relaxed))
}

async fn get(address: &str, path: &str) -> std::io::Result<String> {
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    stream
        .write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes())
        .await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

pub(crate) async fn wait_for(address: &str, path: &str, text: &str) -> String {
    let deadline = std::time::Instant::now() + crate::harness::WAIT_TIMEOUT;
    loop {
        let answer = get(address, path).await.unwrap_or_default();
        if answer.contains(text) {
            return answer;
        }
        assert!(std::time::Instant::now() < deadline, "{text:?} is not in {answer:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn probes_and_metrics_report_node_state() {
    let node = TestNode::new(H100).await;
    let address = address();
    let _daemon = node.start_daemon(&["--http-address", &address]).await;
    let ready = wait_for(&address, "/readyz", "200 OK").await;
    assert!(ready.contains("[+]cdi ok"), "{ready}");
    assert!(get(&address, "/livez").await.unwrap().ends_with("ok\n"));
    node.prepare(&node.claim("a", &["gpu-0"])).await.unwrap();
    let metrics = get(&address, "/metrics").await.unwrap();
    for line in [
        "divvy_prepare_seconds_count{result=\"ok\"} 1",
        "divvy_claims{state=\"prepared\"} 1",
        "divvy_gpus{presence=\"present\"} 1",
        "divvy_records_quarantined_total 0",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    std::fs::remove_dir_all(node.cdi_dir()).unwrap();
    // Any claim makes the daemon check the directory again.
    node.unprepare(&node.claim("a", &["gpu-0"])).await.unwrap();
    let unready = wait_for(&address, "/readyz", "[-]cdi failed").await;
    assert!(unready.contains("503"), "{unready}");
    assert!(unready.contains("--cdi-dir"), "{unready}");
}

#[tokio::test]
async fn gpus_without_the_share_library_are_reported() {
    let node = TestNode::new("2xL4").await;
    let address = address();
    let _daemon = node.start_daemon(&["--http-address", &address, "--library-dir", "/nonexistent"]).await;
    let ready = wait_for(&address, "/readyz", "[!]shares degraded: 2 GPUs offer no shares").await;
    assert!(ready.contains("set its directory with --library-dir"), "{ready}");
    wait_for(&address, "/readyz", "200 OK").await;
    wait_for(&address, "/metrics", "divvy_node_gpus_without_shares 2").await;
}

#[tokio::test]
async fn unwanted_shares_are_not_reported_as_missing() {
    let node = TestNode::new("2xL4").await;
    let address = address();
    let arguments = ["--http-address", &address, "--library-dir", "/nonexistent", "--shares=false"];
    let _daemon = node.start_daemon(&arguments).await;
    wait_for(&address, "/readyz", "[+]shares ok").await;
    wait_for(&address, "/metrics", "divvy_node_gpus_without_shares 0").await;
}

#[tokio::test]
async fn h2_node_is_not_ready_while_nvml_lacks_gpus() {
    let node = TestNode::new("2xL4").await;
    // Without the helper nothing creates the device nodes.
    std::fs::remove_file(node.sim.root().join("usr/bin/nvidia-modprobe")).unwrap();
    let show = |exists: bool| {
        let change = |state: &mut divvy_sim::State| {
            state.gpus.iter_mut().for_each(|gpu| gpu.node = exists);
            Ok(())
        };
        node.sim.update(change).unwrap();
    };
    show(false);
    let address = address();
    let _daemon = node.start_daemon(&["--http-address", &address]).await;
    let unready = wait_for(&address, "/readyz", "the kernel driver shows 2 GPUs, NVML 0").await;
    assert!(unready.contains("[-]gpu-driver failed"), "{unready}");
    show(true);
    wait_for(&address, "/readyz", "200 OK").await;
    node.prepare(&node.claim("a", &["gpu-0"])).await.unwrap();
}

#[tokio::test]
async fn refused_claim_has_one_event_for_many_attempts() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &["gpu-9"]);
    for _ in 0..3 {
        node.prepare(&claim).await.unwrap_err();
    }
    let events = || {
        let events = node.api.list::<Event>().into_iter();
        events.filter(|event| event.reason.as_deref() == Some("PrepareFailed")).collect::<Vec<_>>()
    };
    until("the claim has an event", || !events().is_empty()).await;
    node.prepare(&claim).await.unwrap_err();
    let events = events();
    assert_eq!(events.len(), 1);
    let regarding = events[0].regarding.clone().unwrap();
    assert_eq!((regarding.kind.as_deref(), regarding.name.as_deref()), (Some("ResourceClaim"), Some("a")));
    assert!(events[0].note.as_ref().unwrap().contains("gpu-9"));
}

#[tokio::test]
async fn runtime_with_cdi_disabled_is_logged() {
    let node = TestNode::new(H100).await;
    std::fs::write(node.path("containerd.toml"), "version = 3\nenable_cdi = false\n").unwrap();
    let daemon = node.start_daemon(&[]).await;
    daemon.wait_log("this runtime has CDI off").await;
}

async fn check_exit(command: Command, text: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(command, &dir.path().join("log"));
    assert_ne!(daemon.wait_exit().await, Some(0));
    let log = daemon.log();
    assert!(log.contains(text), "{text:?} is not in {log:?}");
}

#[tokio::test]
async fn daemon_that_cannot_start_names_the_flag() {
    let node = TestNode::new(H100).await;
    check_exit(node.command(&["--log-level", "x=y=z"]), "--log-level").await;
    check_exit(node.command(&["--mig-hold-off", "30"]), "--mig-hold-off").await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-node"));
    command.env_clear();
    check_exit(command, "--node-name").await;
    std::fs::write(node.path("k/plugins"), "in the way").unwrap();
    check_exit(node.command(&[]), "--kubelet-root").await;
}

#[tokio::test]
async fn claim_status_describes_its_devices() {
    use k8s_openapi::api::resource::v1::ResourceClaim;
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &["gpu-0-mig-1g10gb-19-2"]);
    node.prepare(&claim).await.unwrap();
    let devices = || node.api.get::<ResourceClaim>("ns", "a").and_then(|claim| claim.status?.devices);
    until("the claim has device status", || devices().is_some()).await;
    let devices = devices().unwrap();
    let data = devices[0].data.clone().unwrap().0;
    let (gpu, mig) = {
        let state = node.sim.read().unwrap();
        (state.gpus[0].uuid.clone(), state.gpus[0].instances[0].cis[0].uuid.clone())
    };
    assert_eq!((devices.len(), devices[0].device.as_str()), (1, "gpu-0-mig-1g10gb-19-2"));
    assert_eq!(
        data,
        serde_json::json!({"uuid": gpu, "migUUID": mig, "mode": "mig", "memory": data["memory"].clone()})
    );
    assert!(data["memory"].as_str().is_some_and(|memory| memory.ends_with("Mi")), "{data}");
}

#[tokio::test]
async fn claim_status_tells_shares_from_whole_gpus() {
    use k8s_openapi::api::resource::v1::ResourceClaim;
    let node = TestNode::new(&format!("2x{H100}")).await;
    let _daemon = node.start_daemon(&[]).await;
    // Earlier versions allocated shares on the device of the whole GPU.
    for (name, device, mode) in
        [("new", "gpu-0-share=5Gi", "share"), ("old", "gpu-0=5Gi", "share"), ("whole", "gpu-1", "whole")]
    {
        node.prepare(&node.claim(name, &[device])).await.unwrap();
        let devices = || node.api.get::<ResourceClaim>("ns", name).and_then(|claim| claim.status?.devices);
        until("the claim has device status", || devices().is_some()).await;
        assert_eq!(devices().unwrap()[0].data.as_ref().unwrap().0["mode"], mode, "{device}");
    }
}

#[tokio::test]
async fn refused_status_write_is_logged_once_and_fails_no_prepare() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    node.api.fail_next("patch", "resourceclaims", 100, 403);
    for name in ["a", "b", "c"] {
        let claim = node.claim(name, &["gpu-0"]);
        node.prepare(&claim).await.unwrap();
        until("the daemon tried to write the status", || node.api.count("patch", "resourceclaims") > 0).await;
        node.api.clear_requests();
        node.unprepare(&claim).await.unwrap();
    }
    daemon.wait_log("cannot write the status of claims").await;
    assert_eq!(daemon.log().matches("cannot write the status of claims").count(), 1);
    let reported =
        || node.api.list::<Event>().into_iter().any(|e| e.reason.as_deref() == Some("StatusRefused"));
    until("an event reports it", reported).await;
}
