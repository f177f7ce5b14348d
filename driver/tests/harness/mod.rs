//! A node for tests: simulated GPUs, a fake API server, a fake kubelet, and the
//! real `divvy-node` as a process of its own between them.
//!
//! Everything that outlives the daemon is in [`World`]; a [`Daemon`] can be
//! stopped, killed and started again over it.
#![allow(dead_code, clippy::unwrap_used)]

use crate::programs::program;
use divvy_fakes::apiserver::{FakeApi, FakeApiOptions};
use divvy_fakes::kubelet::{FakeKubelet, KubeletOptions, Outcome, Wipe};
use divvy_kubelet::dra::v1::{Claim, Device};
use divvy_sim::control::{Pattern, When};
use divvy_sim::{Code, Sim};
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{Value, json};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const DRIVER: &str = "gpu.divvy.dev";
pub(crate) const NODE: &str = "node-1";
pub(crate) const H100: &str = "H100-SXM5-80GB";
/// No test waits longer for what should come at once.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The node and its cluster.
pub(crate) struct World {
    pub(crate) sim: Sim,
    pub(crate) api: Arc<FakeApi>,
    pub(crate) kubelet: FakeKubelet,
    kubeconfig: PathBuf,
    // Last, so that it is removed after everything that writes into it.
    dir: TempDir,
}

impl World {
    /// A node with these GPUs and a kubelet that knows everything.
    pub(crate) async fn up(gpus: &str) -> Self {
        Self::with(gpus, KubeletOptions::default()).await
    }

