//! An API server without partitionable devices and consumable capacity: the driver publishes only what such a
//! server supports, and reports the missing features.

use crate::cluster::{Cluster, eventually};
use crate::objects::{Claim, GPU, MIG, devices, profile_on, request, uuid};
use anyhow::{Context, Result, ensure};
use divvy_api::DeviceName;
use divvy_model::DeviceId;
use std::collections::BTreeSet;

pub(super) async fn only_whole_gpus_are_published(cluster: &Cluster) -> Result<()> {
    let published = cluster.devices("n1").await?;
    let gpus = cluster.gpus("n1")?;
    ensure!(published.len() == gpus.len(), "the published devices are {:?}", published.keys());
    for (name, device) in &published {
        let id = DeviceId::try_from(&DeviceName::from(name.as_str()))?;
        ensure!(matches!(id, DeviceId::Gpu(_)), "{name} is not a whole GPU");
        ensure!(
            device.consumes_counters.is_none(),
            "{name} consumes counters that the server does not store"
        );
        ensure!(device.allow_multiple_allocations.is_none(), "{name} allows multiple allocations");
    }
    cluster.create_template("whole", devices(&[request("gpu", GPU, &uuid(&gpus[2].uuid))])).await?;
    cluster.start_pod("a", Claim::Template("whole")).await?;
    cluster.wait_ready("a").await?;
    cluster.verify_visible_devices("a").await?;
    cluster.start_pod("b", Claim::Template("whole")).await?;
    cluster.wait_unschedulable("b").await?;
    cluster.delete_pod("a").await?;
    cluster.wait_ready("b").await?;
    Ok(())
}

pub(super) async fn existing_mig_instances_are_used(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(1).uuid;
    cluster.output(&["smi", "n1", "-i", &gpu, "-mig", "1"])?;
    cluster.output(&["smi", "n1", "mig", "-i", &gpu, "-cgi", "3g.40gb,1g.10gb", "-C"])?;
    let result = with_existing_instances(cluster, &gpu).await;
    cluster.delete_all_pods().await?;
    cluster.output(&["smi", "n1", "mig", "-i", &gpu, "-dci"])?;
    cluster.output(&["smi", "n1", "mig", "-i", &gpu, "-dgi"])?;
    cluster.output(&["smi", "n1", "-i", &gpu, "-mig", "0"])?;
    result
}

async fn with_existing_instances(cluster: &Cluster, gpu: &str) -> Result<()> {
    eventually("both instances published, and not the whole GPU", || async {
        let published = cluster.devices("n1").await?;
        let instances = published.keys().filter(|name| name.contains("-mig-")).count();
        ensure!(instances == 2, "the published devices are {:?}", published.keys());
        let whole = published.values().find(|device| {
            let uuid = device.attributes.as_ref().and_then(|all| all.get("uuid"));
            uuid.and_then(|uuid| uuid.string.as_deref()) == Some(gpu)
        });
        ensure!(whole.is_none_or(|device| device.taints.is_some()), "the whole GPU can be allocated too");
        Ok(())
    })
    .await?;
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile_on("1g.10gb", gpu))])).await?;
    cluster.start_pod("a", Claim::Template("slice")).await?;
    cluster.wait_ready("a").await?;
    cluster.verify_visible_devices("a").await?;
    cluster.delete_pod("a").await?;
    let now = cluster.gpus("n1")?.into_iter().find(|now| now.uuid == gpu).context("the GPU is gone")?;
    ensure!(now.instances.len() == 2, "an unmanaged instance was destroyed: {now:?}");
    Ok(())
}

pub(super) async fn missing_features_are_reported(cluster: &Cluster) -> Result<()> {
    for node in crate::cluster::NODES {
        let metrics = cluster.output(&["metrics", node])?;
        ensure!(
            metrics.contains("divvy_pool_degraded 1"),
            "the metrics of {node} do not contain divvy_pool_degraded 1"
        );
    }
    let nodes: BTreeSet<_> = cluster
        .node_events("PoolDegraded")
        .await?
        .into_iter()
        .filter_map(|event| event.involved_object.name)
        .collect();
    ensure!(nodes.len() == crate::cluster::NODES.len(), "only {nodes:?} have a PoolDegraded event");
    Ok(())
}
