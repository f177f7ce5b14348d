//! One measured node: simulated GPUs, the API server's process, the daemon's
//! process, and the kubelet's part in this one. All below one directory.

use crate::api::Server;
use anyhow::{Context, Result, anyhow, bail};
use divvy_api::names::{ClaimRef, DRIVER};
use divvy_driver::claims::Claims;
use divvy_fakes::kubelet::{FakeKubelet, KubeletOptions, Plugin};
use divvy_kubelet::dra::v1::Claim as WireClaim;
use divvy_sim::Sim;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) const NODE: &str = "bench";
const NAMESPACE: &str = "default";
/// Size of a claim on the wire, as JSON.
const CLAIM_BYTES: usize = 4096;
const BOOT: Duration = Duration::from_secs(30);
const CALL: Duration = Duration::from_secs(45);

pub(crate) struct World {
    pub(crate) sim: Sim,
    pub(crate) client: kube::Client,
    pub(crate) claims: Claims,
    pub(crate) server: Server,
    /// The slices' first appearance, from the daemon's start.
    pub(crate) start_to_slice: Duration,
    kubelet: FakeKubelet,
    daemon: Child,
    pub(crate) root: PathBuf,
    _dir: tempfile::TempDir,
}

impl World {
    /// Starts a node below `base`.
    pub(crate) async fn start(node: &Path, gpus: &str, base: &Path, trace: bool) -> Result<Self> {
        std::fs::create_dir_all(base)?;
        let dir = tempfile::Builder::new().prefix("db-").tempdir_in(base)?;
        let root = dir.path().to_owned();
        let gpu = root.join("gpu");
        let options = divvy_sim::Options::new(divvy_sim::library()?, std::env::current_exe()?);
        let sim = divvy_sim::up(&gpu, gpus, &options)?;
        sim.update(|state| {
            state.control.trace = trace;
            Ok(())
        })?;
        let server = Server::start(&root)?;
        let config = kube::config::Kubeconfig::read_from(&server.kubeconfig)?;
        let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await?;
        let client = kube::Client::try_from(config)?;
        let object: Node =
            serde_json::from_value(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}))?;
        Api::all(client.clone()).create(&PostParams::default(), &object).await?;
        let kubelet = FakeKubelet::start(&root.join("kubelet"), KubeletOptions::default())?;
        std::fs::create_dir_all(root.join("cdi"))?;

        let began = Instant::now();
        let log = std::fs::File::create(root.join("node.log"))?;
        let daemon = Command::new(node)
            .args(["--node-name", NODE, "--http-address", "off", "--mig-hold-off", "0s"])
            .arg("--kubeconfig")
            .arg(&server.kubeconfig)
            .arg("--kubelet-root")
            .arg(root.join("kubelet"))
            .arg("--cdi-dir")
            .arg(root.join("cdi"))
            .arg("--driver-root")
            .arg(&gpu)
            .arg("--dev-root")
            .arg(&gpu)
            .arg("--proc-root")
            .arg(gpu.join("proc"))
            .arg("--sys-root")
            .arg(gpu.join("sys"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", node.display()))?;
        let claims = Claims::new(client.clone(), CALL);
        let mut world = Self {
            sim,
            client,
            claims,
            server,
            start_to_slice: Duration::ZERO,
            kubelet,
            daemon,
            root,
            _dir: dir,
        };
        world.start_to_slice = world.wait_for_slices(began).await?;
        if let Err(error) = world.kubelet.wait_registered(DRIVER, 1, BOOT).await {
            bail!("divvy-node did not register: {error}\n{}", world.log());
        }
        Ok(world)
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.root.join("node.log")).unwrap_or_default()
    }

    /// Time from `began` until the pool is complete.
    pub(crate) async fn wait_for_slices(&self, began: Instant) -> Result<Duration> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        loop {
            let slices = api.list(&ListParams::default()).await?.items;
            let wanted = slices.first().map_or(i64::MAX, |slice| slice.spec.pool.resource_slice_count);
            if i64::try_from(slices.len()).is_ok_and(|have| have == wanted) {
                return Ok(began.elapsed());
            }
            if began.elapsed() > BOOT {
                bail!("no slices within {BOOT:?}\n{}", self.log());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Deletes the node's slices, as a kubelet does when it starts; time until they are back.
    pub(crate) async fn wipe(&self) -> Result<Duration> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let fields = ListParams::default().fields(&format!("spec.nodeName={NODE}"));
        api.delete_collection(&DeleteParams::default(), &fields).await?;
        self.wait_for_slices(Instant::now()).await
    }

    /// Puts an allocated claim on the API server.
    pub(crate) async fn claim(&self, name: &str, device: &str) -> Result<WireClaim> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), NAMESPACE);
        let mut claim: ResourceClaim = serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.divvy.dev"}}]}},
            "status": {"allocation": {"devices": {"results": [
                {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device},
            ]}}},
        }))?;
        let bytes = serde_json::to_vec(&claim)?.len();
        let padding = "x".repeat(CLAIM_BYTES.saturating_sub(bytes + 120));
        claim.metadata.annotations = Some([("divvy.dev/padding".to_owned(), padding)].into());
        let status = claim.status.clone();
        let mut claim = api.create(&PostParams::default(), &claim).await?;
        claim.status = status;
        let claim = api.replace_status(name, &PostParams::default(), &claim).await?;
        let uid = claim.metadata.uid.context("a claim without a UID")?;
        Ok(WireClaim { namespace: NAMESPACE.into(), name: name.into(), uid })
    }

    fn plugin(&self) -> Result<Plugin> {
        self.kubelet.plugins(DRIVER).pop().context("divvy-node is not registered")
    }

    /// Prepares in one call; the time of the call. An error of any claim is an error.
    pub(crate) async fn prepare(&self, claims: &[WireClaim]) -> Result<Duration> {
        let plugin = self.plugin()?;
        let began = Instant::now();
        let outcomes = plugin.prepare(claims, CALL).await?;
        let took = began.elapsed();
        match outcomes.into_values().find_map(Result::err) {
            None => Ok(took),
            Some(why) => Err(anyhow!("{why}\n{}", self.log())),
        }
    }

    /// Unprepares in one call; the time of the call.
    pub(crate) async fn unprepare(&self, claims: &[WireClaim]) -> Result<Duration> {
        let plugin = self.plugin()?;
        let began = Instant::now();
        let outcomes = plugin.unprepare(claims, CALL).await?;
        let took = began.elapsed();
        match outcomes.into_values().find_map(Result::err) {
            None => Ok(took),
            Some(why) => Err(anyhow!("{why}\n{}", self.log())),
        }
    }

    /// One GET of the claim by the driver's own reader.
    pub(crate) async fn get(&self, claim: &WireClaim) -> Result<Duration> {
        let claim = ClaimRef {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            uid: claim.uid.as_str().into(),
        };
        let began = Instant::now();
        self.claims.allocated(&claim).await?;
        Ok(began.elapsed())
    }

    /// Microseconds spent in NVML calls since `offset` in the trace, and the trace's end.
    pub(crate) fn nvml(&self, offset: u64) -> Result<(f64, u64)> {
        use std::io::{Read, Seek, SeekFrom};
        let Ok(mut file) = std::fs::File::open(self.sim.trace_path()) else { return Ok((0.0, offset)) };
        file.seek(SeekFrom::Start(offset))?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let mut total = 0.0;
        for line in text.lines() {
            let line: serde_json::Value = serde_json::from_str(line)?;
            if line["pid"] == self.daemon.id() {
                total += line["us"].as_f64().unwrap_or(0.0);
            }
        }
        Ok((total, offset + u64::try_from(text.len())?))
    }

    /// A line of the daemon's `/proc/<pid>/status`, in KiB.
    pub(crate) fn memory_kib(&self, key: &str) -> Result<f64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.daemon.id()))?;
        let line = text.lines().find(|line| line.starts_with(key)).with_context(|| format!("no {key}"))?;
        let number = line.split_whitespace().nth(1).context("no number")?;
        Ok(number.parse()?)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
