//! The GPU manager on a simulated node: detection and loss of GPUs, foreign changes, a missing GPU driver.

use divvy_api::GpuUuid;
use divvy_driver::gpu::inventory::Ownership;
use divvy_driver::gpu::{ForgetError, GpuUsage, Gpus, GpusOptions, Unavailable};
use divvy_model::HealthState;
use divvy_model::inventory::{Condition, Gpu, Inventory, Mig, MigMode, Origin, Presence};
use divvy_model::numbers::GpuNumber;
use divvy_nvml::{Event, Timeouts};
use divvy_sim::control::{Pattern, When};
use divvy_sim::{Options, Sim, State, create};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

struct TestNode {
    dir: tempfile::TempDir,
}

impl TestNode {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("temporary directory") }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// Installs a GPU driver with these GPUs.
    fn install(&self, gpus: &str) -> Sim {
        let library = divvy_sim::library().expect("simulated library");
        let program = std::env::current_exe().expect("this test");
        create(&self.root(), gpus, &Options::new(library, program)).expect("simulator")
    }

    async fn start(&self) -> Gpus {
        self.start_with(Duration::from_secs(3600)).await
    }

    /// Starts the GPU manager, which forgets missing GPUs after this time.
    async fn start_with(&self, forget_after: Duration) -> Gpus {
        let timeout = Duration::from_millis(1500);
        let timeouts = Timeouts { query: timeout, mig_mode: timeout, create: timeout, destroy: timeout };
        let gpus = Gpus::start(GpusOptions {
            driver_root: self.root(),
            sys_root: self.root().join("sys"),
            proc_root: self.root().join("proc"),
            dev_dir: self.root().join("dev"),
            state_dir: self.dir.path().join("state"),
            timeouts,
            poll: Duration::from_millis(20),
            health_poll: Duration::from_millis(200),
            compare_interval: Duration::from_millis(100),
            forget_after,
            first_reading: Duration::from_secs(30),
        });
        gpus.await
    }
}

fn update_sim(sim: &Sim, change: impl FnOnce(&mut State)) {
    let changed = sim.update(|state| {
        change(state);
        Ok(())
    });
    changed.expect("changed");
}

fn uuid(sim: &Sim, slot: usize) -> GpuUuid {
    GpuUuid::from(sim.read().expect("state").gpus[slot].uuid.as_str())
}

/// Waits for an inventory with this property, for at most 60 seconds.
async fn until(gpus: &Gpus, wanted: impl Fn(&Inventory) -> bool) -> Arc<Inventory> {
    let mut inventory = gpus.inventory();
    let found = tokio::time::timeout(Duration::from_secs(60), inventory.wait_for(|now| wanted(now))).await;
    found
        .unwrap_or_else(|_| panic!("timed out with inventory {:#?}", gpus.inventory().borrow()))
        .expect("the GPU manager runs")
        .clone()
}

fn presences(inventory: &Inventory) -> Vec<(u32, Presence)> {
    inventory.gpus.iter().map(|gpu| (gpu.number.0, gpu.presence)).collect()
}

fn all(inventory: &Inventory, presence: Presence) -> bool {
    !inventory.gpus.is_empty() && inventory.gpus.iter().all(|gpu| gpu.presence == presence)
}

fn origins(gpu: &Gpu) -> Vec<(u32, Origin)> {
    match &gpu.mig {
        Mig::Unsupported => Vec::new(),
        Mig::Supported { instances, .. } => {
            instances.iter().map(|one| (one.profile_id, one.origin)).collect()
        }
    }
}

