//! Reconciliation of claim records and files with the API server, the kubelet and running containers.

use crate::harness::{DRIVER, H100, NODE, TestNode, until};
use divvy_fakes::kubelet::PodResourcesMode;
use divvy_kubelet::dra::v1::Claim;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

const SLICES: [&str; 3] = ["gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1", "gpu-0-mig-1g10gb-19-2"];
/// A process in the test's `/proc`.
const PID: u32 = 4242;

/// Writes a claim that is allocated on this node and reserved for the consumer.
fn reserved(node: &TestNode, claim: &str, device: &str, consumer: Value) -> Claim {
    let result = json!({"request": "r", "driver": DRIVER, "pool": NODE, "device": device});
    let devices = json!({"results": [result]});
    node.put_claim(claim, json!({"allocation": {"devices": devices}, "reservedFor": [consumer]}))
}

fn consumer(group: &str, resource: &str, name: &str) -> Value {
    json!({"apiGroup": group, "resource": resource, "name": name, "uid": name})
}

/// Writes a process of a container that has the claim's CDI file mounted. Drop ends it.
struct Container {
    process: PathBuf,
}

impl Container {
    fn start(node: &TestNode, claim: &str) -> Self {
        let process = node.sim.root().join(format!("proc/{PID}"));
        fs::create_dir_all(&process).unwrap();
        let file = format!("gpu.divvy.dev-claim_{claim}.json");
        let mount = format!("63 43 0:25 /cdi/{file} /run/divvy-claims/{claim}.json ro - tmpfs tmpfs rw\n");
        fs::write(process.join("mountinfo"), format!("1 0 0:50 / / rw - overlay overlay rw\n{mount}"))
            .unwrap();
        Self { process }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.process).unwrap();
    }
}

/// Damages the claim's record, as a disk error does.
fn damage_record(node: &TestNode, claim: &str) {
    fs::write(node.state_dir().join(format!("claims/{claim}.json")), "damaged").unwrap();
}

#[tokio::test]
async fn record_is_kept_while_the_kubelet_lists_its_claim() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let [gone, kept, used] = [("gone", 0), ("kept", 1), ("used", 2)].map(|(name, slice)| {
        let claim = node.claim(name, &[SLICES[slice]]);
        (name, claim)
    });
    for (_, claim) in [&gone, &kept, &used] {
        node.prepare(claim).await.unwrap();
    }
    daemon.kill();
    node.delete_by_force(&gone.1);
    node.api.delete::<ResourceClaim>("ns", used.0);
    let daemon = node.spawn_daemon(&[]);
    until("the claim is released", || node.hardware() == ["mig 19@1 19@2"]).await;
    daemon.wait_log("record of Gone claim ns/used (Listed) kept").await;
}

#[tokio::test]
async fn record_is_kept_while_a_process_has_its_mounts() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let first = node.claim("first", &["gpu-0"]);
    node.prepare(&first).await.unwrap();
    let container = Container::start(&node, "first");
    daemon.kill();
    node.delete_by_force(&first);
    let daemon = node.start_daemon(&[]).await;
    daemon.wait_log("record of Gone claim ns/first (Mounted { pid: 4242 }) kept").await;
    let second = node.claim("second", &["gpu-0"]);
    node.prepare(&second).await.unwrap_err();
    drop(container);
    until("the claim is released", || node.claim_files().is_empty()).await;
    node.prepare(&second).await.unwrap();
}

/// The kubelet unprepares claims of pods that were deleted by force every minute.
#[tokio::test]
async fn unprepare_is_refused_while_a_container_runs() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    // As the hook and the kernel write them.
    let registered = node.run_dir().join("containers/a");
    let process = node.sim.root().join(format!("proc/{PID}"));
    for dir in [&registered, &process] {
        fs::create_dir_all(dir).unwrap();
    }
    fs::write(registered.join("c1"), format!("{PID} 7788\n")).unwrap();
    fs::write(process.join("stat"), format!("{PID} (train) S {}7788 0\n", "0 ".repeat(18))).unwrap();
    let refused = node.unprepare(&claim).await.unwrap_err();
    assert!(refused.contains("container c1 still uses it"), "{refused}");
    node.prepare(&node.claim("b", &["gpu-0"])).await.unwrap_err();
    fs::remove_dir_all(process).unwrap();
    node.unprepare(&claim).await.unwrap();
    assert!(!registered.exists());
    node.prepare(&node.claim("b", &["gpu-0"])).await.unwrap();
}

#[tokio::test]
async fn unreachable_api_server_releases_nothing() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICES[0]]);
    node.prepare(&claim).await.unwrap();
    daemon.kill();
    node.api.set_unavailable(true);
    let daemon = node.spawn_daemon(&["--read-timeout", "200ms"]);
    daemon.wait_log("records not reconciled").await;
    node.expect_hardware(&["mig 19@0"]);
    node.delete_by_force(&claim);
    node.api.set_unavailable(false);
    until("the claim is released", || node.claim_files().is_empty()).await;
}

