//! The cluster under test: the API server, the simulated GPUs, and the script that stops and starts
//! parts of it.

use crate::Args;
use crate::objects::{Claim, Worker};
use anyhow::{Context, Result, bail, ensure};
use divvy_api::DeviceName;
use divvy_model::DeviceId;
use k8s_openapi::api::core::v1::{Event, Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{
    Device, DeviceRequestAllocationResult, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than the kubelet's back-off between two attempts to start a pod.
const TIMEOUT: Duration = Duration::from_secs(240);
/// The nodes that e2e/cluster/run starts.
pub(crate) const NODES: [&str; 2] = ["n1", "n2"];

pub(crate) struct Cluster {
    pub(crate) pods: Api<Pod>,
    pub(crate) claims: Api<ResourceClaim>,
    pub(crate) templates: Api<ResourceClaimTemplate>,
    pub(crate) slices: Api<ResourceSlice>,
    pub(crate) client: Client,
    config: Config,
    /// The repository's manifests.
    pub(crate) manifests: PathBuf,
    nodes: Api<Node>,
    events: Api<Event>,
    dir: PathBuf,
    ctl: PathBuf,
    sim: PathBuf,
}

/// The state of a node's simulator.
#[derive(Deserialize)]
struct SimState {
    driver: String,
    gpus: Vec<Gpu>,
}

/// The state of a GPU in the simulator.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(crate) uuid: String,
    pub(crate) minor: u32,
    #[serde(default)]
    pub(crate) missing: bool,
    #[serde(default)]
    pub(crate) mig: Mig,
    #[serde(default)]
    pub(crate) compute_mode: ComputeMode,
    /// The time-slice interval as the driver numbers it; 0 is the default.
    #[serde(default)]
    pub(crate) timeslice: u32,
    #[serde(default)]
    pub(crate) instances: Vec<Instance>,
    #[serde(default)]
    pub(crate) processes: Vec<Process>,
}

/// A process with memory on a GPU.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) memory_mib: u64,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
pub(crate) struct Mig {
    pub(crate) current: bool,
}

/// The compute mode of a GPU, as NVML numbers it.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(transparent)]
pub(crate) struct ComputeMode(u32);

impl ComputeMode {
    pub(crate) const DEFAULT: Self = Self(0);
    pub(crate) const EXCLUSIVE_PROCESS: Self = Self(3);
}

/// A GPU instance.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct Instance {
    profile: u32,
    placement: Placement,
    cis: Vec<ComputeInstance>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
struct Placement {
    start: u32,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
struct ComputeInstance {
    uuid: String,
}

/// A device that is allocated to a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AllocatedDevice {
    pub(crate) node: String,
    pub(crate) device: String,
}

impl Cluster {
    pub(crate) async fn connect(args: &Args) -> Result<Self> {
        let file = args.kubeconfig.clone().unwrap_or_else(|| args.dir.join("admin.kubeconfig"));
        let kubeconfig =
            Kubeconfig::read_from(&file).with_context(|| format!("reading {}", file.display()))?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let client = Client::try_from(config.clone())?;
        // Only claims in namespaces with this label may use adminAccess.
        let label = json!({"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}});
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.patch("default", &PatchParams::default(), &Patch::Merge(label)).await?;
        Ok(Self {
            pods: Api::default_namespaced(client.clone()),
            claims: Api::default_namespaced(client.clone()),
            templates: Api::default_namespaced(client.clone()),
            slices: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            events: Api::default_namespaced(client.clone()),
            client,
            config,
            manifests: args.manifests.clone(),
            dir: args.dir.clone(),
            ctl: args.ctl.clone(),
            sim: args.sim.clone(),
        })
    }

    /// A client that authenticates only by that token.
    pub(crate) fn with_token(&self, token: String) -> Result<Client> {
        let mut config = self.config.clone();
        config.auth_info = kube::config::AuthInfo { token: Some(token.into()), ..Default::default() };
        Ok(Client::try_from(config)?)
    }

    /// Waits for the slices of every node.
    pub(crate) async fn wait_for_slices(&self) -> Result<()> {
        eventually("slices of every node", || async {
            let slices = self.slices.list(&ListParams::default()).await?;
            let nodes: BTreeSet<_> = slices.iter().filter_map(|slice| slice.spec.node_name.clone()).collect();
            ensure!(NODES.iter().all(|node| nodes.contains(*node)), "only {nodes:?} have slices");
            Ok(())
        })
        .await
    }

    // Actions of a user.

    pub(crate) async fn create_template(&self, name: &str, devices: Value) -> Result<()> {
        let template = json!({"metadata": {"name": name}, "spec": {"spec": devices}});
        self.templates.create(&PostParams::default(), &serde_json::from_value(template)?).await?;
        Ok(())
    }

    pub(crate) async fn create_claim(&self, name: &str, devices: Value) -> Result<()> {
        let claim = json!({"metadata": {"name": name}, "spec": devices});
        self.claims.create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        Ok(())
    }

    pub(crate) async fn start_pod(&self, name: &str, claim: Claim<'_>) -> Result<()> {
        self.start_worker(&Worker::new(name).claim(claim)).await
    }

    pub(crate) async fn start_worker(&self, worker: &Worker<'_>) -> Result<()> {
        self.pods.create(&PostParams::default(), &serde_json::from_value(worker.json())?).await?;
        Ok(())
    }

    pub(crate) async fn delete_pod(&self, name: &str) -> Result<()> {
        self.pods.delete(name, &DeleteParams::default()).await?;
        self.wait_gone(name).await
    }

    pub(crate) async fn wait_gone(&self, name: &str) -> Result<()> {
        eventually(&format!("pod {name} gone"), || async {
            ensure!(self.pods.get_opt(name).await?.is_none(), "it still exists");
            Ok(())
        })
        .await
    }

    // Observations through the API server.

    pub(crate) async fn wait_ready(&self, name: &str) -> Result<()> {
        eventually(&format!("pod {name} ready"), || async {
            let pod = self.pods.get(name).await?;
            ensure!(condition(&pod, "Ready").is_some_and(|(yes, _)| yes), "it is {}", phase(&pod));
            Ok(())
        })
        .await
    }

    /// Waits until the scheduler reports that no node fits the pod.
    pub(crate) async fn wait_unschedulable(&self, name: &str) -> Result<()> {
        eventually(&format!("pod {name} unschedulable"), || async {
            let pod = self.pods.get(name).await?;
            let refused =
                condition(&pod, "PodScheduled").is_some_and(|(yes, why)| !yes && why == "Unschedulable");
            ensure!(refused, "it is {}", phase(&pod));
            Ok(())
        })
        .await
    }

    /// Waits until the pod is ready or unschedulable. Returns whether it is ready.
    pub(crate) async fn wait_settled(&self, name: &str) -> Result<bool> {
        eventually(&format!("pod {name} ready or unschedulable"), || async {
            let pod = self.pods.get(name).await?;
            let ready = condition(&pod, "Ready").is_some_and(|(yes, _)| yes);
            let refused =
                condition(&pod, "PodScheduled").is_some_and(|(yes, why)| !yes && why == "Unschedulable");
            ensure!(ready || refused, "it is {}", phase(&pod));
            Ok(ready)
        })
        .await
    }

    /// The restart count of the pod's containers.
    pub(crate) async fn restarts(&self, name: &str) -> Result<i32> {
        let pod = self.pods.get(name).await?;
        let statuses = pod.status.unwrap_or_default().container_statuses.unwrap_or_default();
        Ok(statuses.iter().map(|status| status.restart_count).sum())
    }

    pub(crate) async fn wait_node_ready(&self, name: &str) -> Result<()> {
        eventually(&format!("node {name} ready"), || async {
            let node = self.nodes.get(name).await?;
            let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
            let ready = conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True");
            ensure!(ready, "the node is not ready");
            Ok(())
        })
        .await
    }

    /// Sets a node's extended resource, as a device plugin would report it; 0 removes it.
    pub(crate) async fn set_extended_resource(&self, node: &str, resource: &str, count: u32) -> Result<()> {
        let count = json!((count > 0).then(|| count.to_string()));
        let status = json!({"capacity": {resource: count}, "allocatable": {resource: count}});
        let patch = Patch::Merge(json!({"status": status}));
        self.nodes.patch_status(node, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Sets a label of a node, or removes it.
    pub(crate) async fn set_node_label(&self, node: &str, key: &str, value: Option<&str>) -> Result<()> {
        let patch = Patch::Merge(json!({"metadata": {"labels": {key: value}}}));
        self.nodes.patch(node, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// The claims of a pod.
    pub(crate) async fn claims_of(&self, pod: &str) -> Result<Vec<ResourceClaim>> {
        let pod = self.pods.get(pod).await?;
        let status = pod.status.unwrap_or_default();
        let own = status.resource_claim_statuses.unwrap_or_default();
        let shared = pod.spec.unwrap_or_default().resource_claims.unwrap_or_default();
        let of_resources = status.extended_resource_claim_status.map(|status| status.resource_claim_name);
        let names: BTreeSet<_> = own
            .into_iter()
            .filter_map(|status| status.resource_claim_name)
            .chain(shared.into_iter().filter_map(|claim| claim.resource_claim_name))
            .chain(of_resources)
            .collect();
        let mut claims = Vec::new();
        for name in names {
            claims.push(self.claims.get(&name).await?);
        }
        Ok(claims)
    }

    /// The devices that are allocated to a pod's claims.
    pub(crate) async fn allocated_devices(&self, pod: &str) -> Result<BTreeSet<AllocatedDevice>> {
        let mut held = BTreeSet::new();
        for claim in self.claims_of(pod).await? {
            for result in results(&claim)? {
                held.insert(AllocatedDevice { node: result.pool.clone(), device: result.device.clone() });
            }
        }
        Ok(held)
    }

    /// The device that is allocated to a pod. It must be the only one.
    pub(crate) async fn single_device(&self, pod: &str) -> Result<AllocatedDevice> {
        let mut held = self.allocated_devices(pod).await?;
        ensure!(held.len() == 1, "pod {pod} has the devices {held:?}");
        held.pop_first().context("no device is allocated")
    }

    /// The published devices of a node that claims can hold, by name.
    pub(crate) async fn devices(&self, node: &str) -> Result<BTreeMap<String, Device>> {
        let slices = self.slices.list(&ListParams::default()).await?;
        let ours = slices.into_iter().filter(|slice| slice.spec.node_name.as_deref() == Some(node));
        let devices = ours.flat_map(|slice| slice.spec.devices.unwrap_or_default());
        // No claim holds an observer, so neither modes nor a device plugin concern it.
        let held = devices.filter(|device| !device.name.ends_with("-observer"));
        Ok(held.map(|device| (device.name.clone(), device)).collect())
    }

    // State of the GPUs.

    pub(crate) fn gpus(&self, node: &str) -> Result<Vec<Gpu>> {
        Ok(self.sim_state(node)?.gpus)
    }

    /// The version of the node's GPU driver.
    pub(crate) fn driver_version(&self, node: &str) -> Result<String> {
        Ok(self.sim_state(node)?.driver)
    }

    fn sim_state(&self, node: &str) -> Result<SimState> {
        let json = self.sim(node, &["show", "--json"])?;
        Ok(serde_json::from_str(&json)?)
    }

    /// The UUIDs that `nvidia-smi -L` must list for a device: the GPU's and, for a MIG instance,
    /// also that of its compute instance.
    pub(crate) async fn expected_uuids(&self, held: &AllocatedDevice) -> Result<BTreeSet<String>> {
        let devices = self.devices(&held.node).await?;
        let device = devices.get(&held.device).with_context(|| format!("{held:?} is not published"))?;
        let attribute = |name: &str| {
            let value = device.attributes.as_ref().and_then(|all| all.get(name));
            value.and_then(|value| value.string.clone()).with_context(|| format!("{held:?} has no {name}"))
        };
        match DeviceId::try_from(&DeviceName::from(held.device.as_str()))? {
            DeviceId::Gpu(_)
            | DeviceId::Share(_)
            | DeviceId::Timeslice(_)
            | DeviceId::Mps(_)
            | DeviceId::Observer(_) => Ok(BTreeSet::from([attribute("uuid")?])),
            DeviceId::Mig { profile_id, start, .. } => {
                let parent = attribute("parentUUID")?;
                let gpus = self.gpus(&held.node)?;
                let gpu = gpus.iter().find(|gpu| gpu.uuid == parent).context("no such GPU")?;
                let same = |i: &&Instance| i.profile == profile_id && i.placement.start == start;
                let instance = gpu.instances.iter().find(same);
                let instance = instance.with_context(|| format!("{held:?} does not exist: {gpu:?}"))?;
                ensure!(instance.cis.len() == 1, "{held:?} has {} compute instances", instance.cis.len());
                Ok(BTreeSet::from([parent, instance.cis[0].uuid.clone()]))
            }
        }
    }

    /// Waits until every GPU of every node is in its initial state: no MIG, default compute mode
    /// and interval.
    async fn wait_gpus_reset(&self) -> Result<()> {
        eventually("all GPUs in their initial state", || async {
            for node in NODES {
                for gpu in self.gpus(node)? {
                    let whole = gpu.instances.is_empty() && !gpu.mig.current;
                    let has_defaults = gpu.compute_mode == ComputeMode::DEFAULT && gpu.timeslice == 0;
                    ensure!(whole && has_defaults, "{node} has {gpu:?}");
                }
            }
            Ok(())
        })
        .await
    }

    // Control of the cluster's parts.

    pub(crate) fn ctl(&self, verb: &str, name: &str) -> Result<()> {
        self.output(&[verb, name]).map(|_| ())
    }

    /// Runs a command in a pod.
    pub(crate) fn exec(&self, pod: &str, command: &[&str]) -> Result<String> {
        self.output(&[&["exec", pod], command].concat())
    }

    /// Runs Helm on the release. `{chart}` and `{values}` are replaced by the chart and this
    /// cluster's values.
    pub(crate) fn helm(&self, arguments: &[&str]) -> Result<String> {
        self.output(&[&["helm"], arguments].concat())
    }

    /// The same, in the background.
    pub(crate) fn spawn_helm(&self, arguments: &[&str]) -> Result<Child> {
        let mut command = Command::new(&self.ctl);
        command.arg(&self.dir).arg("helm").args(arguments).stdout(Stdio::null());
        command.spawn().with_context(|| format!("{command:?}"))
    }

    /// Runs `ctl`. Returns its output.
    pub(crate) fn output(&self, arguments: &[&str]) -> Result<String> {
        output(Command::new(&self.ctl).arg(&self.dir).args(arguments))
    }

    pub(crate) fn sim(&self, node: &str, args: &[&str]) -> Result<String> {
        output(Command::new(&self.sim).arg("-C").arg(self.dir.join(node).join("gpus")).args(args))
    }

    // Clean-up between scenarios.

    pub(crate) async fn delete_all_pods(&self) -> Result<()> {
        let all = ListParams::default();
        self.pods.delete_collection(&DeleteParams::default(), &all).await?;
        eventually("pods gone", || async {
            let left: Vec<_> =
                self.pods.list(&all).await?.into_iter().filter_map(|pod| pod.metadata.name).collect();
            ensure!(left.is_empty(), "{left:?} still exist");
            Ok(())
        })
        .await
    }

    /// Deletes the objects of a scenario and waits until every GPU is in its initial state.
    pub(crate) async fn clean_up(&self) -> Result<()> {
        let all = ListParams::default();
        self.delete_all_pods().await?;
        self.templates.delete_collection(&DeleteParams::default(), &all).await?;
        self.claims.delete_collection(&DeleteParams::default(), &all).await?;
        eventually("claims gone", || async {
            ensure!(self.claims.list(&all).await?.items.is_empty(), "some claims still exist");
            Ok(())
        })
        .await?;
        self.wait_gpus_reset().await
    }

    /// Events about nodes.
    pub(crate) async fn node_events(&self, reason: &str) -> Result<Vec<Event>> {
        self.events_with(&format!("involvedObject.kind=Node,reason={reason}")).await
    }

    /// Events about a pod, or a claim.
    pub(crate) async fn pod_events(&self, name: &str, reason: &str) -> Result<Vec<Event>> {
        self.events_with(&format!("involvedObject.name={name},reason={reason}")).await
    }

    async fn events_with(&self, fields: &str) -> Result<Vec<Event>> {
        Ok(self.events.list(&ListParams::default().fields(fields)).await?.items)
    }

    /// Recent Warning events, to explain a failure.
    pub(crate) async fn describe_warnings(&self) -> String {
        let Ok(events) = self.events.list(&ListParams::default()).await else { return String::new() };
        let warnings = events.into_iter().filter(|event| event.type_.as_deref() == Some("Warning"));
        let line = |event: Event| {
            let about = event.involved_object.name.unwrap_or_default();
            format!("  {about}: {}: {}", event.reason.unwrap_or_default(), event.message.unwrap_or_default())
        };
        warnings.map(line).collect::<Vec<_>>().join("\n")
    }
}

/// The devices that were allocated to a claim.
pub(crate) fn results(claim: &ResourceClaim) -> Result<&[DeviceRequestAllocationResult]> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_deref());
    results.with_context(|| format!("claim {} is not allocated", claim.name_any()))
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn condition(pod: &Pod, kind: &str) -> Option<(bool, String)> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|condition| condition.type_ == kind)?;
    Some((found.status == "True", found.reason.clone().unwrap_or_default()))
}

fn phase(pod: &Pod) -> String {
    let status = pod.status.clone().unwrap_or_default();
    let waiting = status.container_statuses.unwrap_or_default().into_iter().find_map(|container| {
        let waiting = container.state?.waiting?;
        Some(format!("{}: {}", waiting.reason.unwrap_or_default(), waiting.message.unwrap_or_default()))
    });
    format!("{} {}", status.phase.unwrap_or_default(), waiting.unwrap_or_default()).trim().to_owned()
}

/// Repeats a check until it succeeds or `TIMEOUT` has passed. The last failure is then the error.
pub(crate) async fn eventually<F, T>(what: &str, check: impl Fn() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match check().await {
            Ok(answer) => return Ok(answer),
            Err(error) if Instant::now() > deadline => return Err(error.context(what.to_owned())),
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
}