#[tokio::test]
async fn first_inventory_is_complete() {
    let node = TestNode::new();
    let sim = node.install("2xH100-SXM5-80GB,A30-24GB,L4");
    let gpus = node.start().await;
    let inventory = gpus.inventory().borrow().clone();
    let state = sim.read().expect("state");
    assert_eq!(inventory.driver_version, state.driver);
    assert_eq!(inventory.gpus.len(), 4);
    for (gpu, made) in inventory.gpus.iter().zip(&state.gpus) {
        assert_eq!(
            (gpu.uuid.as_str(), gpu.number.0, gpu.minor),
            (made.uuid.as_str(), made.minor, made.minor)
        );
        assert_eq!((gpu.pcie_root.as_ref(), gpu.numa_node), (Some(&made.pcie_root), made.numa));
        assert_eq!((gpu.presence, gpu.conditions.len()), (Presence::Present, 0));
        assert!(gpus.queue(&gpu.uuid).is_ok());
    }
    let links = |gpu: &Gpu| (gpu.nvlink_group.is_some(), gpu.nvlink_group.clone(), gpu.nvlink_peers);
    assert_eq!(links(&inventory.gpus[0]), links(&inventory.gpus[1]));
    assert_eq!((links(&inventory.gpus[0]).0, links(&inventory.gpus[2])), (true, (false, None, 0)));
    let unknown = GpuUuid::from("GPU-0");
    assert_eq!(gpus.queue(&unknown).err(), Some(Unavailable::Unknown { gpu: unknown }));
    gpus.shutdown().await;
    let gone = uuid(&sim, 0);
    assert_eq!(gpus.queue(&gone).err(), Some(Unavailable::NoDriver { gpu: gone }));
}

#[tokio::test]
async fn driver_installed_later_is_found() {
    let node = TestNode::new();
    let gpus = node.start().await;
    assert_eq!(**gpus.inventory().borrow(), Inventory::default());
    let sim = node.install("L4");
    let found = until(&gpus, |now| all(now, Presence::Present)).await;
    assert_eq!(found.gpus[0].uuid, uuid(&sim, 0));
    gpus.shutdown().await;
}

#[tokio::test]
async fn replaced_driver_is_reopened() {
    let node = TestNode::new();
    let sim = node.install("2xH100-SXM5-80GB");
    let gpus = node.start().await;
    let before = gpus.inventory().borrow().clone();
    divvy_sim::driver_root::replace_driver(&sim, "590.44.01").expect("replaced");
    let after = until(&gpus, |now| now.driver_version == "590.44.01").await;
    assert_eq!(presences(&after), presences(&before));
    assert!(gpus.queue(&after.gpus[0].uuid).expect("queue").mig_mode().await.is_ok());

    std::fs::remove_dir_all(node.root().join("usr")).expect("uninstalled");
    let without = until(&gpus, |now| all(now, Presence::Unread)).await;
    assert_eq!(without.gpus.len(), 2, "GPUs without a library stay in the inventory");
    gpus.shutdown().await;
}

#[tokio::test]
async fn drained_driver_stays_closed_until_resumed() {
    let node = TestNode::new();
    let sim = node.install("L4");
    let gpus = node.start().await;
    let gpu = uuid(&sim, 0);
    let before = gpus.queue(&gpu).expect("queue");
    gpus.drain().await;
    assert!(all(&gpus.inventory().borrow(), Presence::Unread));
    assert!(before.state().await.is_err() && gpus.queue(&gpu).is_err());
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    // The simulator in this process maps files of its own, so only the libraries count.
    let libraries = node.root().join("usr/lib");
    assert!(!maps.contains(libraries.to_str().expect("utf-8")), "the library is unloaded");
    gpus.resume();
    until(&gpus, |now| all(now, Presence::Present)).await;
    assert!(gpus.queue(&gpu).expect("queue").state().await.is_ok());
    gpus.shutdown().await;
}

