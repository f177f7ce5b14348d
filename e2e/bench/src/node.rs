//! The measured node: simulated GPUs, an API server process, a `divvy-node` process, and a fake
//! kubelet in this process.
//!
//! The simulator's state and the sockets are always in memory, since their cost is not the
//! daemon's. Each figure chooses where the daemon's records and CDI files are.

use crate::api_server::ApiServer;
use crate::program;
use anyhow::{Context, Result, anyhow, bail};
use divvy_api::names::DRIVER;
use divvy_fakes::kubelet::{FakeKubelet, KubeletOptions, Plugin};
use divvy_kubelet::dra::v1::Claim as WireClaim;
use divvy_sim::Sim;
use divvy_sim::control::TraceLine;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, GetParams, ListParams, PostParams, WatchEvent, WatchParams};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

pub(crate) const NODE: &str = "bench";
const NAMESPACE: &str = "default";
/// Size of a claim on the wire, as JSON. Claims are padded to it.
const CLAIM_BYTES: usize = 4096;
/// Limit for registration and for the first slices.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit for one kubelet call.
const CALL_TIMEOUT: Duration = Duration::from_secs(45);

/// Parent directories of a node's files.
pub(crate) struct Dirs<'a> {
    /// Simulator state, sockets and log; in memory.
    pub(crate) memory: &'a Path,
    /// The daemon's records and CDI files.
    pub(crate) files: &'a Path,
    /// The libraries for shares. Without them the node publishes no shares.
    pub(crate) library: Option<&'a Path>,
}

/// A running node. The daemon is killed when it is dropped.
pub(crate) struct BenchNode {
    pub(crate) sim: Sim,
    pub(crate) client: kube::Client,
    pub(crate) server: ApiServer,
    /// Start of the daemon, by both clocks.
    pub(crate) started: (Instant, SystemTime),
    kubelet: FakeKubelet,
    daemon: Child,
    /// Directory of the daemon's records.
    pub(crate) state: PathBuf,
    pub(crate) cdi: PathBuf,
    /// The daemon's run directory.
    pub(crate) run: PathBuf,
    log: PathBuf,
    _dirs: [tempfile::TempDir; 2],
}

impl BenchNode {
    /// Starts a node and waits for its registration and slices.
    pub(crate) async fn start(node: &Path, gpus: &str, dirs: &Dirs<'_>) -> Result<Self> {
        let (started, slices) = Self::spawn(node, gpus, dirs, false).await?;
        slices.complete(&started).await?;
        started.registered().await?;
        Ok(started)
    }

