//! The scheduler and the kubelet of the demo's node: claims are allocated, prepared, and released.

use super::container::{CdiFile, MpsClient};
use super::map::{self, Holder};
use super::node::DemoNode;
use super::report::Report;
use super::workloads::{PodClaim, Unit};
use anyhow::{Context, Result, anyhow};
use divvy_alloc::{AllocationError, ClusterView, Release};
use divvy_api::names::DRIVER;
use divvy_kubelet::dra::v1::Claim as WireClaim;
use divvy_sim::state::Gpu;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    DeviceClass, ResourceClaim, ResourceClaimConsumerReference, ResourceClaimTemplate, ResourceSlice,
};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Limit for the first slices, and for disabling MIG mode.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(20);

/// A node that serves claims.
pub(crate) struct Session<'a> {
    pub(crate) node: &'a DemoNode,
    pub(crate) report: &'a Report,
    pub(crate) classes: Vec<DeviceClass>,
    pub(crate) slices: Vec<ResourceSlice>,
    /// Initial state of the GPUs.
    before: Vec<(String, String)>,
    pub(crate) held: Vec<Held>,
    /// Names of pods and claims that were created and are not held.
    created: Vec<Created>,
}

/// A prepared claim.
pub(crate) struct Held {
    pub(crate) claim: ResourceClaim,
    /// It was created for a pod and is deleted with it.
    pub(crate) is_own: bool,
    /// UIDs of the pods that use it.
    pub(crate) pods: BTreeSet<String>,
    client: Option<MpsClient>,
}

enum Created {
    Pod { namespace: String, name: String },
    Claim { namespace: String, name: String },
}

/// Why claims were not served.
#[derive(Debug)]
pub(crate) struct NotServed {
    /// The claim, or the pod of several claims.
    pub(crate) object: String,
    pub(crate) reason: String,
    /// The allocator found no device.
    pub(crate) no_device: bool,
}

impl<'a> Session<'a> {
    /// Waits for the published devices.
    pub(crate) async fn start(node: &'a DemoNode, report: &'a Report) -> Result<Self> {
        let before = gpu_state(node)?;
        let slices = published(node).await?;
        Ok(Self { node, report, classes: Vec::new(), slices, before, held: Vec::new(), created: Vec::new() })
    }

