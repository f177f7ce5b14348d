//! The node configuration takes effect while claims come and go.

use crate::harness::{DRIVER, H100, NODE, World, until};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use serde_json::json;
use std::path::PathBuf;

/// A directory as the kubelet mounts a ConfigMap: versions, and a link that is replaced.
struct Mount<'a> {
    world: &'a World,
}

impl Mount<'_> {
    fn file(&self) -> PathBuf {
        self.world.path("config/config.yaml")
    }

    /// The next version of the file.
    fn set(&self, rules: &str) {
        let dir = self.world.path("config");
        std::fs::create_dir_all(&dir).unwrap();
        let version = format!("..{}", std::fs::read_dir(&dir).unwrap().count());
        std::fs::create_dir(dir.join(&version)).unwrap();
        let text = format!("apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\nrules: {rules}\n");
        std::fs::write(dir.join(&version).join("config.yaml"), text).unwrap();
        std::os::unix::fs::symlink(&version, dir.join("..data_tmp")).unwrap();
        std::fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
        // It lies there from the first version on.
        let _ = std::os::unix::fs::symlink("..data/config.yaml", self.file());
    }
}

/// What is published of GPU 0: slots and interval of its time-slices, and the
/// devices whose mode is off.
fn offered(world: &World) -> String {
    let slices = world.api.list::<ResourceSlice>();
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

async fn offers(world: &World, expected: &str) {
    until(expected, || offered(world) == expected).await;
}

const ALL: &str = "gpu-0 gpu-0-mig-1g10gb-19-0 gpu-0-mps gpu-0-timeslice";

#[tokio::test]
async fn what_no_claim_stands_on_changes_at_once_and_the_rest_with_the_last_claim() {
    let world = World::up(H100).await;
    let smi = world.sim.root().join("usr/bin/nvidia-smi");
    std::fs::remove_file(&smi).unwrap();
    // A copy: the program finds its simulator from where it lies.
    std::fs::copy(crate::programs::program("divvy-sim"), &smi).unwrap();
    let mount = Mount { world: &world };
    mount.set("[{slots: 8, interval: Short}]");
    let daemon = world.start(&["--config", mount.file().to_str().unwrap()]).await;
    offers(&world, "8 Short off: ").await;
    mount.set("[{slots: 6, interval: Medium}]");
    offers(&world, "6 Medium off: ").await;
    let result = json!({
        "request": "r", "driver": DRIVER, "pool": NODE, "device": "gpu-0-timeslice",
        "shareID": "0d5b1f0e-6c1b-4a52-a5a1-000000000001", "consumedCapacity": {"slots": "5"},
    });
    let claim = world.claim_with("a", vec![result], json!([]));
    world.prepare(&claim).await.unwrap();
    mount.set("[{slots: 2, interval: Long, modes: [whole, mig]}]");
    offers(&world, "6 Medium off: gpu-0-mps gpu-0-timeslice").await;
    // A new daemon knows as well as the old one what the claim stands on.
    daemon.kill();
    let daemon = world.spawn(&["--config", mount.file().to_str().unwrap()]);
    // Until then the kubelet may forget the old one once more.
    daemon.wait_log("registered with the kubelet").await;
    world.prepare_until_ok(&claim).await;
    assert_eq!(offered(&world), "6 Medium off: gpu-0-mps gpu-0-timeslice");
    world.unprepare(&claim).await.unwrap();
    offers(&world, "2 Long off: gpu-0-mps gpu-0-timeslice").await;
}

#[tokio::test]
async fn a_file_that_cannot_be_used_changes_nothing_and_is_told() {
    let world = World::up(H100).await;
    let mount = Mount { world: &world };
    mount.set("[{slots: 8}]");
    let daemon = world.start(&["--config", mount.file().to_str().unwrap()]).await;
    offers(&world, "8 Default off: ").await;
    mount.set("[{slot: 2}]");
    let why =
        "line 3: field rules[0].slot is unknown to Rule; did you mean slots?; what was read before holds";
    daemon.wait_log(why).await;
    let told = |event: Event| event.note.is_some_and(|note| note.contains(why));
    until("an event tells it", || world.api.list::<Event>().into_iter().any(told)).await;
    assert_eq!(offered(&world), "8 Default off: ");
    mount.set("[{slots: 2}]");
    offers(&world, "2 Default off: ").await;
}

#[tokio::test]
async fn until_there_is_a_file_that_can_be_used_nothing_is_offered() {
    let world = World::up(H100).await;
    let mount = Mount { world: &world };
    mount.set("7");
    let daemon = world.start(&["--config", mount.file().to_str().unwrap()]).await;
    daemon.wait_log("until it can be used no GPU is offered").await;
    offers(&world, &format!("4 Default off: {ALL}")).await;
    mount.set("[{dedicated: true}]");
    offers(&world, "4 Default off: gpu-0-mig-1g10gb-19-0 gpu-0-mps gpu-0-timeslice").await;
}

#[tokio::test]
async fn rules_follow_the_labels_of_the_node() {
    let world = World::up(H100).await;
    let mount = Mount { world: &world };
    let label = |pool: &str| {
        let metadata = json!({"name": NODE, "labels": {"pool": pool}});
        world.api.put(json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
    };
    label("a");
    mount.set("[{match: {nodeLabels: {pool: a}}, slots: 3}, {match: {nodeLabels: {pool: b}}, slots: 5}]");
    let _daemon = world.start(&["--config", mount.file().to_str().unwrap()]).await;
    // From the first on: nothing was tainted until the labels were known.
    until("something is published", || !offered(&world).is_empty()).await;
    assert_eq!(offered(&world), "3 Default off: ");
    label("b");
    offers(&world, "5 Default off: ").await;
    label("c");
    offers(&world, "4 Default off: ").await;
}