#[tokio::test]
async fn kubelet_without_an_answer_releases_nothing() {
    for mode in [PodResourcesMode::Absent, PodResourcesMode::Hang] {
        let node = TestNode::new(H100).await;
        let daemon = node.start_daemon(&[]).await;
        let claim = node.claim("a", &[SLICES[0]]);
        node.prepare(&claim).await.unwrap();
        daemon.kill();
        node.delete_by_force(&claim);
        node.kubelet.set_pod_resources(mode);
        let daemon = node.spawn_daemon(&["--read-timeout", "500ms"]);
        daemon.wait_log("nothing is released, because the containers of this node are not known").await;
        node.expect_hardware(&["mig 19@0"]);
        node.kubelet.set_pod_resources(PodResourcesMode::Claims);
        until("the claim is released", || node.claim_files().is_empty()).await;
    }
}

#[tokio::test]
async fn mounts_decide_if_the_kubelet_hides_claims() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let kept = reserved(&node, "kept", SLICES[0], consumer("", "pods", "pod-of-kept"));
    let (gone, used) = (node.claim("gone", &[SLICES[1]]), node.claim("used", &[SLICES[2]]));
    for claim in [&kept, &gone, &used] {
        node.prepare(claim).await.unwrap();
    }
    let _container = Container::start(&node, "used");
    daemon.kill();
    node.kubelet.set_pod_resources(PodResourcesMode::NoClaims);
    for claim in ["gone", "used"] {
        node.api.delete::<ResourceClaim>("ns", claim);
    }
    let daemon = node.spawn_daemon(&[]);
    until("the claim is released", || node.hardware() == ["mig 19@0 19@2"]).await;
    daemon.wait_log("the kubelet does not list claims").await;
    daemon.wait_log("record of Gone claim ns/used (Mounted { pid: 4242 }) kept").await;
}

#[tokio::test]
async fn claim_in_use_without_record_is_prepared_again() {
    let group = consumer("scheduling.k8s.io", "podgroups", "group");
    for (consumer, mode) in [
        (consumer("", "pods", "p"), PodResourcesMode::Claims),
        (group, PodResourcesMode::Claims),
        (consumer("", "pods", "p"), PodResourcesMode::NoClaims),
    ] {
        let node = TestNode::new(H100).await;
        let daemon = node.start_daemon(&[]).await;
        let claim = reserved(&node, "a", SLICES[0], consumer);
        node.prepare(&claim).await.unwrap();
        let _container = (mode == PodResourcesMode::NoClaims).then(|| Container::start(&node, "a"));
        daemon.kill();
        damage_record(&node, "a");
        node.kubelet.set_pod_resources(mode);
        let daemon = node.start_daemon(&[]).await;
        daemon.wait_log("a claim in use without a record was prepared again").await;
        node.expect_hardware(&["mig 19@0"]);
        assert_eq!(node.claim_files(), ["a.json", "gpu.divvy.dev-claim_a.json"]);
        node.unprepare(&claim).await.unwrap();
        assert!(node.claim_files().is_empty());
    }
}

#[tokio::test]
async fn claim_that_no_container_uses_is_not_prepared_again() {
    let node = TestNode::new(H100).await;
    reserved(&node, "waiting", SLICES[0], consumer("", "pods", "pending"));
    let daemon = node.start_daemon(&[]).await;
    daemon.wait_log("records reconciled with the API server and the kubelet").await;
    node.expect_hardware(&["off"]);
}

#[tokio::test]
async fn files_without_record_are_removed_after_their_use() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let (used, unused) =
        (node.claim("used", &["gpu-0-share=5Gi"]), node.claim("unused", &["gpu-0-share=5Gi"]));
    for claim in [&used, &unused] {
        node.prepare(claim).await.unwrap();
    }
    daemon.kill();
    let version = node.state_dir().parent().unwrap().join("lib/0123456789abcdef");
    fs::create_dir_all(&version).unwrap();
    let vendor = node.cdi_dir().join("k8s.gpu.nvidia.com-claim_unused.json");
    fs::write(&vendor, "{}").unwrap();
    let container = Container::start(&node, "used");
    for claim in [&used, &unused] {
        damage_record(&node, &claim.uid);
        node.delete_by_force(claim);
    }
    let daemon = node.start_daemon(&[]).await;
    node.unprepare(&used).await.unwrap();
    node.unprepare(&unused).await.unwrap();
    let paths = |claim: &str| {
        [
            node.cdi_dir().join(format!("gpu.divvy.dev-claim_{claim}.json")),
            node.state_dir().join("metadata").join(claim),
            node.run_dir().join("shares").join(claim),
        ]
    };
    until("unused files are removed", || paths("unused").iter().all(|path| !path.exists())).await;
    daemon.wait_log("files without a record (Mounted { pid: 4242 }) kept").await;
    assert!(paths("used").iter().all(|path| path.exists()));
    assert!(!version.exists() && vendor.exists());
    drop(container);
    until("all files are removed", || paths("used").iter().all(|path| !path.exists())).await;
    assert!(vendor.exists());
}
