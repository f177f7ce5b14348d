//! Prepare and unprepare on working hardware.

use super::test_node::{A100, H100, TestNode, allocated, until};
use divvy_driver::claims::records::HeldState;
use std::time::Duration;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

#[tokio::test]
async fn whole_gpu_is_prepared_and_released() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    let devices = driver.prepare("a", "gpu-0").await.unwrap();
    assert_eq!(devices.len(), 1);
    assert_eq!(devices[0].device.as_str(), "gpu-0");
    assert_eq!(devices[0].cdi_ids, ["gpu.divvy.dev/claim=a-gpu-0"]);
    assert!(node.cdi_file("a").exists());
    node.expect_hardware(&["off"]);
    driver.expect_refused("b", "gpu-0", "claim ns/a").await;
    driver.expect_refused("b", SLICE, "claim ns/a").await;
    driver.unprepare("a").await.unwrap();
    node.expect_no_claim_files();
    driver.prepare("b", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn mig_instance_is_created_and_mig_mode_ends_with_it() {
    let mut node = TestNode::new(H100);
    node.hold_off = Duration::ZERO;
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    node.expect_hardware(&["mig 19@2+"]);
    driver.expect_refused("b", "gpu-0", "claim ns/a").await;
    driver.expect_refused("b", "gpu-0-mig-3g40gb-9-0", "claim ns/a").await;
    driver.prepare("b", "gpu-0-mig-3g40gb-9-4").await.unwrap();
    node.expect_hardware(&["mig 19@2+ 9@4+"]);
    driver.unprepare("a").await.unwrap();
    node.expect_hardware(&["mig 9@4+"]);
    driver.unprepare("b").await.unwrap();
    until("MIG mode is off", || node.hardware() == ["off"]).await;
    node.expect_no_claim_files();
    driver.prepare("c", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn mig_mode_stays_on_until_hold_off_or_whole_gpu_claim() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    driver.unprepare("a").await.unwrap();
    node.expect_hardware(&["mig"]);
    driver.prepare("b", SLICE).await.unwrap();
    driver.unprepare("b").await.unwrap();
    node.expect_hardware(&["mig"]);
    driver.prepare("c", "gpu-0").await.unwrap();
    node.expect_hardware(&["off"]);
    driver.expect_refused("d", SLICE, "claim ns/c").await;
}

#[tokio::test]
async fn mig_mode_is_disabled_after_a_restart_too() {
    let mut node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    driver.unprepare("a").await.unwrap();
    driver.stop().await;
    node.expect_hardware(&["mig"]);
    node.hold_off = Duration::ZERO;
    let _node = node.start_driver().await;
    until("MIG mode is off", || node.hardware() == ["off"]).await;
}

#[tokio::test]
async fn mig_mode_set_by_an_administrator_stays() {
    let mut node = TestNode::new(H100);
    node.hold_off = Duration::ZERO;
    node.sim.update(|state| state.set_mig_mode(0, true)).unwrap();
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    driver.unprepare("a").await.unwrap();
    driver.stop().await;
    node.expect_hardware(&["mig"]);
}

#[tokio::test]
async fn repeated_prepare_returns_the_same_bytes() {
    let node = TestNode::new(&format!("2x{H100}"));
    let devices = "gpu-1 gpu-0-mig-1g10gb-19-2 gpu-0-mig-3g40gb-9-4";
    let driver = node.start_driver().await;
    let first = driver.prepare("a", devices).await.unwrap();
    let file = std::fs::read(node.cdi_file("a")).unwrap();
    assert_eq!(driver.prepare("a", devices).await.unwrap(), first);
    assert_eq!(driver.engine.prepared(&"a".into()).unwrap(), first);
    driver.stop().await;

    let driver = node.start_driver().await;
    assert_eq!(driver.engine.prepared(&"a".into()).unwrap(), first);
    assert_eq!(driver.prepare("a", devices).await.unwrap(), first);
    assert_eq!(std::fs::read(node.cdi_file("a")).unwrap(), file);
    node.expect_hardware(&["mig 19@2+ 9@4+", "off"]);
}

#[tokio::test]
async fn lost_cdi_file_is_rewritten() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    let first = driver.prepare("a", SLICE).await.unwrap();
    let file = std::fs::read(node.cdi_file("a")).unwrap();
    std::fs::remove_file(node.cdi_file("a")).unwrap();
    assert_eq!(driver.engine.prepared(&"a".into()), None);
    assert_eq!(driver.prepare("a", SLICE).await.unwrap(), first);
    assert_eq!(std::fs::read(node.cdi_file("a")).unwrap(), file);
}

#[tokio::test]
async fn unprepare_of_an_unknown_claim_succeeds() {
    let driver = TestNode::new(H100);
    let driver = driver.start_driver().await;
    for uid in ["never-seen", "", "../../etc/passwd", ".", &"x".repeat(5000)] {
        driver.unprepare(uid).await.unwrap();
        assert_eq!(driver.engine.prepared(&uid.into()), None);
    }
    driver.expect_refused("../a", "gpu-0", "cannot be the UID of a claim").await;
}

#[tokio::test]
async fn concurrent_claims_on_one_gpu_get_distinct_instances() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    let names: Vec<String> = (0..7).map(|start| format!("gpu-0-mig-1g10gb-19-{start}")).collect();
    let all = names.iter().enumerate().map(|(n, device)| {
        let (engine, claim) = (driver.engine.clone(), allocated(&format!("c{n}"), device));
        tokio::spawn(async move { engine.prepare(&claim).await })
    });
    for prepared in all.collect::<Vec<_>>() {
        prepared.await.unwrap().unwrap();
    }
    node.expect_hardware(&["mig 19@0+ 19@1+ 19@2+ 19@3+ 19@4+ 19@5+ 19@6+"]);
    let all = (0..7).map(|n| {
        let engine = driver.engine.clone();
        tokio::spawn(async move { engine.unprepare(&format!("c{n}").as_str().into()).await })
    });
    for released in all.collect::<Vec<_>>() {
        released.await.unwrap().unwrap();
    }
    node.expect_hardware(&["mig"]);
    node.expect_no_claim_files();
}

