//! What can be seen of the daemon: metrics, probes, events, exit codes.

use crate::harness::{Daemon, H100, World, until};
use k8s_openapi::api::events::v1::Event;
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// An address that nobody else takes before the daemon does: each process of tests has a loopback address of its own.
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
    let deadline = std::time::Instant::now() + crate::harness::PATIENCE;
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
async fn probes_and_metrics_tell_how_the_node_is() {
    let world = World::up(H100).await;
    let address = address();
    let _daemon = world.start(&["--http-address", &address]).await;
    let ready = wait_for(&address, "/readyz", "200 OK").await;
    assert!(ready.contains("[+]cdi ok"), "{ready}");
    assert!(get(&address, "/livez").await.unwrap().ends_with("ok\n"));
    world.prepare(&world.claim("a", &["gpu-0"])).await.unwrap();
    let metrics = get(&address, "/metrics").await.unwrap();
    for line in [
        "divvy_prepare_seconds_count{result=\"ok\"} 1",
        "divvy_claims{state=\"prepared\"} 1",
        "divvy_gpus{presence=\"present\"} 1",
        "divvy_records_quarantined_total 0",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    std::fs::remove_dir_all(world.cdi_dir()).unwrap();
    // Any change makes the daemon look again.
    world.unprepare(&world.claim("a", &["gpu-0"])).await.unwrap();
    let unready = wait_for(&address, "/readyz", "[-]cdi failed").await;
    assert!(unready.contains("503"), "{unready}");
    assert!(unready.contains("--cdi-dir"), "{unready}");
}

#[tokio::test]
async fn a_refused_claim_has_one_event_however_often_it_is_tried() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let claim = world.claim("a", &["gpu-9"]);
    for _ in 0..3 {
        world.prepare(&claim).await.unwrap_err();
    }
    let events = || {
        let events = world.api.list::<Event>().into_iter();
        events.filter(|event| event.reason.as_deref() == Some("PrepareFailed")).collect::<Vec<_>>()
    };
    until("there is an event", || !events().is_empty()).await;
    world.prepare(&claim).await.unwrap_err();
    let events = events();
    assert_eq!(events.len(), 1);
    let regarding = events[0].regarding.clone().unwrap();
    assert_eq!((regarding.kind.as_deref(), regarding.name.as_deref()), (Some("ResourceClaim"), Some("a")));
    assert!(events[0].note.as_ref().unwrap().contains("gpu-9"));
}

#[tokio::test]
async fn a_runtime_without_cdi_is_warned_of() {
    let world = World::up(H100).await;
    std::fs::write(world.path("containerd.toml"), "version = 3\nenable_cdi = false\n").unwrap();
    let daemon = world.start(&[]).await;
    daemon.wait_log("this runtime has CDI off").await;
}

async fn check_exit(command: Command, text: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(command, &dir.path().join("log"));
    assert_ne!(daemon.ended().await, Some(0));
    let log = daemon.log();
    assert!(log.contains(text), "{text:?} is not in {log:?}");
}

#[tokio::test]
async fn a_daemon_that_cannot_start_says_why() {
    let world = World::up(H100).await;
    check_exit(world.command(&["--log-level", "x=y=z"]), "--log-level").await;
    check_exit(world.command(&["--mig-hold-off", "30"]), "--mig-hold-off").await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-node"));
    command.env_clear();
    check_exit(command, "--node-name").await;
    std::fs::write(world.path("k/plugins"), "in the way").unwrap();
    check_exit(world.command(&[]), "--kubelet-root").await;
}

#[tokio::test]
async fn the_claims_status_tells_what_its_devices_are() {
    use k8s_openapi::api::resource::v1::ResourceClaim;
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let claim = world.claim("a", &["gpu-0-mig-1g10gb-19-2"]);
    world.prepare(&claim).await.unwrap();
    let told = || world.api.get::<ResourceClaim>("ns", "a").and_then(|claim| claim.status?.devices);
    until("the claim has device status", || told().is_some()).await;
    let told = told().unwrap();
    let data = told[0].data.clone().unwrap().0;
    let (gpu, mig) = {
        let state = world.sim.read().unwrap();
        (state.gpus[0].uuid.clone(), state.gpus[0].instances[0].cis[0].uuid.clone())
    };
    assert_eq!((told.len(), told[0].device.as_str()), (1, "gpu-0-mig-1g10gb-19-2"));
    assert_eq!(
        data,
        serde_json::json!({"uuid": gpu, "migUUID": mig, "mode": "mig", "memory": data["memory"].clone()})
    );
    assert!(data["memory"].as_str().is_some_and(|memory| memory.ends_with("Mi")), "{data}");
}

#[tokio::test]
async fn a_refused_status_is_said_once_and_fails_no_prepare() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    world.api.fail_next("patch", "resourceclaims", 100, 403);
    for name in ["a", "b", "c"] {
        let claim = world.claim(name, &["gpu-0"]);
        world.prepare(&claim).await.unwrap();
        until("its status was tried", || world.api.count("patch", "resourceclaims") > 0).await;
        world.api.clear_requests();
        world.unprepare(&claim).await.unwrap();
    }
    daemon.wait_log("the status of claims cannot be written").await;
    assert_eq!(daemon.log().matches("the status of claims cannot be written").count(), 1);
    let said = || world.api.list::<Event>().into_iter().any(|e| e.reason.as_deref() == Some("StatusRefused"));
    until("an event says so", said).await;
}
