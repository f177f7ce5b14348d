//! How much of their time GPU instances had.

use crate::world::World;
use divvy_model::inventory::{GpuInstance, Origin};
use divvy_model::placement::Placement;
use divvy_nvml::{GpuQueue, Limits, RawInstance, Session};
use divvy_sim::state::{Process, ProcessKind};
use std::time::Duration;

/// What the simulator says of processes that do nothing.
const BUSY: u64 = 600_000_000;
/// Between two questions that are not too near to each other.
const PAUSE: Duration = Duration::from_millis(150);

/// A GPU with two halves, and a compute instance of so many slices in each.
async fn halves(gpu: &str, slices: [u32; 2]) -> (World, Session, GpuQueue, Vec<GpuInstance>) {
    let world = World::new(gpu);
    let session = world.open(Limits::default());
    let queue = world.queue(&session, 0);
    // As after a reset, where one is needed.
    world.change(|state| state.gpus[0].mig.current = true);
    for (start, slices) in [0, 4].into_iter().zip(slices) {
        let gi = queue.create_gpu_instance(9, Placement { start, size: 4 }).await.expect("an instance");
        // NVML numbers these profiles from one slice on.
        world.change(|state| {
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
    (world, session, queue, instances)
}

fn works(world: &World, instance: &GpuInstance) {
    let name = "python3".to_owned();
    let instance = Some((instance.id, instance.compute_instances[0].id));
    let process = Process { pid: 7, name, kind: ProcessKind::Compute, instance, memory_mib: 300 };
    world.change(|state| state.gpus[0].processes.push(process));
}

/// After a pause: what of these is known, in order.
async fn check(queue: &GpuQueue, asked: &[&GpuInstance], expected: &[Option<u64>]) {
    tokio::time::sleep(PAUSE).await;
    let told =
        queue.instance_times(asked.iter().copied().cloned().collect(), false).await.expect("an answer");
    let busy: Vec<_> = asked.iter().map(|instance| told.busy.get(&instance.id).copied()).collect();
    assert_eq!(busy, expected);
    let active: Vec<_> = asked.iter().map(|instance| told.active.get(&Some(instance.id)).copied()).collect();
    assert_eq!(active, expected);
}

#[tokio::test]
async fn a_whole_gpu_has_its_own_time_where_it_is_asked() {
    let world = World::new("H100-SXM5-80GB");
    let session = world.open(Limits::default());
    let queue = world.queue(&session, 0);
    let active = async |whole| {
        tokio::time::sleep(PAUSE).await;
        queue.instance_times(Vec::new(), whole).await.expect("an answer").active.get(&None).copied()
    };
    assert_eq!([active(true).await, active(true).await, active(false).await], [None, Some(0), None]);
    let process = Process {
        pid: 7,
        name: "python3".to_owned(),
        kind: ProcessKind::Compute,
        instance: None,
        memory_mib: 300,
    };
    world.change(|state| state.gpus[0].processes.push(process));
    assert_eq!([active(true).await, active(true).await], [None, Some(BUSY)]);
}

#[tokio::test]
async fn an_instance_has_its_own_time_since_it_was_asked_about_the_last_time() {
    let (world, _session, queue, instances) = halves("H100-SXM5-80GB", [3, 3]).await;
    let [one, other] = &instances[..] else { panic!("two halves") };
    works(&world, one);
    check(&queue, &[one, other], &[None, None]).await;
    check(&queue, &[one, other], &[Some(BUSY), Some(0)]).await;
    check(&queue, &[one], &[Some(BUSY)]).await;
    // What was before is nobody's business any more.
    check(&queue, &[one, other], &[Some(BUSY), None]).await;
    world.change(|state| state.gpus[0].processes.clear());
    check(&queue, &[one, other], &[Some(BUSY / 2), Some(0)]).await;
    check(&queue, &[one, other], &[Some(0), Some(0)]).await;
    // Another of the same number is new.
    queue.destroy_compute_instance(one.id, one.compute_instances[0].id).await.expect("destroyed");
    queue.destroy_gpu_instance(one.id).await.expect("destroyed");
    assert_eq!(queue.create_gpu_instance(9, one.placement).await, Ok(one.id));
    check(&queue, &[one], &[None]).await;
    check(&queue, &[one], &[Some(0)]).await;
}

#[tokio::test]
async fn nothing_is_said_of_an_instance_that_is_not_one_compute_instance_nor_before_hopper() {
    let (world, _session, queue, instances) = halves("H100-SXM5-80GB", [3, 2]).await;
    let [whole, part] = &instances[..] else { panic!("two halves") };
    works(&world, part);
    check(&queue, &[whole, part], &[None, None]).await;
    check(&queue, &[whole, part], &[Some(0), None]).await;
    let (_world, _session, queue, instances) = halves("A100-SXM4-80GB", [3, 3]).await;
    let all: Vec<_> = instances.iter().collect();
    check(&queue, &all, &[None, None]).await;
    check(&queue, &all, &[None, None]).await;
}