    /// Creates a class, and knows all classes of the server.
    pub(crate) async fn create_classes(&mut self, classes: impl Iterator<Item = DeviceClass>) -> Result<()> {
        let api: Api<DeviceClass> = Api::all(self.node.client.clone());
        for class in classes {
            let name = class.metadata.name.clone().unwrap_or_default();
            match api.create(&PostParams::default(), &class).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                created => drop(created.with_context(|| format!("DeviceClass {name}"))?),
            }
        }
        self.classes = api.list(&ListParams::default()).await?.items;
        Ok(())
    }

    /// Creates a claim that pods name.
    pub(crate) async fn create_claim(&mut self, claim: &ResourceClaim) -> Result<()> {
        let (namespace, name) = (namespace_of(claim), name_of(claim));
        let api: Api<ResourceClaim> = Api::namespaced(self.node.client.clone(), &namespace);
        api.create(&PostParams::default(), claim).await.with_context(|| format!("claim {name}"))?;
        self.created.push(Created::Claim { namespace, name });
        Ok(())
    }

    /// Creates templates, which pods that are created later may use.
    pub(crate) async fn create_templates(&mut self, templates: &[ResourceClaimTemplate]) -> Result<()> {
        for template in templates {
            let namespace = template.metadata.namespace.as_deref().unwrap_or("default");
            let api: Api<ResourceClaimTemplate> = Api::namespaced(self.node.client.clone(), namespace);
            match api.create(&PostParams::default(), template).await {
                // A file before this one has the same template.
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                created => drop(created.context("a template")?),
            }
        }
        Ok(())
    }

    /// Creates a pod, unless it exists.
    async fn ensure_pod(&mut self, pod: &Pod) -> Result<Pod> {
        if pod.metadata.uid.is_some() {
            return Ok(pod.clone());
        }
        let namespace = pod.metadata.namespace.clone().unwrap_or_else(|| "default".into());
        let name = pod.metadata.name.clone().unwrap_or_default();
        let api: Api<Pod> = Api::namespaced(self.node.client.clone(), &namespace);
        let mut pod = pod.clone();
        pod.spec.get_or_insert_default().node_name = self.node.node.metadata.name.clone();
        let created = api.create(&PostParams::default(), &pod).await?;
        self.created.push(Created::Pod { namespace, name });
        Ok(created)
    }

    /// Serves the claims of a unit, and reports each step. Claims that must be refused are reported
    /// as such.
    pub(crate) async fn serve_and_report(&mut self, unit: Unit) {
        let expected = unit.must_be_refused;
        match self.serve(unit).await {
            Ok(names) if expected => {
                self.report.failed(&names.join(", "), "it was served, but must be refused");
            }
            Ok(_) => {}
            Err(NotServed { object, reason, no_device: true }) if expected => {
                self.report.refused(&object, &reason);
            }
            Err(NotServed { object, reason, .. }) => self.report.failed(&object, &reason),
        }
    }

    /// Creates, allocates and prepares the claims of a unit. For MPS, also starts a client. Returns
    /// the names of the claims.
    pub(crate) async fn serve(&mut self, unit: Unit) -> Result<Vec<String>, NotServed> {
        let object = match &unit.pod {
            Some(pod) => format!("pod {}", pod.metadata.name.clone().unwrap_or_default()),
            None => "claim".to_owned(),
        };
        let failed = |error: anyhow::Error| NotServed {
            object: object.clone(),
            reason: format!("{error:#}"),
            no_device: false,
        };
        let pod = match &unit.pod {
            Some(pod) => Some(self.ensure_pod(pod).await.map_err(failed)?),
            None => None,
        };
        let mut claims = Vec::new();
        for claim in unit.claims {
            claims.push(self.ensure_claim(pod.as_ref(), claim).await.map_err(failed)?);
        }
        let names: Vec<String> = claims.iter().map(|(claim, _)| name_of(claim)).collect();
        let uid = pod.as_ref().and_then(|pod| pod.metadata.uid.clone());
        let mut waiting = Vec::new();
        for (claim, is_own) in claims {
            match self.held.iter_mut().find(|held| held.claim.metadata.uid == claim.metadata.uid) {
                Some(held) => {
                    held.pods.extend(uid.clone());
                    let text = format!("{object} also uses {}", name_of(&claim));
                    let event = json!({"event": "shared", "claim": name_of(&claim)});
                    self.report.done(&text, Duration::ZERO, event);
                }
                None => waiting.push((claim, is_own)),
            }
        }
        let allocated = self.allocate(&waiting)?;
        for (claim, is_own) in allocated {
            self.prepare(claim, is_own, pod.as_ref()).await?;
        }
        if let Some(pod) = &pod {
            self.set_phase(pod, "Running", None).await.map_err(failed)?;
        }
        Ok(names)
    }

    /// The claim on the server, and whether it is the pod's own.
    async fn ensure_claim(&mut self, pod: Option<&Pod>, claim: PodClaim) -> Result<(ResourceClaim, bool)> {
        match claim {
            PodClaim::Named(name) => {
                let namespace = pod.and_then(|pod| pod.metadata.namespace.clone());
                let namespace = namespace.unwrap_or_else(|| "default".into());
                let api: Api<ResourceClaim> = Api::all(self.node.client.clone());
                let all = api.list(&ListParams::default()).await?.items;
                let is_it = |claim: &&ResourceClaim| {
                    name_of(claim) == name && (pod.is_none() || namespace_of(claim) == namespace)
                };
                let found = all.iter().find(is_it).cloned();
                Ok((found.with_context(|| format!("claim {name} does not exist"))?, false))
            }
            PodClaim::Own(claim) => {
                let (namespace, name) = (namespace_of(&claim), name_of(&claim));
                let api: Api<ResourceClaim> = Api::namespaced(self.node.client.clone(), &namespace);
                if let Some(found) = api.get_opt(&name).await? {
                    return Ok((found, true));
                }
                let created = api.create(&PostParams::default(), &claim).await?;
                self.created.push(Created::Claim { namespace, name });
                Ok((created, true))
            }
        }
    }

    fn allocate(&self, waiting: &[(ResourceClaim, bool)]) -> Result<Vec<(ResourceClaim, bool)>, NotServed> {
        if waiting.is_empty() {
            return Ok(Vec::new());
        }
        let began = Instant::now();
        let held: Vec<ResourceClaim> = self.held.iter().map(|held| held.claim.clone()).collect();
        let view = ClusterView {
            slices: &self.slices,
            classes: &self.classes,
            claims: &held,
            node: &self.node.node,
            release: Release::default(),
        };
        let claims: Vec<&ResourceClaim> = waiting.iter().map(|(claim, _)| claim).collect();
        let mut share_id = || uuid::Uuid::new_v4().to_string();
        let allocations = divvy_alloc::allocate_pod(&view, &claims, &mut share_id)
            .map_err(|why| self.no_device(&claims, &why))?;
        let mut allocated = Vec::new();
        for ((claim, is_own), allocation) in waiting.iter().zip(allocations) {
            let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
            let devices: Vec<String> = results.map(|result| result.device.clone()).collect();
            let name = name_of(claim);
            let event = json!({"event": "allocated", "claim": name, "devices": devices});
            self.report.done(&format!("{name}: allocated {}", devices.join(", ")), began.elapsed(), event);
            let mut claim = claim.clone();
            claim.status.get_or_insert_default().allocation = Some(allocation);
            allocated.push((claim, *is_own));
        }
        Ok(allocated)
    }

    /// The error of claims without a device. If they are of a share and the node offers none, it
    /// says why.
    fn no_device(&self, claims: &[&ResourceClaim], why: &AllocationError) -> NotServed {
        let object = claims.iter().map(|claim| name_of(claim)).collect::<Vec<_>>().join(", ");
        let wants_share = claims.iter().any(|claim| self.wants_share(claim));
        let reason = match wants_share.then(|| self.node.why_no_shares()).flatten() {
            Some(cause) => format!("no device: {cause}"),
            None => format!("no device: {why}"),
        };
        NotServed { object, reason, no_device: true }
    }

    /// Whether a class of the claim selects shares.
    fn wants_share(&self, claim: &ResourceClaim) -> bool {
        let requests = claim.spec.iter().flat_map(|spec| spec.devices.iter());
        let requests = requests.flat_map(|devices| devices.requests.iter().flatten());
        let mut names = requests.flat_map(|request| {
            let exactly = request.exactly.iter().map(|exactly| &exactly.device_class_name);
            exactly.chain(request.first_available.iter().flatten().map(|sub| &sub.device_class_name))
        });
        let selects_share = |class: &DeviceClass| {
            let selectors = class.spec.iter().flat_map(|spec| spec.selectors.iter().flatten());
            selectors
                .filter_map(|selector| selector.cel.as_ref())
                .any(|cel| cel.expression.contains("'share'"))
        };
        names.any(|name| {
            let mut classes = self.classes.iter();
            classes.any(|class| class.metadata.name.as_ref() == Some(name) && selects_share(class))
        })
    }

    async fn prepare(
        &mut self,
        mut claim: ResourceClaim,
        is_own: bool,
        pod: Option<&Pod>,
    ) -> Result<(), NotServed> {
        let (namespace, name) = (namespace_of(&claim), name_of(&claim));
        let failed = |reason: String| NotServed { object: name.clone(), reason, no_device: false };
        let uid = pod.and_then(|pod| pod.metadata.uid.clone());
        if let (Some(pod), Some(uid)) = (pod, &uid) {
            let reserved = ResourceClaimConsumerReference {
                name: pod.metadata.name.clone().unwrap_or_default(),
                resource: "pods".to_owned(),
                uid: uid.clone(),
                ..ResourceClaimConsumerReference::default()
            };
            claim.status.get_or_insert_default().reserved_for = Some(vec![reserved]);
        }
        let api: Api<ResourceClaim> = Api::namespaced(self.node.client.clone(), &namespace);
        let claim = api
            .replace_status(&name, &PostParams::default(), &claim)
            .await
            .map_err(|error| failed(error.to_string()))?;
        // From here on the claim must be released, whether it can be used or not.
        let wire = [wire(&claim)];
        let began = Instant::now();
        self.held.push(Held { claim: claim.clone(), is_own, pods: uid.into_iter().collect(), client: None });
        self.created
            .retain(|created| !matches!(created, Created::Claim { name: other, .. } if *other == name));
        let outcomes =
            self.node.kubelet.prepare(DRIVER, &wire).await.map_err(|error| failed(error.to_string()))?;
        match outcomes.into_values().next() {
            Some(Ok(_)) => {}
            Some(Err(why)) => return Err(failed(why)),
            None => return Err(failed("the driver returned no result for it".into())),
        }
        let took = began.elapsed();
        let cdi = self.cdi(&claim).map_err(|error| failed(format!("{error:#}")))?;
        let event = json!({"event": "prepared", "claim": name, "uid": claim.metadata.uid});
        self.report.done(&format!("{name}: prepared"), took, event);
        self.report.detail(&match self.report.verbose {
            true => cdi.describe(&self.node.root),
            false => cdi.summary(),
        });
        if let Some(mps) = cdi.mps() {
            let started = MpsClient::start(&self.node.program("divvy-sim"), &name, &mps).await;
            let (client, limits) = started.map_err(|error| failed(format!("{error:#}")))?;
            self.report.detail(&limits);
            if let Some(held) = self.held.last_mut() {
                held.client = Some(client);
            }
        }
        Ok(())
    }

    /// The CDI file of a prepared claim.
    pub(crate) fn cdi(&self, claim: &ResourceClaim) -> Result<CdiFile> {
        CdiFile::read(&self.node.cdi_dir, claim.metadata.uid.as_deref().unwrap_or_default())
    }

    /// Sets the phase of a pod, and the reason why it waits.
    pub(crate) async fn set_phase(&self, pod: &Pod, phase: &str, reason: Option<&str>) -> Result<()> {
        let namespace = pod.metadata.namespace.clone().unwrap_or_else(|| "default".into());
        let name = pod.metadata.name.clone().unwrap_or_default();
        let api: Api<Pod> = Api::namespaced(self.node.client.clone(), &namespace);
        // The pod may have been deleted meanwhile.
        let Some(mut pod) = api.get_opt(&name).await? else { return Ok(()) };
        let status = pod.status.get_or_insert_default();
        status.phase = Some(phase.to_owned());
        status.message = reason.map(str::to_owned);
        api.replace_status(&name, &PostParams::default(), &pod).await?;
        Ok(())
    }

    /// The holders of all held claims.
    pub(crate) fn holders(&self) -> Vec<Holder> {
        map::holders(&self.slices, self.held.iter().map(|held| &held.claim))
    }

    /// Shows the GPUs and their holders.
    pub(crate) fn show(&self) -> Result<()> {
        let holders = self.holders();
        let (dir, report) = (self.node.sim.root(), self.report);
        report.event(&json!({"event": "held", "directory": self.node.root, "holders": holders}));
        if !report.is_json() {
            report.drawing(&map::draw(dir, &holders, report.colours())?);
        }
        Ok(())
    }

    /// Unprepares a held claim. Its own claim of a pod is deleted; any other can be allocated again.
    pub(crate) async fn release(&mut self, at: usize) -> Result<String> {
        let Held { claim, is_own, client, .. } = self.held.remove(at);
        if let Some(client) = client {
            client.kill().await?;
        }
        let (namespace, name) = (namespace_of(&claim), name_of(&claim));
        let outcomes = self.node.kubelet.unprepare(DRIVER, &[wire(&claim)]).await?;
        if let Some(Err(why)) = outcomes.into_values().next() {
            return Err(anyhow!("{name}: {why}"));
        }
        let api: Api<ResourceClaim> = Api::namespaced(self.node.client.clone(), &namespace);
        if is_own {
            if api.get_opt(&name).await?.is_some() {
                api.delete(&name, &DeleteParams::default()).await?;
            }
        } else {
            self.created.push(Created::Claim { namespace, name: name.clone() });
            // The driver writes the status too.
            while let Some(mut found) = api.get_opt(&name).await? {
                found.status = None;
                match api.replace_status(&name, &PostParams::default(), &found).await {
                    Err(kube::Error::Api(status)) if status.code == 409 => continue,
                    written => drop(written?),
                }
                break;
            }
        }
        Ok(name)
    }

    /// Releases everything, deletes what was created, and compares the GPUs with their initial state.
    pub(crate) async fn release_all(&mut self) -> Result<()> {
        let began = Instant::now();
        let mut names = Vec::new();
        while !self.held.is_empty() {
            match self.release(0).await {
                Ok(name) => names.push(name),
                Err(error) => self.report.failed("release", &format!("{error:#}")),
            }
        }
        for created in std::mem::take(&mut self.created) {
            let client = self.node.client.clone();
            let parameters = DeleteParams::default();
            let deleted = match created {
                Created::Pod { namespace, name } => {
                    Api::<Pod>::namespaced(client, &namespace).delete(&name, &parameters).await.map(drop)
                }
                Created::Claim { namespace, name } => {
                    let api = Api::<ResourceClaim>::namespaced(client, &namespace);
                    api.delete(&name, &parameters).await.map(drop)
                }
            };
            match deleted {
                // It was deleted meanwhile.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                deleted => deleted?,
            }
        }
        while gpu_state(self.node)? != self.before && began.elapsed() < SETTLE_TIMEOUT {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if gpu_state(self.node)? == self.before {
            let event = json!({"event": "released", "claims": names});
            let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
            let text = format!("{names} released, the GPUs are in their initial state");
            self.report.done(&text, began.elapsed(), event);
        } else {
            self.report.failed("the GPUs", "they are not in their initial state");
        }
        Ok(())
    }
}

