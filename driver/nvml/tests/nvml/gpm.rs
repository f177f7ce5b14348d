//! Utilization of GPU instances.

use crate::test_node::TestNode;
use divvy_model::inventory::{GpuInstance, Origin};
use divvy_model::placement::Placement;
use divvy_nvml::{GpuQueue, RawInstance, Session, Timeouts};
use divvy_sim::state::{Process, ProcessKind};
use std::time::Duration;

/// Busy nanoseconds per second that the simulator reports for an idle process.
const SIMULATED_BUSY_NS: u64 = 600_000_000;
/// Time between two queries, more than the update interval of NVML's counters.
const QUERY_PAUSE: Duration = Duration::from_millis(150);

/// A GPU with two halves, each with a compute instance of the given number of slices.
async fn gpu_with_two_halves(gpu: &str, slices: [u32; 2]) -> (TestNode, Session, GpuQueue, Vec<GpuInstance>) {
    let node = TestNode::new(gpu);
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    // As after a GPU reset, if one is needed.
    node.change(|state| state.gpus[0].mig.current = true);
    for (start, slices) in [0, 4].into_iter().zip(slices) {
        let gi = queue.create_gpu_instance(9, Placement { start, size: 4 }).await.expect("an instance");
        // NVML's profile ids of these compute instances start at one slice.
        node.change(|state| {
            state.create_ci(0, gi, slices - 1, None).expect("its compute instance");
        });
    }
    let is = |RawInstance { id, profile_id, placement, compute_instances }| GpuInstance {
        id,
        profile_id,
        placement,
        compute_instances,
        origin: Origin::Ours,
    };
    let instances: Vec<_> = queue.instances().await.expect("instances").into_iter().map(is).collect();
    (node, session, queue, instances)
}

fn add_process(node: &TestNode, instance: &GpuInstance) {
    let name = "python3".to_owned();
    let instance = Some((instance.id, instance.compute_instances[0].id));
    let process = Process { pid: 7, name, kind: ProcessKind::Compute, instance, memory_mib: 300 };
    node.change(|state| state.gpus[0].processes.push(process));
}

/// Queries the instances after a pause, and compares the results in the same order.
async fn check(queue: &GpuQueue, asked: &[&GpuInstance], expected: &[Option<u64>]) {
    tokio::time::sleep(QUERY_PAUSE).await;
    let reported =
        queue.instance_utilization(asked.iter().copied().cloned().collect(), false).await.expect("an answer");
    let busy: Vec<_> = asked.iter().map(|instance| reported.busy.get(&instance.id).copied()).collect();
    assert_eq!(busy, expected);
    let active: Vec<_> =
        asked.iter().map(|instance| reported.active.get(&Some(instance.id)).copied()).collect();
    assert_eq!(active, expected);
}

#[tokio::test]
async fn whole_gpu_is_reported_on_request() {
    let node = TestNode::new("H100-SXM5-80GB");
    let session = node.open(Timeouts::default());
    let queue = node.queue(&session, 0);
    let active = async |whole| {
        tokio::time::sleep(QUERY_PAUSE).await;
        queue.instance_utilization(Vec::new(), whole).await.expect("an answer").active.get(&None).copied()
    };
    assert_eq!([active(true).await, active(true).await, active(false).await], [None, Some(0), None]);
    let process = Process {
        pid: 7,
        name: "python3".to_owned(),
        kind: ProcessKind::Compute,
        instance: None,
        memory_mib: 300,
    };
    node.change(|state| state.gpus[0].processes.push(process));
    assert_eq!([active(true).await, active(true).await], [None, Some(SIMULATED_BUSY_NS)]);
}

#[tokio::test]
async fn instance_time_counts_since_the_previous_query() {
    let (node, _session, queue, instances) = gpu_with_two_halves("H100-SXM5-80GB", [3, 3]).await;
    let [one, other] = &instances[..] else { panic!("two halves") };
    add_process(&node, one);
    check(&queue, &[one, other], &[None, None]).await;
    check(&queue, &[one, other], &[Some(SIMULATED_BUSY_NS), Some(0)]).await;
    check(&queue, &[one], &[Some(SIMULATED_BUSY_NS)]).await;
    // The previous sample was dropped.
    check(&queue, &[one, other], &[Some(SIMULATED_BUSY_NS), None]).await;
    node.change(|state| state.gpus[0].processes.clear());
    check(&queue, &[one, other], &[Some(SIMULATED_BUSY_NS / 2), Some(0)]).await;
    check(&queue, &[one, other], &[Some(0), Some(0)]).await;
    // A new instance with the same id has no earlier sample.
    queue.destroy_compute_instance(one.id, one.compute_instances[0].id).await.expect("destroyed");
    queue.destroy_gpu_instance(one.id).await.expect("destroyed");
    assert_eq!(queue.create_gpu_instance(9, one.placement).await, Ok(one.id));
    check(&queue, &[one], &[None]).await;
    check(&queue, &[one], &[Some(0)]).await;
}

#[tokio::test]
async fn partly_filled_instances_and_old_gpus_are_unknown() {
    let (node, _session, queue, instances) = gpu_with_two_halves("H100-SXM5-80GB", [3, 2]).await;
    let [whole, part] = &instances[..] else { panic!("two halves") };
    add_process(&node, part);
    check(&queue, &[whole, part], &[None, None]).await;
    check(&queue, &[whole, part], &[Some(0), None]).await;
    let (_world, _session, queue, instances) = gpu_with_two_halves("A100-SXM4-80GB", [3, 3]).await;
    let all: Vec<_> = instances.iter().collect();
    check(&queue, &all, &[None, None]).await;
    check(&queue, &all, &[None, None]).await;
}
