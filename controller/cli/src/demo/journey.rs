//! The journey itself: publish, then act by act allocate, prepare, draw, release,
//! compare.
//!
//! A claim that cannot be served is told and counted, and the journey goes on:
//! whatever happens, everything held is released and the GPUs are compared with
//! how they began. A claim that must be refused and is served counts as well.

use super::DemoArguments;
use super::claims::{Wanted, is_to_be_refused, of_gpu};
use super::client::Client;
use super::map;
use super::report::Report;
use super::view::View;
use super::world::World;
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

/// How long to wait for slices and for MIG mode to go off.
const SETTLE: Duration = Duration::from_secs(20);

/// Goes from an empty node to an empty node; `kept` is set while Ctrl-C means to go on.
pub(crate) async fn travel(
    arguments: &DemoArguments,
    mut acts: Vec<Wanted>,
    kept: &Cell<bool>,
) -> Result<ExitCode> {
    let report = Report::new();
    let mut failures = 0;

    report.part(&format!("A node with {}", arguments.gpus));
    let began = Instant::now();
    let mut world = World::boot(&arguments.gpus, arguments.dir.as_deref()).await?;
    report.done("GPUs simulated, API server and kubelet up, divvy-node registered", began.elapsed());
    for fault in &arguments.fault {
        let (call, code) =
            fault.split_once('=').ok_or_else(|| anyhow!("--fault {fault}: it is CALL=CODE"))?;
        let code = code.parse().map_err(|_| anyhow!("--fault {fault}: no code {code}"))?;
        world.sim.update(|state| {
            state.add_fault(Pattern::new(call), None, When::Before, code);
            Ok(())
        })?;
        report.detail(&format!("{call} will answer {code:?}"));
    }
    let before = layout(&world)?;

    report.part("Publish: every GPU as all that it could be");
    let began = Instant::now();
    let slices = published(&world).await?;
    let devices = slices.iter().map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len)).sum::<usize>();
    let bytes: usize =
        slices.iter().filter_map(|slice| serde_json::to_vec(slice).ok()).map(|json| json.len()).sum();
    report.done(
        &format!("{devices} devices in {} ResourceSlices, {bytes} bytes", slices.len()),
        began.elapsed(),
    );
    let own = acts.iter_mut().flat_map(|act| std::mem::take(&mut act.classes)).collect();
    let toured = toured(&slices).context("no GPU was published")?;
    let stage = Stage { classes: classes(&world, own).await?, slices, before, report: &report };

    let last = acts.len().saturating_sub(1);
    for (index, act) in acts.into_iter().enumerate() {
        let claims = act.claims.iter().map(|claim| of_gpu(claim, &toured)).collect::<Result<_>>()?;
        report.part(&act.title);
        let keep = (arguments.keep && index == last).then_some(kept);
        failures += stage.play(&world, claims, keep).await?;
    }

    report.part("The end");
    report.detail(&map::drawn(world.sim.root(), &[], report.colours())?);
    if let Err(error) = world.stop_daemon().await {
        failures += 1;
        report.failed("divvy-node", &format!("{error:#}\n{}", world.daemon_log()));
    }
    report.end(failures);
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is the same in all acts.
struct Stage<'a> {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    before: Vec<(String, String)>,
    report: &'a Report,
}

