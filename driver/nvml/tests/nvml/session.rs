//! Reads, changes and errors of a session.

use crate::test_node::{TestNode, next, short_timeouts};
use divvy_model::inventory::MigMode;
use divvy_model::placement::Placement;
use divvy_model::{HealthReading, RecoveryAction};
use divvy_nvml::{Closing, Code, ComputeMode, Event, NvmlError, OpenError, RawMig, Session, Timeouts};
use divvy_sim::control::{Pattern, When};
use divvy_sim::state::{Process, ProcessKind};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;

const CATALOGUE: &str = "T4,L4,L40S,A10,A30-24GB,A100-SXM4-40GB,A100-SXM4-80GB,H100-SXM5-80GB,H100-PCIe-80GB,\
    H100-NVL-94GB,GH200-96GB,H200-SXM-141GB,B200-180GB,GB200-186GB,B300-269GB,RTX-PRO-6000";

#[tokio::test]
async fn snapshot_matches_the_catalogue() {
    let node = TestNode::new(CATALOGUE);
    let session = node.open(Timeouts::default());
    let snapshot = session.snapshot().await.expect("snapshot");
    let state = node.sim.read().expect("state");
    assert_eq!(
        (snapshot.driver_version.as_str(), snapshot.cuda_version),
        (state.driver.as_str(), state.cuda)
    );
    assert_eq!(snapshot.gpus.len(), state.gpus.len());
    assert!(snapshot.unreadable.is_empty());
    for gpu in &state.gpus {
        let row = gpu.model.row();
        let found = snapshot.gpus.iter().find(|found| found.uuid.as_str() == gpu.uuid).expect("found");
        let (is, now) = found.reading.as_ref().expect("readable");
        assert_eq!(is.product, row.product);
        assert_eq!(is.memory_bytes, row.memory_total_mib << 20, "{}", row.key);
        assert_eq!(is.compute_capability, row.compute_capability);
        assert_eq!(is.pci_bus_id, gpu.bdf);
        assert_eq!(now.minor, gpu.minor);
        let read = is.profiles.as_ref().expect("profiles");
        let Some(mig) = &row.mig else {
            assert_eq!((read.len(), &now.mig), (0, &RawMig::Unsupported), "{}", row.key);
            continue;
        };
        assert_eq!(now.mig, RawMig::Supported { mode: MigMode::Off, instances: Vec::new() });
        assert_eq!(read.len(), mig.profiles.len(), "{}", row.key);
        for profile in &mig.profiles {
            let read = read.iter().find(|read| read.id == profile.id).expect("profile");
            assert_eq!(
                (read.index, &read.name, read.memory_mib, read.multiprocessors, read.max_instances),
                (profile.index, &profile.name, profile.memory_mib, profile.sm, profile.instances),
                "{}",
                row.key
            );
            let mut placements: Vec<_> = profile.placements().map(|at| (at.start, at.size)).collect();
            placements.sort_unstable();
            let read: Vec<_> = read.placements.iter().map(|at| (at.start, at.size)).collect();
            assert_eq!(read, placements, "{} {}", row.key, profile.name);
        }
    }
    assert_eq!(session.close().await, Closing::Unloaded);
}

#[tokio::test]
async fn compute_mode_is_set_and_prohibited_is_kept() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    let set = async |now: u32, wanted: ComputeMode, expected: u32| {
        node.change(|state| state.gpus[0].compute_mode = now);
        queue.set_compute_mode(wanted).await.expect("set");
        assert_eq!(node.sim.read().expect("state").gpus[0].compute_mode, expected, "{now} {wanted:?}");
    };
    let (default, prohibited, exclusive) = (0, 2, 3);
    set(default, ComputeMode::ExclusiveProcess, exclusive).await;
    set(exclusive, ComputeMode::ExclusiveProcess, exclusive).await;
    set(exclusive, ComputeMode::Default, default).await;
    set(prohibited, ComputeMode::Default, prohibited).await;
}

