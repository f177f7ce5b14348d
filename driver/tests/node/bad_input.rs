//! Bad input gets an error for its claim that says what is wrong, and leaves
//! nothing behind that could never be prepared or unprepared again.

use crate::harness::{DRIVER, Daemon, H100, NODE, World, until};
use divvy_kubelet::dra::v1::Claim;
use serde_json::{Value, json};

fn result(driver: &str, pool: &str, device: &str) -> Value {
    json!({"request": "r", "driver": driver, "pool": pool, "device": device})
}

/// The claim is refused for these reasons, leaves nothing, and can be unprepared.
async fn check(world: &World, claim: &Claim, because: &[&str]) {
    let error = world.prepare(claim).await.unwrap_err();
    for text in because {
        assert!(error.contains(text), "{text:?} is not in {error:?}");
    }
    world.unprepare(claim).await.unwrap();
    world.expect_hardware(&["off"]);
    assert_eq!(world.traces(), [""; 0]);
}

#[tokio::test]
async fn a_claim_that_is_not_what_the_kubelet_says_is_refused() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    check(&world, &crate::harness::reference("a"), &["claim ns/a", "does not exist"]).await;
    check(&world, &world.put_claim("b", json!({})), &["claim ns/b", "not allocated"]).await;
    let replaced = Claim { uid: "old".to_owned(), ..world.claim("c", &["gpu-0"]) };
    check(&world, &replaced, &["claim ns/c", "replaced", "old"]).await;
    let odd = Claim { uid: "../../x".to_owned(), ..world.claim("d", &["gpu-0"]) };
    check(&world, &odd, &["uid"]).await;
}

#[tokio::test]
async fn a_claim_of_other_devices_is_refused() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let claim = |name, result| world.claim_with(name, vec![result], json!([]));
    check(&world, &claim("a", result(DRIVER, NODE, "gpu-9")), &["claim ns/a", "gpu-9"]).await;
    check(&world, &claim("b", result(DRIVER, NODE, "disk")), &["claim ns/b", "disk"]).await;
    check(&world, &claim("c", result("other.dev", NODE, "gpu-0")), &["claim ns/c", DRIVER]).await;
    check(&world, &claim("d", result(DRIVER, "node-2", "gpu-0")), &["claim ns/d", "node-2"]).await;
}

#[tokio::test]
async fn configuration_that_means_nothing_is_refused_with_the_field() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let api_version = divvy_api::names::CONFIG_API_VERSION;
    for (name, parameters, because) in [
        ("kind", json!({"apiVersion": api_version, "kind": "GpuConfiguration"}), "GpuConfiguration"),
        ("field", json!({"apiVersion": api_version, "kind": "GpuConfig", "sharing": {}}), "sharing"),
        ("version", json!({"apiVersion": "resource.divvy.dev/v9", "kind": "GpuConfig"}), "v9"),
    ] {
        let config = json!([{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}}]);
        let claim = world.claim_with(name, vec![result(DRIVER, NODE, "gpu-0")], config);
        check(&world, &claim, &[&format!("claim ns/{name}"), because]).await;
    }
}

#[tokio::test]
async fn without_a_cdi_directory_nothing_is_prepared_until_it_is_there() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    std::fs::remove_dir(world.cdi_dir()).unwrap();
    let claim = world.claim("a", &["gpu-0-mig-1g10gb-19-2"]);
    check(&world, &claim, &["claim ns/a", "cdi"]).await;
    std::fs::write(world.cdi_dir(), "not a directory").unwrap();
    check(&world, &claim, &["claim ns/a", "cdi"]).await;
    std::fs::remove_file(world.cdi_dir()).unwrap();
    std::fs::create_dir(world.cdi_dir()).unwrap();
    world.prepare(&claim).await.unwrap();
    drop(daemon);
}

#[tokio::test]
async fn a_full_disk_refuses_claims_and_forgets_none() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let world = World::up(H100).await;
    // A limit on file sizes is what a process can be given of a full disk.
    let plain = world.command(&[]);
    let mut command = std::process::Command::new("/bin/sh");
    command.env_clear().args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]);
    command.arg(plain.get_program()).args(plain.get_args());
    let daemon = Daemon::spawn(command, &world.path("log"));
    world.kubelet.wait_registered(DRIVER, 1, crate::harness::PATIENCE).await.unwrap();
    let held = world.claim("held", &["gpu-0-mig-1g10gb-19-0"]);
    let devices = world.prepare(&held).await.unwrap();
    let pid = Pid::from_raw(daemon.pid() as i32);
    let full = Rlimit { current: Some(0), maximum: None };
    prlimit(pid, Resource::Fsize, full).unwrap();
    let claim = world.claim("a", &["gpu-0-mig-1g10gb-19-2"]);
    let error = world.prepare(&claim).await.unwrap_err();
    assert!(error.contains("claim ns/a"), "{error}");
    world.expect_hardware(&["mig 19@0"]);
    assert_eq!(world.prepare(&held).await.unwrap(), devices);
    prlimit(pid, Resource::Fsize, Rlimit { current: None, maximum: None }).unwrap();
    world.prepare_until_ok(&claim).await;
    for claim in [claim, held] {
        world.unprepare(&claim).await.unwrap();
    }
    assert_eq!(world.traces(), [""; 0]);
}

#[tokio::test]
async fn a_lost_gpu_refuses_claims_and_lets_go_of_those_it_had() {
    let world = World::up("2xH100-SXM5-80GB").await;
    let _daemon = world.start(&[]).await;
    let claim = world.claim("a", &["gpu-0-mig-1g10gb-19-2"]);
    world.prepare(&claim).await.unwrap();
    world.change(|state| state.lose(0, false).unwrap());
    let other = world.claim("b", &["gpu-0-mig-1g10gb-19-3"]);
    let error = world.prepare(&other).await.unwrap_err();
    assert!(error.contains("claim ns/b"), "{error}");
    world.unprepare(&other).await.unwrap();
    // What was on a lost GPU is gone with it; at the latest when the node knows that.
    let deadline = std::time::Instant::now() + crate::harness::PATIENCE;
    while let Err(error) = world.unprepare(&claim).await {
        assert!(std::time::Instant::now() < deadline, "{error}");
    }
    assert_eq!(world.traces(), [""; 0]);
    world.prepare(&world.claim("c", &["gpu-1"])).await.unwrap();
}

#[tokio::test]
async fn a_damaged_record_is_set_aside_and_the_daemon_starts() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    world.prepare(&world.claim("a", &["gpu-0"])).await.unwrap();
    daemon.kill();
    let record = std::fs::read_dir(world.state_dir().join("claims")).unwrap().next().unwrap().unwrap().path();
    let bytes = std::fs::read(&record).unwrap();
    std::fs::write(&record, &bytes[..bytes.len() / 2]).unwrap();
    let _daemon = world.spawn(&[]);
    until("the record is set aside", || !record.exists()).await;
    let told = || {
        let events = world.api.list::<k8s_openapi::api::events::v1::Event>();
        events.iter().any(|event| event.reason.as_deref() == Some("RecordQuarantined"))
    };
    until("an event tells of it", told).await;
}
