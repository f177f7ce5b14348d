//! GPUs that several claims, or several pods of one claim, share by time slicing or MPS, with the fake
//! supervisor.

use super::supervisor::FakeSupervisor;
use super::test_node::{Driver, H100, TestNode, allocated, until};
use divvy_api::config::{AppliedConfig, DeviceConfig, Source};
use divvy_api::mps::{DIRECTORY, Phase};
use divvy_api::sharing::{Interval, MpsSettings, Sharing};
use divvy_api::{AllocatedClaim, Quantity};
use divvy_driver::claims::records::PreparedDevice;
use divvy_model::inventory::Condition;
use divvy_sim::Code;
use divvy_sim::control::{Pattern, When};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";
const TIMESLICE: &str = "share:gpu-0-timeslice";
const MPS_CLIENT: &str = "share:gpu-0-mps";

impl TestNode {
    /// Starts a driver whose node policy sets long time slices.
    pub(crate) async fn start_driver_long_timeslice(&self) -> Driver {
        let driver = self.start_driver().await;
        let policy = |_: &_| divvy_model::GpuPolicy { interval: Interval::Long, ..Default::default() };
        driver.gpus.set_policy(Arc::new(policy)).await;
        driver
    }

    fn supervisor(&self) -> FakeSupervisor {
        FakeSupervisor::start(&self.paths.run_dir)
    }

    /// Time slice and compute mode of each GPU, as `3/exclusive`.
    fn settings(&self) -> Vec<String> {
        let state = self.sim.read().unwrap();
        let mode = |gpu: &divvy_sim::state::Gpu| match gpu.compute_mode {
            0 => "default".to_owned(),
            3 => "exclusive".to_owned(),
            other => other.to_string(),
        };
        state.gpus.iter().map(|gpu| format!("{}/{}", gpu.timeslice, mode(gpu))).collect()
    }

    #[track_caller]
    fn expect_settings(&self, gpus: &[&str]) {
        assert_eq!(self.settings(), gpus);
    }

    /// The targets of MPS control daemons, with the UUID of GPU 0 replaced by `gpu-0`.
    fn mps_targets(&self) -> Vec<String> {
        let mps = self.paths.run_dir.join(DIRECTORY);
        let uuid = self.sim.read().unwrap().gpus[0].uuid.clone();
        TestNode::files(&mps).iter().map(|target| target.replace(&uuid, "gpu-0")).collect()
    }

    /// Checks that no claim has left files, MPS daemons or GPU settings.
    #[track_caller]
    fn expect_idle(&self) {
        self.expect_no_claim_files();
        assert_eq!(self.mps_targets(), [""; 0]);
        for settings in self.settings() {
            assert_eq!(settings, "0/default");
        }
    }

    /// The container edits of each device in a claim's CDI file.
    fn edits(&self, claim: &str) -> Vec<Value> {
        let file: Value = serde_json::from_slice(&std::fs::read(self.cdi_file(claim)).unwrap()).unwrap();
        file["devices"].as_array().unwrap().iter().map(|it| it["containerEdits"].clone()).collect()
    }

    fn fail_call(&self, call: &str, nth: Option<u64>) {
        let change = |state: &mut divvy_sim::State| {
            state.add_fault(Pattern::new(call), nth, When::Before, Code::Unknown);
            Ok(())
        };
        self.sim.update(change).unwrap();
    }

    fn clear_faults(&self) {
        let change = |state: &mut divvy_sim::State| {
            state.clear_faults(None);
            Ok(())
        };
        self.sim.update(change).unwrap();
    }
}

/// A claim with this configuration for all its devices.
fn configured(claim: &str, devices: &str, config: DeviceConfig) -> AllocatedClaim {
    let mut claim = allocated(claim, devices);
    for device in &mut claim.devices {
        device.configs = vec![AppliedConfig { config: config.clone(), source: Source::Request }];
    }
    claim
}

