//! The slices of `divvy template` equal those that the node daemon publishes, on simulated GPUs,
//! except for facts that differ from node to node.
#![cfg(feature = "demo")]

use divvy_fakes::apiserver::{FakeApi, FakeApiOptions};
use divvy_fakes::kubelet::{FakeKubelet, KubeletOptions};
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const NODE: &str = "node-1";
/// Upper bound of the wait for the published slices. Only a failing test waits this long.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(30);

/// A node type.
#[derive(Default)]
struct NodeType {
    gpus: &'static str,
    /// Rules of the node configuration; empty for a daemon without a configuration.
    rules: &'static str,
    mig_enabled: bool,
    /// Flags of the daemon and the command alike.
    flags: &'static [&'static str],
}

struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // An error means that the process has exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The arguments that name the node configuration.
fn config(node: &NodeType, dir: &Path) -> Vec<String> {
    if node.rules.is_empty() {
        return Vec::new();
    }
    let file = dir.join("config.yaml");
    let text = format!("apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\nrules: {}\n", node.rules);
    std::fs::write(&file, text).expect("configuration");
    vec!["--config".to_owned(), file.display().to_string()]
}

/// Starts the daemon. Its log is the file `log`.
fn start(node: &NodeType, api: &FakeApi, dir: &Path) -> Daemon {
    let path = |name: &str| dir.join(name);
    symlink(env!("CARGO_BIN_EXE_divvy"), path("divvy-node")).expect("a link");
    symlink(env!("CARGO_BIN_EXE_divvy"), path("divvy-sim")).expect("a link");
    let options = divvy_sim::Options::new(divvy_sim::library().expect("NVML"), path("divvy-sim"));
    let sim = divvy_sim::create(&path("root"), node.gpus, &options).expect("GPUs");
    if node.mig_enabled {
        let enabled = sim.update(|state| {
            state.gpus.iter_mut().for_each(|gpu| (gpu.mig.current, gpu.mig.pending) = (true, true));
            Ok(())
        });
        enabled.expect("MIG mode");
    }
    // Placeholders: no container starts in this test.
    std::fs::create_dir_all(path("library/shim")).expect("a directory");
    for name in ["libdivvy.so", "shim/libcuda.so.1", "shim/libnvidia-ml.so.1"] {
        std::fs::write(path("library").join(name), name).expect("a file");
    }
    std::fs::create_dir(path("cdi")).expect("a directory");
    let log = std::fs::File::create(path("log")).expect("log");
    let (root, mut command) = (path("root"), Command::new(path("divvy-node")));
    command.env_clear().args(["--node-name", NODE, "--hook", "none", "--http-address", "off"]);
    let kubeconfig = api.kubeconfig_path(dir).expect("kubeconfig");
    for (flag, value) in [
        ("--kubeconfig", kubeconfig),
        ("--kubelet-root", path("k")),
        ("--cdi-dir", path("cdi")),
        ("--run-dir", path("run")),
        ("--library-dir", path("library")),
        ("--driver-root", root.clone()),
        ("--dev-root", root.clone()),
        ("--proc-root", root.join("proc")),
        ("--process-root", root.join("proc")),
        ("--sys-root", root.join("sys")),
        ("--runtime-config", path("containerd.toml")),
    ] {
        command.arg(flag).arg(value);
    }
    command.args(config(node, dir)).args(node.flags);
    command.stdin(Stdio::null()).stdout(log.try_clone().expect("log")).stderr(log);
    Daemon(command.spawn().expect("divvy-node starts"))
}

/// The slices that the command prints, for the versions that the simulator has.
fn template(node: &NodeType, dir: &Path) -> Vec<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy"));
    command.args(["template", "--output", "json", "--node", NODE, "--gpus", node.gpus]);
    command.args(["--driver-version", "580.95.05", "--cuda-version", "13.0"]);
    if node.mig_enabled {
        command.arg("--mig-enabled");
    }
    let out = command.args(config(node, dir)).args(node.flags).output().expect("divvy starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let list: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    list["items"].as_array().expect("a list").clone()
}

