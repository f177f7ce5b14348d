//! The steps of the demo: publish the devices; then for each claim set allocate, prepare, draw,
//! release and compare.
//!
//! A claim that cannot be served, or is served although it must be refused, counts as an error, and
//! the demo continues. In any case all held claims are released, and the GPUs are compared with
//! their initial state.

use super::DemoArguments;
use super::claims::{ClaimSet, must_be_refused, with_gpu_uuid};
use super::container::{CdiFile, MpsClient};
use super::map;
use super::node::DemoNode;
use super::report::Report;
use anyhow::{Context, Result, anyhow};
use divvy_api::names::DRIVER;
use divvy_kubelet::dra::v1::Claim as WireClaim;
use divvy_sim::control::{Pattern, When};
use divvy_sim::state::Gpu;
use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use std::cell::Cell;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Limit for the first slices, and for disabling MIG mode.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs the demo. `is_waiting` is true while Ctrl-C continues the demo instead of aborting it.
pub(crate) async fn run(
    arguments: &DemoArguments,
    mut claim_sets: Vec<ClaimSet>,
    is_waiting: &Cell<bool>,
) -> Result<ExitCode> {
    let report = Report::new();
    let mut failures = 0;

    report.heading(&format!("A node with {}", arguments.gpus));
    let began = Instant::now();
    let mut node = DemoNode::start(&arguments.gpus, arguments.dir.as_deref()).await?;
    report.done("GPUs, API server and kubelet simulated, divvy-node registered", began.elapsed());
    for fault in &arguments.fault {
        let (call, code) =
            fault.split_once('=').ok_or_else(|| anyhow!("--fault {fault}: expected CALL=CODE"))?;
        let code = code.parse().map_err(|_| anyhow!("--fault {fault}: unknown code {code}"))?;
        node.sim.update(|state| {
            state.add_fault(Pattern::new(call), None, When::Before, code);
            Ok(())
        })?;
        report.detail(&format!("{call} will return {code:?}"));
    }
    let before = gpu_state(&node)?;

    report.heading("Publish: all devices that the GPUs can provide");
    let began = Instant::now();
    let slices = published(&node).await?;
    let devices = slices.iter().map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len)).sum::<usize>();
    let bytes: usize =
        slices.iter().filter_map(|slice| serde_json::to_vec(slice).ok()).map(|json| json.len()).sum();
    report.done(
        &format!("{devices} devices in {} ResourceSlices, {bytes} bytes", slices.len()),
        began.elapsed(),
    );
    let own_classes = claim_sets.iter_mut().flat_map(|set| std::mem::take(&mut set.classes)).collect();
    let tour_gpu = tour_gpu(&slices).context("no GPU was published")?;
    let classes = create_classes(&node, own_classes).await?;
    let session = Session { classes, slices, before, report: &report };

    let last = claim_sets.len().saturating_sub(1);
    for (index, set) in claim_sets.into_iter().enumerate() {
        let claims = set.claims.iter().map(|claim| with_gpu_uuid(claim, &tour_gpu)).collect::<Result<_>>()?;
        report.heading(&set.title);
        let keep = (arguments.keep && index == last).then_some(is_waiting);
        failures += session.serve_set(&node, claims, keep).await?;
    }

    report.heading("Final state");
    report.detail(&map::draw(node.sim.root(), &[], report.colours())?);
    if let Err(error) = node.stop_daemon().await {
        failures += 1;
        report.failed("divvy-node", &format!("{error:#}\n{}", node.daemon_log()));
    }
    report.summary(failures);
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The data that all claim sets share.
struct Session<'a> {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    /// Initial state of the GPUs.
    before: Vec<(String, String)>,
    report: &'a Report,
}

