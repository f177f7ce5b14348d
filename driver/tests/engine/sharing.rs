//! GPUs that several claims, or several pods of one claim, share: in turns and
//! by MPS. The keeper is one that obeys at once.

mod restart;

use super::keeper::FakeKeeper;
use super::world::{H100, Node, World, allocated, until};
use divvy_api::config::{AppliedConfig, DeviceConfig, Source};
use divvy_api::mps::{DIRECTORY, Phase};
use divvy_api::sharing::{Interval, MpsSettings, Sharing};
use divvy_api::{AllocatedClaim, Quantity};
use divvy_driver::engine::PreparedDevice;
use divvy_model::inventory::Condition;
use divvy_sim::Code;
use divvy_sim::control::{Pattern, When};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";
const TURNS: &str = "share:gpu-0-timeslice";
const CLIENT: &str = "share:gpu-0-mps";

impl World {
    /// Starts a driver whose administrator chose long time slices.
    async fn start_long(&self) -> Node {
        let node = self.start().await;
        let policy = |_: &_| divvy_model::GpuPolicy { interval: Interval::Long, ..Default::default() };
        node.gpus.set_policy(Arc::new(policy)).await;
        node
    }

    fn keeper(&self) -> FakeKeeper {
        FakeKeeper::start(&self.paths.run_dir)
    }

    /// Time slice and compute mode of the GPUs, as `3/exclusive`.
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

    /// Targets of MPS control daemons, less the UUID.
    fn daemons(&self) -> Vec<String> {
        let mps = self.paths.run_dir.join(DIRECTORY);
        let uuid = self.sim.read().unwrap().gpus[0].uuid.clone();
        World::files(&mps).iter().map(|target| target.replace(&uuid, "gpu-0")).collect()
    }

    /// Nothing is left of any claim, on the hardware neither.
    #[track_caller]
    fn expect_rest(&self) {
        self.expect_no_trace();
        assert_eq!(self.daemons(), [""; 0]);
        for settings in self.settings() {
            assert_eq!(settings, "0/default");
        }
    }

    /// Edits of each device in a claim's CDI file.
    fn edits(&self, claim: &str) -> Vec<Value> {
        let file: Value = serde_json::from_slice(&std::fs::read(self.cdi_file(claim)).unwrap()).unwrap();
        file["devices"].as_array().unwrap().iter().map(|it| it["containerEdits"].clone()).collect()
    }

    fn fault(&self, call: &str, nth: Option<u64>) {
        let change = |state: &mut divvy_sim::State| {
            state.add_fault(Pattern::new(call), nth, When::Before, Code::Unknown);
            Ok(())
        };
        self.sim.update(change).unwrap();
    }

    fn no_faults(&self) {
        let change = |state: &mut divvy_sim::State| {
            state.clear_faults(None);
            Ok(())
        };
        self.sim.update(change).unwrap();
    }
}

/// The claim with this configuration for all its devices.
fn configured(claim: &str, devices: &str, config: DeviceConfig) -> AllocatedClaim {
    let mut claim = allocated(claim, devices);
    for device in &mut claim.devices {
        device.configs = vec![AppliedConfig { config: config.clone(), source: Source::Request }];
    }
    claim
}

async fn prepare_configured(
    node: &Node,
    claim: &str,
    devices: &str,
    sharing: Sharing,
) -> Vec<PreparedDevice> {
    let config = match (devices.contains("-mig-"), sharing) {
        (true, Sharing::Mps(settings)) => DeviceConfig::MigDeviceConfig { sharing: Some(settings) },
        (_, sharing) => DeviceConfig::GpuConfig { sharing: Some(sharing) },
    };
    node.engine.prepare(&configured(claim, devices, config)).await.unwrap()
}

/// A claim on an instance whose pods are MPS clients, each of half of it and 4 GiB.
pub(crate) async fn prepare_mps_slice(node: &Node, claim: &str) {
    let settings = MpsSettings {
        active_thread_percentage: Some(50),
        pinned_memory: Some(Quantity::bytes(4 << 30)),
        ..MpsSettings::default()
    };
    prepare_configured(node, claim, SLICE, Sharing::Mps(settings)).await;
}