#[tokio::test]
async fn gpu_missing_after_a_reboot_keeps_its_number() {
    let node = TestNode::new();
    let sim = node.install("4xH100-SXM5-80GB");
    let gpus = node.start().await;
    gpus.shutdown().await;
    let before = gpus.inventory().borrow().clone();
    update_sim(&sim, |state| {
        state.lose(1, false).expect("lost");
        state.reboot();
    });
    let gpus = node.start().await;
    let after = gpus.inventory().borrow().clone();
    use Presence::{Missing, Present};
    assert_eq!(presences(&after), [(0, Present), (1, Missing), (2, Present), (3, Present)]);
    let place = |inventory: &Inventory| -> Vec<_> {
        let one = |gpu: &Gpu| (gpu.uuid.clone(), gpu.number, gpu.product.clone(), gpu.nvlink_group.clone());
        inventory.gpus.iter().map(one).collect()
    };
    assert_eq!(place(&after), place(&before));
    assert_eq!(after.gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>(), [0, 1, 1, 2]);
    let gone = uuid(&sim, 1);
    assert_eq!(gpus.queue(&gone).err(), Some(Unavailable::Missing { gpu: gone }));
    gpus.shutdown().await;
}

#[tokio::test]
async fn h1_minors_of_another_boot_are_not_used() {
    use Presence::{Missing, Present, Unread};
    let node = TestNode::new();
    let sim = node.install("2xL4");
    node.start().await.shutdown().await;
    let library = node.root().join("usr/lib");
    let aside = node.dir.path().join("lib-aside");
    // NVML cannot be loaded yet. In the same boot the GPUs are as before.
    std::fs::rename(&library, &aside).expect("library aside");
    let gpus = node.start().await;
    assert_eq!(presences(&gpus.inventory().borrow()), [(0, Unread), (1, Unread)]);
    gpus.shutdown().await;
    // The kernel shows that GPU 0 is gone.
    update_sim(&sim, |state| state.gpus[0].missing = true);
    let gpus = node.start().await;
    assert_eq!(presences(&gpus.inventory().borrow()), [(0, Missing), (1, Unread)]);
    // It comes back, which the kernel shows before NVML can be loaded.
    update_sim(&sim, |state| state.gpus[0].missing = false);
    until(&gpus, |now| all(now, Unread)).await;
    // The minor of GPU 1 changes.
    update_sim(&sim, |state| state.gpus[1].minor = 7);
    until(&gpus, |now| presences(now) == [(0, Unread), (1, Missing)]).await;
    update_sim(&sim, |state| state.gpus[1].minor = 1);
    until(&gpus, |now| all(now, Unread)).await;
    gpus.shutdown().await;

    // After a reboot each GPU is missing until NVML has read it.
    update_sim(&sim, |state| state.reboot());
    let gpus = node.start().await;
    assert_eq!(presences(&gpus.inventory().borrow()), [(0, Missing), (1, Missing)]);
    std::fs::rename(&aside, &library).expect("library back");
    until(&gpus, |now| all(now, Present)).await;
    gpus.shutdown().await;
}

#[tokio::test]
async fn h1_gpu_that_fails_its_first_reading_is_missing() {
    let node = TestNode::new();
    let sim = node.install("2xL4");
    node.start().await.shutdown().await;
    let pattern = Pattern { call: "nvmlDeviceGetMinorNumber".to_owned(), gpu: Some(0) };
    update_sim(&sim, |state| {
        state.reboot();
        state.add_fault(pattern, None, When::Before, divvy_sim::Code::Unknown);
    });
    let gpus = node.start().await;
    use Presence::{Missing, Present};
    assert_eq!(presences(&gpus.inventory().borrow()), [(0, Missing), (1, Present)]);
    update_sim(&sim, |state| state.clear_faults(None));
    until(&gpus, |now| all(now, Present)).await;
    gpus.shutdown().await;
}

#[tokio::test]
async fn h2_gpus_with_late_device_nodes_appear() {
    let node = TestNode::new();
    let sim = node.install("8xH100-SXM5-80GB");
    let show = |nodes: usize| {
        update_sim(&sim, |state| {
            for (at, gpu) in state.gpus.iter_mut().enumerate() {
                gpu.node = at < nodes;
            }
        });
    };
    show(0);
    let gpus = node.start().await;
    assert_eq!(gpus.inventory().borrow().gpus.len(), 0);
    let shortage = gpus.shortage();
    let counts = shortage.borrow().expect("the kernel shows more");
    assert_eq!(counts.to_string(), "the kernel driver shows 8 GPUs, NVML 0");
    show(3);
    until(&gpus, |now| now.gpus.len() == 3).await;
    assert_eq!(shortage.borrow().map(|counts| counts.nvml), Some(3));
    show(8);
    let whole = until(&gpus, |now| now.gpus.len() == 8).await;
    assert!(all(&whole, Presence::Present));
    assert_eq!(*shortage.borrow(), None);
    gpus.shutdown().await;
}

