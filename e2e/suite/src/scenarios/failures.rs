//! Parts of the cluster die; what was promised to pods stays.

use crate::objects::{Claim, GPU, MIG, devices, profile, profile_on, request, uuid};
use crate::world::{Gpu, Held, NODES, World, eventually};
use anyhow::{Context, Result, ensure};
use kube::api::{DeleteParams, ListParams};
use std::time::Duration;

pub(super) async fn a_killed_driver_disturbs_no_pod_and_catches_up(world: &World) -> Result<()> {
    world.template("slice", devices(&[request("gpu", MIG, &profile("1g.10gb"))])).await?;
    for pod in ["stays", "goes"] {
        world.pod(pod, Claim::Template("slice")).await?;
    }
    for pod in ["stays", "goes"] {
        world.ready(pod).await?;
    }
    let before = world.sees_its_devices("stays").await?;
    world.ctl("kill", "n1-driver")?;
    world.pods.delete("goes", &DeleteParams::default()).await?;
    world.pod("new", Claim::Template("slice")).await?;
    // Long enough for the kubelet to try both and fail.
    tokio::time::sleep(Duration::from_secs(5)).await;
    ensure!(world.pods.get_opt("goes").await?.is_some(), "a pod ended although nobody took its device back");
    world.ctl("start", "n1-driver")?;
    world.gone("goes").await?;
    world.ready("new").await?;
    world.sees_its_devices("new").await?;
    ensure!(world.restarts("stays").await? == 0, "a running pod was restarted");
    ensure!(world.sees_its_devices("stays").await? == before, "a running pod has another device");
    Ok(())
}

pub(super) async fn a_restarted_kubelet_finds_the_slices_again(world: &World) -> Result<()> {
    world.template("slice", devices(&[request("gpu", MIG, &profile("2g.20gb"))])).await?;
    world.pod("before", Claim::Template("slice")).await?;
    world.ready("before").await?;
    let uids = || async {
        let slices = world.slices.list(&ListParams::default()).await?;
        let ours = slices.into_iter().filter(|slice| slice.spec.node_name.as_deref() == Some("n1"));
        anyhow::Ok(ours.filter_map(|slice| slice.metadata.uid).collect::<Vec<_>>())
    };
    let (old, count) = (uids().await?, world.devices("n1").await?.len());
    world.ctl("stop", "n1-kubelet")?;
    world.ctl("start", "n1-kubelet")?;
    // The kubelet deletes its node's slices when it starts.
    eventually("new slices", || async {
        let new = uids().await?;
        ensure!(!new.is_empty() && new.iter().all(|uid| !old.contains(uid)), "old ones are there");
        ensure!(world.devices("n1").await?.len() == count, "not all devices are there");
        Ok(())
    })
    .await?;
    world.node_ready("n1").await?;
    world.pod("after", Claim::Template("slice")).await?;
    world.ready("after").await?;
    world.sees_its_devices("after").await?;
    ensure!(world.restarts("before").await? == 0, "a running pod was restarted");
    world.sees_its_devices("before").await?;
    Ok(())
}

pub(super) async fn a_force_deleted_pod_gives_its_gpu_back(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(3).uuid;
    world.template("slice", devices(&[request("gpu", MIG, &profile_on("7g.80gb", &gpu))])).await?;
    world.template("whole", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    world.pod("forced", Claim::Template("slice")).await?;
    world.ready("forced").await?;
    world.pods.delete("forced", &DeleteParams::default().grace_period(0)).await?;
    world.gone("forced").await?;
    world.pod("next", Claim::Template("whole")).await?;
    world.ready("next").await?;
    world.sees_its_devices("next").await?;
    Ok(())
}

pub(super) async fn a_reboot_with_a_lost_gpu_keeps_numbers_and_claims(world: &World) -> Result<()> {
    let gpus = world.gpus("n1")?;
    let (lost, whole, cut) = (&gpus[0].uuid, &gpus[5], &gpus[6]);
    world.template("whole", devices(&[request("gpu", GPU, &uuid(&whole.uuid))])).await?;
    world.template("slice", devices(&[request("gpu", MIG, &profile_on("3g.40gb", &cut.uuid))])).await?;
    world.pod("whole", Claim::Template("whole")).await?;
    world.pod("slice", Claim::Template("slice")).await?;
    let mut held = Vec::new();
    for pod in ["whole", "slice"] {
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
        held.push(world.holds_one(pod).await?);
    }

    reboot(world, || world.sim("n1", &["lose", lost])).await?;
    let result = after_the_reboot(world, &held, lost, whole).await;
    // The other scenarios want all eight.
    world.clean().await?;
    reboot(world, || world.sim("n1", &["find", lost])).await?;
    result
}

/// A node loses power with its GPUs changed meanwhile, and comes back.
pub(super) async fn reboot(world: &World, meanwhile: impl FnOnce() -> Result<String>) -> Result<()> {
    world.ctl("power-off", "n1")?;
    meanwhile()?;
    world.sim("n1", &["reboot"])?;
    world.ctl("power-on", "n1")?;
    world.node_ready("n1").await
}

async fn after_the_reboot(world: &World, held: &[Held], lost: &str, whole: &Gpu) -> Result<()> {
    for (pod, held) in ["whole", "slice"].into_iter().zip(held) {
        eventually(&format!("pod {pod} started again"), || async {
            ensure!(world.restarts(pod).await? > 0, "it was not");
            Ok(())
        })
        .await?;
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
        ensure!(world.holds_one(pod).await? == *held, "pod {pod} holds another device");
    }
    let gpus = world.gpus("n1")?;
    ensure!(gpus.iter().any(|gpu| gpu.uuid == lost && gpu.missing), "the lost GPU is there");
    let now = gpus.iter().find(|gpu| gpu.uuid == whole.uuid).context("the claimed GPU is gone")?;
    ensure!(now.minor != whole.minor, "minors did not shift, so this proves nothing");
    eventually("the lost GPU's device tainted", || async {
        let devices = world.devices("n1").await?;
        let device = devices.get("gpu-0").context("gpu-0 is not published")?;
        ensure!(device.taints.as_ref().is_some_and(|taints| !taints.is_empty()), "it has no taint");
        Ok(())
    })
    .await
}

pub(super) async fn a_minute_without_the_api_server_costs_nothing(world: &World) -> Result<()> {
    world.template("slice", devices(&[request("gpu", MIG, &profile("1g.10gb"))])).await?;
    world.pod("before", Claim::Template("slice")).await?;
    world.ready("before").await?;
    let before = world.sees_its_devices("before").await?;
    world.ctl("kill", "apiserver")?;
    tokio::time::sleep(Duration::from_secs(60)).await;
    world.ctl("start", "apiserver")?;
    eventually("the API server", || async { world.pods.get("before").await.map(|_| ()).map_err(Into::into) })
        .await?;
    for node in NODES {
        world.node_ready(node).await?;
    }
    world.pod("after", Claim::Template("slice")).await?;
    world.ready("after").await?;
    world.sees_its_devices("after").await?;
    ensure!(world.restarts("before").await? == 0, "a running pod was restarted");
    ensure!(world.sees_its_devices("before").await? == before, "a running pod has another device");
    Ok(())
}