/// The specs of the slices in the order of their names, with the facts of the node replaced.
fn normalized(mut slices: Vec<Value>) -> Vec<Value> {
    slices.sort_by_key(|slice| slice["metadata"]["name"].as_str().expect("a name").to_owned());
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    for slice in &mut slices {
        let devices = slice["spec"]["devices"].as_array_mut();
        for device in devices.into_iter().flatten() {
            let attributes = device["attributes"].as_object_mut().expect("attributes");
            attributes.remove("resource.kubernetes.io/numaNode");
            for name in ["resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot"] {
                let fact = attributes.insert(name.to_owned(), json!({"string": name}));
                assert!(fact.is_some(), "no {name}");
            }
            // Equal UUIDs stay equal.
            for name in ["uuid", "parentUUID", "nvlinkGroup"] {
                if let Some(Value::String(uuid)) = attributes.get_mut(name).map(|fact| fact["string"].take())
                {
                    let next = format!("gpu {}", seen.len());
                    let replaced = seen.entry(uuid).or_insert(next).clone();
                    attributes.insert(name.to_owned(), json!({"string": replaced}));
                }
            }
            for taint in device["taints"].as_array_mut().into_iter().flatten() {
                taint.as_object_mut().expect("a taint").remove("timeAdded");
            }
        }
    }
    slices.into_iter().map(|mut slice| slice["spec"].take()).collect()
}

/// The published slices, as soon as they equal the expected ones or after the timeout.
async fn published(api: &FakeApi, expected: &[Value]) -> Vec<Value> {
    let began = Instant::now();
    loop {
        let slices = api.list::<ResourceSlice>();
        let slices = slices.iter().map(|slice| serde_json::to_value(slice).expect("JSON")).collect();
        let slices = normalized(slices);
        if slices == expected || began.elapsed() > PUBLISH_TIMEOUT {
            return slices;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn check(node: NodeType) {
    let dir = tempfile::tempdir().expect("a directory");
    let expected = normalized(template(&node, dir.path()));
    let api = FakeApi::start(FakeApiOptions::default()).await.expect("an API server");
    api.put(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}));
    let _kubelet = FakeKubelet::start(&dir.path().join("k"), KubeletOptions::default()).expect("a kubelet");
    let _daemon = start(&node, &api, dir.path());
    let found = published(&api, &expected).await;
    let log = || std::fs::read_to_string(dir.path().join("log")).unwrap_or_default();
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found, expected, "slice {at} of {} {}\n{}", node.gpus, node.rules, log());
    }
    assert_eq!(found.len(), expected.len(), "{} {}\n{}", node.gpus, node.rules, log());
    assert!(!found.is_empty());
}

#[tokio::test]
async fn slices_of_every_kind_of_model_are_predicted() {
    for gpus in
        ["8xH100-SXM5-80GB", "2xA100-SXM4-40GB", "L40S", "2xT4", "2xB200", "4xGB200", "A30", "RTX-PRO"]
    {
        check(NodeType { gpus, ..NodeType::default() }).await;
    }
}

#[tokio::test]
async fn slices_follow_the_node_configuration() {
    for rules in [
        "[{modes: [whole]}]",
        "[{migShares: true, slots: 8, mpsClients: 2, interval: Long}]",
        "[{modes: [mig]}, {match: {indices: [1]}, dedicated: true}]",
        "[{match: {products: ['*H100*']}, shares: false}]",
    ] {
        check(NodeType { gpus: "2xH100-SXM5-80GB", rules, ..NodeType::default() }).await;
    }
}

#[tokio::test]
async fn slices_follow_the_flags_of_the_daemon() {
    let a100 = |flags| NodeType { gpus: "2xA100-SXM4-40GB", flags, ..NodeType::default() };
    check(a100(&["--shares=false"])).await;
    check(a100(&["--scheduler-version", "1.36.1"])).await;
    check(NodeType { mig_enabled: true, ..a100(&[]) }).await;
}