#[tokio::test]
async fn every_instance_is_created_found_and_destroyed() {
    let node = TestNode::new("A30-24GB,A100-SXM4-80GB,H100-SXM5-80GB,H200-SXM-141GB,B200-180GB,RTX-PRO-6000");
    let session = node.open(Timeouts::default());
    for gpu in session.snapshot().await.expect("snapshot").gpus {
        let queue = session.gpu(&gpu.uuid);
        queue.set_mig_mode(MigMode::On).await.expect("MIG on");
        assert_eq!(queue.mig_mode().await, Ok(MigMode::On));
        let (is, _) = gpu.reading.expect("readable");
        for profile in is.profiles.as_ref().expect("profiles") {
            for at in &profile.placements {
                let id = queue.create_gpu_instance(profile.id, *at).await.expect("GPU instance");
                let hollow = queue.instance(profile.id, at.start).await.expect("found").expect("there");
                assert_eq!((hollow.id, hollow.placement, hollow.compute_instances.len()), (id, *at, 0));
                let made = queue.create_compute_instance(id).await.expect("compute instance");
                assert!(made.uuid.starts_with("MIG-"), "{}", made.uuid);
                let all = queue.instances().await.expect("instances");
                assert_eq!(all.len(), 1);
                assert_eq!((all[0].profile_id, all[0].placement), (profile.id, *at));
                assert_eq!(all[0].compute_instances.as_slice(), std::slice::from_ref(&made));
                let in_use = queue.destroy_gpu_instance(id).await.expect_err("it has a compute instance");
                assert_eq!(in_use.code(), Some(Code::InUse));
                // Destroying twice is no error.
                for _ in 0..2 {
                    queue.destroy_compute_instance(id, made.id).await.expect("no compute instance");
                }
                for _ in 0..2 {
                    queue.destroy_gpu_instance(id).await.expect("no GPU instance");
                }
                assert_eq!(queue.instances().await.as_deref(), Ok([].as_slice()));
            }
        }
        queue.set_mig_mode(MigMode::Off).await.expect("MIG off");
        queue.destroy_gpu_instance(1).await.expect("with MIG off there is none");
    }
}

#[tokio::test]
async fn compute_instance_fills_its_gpu_instance() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    queue.set_mig_mode(MigMode::On).await.expect("MIG on");
    let (is, _) = queue.read().await.expect("description");
    let three = is.profiles.iter().flatten().find(|profile| profile.name == "3g.40gb").expect("profile");
    let id = queue.create_gpu_instance(three.id, three.placements[0]).await.expect("GPU instance");
    let first = queue.create_compute_instance(id).await.expect("compute instance");
    let second = queue.create_compute_instance(id).await.expect_err("no room for another");
    assert_eq!(second.code(), Some(Code::InsufficientResources));
    assert_eq!(queue.instances().await.expect("instances")[0].compute_instances, [first]);
}

#[tokio::test]
async fn instance_creation_makes_few_calls() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    queue.set_mig_mode(MigMode::On).await.expect("MIG on");
    let make = async |start| {
        let id = queue.create_gpu_instance(19, Placement { start, size: 1 }).await.expect("GPU instance");
        queue.create_compute_instance(id).await.expect("compute instance");
    };
    // The first instance of a profile also reads its compute instance profiles.
    make(0).await;
    node.change(|state| state.control.trace = true);
    make(1).await;
    let trace = std::fs::read_to_string(node.sim.trace_path()).expect("trace");
    let calls: Vec<_> =
        trace.lines().filter_map(|line| line.split('"').find(|word| word.starts_with("nvml"))).collect();
    assert_eq!(
        calls,
        [
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            "nvmlGpuInstanceGetInfo",
            "nvmlDeviceGetGpuInstanceById",
            "nvmlGpuInstanceGetInfo",
            "nvmlGpuInstanceCreateComputeInstance",
            "nvmlComputeInstanceGetInfo_v2",
            "nvmlDeviceGetUUID",
        ]
    );
}

#[tokio::test]
async fn refused_call_returns_its_code_and_changes_nothing() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    queue.set_mig_mode(MigMode::On).await.expect("MIG on");
    let (is, _) = queue.read().await.expect("description");
    let profile = is.profiles.iter().flatten().find(|profile| profile.name == "1g.10gb").expect("profile");
    for code in codes() {
        for call in ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceGetInfo"] {
            node.change(|state| state.add_fault(Pattern::new(call), Some(1), When::Before, code));
            let error =
                queue.create_gpu_instance(profile.id, profile.placements[0]).await.expect_err("faulty");
            assert_eq!(error.code().map(Code::number), Some(u32::from(code)), "{call}");
            assert_eq!(node.instances(0), 0, "{call} {code}");
            node.change(|state| state.clear_faults(None));
        }
    }
    let nowhere = queue.create_gpu_instance(profile.id, Placement { start: 40, size: 1 }).await;
    assert_eq!(nowhere.expect_err("off the grid").code(), Some(Code::InvalidArgument));
}