/// Waits until the pool is complete and returns its slices.
pub(crate) async fn published(node: &DemoNode) -> Result<Vec<ResourceSlice>> {
    let api: Api<ResourceSlice> = Api::all(node.client.clone());
    let began = Instant::now();
    loop {
        let mut slices = api.list(&ListParams::default()).await?.items;
        slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        let complete = slices.first().is_some_and(|first| {
            usize::try_from(first.spec.pool.resource_slice_count).is_ok_and(|count| count == slices.len())
        });
        if complete
            && slices.iter().any(|slice| slice.spec.devices.as_ref().is_some_and(|list| !list.is_empty()))
        {
            return Ok(slices);
        }
        if began.elapsed() > SETTLE_TIMEOUT {
            return Err(anyhow!("nothing was published within {SETTLE_TIMEOUT:?}\n{}", node.daemon_log()));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The state of each GPU that must be the same at the end: MIG mode, instances, compute mode and time-slice.
fn gpu_state(node: &DemoNode) -> Result<Vec<(String, String)>> {
    let state = node.sim.read()?;
    Ok(state
        .gpus
        .iter()
        .map(|gpu| {
            let Gpu { mig, instances, compute_mode, timeslice, .. } = gpu;
            (gpu.uuid.clone(), format!("{mig:?} {instances:?} {compute_mode} {timeslice}"))
        })
        .collect())
}

pub(crate) fn name_of(claim: &ResourceClaim) -> String {
    claim.metadata.name.clone().unwrap_or_default()
}

fn namespace_of(claim: &ResourceClaim) -> String {
    claim.metadata.namespace.clone().unwrap_or_else(|| "default".into())
}

fn wire(claim: &ResourceClaim) -> WireClaim {
    WireClaim {
        namespace: namespace_of(claim),
        uid: claim.metadata.uid.clone().unwrap_or_default(),
        name: name_of(claim),
    }
}