#[tokio::test]
async fn h2_plugged_replaced_and_returning_gpus_appear() {
    use Presence::{Missing, Present};
    let node = TestNode::new();
    let sim = node.install("3xL4");
    update_sim(&sim, |state| state.gpus[2].missing = true);
    let gpus = node.start().await;
    assert_eq!(presences(&gpus.inventory().borrow()), [(0, Present), (1, Present)]);
    update_sim(&sim, |state| state.gpus[2].missing = false);
    until(&gpus, |now| now.gpus.len() == 3 && all(now, Present)).await;
    update_sim(&sim, |state| state.gpus[1].missing = true);
    until(&gpus, |now| presences(now) == [(0, Present), (1, Missing), (2, Present)]).await;
    update_sim(&sim, |state| state.gpus[1].missing = false);
    until(&gpus, |now| all(now, Present)).await;
    // Another board at the same bus id: the names do not change, but the UUID does.
    let first = uuid(&sim, 1);
    update_sim(&sim, |state| state.gpus[1].uuid = "GPU-11111111-2222-3333-4444-555555555555".to_owned());
    let replaced = until(&gpus, |now| now.gpus.len() == 4).await;
    assert_eq!(presences(&replaced), [(0, Present), (1, Missing), (2, Present), (3, Present)]);
    assert_eq!(replaced.gpus[1].uuid, first);
    gpus.shutdown().await;
}

#[tokio::test]
async fn h2_stuck_gpu_delays_the_opening_of_nvml() {
    let node = TestNode::new();
    let sim = node.install("3xH100-SXM5-80GB");
    update_sim(&sim, |state| state.gpus[2].missing = true);
    let gpus = node.start().await;
    let pattern = Pattern { call: "nvmlDeviceSetMigMode".to_owned(), gpu: Some(0) };
    update_sim(&sim, |state| state.add_hold(pattern, None, When::Before));
    let gpu = uuid(&sim, 0);
    gpus.queue(&gpu).expect("queue").set_mig_mode(MigMode::On).await.expect_err("held");
    update_sim(&sim, |state| state.gpus[2].missing = false);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(gpus.inventory().borrow().gpus.len(), 2);
    assert!(gpus.shortage().borrow().is_some());
    update_sim(&sim, |state| state.release(None));
    until(&gpus, |now| now.gpus.len() == 3).await;
    gpus.shutdown().await;
}

/// Moves the node to another host: other boards, and another boot.
fn migrate(sim: &Sim, host: u32) {
    update_sim(sim, |state| {
        for (slot, gpu) in state.gpus.iter_mut().enumerate() {
            gpu.uuid = format!("GPU-{host:08x}-0000-0000-0000-{slot:012x}");
        }
        state.reboot();
    });
}

#[tokio::test]
async fn h5_gpus_of_earlier_hosts_are_forgotten() {
    let node = TestNode::new();
    let sim = node.install("8xL4");
    for host in 1..=4 {
        let gpus = node.start().await;
        gpus.set_usage(Arc::new(|_| GpuUsage::default()));
        assert_eq!(gpus.inventory().borrow().gpus.len(), 8 * host);
        gpus.shutdown().await;
        migrate(&sim, host as u32);
    }
    let gpus = node.start_with(Duration::ZERO).await;
    // Without the records no GPU is forgotten.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(gpus.inventory().borrow().gpus.len(), 40);
    // A claim names a GPU of the first host, and a rule of the node configuration names another.
    let claimed = gpus.inventory().borrow().gpus[0].uuid.clone();
    gpus.set_configured(Some([GpuNumber(1)].into()));
    gpus.set_usage(Arc::new(move |gpu| GpuUsage { named: *gpu == claimed, instances: false, debts: false }));
    let kept = until(&gpus, |now| now.gpus.len() == 10).await;
    let missing = kept.gpus.iter().filter(|gpu| gpu.presence == Presence::Missing);
    assert_eq!(missing.map(|gpu| gpu.number.0).collect::<Vec<_>>(), [0, 1]);
    gpus.set_usage(Arc::new(|_| GpuUsage::default()));
    gpus.set_configured(Some([].into()));
    until(&gpus, |now| now.gpus.len() == 8 && all(now, Presence::Present)).await;
    gpus.shutdown().await;
    let gpus = node.start().await;
    assert_eq!(gpus.inventory().borrow().gpus.len(), 8, "they stay forgotten");
    gpus.shutdown().await;
}

