//! Devices of a mode that is off close, are removed with the controller's approval, and return.

use crate::harness::{NODE, TestNode, until};
use crate::node_config::Mount;
use divvy_model::ModeSet;
use divvy_model::closing::{ALLOCATED, MODE_OFF_TAINT, MODES_OFF, REMOVABLE};
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{Value, json};

const ON: &str = "[{modes: [whole, timeslice], shares: false}]";
const OFF: &str = "[{modes: [whole], shares: false}]";
const TIMESLICE: &str = "gpu-0-timeslice";

/// Sets the annotations that the controller writes.
fn annotate(node: &TestNode, annotations: Value) {
    let metadata = json!({"name": NODE, "annotations": annotations});
    node.api.put(json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
}

/// The closing of the time-slices; `None` unless a slice names it and their device has the taint. A
/// restarted daemon continues only a closing that the server shows.
fn closing(node: &TestNode) -> Option<u64> {
    let is_tainted = node.published_devices().any(|device| {
        let mut taints = device.taints.iter().flatten();
        device.name == TIMESLICE && taints.any(|taint| taint.key == MODE_OFF_TAINT)
    });
    if !is_tainted {
        return None;
    }
    let slices = node.api.list::<ResourceSlice>().into_iter();
    let texts = slices.filter_map(|slice| slice.metadata.annotations?.remove(MODES_OFF));
    let closings = ModeSet::parse(&texts.collect::<String>()).closings();
    closings.into_iter().find_map(|((_, mode), id)| (mode.as_str() == "timeslice").then_some(id.0))
}

async fn closes(node: &TestNode) -> u64 {
    until("the time-slices close", || closing(node).is_some()).await;
    closing(node).unwrap()
}

async fn publishes(node: &TestNode, devices: &[&str]) {
    until(&format!("{devices:?} are published"), || node.published() == devices).await;
}

#[tokio::test]
async fn held_device_is_removed_after_its_release() {
    let node = TestNode::new("L4").await;
    let mount = Mount { node: &node };
    mount.set(ON);
    let _daemon = node.start_daemon(&["--config", mount.file().to_str().unwrap()]).await;
    // Modes that were never on are absent.
    publishes(&node, &["gpu-0", TIMESLICE]).await;
    let claim = node.claim("a", &[TIMESLICE]);
    node.prepare(&claim).await.unwrap();
    mount.set(OFF);
    let id = closes(&node).await;
    annotate(&node, json!({REMOVABLE: format!("timeslice@{id}:0")}));
    node.prepare(&node.claim("b", &["gpu-0"])).await.unwrap_err();
    assert_eq!(node.published(), ["gpu-0", TIMESLICE]);
    node.unprepare(&claim).await.unwrap();
    publishes(&node, &["gpu-0"]).await;
    mount.set(ON);
    publishes(&node, &["gpu-0", TIMESLICE]).await;
    assert_eq!(closing(&node), None);
}

#[tokio::test]
async fn only_the_approval_of_the_current_closing_counts() {
    let node = TestNode::new("L4").await;
    let mount = Mount { node: &node };
    mount.set(ON);
    let flags = ["--config", mount.file().to_str().unwrap()].map(str::to_owned);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let daemon = node.start_daemon(&flags).await;
    publishes(&node, &["gpu-0", TIMESLICE]).await;
    mount.set(OFF);
    let first = closes(&node).await;
    daemon.kill();
    annotate(&node, json!({REMOVABLE: format!("timeslice@{first}:0")}));
    let _daemon = node.spawn_daemon(&flags);
    // The restarted daemon has kept the closing.
    publishes(&node, &["gpu-0"]).await;
    mount.set(ON);
    publishes(&node, &["gpu-0", TIMESLICE]).await;
    mount.set(OFF);
    let second = closes(&node).await;
    assert!(second > first);
    // The daemon decides about all modes at once, so it has decided about the time-slices too.
    let entry = json!([{"device": "gpu-0-mps", "claim": {"namespace": "ns", "name": "x", "uid": "x"}}]);
    annotate(&node, json!({REMOVABLE: format!("timeslice@{first}:0"), ALLOCATED: entry.to_string()}));
    publishes(&node, &["gpu-0", "gpu-0-mps", TIMESLICE]).await;
    annotate(&node, json!({REMOVABLE: format!("timeslice@{second}:0")}));
    publishes(&node, &["gpu-0", "gpu-0-mps"]).await;
}

#[tokio::test]
async fn claim_on_a_removed_device_keeps_the_gpu() {
    let node = TestNode::new("L4").await;
    let mount = Mount { node: &node };
    mount.set(OFF);
    let _daemon = node.start_daemon(&["--config", mount.file().to_str().unwrap()]).await;
    publishes(&node, &["gpu-0"]).await;
    let late = node.claim("late", &[TIMESLICE]);
    let claim = json!({"namespace": "ns", "name": "late", "uid": "late"});
    annotate(&node, json!({ALLOCATED: json!([{"device": TIMESLICE, "claim": claim}]).to_string()}));
    publishes(&node, &["gpu-0", TIMESLICE]).await;
    closes(&node).await;
    let error = node.prepare(&node.claim("other", &["gpu-0"])).await.unwrap_err().to_string();
    for part in ["ns/other", "device gpu-0 overlaps", TIMESLICE, "claim ns/late", "delete the pods"] {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
    node.prepare(&late).await.unwrap();
    node.unprepare(&late).await.unwrap();
    annotate(&node, json!({}));
    node.prepare_until_ok(&node.claim("other", &["gpu-0"])).await;
}
