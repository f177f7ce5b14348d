//! What GPUs are shared by, over a restart and a reboot.

use super::{CLIENT, H100, TURNS, World, until};

#[tokio::test]
async fn a_restart_finds_everything_as_it_is() {
    let world = World::up(&format!("2x{H100}"));
    let keeper = world.keeper();
    let node = world.start_long().await;
    let before = node.prepare("a", "share:gpu-0-timeslice share:gpu-1-mps").await.unwrap();
    node.stop().await;
    let node = world.start().await;
    assert!(node.report.restored.is_empty() && node.report.unsettled.is_empty(), "{:?}", node.report);
    assert_eq!(node.engine.prepared(&"a".into()).unwrap(), before);
    world.expect_settings(&["3/default", "0/exclusive"]);
    assert_eq!(keeper.wishes().len(), 1);
    // What was set by the first stands, whatever the administrator says by now.
    node.prepare("b", "share:gpu-0-timeslice").await.unwrap();
    node.unprepare("a").await.unwrap();
    world.expect_settings(&["3/default", "0/default"]);
    node.unprepare("b").await.unwrap();
    world.expect_rest();
}

#[tokio::test]
async fn what_a_reboot_took_is_set_up_again() {
    let world = World::up(&format!("2x{H100}"));
    let keeper = world.keeper();
    let node = world.start_long().await;
    for claim in ["a", "b"] {
        node.prepare(claim, "share:gpu-0-timeslice share:gpu-1-mps").await.unwrap();
    }
    node.stop().await;
    drop(keeper);
    std::fs::remove_dir_all(&world.paths.run_dir).unwrap();
    world.reboot_gpus();
    world.expect_settings(&["0/default", "0/default"]);

    // The keeper comes late: the start does not wait for it for long, and says so.
    let node = world.start().await;
    assert_eq!(node.report.unsettled.len(), 2, "{:?}", node.report);
    assert!(node.report.unsettled[0].1.contains("divvy-keeper"), "{:?}", node.report);
    world.expect_settings(&["3/default", "0/exclusive"]);
    let well = || node.engine.daemons().borrow().values().all(|daemon| daemon.trouble.is_none());
    until("the daemon is missed", || !well()).await;
    let _keeper = world.keeper();
    until("the daemon is there", well).await;
    for claim in ["a", "b"] {
        node.unprepare(claim).await.unwrap();
    }
    world.expect_rest();
}

#[tokio::test]
async fn what_could_not_be_set_up_again_is_tried_again() {
    let world = World::up(H100);
    let node = world.start_long().await;
    node.prepare("a", TURNS).await.unwrap();
    node.stop().await;
    world.reboot_gpus();
    world.fault("compute-policy", Some(1));
    let node = world.start().await;
    assert_eq!(node.report.unsettled.len(), 1, "{:?}", node.report);
    until("the interval is set", || world.settings() == ["3/default"]).await;
}

#[tokio::test]
async fn daemons_that_no_record_explains_are_let_go() {
    let world = World::up(H100);
    let keeper = world.keeper();
    let node = world.start().await;
    node.prepare("a", CLIENT).await.unwrap();
    node.stop().await;
    std::fs::remove_file(world.claims().join("a.json")).unwrap();
    std::fs::remove_file(world.cdi_file("a")).unwrap();
    let _node = world.start().await;
    until("the daemon is gone", || world.daemons().is_empty()).await;
    world.expect_rest();
    drop(keeper);
}