#[tokio::test]
async fn h5_missing_gpu_is_kept_until_the_time_has_passed() {
    let node = TestNode::new();
    let sim = node.install("2xL4");
    let gpus = node.start_with(Duration::from_secs(3)).await;
    gpus.set_usage(Arc::new(|_| GpuUsage::default()));
    update_sim(&sim, |state| state.gpus[1].missing = true);
    until(&gpus, |now| now.gpus[1].presence == Presence::Missing).await;
    gpus.shutdown().await;
    let gpus = node.start_with(Duration::from_secs(3)).await;
    gpus.set_usage(Arc::new(|_| GpuUsage::default()));
    assert_eq!(gpus.inventory().borrow().gpus.len(), 2, "a restart does not shorten the time");
    until(&gpus, |now| now.gpus.len() == 1).await;
    gpus.shutdown().await;
}

#[tokio::test]
async fn h5_operator_forgets_a_missing_gpu_at_once() {
    let node = TestNode::new();
    let sim = node.install("2xL4");
    let gpus = node.start().await;
    let (present, gone) = (uuid(&sim, 0), uuid(&sim, 1));
    update_sim(&sim, |state| state.gpus[1].missing = true);
    until(&gpus, |now| now.gpus[1].presence == Presence::Missing).await;
    assert_eq!(gpus.forget("gpu-7").await, Err(ForgetError::Unknown { gpu: "gpu-7".to_owned() }));
    assert_eq!(gpus.forget("0").await, Err(ForgetError::NotMissing { gpu: present }));
    gpus.set_usage(Arc::new(|_| GpuUsage { named: true, instances: false, debts: false }));
    assert_eq!(gpus.forget(gone.as_str()).await, Err(ForgetError::InUse { gpu: gone }));
    gpus.set_usage(Arc::new(|_| GpuUsage::default()));
    assert_eq!(gpus.forget("gpu-1").await, Ok(()));
    assert_eq!(gpus.inventory().borrow().gpus.len(), 1);
    gpus.shutdown().await;
    assert_eq!(gpus.forget("gpu-1").await, Err(ForgetError::Stopped));
    let gpus = node.start().await;
    assert_eq!(gpus.inventory().borrow().gpus.len(), 1);
    gpus.shutdown().await;
}

#[tokio::test]
async fn new_instances_are_detected_and_classified() {
    let node = TestNode::new();
    let sim = node.install("2xH100-SXM5-80GB");
    let gpus = node.start().await;
    let gpu = uuid(&sim, 0);
    let ours: Arc<Ownership> = Arc::new({
        let gpu = gpu.clone();
        move |of, profile, start| (of, profile, start) == (&gpu, 19, 0)
    });
    gpus.set_ownership(ours);
    let queue = gpus.queue(&gpu).expect("queue");
    queue.set_mig_mode(MigMode::On).await.expect("MIG on");
    let place = |start| divvy_model::Placement { start, size: 1 };
    queue.create_gpu_instance(19, place(0)).await.expect("GPU instance");
    gpus.refresh(&gpu).await;
    assert_eq!(
        origins(&gpus.inventory().borrow().gpus[0]),
        [(19, Origin::Ours)],
        "the inventory is current when refresh returns"
    );

    // A foreign instance, which NVML reports.
    update_sim(&sim, |state| {
        state.create_gi(0, 19, Some(divvy_sim::state::Placement { start: 3, size: 1 })).expect("created");
    });
    let expected = [(19, Origin::Ours), (19, Origin::Foreign)];
    let both = until(&gpus, |now| origins(&now.gpus[0]) == expected).await;
    assert_eq!(origins(&both.gpus[1]), []);
    gpus.set_ownership(Arc::new(|_, _, _| true));
    until(&gpus, |now| origins(&now.gpus[0]) == [(19, Origin::Ours), (19, Origin::Ours)]).await;
    gpus.shutdown().await;
}