    /// Starts a node without waiting for it. The watch of its slices begins before the daemon starts.
    pub(crate) async fn spawn(
        node: &Path,
        gpus: &str,
        dirs: &Dirs<'_>,
        trace: bool,
    ) -> Result<(Self, SliceWatch)> {
        let below = |dir: &Path| -> Result<tempfile::TempDir> {
            std::fs::create_dir_all(dir)?;
            Ok(tempfile::Builder::new().prefix("db-").tempdir_in(dir)?)
        };
        let (memory, files) = (below(dirs.memory)?, below(dirs.files)?);
        let (root, state, cdi) = (memory.path(), files.path().join("state"), files.path().join("cdi"));
        let gpu = root.join("gpu");
        let options = divvy_sim::Options::new(divvy_sim::library()?, std::env::current_exe()?);
        let sim = divvy_sim::create(&gpu, gpus, &options)?;
        sim.update(|state| {
            state.control.trace = trace;
            Ok(())
        })?;
        let server = ApiServer::start(root)?;
        let config = kube::config::Kubeconfig::read_from(&server.kubeconfig)?;
        let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await?;
        let client = kube::Client::try_from(config)?;
        let object: Node =
            serde_json::from_value(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}))?;
        Api::all(client.clone()).create(&PostParams::default(), &object).await?;
        let slices = SliceWatch::watch(&client).await?;
        let kubelet = FakeKubelet::start(&root.join("kubelet"), KubeletOptions::default())?;
        std::fs::create_dir_all(&cdi)?;

        let started = (Instant::now(), SystemTime::now());
        let path = root.join("node.log");
        let log = std::fs::File::create(&path)?;
        let library = dirs.library.into_iter().flat_map(|dir| [Path::new("--library-dir"), dir]);
        let daemon = Command::new(node)
            .args(["--node-name", NODE, "--http-address", "off", "--mig-hold-off", "0s"])
            .arg("--kubeconfig")
            .arg(&server.kubeconfig)
            .arg("--kubelet-root")
            .arg(root.join("kubelet"))
            .arg("--state-dir")
            .arg(&state)
            .arg("--cdi-dir")
            .arg(&cdi)
            .arg("--run-dir")
            .arg(root.join("run"))
            .arg("--driver-root")
            .arg(&gpu)
            .arg("--dev-root")
            .arg(&gpu)
            .arg("--proc-root")
            .arg(gpu.join("proc"))
            .arg("--sys-root")
            .arg(gpu.join("sys"))
            .args(library)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", node.display()))?;
        let started = Self {
            sim,
            client,
            server,
            started,
            kubelet,
            daemon,
            state,
            cdi,
            run: root.join("run"),
            log: path,
            _dirs: [memory, files],
        };
        Ok((started, slices))
    }

    /// Waits until the daemon has registered with the kubelet.
    pub(crate) async fn registered(&self) -> Result<()> {
        match self.kubelet.wait_registered(DRIVER, 1, STARTUP_TIMEOUT).await {
            Ok(_) => Ok(()),
            Err(error) => bail!("divvy-node did not register: {error}\n{}", self.log()),
        }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Deletes the node's slices, as a kubelet does when it starts. Returns the time until the
    /// daemon has published them again.
    pub(crate) async fn delete_slices(&self) -> Result<Duration> {
        let slices = SliceWatch::watch(&self.client).await?;
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let fields = ListParams::default().fields(&format!("spec.nodeName={NODE}"));
        let began = Instant::now();
        api.delete_collection(&DeleteParams::default(), &fields).await?;
        slices.complete(self).await?;
        Ok(began.elapsed())
    }

    /// Creates an allocated claim on the API server. For a time-sliced or MPS device it consumes one share.
    pub(crate) async fn claim(&self, name: &str, device: &str) -> Result<WireClaim> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), NAMESPACE);
        let mut result = json!({"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device});
        let consumed = match device.rsplit('-').next() {
            Some("timeslice") => Some(json!({"slots": "1"})),
            Some("mps") => Some(json!({"threads": "10", "memory": "1Gi", "clients": "1"})),
            _ => None,
        };
        if let Some(consumed) = consumed {
            result["shareID"] = json!("0d5b1f0e-6c1b-4a52-a5a1-000000000001");
            result["consumedCapacity"] = consumed;
        }
        let claim = |padding: usize| -> serde_json::Result<ResourceClaim> {
            serde_json::from_value(json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                "metadata": {
                    "name": name, "namespace": NAMESPACE,
                    "annotations": {"divvy.dev/padding": "x".repeat(padding)},
                },
                "spec": {"devices": {"requests": [
                    {"name": "gpu", "exactly": {"deviceClassName": "gpu.divvy.dev"}},
                ]}},
                "status": {"allocation": {"devices": {"results": [result]}}},
            }))
        };
        // The server adds fields to an object: an object without padding shows how many bytes.
        let bare = self.create_allocated(&api, &claim(0)?).await?;
        api.delete(name, &DeleteParams::default()).await?;
        let claim = self.create_allocated(&api, &claim(CLAIM_BYTES.saturating_sub(bare.1))?).await?;
        Ok(WireClaim { namespace: NAMESPACE.into(), name: name.into(), uid: claim.0 })
    }

    /// Creates a claim with its status. Returns its UID and its size on the wire.
    async fn create_allocated(
        &self,
        api: &Api<ResourceClaim>,
        claim: &ResourceClaim,
    ) -> Result<(String, usize)> {
        let mut created = api.create(&PostParams::default(), claim).await?;
        let name = created.metadata.name.clone().context("a claim without a name")?;
        created.status = claim.status.clone();
        let created = api.replace_status(&name, &PostParams::default(), &created).await?;
        let uid = created.metadata.uid.context("a claim without a UID")?;
        Ok((uid, self.body(&name).await?.len()))
    }

    async fn body(&self, name: &str) -> Result<String> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), NAMESPACE);
        let request = kube::core::Request::new(api.resource_url()).get(name, &GetParams::default())?;
        Ok(self.client.request_text(request).await?)
    }

    fn plugin(&self) -> Result<Plugin> {
        self.kubelet.plugins(DRIVER).pop().context("divvy-node is not registered")
    }

    /// Prepares claims in one call and returns the duration of the call.
    ///
    /// # Errors
    /// The call or any claim fails.
    pub(crate) async fn prepare(&self, claims: &[WireClaim]) -> Result<Duration> {
        let plugin = self.plugin()?;
        let began = Instant::now();
        let outcomes = plugin.prepare(claims, CALL_TIMEOUT).await?;
        let took = began.elapsed();
        match outcomes.into_values().find_map(Result::err) {
            None => Ok(took),
            Some(why) => Err(anyhow!("{why}\n{}", self.log())),
        }
    }

    /// Unprepares claims in one call and returns the duration of the call.
    pub(crate) async fn unprepare(&self, claims: &[WireClaim]) -> Result<Duration> {
        let plugin = self.plugin()?;
        let began = Instant::now();
        let outcomes = plugin.unprepare(claims, CALL_TIMEOUT).await?;
        let took = began.elapsed();
        match outcomes.into_values().find_map(Result::err) {
            None => Ok(took),
            Some(why) => Err(anyhow!("{why}\n{}", self.log())),
        }
    }

    /// Duration of one GET of the claim, to its last byte, by the same kind of client as the driver's.
    pub(crate) async fn get(&self, claim: &WireClaim) -> Result<Duration> {
        let began = Instant::now();
        self.body(&claim.name).await?;
        Ok(began.elapsed())
    }

    /// Turns the simulator's trace of NVML calls on or off.
    pub(crate) fn set_trace(&self, on: bool) -> Result<()> {
        self.sim.update(|state| {
            state.control.trace = on;
            Ok(())
        })?;
        Ok(())
    }

    /// Deletes the trace so far.
    pub(crate) fn clear_trace(&self) -> Result<()> {
        match std::fs::remove_file(self.sim.trace_path()) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => Err(cause.into()),
            _ => Ok(()),
        }
    }

    /// Microseconds between two times during which any thread of the daemon was in an NVML call.
    pub(crate) fn nvml_micros(&self, from: SystemTime, to: SystemTime) -> Result<f64> {
        let micros = |time: SystemTime| -> Result<u64> {
            Ok(u64::try_from(time.duration_since(SystemTime::UNIX_EPOCH)?.as_micros())?)
        };
        let (from, to) = (micros(from)?, micros(to)?);
        let text = std::fs::read_to_string(self.sim.trace_path())?;
        let mut calls = Vec::new();
        // The last line may be incomplete, because the daemon makes calls at any time.
        let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
        for line in complete.lines() {
            let line: TraceLine = serde_json::from_str(line)?;
            if line.pid == self.daemon.id() {
                calls.push((line.t_us.max(from), (line.t_us + line.us).min(to)));
            }
        }
        // Calls for several GPUs overlap; overlapping time counts once.
        calls.sort_unstable();
        let (mut total, mut covered) = (0, from);
        for (begin, end) in calls {
            let begin = begin.max(covered);
            total += end.saturating_sub(begin);
            covered = covered.max(end);
        }
        Ok(total as f64)
    }

    /// A value of the daemon's `/proc/<pid>/status`, in KiB.
    pub(crate) fn memory_kib(&self, key: &str) -> Result<f64> {
        program::memory_kib(self.daemon.id(), key)
    }
}

