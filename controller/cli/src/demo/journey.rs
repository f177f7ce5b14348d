//! The journey itself: publish, allocate, prepare, draw, release, compare.
//!
//! A claim that cannot be served is told and counted, and the journey goes on:
//! whatever happens, everything held is released and the GPUs are compared with
//! how they began.

use super::DemoArguments;
use super::claims::Wanted;
use super::map;
use super::report::Report;
use super::world::World;
use anyhow::{Context, Result, anyhow};
use divvy_api::names::DRIVER;
use divvy_kubelet::dra::v1::Claim as WireClaim;
use divvy_sim::control::{Pattern, When};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How long to wait for slices and for MIG mode to go off.
const SETTLE: Duration = Duration::from_secs(20);

/// Goes from an empty node to an empty node.
pub(crate) async fn travel(arguments: &DemoArguments, wanted: Wanted) -> Result<ExitCode> {
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

    let claims: Api<ResourceClaim> = Api::namespaced(world.client.clone(), "default");
    let classes = classes(&world, wanted.classes).await?;
    let mut held: Vec<ResourceClaim> = Vec::new();
    report.part("Allocate, prepare: what the scheduler and the kubelet would ask for");
    for claim in wanted.claims {
        match serve(&world, &slices, &classes, &held, claim, &report).await {
            Ok(claim) => held.push(claim),
            Err(Refused { name, why, claim }) => {
                failures += 1;
                report.failed(&name, &why);
                held.extend(claim);
            }
        }
    }

    report.part("Who holds what, read from the GPUs by another process");
    report.detail(&map::drawn(world.sim.root(), &map::holders(&slices, &held), report.colours())?);

    if arguments.keep {
        report.part("Kept");
        report.detail(&format!(
            "export KUBECONFIG={}\nkubectl get resourceslices,deviceclasses,resourceclaims,nodes\nCtrl-C releases everything",
            world.kubeconfig.display()
        ));
        tokio::signal::ctrl_c().await?;
    }

    report.part("Release");
    for claim in held {
        if let Err(error) = release(&world, &claims, &claim, &report).await {
            failures += 1;
            report.failed(&name_of(&claim), &format!("{error:#}"));
        }
    }
    let began = Instant::now();
    while layout(&world)? != before && began.elapsed() < SETTLE {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    if layout(&world)? == before {
        report.done("the GPUs are as they began", began.elapsed());
    } else {
        failures += 1;
        report.failed("the GPUs", "they are not as they began");
    }
    report.detail(&map::drawn(world.sim.root(), &[], report.colours())?);
    if let Err(error) = world.stop_daemon().await {
        failures += 1;
        report.failed("divvy-node", &format!("{error:#}\n{}", world.daemon_log()));
    }
    report.end(failures);
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
}

/// Creates, allocates and prepares one claim.
async fn serve(
    world: &World,
    slices: &[ResourceSlice],
    classes: &[DeviceClass],
    held: &[ResourceClaim],
    claim: ResourceClaim,
    report: &Report,
) -> Result<ResourceClaim, Refused> {
    let name = name_of(&claim);
    let refused = |why: String, claim: Option<ResourceClaim>| Refused { name: name.clone(), why, claim };
    let namespace = claim.metadata.namespace.clone().unwrap_or_else(|| "default".into());
    let api: Api<ResourceClaim> = Api::namespaced(world.client.clone(), &namespace);
    let mut claim =
        api.create(&PostParams::default(), &claim).await.map_err(|error| refused(error.to_string(), None))?;

    let began = Instant::now();
    let mut share_id = || uuid::Uuid::new_v4().to_string();
    let seen = divvy_alloc::World { slices, classes, claims: held, node: &world.node };
    let allocation = divvy_alloc::allocate(&seen, &claim, &mut share_id)
        .map_err(|why| refused(format!("no device: {why}"), None))?;
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
    report.detail(&edits(world, &claim));
    Ok(claim)
}

/// Unprepares and deletes one claim.
async fn release(
    world: &World,
    api: &Api<ResourceClaim>,
    claim: &ResourceClaim,
    report: &Report,
) -> Result<()> {
    let began = Instant::now();
    let outcomes = world.kubelet.unprepare(DRIVER, &[wire(claim)]).await?;
    if let Some(Err(why)) = outcomes.into_values().next() {
        return Err(anyhow!(why));
    }
    report.done(&format!("{} released", name_of(claim)), began.elapsed());
    api.delete(&name_of(claim), &DeleteParams::default()).await?;
    Ok(())
}

/// The device nodes that the claim's CDI file gives a container.
fn edits(world: &World, claim: &ResourceClaim) -> String {
    let uid = claim.metadata.uid.clone().unwrap_or_default();
    let file = std::fs::read_dir(&world.cdi_dir)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.to_string_lossy().contains(&uid));
    let Some(file) = file else { return String::new() };
    let Ok(text) = std::fs::read(&file) else { return String::new() };
    let Ok(document) = serde_json::from_slice::<serde_json::Value>(&text) else { return String::new() };
    let mut lines = Vec::new();
    for device in document["devices"].as_array().into_iter().flatten() {
        let nodes: Vec<&str> = device["containerEdits"]["deviceNodes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|node| node["path"].as_str())
            .collect();
        lines.push(nodes.join("  "));
    }
    let count = |part: &str| document["containerEdits"][part].as_array().map_or(0, Vec::len);
    lines.push(format!(
        "with {} common nodes, {} mounts, {} hook in {}",
        count("deviceNodes"),
        count("mounts"),
        count("hooks"),
        file.file_name().unwrap_or_default().display()
    ));
    lines.join("\n")
}

/// What must be the same at the end: MIG modes and instances of every GPU.
fn layout(world: &World) -> Result<Vec<(String, String)>> {
    let state = world.sim.read()?;
    Ok(state
        .gpus
        .iter()
        .map(|gpu| (gpu.uuid.clone(), format!("{:?} {:?}", gpu.mig, gpu.instances)))
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