async fn prepare_configured(
    driver: &Driver,
    claim: &str,
    devices: &str,
    sharing: Sharing,
) -> Vec<PreparedDevice> {
    let config = match (devices.contains("-mig-"), sharing) {
        (true, Sharing::Mps(settings)) => DeviceConfig::MigDeviceConfig { sharing: Some(settings) },
        (_, sharing) => DeviceConfig::GpuConfig { sharing: Some(sharing) },
    };
    driver.engine.prepare(&configured(claim, devices, config)).await.unwrap()
}

/// Prepares a claim on a MIG instance whose pods are MPS clients with 50 % of the threads and 4 GiB each.
pub(crate) async fn prepare_mps_slice(driver: &Driver, claim: &str) {
    let settings = MpsSettings {
        active_thread_percentage: Some(50),
        pinned_memory: Some(Quantity::bytes(4 << 30)),
        ..MpsSettings::default()
    };
    prepare_configured(driver, claim, SLICE, Sharing::Mps(settings)).await;
}

#[tokio::test]
async fn first_timeslice_sets_the_interval_and_last_resets_it() {
    let node = TestNode::new(H100);
    let driver = node.start_driver_long_timeslice().await;
    driver.prepare("a", TIMESLICE).await.unwrap();
    node.expect_settings(&["3/default"]);
    // The second claim changes no setting, so a failing nvidia-smi does not matter.
    node.fail_call("compute-policy", None);
    let answer = driver.prepare("b", TIMESLICE).await.unwrap();
    assert_eq!(answer[0].share_id.as_ref().unwrap().as_str(), "b-0");
    assert_eq!(answer[0].cdi_ids, ["gpu.divvy.dev/claim=b-gpu-0-timeslice-b-0"]);
    for device in ["gpu-0", SLICE, MPS_CLIENT] {
        driver.expect_refused("c", device, "in mode timeslice").await;
    }
    driver.unprepare("a").await.unwrap();
    node.expect_settings(&["3/default"]);
    node.clear_faults();
    driver.unprepare("b").await.unwrap();
    node.expect_idle();
    driver.prepare("c", "gpu-0").await.unwrap();
    driver.expect_refused("a", TIMESLICE, "holds it in mode whole").await;
}

#[tokio::test]
async fn h9_default_interval_needs_no_nvidia_smi() {
    let node = TestNode::new(H100);
    std::fs::remove_file(node.sim.root().join("usr/bin/nvidia-smi")).unwrap();
    let driver = node.start_driver().await;
    driver.prepare("a", TIMESLICE).await.unwrap();
    driver.prepare("b", TIMESLICE).await.unwrap();
    driver.stop().await;
    let driver = node.start_driver().await;
    assert!(driver.report.failed.is_empty(), "{:?}", driver.report);
    for claim in ["a", "b"] {
        driver.unprepare(claim).await.unwrap();
    }
    node.expect_idle();
}

#[tokio::test]
async fn timeslice_claim_disables_mig_mode() {
    let node = TestNode::new(H100);
    let driver = node.start_driver_long_timeslice().await;
    driver.prepare("a", SLICE).await.unwrap();
    driver.expect_refused("b", TIMESLICE, "holds it in mode mig").await;
    driver.unprepare("a").await.unwrap();
    node.expect_hardware(&["mig"]);
    driver.prepare("b", TIMESLICE).await.unwrap();
    node.expect_hardware(&["off"]);
}

#[tokio::test]
async fn failed_interval_change_is_reported_and_retried() {
    let node = TestNode::new(H100);
    let driver = node.start_driver_long_timeslice().await;
    node.fail_call("compute-policy", Some(1));
    driver.expect_refused("a", TIMESLICE, "cannot set time slice Long").await;
    node.expect_idle();
    driver.prepare("a", TIMESLICE).await.unwrap();
    node.fail_call("compute-policy", None);
    driver.unprepare("a").await.unwrap();
    driver.expect_refused("b", TIMESLICE, "cannot reset time slice").await;
    driver.expect_refused("b", "gpu-0", "nvidia-smi failed").await;
    node.clear_faults();
    driver.prepare("b", TIMESLICE).await.unwrap();
    node.expect_settings(&["3/default"]);
    driver.unprepare("b").await.unwrap();
    node.expect_idle();
}