/// A watch of the node's slices.
pub(crate) struct SliceWatch {
    events: futures::stream::BoxStream<'static, kube::Result<WatchEvent<ResourceSlice>>>,
}

impl SliceWatch {
    /// Watches changes from now on.
    async fn watch(client: &kube::Client) -> Result<Self> {
        let api: Api<ResourceSlice> = Api::all(client.clone());
        let version = api.list(&ListParams::default()).await?.metadata.resource_version;
        let events = api.watch(&WatchParams::default(), &version.unwrap_or_default()).await?;
        Ok(Self { events: events.boxed() })
    }

    /// Waits until all slices of the pool were created.
    pub(crate) async fn complete(mut self, node: &BenchNode) -> Result<()> {
        let mut created = BTreeSet::new();
        let complete = async {
            while let Some(event) = self.events.try_next().await? {
                let WatchEvent::Added(slice) = event else { continue };
                created.insert(slice.metadata.name);
                if i64::try_from(created.len())? == slice.spec.pool.resource_slice_count {
                    return Ok(());
                }
            }
            bail!("the watch of ResourceSlices ended")
        };
        match tokio::time::timeout(STARTUP_TIMEOUT, complete).await {
            Ok(done) => done,
            Err(_) => bail!("no slices within {STARTUP_TIMEOUT:?}\n{}", node.log()),
        }
    }
}

impl Drop for BenchNode {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
