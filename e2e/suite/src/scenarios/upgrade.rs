//! From a version that has no shares to one that has: what was allocated there carries no share ID. It is kept, counted
//! as the whole of its device, and released.

use super::failures::reboot;
use super::install::{CHART, is_uninstalled, rolls_out};
use super::shares::{MODEST, part};
use crate::objects::{Claim, GPU, MIG, MPS, SHARE, TIMESLICE, Worker, devices, profile_on, request, uuid};
use crate::world::{Gpu, World, eventually, results};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Whether whole GPUs are dealt out.
async fn dealt_out(world: &World) -> Result<bool> {
    let devices = world.devices("n1").await?;
    let gpu = devices.get("gpu-0").context("gpu-0 is not published")?;
    Ok(gpu.allow_multiple_allocations.unwrap_or(false))
}

async fn becomes_dealt_out(world: &World, expected: bool) -> Result<()> {
    eventually(&format!("GPUs dealt out: {expected}"), || async {
        ensure!(dealt_out(world).await? == expected, "not yet");
        Ok(())
    })
    .await
}

/// By a value of the chart instead of an older version.
pub(super) async fn turning_shares_on_keeps_and_releases_what_runs(world: &World) -> Result<()> {
    let result = turned_on(world).await;
    world.clean().await?;
    world.helm(&CHART)?;
    result
}

async fn turned_on(world: &World) -> Result<()> {
    let gpus = world.gpus("n1")?;
    // It has one placement: what does not fit beside it fits nowhere.
    let instance = profile_on("7g.80gb", &gpus[1].uuid);
    world.helm(&[&CHART[..], &["--set=shares.enabled=false"]].concat())?;
    becomes_dealt_out(world, false).await?;
    let old = [("whole", request("gpu", GPU, &uuid(&gpus[0].uuid))), ("mig", request("gpu", MIG, &instance))];
    let mut seen = Vec::new();
    for (pod, request) in old {
        world.template(pod, devices(&[request])).await?;
        world.pod(pod, Claim::Template(pod)).await?;
        world.ready(pod).await?;
        seen.push(world.sees_its_devices(pod).await?);
    }
    world.helm(&CHART)?;
    becomes_dealt_out(world, true).await?;
    for (pod, class, selector) in
        [("share", SHARE, uuid(&gpus[0].uuid)), ("mig-share", MIG, instance.clone())]
    {
        world.template(pod, part(class, &selector, "10Gi")).await?;
        world.pod(pod, Claim::Template(pod)).await?;
        world.unschedulable(pod).await?;
    }
    for ((pod, new), seen) in [("whole", "share"), ("mig", "mig-share")].into_iter().zip(seen) {
        ensure!(world.restarts(pod).await? == 0, "pod {pod} was restarted");
        ensure!(world.sees_its_devices(pod).await? == seen, "pod {pod} sees another device");
        world.delete_pod(pod).await?;
        world.ready(new).await?;
        world.sees_its_devices(new).await?;
    }
    Ok(())
}

/// Pods of the version that e2e/cluster/run --from has installed, and the GPUs that they have.
struct Old {
    gpus: Vec<Gpu>,
    /// By pod.
    seen: BTreeMap<&'static str, BTreeSet<String>>,
}

/// Ends the container that it is run in, after itself.
const END: &str = "(sleep 1; kill 1) > /dev/null 2>&1 &";

/// Those that run before the upgrade.
const RUN: [&str; 4] = ["whole", "mig", "timeslice", "mps"];
/// Those that have a device for themselves: one waits for its ConfigMap, so that the old version allocates its claim and
/// the new one prepares it.
const ALONE: [&str; 3] = ["whole", "mig", "late"];

impl Old {
    fn uuid(&self, n: usize) -> String {
        uuid(&self.gpus[n].uuid)
    }

    /// Of the second GPU, with one placement: what is to lie where it lies fits nowhere.
    fn instance(&self) -> String {
        profile_on("4g.40gb", &self.gpus[1].uuid)
    }
}

pub(super) async fn what_runs_since_before_shares_is_kept_counted_and_released(world: &World) -> Result<()> {
    ensure!(!dealt_out(world).await?, "the version that is installed has shares; --from takes an older one");
    let old = before(world).await?;
    rolls_out(world, &[], ":0", Claim::Template("new")).await?;
    becomes_dealt_out(world, true).await?;
    kept(world, &old).await?;
    counted(world, &old).await?;
    prepared_anew(world, &old).await?;
    released(world, &old).await?;
    world.clean().await?;
    // What both versions have put on the nodes and in the cluster.
    is_uninstalled(world).await
}