#[tokio::test]
async fn first_mps_client_starts_the_daemon_and_last_stops_it() {
    let node = TestNode::new(H100);
    let supervisor = node.supervisor();
    let driver = node.start_driver().await;
    driver.prepare("a", "share:gpu-0-mps/30/10Gi").await.unwrap();
    node.expect_settings(&["0/exclusive"]);
    assert_eq!(node.mps_targets(), ["gpu-0"]);
    assert_eq!(
        supervisor.devices().into_values().collect::<Vec<_>>(),
        [node.sim.read().unwrap().gpus[0].uuid.clone()]
    );
    driver.prepare("b", "share:gpu-0-mps/20/40Gi").await.unwrap();
    driver.prepare("c", "share:gpu-0-mps/10/1Gi").await.unwrap();
    assert_eq!(supervisor.desired_history(), ["30/10240", "30/40960"], "the default is the largest client's");
    let env = &node.edits("b")[0]["env"];
    assert_eq!(env[1], "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20");
    assert_eq!(env[2], "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=40960M");
    for device in ["gpu-0", SLICE, TIMESLICE] {
        driver.expect_refused("d", device, "in mode mps").await;
    }
    for claim in ["b", "a"] {
        driver.unprepare(claim).await.unwrap();
        node.expect_settings(&["0/exclusive"]);
    }
    driver.unprepare("c").await.unwrap();
    node.expect_idle();
    driver.prepare("d", SLICE).await.unwrap();
}

#[tokio::test]
async fn pipe_and_shared_memory_are_open_to_clients_of_any_user() {
    use std::os::unix::fs::PermissionsExt;
    let node = TestNode::new(H100);
    let _supervisor = node.supervisor();
    let driver = node.start_driver().await;
    driver.prepare("a", MPS_CLIENT).await.unwrap();
    let mounts = node.edits("a")[0]["mounts"].as_array().unwrap().clone();
    for at in ["/tmp/nvidia-mps", "/dev/shm"] {
        let mount = mounts.iter().find(|mount| mount["containerPath"] == at).unwrap();
        let mode = std::fs::metadata(mount["hostPath"].as_str().unwrap()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o1777, "{mount}");
    }
}