#[tokio::test]
async fn unreadable_record_is_not_an_absent_claim() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", "gpu-0-timeslice").await.unwrap();
    let record = node.records_dir().join("b.json");
    // A read fails with ELOOP.
    std::os::unix::fs::symlink(&record, &record).unwrap();
    let error = driver.engine.held().unwrap_err().to_string();
    assert!(error.contains("b.json cannot be read"), "{error}");
    assert!(driver.engine.held_parts().is_err());
    assert_eq!(driver.engine.gauges().claims, []);
    std::fs::remove_file(&record).unwrap();
    // Not a record.
    std::fs::create_dir(&record).unwrap();
    assert_eq!(driver.engine.held().unwrap().len(), 1);
    assert_eq!(driver.engine.held_parts().unwrap().len(), 1);
}

#[tokio::test]
async fn exactly_one_of_two_conflicting_claims_succeeds() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    let (one, two) = tokio::join!(driver.prepare("a", "gpu-0"), driver.prepare("b", SLICE));
    assert_ne!(one.is_ok(), two.is_ok());
    assert_eq!(driver.engine.held().unwrap().len(), 1);
    assert_eq!(driver.engine.held().unwrap()[0].state, HeldState::Prepared);
}

#[tokio::test]
async fn reallocation_of_a_claim_replaces_the_first() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    let moved = driver.prepare("a", "gpu-0-mig-1g10gb-19-5").await.unwrap();
    assert_eq!(moved[0].device.as_str(), "gpu-0-mig-1g10gb-19-5");
    node.expect_hardware(&["mig 19@5+"]);
}

#[tokio::test]
async fn ampere_mig_mode_is_never_changed() {
    let node = TestNode::new(&format!("2x{A100}"));
    node.sim.update(|state| state.set_mig_mode(0, true)).unwrap();
    let driver = node.start_driver().await;
    driver.expect_refused("a", "gpu-0", "needs MIG mode off").await;
    driver.expect_refused("a", "gpu-1-mig-1g5gb-19-0", "needs MIG mode on").await;
    driver.prepare("a", "gpu-0-mig-1g5gb-19-0").await.unwrap();
    driver.prepare("b", "gpu-1").await.unwrap();
    node.expect_hardware(&["mig 19@0+", "off"]);
    driver.unprepare("a").await.unwrap();
    driver.unprepare("b").await.unwrap();
    node.expect_hardware(&["mig", "off"]);
}

