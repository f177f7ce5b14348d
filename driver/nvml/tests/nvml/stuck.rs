//! Calls that do not return: the errors of callers, and the effects after the return.

use crate::test_node::{TestNode, next, short_timeouts};
use divvy_model::inventory::MigMode;
use divvy_model::placement::Placement;
use divvy_nvml::{Closing, Event, GpuQueue, LateReturn, NvmlError, Session};
use divvy_sim::control::When;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedReceiver;

const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";
const AT: Placement = Placement { start: 0, size: 1 };
/// `1g.10gb` of an H100.
const PROFILE: u32 = 19;

async fn late(events: &mut UnboundedReceiver<Event>) -> LateReturn {
    next(events, |event| if let Event::LateReturn(late) = event { Some(late) } else { None }).await
}

async fn mig_on(node: &TestNode) -> (Session, GpuQueue, UnboundedReceiver<Event>) {
    let session = node.open(short_timeouts());
    let queue = node.queue(&session, 0);
    queue.set_mig_mode(MigMode::On).await.expect("MIG on");
    let events = session.events().expect("events");
    (session, queue, events)
}

/// A held call fails at its deadline, and the GPU is stuck until the call returns. After that, the
/// hardware is as the call left it.
async fn check(held: &str, when: When, made: usize) {
    let node = TestNode::new("2xH100-SXM5-80GB");
    let (session, queue, mut events) = mig_on(&node).await;
    node.hold(held, 0, when);
    let error = queue.create_gpu_instance(PROFILE, AT).await.expect_err("held");
    assert!(matches!(&error, NvmlError::Deadline { call, .. } if *call == held), "{error:?}");
    assert!(error.may_take_effect());

    let stuck = queue.stuck().expect("stuck");
    assert_eq!(stuck.call, held);
    next(&mut events, |event| (event == Event::Stuck(stuck.clone())).then_some(())).await;
    for _ in 0..2 {
        let error = queue.instances().await.expect_err("stuck");
        assert!(matches!(&error, NvmlError::Stuck { call, .. } if *call == held), "{error:?}");
        assert!(!error.may_take_effect());
    }
    assert_eq!(node.queue(&session, 1).mig_mode().await, Ok(MigMode::Off), "the other GPU answers");

    node.release();
    let late = late(&mut events).await;
    assert_eq!((&late.gpu, late.call), (queue.gpu(), held));
    assert_eq!(queue.stuck(), None);
    assert_eq!(queue.instances().await.expect("free again").len(), made);
    assert_eq!(node.instances(0), made);
}

#[tokio::test]
async fn call_held_before_its_effect_takes_effect_late() {
    check(CREATE, When::Before, 1).await;
}

#[tokio::test]
async fn call_held_after_its_effect_is_reported_late() {
    check(CREATE, When::After, 1).await;
}

#[tokio::test]
async fn abandoned_job_makes_no_further_call() {
    let node = TestNode::new("H100-SXM5-80GB");
    let (_session, queue, mut events) = mig_on(&node).await;
    let id = queue.create_gpu_instance(PROFILE, AT).await.expect("GPU instance");
    node.hold("nvmlGpuInstanceGetInfo", 0, When::Before);
    let error = queue.create_compute_instance(id).await.expect_err("held");
    assert!(matches!(error, NvmlError::Deadline { call: "nvmlGpuInstanceGetInfo", .. }), "{error:?}");
    node.release();
    assert!(matches!(late(&mut events).await.result, Err(NvmlError::Deadline { .. })));
    let instances = queue.instances().await.expect("instances");
    assert_eq!(instances[0].compute_instances, [], "the compute instance was never begun");
}

#[tokio::test]
async fn dropped_caller_leaves_the_gpu_stuck_until_return() {
    let node = TestNode::new("H100-SXM5-80GB");
    let (_session, queue, mut events) = mig_on(&node).await;
    node.hold(CREATE, 0, When::Before);
    let caller = tokio::spawn({
        let queue = queue.clone();
        async move { queue.create_gpu_instance(PROFILE, AT).await }
    });
    node.held().await;
    caller.abort();
    assert!(caller.await.is_err());
    assert_eq!(queue.stuck().map(|stuck| stuck.call), Some(CREATE));
    node.release();
    assert_eq!(late(&mut events).await.call, CREATE);
    assert_eq!(node.instances(0), 1);
}

#[tokio::test]
async fn call_not_started_in_time_is_never_made() {
    let node = TestNode::new("H100-SXM5-80GB");
    let (_session, queue, _events) = mig_on(&node).await;
    node.hold("nvmlDeviceGetMigMode", 0, When::Before);
    let first = tokio::spawn({
        let queue = queue.clone();
        async move { queue.mig_mode().await }
    });
    node.held().await;
    let urgent = queue.with_deadline(Instant::now() + Duration::from_millis(20));
    let error = urgent.create_gpu_instance(PROFILE, AT).await.expect_err("busy");
    assert!(matches!(error, NvmlError::Busy { call: CREATE, .. }), "{error:?}");
    node.release();
    assert_eq!(first.await.expect("joined"), Ok(MigMode::On));
    assert_eq!(queue.instances().await.as_deref(), Ok([].as_slice()));
}

#[tokio::test]
async fn calls_queued_behind_a_stuck_call_fail() {
    let node = TestNode::new("H100-SXM5-80GB");
    let (_session, queue, mut events) = mig_on(&node).await;
    node.hold(CREATE, 0, When::Before);
    let (first, second) = tokio::join!(queue.create_gpu_instance(PROFILE, AT), queue.instances());
    assert!(matches!(first, Err(NvmlError::Deadline { call: CREATE, .. })), "{first:?}");
    assert!(matches!(second, Err(NvmlError::Stuck { .. } | NvmlError::Busy { .. })), "{second:?}");
    node.release();
    assert_eq!(late(&mut events).await.call, CREATE);
}

#[tokio::test]
async fn stuck_call_keeps_only_the_library_loaded() {
    let node = TestNode::new("2xH100-SXM5-80GB");
    let (session, queue, _events) = mig_on(&node).await;
    node.hold(CREATE, 0, When::Before);
    queue.create_gpu_instance(PROFILE, AT).await.expect_err("held");
    let Closing::Held(calls) = session.close().await else { panic!("the call is still running") };
    assert_eq!(calls.iter().map(|stuck| stuck.call).collect::<Vec<_>>(), [CREATE]);
    // Meanwhile another session on the same GPUs works. Only the stuck session waits.
    let again = node.open(short_timeouts());
    assert_eq!(node.queue(&again, 1).mig_mode().await, Ok(MigMode::Off));
    node.release();
}