#[tokio::test]
async fn mps_daemon_that_never_starts_fails_the_claim() {
    let node = TestNode::new(H100);
    let supervisor = node.supervisor();
    supervisor.set(Phase::Down { cause: "no such program".into() });
    let mut driver = node.start_driver_with_timeout(Duration::from_secs(8)).await;
    let error = driver.prepare("a", MPS_CLIENT).await.unwrap_err();
    let error = divvy_api::text::error_chain(&error);
    for part in ["ns/a", "gpu-0-mps", "down: no such program", "check that divvy-mps-supervisor runs"] {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
    until("the claim is undone", || driver.engine.held().unwrap().is_empty()).await;
    node.expect_idle();
    driver.stop().await;
    driver = node.start_driver().await;
    supervisor.set(Phase::Ready);
    driver.prepare("a", MPS_CLIENT).await.unwrap();
}

#[tokio::test]
async fn missing_supervisor_fails_only_mps_claims() {
    let node = TestNode::new(H100);
    let driver = node.start_driver_with_timeout(Duration::from_secs(8)).await;
    driver.expect_refused("a", MPS_CLIENT, "no state reported").await;
    until("the claim is undone", || driver.engine.held().unwrap().is_empty()).await;
    node.expect_idle();
    driver.prepare("b", TIMESLICE).await.unwrap();
}

#[tokio::test]
async fn two_mps_shares_of_one_claim_use_one_daemon() {
    let node = TestNode::new(H100);
    let supervisor = node.supervisor();
    let driver = node.start_driver_long_timeslice().await;
    let answer = driver.prepare("a", "share:gpu-0-mps/10/1Gi share:gpu-0-mps/20/2Gi").await.unwrap();
    let ids: Vec<&str> = answer.iter().map(|device| device.cdi_ids[0].as_str()).collect();
    assert_eq!(ids, ["gpu.divvy.dev/claim=a-gpu-0-mps-a-0", "gpu.divvy.dev/claim=a-gpu-0-mps-a-1"]);
    assert_eq!(supervisor.desired_history(), ["20/2048"]);
    let timeouts: Vec<Value> = node.edits("a").iter().map(|edits| edits["env"][1].clone()).collect();
    assert_eq!(timeouts, ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20"]);
    assert_eq!(driver.prepare("a", "share:gpu-0-mps/10/1Gi share:gpu-0-mps/20/2Gi").await.unwrap(), answer);
    driver.unprepare("a").await.unwrap();
    node.expect_idle();
    driver.prepare("b", &format!("{TIMESLICE} {TIMESLICE}")).await.unwrap();
    assert_eq!(node.edits("b").len(), 2);
    driver.unprepare("b").await.unwrap();
    node.expect_idle();
}

#[tokio::test]
async fn one_claim_may_use_different_modes_on_different_gpus() {
    let mut node = TestNode::new(&format!("3x{H100}"));
    node.hold_off = Duration::ZERO;
    let _supervisor = node.supervisor();
    let driver = node.start_driver_long_timeslice().await;
    let devices = "gpu-0-mig-1g10gb-19-2 share:gpu-1-timeslice share:gpu-2-mps gpu-0-mig-3g40gb-9-4";
    let answer = driver.prepare("a", devices).await.unwrap();
    node.expect_hardware(&["mig 19@2+ 9@4+", "off", "off"]);
    node.expect_settings(&["0/default", "3/default", "0/exclusive"]);
    assert_eq!(driver.prepare("a", devices).await.unwrap(), answer);
    // The claim was reallocated, with other alternatives of its requests.
    driver.prepare("a", "share:gpu-0-timeslice gpu-1 share:gpu-2-timeslice").await.unwrap();
    until("MIG mode is off", || node.hardware() == ["off", "off", "off"]).await;
    node.expect_settings(&["3/default", "0/default", "3/default"]);
    driver.unprepare("a").await.unwrap();
    node.expect_idle();
}

#[tokio::test]
async fn pods_of_one_claim_share_its_exclusive_device() {
    let node = TestNode::new(H100);
    let supervisor = node.supervisor();
    let driver = node.start_driver().await;
    prepare_configured(&driver, "a", "gpu-0", Sharing::TimeSlicing(Interval::Short)).await;
    node.expect_settings(&["1/default"]);
    driver.expect_refused("b", TIMESLICE, "holds it in mode whole").await;
    driver.unprepare("a").await.unwrap();
    node.expect_idle();

    let settings = MpsSettings {
        active_thread_percentage: Some(50),
        pinned_memory: Some(Quantity::bytes(4 << 30)),
        ..MpsSettings::default()
    };
    prepare_configured(&driver, "a", "gpu-0", Sharing::Mps(settings)).await;
    node.expect_settings(&["0/exclusive"]);
    assert_eq!(node.edits("a")[0]["env"][2], "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M");
    driver.unprepare("a").await.unwrap();
    node.expect_idle();

    prepare_mps_slice(&driver, "a").await;
    node.expect_settings(&["0/default"]);
    assert_eq!(node.mps_targets(), ["gpu-0-19-2"]);
    let uuid = node.sim.read().unwrap().gpus[0].instances[0].cis[0].uuid.clone();
    assert_eq!(supervisor.devices().into_values().collect::<Vec<_>>(), [uuid]);
    assert_eq!(supervisor.desired_history(), ["50/4096", "50/4096"]);
    driver.prepare("b", "gpu-0-mig-1g10gb-19-3").await.unwrap();
    driver.unprepare("a").await.unwrap();
    node.expect_hardware(&["mig 19@3+"]);
    driver.unprepare("b").await.unwrap();
    node.expect_idle();
}

#[tokio::test]
async fn settings_of_an_administrator_are_kept() {
    let node = TestNode::new(H100);
    let change = |state: &mut divvy_sim::State| {
        state.gpus[0].timeslice = 2;
        state.gpus[0].compute_mode = 3;
        Ok(())
    };
    node.sim.update(change).unwrap();
    let driver = node.start_driver().await;
    driver.prepare("a", "gpu-0").await.unwrap();
    driver.unprepare("a").await.unwrap();
    node.expect_settings(&["2/exclusive"]);
}

#[tokio::test]
async fn unhealthy_mps_daemon_sets_a_gpu_condition() {
    let node = TestNode::new(H100);
    let supervisor = node.supervisor();
    let driver = node.start_driver().await;
    driver.prepare("a", MPS_CLIENT).await.unwrap();
    let daemons = driver.engine.mps_daemons();
    let incarnation = || daemons.borrow().values().next().and_then(|daemon| daemon.incarnation);
    until("the daemon is reported", || incarnation() == Some(1)).await;
    supervisor.set(Phase::Fault { cause: "server 7".into() });
    let conditions = || driver.gpus.inventory().borrow().gpus[0].conditions.clone();
    let unhealthy = Condition::Mps { cause: "fault: server 7".into() };
    until("the GPU has a condition", || conditions() == std::slice::from_ref(&unhealthy)).await;
    driver.expect_refused("b", MPS_CLIENT, "fault: server 7").await;
    assert!(driver.engine.prepared(&"a".into()).is_some());
    supervisor.set(Phase::Ready);
    supervisor.restart();
    until("the condition is gone", || conditions().is_empty()).await;
    until("the restart is reported", || incarnation() == Some(2)).await;
    driver.prepare("b", MPS_CLIENT).await.unwrap();
    for claim in ["a", "b"] {
        driver.unprepare(claim).await.unwrap();
    }
    until("no daemon is watched", || daemons.borrow().is_empty()).await;
}

#[tokio::test]
async fn concurrent_claims_share_one_gpu() {
    let node = TestNode::new(H100);
    let supervisor = node.supervisor();
    let driver = node.start_driver_long_timeslice().await;
    for device in [MPS_CLIENT, TIMESLICE] {
        let all = |prepare: bool| {
            let engine = driver.engine.clone();
            (0..8).map(move |n| {
                let (engine, claim) = (engine.clone(), allocated(&format!("c{n}"), device));
                tokio::spawn(async move {
                    match prepare {
                        true => drop(engine.prepare(&claim).await.unwrap()),
                        false => engine.unprepare(&claim.claim.uid).await.unwrap(),
                    }
                })
            })
        };
        for prepared in all(true).collect::<Vec<_>>() {
            prepared.await.unwrap();
        }
        assert_eq!(driver.engine.held().unwrap().len(), 8);
        for released in all(false).collect::<Vec<_>>() {
            released.await.unwrap();
        }
        node.expect_idle();
    }
    assert_eq!(supervisor.desired_history().len(), 1);
}

#[tokio::test]
async fn concurrent_drivers_count_each_others_shares() {
    let node = TestNode::new(H100);
    let _supervisor = node.supervisor();
    let (old, new) = (node.start_driver_long_timeslice().await, node.start_driver_long_timeslice().await);
    old.prepare("a", MPS_CLIENT).await.unwrap();
    new.prepare("b", MPS_CLIENT).await.unwrap();
    old.unprepare("a").await.unwrap();
    node.expect_settings(&["0/exclusive"]);
    old.expect_refused("c", TIMESLICE, "in mode mps").await;
    new.unprepare("b").await.unwrap();
    node.expect_idle();
    old.prepare("c", TIMESLICE).await.unwrap();
    new.prepare("d", TIMESLICE).await.unwrap();
    old.unprepare("d").await.unwrap();
    node.expect_settings(&["3/default"]);
    new.unprepare("c").await.unwrap();
    node.expect_idle();
}

#[tokio::test]
async fn restart_keeps_intervals_and_mps_daemons() {
    let node = TestNode::new(&format!("2x{H100}"));
    let supervisor = node.supervisor();
    let driver = node.start_driver_long_timeslice().await;
    let before = driver.prepare("a", "share:gpu-0-timeslice share:gpu-1-mps").await.unwrap();
    driver.stop().await;
    let driver = node.start_driver().await;
    assert!(driver.report.restored.is_empty() && driver.report.failed.is_empty(), "{:?}", driver.report);
    assert_eq!(driver.engine.prepared(&"a".into()).unwrap(), before);
    node.expect_settings(&["3/default", "0/exclusive"]);
    assert_eq!(supervisor.desired_history().len(), 1);
    // The interval of the first share stays, although the policy of the new driver differs.
    driver.prepare("b", "share:gpu-0-timeslice").await.unwrap();
    driver.unprepare("a").await.unwrap();
    node.expect_settings(&["3/default", "0/default"]);
    driver.unprepare("b").await.unwrap();
    node.expect_idle();
}

#[tokio::test]
async fn intervals_and_mps_daemons_are_restored_after_a_reboot() {
    let node = TestNode::new(&format!("2x{H100}"));
    let supervisor = node.supervisor();
    let driver = node.start_driver_long_timeslice().await;
    for claim in ["a", "b"] {
        driver.prepare(claim, "share:gpu-0-timeslice share:gpu-1-mps").await.unwrap();
    }
    driver.stop().await;
    drop(supervisor);
    std::fs::remove_dir_all(&node.paths.run_dir).unwrap();
    node.reboot_gpus();
    node.expect_settings(&["0/default", "0/default"]);

    // The supervisor starts late. The driver's start waits for it only briefly and reports the failure.
    let driver = node.start_driver().await;
    assert_eq!(driver.report.failed.len(), 2, "{:?}", driver.report);
    assert!(driver.report.failed[0].1.contains("divvy-mps-supervisor"), "{:?}", driver.report);
    node.expect_settings(&["3/default", "0/exclusive"]);
    let healthy = || driver.engine.mps_daemons().borrow().values().all(|daemon| daemon.failure.is_none());
    until("the daemon is reported as failed", || !healthy()).await;
    let _supervisor = node.supervisor();
    until("the daemon is healthy", healthy).await;
    for claim in ["a", "b"] {
        driver.unprepare(claim).await.unwrap();
    }
    node.expect_idle();
}

#[tokio::test]
async fn failed_interval_restore_is_retried() {
    let node = TestNode::new(H100);
    let driver = node.start_driver_long_timeslice().await;
    driver.prepare("a", TIMESLICE).await.unwrap();
    driver.stop().await;
    node.reboot_gpus();
    node.fail_call("compute-policy", Some(1));
    let driver = node.start_driver().await;
    assert_eq!(driver.report.failed.len(), 1, "{:?}", driver.report);
    until("the interval is set", || node.settings() == ["3/default"]).await;
}

#[tokio::test]
async fn mps_daemons_without_a_record_are_stopped() {
    let node = TestNode::new(H100);
    let supervisor = node.supervisor();
    let driver = node.start_driver().await;
    driver.prepare("a", MPS_CLIENT).await.unwrap();
    driver.stop().await;
    std::fs::remove_file(node.records_dir().join("a.json")).unwrap();
    std::fs::remove_file(node.cdi_file("a")).unwrap();
    let _node = node.start_driver().await;
    until("the daemon is gone", || node.mps_targets().is_empty()).await;
    node.expect_idle();
    drop(supervisor);
}
