//! What an administrator says of a class holds for the shares that are there.

use crate::harness::{DRIVER, Daemon, H100, NODE, World, reference, until};
use divvy_pages::{Compute, Policy};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Class `batch` with that ShareConfig.
fn set_class(world: &World, config: Value) {
    put_class(world, "batch", json!([{"opaque": {"driver": DRIVER, "parameters": share_config(config)}}]));
}

fn put_class(world: &World, name: &str, config: Value) {
    world.api.put(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"config": config},
    }));
}

fn share_config(fields: Value) -> Value {
    let mut config = json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": "ShareConfig"});
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    config
}

/// Claim `a` of that class, which allowed 40 when that share was allocated.
fn put_claim(world: &World, share: &str) {
    world.api.put(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": "a", "uid": "a"},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "batch"}}]}},
        "status": {"allocation": {"devices": {
            "results": [{
                "request": "r", "driver": DRIVER, "pool": NODE, "device": "gpu-0", "shareID": share,
                "consumedCapacity": {"memory": "10Gi", "cores": "30"},
            }],
            "config": [{
                "source": "FromClass", "requests": ["r"],
                "opaque": {"driver": DRIVER, "parameters": share_config(json!({"ceiling": 40}))},
            }],
        }}},
    }));
}

fn page(world: &World, share: &str) -> PathBuf {
    world.run_dir().join("shares/a").join(share).join("policy")
}

fn policy_of(world: &World, share: &str) -> Option<Policy> {
    let page = fs::read(page(world, share)).ok()?;
    Some(Policy::decode(&page).unwrap().1)
}

fn policy(world: &World) -> Option<Policy> {
    policy_of(world, "s-1")
}

async fn has_ceiling(world: &World, share: &str, percent: u32) {
    let ceiling = || policy_of(world, share).map(|policy| policy.compute.ceiling);
    until(&format!("share {share} has a ceiling of {percent}"), || ceiling() == Some(percent)).await;
}

fn compute(world: &World) -> Option<Compute> {
    policy(world).map(|policy| policy.compute)
}

/// A daemon, and claim `a` prepared by it, which goes by what its class says now.
async fn following(world: &World) -> Daemon {
    set_class(world, json!({"ceiling": 60}));
    let daemon = world.start(&[]).await;
    put_claim(world, "s-1");
    world.prepare_until_ok(&reference("a")).await;
    // The class is followed apart from the kubelet's call.
    has_ceiling(world, "s-1", 60).await;
    daemon
}

#[tokio::test]
async fn a_class_that_is_changed_changes_the_shares_that_are_there() {
    let world = World::up(H100).await;
    let daemon = following(&world).await;

    set_class(
        &world,
        json!({"ceiling": 80, "weight": 300, "priority": "High", "overcommit": 150, "encoders": 2}),
    );
    let changed = |compute: Compute| (compute.ceiling, compute.weight, compute.priority) == (80, 300, 1);
    until("it goes by the class as it is now", || compute(&world).is_some_and(changed)).await;
    let Policy { memory, codec, .. } = policy(&world).unwrap();
    assert_eq!((codec.encoders, codec.decoders), (Some(2), None));
    assert_eq!((memory.limit, memory.soft), (15 << 30, 10 << 30));

    // What changed while nobody looked.
    drop(daemon);
    set_class(&world, json!({"ceiling": 70}));
    let _daemon = world.start(&[]).await;
    has_ceiling(&world, "s-1", 70).await;
    assert_eq!(policy(&world).unwrap().memory.limit, 10 << 30);

    // And by the clock: all day but for the minute before midnight, or all day but for the first one.
    let hours = [("00:00", "23:59"), ("00:01", "00:00")];
    let tides: Vec<Value> =
        hours.iter().map(|(from, to)| json!({"from": from, "to": to, "ceiling": 35})).collect();
    set_class(&world, json!({"ceiling": 70, "schedule": tides}));
    has_ceiling(&world, "s-1", 35).await;
    // The second daemon's pages come before its registration.
    let claim = reference("a");
    world.prepare_until_ok(&claim).await;
    world.unprepare(&claim).await.unwrap();
}

#[tokio::test]
async fn a_schedule_begins_though_nothing_else_happens() {
    let world = World::up(H100).await;
    let _daemon = following(&world).await;
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    // With time to be heard of before.
    let begins = (now() + 20).next_multiple_of(60);
    let clock = |at: u64| format!("{:02}:{:02}", at % 86_400 / 3600, at % 3600 / 60);
    let tide = json!({"from": clock(begins), "to": clock(begins + 3600), "ceiling": 35});
    set_class(&world, json!({"ceiling": 61, "schedule": [tide]}));
    has_ceiling(&world, "s-1", 61).await;
    assert!(now() < begins, "it was not heard of in time");
    tokio::time::sleep(Duration::from_secs(begins - now())).await;
    has_ceiling(&world, "s-1", 35).await;
}

#[tokio::test]
async fn a_class_that_says_nothing_any_more_takes_back_what_it_said() {
    let world = World::up(H100).await;
    let daemon = following(&world).await;
    drop(daemon);
    put_class(&world, "batch", json!([]));
    let _daemon = world.start(&[]).await;
    // Without a class that lends, cores are all that it may have.
    has_ceiling(&world, "s-1", 0).await;
}

#[tokio::test]
async fn a_claim_that_is_allocated_anew_goes_by_its_class_too() {
    let world = World::up(H100).await;
    let _daemon = following(&world).await;
    let claim = reference("a");
    world.unprepare(&claim).await.unwrap();
    put_claim(&world, "s-2");
    world.prepare_until_ok(&claim).await;
    set_class(&world, json!({"ceiling": 80}));
    has_ceiling(&world, "s-2", 80).await;
}

#[tokio::test]
async fn a_page_that_could_not_be_changed_is_changed_later() {
    let world = World::up(H100).await;
    let daemon = following(&world).await;
    let page = page(&world, "s-1");
    let aside = world.path("aside");
    fs::rename(&page, &aside).unwrap();
    fs::create_dir(&page).unwrap();
    set_class(&world, json!({"ceiling": 70}));
    daemon.wait_log("the pages of its shares cannot be changed").await;
    fs::remove_dir(&page).unwrap();
    fs::rename(&aside, &page).unwrap();
    // Tried again by itself, and sooner when a class changes.
    put_class(&world, "another", json!([]));
    has_ceiling(&world, "s-1", 70).await;
}

#[tokio::test]
async fn classes_that_may_not_be_read_are_told_of_once_and_keep_no_claim_waiting() {
    let world = World::up(H100).await;
    set_class(&world, json!({"ceiling": 60}));
    world.api.fail_next("list", "deviceclasses", 2, 403);
    let daemon = world.start(&[]).await;
    put_claim(&world, "s-1");
    world.prepare_until_ok(&reference("a")).await;
    has_ceiling(&world, "s-1", 60).await;
    assert_eq!(world.api.count("list", "deviceclasses"), 3);
    assert_eq!(daemon.log().matches("DeviceClasses cannot be followed").count(), 1);
}