    /// A node whose kubelet behaves as told; its starts wipe the node's slices.
    pub(crate) async fn with(gpus: &str, options: KubeletOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let multicall = program("divvy-sim");
        let options_of_sim = divvy_sim::Options::new(divvy_sim::library().unwrap(), multicall);
        let sim = divvy_sim::up(&dir.path().join("root"), gpus, &options_of_sim).unwrap();
        let api = Arc::new(FakeApi::start(FakeApiOptions::default()).await.unwrap());
        api.put(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}));
        let kubeconfig = api.kubeconfig_path(dir.path()).unwrap();
        std::fs::create_dir(dir.path().join("cdi")).unwrap();
        let wiped = Arc::clone(&api);
        let wipe: Wipe = Arc::new(move || wiped.delete_all::<ResourceSlice>());
        let options = KubeletOptions { wipe: Some(wipe), ..options };
        let kubelet = FakeKubelet::start(&dir.path().join("k"), options).unwrap();
        Self { sim, api, kubelet, kubeconfig, dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn cdi_dir(&self) -> PathBuf {
        self.path("cdi")
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.path("k/plugins/gpu.divvy.dev/state")
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// A directory with what goes into containers with a share, by name; its content is of no matter here.
    fn library(&self) -> PathBuf {
        let dir = self.path("library");
        std::fs::create_dir_all(dir.join("shim")).unwrap();
        for name in ["libdivvy.so", "shim/libcuda.so.1", "shim/libnvidia-ml.so.1"] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        dir
    }

    /// What a reboot does to what lies in memory; a keeper may be writing there.
    pub(crate) fn clear_run_dir(&self) {
        let begun = Instant::now();
        while std::fs::remove_dir_all(self.run_dir()).is_err() && self.run_dir().exists() {
            assert!(begun.elapsed() < PATIENCE, "{} cannot be removed", self.run_dir().display());
        }
    }

    /// A node configuration by which processes have long turns.
    pub(crate) fn long_turns(&self) -> PathBuf {
        let path = self.path("config.yaml");
        let rules = "rules: [{interval: Long}]";
        let text = format!("apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\n{rules}\n");
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The daemon with the flags every test has, and these, which go before.
    pub(crate) fn command(&self, flags: &[&str]) -> Command {
        let root = self.sim.root();
        let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-node"));
        command.env_clear().args([
            "--node-name",
            NODE,
            "--hook",
            "none",
            "--log-level",
            "info,divvy_driver=debug",
        ]);
        if !flags.contains(&"--http-address") {
            command.args(["--http-address", "off"]);
        }
        let mut path = |flag: &str, path: &Path| {
            if !flags.contains(&flag) {
                command.arg(flag).arg(path);
            }
        };
        path("--kubeconfig", &self.kubeconfig);
        path("--kubelet-root", &self.path("k"));
        path("--cdi-dir", &self.cdi_dir());
        path("--run-dir", &self.run_dir());
        path("--library-dir", &self.library());
        path("--driver-root", root);
        path("--dev-root", root);
        path("--proc-root", &root.join("proc"));
        path("--process-root", &root.join("proc"));
        path("--sys-root", &root.join("sys"));
        path("--runtime-config", &self.path("containerd.toml"));
        command.args(flags);
        command
    }

    /// Starts the daemon; it may not be ready yet.
    pub(crate) fn spawn(&self, flags: &[&str]) -> Daemon {
        Daemon::spawn(self.command(flags), &self.path("log"))
    }

    /// Starts the daemon and waits until it is registered.
    pub(crate) async fn start(&self, flags: &[&str]) -> Daemon {
        let daemon = self.spawn(flags);
        // The kubelet may know its predecessor still, and forget it once more.
        daemon.wait_log("registered with the kubelet").await;
        self.kubelet.wait_registered(DRIVER, 1, PATIENCE).await.unwrap();
        daemon
    }

    /// A claim with that UID and name that holds these devices of this node, one
    /// request each; one share of what several claims may have, and of `NAME=MEMORY`
    /// so much memory, of `NAME=MEMORY/CORES` so much of its time as well.
    pub(crate) fn claim(&self, name: &str, devices: &[&str]) -> Claim {
        let result = |(at, device): (usize, &&str)| {
            let (device, memory) = device.split_once('=').map_or((*device, None), |(of, m)| (of, Some(m)));
            let mut result = json!({
                "request": format!("r{at}"), "driver": DRIVER, "pool": NODE, "device": device,
            });
            let consumed = match device.rsplit('-').next() {
                _ if let Some(asked) = memory => {
                    let (memory, cores) = asked.split_once('/').unwrap_or((asked, "0"));
                    json!({"memory": memory, "cores": cores})
                }
                Some("timeslice") => json!({"slots": "1"}),
                Some("mps") => json!({"threads": "10", "memory": "1Gi", "clients": "1"}),
                _ => return result,
            };
            result["shareID"] = json!(format!("{name}-share-{at}"));
            result["consumedCapacity"] = consumed;
            result
        };
        self.claim_with(name, devices.iter().enumerate().map(result).collect(), json!([]))
    }

    /// A claim with these allocation results and this configuration.
    pub(crate) fn claim_with(&self, name: &str, results: Vec<Value>, config: Value) -> Claim {
        let mut devices = json!({"results": results});
        if config.as_array().is_some_and(|config| !config.is_empty()) {
            devices["config"] = config;
        }
        self.put_claim(name, json!({"allocation": {"devices": devices}}))
    }

    /// A claim with that status; UID and name are the same text.
    pub(crate) fn put_claim(&self, name: &str, status: Value) -> Claim {
        self.api.put(json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": "ns", "name": name, "uid": name},
            "spec": {"devices": {}},
            "status": status,
        }));
        reference(name)
    }

    /// The result of one claim's prepare.
    pub(crate) async fn prepare(&self, claim: &Claim) -> Outcome {
        let outcomes = self.kubelet.prepare(DRIVER, std::slice::from_ref(claim)).await.unwrap();
        outcomes.into_values().next().unwrap()
    }

    /// The result of one claim's unprepare.
    pub(crate) async fn unprepare(&self, claim: &Claim) -> Result<(), String> {
        let outcomes = self.kubelet.unprepare(DRIVER, std::slice::from_ref(claim)).await.unwrap();
        outcomes.into_values().next().unwrap().map(|_| ())
    }

    /// Prepares until it works.
    pub(crate) async fn prepare_until_ok(&self, claim: &Claim) -> Vec<Device> {
        let claims = std::slice::from_ref(claim);
        let outcomes = self.kubelet.prepare_until_ok(DRIVER, claims, PATIENCE).await.unwrap();
        outcomes.into_values().next().unwrap().unwrap()
    }

    /// The GPUs as the hardware has them: `off` or `mig`, then profile@start of each instance.
    pub(crate) fn hardware(&self) -> Vec<String> {
        let state = self.sim.read().unwrap();
        let gpu = |gpu: &divvy_sim::state::Gpu| {
            let mut text = String::from(if gpu.mig.current { "mig" } else { "off" });
            let mut instances: Vec<_> = gpu.instances.iter().collect();
            instances.sort_by_key(|gi| gi.placement.start);
            for gi in instances {
                text += &format!(" {}@{}", gi.profile, gi.placement.start);
            }
            text
        };
        state.gpus.iter().map(gpu).collect()
    }

    #[track_caller]
    pub(crate) fn expect_hardware(&self, gpus: &[&str]) {
        assert_eq!(self.hardware(), gpus);
    }

    /// CDI files and records, by claim: what a prepared claim leaves.
    pub(crate) fn traces(&self) -> Vec<String> {
        let mut names = Vec::new();
        for dir in [self.cdi_dir(), self.state_dir().join("claims")] {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            names.extend(entries.map(|entry| entry.file_name().to_string_lossy().into_owned()));
        }
        names.sort();
        names
    }

    /// Makes calls of that name fail: the nth, or all.
    pub(crate) fn fault(&self, call: &str, nth: Option<u64>) {
        self.change(|state| state.add_fault(Pattern::new(call), nth, When::Before, Code::Unknown));
    }

    /// Makes the next call of that name on GPU 0 block before its effect.
    pub(crate) fn hold(&self, call: &str) {
        let pattern = Pattern { call: call.into(), gpu: Some(0) };
        self.change(|state| state.add_hold(pattern, Some(1), When::Before));
    }

    /// Waits until a held call blocks.
    pub(crate) async fn wait_held(&self) {
        until("a call is held", || !self.sim.read().unwrap().control.held.is_empty()).await;
    }

    /// Ends all faults and holds.
    pub(crate) fn release(&self) {
        self.change(|state| {
            state.clear_faults(None);
            state.release(None);
        });
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut divvy_sim::State)) {
        self.sim
            .update(|state| {
                change(state);
                Ok(())
            })
            .unwrap();
    }

    /// Devices in the published slices, by name.
    pub(crate) fn published(&self) -> Vec<String> {
        let slices = self.api.list::<ResourceSlice>();
        let devices = slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
        let mut names: Vec<String> = devices.map(|device| device.name).collect();
        names.sort();
        names
    }
}