impl Session<'_> {
    /// Serves the claims together and releases them. Returns the number of errors.
    async fn serve_set(
        &self,
        node: &DemoNode,
        claims: Vec<ResourceClaim>,
        keep: Option<&Cell<bool>>,
    ) -> Result<usize> {
        let Self { slices, report, before, .. } = self;
        let mut failures = 0;
        let mut held: Vec<ResourceClaim> = Vec::new();
        let mut clients: Vec<MpsClient> = Vec::new();
        for claim in claims {
            let must_be_refused = must_be_refused(&claim);
            match self.serve(node, &held, &mut clients, claim).await {
                Ok(claim) => {
                    if must_be_refused {
                        failures += 1;
                        report.failed(&name_of(&claim), "it was served, but must be refused");
                    }
                    held.push(claim);
                }
                Err(NotServed { name, reason, claim: None, no_device: true }) if must_be_refused => {
                    report.refused(&name, &reason);
                }
                Err(NotServed { name, reason, claim, .. }) => {
                    failures += 1;
                    report.failed(&name, &reason);
                    held.extend(claim);
                }
            }
        }

        report.detail(&map::draw(node.sim.root(), &map::holders(slices, &held), report.colours())?);
        if let Some(is_waiting) = keep {
            report.heading("Running until Ctrl-C");
            report.detail(&format!(
                "export KUBECONFIG={}\n\
                 kubectl get resourceslices,deviceclasses,resourceclaims,nodes\n\
                 Ctrl-C releases everything",
                node.kubeconfig.display()
            ));
            is_waiting.set(true);
            tokio::signal::ctrl_c().await?;
        }

        let began = Instant::now();
        let names: Vec<_> = held.iter().map(name_of).collect();
        for client in clients {
            client.kill().await?;
        }
        for claim in held {
            if let Err(error) = release(node, &claim).await {
                failures += 1;
                report.failed(&name_of(&claim), &format!("{error:#}"));
            }
        }
        while gpu_state(node)? != *before && began.elapsed() < SETTLE_TIMEOUT {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if gpu_state(node)? == *before {
            let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
            report.done(&format!("{names} released, the GPUs are in their initial state"), began.elapsed());
        } else {
            failures += 1;
            report.failed("the GPUs", "they are not in their initial state");
        }
        Ok(failures)
    }

    /// Creates, allocates and prepares one claim. For an MPS claim, also starts a client.
    async fn serve(
        &self,
        node: &DemoNode,
        held: &[ResourceClaim],
        clients: &mut Vec<MpsClient>,
        claim: ResourceClaim,
    ) -> Result<ResourceClaim, NotServed> {
        let Self { slices, classes, report, .. } = self;
        let name = name_of(&claim);
        let not_served = |reason: String, claim: Option<ResourceClaim>| NotServed {
            name: name.clone(),
            reason,
            claim,
            no_device: false,
        };
        let namespace = claim.metadata.namespace.clone().unwrap_or_else(|| "default".into());
        let api: Api<ResourceClaim> = Api::namespaced(node.client.clone(), &namespace);
        let mut claim = api
            .create(&PostParams::default(), &claim)
            .await
            .map_err(|error| not_served(error.to_string(), None))?;

        let began = Instant::now();
        let mut share_id = || uuid::Uuid::new_v4().to_string();
        let release = divvy_alloc::Release::default();
        let view = divvy_alloc::ClusterView { slices, classes, claims: held, node: &node.node, release };
        let allocation = divvy_alloc::allocate(&view, &claim, &mut share_id)
            .map_err(|why| NotServed { no_device: true, ..not_served(format!("no device: {why}"), None) })?;
        let devices: Vec<String> = allocation
            .devices
            .iter()
            .flat_map(|d| d.results.iter().flatten())
            .map(|result| result.device.clone())
            .collect();
        report.done(&format!("{name}: allocated {}", devices.join(", ")), began.elapsed());

        claim.status.get_or_insert_default().allocation = Some(allocation);
        let claim = api
            .replace_status(&name, &PostParams::default(), &claim)
            .await
            .map_err(|error| not_served(error.to_string(), None))?;

        let began = Instant::now();
        let wire = [wire(&claim)];
        let outcomes = match node.kubelet.prepare(DRIVER, &wire).await {
            Ok(outcomes) => outcomes,
            Err(error) => return Err(not_served(error.to_string(), Some(claim))),
        };
        let prepared = match outcomes.into_values().next() {
            Some(Ok(devices)) => devices,
            Some(Err(why)) => return Err(not_served(why, Some(claim))),
            None => return Err(not_served("the driver returned no result for it".into(), Some(claim))),
        };
        let ids: Vec<&str> =
            prepared.iter().flat_map(|device| device.cdi_device_ids.iter().map(String::as_str)).collect();
        report.done(&format!("{name}: prepared as {}", ids.join(", ")), began.elapsed());
        let used = async {
            let uid = claim.metadata.uid.as_deref().unwrap_or_default();
            let cdi = CdiFile::read(&node.cdi_dir, uid)?;
            report.detail(&cdi.describe(&node.root));
            if let Some(mps) = cdi.mps() {
                let (client, limits) = MpsClient::start(&node.program("divvy-sim"), &name, &mps).await?;
                report.detail(&limits);
                clients.push(client);
            }
            anyhow::Ok(())
        };
        match used.await {
            Ok(()) => Ok(claim),
            Err(error) => Err(not_served(format!("{error:#}"), Some(claim))),
        }
    }
}

