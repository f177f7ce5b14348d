//! Changes of the node configuration take effect while claims are prepared and released.

use crate::harness::{DRIVER, H100, NODE, TestNode, until};
use crate::observation::{address, wait_for};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use serde_json::json;
use std::path::PathBuf;

/// A directory like a mounted ConfigMap: one directory for each version, and a link that is replaced.
pub(crate) struct Mount<'a> {
    pub(crate) node: &'a TestNode,
}

impl Mount<'_> {
    pub(crate) fn file(&self) -> PathBuf {
        self.node.path("config/config.yaml")
    }

    /// Writes the next version of the file.
    pub(crate) fn set(&self, rules: &str) {
        let dir = self.node.path("config");
        std::fs::create_dir_all(&dir).unwrap();
        let version = format!("..{}", std::fs::read_dir(&dir).unwrap().count());
        std::fs::create_dir(dir.join(&version)).unwrap();
        let text = format!("apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\nrules: {rules}\n");
        std::fs::write(dir.join(&version).join("config.yaml"), text).unwrap();
        std::os::unix::fs::symlink(&version, dir.join("..data_tmp")).unwrap();
        std::fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
        // The link exists from the first version on.
        let _ = std::os::unix::fs::symlink("..data/config.yaml", self.file());
    }
}

/// The published state of GPU 0: slots and interval of its time slices, and the devices whose mode is
/// turned off.
fn offered(node: &TestNode) -> String {
    let slices = node.api.list::<ResourceSlice>();
    let devices: Vec<Device> =
        slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default()).collect();
    let Some(shared) = devices.iter().find(|device| device.name == "gpu-0-timeslice") else {
        return String::new();
    };
    let slots = shared.capacity.as_ref().and_then(|all| all.get("slots")).map(|slots| slots.value.0.clone());
    let interval = shared.attributes.as_ref().and_then(|all| all.get("interval")?.string.clone());
    let off = |device: &&Device| {
        device.taints.iter().flatten().any(|taint| taint.key == format!("{DRIVER}/mode-off"))
    };
    let off = devices.iter().filter(off).map(|device| device.name.as_str());
    let mut off: Vec<_> = off
        .filter(|name| ["gpu-0", "gpu-0-mig-1g10gb-19-0", "gpu-0-timeslice", "gpu-0-mps"].contains(name))
        .collect();
    off.sort_unstable();
    format!("{} {} off: {}", slots.unwrap_or_default(), interval.unwrap_or_default(), off.join(" "))
}

async fn offers(node: &TestNode, expected: &str) {
    until(expected, || offered(node) == expected).await;
}

#[tokio::test]
async fn config_of_a_gpu_in_use_changes_with_its_last_claim() {
    let node = TestNode::new(H100).await;
    let smi = node.sim.root().join("usr/bin/nvidia-smi");
    std::fs::remove_file(&smi).unwrap();
    // A copy, because the program finds its simulator by its own path.
    std::fs::copy(crate::programs::program("divvy-sim"), &smi).unwrap();
    let mount = Mount { node: &node };
    mount.set("[{slots: 8, interval: Short}]");
    let daemon = node.start_daemon(&["--config", mount.file().to_str().unwrap()]).await;
    offers(&node, "8 Short off: ").await;
    mount.set("[{slots: 6, interval: Medium}]");
    offers(&node, "6 Medium off: ").await;
    let result = json!({
        "request": "r", "driver": DRIVER, "pool": NODE, "device": "gpu-0-timeslice",
        "shareID": "0d5b1f0e-6c1b-4a52-a5a1-000000000001", "consumedCapacity": {"slots": "5"},
    });
    let claim = node.claim_with("a", vec![result], json!([]));
    node.prepare(&claim).await.unwrap();
    mount.set("[{slots: 2, interval: Long, modes: [whole, mig]}]");
    offers(&node, "6 Medium off: gpu-0-mps gpu-0-timeslice").await;
    // A new daemon keeps the settings that the prepared claim depends on.
    daemon.kill();
    let daemon = node.spawn_daemon(&["--config", mount.file().to_str().unwrap()]);
    // Until then the kubelet may still drop the registration of the old daemon.
    daemon.wait_log("registered with the kubelet").await;
    node.prepare_until_ok(&claim).await;
    assert_eq!(offered(&node), "6 Medium off: gpu-0-mps gpu-0-timeslice");
    node.unprepare(&claim).await.unwrap();
    offers(&node, "2 Long off: gpu-0-mps gpu-0-timeslice").await;
}