/// What the kubelet sends for a claim.
pub(crate) fn reference(name: &str) -> Claim {
    Claim { namespace: "ns".to_owned(), uid: name.to_owned(), name: name.to_owned() }
}

/// A running `divvy-node`. Dropped, it is killed; its log is shown if the test
/// failed. It leads a process group: what it runs is killed with it, as in a pod.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
    /// So many bytes of it are its predecessors'.
    begin: usize,
}

impl Daemon {
    pub(crate) fn spawn(mut command: Command, log: &Path) -> Self {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).process_group(0);
        let begin = std::fs::metadata(log).unwrap().len() as usize;
        let child = command.spawn().unwrap();
        Self { child, log: log.to_owned(), begin }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it and its predecessors logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Whether it has logged that itself.
    pub(crate) fn has_logged(&self, text: &str) -> bool {
        self.log().get(self.begin..).is_some_and(|log| log.contains(text))
    }

    /// Until it has logged that itself.
    pub(crate) async fn wait_log(&self, text: &str) {
        until(text, || self.has_logged(text)).await;
    }

    /// Whether the process is gone.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// SIGKILL: nothing is tidied up.
    pub(crate) fn kill(mut self) {
        self.kill_all();
        self.child.wait().unwrap();
    }

    fn kill_all(&self) {
        let group = rustix::process::Pid::from_raw(self.pid() as i32).unwrap();
        // It may have ended already.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }

    /// SIGTERM, and the exit status.
    pub(crate) async fn stop(mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_raw(self.pid() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.ended().await
    }

    /// Waits for its end.
    pub(crate) async fn ended(&mut self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < PATIENCE, "divvy-node does not end");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill_all();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of divvy-node ---\n{}", self.log());
        }
    }
}

/// Waits for what others do by themselves.
#[track_caller]
pub(crate) fn until(what: &str, done: impl Fn() -> bool) -> impl Future<Output = ()> {
    let at = std::panic::Location::caller();
    async move {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < PATIENCE, "{at}: waited in vain until {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