async fn before(world: &World) -> Result<Old> {
    let mut old = Old { gpus: world.gpus("n1")?, seen: BTreeMap::new() };
    world.claim("whole", devices(&[request("gpu", GPU, &old.uuid(0))])).await?;
    let templates = [
        ("mig", request("gpu", MIG, &old.instance())),
        ("timeslice", request("gpu", TIMESLICE, &old.uuid(2))),
        ("mps", request("gpu", MPS, &old.uuid(3))),
        ("late", request("gpu", GPU, &old.uuid(5))),
        ("new", request("gpu", MIG, &profile_on("1g.10gb", &old.gpus[6].uuid))),
    ];
    for (name, request) in templates {
        world.template(name, devices(&[request])).await?;
    }
    let workers = [
        Worker::new("whole").claim(Claim::Shared("whole")).work(MODEST),
        Worker::new("mig").claim(Claim::Template("mig")).work(MODEST),
        Worker::new("timeslice").claim(Claim::Template("timeslice")).work(MODEST),
        Worker::new("mps").claim(Claim::Template("mps")).work("divvy-sim client"),
        Worker::new("late").claim(Claim::Template("late")).config("late"),
    ];
    for worker in &workers {
        world.start(worker).await?;
    }
    for pod in RUN {
        world.ready(pod).await?;
        old.seen.insert(pod, world.sees_its_devices(pod).await?);
    }
    for pod in ["whole", "mig", "timeslice"] {
        world.memory(pod).await?;
    }
    world.connected("mps").await?;
    eventually("what waits is allocated", || world.held("late")).await?;
    for pod in ALONE {
        for claim in world.claims_of(pod).await? {
            ensure!(results(&claim)?.iter().all(|result| result.share_id.is_none()), "{pod} has a share ID");
        }
    }
    old.gpus = world.gpus("n1")?;
    Ok(old)
}

/// The pods, the GPUs and what claims tell are as they were.
async fn kept(world: &World, old: &Old) -> Result<()> {
    for (pod, seen) in &old.seen {
        ensure!(world.restarts(pod).await? == 0, "pod {pod} was restarted");
        ensure!(world.sees_its_devices(pod).await? == *seen, "pod {pod} sees another device");
        let mut told = Vec::new();
        for claim in world.claims_of(pod).await? {
            tells_its_devices(&claim)?;
            told.extend(claim.status.and_then(|status| status.devices).unwrap_or_default());
        }
        let told = serde_json::to_string(&told)?;
        ensure!(seen.iter().all(|uuid| told.contains(uuid)), "{pod} has {seen:?}, its claim tells {told}");
    }
    let gpus = world.gpus("n1")?;
    for (n, gpu) in gpus.iter().enumerate().take(RUN.len()) {
        ensure!(*gpu == old.gpus[n], "GPU {n} was {:?}, and is {gpu:?}", old.gpus[n]);
    }
    for node in crate::world::NODES {
        let metrics = world.output(&["metrics", node])?;
        for expected in ["divvy_records_quarantined_total 0", "divvy_unexplained_instances 0"] {
            ensure!(metrics.lines().any(|line| line == expected), "{node} does not tell {expected}");
        }
    }
    Ok(())
}

/// Each device once, as it was allocated.
fn tells_its_devices(claim: &ResourceClaim) -> Result<()> {
    let told = claim.status.as_ref().and_then(|status| status.devices.as_ref());
    let told: BTreeSet<_> =
        told.into_iter().flatten().map(|told| (&told.pool, &told.device, &told.share_id)).collect();
    let has: BTreeSet<_> =
        results(claim)?.iter().map(|result| (&result.pool, &result.device, &result.share_id)).collect();
    ensure!(told == has, "claim {} has {has:?} and tells {told:?}", claim.name_any());
    Ok(())
}