#[tokio::test]
async fn released_instance_is_never_reported_as_foreign() {
    let node = TestNode::new();
    let sim = node.install("2xH100-SXM5-80GB");
    let gpus = node.start().await;
    let (gpu, other) = (uuid(&sim, 0), uuid(&sim, 1));
    let recorded = Arc::new(AtomicBool::new(true));
    let ours: Arc<Ownership> = Arc::new({
        let recorded = recorded.clone();
        move |_, _, _| recorded.load(Ordering::SeqCst)
    });
    gpus.set_ownership(ours.clone());
    let queue = gpus.queue(&gpu).expect("queue");
    queue.set_mig_mode(MigMode::On).await.expect("MIG on");
    let place = divvy_model::Placement { start: 0, size: 1 };
    let id = queue.create_gpu_instance(19, place).await.expect("GPU instance");
    gpus.refresh(&gpu).await;

    // Ownership is evaluated again with the last reading, which still shows the instance.
    let pattern = Pattern { call: "nvmlDeviceGetMinorNumber".to_owned(), gpu: Some(0) };
    update_sim(&sim, |state| state.add_hold(pattern, None, When::Before));
    recorded.store(false, Ordering::SeqCst);
    gpus.refresh(&other).await;
    gpus.set_ownership(ours);
    gpus.refresh(&other).await;
    assert_eq!(origins(&gpus.inventory().borrow().gpus[0]), [(19, Origin::Ours)]);
    recorded.store(true, Ordering::SeqCst);
    update_sim(&sim, |state| state.release(None));
    gpus.refresh(&gpu).await;
    assert_eq!(origins(&gpus.inventory().borrow().gpus[0]), [(19, Origin::Ours)]);

    // The instance is destroyed while a reading that has seen it is in progress.
    let pattern = Pattern { call: "nvmlGpuInstanceGetComputeInstances".to_owned(), gpu: Some(0) };
    update_sim(&sim, |state| state.add_hold(pattern, Some(1), When::After));
    let mut seen = gpus.inventory();
    let release = async {
        while sim.read().expect("state").control.held.is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        update_sim(&sim, |state| state.destroy_gi(0, id).expect("destroyed"));
        recorded.store(false, Ordering::SeqCst);
        update_sim(&sim, |state| state.release(None));
    };
    let watch = async {
        loop {
            seen.changed().await.expect("the GPU manager runs");
            let now = origins(&seen.borrow_and_update().gpus[0]);
            assert_ne!(now, [(19, Origin::Foreign)]);
            if now.is_empty() {
                break;
            }
        }
    };
    tokio::join!(gpus.refresh(&gpu), release, watch);

    // A foreign instance at the same placement is detected at the next reading.
    update_sim(&sim, |state| {
        state.create_gi(0, 19, Some(divvy_sim::state::Placement { start: 0, size: 1 })).expect("created");
    });
    gpus.refresh(&gpu).await;
    assert_eq!(origins(&gpus.inventory().borrow().gpus[0]), [(19, Origin::Foreign)]);
    gpus.shutdown().await;
}