impl Stage<'_> {
    /// Serves the claims together and releases them; the number of things that went wrong.
    async fn play(
        &self,
        world: &World,
        claims: Vec<ResourceClaim>,
        keep: Option<&Cell<bool>>,
    ) -> Result<usize> {
        let Self { slices, report, before, .. } = self;
        let mut failures = 0;
        let mut held: Vec<ResourceClaim> = Vec::new();
        let mut clients: Vec<Client> = Vec::new();
        for claim in claims {
            let to_be_refused = is_to_be_refused(&claim);
            match self.serve(world, &held, &mut clients, claim).await {
                Ok(claim) => {
                    if to_be_refused {
                        failures += 1;
                        report.failed(&name_of(&claim), "it was to get nothing");
                    }
                    held.push(claim);
                }
                Err(Refused { name, why, claim: None, no_device: true }) if to_be_refused => {
                    report.refused(&name, &why);
                }
                Err(Refused { name, why, claim, .. }) => {
                    failures += 1;
                    report.failed(&name, &why);
                    held.extend(claim);
                }
            }
        }

        // Who holds what, read from the GPUs by another process.
        report.detail(&map::drawn(world.sim.root(), &map::holders(slices, &held), report.colours())?);
        if let Some(kept) = keep {
            report.part("Kept");
            report.detail(&format!(
                "export KUBECONFIG={}\nkubectl get resourceslices,deviceclasses,resourceclaims,nodes\nCtrl-C releases everything",
                world.kubeconfig.display()
            ));
            kept.set(true);
            tokio::signal::ctrl_c().await?;
        }

        let began = Instant::now();
        let names: Vec<_> = held.iter().map(name_of).collect();
        for client in clients {
            client.end().await?;
        }
        for claim in held {
            if let Err(error) = release(world, &claim).await {
                failures += 1;
                report.failed(&name_of(&claim), &format!("{error:#}"));
            }
        }
        while layout(world)? != *before && began.elapsed() < SETTLE {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if layout(world)? == *before {
            let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
            report.done(&format!("{names} released, the GPUs are as they began"), began.elapsed());
        } else {
            failures += 1;
            report.failed("the GPUs", "they are not as they began");
        }
        Ok(failures)
    }

    /// Creates, allocates and prepares one claim; runs a client of it if it is MPS's.
    async fn serve(
        &self,
        world: &World,
        held: &[ResourceClaim],
        clients: &mut Vec<Client>,
        claim: ResourceClaim,
    ) -> Result<ResourceClaim, Refused> {
        let Self { slices, classes, report, .. } = self;
        let name = name_of(&claim);
        let refused = |why: String, claim: Option<ResourceClaim>| Refused {
            name: name.clone(),
            why,
            claim,
            no_device: false,
        };
        let namespace = claim.metadata.namespace.clone().unwrap_or_else(|| "default".into());
        let api: Api<ResourceClaim> = Api::namespaced(world.client.clone(), &namespace);
        let mut claim = api
            .create(&PostParams::default(), &claim)
            .await
            .map_err(|error| refused(error.to_string(), None))?;

        let began = Instant::now();
        let mut share_id = || uuid::Uuid::new_v4().to_string();
        let seen = divvy_alloc::World { slices, classes, claims: held, node: &world.node };
        let allocation = divvy_alloc::allocate(&seen, &claim, &mut share_id)
            .map_err(|why| Refused { no_device: true, ..refused(format!("no device: {why}"), None) })?;
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
            .map_err(|error| refused(error.to_string(), None))?;

        let began = Instant::now();
        let wire = [wire(&claim)];
        let outcomes = match world.kubelet.prepare(DRIVER, &wire).await {
            Ok(outcomes) => outcomes,
            Err(error) => return Err(refused(error.to_string(), Some(claim))),
        };
        let prepared = match outcomes.into_values().next() {
            Some(Ok(devices)) => devices,
            Some(Err(why)) => return Err(refused(why, Some(claim))),
            None => return Err(refused("the driver did not answer for it".into(), Some(claim))),
        };
        let ids: Vec<&str> =
            prepared.iter().flat_map(|device| device.cdi_device_ids.iter().map(String::as_str)).collect();
        report.done(&format!("{name}: prepared as {}", ids.join(", ")), began.elapsed());
        let used = async {
            let view = View::read(&world.cdi_dir, claim.metadata.uid.as_deref().unwrap_or_default())?;
            report.detail(&view.told(&world.root));
            if let Some(mps) = view.mps() {
                let (client, told) = Client::start(&world.program("divvy-sim"), &name, &mps).await?;
                report.detail(&told);
                clients.push(client);
            }
            anyhow::Ok(())
        };
        match used.await {
            Ok(()) => Ok(claim),
            Err(error) => Err(refused(format!("{error:#}"), Some(claim))),
        }
    }
}

/// The slices once the pool is complete.
async fn published(world: &World) -> Result<Vec<ResourceSlice>> {
    let api: Api<ResourceSlice> = Api::all(world.client.clone());
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
        if began.elapsed() > SETTLE {
            return Err(anyhow!("nothing was published within {SETTLE:?}\n{}", world.daemon_log()));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// UUID of the GPU to tour: the first that can be cut by MIG as it is, else the first.
fn toured(slices: &[ResourceSlice]) -> Option<String> {
    let devices = || slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let uuid = |device: &Device, name: &str| device.attributes.as_ref()?.get(name)?.string.clone();
    let mut ready = devices().filter(|device| device.taints.as_ref().is_none_or(Vec::is_empty));
    ready
        .find_map(|device| uuid(device, "parentUUID"))
        .or_else(|| devices().find_map(|device| uuid(device, "uuid")))
}

/// The classes of `manifests/` and those of the input, on the API server.
async fn classes(world: &World, own: Vec<DeviceClass>) -> Result<Vec<DeviceClass>> {
    let shipped = super::claims::parse(
        include_str!("../../../../manifests/deviceclasses.yaml"),
        "manifests/deviceclasses.yaml",
    )?;
    let api: Api<DeviceClass> = Api::all(world.client.clone());
    for class in shipped.classes.iter().chain(&own) {
        let name = class.metadata.name.clone().unwrap_or_default();
        api.create(&PostParams::default(), class).await.with_context(|| format!("DeviceClass {name}"))?;
    }
    Ok(api.list(&ListParams::default()).await?.items)
}

/// A claim that could not be served, and the claim itself if it holds an allocation.
struct Refused {
    name: String,
    why: String,
    claim: Option<ResourceClaim>,
    /// The scheduler would find no device for it.
    no_device: bool,
}

/// Unprepares and deletes one claim.
async fn release(world: &World, claim: &ResourceClaim) -> Result<()> {
    let outcomes = world.kubelet.unprepare(DRIVER, &[wire(claim)]).await?;
    if let Some(Err(why)) = outcomes.into_values().next() {
        return Err(anyhow!(why));
    }
    let namespace = claim.metadata.namespace.as_deref().unwrap_or("default");
    let api: Api<ResourceClaim> = Api::namespaced(world.client.clone(), namespace);
    api.delete(&name_of(claim), &DeleteParams::default()).await?;
    Ok(())
}

/// What must be the same at the end: MIG mode, instances, compute mode and time-slice of every GPU.
fn layout(world: &World) -> Result<Vec<(String, String)>> {
    let state = world.sim.read()?;
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