#[tokio::test]
async fn invalid_config_file_is_reported_and_changes_nothing() {
    let node = TestNode::new(H100).await;
    let mount = Mount { node: &node };
    mount.set("[{slots: 8}]");
    let daemon = node.start_daemon(&["--config", mount.file().to_str().unwrap()]).await;
    offers(&node, "8 Default off: ").await;
    mount.set("[{slot: 2}]");
    let error = "line 3: field rules[0].slot is unknown to Rule; did you mean slots?; \
               the last valid configuration stays in force";
    daemon.wait_log(error).await;
    let reports = |event: Event| event.note.is_some_and(|note| note.contains(error));
    until("an event reports it", || node.api.list::<Event>().into_iter().any(reports)).await;
    assert_eq!(offered(&node), "8 Default off: ");
    mount.set("[{slots: 2}]");
    offers(&node, "2 Default off: ").await;
}

#[tokio::test]
async fn no_gpu_is_offered_until_a_valid_config_exists() {
    let node = TestNode::new(H100).await;
    let mount = Mount { node: &node };
    mount.set("7");
    let daemon = node.start_daemon(&["--config", mount.file().to_str().unwrap()]).await;
    daemon.wait_log("no GPU is offered until it is valid").await;
    until("an empty pool is published", || node.api.list::<ResourceSlice>().len() == 1).await;
    assert_eq!(node.published(), [""; 0]);
    mount.set("[{dedicated: true}]");
    until("only the whole GPU is published", || node.published() == ["gpu-0"]).await;
}

#[tokio::test]
async fn node_with_refused_config_file_is_not_ready() {
    let node = TestNode::new(H100).await;
    let mount = Mount { node: &node };
    mount.set("[{slot: 2}]");
    let (address, file) = (address(), mount.file());
    let file = file.to_str().unwrap();
    let _daemon = node.start_daemon(&["--http-address", &address, "--config", file]).await;
    let unready = wait_for(&address, "/readyz", "[-]node-config failed").await;
    assert!(unready.contains("503"), "{unready}");
    for part in [file, "field rules[0].slot is unknown to Rule", "no GPU is offered until it is valid"] {
        assert!(unready.contains(part), "{part:?} is not in {unready}");
    }
    mount.set("[{slots: 2}]");
    let ready = wait_for(&address, "/readyz", "200 OK").await;
    assert!(ready.contains("[+]node-config ok"), "{ready}");
    mount.set("[{slot: 2}]");
    wait_for(&address, "/readyz", "the last valid configuration stays in force").await;
}

#[tokio::test]
async fn rules_follow_the_labels_of_the_node() {
    let node = TestNode::new(H100).await;
    let mount = Mount { node: &node };
    let label = |pool: &str| {
        let metadata = json!({"name": NODE, "labels": {"pool": pool}});
        node.api.put(json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
    };
    label("a");
    mount.set("[{match: {nodeLabels: {pool: a}}, slots: 3}, {match: {nodeLabels: {pool: b}}, slots: 5}]");
    let _daemon = node.start_daemon(&["--config", mount.file().to_str().unwrap()]).await;
    // The first published state already follows the labels.
    until("GPU 0 is published", || !offered(&node).is_empty()).await;
    assert_eq!(offered(&node), "3 Default off: ");
    label("b");
    offers(&node, "5 Default off: ").await;
    label("c");
    offers(&node, "4 Default off: ").await;
}
