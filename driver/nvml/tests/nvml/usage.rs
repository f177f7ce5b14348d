//! Who uses a GPU, and what cgroups may have of it.

use crate::world::World;
use divvy_model::inventory::MigMode;
use divvy_model::placement::Placement;
use divvy_nvml::{CgroupMemory, Code, GpuQueue, Limits, ProcessTimes, ProcessUse};
use divvy_sim::state::{Process, ProcessKind};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MIB: u64 = 1 << 20;

fn run(world: &World, pid: u32, kind: ProcessKind, instance: Option<(u32, u32)>, memory_mib: u64) {
    let process = Process { pid, name: "python3".to_owned(), kind, instance, memory_mib };
    world.change(|state| state.gpus[0].processes.push(process));
}

/// A process, its GPU and compute instance, and its memory in MiB.
type Use = (u32, Option<(u32, u32)>, u64);

async fn check(queue: &GpuQueue, expected: &[Use]) {
    let use_of =
        |(pid, instance, mib): &Use| ProcessUse { pid: *pid, instance: *instance, bytes: Some(mib * MIB) };
    let expected: Vec<_> = expected.iter().map(use_of).collect();
    assert_eq!(queue.usage().await, Ok(expected));
}

#[tokio::test]
async fn each_process_counts_once_however_many_lists_it_is_in() {
    let world = World::new("H100-SXM5-80GB");
    let session = world.open(Limits::default());
    let queue = world.queue(&session, 0);
    check(&queue, &[]).await;
    run(&world, 9, ProcessKind::Mps, None, 7);
    for (kind, memory) in [(ProcessKind::Compute, 300), (ProcessKind::Graphics, 300)] {
        run(&world, 7, kind, None, memory);
    }
    check(&queue, &[(7, None, 300), (9, None, 7)]).await;
}

#[tokio::test]
async fn a_process_is_told_with_its_instance() {
    let world = World::new("H100-SXM5-80GB");
    let session = world.open(Limits::default());
    let queue = world.queue(&session, 0);
    queue.set_mig_mode(MigMode::On).await.expect("MIG mode");
    let gi = queue.create_gpu_instance(9, Placement { start: 4, size: 4 }).await.expect("an instance");
    let ci = queue.create_compute_instance(gi).await.expect("its compute instance");
    run(&world, 7, ProcessKind::Compute, Some((gi, ci.id)), 512);
    check(&queue, &[(7, Some((gi, ci.id)), 512)]).await;
}

/// A node whose GPU driver has that version, and a cgroup with one process.
fn node(driver: &str) -> (World, PathBuf) {
    let world = World::new("H100-SXM5-80GB");
    world.change(|state| state.driver = driver.to_owned());
    let cgroup = world.sim.root().join("cgroup");
    std::fs::create_dir(&cgroup).expect("created");
    std::fs::write(cgroup.join("cgroup.procs"), "7\n").expect("written");
    run(&world, 7, ProcessKind::Compute, None, 300);
    run(&world, 8, ProcessKind::Compute, None, 300);
    (world, cgroup)
}

#[tokio::test]
async fn a_cgroup_is_held_to_its_limit_for_as_long_as_it_is_there() {
    let (world, cgroup) = node("615.10.01");
    let session = world.open(Limits::default());
    let queue = world.queue(&session, 0);
    assert_eq!(queue.cgroup_memory(cgroup.clone()).await, Ok(None));
    for limit in [1 << 30, 1 << 30, 2 << 30] {
        assert_eq!(queue.hold_cgroup(cgroup.clone(), limit).await, Ok(true));
        let memory = CgroupMemory { soft: limit, hard: Some(limit), used: 300 * MIB };
        assert_eq!(queue.cgroup_memory(cgroup.clone()).await, Ok(Some(memory)));
    }
    let error = queue.hold_cgroup(cgroup.clone(), 81 << 30).await.expect_err("more than there is");
    assert_eq!(error.code(), Some(Code::InvalidArgument));
    std::fs::remove_dir_all(&cgroup).expect("removed");
    let error = queue.hold_cgroup(cgroup.clone(), 1 << 30).await.expect_err("gone");
    assert_eq!(error.code(), Some(Code::OperatingSystem));
    std::fs::create_dir(&cgroup).expect("created");
    assert_eq!(queue.cgroup_memory(cgroup).await, Ok(None), "another of the same name");
}

#[tokio::test]
async fn an_older_gpu_driver_and_a_gpu_cut_into_instances_hold_no_cgroups() {
    let (world, cgroup) = node("580.95.05");
    let session = world.open(Limits::default());
    let queue = world.queue(&session, 0);
    assert_eq!(queue.hold_cgroup(cgroup.clone(), 1 << 30).await, Ok(false));
    assert_eq!(queue.cgroup_memory(cgroup.clone()).await, Ok(None));
    world.change(|state| {
        state.driver = "615.10.01".to_owned();
        state.gpus[0].processes.clear();
    });
    queue.set_mig_mode(MigMode::On).await.expect("MIG mode");
    assert_eq!(queue.hold_cgroup(cgroup, 1 << 30).await, Ok(false));
}

#[tokio::test]
async fn the_time_of_each_process_is_told_as_long_as_there_is_no_instance() {
    let world = World::new("H100-SXM5-80GB");
    let session = world.open(Limits::default());
    let queue = world.queue(&session, 0);
    assert_eq!(queue.times(0).await, Ok(Some(ProcessTimes::default())));
    run(&world, 7, ProcessKind::Compute, None, 300);
    run(&world, 8, ProcessKind::Compute, None, 300);
    // What the simulator says of processes that do nothing.
    let told = queue.times(0).await.expect("an answer").expect("times");
    assert_eq!(told.percent, [(7, 30), (8, 30)].into());
    let ago = |us: u64| SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_micros(us));
    assert!(
        told.until_us.is_some_and(|us| ago(us).is_ok_and(|ago| ago < Duration::from_secs(60))),
        "{told:?}"
    );
    world.change(|state| state.gpus[0].processes.clear());
    queue.set_mig_mode(MigMode::On).await.expect("MIG mode");
    assert_eq!(queue.times(0).await, Ok(None));
}
