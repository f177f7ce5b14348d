//! A server with partitionable devices and consumable capacity switched off:
//! what it does not keep is not relied on, and that is said.

use crate::objects::{Claim, GPU, MIG, devices, profile_on, request, uuid};
use crate::world::{World, eventually};
use anyhow::{Context, Result, ensure};
use divvy_api::DeviceName;
use divvy_model::DeviceId;
use std::collections::BTreeSet;

pub(super) async fn whole_gpus_are_all_there_is(world: &World) -> Result<()> {
    let published = world.devices("n1").await?;
    let gpus = world.gpus("n1")?;
    ensure!(published.len() == gpus.len(), "published are {:?}", published.keys());
    for (name, device) in &published {
        let id = DeviceId::try_from(&DeviceName::from(name.as_str()))?;
        ensure!(matches!(id, DeviceId::Gpu(_)), "{name} is not a whole GPU");
        ensure!(device.consumes_counters.is_none(), "{name} draws on counters that nobody keeps");
        ensure!(device.allow_multiple_allocations.is_none(), "{name} is for several claims");
    }
    world.template("whole", devices(&[request("gpu", GPU, &uuid(&gpus[2].uuid))])).await?;
    world.pod("a", Claim::Template("whole")).await?;
    world.ready("a").await?;
    world.sees_its_devices("a").await?;
    world.pod("b", Claim::Template("whole")).await?;
    world.unschedulable("b").await?;
    world.delete_pod("a").await?;
    world.ready("b").await?;
    Ok(())
}

pub(super) async fn instances_that_exist_are_used_as_they_are(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(1).uuid;
    world.output(&["smi", "n1", "-i", &gpu, "-mig", "1"])?;
    world.output(&["smi", "n1", "mig", "-i", &gpu, "-cgi", "3g.40gb,1g.10gb", "-C"])?;
    let result = cut_by_hand(world, &gpu).await;
    world.delete_all_pods().await?;
    world.output(&["smi", "n1", "mig", "-i", &gpu, "-dci"])?;
    world.output(&["smi", "n1", "mig", "-i", &gpu, "-dgi"])?;
    world.output(&["smi", "n1", "-i", &gpu, "-mig", "0"])?;
    result
}

async fn cut_by_hand(world: &World, gpu: &str) -> Result<()> {
    eventually("both instances published, and not the GPU beside them", || async {
        let published = world.devices("n1").await?;
        let instances = published.keys().filter(|name| name.contains("-mig-")).count();
        ensure!(instances == 2, "published are {:?}", published.keys());
        let whole = published.values().find(|device| {
            let uuid = device.attributes.as_ref().and_then(|all| all.get("uuid"));
            uuid.and_then(|uuid| uuid.string.as_deref()) == Some(gpu)
        });
        ensure!(whole.is_none_or(|device| device.taints.is_some()), "the whole GPU can be had as well");
        Ok(())
    })
    .await?;
    world.template("slice", devices(&[request("gpu", MIG, &profile_on("1g.10gb", gpu))])).await?;
    world.pod("a", Claim::Template("slice")).await?;
    world.ready("a").await?;
    world.sees_its_devices("a").await?;
    world.delete_pod("a").await?;
    let now = world.gpus("n1")?.into_iter().find(|now| now.uuid == gpu).context("the GPU is gone")?;
    ensure!(now.instances.len() == 2, "an instance that somebody else made was destroyed: {now:?}");
    Ok(())
}

pub(super) async fn what_is_missing_is_said(world: &World) -> Result<()> {
    for node in crate::world::NODES {
        let metrics = world.output(&["metrics", node])?;
        ensure!(metrics.contains("divvy_pool_degraded 1"), "the metrics of {node} do not say it");
    }
    let told: BTreeSet<_> = world
        .node_events("PoolDegraded")
        .await?
        .into_iter()
        .filter_map(|event| event.involved_object.name)
        .collect();
    ensure!(told.len() == crate::world::NODES.len(), "events tell it of {told:?} only");
    Ok(())
}
