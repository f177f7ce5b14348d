//! Changes of a DeviceClass take effect on existing shares.

use crate::harness::{DRIVER, Daemon, H100, NODE, TestNode, claim_ref, until};
use divvy_pages::{Compute, Policy};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Writes class `batch` with this ShareConfig.
fn set_class(node: &TestNode, config: Value) {
    put_class(node, "batch", json!([{"opaque": {"driver": DRIVER, "parameters": share_config(config)}}]));
}

fn put_class(node: &TestNode, name: &str, config: Value) {
    node.api.put(json!({
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

/// Writes claim `a` of class `batch`, which had a ceiling of 40 % when the share was allocated.
fn put_claim(node: &TestNode, share: &str) {
    node.api.put(json!({
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

fn page(node: &TestNode, share: &str) -> PathBuf {
    node.run_dir().join("shares/a").join(share).join("policy")
}

fn policy_of(node: &TestNode, share: &str) -> Option<Policy> {
    let page = fs::read(page(node, share)).ok()?;
    Some(Policy::decode(&page).unwrap().1)
}

fn policy(node: &TestNode) -> Option<Policy> {
    policy_of(node, "s-1")
}

async fn has_ceiling(node: &TestNode, share: &str, percent: u32) {
    let ceiling = || policy_of(node, share).map(|policy| policy.compute.ceiling);
    until(&format!("share {share} has a ceiling of {percent}"), || ceiling() == Some(percent)).await;
}

fn compute(node: &TestNode) -> Option<Compute> {
    policy(node).map(|policy| policy.compute)
}

/// A daemon with claim `a` prepared, whose share follows a class with a ceiling of 60 %.
async fn prepare_with_class(node: &TestNode) -> Daemon {
    set_class(node, json!({"ceiling": 60}));
    let daemon = node.start_daemon(&[]).await;
    put_claim(node, "s-1");
    node.prepare_until_ok(&claim_ref("a")).await;
    // The daemon applies the class after it has answered the kubelet.
    has_ceiling(node, "s-1", 60).await;
    daemon
}

#[tokio::test]
async fn changed_class_changes_existing_shares() {
    let node = TestNode::new(H100).await;
    let daemon = prepare_with_class(&node).await;

    set_class(
        &node,
        json!({"ceiling": 80, "weight": 300, "priority": "High", "overcommit": 150, "encoders": 2}),
    );
    let changed = |compute: Compute| (compute.ceiling, compute.weight, compute.priority) == (80, 300, 1);
    until("the share follows the changed class", || compute(&node).is_some_and(changed)).await;
    let Policy { memory, codec, .. } = policy(&node).unwrap();
    assert_eq!((codec.encoders, codec.decoders), (Some(2), None));
    assert_eq!((memory.limit, memory.soft), (15 << 30, 10 << 30));

    // A change while no daemon runs.
    drop(daemon);
    set_class(&node, json!({"ceiling": 70}));
    let _daemon = node.start_daemon(&[]).await;
    has_ceiling(&node, "s-1", 70).await;
    assert_eq!(policy(&node).unwrap().memory.limit, 10 << 30);

    // A schedule. Each period leaves out one minute of the day, so that one of them is active at any time.
    let hours = [("00:00", "23:59"), ("00:01", "00:00")];
    let periods: Vec<Value> =
        hours.iter().map(|(from, to)| json!({"from": from, "to": to, "ceiling": 35})).collect();
    set_class(&node, json!({"ceiling": 70, "schedule": periods}));
    has_ceiling(&node, "s-1", 35).await;
    // The second daemon updates its pages before it registers.
    let claim = claim_ref("a");
    node.prepare_until_ok(&claim).await;
    node.unprepare(&claim).await.unwrap();
}

#[tokio::test]
async fn schedule_starts_without_any_other_event() {
    let node = TestNode::new(H100).await;
    let _daemon = prepare_with_class(&node).await;
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    // The schedule starts late enough for the daemon to read the class before.
    let starts_at = (now() + 20).next_multiple_of(60);
    let clock = |at: u64| format!("{:02}:{:02}", at % 86_400 / 3600, at % 3600 / 60);
    let period = json!({"from": clock(starts_at), "to": clock(starts_at + 3600), "ceiling": 35});
    set_class(&node, json!({"ceiling": 61, "schedule": [period]}));
    has_ceiling(&node, "s-1", 61).await;
    assert!(now() < starts_at, "the daemon read the class too late");
    tokio::time::sleep(Duration::from_secs(starts_at - now())).await;
    has_ceiling(&node, "s-1", 35).await;
}

#[tokio::test]
async fn emptied_class_resets_its_shares() {
    let node = TestNode::new(H100).await;
    let daemon = prepare_with_class(&node).await;
    drop(daemon);
    put_class(&node, "batch", json!([]));
    let _daemon = node.start_daemon(&[]).await;
    // Without a class that lends idle time, the share is limited to its cores.
    has_ceiling(&node, "s-1", 0).await;
}

#[tokio::test]
async fn reallocated_claim_follows_its_class() {
    let node = TestNode::new(H100).await;
    let _daemon = prepare_with_class(&node).await;
    let claim = claim_ref("a");
    node.unprepare(&claim).await.unwrap();
    put_claim(&node, "s-2");
    node.prepare_until_ok(&claim).await;
    set_class(&node, json!({"ceiling": 80}));
    has_ceiling(&node, "s-2", 80).await;
}

#[tokio::test]
async fn failed_page_update_is_retried() {
    let node = TestNode::new(H100).await;
    let daemon = prepare_with_class(&node).await;
    let page = page(&node, "s-1");
    let moved = node.path("moved");
    fs::rename(&page, &moved).unwrap();
    fs::create_dir(&page).unwrap();
    set_class(&node, json!({"ceiling": 70}));
    daemon.wait_log("the pages of its shares cannot be changed").await;
    fs::remove_dir(&page).unwrap();
    fs::rename(&moved, &page).unwrap();
    // The daemon retries by itself, and at once when any class changes.
    put_class(&node, "another", json!([]));
    has_ceiling(&node, "s-1", 70).await;
}

#[tokio::test]
async fn unreadable_classes_are_logged_once_and_block_no_claim() {
    let node = TestNode::new(H100).await;
    set_class(&node, json!({"ceiling": 60}));
    node.api.fail_next("list", "deviceclasses", 2, 403);
    let daemon = node.start_daemon(&[]).await;
    put_claim(&node, "s-1");
    node.prepare_until_ok(&claim_ref("a")).await;
    has_ceiling(&node, "s-1", 60).await;
    assert_eq!(node.api.count("list", "deviceclasses"), 3);
    assert_eq!(daemon.log().matches("cannot watch DeviceClasses;").count(), 1);
}
