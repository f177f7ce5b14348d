//! The node's GPUs on a simulated node: found, lost, changed by others, without a driver.

use divvy_api::GpuUuid;
use divvy_driver::discover::Ours;
use divvy_driver::gpus::{Gpus, GpusOptions, Unavailable};
use divvy_model::inventory::{Condition, Gpu, Inventory, Mig, MigMode, Origin, Presence};
use divvy_nvml::{Event, Limits};
use divvy_sim::control::{Pattern, When};
use divvy_sim::{Options, Sim, State, up};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("temporary directory") }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// Installs a GPU driver with those GPUs.
    fn install(&self, gpus: &str) -> Sim {
        let library = divvy_sim::library().expect("simulated library");
        let program = std::env::current_exe().expect("this test");
        up(&self.root(), gpus, &Options::new(library, program)).expect("simulator")
    }

    async fn start(&self) -> Gpus {
        let soon = Duration::from_millis(1500);
        let limits = Limits { query: soon, mig_mode: soon, create: soon, destroy: soon };
        let gpus = Gpus::start(GpusOptions {
            driver_root: self.root(),
            sys_root: self.root().join("sys"),
            state_dir: self.dir.path().join("state"),
            limits,
            poll: Duration::from_millis(20),
            first_reading: Duration::from_secs(30),
        });
        gpus.await
    }
}

fn change(sim: &Sim, change: impl FnOnce(&mut State)) {
    let changed = sim.update(|state| {
        change(state);
        Ok(())
    });
    changed.expect("changed");
}

fn uuid(sim: &Sim, slot: usize) -> GpuUuid {
    GpuUuid::from(sim.read().expect("state").gpus[slot].uuid.as_str())
}

