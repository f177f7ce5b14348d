//! Calls that do not return: who is answered what, and what happens later.

use crate::world::{World, impatient, next};
use divvy_model::inventory::MigMode;
use divvy_model::placement::Placement;
use divvy_nvml::{Closing, Event, GpuQueue, Late, NvmlError, Session};
use divvy_sim::control::When;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedReceiver;

const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";
const AT: Placement = Placement { start: 0, size: 1 };
/// `1g.10gb` of an H100.
const PROFILE: u32 = 19;

async fn late(events: &mut UnboundedReceiver<Event>) -> Late {
    next(events, |event| if let Event::Late(late) = event { Some(late) } else { None }).await
}

async fn mig_on(world: &World) -> (Session, GpuQueue, UnboundedReceiver<Event>) {
    let session = world.open(impatient());
    let queue = world.queue(&session, 0);
    queue.set_mig_mode(MigMode::On).await.expect("MIG on");
    let events = session.events().expect("events");
    (session, queue, events)
}

/// A held call answers at its deadline, the GPU is stuck until it returns, and
/// then the hardware is as the call left it.
async fn check(held: &str, when: When, made: usize) {
    let world = World::new("2xH100-SXM5-80GB");
    let (session, queue, mut events) = mig_on(&world).await;
    world.hold(held, 0, when);
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
    assert_eq!(world.queue(&session, 1).mig_mode().await, Ok(MigMode::Off), "the other GPU answers");

    world.release();
    let late = late(&mut events).await;
    assert_eq!((&late.gpu, late.call), (queue.gpu(), held));
    assert_eq!(queue.stuck(), None);
    assert_eq!(queue.instances().await.expect("free again").len(), made);
    assert_eq!(world.instances(0), made);
}

#[tokio::test]
async fn a_call_held_before_its_effect_takes_effect_late() {
    check(CREATE, When::Before, 1).await;
}

#[tokio::test]
async fn a_call_held_after_its_effect_is_announced_late() {
    check(CREATE, When::After, 1).await;
}

#[tokio::test]
async fn a_job_given_up_makes_no_further_call() {
    let world = World::new("H100-SXM5-80GB");
    let (_session, queue, mut events) = mig_on(&world).await;
    let id = queue.create_gpu_instance(PROFILE, AT).await.expect("GPU instance");
    world.hold("nvmlGpuInstanceGetInfo", 0, When::Before);
    let error = queue.create_compute_instance(id).await.expect_err("held");
    assert!(matches!(error, NvmlError::Deadline { call: "nvmlGpuInstanceGetInfo", .. }), "{error:?}");
    world.release();
    assert!(matches!(late(&mut events).await.result, Err(NvmlError::Deadline { .. })));
    let instances = queue.instances().await.expect("instances");
    assert_eq!(instances[0].compute_instances, [], "the compute instance was never begun");
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_the_gpu_stuck_until_the_call_returns() {
    let world = World::new("H100-SXM5-80GB");
    let (_session, queue, mut events) = mig_on(&world).await;
    world.hold(CREATE, 0, When::Before);
    let caller = tokio::spawn({
        let queue = queue.clone();
        async move { queue.create_gpu_instance(PROFILE, AT).await }
    });
    world.held().await;
    caller.abort();
    assert!(caller.await.is_err());
    assert_eq!(queue.stuck().map(|stuck| stuck.call), Some(CREATE));
    world.release();
    assert_eq!(late(&mut events).await.call, CREATE);
    assert_eq!(world.instances(0), 1);
}

#[tokio::test]
async fn a_call_that_was_not_begun_in_time_is_never_made() {
    let world = World::new("H100-SXM5-80GB");
    let (_session, queue, _events) = mig_on(&world).await;
    world.hold("nvmlDeviceGetMigMode", 0, When::Before);
    let first = tokio::spawn({
        let queue = queue.clone();
        async move { queue.mig_mode().await }
    });
    world.held().await;
    let hasty = queue.not_after(Instant::now() + Duration::from_millis(20));
    let error = hasty.create_gpu_instance(PROFILE, AT).await.expect_err("busy");
    assert!(matches!(error, NvmlError::Busy { call: CREATE, .. }), "{error:?}");
    world.release();
    assert_eq!(first.await.expect("joined"), Ok(MigMode::On));
    assert_eq!(queue.instances().await.as_deref(), Ok([].as_slice()));
}

#[tokio::test]
async fn those_who_queue_behind_a_stuck_call_are_answered_with_it() {
    let world = World::new("H100-SXM5-80GB");
    let (_session, queue, mut events) = mig_on(&world).await;
    world.hold(CREATE, 0, When::Before);
    let (first, second) = tokio::join!(queue.create_gpu_instance(PROFILE, AT), queue.instances());
    assert!(matches!(first, Err(NvmlError::Deadline { call: CREATE, .. })), "{first:?}");
    assert!(matches!(second, Err(NvmlError::Stuck { .. } | NvmlError::Busy { .. })), "{second:?}");
    world.release();
    assert_eq!(late(&mut events).await.call, CREATE);
}

#[tokio::test]
async fn a_stuck_call_keeps_the_library_and_nothing_else() {
    let world = World::new("2xH100-SXM5-80GB");
    let (session, queue, _events) = mig_on(&world).await;
    world.hold(CREATE, 0, When::Before);
    queue.create_gpu_instance(PROFILE, AT).await.expect_err("held");
    let Closing::Held(calls) = session.close().await else { panic!("the call is still running") };
    assert_eq!(calls.iter().map(|stuck| stuck.call).collect::<Vec<_>>(), [CREATE]);
    // Another session on the same GPUs works meanwhile; the stuck one is the only one that waits.
    let again = world.open(impatient());
    assert_eq!(world.queue(&again, 1).mig_mode().await, Ok(MigMode::Off));
    world.release();
}