#[tokio::test]
async fn the_first_time_slice_decides_and_the_last_gives_the_gpu_back() {
    let world = World::up(H100);
    let node = world.start_long().await;
    node.prepare("a", TURNS).await.unwrap();
    world.expect_settings(&["3/default"]);
    // Whoever is second asks nobody: a program that fails is not run.
    world.fault("compute-policy", None);
    let answer = node.prepare("b", TURNS).await.unwrap();
    assert_eq!(answer[0].share_id.as_ref().unwrap().as_str(), "b-0");
    assert_eq!(answer[0].cdi_ids, ["gpu.divvy.dev/claim=b-gpu-0-timeslice-b-0"]);
    for device in ["gpu-0", SLICE, CLIENT] {
        node.refused("c", device, "in mode timeslice").await;
    }
    node.unprepare("a").await.unwrap();
    world.expect_settings(&["3/default"]);
    world.no_faults();
    node.unprepare("b").await.unwrap();
    world.expect_rest();
    node.prepare("c", "gpu-0").await.unwrap();
    node.refused("a", TURNS, "holds it in mode whole").await;
}

#[tokio::test]
async fn a_time_slice_needs_mig_mode_off() {
    let world = World::up(H100);
    let node = world.start_long().await;
    node.prepare("a", SLICE).await.unwrap();
    node.refused("b", TURNS, "holds it in mode mig").await;
    node.unprepare("a").await.unwrap();
    world.expect_hardware(&["mig"]);
    node.prepare("b", TURNS).await.unwrap();
    world.expect_hardware(&["off"]);
}

#[tokio::test]
async fn an_interval_that_cannot_be_set_or_reset_is_told_and_tried_again() {
    let world = World::up(H100);
    let node = world.start_long().await;
    world.fault("compute-policy", Some(1));
    node.refused("a", TURNS, "cannot set time slice Long").await;
    world.expect_rest();
    node.prepare("a", TURNS).await.unwrap();
    world.fault("compute-policy", None);
    let error = node.unprepare("a").await.unwrap_err();
    assert!(error.contains("cannot reset time slice") && error.contains("nvidia-smi failed"), "{error}");
    // Half released: the next share sets the interval itself and is the last.
    world.no_faults();
    world
        .sim
        .update(|state| {
            state.gpus[0].timeslice = 1;
            Ok(())
        })
        .unwrap();
    node.prepare("b", TURNS).await.unwrap();
    world.expect_settings(&["3/default"]);
    node.unprepare("a").await.unwrap();
    world.expect_settings(&["3/default"]);
    node.unprepare("b").await.unwrap();
    world.expect_rest();
}

#[tokio::test]
async fn the_first_mps_client_starts_the_daemon_and_the_last_ends_it() {
    let world = World::up(H100);
    let keeper = world.keeper();
    let node = world.start().await;
    node.prepare("a", "share:gpu-0-mps/30/10Gi").await.unwrap();
    world.expect_settings(&["0/exclusive"]);
    assert_eq!(world.daemons(), ["gpu-0"]);
    assert_eq!(
        keeper.devices().into_values().collect::<Vec<_>>(),
        [world.sim.read().unwrap().gpus[0].uuid.clone()]
    );
    node.prepare("b", "share:gpu-0-mps/20/40Gi").await.unwrap();
    node.prepare("c", "share:gpu-0-mps/10/1Gi").await.unwrap();
    assert_eq!(keeper.wishes(), ["30/10240", "30/40960"], "the default is the largest client's");
    let env = &world.edits("b")[0]["env"];
    assert_eq!(env[1], "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20");
    assert_eq!(env[2], "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=40960M");
    for device in ["gpu-0", SLICE, TURNS] {
        node.refused("d", device, "in mode mps").await;
    }
    for claim in ["b", "a"] {
        node.unprepare(claim).await.unwrap();
        world.expect_settings(&["0/exclusive"]);
    }
    node.unprepare("c").await.unwrap();
    world.expect_rest();
    node.prepare("d", SLICE).await.unwrap();
}

#[tokio::test]
async fn pipe_and_shared_memory_are_open_to_clients_of_any_user() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::up(H100);
    let _keeper = world.keeper();
    let node = world.start().await;
    node.prepare("a", CLIENT).await.unwrap();
    let mounts = world.edits("a")[0]["mounts"].as_array().unwrap().clone();
    for at in ["/tmp/nvidia-mps", "/dev/shm"] {
        let mount = mounts.iter().find(|mount| mount["containerPath"] == at).unwrap();
        let mode = std::fs::metadata(mount["hostPath"].as_str().unwrap()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o1777, "{mount}");
    }
}