/// All codes that a call can return, except those of lost GPUs and stale handles.
fn codes() -> Vec<divvy_sim::Code> {
    (1..=30u32).chain([999]).filter_map(|number| divvy_sim::Code::try_from(number).ok()).collect()
}

#[tokio::test]
async fn h8_failed_mig_query_fails_only_the_mig_facts() {
    let node = TestNode::new("H100-SXM5-80GB");
    let fail = |call: &str| {
        let pattern = Pattern::new(call);
        node.change(|state| state.add_fault(pattern, None, When::Before, divvy_sim::Code::Unknown));
    };
    let session = node.open(Timeouts::default());
    let gpu = node.queue(&session, 0);
    for (call, mode) in [
        ("nvmlDeviceGetGpuInstanceProfileInfo*", Some(MigMode::Off)),
        ("nvmlDeviceGetMigMode", None),
        ("nvmlDeviceGetGpuInstances", Some(MigMode::On)),
    ] {
        fail(call);
        let (_, state) = gpu.read().await.expect(call);
        let RawMig::Unreadable { mode: read, cause } = state.mig else { panic!("{call}: {:?}", state.mig) };
        assert_eq!((read, cause.code()), (mode, Some(Code::Unknown)), "{call}");
        node.change(|state| state.clear_faults(None));
        let (description, state) = gpu.read().await.expect("read again");
        assert!(matches!(state.mig, RawMig::Supported { .. }), "{call}");
        assert!(description.profiles.as_ref().is_ok_and(|profiles| !profiles.is_empty()), "{call}");
        gpu.set_mig_mode(MigMode::On).await.expect("MIG on");
    }
    // Unreadable profiles must not look like a GPU without instances.
    let session = node.open(Timeouts::default());
    fail("nvmlDeviceGetGpuInstanceProfileInfo*");
    assert!(node.queue(&session, 0).instances().await.is_err());
    // A lost GPU is an error of the whole reading.
    node.change(|state| state.lose(0, true).expect("lost"));
    assert!(matches!(node.queue(&session, 0).read().await, Err(NvmlError::Lost { .. })));
}

#[tokio::test]
async fn error_lists_processes_that_block_mig_mode() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    for (pid, kind) in [(7, ProcessKind::Compute), (9, ProcessKind::Graphics), (8, ProcessKind::Mps)] {
        let process = Process { pid, name: "busy".to_owned(), kind, instance: None, memory_mib: 1 };
        node.change(|state| state.add_process(0, process).expect("process"));
    }
    let error = queue.set_mig_mode(MigMode::On).await.expect_err("in use");
    assert!(matches!(&error, NvmlError::InUse { pids, .. } if *pids == [7, 8, 9]), "{error:?}");
    assert!(error.to_string().contains("process 7, 8, 9"), "{error}");
    let state = node.sim.read().expect("state");
    assert_eq!((state.gpus[0].mig.current, state.gpus[0].mig.pending), (false, false));
}