/// What is theirs is nobody else's, and what is not is had.
async fn counted(world: &World, old: &Old) -> Result<()> {
    let on = |class: &str, selector: &str| devices(&[request("gpu", class, selector)]);
    let mig = |profile: &str, n: usize| on(MIG, &profile_on(profile, &old.gpus[n].uuid));
    let refused: [(&str, Value); 8] = [
        ("share-of-whole", part(SHARE, &old.uuid(0), "10Gi")),
        ("share-of-mig", part(MIG, &old.instance(), "10Gi")),
        ("whole-again", on(GPU, &old.uuid(0))),
        ("slot-of-whole", on(TIMESLICE, &old.uuid(0))),
        ("mig-of-whole", mig("1g.10gb", 0)),
        ("mig-over-mig", mig("7g.80gb", 1)),
        ("share-over-mig", part(SHARE, &old.uuid(1), "10Gi")),
        ("share-of-late", part(SHARE, &old.uuid(5), "10Gi")),
    ];
    let either = format!("{} || {}", old.uuid(0), old.uuid(4));
    let runs = [("elsewhere", part(SHARE, &either, "10Gi")), ("beside-mig", mig("3g.40gb", 1))];
    for (pod, spec) in refused.iter().chain(&runs) {
        world.template(pod, spec.clone()).await?;
        world.start(&Worker::new(pod).claim(Claim::Template(pod)).work(MODEST)).await?;
    }
    for (pod, _) in &refused {
        world.unschedulable(pod).await?;
    }
    for (pod, _) in &runs {
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
    }
    ensure!(world.holds_one("elsewhere").await?.device == "gpu-4", "a share is of a GPU that is taken");
    ensure!(world.memory("elsewhere").await?.total == 10 << 10, "the share has not its size");
    // The two that are to have what is released.
    for (pod, _) in &refused[2..] {
        world.delete_pod(pod).await?;
    }
    Ok(())
}

/// The new version prepares what the old one has allocated: for a pod that starts, for one that joins a claim, for a
/// container that starts again, and after a reboot.
async fn prepared_anew(world: &World, old: &Old) -> Result<()> {
    let late = world.held("late").await?;
    let configs: Api<ConfigMap> = Api::default_namespaced(world.client.clone());
    let config = serde_json::from_value(json!({"metadata": {"name": "late"}}))?;
    configs.create(&PostParams::default(), &config).await?;
    world.pod("joins", Claim::Shared("whole")).await?;
    for pod in ["late", "joins"] {
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
    }
    ensure!(world.held("late").await? == late, "its allocation is another");
    for pod in ["whole", "mig"] {
        world.exec(pod, &["sh", "-c", END])?;
        eventually(&format!("pod {pod} started again"), || async {
            ensure!(world.restarts(pod).await? > 0, "it was not");
            Ok(())
        })
        .await?;
        world.ready(pod).await?;
        ensure!(world.sees_its_devices(pod).await? == old.seen[pod], "pod {pod} sees another device");
        ensure!(world.memory(pod).await?.error == 0, "pod {pod} has no memory");
    }

    reboot(world, || Ok(String::new())).await?;
    for pod in RUN.into_iter().chain(["late", "joins", "elsewhere", "beside-mig"]) {
        eventually(&format!("pod {pod} started after the reboot"), || async {
            let least = if ["whole", "mig"].contains(&pod) { 2 } else { 1 };
            ensure!(world.restarts(pod).await? >= least, "it was not");
            Ok(())
        })
        .await?;
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
        for claim in world.claims_of(pod).await? {
            tells_its_devices(&claim)?;
        }
    }
    for pod in ["share-of-whole", "share-of-mig"] {
        world.unschedulable(pod).await?;
    }
    configs.delete("late", &DeleteParams::default()).await?;
    Ok(())
}

/// A share of what they had is had when they are gone, and the whole after it.
async fn released(world: &World, old: &Old) -> Result<()> {
    for pod in ["joins", "whole", "mig"] {
        world.delete_pod(pod).await?;
    }
    for pod in ["share-of-whole", "share-of-mig"] {
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
        ensure!(world.memory(pod).await?.total == 10 << 10, "{pod} has not its size");
        world.delete_pod(pod).await?;
    }
    world.delete_pod("beside-mig").await?;
    for (pod, n) in [("first", 0), ("second", 1)] {
        world.template(pod, devices(&[request("gpu", GPU, &old.uuid(n))])).await?;
        world.pod(pod, Claim::Template(pod)).await?;
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
    }
    Ok(())
}