#[tokio::test]
async fn stuck_gpu_has_a_condition_until_the_call_returns() {
    let node = TestNode::new();
    let sim = node.install("2xH100-SXM5-80GB");
    let gpus = node.start().await;
    let mut events = gpus.events();
    let gpu = uuid(&sim, 0);
    let call = "nvmlDeviceSetMigMode";
    let pattern = Pattern { call: call.to_owned(), gpu: Some(0) };
    update_sim(&sim, |state| state.add_hold(pattern, None, When::Before));
    let error = gpus.queue(&gpu).expect("queue").set_mig_mode(MigMode::On).await.expect_err("held");
    assert!(error.may_take_effect(), "{error:?}");
    let stuck = until(&gpus, |now| !now.gpus[0].conditions.is_empty()).await;
    assert_eq!(stuck.gpus[0].health(), HealthState::Stuck);
    assert_eq!((stuck.gpus[0].presence, stuck.gpus[1].conditions.len()), (Presence::Present, 0));

    update_sim(&sim, |state| state.release(None));
    let late = loop {
        if let Event::LateReturn(late) = events.recv().await.expect("event") {
            break late;
        }
    };
    assert_eq!((late.gpu, late.call), (gpu, call));
    let now = gpus.inventory().borrow().clone();
    assert_eq!(now.gpus[0].conditions, [], "the GPU is read again before the event is sent");
    assert!(matches!(now.gpus[0].mig, Mig::Supported { mode: MigMode::On, .. }), "the late call took effect");
    gpus.shutdown().await;
}

#[tokio::test]
async fn h8_gpu_is_published_while_its_mig_facts_are_unreadable() {
    let node = TestNode::new();
    let sim = node.install("H100-SXM5-80GB");
    let fail = |call: &str| {
        let pattern = Pattern::new(call);
        update_sim(&sim, |state| state.add_fault(pattern, None, When::Before, divvy_sim::Code::Unknown));
    };
    fail("nvmlDeviceGetGpuInstanceProfileInfo*");
    let gpus = node.start().await;
    let gpu = gpus.inventory().borrow().gpus[0].clone();
    assert!(matches!(gpu.conditions[..], [Condition::MigUnreadable { .. }]), "{:?}", gpu.conditions);
    assert_eq!((gpu.presence, &gpu.mig, gpu.obstacle(None)), (Presence::Present, &Mig::Unsupported, None));
    // A record that names an instance of it proves that instances were published.
    gpus.set_usage(Arc::new(|_| GpuUsage { named: true, instances: true, debts: false }));
    until(&gpus, |now| now.gpus[0].obstacle(None).is_some()).await;
    gpus.set_usage(Arc::new(|_| GpuUsage::default()));
    until(&gpus, |now| now.gpus[0].obstacle(None).is_none()).await;

    update_sim(&sim, |state| state.clear_faults(None));
    let read = until(&gpus, |now| now.gpus[0].conditions.is_empty()).await;
    assert!(matches!(&read.gpus[0].mig, Mig::Supported { profiles, .. } if !profiles.is_empty()));
    fail("nvmlDeviceGetMigMode");
    gpus.refresh_soon(&gpu.uuid);
    let tainted = until(&gpus, |now| now.gpus[0].obstacle(None).is_some()).await;
    assert_eq!(tainted.gpus[0].mig, read.gpus[0].mig, "the last facts stay");
    gpus.shutdown().await;
}

#[tokio::test]
async fn failed_call_marks_a_lost_gpu() {
    let node = TestNode::new();
    let sim = node.install("2xH100-SXM5-80GB");
    let gpus = node.start().await;
    let gpu = uuid(&sim, 1);
    update_sim(&sim, |state| state.lose(1, true).expect("lost"));
    assert!(gpus.queue(&gpu).expect("queue").mig_mode().await.is_err());
    let lost = until(&gpus, |now| !now.gpus[1].conditions.is_empty()).await;
    assert_eq!(lost.gpus[1].health(), HealthState::Lost);
    assert_eq!(lost.gpus[0].conditions, []);
    update_sim(&sim, |state| state.find(1).expect("found"));
    gpus.refresh_soon(&gpu);
    until(&gpus, |now| now.gpus[1].conditions.is_empty()).await;
    gpus.shutdown().await;
}