#[tokio::test]
async fn lost_gpu_is_reported_once_and_affects_no_other() {
    let node = TestNode::new("2xH100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let mut events = session.events().expect("first caller");
    assert!(session.events().is_none());
    let (lost, well) = (node.queue(&session, 0), node.queue(&session, 1));
    node.change(|state| state.lose(0, true).expect("lost"));
    for _ in 0..2 {
        assert!(matches!(lost.mig_mode().await, Err(NvmlError::Lost { .. })));
    }
    assert_eq!(well.mig_mode().await, Ok(MigMode::Off));
    let reported = next(&mut events, |event| matches!(event, Event::Lost { .. }).then_some(event)).await;
    assert_eq!(reported, Event::Lost { gpu: node.uuid(0), call: "nvmlDeviceGetMigMode" });
    node.change(|state| state.find(0).expect("found"));
    assert_eq!(lost.mig_mode().await, Ok(MigMode::Off));
    while let Ok(event) = events.try_recv() {
        assert!(!matches!(event, Event::Lost { .. }), "{event:?}");
    }
}

#[tokio::test]
async fn events_name_the_gpu_and_the_instance() {
    let node = TestNode::new("2xH100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let mut events = session.events().expect("events");
    // Events before the registration are lost, so repeat the event until one is received.
    let received = next(&mut events, |event| matches!(event, Event::Xid { .. }).then_some(event));
    let emit = async {
        loop {
            node.change(|state| state.xid(1, 31, None).expect("xid"));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let received =
        tokio::select! { received = received => received, () = emit => unreachable!("it tells for ever") };
    let gpu = node.uuid(1);
    assert_eq!(
        received,
        Event::Xid { gpu: gpu.clone(), xid: 31, gpu_instance: None, compute_instance: None }
    );
    node.change(|state| state.xid(1, 94, Some((5, 0))).expect("xid"));
    let received =
        next(&mut events, |event| matches!(event, Event::Xid { xid: 94, .. }).then_some(event)).await;
    assert_eq!(
        received,
        Event::Xid { gpu: gpu.clone(), xid: 94, gpu_instance: Some(5), compute_instance: Some(0) }
    );
    node.queue(&session, 1).set_mig_mode(MigMode::On).await.expect("MIG on");
    next(&mut events, |event| (event == Event::MigConfigChange { gpu: gpu.clone() }).then_some(())).await;
    node.change(|state| state.set_recovery_action(1, 1).expect("a GPU"));
    next(&mut events, |event| (event == Event::HealthChange { gpu: gpu.clone() }).then_some(())).await;
    let queue = node.queue(&session, 1);
    let at = Placement { start: 0, size: 1 };
    let id = queue.create_gpu_instance(19, at).await.expect("GPU instance");
    queue.destroy_gpu_instance(id).await.expect("destroyed");
    let destroyed = Event::InstanceDestroyed { gpu: gpu.clone(), gpu_instance: id };
    next(&mut events, |event| (event == destroyed).then_some(())).await;
    assert_eq!(session.close().await, Closing::Unloaded);
}

/// Waits until an Xid event of the GPU arrives, and counts events of lost GPUs until then.
async fn receive_xid(node: &TestNode, events: &mut UnboundedReceiver<Event>, slot: usize) -> usize {
    let gpu = node.uuid(slot);
    let mut lost = 0;
    loop {
        node.change(|state| state.xid(slot, 31, None).expect("xid"));
        let wait = tokio::time::timeout(Duration::from_millis(50), events.recv()).await;
        match wait {
            Ok(Some(Event::Xid { gpu: from, .. })) if from == gpu => return lost,
            Ok(Some(Event::SomeGpuLost)) => lost += 1,
            Ok(None) => panic!("the session is open"),
            Ok(Some(_)) | Err(_) => {}
        }
    }
}

#[tokio::test]
async fn h11_failed_wait_rebuilds_the_event_set() {
    let node = TestNode::new("2xH100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let mut events = session.events().expect("events");
    receive_xid(&node, &mut events, 0).await;
    let lost = divvy_sim::Code::GpuIsLost;
    let pattern = Pattern::new("nvmlEventSetWait_v2");
    node.change(|state| state.add_fault(pattern, Some(1), When::Before, lost));
    next(&mut events, |event| (event == Event::SomeGpuLost).then_some(())).await;
    assert_eq!(receive_xid(&node, &mut events, 1).await, 0, "one failure is reported once");
    receive_xid(&node, &mut events, 0).await;
    assert_eq!(session.close().await, Closing::Unloaded);
}

#[tokio::test]
async fn h11_gpu_that_spoils_the_set_is_left_out() {
    let node = TestNode::new("2xH100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let mut events = session.events().expect("events");
    receive_xid(&node, &mut events, 0).await;
    // NVML ends the wait for both GPUs; afterwards GPU 0 cannot be registered.
    node.change(|state| {
        state.gpus[0].lost = true;
        let lost = divvy_sim::Code::GpuIsLost;
        state.add_fault(Pattern::new("nvmlEventSetWait_v2"), Some(1), When::Before, lost);
    });
    next(&mut events, |event| (event == Event::SomeGpuLost).then_some(())).await;
    assert_eq!(receive_xid(&node, &mut events, 1).await, 0);
    // The GPU comes back after a reset and is registered again.
    node.change(|state| state.find(0).expect("found"));
    assert_eq!(receive_xid(&node, &mut events, 0).await, 0);
    assert_eq!(session.close().await, Closing::Unloaded);
}

#[tokio::test]
async fn h11_events_arrive_when_all_gpus_come_back() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    node.change(|state| state.gpus[0].lost = true);
    let mut events = session.events().expect("events");
    tokio::time::sleep(Duration::from_millis(600)).await;
    node.change(|state| state.find(0).expect("found"));
    receive_xid(&node, &mut events, 0).await;
    assert_eq!(session.close().await, Closing::Unloaded);
}

/// Whether a library of the driver root is mapped into this process.
fn mapped(node: &TestNode) -> bool {
    // The simulator itself maps other files.
    let libraries = node.sim.root().join("usr/lib");
    let libraries = libraries.to_str().expect("utf-8");
    std::fs::read_to_string("/proc/self/maps").expect("maps").contains(libraries)
}

#[tokio::test]
async fn closed_session_rejects_calls_and_can_be_reopened() {
    let node = TestNode::new("H100-SXM5-80GB");
    let path = node.library();
    for _ in 0..3 {
        let session = node.open(short_timeouts());
        let queue = node.queue(&session, 0);
        assert_eq!(queue.mig_mode().await, Ok(MigMode::Off));
        assert!(mapped(&node));
        assert_eq!(session.clone().close().await, Closing::Unloaded);
        assert!(!mapped(&node), "the library is unloaded");
        let gpu = node.uuid(0);
        assert_eq!(queue.mig_mode().await, Err(NvmlError::Closed { gpu: gpu.clone() }));
        assert_eq!(session.gpu(&gpu).mig_mode().await, Err(NvmlError::Closed { gpu }));
        assert!(session.snapshot().await.is_err());
    }
    std::fs::remove_file(&path).expect("removed");
    assert!(matches!(Session::open(&path, short_timeouts()), Err(OpenError::Library { .. })));
    std::fs::write(&path, "no library").expect("written");
    assert!(matches!(Session::open(&path, short_timeouts()), Err(OpenError::Initialise { .. })));
}

#[tokio::test]
async fn health_is_read_where_the_gpu_has_it() {
    let node = TestNode::new("H100-SXM5-80GB,T4");
    let session = node.open(Timeouts::default());
    let healthy = node.queue(&session, 0).health().await.expect("health");
    let known = HealthReading { energy_mj: healthy.energy_mj, ..healthy };
    assert_eq!((known.recovery_action, known.remap_pending), (Some(RecoveryAction::None), Some(false)));
    assert_eq!((known.remap_failed, known.uncorrected_ecc), (Some(false), Some(0)));
    assert!(known.energy_mj.is_some());
    let retires_pages = node.queue(&session, 1).health().await.expect("health");
    assert_eq!((retires_pages.remap_pending, retires_pages.remap_failed), (None, None));
    node.change(|state| {
        state.set_recovery_action(0, 2).expect("a GPU");
        let health = &mut state.gpus[0].health;
        (health.remap_pending, health.remap_failed, health.ecc_uncorrected) = (true, true, 5);
    });
    let failed = node.queue(&session, 0).health().await.expect("health");
    let expected = HealthReading {
        recovery_action: Some(RecoveryAction::NodeReboot),
        remap_pending: Some(true),
        remap_failed: Some(true),
        uncorrected_ecc: Some(5),
        energy_mj: failed.energy_mj,
    };
    assert_eq!(failed, expected);
    assert_eq!(session.close().await, Closing::Unloaded);
}

#[tokio::test]
async fn older_driver_has_less_health_and_failures_stay_errors() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let fail = |call: &str, code| {
        let pattern = Pattern { call: call.to_owned(), gpu: Some(0) };
        node.change(|state| state.add_fault(pattern, None, When::Before, code));
    };
    let calls = ["nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetTotalEccErrors"];
    for call in calls.into_iter().chain(["nvmlDeviceGetTotalEnergyConsumption"]) {
        fail(call, divvy_sim::Code::NotSupported);
    }
    let queue = node.queue(&session, 0);
    assert_eq!(queue.health().await, Ok(HealthReading::default()));
    for code in [divvy_sim::Code::ResetRequired, divvy_sim::Code::Unknown, divvy_sim::Code::IrqIssue] {
        node.change(|state| state.clear_faults(None));
        fail(calls[1], code);
        let error = queue.health().await.expect_err("failed");
        assert_eq!(error.code().map(|code| code.number()), Some(code.into()), "{error}");
    }
    node.change(|state| state.lose(0, true).expect("lost"));
    assert!(matches!(queue.health().await, Err(NvmlError::Lost { .. })));
    assert_eq!(session.close().await, Closing::Unloaded);
}