#[tokio::test]
async fn admin_access_reserves_nothing() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    let answer = driver.prepare("admin", "admin:gpu-0 admin:gpu-0-mig-3g40gb-9-4").await.unwrap();
    assert_eq!(answer.len(), 2);
    node.expect_hardware(&["mig 19@2+"]);
    driver.unprepare("a").await.unwrap();
    driver.prepare("b", "gpu-0").await.unwrap();
    driver.unprepare("admin").await.unwrap();
    driver.unprepare("b").await.unwrap();
    node.expect_no_claim_files();
    // A claim may own a device and have admin access to it. The CDI file lists the device once.
    let both = driver.prepare("c", "gpu-0 admin:gpu-0").await.unwrap();
    assert_eq!(both[0].cdi_ids, both[1].cdi_ids);
    let file: serde_json::Value =
        serde_json::from_slice(&std::fs::read(node.cdi_file("c")).unwrap()).unwrap();
    assert_eq!(file["devices"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn foreign_instance_is_claimed_and_kept() {
    let mut node = TestNode::new(H100);
    node.hold_off = Duration::ZERO;
    node.sim.update(|state| state.set_mig_mode(0, true)).unwrap();
    node.sim.update(|state| state.create_gi(0, 9, None)).unwrap();
    let node = node;
    let foreign = node.hardware()[0].replace("mig ", "");
    let driver = node.start_driver().await;
    assert_eq!(driver.report.unmanaged.len(), 1);
    let device = format!("gpu-0-mig-3g40gb-{}", foreign.replace('@', "-"));
    driver.expect_refused("b", "gpu-0", "which Divvy did not create").await;
    driver.prepare("a", &device).await.unwrap();
    node.expect_hardware(&[&format!("mig {foreign}+")]);
    driver.expect_refused("b", "gpu-0", "claim ns/a").await;
    driver.unprepare("a").await.unwrap();
    node.expect_hardware(&[&format!("mig {foreign}")]);
    node.expect_no_claim_files();
}

#[tokio::test]
async fn concurrent_drivers_see_each_others_claims() {
    let node = TestNode::new(H100);
    let (old, new) = (node.start_driver().await, node.start_driver().await);
    old.prepare("a", SLICE).await.unwrap();
    new.expect_refused("b", "gpu-0", "claim ns/a").await;
    new.expect_refused("b", SLICE, "claim ns/a").await;
    new.prepare("b", "gpu-0-mig-1g10gb-19-3").await.unwrap();
    let answer = old.prepare("b", "gpu-0-mig-1g10gb-19-3").await.unwrap();
    assert_eq!(new.prepare("b", "gpu-0-mig-1g10gb-19-3").await.unwrap(), answer);
    old.unprepare("b").await.unwrap();
    new.unprepare("a").await.unwrap();
    node.expect_no_claim_files();
    new.prepare("c", "gpu-0").await.unwrap();
    node.expect_hardware(&["off"]);
    old.expect_refused("d", SLICE, "claim ns/c").await;
}

#[tokio::test]
async fn missing_device_node_is_created_without_blocking_others() {
    use std::os::unix::fs::PermissionsExt;
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", "gpu-0").await.unwrap();
    // A helper that finishes only when this test, which runs on the same thread, creates a file.
    let (device, log, go) =
        (node.sim.root().join("dev/nvidia0"), node.sim.root().join("helper-log"), node.sim.root().join("go"));
    let helper = node.sim.root().join("usr/bin/nvidia-modprobe");
    let script = format!(
        "#!/bin/sh\necho \"$*\" >> {}\nwhile [ ! -e {} ]; do sleep 0.01; done\n: > {}\n",
        log.display(),
        go.display(),
        device.display()
    );
    std::fs::remove_file(&device).unwrap();
    // A copy, because a file that this process has open for writing cannot be executed.
    let part = node.sim.root().join("helper");
    std::fs::write(&part, script).unwrap();
    std::fs::set_permissions(&part, std::fs::Permissions::from_mode(0o755)).unwrap();
    // The simulator may have created one.
    let _ = std::fs::remove_file(&helper);
    assert!(std::process::Command::new("cp").arg("-p").args([&part, &helper]).status().unwrap().success());
    let serving = async {
        until("the helper runs", || log.exists()).await;
        std::fs::write(&go, "").unwrap();
    };
    let (again, ()) = tokio::join!(driver.prepare("a", "gpu-0"), serving);
    again.unwrap();
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "-c 0\n", "the helper runs once and is not killed");
    assert!(device.exists());
}
