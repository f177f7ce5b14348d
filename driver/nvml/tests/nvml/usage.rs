//! GPU usage by process, and memory limits of cgroups.

use crate::test_node::TestNode;
use divvy_model::inventory::MigMode;
use divvy_model::placement::Placement;
use divvy_nvml::{CgroupMemory, Code, GpuQueue, ProcessUse, ProcessUtilization, Timeouts};
use divvy_sim::state::{Process, ProcessKind};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MIB: u64 = 1 << 20;

fn run(node: &TestNode, pid: u32, kind: ProcessKind, instance: Option<(u32, u32)>, memory_mib: u64) {
    let process = Process { pid, name: "python3".to_owned(), kind, instance, memory_mib };
    node.change(|state| state.gpus[0].processes.push(process));
}

/// PID, GPU and compute instance ids, memory in MiB.
type Use = (u32, Option<(u32, u32)>, u64);

async fn check(queue: &GpuQueue, expected: &[Use]) {
    let use_of =
        |(pid, instance, mib): &Use| ProcessUse { pid: *pid, instance: *instance, bytes: Some(mib * MIB) };
    let expected: Vec<_> = expected.iter().map(use_of).collect();
    assert_eq!(queue.usage().await, Ok(expected));
}

#[tokio::test]
async fn process_in_several_lists_is_counted_once() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    check(&queue, &[]).await;
    run(&node, 9, ProcessKind::Mps, None, 7);
    for (kind, memory) in [(ProcessKind::Compute, 300), (ProcessKind::Graphics, 300)] {
        run(&node, 7, kind, None, memory);
    }
    check(&queue, &[(7, None, 300), (9, None, 7)]).await;
}

#[tokio::test]
async fn process_is_reported_with_its_instance() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    queue.set_mig_mode(MigMode::On).await.expect("MIG mode");
    let gi = queue.create_gpu_instance(9, Placement { start: 4, size: 4 }).await.expect("an instance");
    let ci = queue.create_compute_instance(gi).await.expect("its compute instance");
    run(&node, 7, ProcessKind::Compute, Some((gi, ci.id)), 512);
    check(&queue, &[(7, Some((gi, ci.id)), 512)]).await;
}

/// A node with this GPU driver version, and a cgroup with one process.
fn node_with_cgroup(driver: &str) -> (TestNode, PathBuf) {
    let node = TestNode::new("H100-SXM5-80GB");
    node.change(|state| state.driver = driver.to_owned());
    let cgroup = node.sim.root().join("cgroup");
    std::fs::create_dir(&cgroup).expect("created");
    std::fs::write(cgroup.join("cgroup.procs"), "7\n").expect("written");
    run(&node, 7, ProcessKind::Compute, None, 300);
    run(&node, 8, ProcessKind::Compute, None, 300);
    (node, cgroup)
}

#[tokio::test]
async fn cgroup_is_limited_while_it_exists() {
    let (node, cgroup) = node_with_cgroup("615.10.01");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    assert_eq!(queue.cgroup_memory(cgroup.clone()).await, Ok(None));
    for limit in [1 << 30, 1 << 30, 2 << 30] {
        assert_eq!(queue.limit_cgroup_memory(cgroup.clone(), limit).await, Ok(true));
        let memory = CgroupMemory { soft: limit, hard: Some(limit), used: 300 * MIB };
        assert_eq!(queue.cgroup_memory(cgroup.clone()).await, Ok(Some(memory)));
    }
    let error = queue.limit_cgroup_memory(cgroup.clone(), 81 << 30).await.expect_err("more than there is");
    assert_eq!(error.code(), Some(Code::InvalidArgument));
    std::fs::remove_dir_all(&cgroup).expect("removed");
    let error = queue.limit_cgroup_memory(cgroup.clone(), 1 << 30).await.expect_err("gone");
    assert_eq!(error.code(), Some(Code::OperatingSystem));
    std::fs::create_dir(&cgroup).expect("created");
    assert_eq!(queue.cgroup_memory(cgroup).await, Ok(None), "another of the same name");
}

#[tokio::test]
async fn old_drivers_and_mig_gpus_have_no_cgroup_limits() {
    let (node, cgroup) = node_with_cgroup("580.95.05");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    assert_eq!(queue.limit_cgroup_memory(cgroup.clone(), 1 << 30).await, Ok(false));
    assert_eq!(queue.cgroup_memory(cgroup.clone()).await, Ok(None));
    node.change(|state| {
        state.driver = "615.10.01".to_owned();
        state.gpus[0].processes.clear();
    });
    queue.set_mig_mode(MigMode::On).await.expect("MIG mode");
    assert_eq!(queue.limit_cgroup_memory(cgroup, 1 << 30).await, Ok(false));
}

#[tokio::test]
async fn process_utilization_is_reported_without_mig() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    assert_eq!(queue.process_utilization(0).await, Ok(Some(ProcessUtilization::default())));
    run(&node, 7, ProcessKind::Compute, None, 300);
    run(&node, 8, ProcessKind::Compute, None, 300);
    // The values that the simulator reports for idle processes.
    let reported = queue.process_utilization(0).await.expect("an answer").expect("times");
    assert_eq!(reported.percent, [(7, 30), (8, 30)].into());
    let ago = |us: u64| SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_micros(us));
    assert!(
        reported.until_us.is_some_and(|us| ago(us).is_ok_and(|ago| ago < Duration::from_secs(60))),
        "{reported:?}"
    );
    node.change(|state| state.gpus[0].processes.clear());
    queue.set_mig_mode(MigMode::On).await.expect("MIG mode");
    assert_eq!(queue.process_utilization(0).await, Ok(None));
}