#[tokio::test]
async fn a_daemon_that_does_not_come_fails_the_claim_and_leaves_nothing() {
    let world = World::up(H100);
    let keeper = world.keeper();
    keeper.set(Phase::Down { cause: "no such program".into() });
    let mut node = world.start_answering(Duration::from_secs(8)).await;
    let begun = node.prepare("a", CLIENT).await.unwrap_err();
    let error = super::world::chain(&begun);
    for part in ["ns/a", "gpu-0-mps", "down: no such program", "is divvy-keeper running on this node?"] {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
    until("the claim is undone", || node.engine.held().is_empty()).await;
    world.expect_rest();
    node.stop().await;
    node = world.start().await;
    keeper.set(Phase::Ready);
    node.prepare("a", CLIENT).await.unwrap();
}

#[tokio::test]
async fn without_a_keeper_the_other_modes_work_and_nothing_stays() {
    let world = World::up(H100);
    let node = world.start_answering(Duration::from_secs(8)).await;
    node.refused("a", CLIENT, "nobody has answered").await;
    until("the claim is undone", || node.engine.held().is_empty()).await;
    world.expect_rest();
    node.prepare("b", TURNS).await.unwrap();
}

#[tokio::test]
async fn two_shares_of_one_claim_are_two_devices_and_one_daemon() {
    let world = World::up(H100);
    let keeper = world.keeper();
    let node = world.start_long().await;
    let answer = node.prepare("a", "share:gpu-0-mps/10/1Gi share:gpu-0-mps/20/2Gi").await.unwrap();
    let ids: Vec<&str> = answer.iter().map(|device| device.cdi_ids[0].as_str()).collect();
    assert_eq!(ids, ["gpu.divvy.dev/claim=a-gpu-0-mps-a-0", "gpu.divvy.dev/claim=a-gpu-0-mps-a-1"]);
    assert_eq!(keeper.wishes(), ["20/2048"]);
    let limits: Vec<Value> = world.edits("a").iter().map(|edits| edits["env"][1].clone()).collect();
    assert_eq!(limits, ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20"]);
    assert_eq!(node.prepare("a", "share:gpu-0-mps/10/1Gi share:gpu-0-mps/20/2Gi").await.unwrap(), answer);
    node.unprepare("a").await.unwrap();
    world.expect_rest();
    node.prepare("b", &format!("{TURNS} {TURNS}")).await.unwrap();
    assert_eq!(world.edits("b").len(), 2);
    node.unprepare("b").await.unwrap();
    world.expect_rest();
}

#[tokio::test]
async fn one_claim_may_have_different_modes_on_different_gpus() {
    let mut world = World::up(&format!("3x{H100}"));
    world.hold_off = Duration::ZERO;
    let _keeper = world.keeper();
    let node = world.start_long().await;
    let devices = "gpu-0-mig-1g10gb-19-2 share:gpu-1-timeslice share:gpu-2-mps gpu-0-mig-3g40gb-9-4";
    let answer = node.prepare("a", devices).await.unwrap();
    world.expect_hardware(&["mig 19@2+ 9@4+", "off", "off"]);
    world.expect_settings(&["0/default", "3/default", "0/exclusive"]);
    assert_eq!(node.prepare("a", devices).await.unwrap(), answer);
    // Other alternatives of its requests, after it was allocated anew.
    node.prepare("a", "share:gpu-0-timeslice gpu-1 share:gpu-2-timeslice").await.unwrap();
    until("MIG mode is off", || world.hardware() == ["off", "off", "off"]).await;
    world.expect_settings(&["3/default", "0/default", "3/default"]);
    node.unprepare("a").await.unwrap();
    world.expect_rest();
}

#[tokio::test]
async fn pods_of_one_claim_share_what_it_has_for_itself() {
    let world = World::up(H100);
    let keeper = world.keeper();
    let node = world.start().await;
    prepare_configured(&node, "a", "gpu-0", Sharing::TimeSlicing(Interval::Short)).await;
    world.expect_settings(&["1/default"]);
    node.refused("b", TURNS, "holds it in mode whole").await;
    node.unprepare("a").await.unwrap();
    world.expect_rest();

    let settings = MpsSettings {
        active_thread_percentage: Some(50),
        pinned_memory: Some(Quantity::bytes(4 << 30)),
        ..MpsSettings::default()
    };
    prepare_configured(&node, "a", "gpu-0", Sharing::Mps(settings)).await;
    world.expect_settings(&["0/exclusive"]);
    assert_eq!(world.edits("a")[0]["env"][2], "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M");
    node.unprepare("a").await.unwrap();
    world.expect_rest();

    prepare_mps_slice(&node, "a").await;
    world.expect_settings(&["0/default"]);
    assert_eq!(world.daemons(), ["gpu-0-19-2"]);
    let uuid = world.sim.read().unwrap().gpus[0].instances[0].cis[0].uuid.clone();
    assert_eq!(keeper.devices().into_values().collect::<Vec<_>>(), [uuid]);
    assert_eq!(keeper.wishes(), ["50/4096", "50/4096"]);
    node.prepare("b", "gpu-0-mig-1g10gb-19-3").await.unwrap();
    node.unprepare("a").await.unwrap();
    world.expect_hardware(&["mig 19@3+"]);
    node.unprepare("b").await.unwrap();
    world.expect_rest();
}

#[tokio::test]
async fn settings_of_an_administrator_stay() {
    let world = World::up(H100);
    let change = |state: &mut divvy_sim::State| {
        state.gpus[0].timeslice = 2;
        state.gpus[0].compute_mode = 3;
        Ok(())
    };
    world.sim.update(change).unwrap();
    let node = world.start().await;
    node.prepare("a", "gpu-0").await.unwrap();
    node.unprepare("a").await.unwrap();
    world.expect_settings(&["2/exclusive"]);
}

#[tokio::test]
async fn a_sick_daemon_is_a_condition_of_its_gpu_until_it_is_well() {
    let world = World::up(H100);
    let keeper = world.keeper();
    let node = world.start().await;
    node.prepare("a", CLIENT).await.unwrap();
    let daemons = node.engine.daemons();
    let incarnation = || daemons.borrow().values().next().and_then(|daemon| daemon.incarnation);
    until("the daemon is known", || incarnation() == Some(1)).await;
    keeper.set(Phase::Fault { cause: "server 7".into() });
    let conditions = || node.gpus.inventory().borrow().gpus[0].conditions.clone();
    let sick = Condition::Mps { cause: "fault: server 7".into() };
    until("the GPU is marked", || conditions() == std::slice::from_ref(&sick)).await;
    node.refused("b", CLIENT, "fault: server 7").await;
    assert!(node.engine.prepared(&"a".into()).is_some());
    keeper.set(Phase::Ready);
    keeper.restart();
    until("the mark is gone", || conditions().is_empty()).await;
    until("the new start is known", || incarnation() == Some(2)).await;
    node.prepare("b", CLIENT).await.unwrap();
    for claim in ["a", "b"] {
        node.unprepare(claim).await.unwrap();
    }
    until("nobody is watched any more", || daemons.borrow().is_empty()).await;
}

#[tokio::test]
async fn claims_side_by_side_share_one_gpu() {
    let world = World::up(H100);
    let keeper = world.keeper();
    let node = world.start_long().await;
    for device in [CLIENT, TURNS] {
        let all = |prepare: bool| {
            let engine = node.engine.clone();
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
        assert_eq!(node.engine.held().len(), 8);
        for released in all(false).collect::<Vec<_>>() {
            released.await.unwrap();
        }
        world.expect_rest();
    }
    assert_eq!(keeper.wishes().len(), 1);
}

#[tokio::test]
async fn two_drivers_at_once_count_each_others_shares() {
    let world = World::up(H100);
    let _keeper = world.keeper();
    let (old, new) = (world.start_long().await, world.start_long().await);
    old.prepare("a", CLIENT).await.unwrap();
    new.prepare("b", CLIENT).await.unwrap();
    old.unprepare("a").await.unwrap();
    world.expect_settings(&["0/exclusive"]);
    old.refused("c", TURNS, "in mode mps").await;
    new.unprepare("b").await.unwrap();
    world.expect_rest();
    old.prepare("c", TURNS).await.unwrap();
    new.prepare("d", TURNS).await.unwrap();
    old.unprepare("d").await.unwrap();
    world.expect_settings(&["3/default"]);
    new.unprepare("c").await.unwrap();
    world.expect_rest();
}
