//! A node for tests: simulated GPUs, a fake API server, a fake kubelet, and the real `divvy-node`
//! as a separate process between them.
//!
//! [`TestNode`] holds everything that outlives the daemon. A [`Daemon`] on it can be stopped,
//! killed and started again.
#![allow(dead_code, clippy::unwrap_used)]

use crate::programs::program;
use divvy_fakes::apiserver::{FakeApi, FakeApiOptions};
use divvy_fakes::kubelet::{CallError, FakeKubelet, KubeletOptions, Outcome, Wipe};
use divvy_kubelet::dra::v1::{Claim, Device};
use divvy_sim::control::{Pattern, When};
use divvy_sim::{Code, Sim};
use k8s_openapi::api::resource::v1::{self as resource, ResourceClaim, ResourceSlice};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const DRIVER: &str = "gpu.divvy.dev";
pub(crate) const NODE: &str = "node-1";
pub(crate) const H100: &str = "H100-SXM5-80GB";
/// Upper bound of each wait for a state that should be reached at once. Only a failing test waits this long.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// The node and its cluster: everything that outlives the daemon.
pub(crate) struct TestNode {
    pub(crate) sim: Sim,
    pub(crate) api: Arc<FakeApi>,
    pub(crate) kubelet: FakeKubelet,
    kubeconfig: PathBuf,
    // The last field, so that it is dropped after everything that writes into it.
    dir: TempDir,
}

impl TestNode {
    /// A node with these GPUs and a kubelet that supports every service version.
    pub(crate) async fn new(gpus: &str) -> Self {
        Self::with_kubelet(gpus, KubeletOptions::default()).await
    }