/// Waits for the inventory that is as wanted; a test that waits for ever hangs visibly.
async fn until(gpus: &Gpus, wanted: impl Fn(&Inventory) -> bool) -> Arc<Inventory> {
    let mut inventory = gpus.inventory();
    let found = tokio::time::timeout(Duration::from_secs(60), inventory.wait_for(|now| wanted(now))).await;
    found.unwrap_or_else(|_| panic!("still {:#?}", gpus.inventory().borrow())).expect("a keeper").clone()
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
async fn the_first_inventory_is_the_whole_one() {
    let world = World::new();
    let sim = world.install("2xH100-SXM5-80GB,A30-24GB,L4");
    let gpus = world.start().await;
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
    let stranger = GpuUuid::from("GPU-0");
    assert_eq!(gpus.queue(&stranger).err(), Some(Unavailable::Unknown { gpu: stranger }));
    gpus.shutdown().await;
    let gone = uuid(&sim, 0);
    assert_eq!(gpus.queue(&gone).err(), Some(Unavailable::NoDriver { gpu: gone }));
}

#[tokio::test]
async fn a_driver_that_comes_late_is_waited_for() {
    let world = World::new();
    let gpus = world.start().await;
    assert_eq!(**gpus.inventory().borrow(), Inventory::default());
    let sim = world.install("L4");
    let found = until(&gpus, |now| all(now, Presence::Present)).await;
    assert_eq!(found.gpus[0].uuid, uuid(&sim, 0));
    gpus.shutdown().await;
}

#[tokio::test]
async fn a_driver_that_is_replaced_is_opened_again() {
    let world = World::new();
    let sim = world.install("2xH100-SXM5-80GB");
    let gpus = world.start().await;
    let before = gpus.inventory().borrow().clone();
    divvy_sim::up::replace_driver(&sim, "590.44.01").expect("replaced");
    let after = until(&gpus, |now| now.driver_version == "590.44.01").await;
    assert_eq!(presences(&after), presences(&before));
    assert!(gpus.queue(&after.gpus[0].uuid).expect("queue").mig_mode().await.is_ok());

    std::fs::remove_dir_all(world.root().join("usr")).expect("uninstalled");
    let without = until(&gpus, |now| all(now, Presence::Missing)).await;
    assert_eq!(without.gpus.len(), 2, "nothing is forgotten");
    gpus.shutdown().await;
}

#[tokio::test]
async fn a_drained_driver_stays_closed_until_it_is_resumed() {
    let world = World::new();
    let sim = world.install("L4");
    let gpus = world.start().await;
    let gpu = uuid(&sim, 0);
    let before = gpus.queue(&gpu).expect("queue");
    gpus.drain().await;
    assert!(all(&gpus.inventory().borrow(), Presence::Missing));
    assert!(before.state().await.is_err() && gpus.queue(&gpu).is_err());
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    // The simulator itself has files of its own mapped.
    let libraries = world.root().join("usr/lib");
    assert!(!maps.contains(libraries.to_str().expect("utf-8")), "the library is unloaded");
    gpus.resume();
    until(&gpus, |now| all(now, Presence::Present)).await;
    assert!(gpus.queue(&gpu).expect("queue").state().await.is_ok());
    gpus.shutdown().await;
}

#[tokio::test]
async fn a_gpu_that_a_reboot_does_not_find_keeps_its_number_and_place() {
    let world = World::new();
    let sim = world.install("4xH100-SXM5-80GB");
    let gpus = world.start().await;
    gpus.shutdown().await;
    let before = gpus.inventory().borrow().clone();
    change(&sim, |state| {
        state.lose(1, false).expect("lost");
        state.reboot();
    });
    let gpus = world.start().await;
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
async fn instances_that_come_and_go_are_seen_and_judged() {
    let world = World::new();
    let sim = world.install("2xH100-SXM5-80GB");
    let gpus = world.start().await;
    let gpu = uuid(&sim, 0);
    let ours: Arc<Ours> = Arc::new({
        let gpu = gpu.clone();
        move |of, profile, start| (of, profile, start) == (&gpu, 19, 0)
    });
    gpus.set_ours(ours);
    let queue = gpus.queue(&gpu).expect("queue");
    queue.set_mig_mode(MigMode::On).await.expect("MIG on");
    let place = |start| divvy_model::Placement { start, size: 1 };
    queue.create_gpu_instance(19, place(0)).await.expect("GPU instance");
    gpus.refresh(&gpu).await;
    assert_eq!(
        origins(&gpus.inventory().borrow().gpus[0]),
        [(19, Origin::Ours)],
        "seen when refresh returns"
    );

    // Somebody else's: NVML tells.
    change(&sim, |state| {
        state.create_gi(0, 19, Some(divvy_sim::state::Placement { start: 3, size: 1 })).expect("created");
    });
    let judged = [(19, Origin::Ours), (19, Origin::Foreign)];
    let both = until(&gpus, |now| origins(&now.gpus[0]) == judged).await;
    assert_eq!(origins(&both.gpus[1]), []);
    gpus.set_ours(Arc::new(|_, _, _| true));
    until(&gpus, |now| origins(&now.gpus[0]) == [(19, Origin::Ours), (19, Origin::Ours)]).await;
    gpus.shutdown().await;
}

#[tokio::test]
async fn an_instance_given_back_is_never_taken_for_a_strangers() {
    let world = World::new();
    let sim = world.install("2xH100-SXM5-80GB");
    let gpus = world.start().await;
    let (gpu, other) = (uuid(&sim, 0), uuid(&sim, 1));
    let recorded = Arc::new(AtomicBool::new(true));
    let ours: Arc<Ours> = Arc::new({
        let recorded = recorded.clone();
        move |_, _, _| recorded.load(Ordering::SeqCst)
    });
    gpus.set_ours(ours.clone());
    let queue = gpus.queue(&gpu).expect("queue");
    queue.set_mig_mode(MigMode::On).await.expect("MIG on");
    let place = divvy_model::Placement { start: 0, size: 1 };
    let id = queue.create_gpu_instance(19, place).await.expect("GPU instance");
    gpus.refresh(&gpu).await;

    // All is judged anew, by a reading that shows it still, before the next one is in.
    let pattern = Pattern { call: "nvmlDeviceGetMinorNumber".to_owned(), gpu: Some(0) };
    change(&sim, |state| state.add_hold(pattern, None, When::Before));
    recorded.store(false, Ordering::SeqCst);
    gpus.refresh(&other).await;
    gpus.set_ours(ours);
    gpus.refresh(&other).await;
    assert_eq!(origins(&gpus.inventory().borrow().gpus[0]), [(19, Origin::Ours)]);
    recorded.store(true, Ordering::SeqCst);
    change(&sim, |state| state.release(None));
    gpus.refresh(&gpu).await;
    assert_eq!(origins(&gpus.inventory().borrow().gpus[0]), [(19, Origin::Ours)]);

    // It goes while a reading that has seen it is under way.
    let pattern = Pattern { call: "nvmlGpuInstanceGetComputeInstances".to_owned(), gpu: Some(0) };
    change(&sim, |state| state.add_hold(pattern, Some(1), When::After));
    let mut seen = gpus.inventory();
    let giving_back = async {
        while sim.read().expect("state").control.held.is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        change(&sim, |state| state.destroy_gi(0, id).expect("destroyed"));
        recorded.store(false, Ordering::SeqCst);
        change(&sim, |state| state.release(None));
    };
    let watching = async {
        loop {
            seen.changed().await.expect("a keeper");
            let now = origins(&seen.borrow_and_update().gpus[0]);
            assert_ne!(now, [(19, Origin::Foreign)]);
            if now.is_empty() {
                break;
            }
        }
    };
    tokio::join!(gpus.refresh(&gpu), giving_back, watching);

    // A stranger's at the same place: known when the GPU was read again.
    change(&sim, |state| {
        state.create_gi(0, 19, Some(divvy_sim::state::Placement { start: 0, size: 1 })).expect("created");
    });
    gpus.refresh(&gpu).await;
    assert_eq!(origins(&gpus.inventory().borrow().gpus[0]), [(19, Origin::Foreign)]);
    gpus.shutdown().await;
}

#[tokio::test]
async fn a_stuck_gpu_says_so_until_the_call_returns() {
    let world = World::new();
    let sim = world.install("2xH100-SXM5-80GB");
    let gpus = world.start().await;
    let mut events = gpus.events();
    let gpu = uuid(&sim, 0);
    let call = "nvmlDeviceSetMigMode";
    let pattern = Pattern { call: call.to_owned(), gpu: Some(0) };
    change(&sim, |state| state.add_hold(pattern, None, When::Before));
    let error = gpus.queue(&gpu).expect("queue").set_mig_mode(MigMode::On).await.expect_err("held");
    assert!(error.may_take_effect(), "{error:?}");
    let stuck = until(&gpus, |now| !now.gpus[0].conditions.is_empty()).await;
    assert_eq!(stuck.gpus[0].conditions, [Condition::Stuck { call: call.to_owned() }]);
    assert_eq!((stuck.gpus[0].presence, stuck.gpus[1].conditions.len()), (Presence::Present, 0));

    change(&sim, |state| state.release(None));
    let late = loop {
        if let Event::Late(late) = events.recv().await.expect("event") {
            break late;
        }
    };
    assert_eq!((late.gpu, late.call), (gpu, call));
    let now = gpus.inventory().borrow().clone();
    assert_eq!(now.gpus[0].conditions, [], "read again before it is told");
    assert!(matches!(now.gpus[0].mig, Mig::Supported { mode: MigMode::On, .. }), "the late call took effect");
    gpus.shutdown().await;
}

#[tokio::test]
async fn a_lost_gpu_is_marked_by_the_first_who_notices() {
    let world = World::new();
    let sim = world.install("2xH100-SXM5-80GB");
    let gpus = world.start().await;
    let gpu = uuid(&sim, 1);
    change(&sim, |state| state.lose(1, true).expect("lost"));
    assert!(gpus.queue(&gpu).expect("queue").mig_mode().await.is_err());
    let lost = until(&gpus, |now| !now.gpus[1].conditions.is_empty()).await;
    assert_eq!(lost.gpus[1].conditions, [Condition::Lost]);
    assert_eq!(lost.gpus[0].conditions, []);
    change(&sim, |state| state.find(1).expect("found"));
    gpus.refresh_soon(&gpu);
    until(&gpus, |now| now.gpus[1].conditions.is_empty()).await;
    gpus.shutdown().await;
}