/// Waits until the pool is complete and returns its slices.
async fn published(node: &DemoNode) -> Result<Vec<ResourceSlice>> {
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

/// UUID of the GPU for the tour: the first GPU whose MIG devices are available now, else the first GPU.
fn tour_gpu(slices: &[ResourceSlice]) -> Option<String> {
    let devices = || slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let uuid = |device: &Device, name: &str| device.attributes.as_ref()?.get(name)?.string.clone();
    let mut ready = devices().filter(|device| device.taints.as_ref().is_none_or(Vec::is_empty));
    ready
        .find_map(|device| uuid(device, "parentUUID"))
        .or_else(|| devices().find_map(|device| uuid(device, "uuid")))
}

/// Creates the classes of `manifests/` and of the input. Returns all classes.
async fn create_classes(node: &DemoNode, own: Vec<DeviceClass>) -> Result<Vec<DeviceClass>> {
    let shipped = super::claims::parse(
        include_str!("../../../../manifests/deviceclasses.yaml"),
        "manifests/deviceclasses.yaml",
    )?;
    let api: Api<DeviceClass> = Api::all(node.client.clone());
    for class in shipped.classes.iter().chain(&own) {
        let name = class.metadata.name.clone().unwrap_or_default();
        api.create(&PostParams::default(), class).await.with_context(|| format!("DeviceClass {name}"))?;
    }
    Ok(api.list(&ListParams::default()).await?.items)
}

/// A claim that could not be served.
struct NotServed {
    name: String,
    reason: String,
    /// The claim itself, if it has an allocation.
    claim: Option<ResourceClaim>,
    /// The allocator found no device for it.
    no_device: bool,
}

/// Unprepares and deletes one claim.
async fn release(node: &DemoNode, claim: &ResourceClaim) -> Result<()> {
    let outcomes = node.kubelet.unprepare(DRIVER, &[wire(claim)]).await?;
    if let Some(Err(why)) = outcomes.into_values().next() {
        return Err(anyhow!(why));
    }
    let namespace = claim.metadata.namespace.as_deref().unwrap_or("default");
    let api: Api<ResourceClaim> = Api::namespaced(node.client.clone(), namespace);
    api.delete(&name_of(claim), &DeleteParams::default()).await?;
    Ok(())
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

fn name_of(claim: &ResourceClaim) -> String {
    claim.metadata.name.clone().unwrap_or_default()
}

fn wire(claim: &ResourceClaim) -> WireClaim {
    WireClaim {
        namespace: claim.metadata.namespace.clone().unwrap_or_default(),
        uid: claim.metadata.uid.clone().unwrap_or_default(),
        name: name_of(claim),
    }
}