    /// A node with these kubelet options. As the real one, the kubelet deletes the node's slices
    /// when it starts.
    pub(crate) async fn with_kubelet(gpus: &str, options: KubeletOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let multicall = program("divvy-sim");
        let options_of_sim = divvy_sim::Options::new(divvy_sim::library().unwrap(), multicall);
        let sim = divvy_sim::create(&dir.path().join("root"), gpus, &options_of_sim).unwrap();
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

    /// A directory with placeholders for the files that are mounted into containers with a share. No test
    /// here reads their content.
    fn library(&self) -> PathBuf {
        let dir = self.path("library");
        std::fs::create_dir_all(dir.join("shim")).unwrap();
        for name in ["libdivvy.so", "shim/libcuda.so.1", "shim/libnvidia-ml.so.1"] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        dir
    }

    /// Clears the run directory, as a reboot clears `/run`. It retries because a supervisor may be writing
    /// there.
    pub(crate) fn clear_run_dir(&self) {
        let begun = Instant::now();
        while std::fs::remove_dir_all(self.run_dir()).is_err() && self.run_dir().exists() {
            assert!(begun.elapsed() < WAIT_TIMEOUT, "{} cannot be removed", self.run_dir().display());
        }
    }

    /// Writes a node configuration with long time slices and returns its path.
    pub(crate) fn write_long_timeslice_config(&self) -> PathBuf {
        let path = self.path("config.yaml");
        let rules = "rules: [{interval: Long}]";
        let text = format!("apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\n{rules}\n");
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The daemon's command line: the flags that every test needs, and `flags`, which take precedence.
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
    pub(crate) fn spawn_daemon(&self, flags: &[&str]) -> Daemon {
        Daemon::spawn(self.command(flags), &self.path("log"))
    }

    /// Starts the daemon and waits until it is registered.
    pub(crate) async fn start_daemon(&self, flags: &[&str]) -> Daemon {
        let daemon = self.spawn_daemon(flags);
        // The kubelet may still list the previous daemon and drop that registration later.
        daemon.wait_log("registered with the kubelet").await;
        self.kubelet.wait_registered(DRIVER, 1, WAIT_TIMEOUT).await.unwrap();
        daemon
    }

    /// A claim, with `name` as name and UID, that is allocated these devices of this node, one request each.
    /// For a time-slice or MPS device it gets one share. `NAME=MEMORY` is a memory share, and
    /// `NAME=MEMORY/CORES` also requests that percentage of compute time.
    pub(crate) fn claim(&self, name: &str, devices: &[&str]) -> Claim {
        let result = |(at, device): (usize, &&str)| {
            let (device, memory) =
                device.split_once('=').map_or((*device, None), |(name, memory)| (name, Some(memory)));
            let mut result = json!({
                "request": format!("r{at}"), "driver": DRIVER, "pool": NODE, "device": device,
            });
            let consumed = match device.rsplit('-').next() {
                _ if let Some(share) = memory => {
                    let (memory, cores) = share.split_once('/').unwrap_or((share, "0"));
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

    /// A claim with this status. Its UID equals its name.
    pub(crate) fn put_claim(&self, name: &str, status: Value) -> Claim {
        self.api.put(json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": "ns", "name": name, "uid": name},
            "spec": {"devices": {}},
            "status": status,
        }));
        claim_ref(name)
    }

    /// Prepares one claim and returns its outcome.
    pub(crate) async fn prepare(&self, claim: &Claim) -> Outcome {
        let outcomes = self.kubelet.prepare(DRIVER, std::slice::from_ref(claim)).await.unwrap();
        outcomes.into_values().next().unwrap()
    }

    /// Unprepares one claim and returns its outcome.
    pub(crate) async fn unprepare(&self, claim: &Claim) -> Result<(), String> {
        let outcomes = self.kubelet.unprepare(DRIVER, std::slice::from_ref(claim)).await.unwrap();
        outcomes.into_values().next().unwrap().map(|_| ())
    }

    /// Deletes the claim and its pod by force. The kubelet does not unprepare the claim.
    pub(crate) fn delete_by_force(&self, claim: &Claim) {
        self.kubelet.delete_pod_by_force(claim);
        self.api.delete::<ResourceClaim>("ns", &claim.name);
    }

    /// Retries the prepare until it succeeds, at most for [`WAIT_TIMEOUT`].
    pub(crate) async fn prepare_until_ok(&self, claim: &Claim) -> Vec<Device> {
        let claims = std::slice::from_ref(claim);
        let outcomes = self.kubelet.prepare_until_ok(DRIVER, claims, WAIT_TIMEOUT).await.unwrap();
        outcomes.into_values().next().unwrap().unwrap()
    }

    /// The state of each simulated GPU: `off` or `mig`, then `profile@start` of each instance.
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

    /// The names of all CDI claim files and claim records.
    pub(crate) fn claim_files(&self) -> Vec<String> {
        let mut names = Vec::new();
        for dir in [self.cdi_dir(), self.state_dir().join("claims")] {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            names.extend(entries.map(|entry| entry.file_name().to_string_lossy().into_owned()));
        }
        names.sort();
        names
    }

    /// Makes NVML calls with this name fail: the nth, or all.
    pub(crate) fn fail_call(&self, call: &str, nth: Option<u64>) {
        self.update_sim(|state| state.add_fault(Pattern::new(call), nth, When::Before, Code::Unknown));
    }

    /// Makes the next NVML call with this name on GPU 0 block before it takes effect.
    pub(crate) fn hold_call(&self, call: &str) {
        let pattern = Pattern { call: call.into(), gpu: Some(0) };
        self.update_sim(|state| state.add_hold(pattern, Some(1), When::Before));
    }

    /// Waits until a held call blocks.
    pub(crate) async fn wait_call_held(&self) {
        until("a call is held", || !self.sim.read().unwrap().control.held.is_empty()).await;
    }

    /// Removes all faults and holds. Held calls return.
    pub(crate) fn clear_faults(&self) {
        self.update_sim(|state| {
            state.clear_faults(None);
            state.release(None);
        });
    }

    pub(crate) fn update_sim(&self, change: impl FnOnce(&mut divvy_sim::State)) {
        self.sim
            .update(|state| {
                change(state);
                Ok(())
            })
            .unwrap();
    }

    /// The names of the devices in the published slices that claims can hold, sorted.
    pub(crate) fn published(&self) -> Vec<String> {
        let mut names: Vec<String> = self.published_devices().map(|device| device.name).collect();
        names.sort();
        names
    }

    /// Whether the GPU with this number is published as present.
    pub(crate) fn publishes_gpu(&self, number: usize) -> bool {
        let is_missing = |device: &resource::Device| {
            let mut taints = device.taints.iter().flatten();
            taints.any(|taint| taint.key == "gpu.divvy.dev/gpu-missing")
        };
        let name = format!("gpu-{number}");
        self.published_devices().any(|device| device.name == name && !is_missing(&device))
    }

    /// The published devices that claims can hold.
    pub(crate) fn published_devices(&self) -> impl Iterator<Item = resource::Device> {
        let slices = self.api.list::<ResourceSlice>();
        let devices = slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
        devices.filter(|device| !device.name.ends_with("-observer"))
    }
}

/// The reference to a claim that the kubelet sends.
pub(crate) fn claim_ref(name: &str) -> Claim {
    Claim { namespace: "ns".to_owned(), uid: name.to_owned(), name: name.to_owned() }
}

/// A running `divvy-node`. It leads a process group, so that its children are killed with it, as in a pod.
/// Drop kills the group, and prints the log if the test failed.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
    /// Offset in bytes at which the log of this daemon begins, after that of earlier ones.
    log_offset: usize,
}

impl Daemon {
    pub(crate) fn spawn(mut command: Command, log: &Path) -> Self {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).process_group(0);
        let log_offset = std::fs::metadata(log).unwrap().len() as usize;
        let child = command.spawn().unwrap();
        Self { child, log: log.to_owned(), log_offset }
    }

    /// Makes the daemon close NVML, or with `over` open it again, and waits for that: two pending signals
    /// have no order.
    pub(crate) async fn drain(&self, over: bool) {
        let (signal, text) = match over {
            false => (Signal::USR1, "NVML is closed on request"),
            true => (Signal::USR2, "NVML is opened again"),
        };
        let count = || self.log().matches(text).count();
        let before = count();
        kill_process(Pid::from_raw(self.pid() as i32).unwrap(), signal).unwrap();
        until(text, || count() > before).await;
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The log of this daemon and of earlier ones on the node.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Whether this daemon has logged the text; earlier ones do not count.
    pub(crate) fn has_logged(&self, text: &str) -> bool {
        self.log().get(self.log_offset..).is_some_and(|log| log.contains(text))
    }

    /// Waits until this daemon has logged the text.
    pub(crate) async fn wait_log(&self, text: &str) {
        until(text, || self.has_logged(text)).await;
    }

    /// Whether the process has exited.
    pub(crate) fn has_exited(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Sends SIGKILL, so that the daemon cleans up nothing.
    pub(crate) fn kill(mut self) {
        self.kill_all();
        self.child.wait().unwrap();
    }

    fn kill_all(&self) {
        let group = Pid::from_raw(self.pid() as i32).unwrap();
        // The process may have exited already.
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }

    /// Sends SIGTERM and returns the exit code.
    pub(crate) async fn stop(mut self) -> Option<i32> {
        let pid = Pid::from_raw(self.pid() as i32).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        self.wait_exit().await
    }

    /// Waits until the process exits and returns its exit code.
    pub(crate) async fn wait_exit(&mut self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "divvy-node has not exited after {WAIT_TIMEOUT:?}");
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

/// Waits until the condition holds. `what` names it in the panic message.
#[track_caller]
pub(crate) fn until(what: &str, done: impl Fn() -> bool) -> impl Future<Output = ()> {
    let at = std::panic::Location::caller();
    async move {
        let begun = Instant::now();
        while !done() {
            assert!(
                begun.elapsed() < WAIT_TIMEOUT,
                "{at}: timed out after {WAIT_TIMEOUT:?} waiting until {what}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Compares the entries of a directory with those that are wanted, and appends a difference to `found`.
pub(crate) fn compare_dir(dir: &Path, wanted: &BTreeSet<String>, found: &mut Vec<String>) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let there: BTreeSet<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    if there != *wanted {
        found.push(format!("{} contains {there:?} instead of {wanted:?}", dir.display()));
    }
}

/// The text of a file, or the error in parentheses.
pub(crate) fn read_or_error(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| format!("({error})"))
}

/// Polling interval for a state that is not reached yet.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A call of the kubelet for one claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KubeletCall {
    Prepare,
    Unprepare,
}

impl KubeletCall {
    /// Sends the call and returns the outcome. It retries while the daemon is starting, at most for
    /// [`WAIT_TIMEOUT`].
    pub(crate) async fn send_with_retry(self, node: &TestNode, claim: &Claim) -> Result<Outcome, String> {
        let begun = Instant::now();
        loop {
            match self.send(node, claim).await {
                Ok(outcome) => return Ok(outcome),
                Err(CallError::Status(_) | CallError::NotRegistered { .. })
                    if begun.elapsed() < WAIT_TIMEOUT =>
                {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                Err(error) => return Err(format!("{self:?} of claim {}: {error}", claim.uid)),
            }
        }
    }

    async fn send(self, node: &TestNode, claim: &Claim) -> Result<Outcome, CallError> {
        let claims = std::slice::from_ref(claim);
        let outcomes = match self {
            Self::Prepare => node.kubelet.prepare(DRIVER, claims).await?,
            Self::Unprepare => node.kubelet.unprepare(DRIVER, claims).await?,
        };
        Ok(outcomes.into_values().next().unwrap_or_else(|| Ok(Vec::new())))
    }
}
