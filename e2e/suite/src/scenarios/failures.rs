//! Parts of the cluster fail; running pods keep their devices.

use crate::cluster::{AllocatedDevice, Cluster, Gpu, NODES, eventually};
use crate::objects::{Claim, GPU, MIG, devices, profile, profile_on, request, uuid};
use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use std::time::{Duration, Instant};

pub(super) async fn node_daemon_recovers_after_a_kill(cluster: &Cluster) -> Result<()> {
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile("1g.10gb"))])).await?;
    for pod in ["stays", "goes"] {
        cluster.start_pod(pod, Claim::Template("slice")).await?;
    }
    for pod in ["stays", "goes"] {
        cluster.wait_ready(pod).await?;
    }
    let before = cluster.verify_visible_devices("stays").await?;
    cluster.ctl("kill", "n1-driver")?;
    cluster.pods.delete("goes", &DeleteParams::default()).await?;
    cluster.start_pod("new", Claim::Template("slice")).await?;
    // Long enough for the kubelet to try to prepare and unprepare, and fail.
    tokio::time::sleep(Duration::from_secs(5)).await;
    ensure!(
        cluster.pods.get_opt("goes").await?.is_some(),
        "a pod ended although its device was not unprepared"
    );
    cluster.ctl("start", "n1-driver")?;
    cluster.wait_gone("goes").await?;
    cluster.wait_ready("new").await?;
    cluster.verify_visible_devices("new").await?;
    ensure!(cluster.restarts("stays").await? == 0, "a running pod was restarted");
    ensure!(cluster.verify_visible_devices("stays").await? == before, "a running pod has another device");
    Ok(())
}

pub(super) async fn slices_reappear_after_a_kubelet_restart(cluster: &Cluster) -> Result<()> {
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile("2g.20gb"))])).await?;
    cluster.start_pod("before", Claim::Template("slice")).await?;
    cluster.wait_ready("before").await?;
    let uids = || async {
        let slices = cluster.slices.list(&ListParams::default()).await?;
        let ours = slices.into_iter().filter(|slice| slice.spec.node_name.as_deref() == Some("n1"));
        anyhow::Ok(ours.filter_map(|slice| slice.metadata.uid).collect::<Vec<_>>())
    };
    let (old, count) = (uids().await?, cluster.devices("n1").await?.len());
    cluster.ctl("stop", "n1-kubelet")?;
    cluster.ctl("start", "n1-kubelet")?;
    // The kubelet deletes its node's slices at its start.
    eventually("new slices", || async {
        let new = uids().await?;
        ensure!(!new.is_empty() && new.iter().all(|uid| !old.contains(uid)), "old slices still exist");
        ensure!(cluster.devices("n1").await?.len() == count, "some devices are missing");
        Ok(())
    })
    .await?;
    cluster.wait_node_ready("n1").await?;
    cluster.start_pod("after", Claim::Template("slice")).await?;
    cluster.wait_ready("after").await?;
    cluster.verify_visible_devices("after").await?;
    ensure!(cluster.restarts("before").await? == 0, "a running pod was restarted");
    cluster.verify_visible_devices("before").await?;
    Ok(())
}

pub(super) async fn force_deleted_pod_releases_its_gpu(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(3).uuid;
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile_on("7g.80gb", &gpu))])).await?;
    cluster.create_template("whole", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    cluster.start_pod("forced", Claim::Template("slice")).await?;
    cluster.wait_ready("forced").await?;
    cluster.pods.delete("forced", &DeleteParams::default().grace_period(0)).await?;
    cluster.wait_gone("forced").await?;
    cluster.start_pod("next", Claim::Template("whole")).await?;
    cluster.wait_ready("next").await?;
    cluster.verify_visible_devices("next").await?;
    Ok(())
}

/// The API server and the scheduler forget a pod and its claim, and the kubelet unprepares the claim, but
/// the container cannot be killed. Its GPU must go to no other pod, even after a restart of the daemon.
pub(super) async fn force_deleted_pod_keeps_its_gpu_while_it_runs(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(3).uuid;
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile_on("7g.80gb", &gpu))])).await?;
    cluster.create_template("whole", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    cluster.start_pod("stuck", Claim::Template("slice")).await?;
    cluster.wait_ready("stuck").await?;
    let pod = cluster.pods.get("stuck").await?.uid().context("the pod has no UID")?;
    if cluster.output(&["freeze", "stuck"])?.trim() == "unsupported" {
        println!("    skipped: needs the freezer of cgroup v1");
        return Ok(());
    }
    let result = delete_frozen_pod(cluster, &gpu).await;
    cluster.output(&["thaw", &pod])?;
    result?;
    let begun = Instant::now();
    cluster.wait_ready("next").await?;
    println!("    GPU used again {:.1} s after the end of its container", begun.elapsed().as_secs_f64());
    cluster.verify_visible_devices("next").await?;
    Ok(())
}

/// The metric of refused calls. It has no line before the first one.
const UNPREPARE_ERRORS: &str = "divvy_unprepare_seconds_count{result=\"error\"}";

async fn delete_frozen_pod(cluster: &Cluster, gpu: &str) -> Result<()> {
    cluster.pods.delete("stuck", &DeleteParams::default().grace_period(0)).await?;
    cluster.wait_gone("stuck").await?;
    eventually("claim of the pod gone", || async {
        ensure!(cluster.claims.list(&ListParams::default()).await?.items.is_empty(), "it still exists");
        Ok(())
    })
    .await?;
    cluster.ctl("kill", "n1-driver")?;
    cluster.ctl("start", "n1-driver")?;
    cluster.start_pod("next", Claim::Template("whole")).await?;
    // The kubelet unprepares claims of pods that it does not know once a minute.
    eventually("refusal of the kubelet's unprepare", || async {
        let metrics = cluster.output(&["metrics", "n1"])?;
        let refused = metrics.lines().any(|line| line.starts_with(UNPREPARE_ERRORS));
        ensure!(refused, "no unprepare was refused");
        Ok(())
    })
    .await?;
    eventually("refusal of the new pod's claim", || async {
        let claims = cluster.claims_of("next").await?;
        let claim = claims.first().context("the pod has no claim")?;
        let refused = cluster.pod_events(&claim.name_any(), "PrepareFailed").await?;
        let names_holder = |message: &String| message.contains("default/stuck-");
        ensure!(refused.iter().filter_map(|event| event.message.as_ref()).any(names_holder), "{refused:?}");
        Ok(())
    })
    .await?;
    let state = cluster.gpus("n1")?.into_iter().find(|state| state.uuid == gpu).context("no such GPU")?;
    ensure!(!state.instances.is_empty(), "the instance of a running container was destroyed");
    Ok(())
}

pub(super) async fn reboot_with_a_lost_gpu_keeps_claims(cluster: &Cluster) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    let (lost, whole, cut) = (&gpus[0].uuid, &gpus[5], &gpus[6]);
    cluster.create_template("whole", devices(&[request("gpu", GPU, &uuid(&whole.uuid))])).await?;
    cluster
        .create_template("slice", devices(&[request("gpu", MIG, &profile_on("3g.40gb", &cut.uuid))]))
        .await?;
    cluster.start_pod("whole", Claim::Template("whole")).await?;
    cluster.start_pod("slice", Claim::Template("slice")).await?;
    let mut held = Vec::new();
    for pod in ["whole", "slice"] {
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
        held.push(cluster.single_device(pod).await?);
    }

    reboot(cluster, || cluster.sim("n1", &["lose", lost])).await?;
    let result = after_the_reboot(cluster, &held, lost, whole).await;
    // The other scenarios need all eight GPUs.
    cluster.clean_up().await?;
    reboot(cluster, || cluster.sim("n1", &["find", lost])).await?;
    result
}

/// Reboots a node after a power loss; `meanwhile` runs while it is off.
pub(super) async fn reboot(cluster: &Cluster, meanwhile: impl FnOnce() -> Result<String>) -> Result<()> {
    cluster.ctl("power-off", "n1")?;
    meanwhile()?;
    cluster.sim("n1", &["reboot"])?;
    cluster.ctl("power-on", "n1")?;
    cluster.wait_node_ready("n1").await
}

async fn after_the_reboot(
    cluster: &Cluster,
    held: &[AllocatedDevice],
    lost: &str,
    whole: &Gpu,
) -> Result<()> {
    for (pod, held) in ["whole", "slice"].into_iter().zip(held) {
        eventually(&format!("pod {pod} started again"), || async {
            ensure!(cluster.restarts(pod).await? > 0, "it was not restarted");
            Ok(())
        })
        .await?;
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
        ensure!(cluster.single_device(pod).await? == *held, "pod {pod} has another device");
    }
    let gpus = cluster.gpus("n1")?;
    ensure!(gpus.iter().any(|gpu| gpu.uuid == lost && gpu.missing), "the lost GPU is present");
    let now = gpus.iter().find(|gpu| gpu.uuid == whole.uuid).context("the claimed GPU is gone")?;
    ensure!(now.minor != whole.minor, "the minor numbers did not change, so this proves nothing");
    eventually("the lost GPU's device tainted", || async {
        let devices = cluster.devices("n1").await?;
        let device = devices.get("gpu-0").context("gpu-0 is not published")?;
        ensure!(device.taints.as_ref().is_some_and(|taints| !taints.is_empty()), "it has no taint");
        Ok(())
    })
    .await
}

pub(super) async fn pods_survive_a_minute_without_api_server(cluster: &Cluster) -> Result<()> {
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile("1g.10gb"))])).await?;
    cluster.start_pod("before", Claim::Template("slice")).await?;
    cluster.wait_ready("before").await?;
    let before = cluster.verify_visible_devices("before").await?;
    cluster.ctl("kill", "apiserver")?;
    tokio::time::sleep(Duration::from_secs(60)).await;
    cluster.ctl("start", "apiserver")?;
    eventually("the API server", || async {
        cluster.pods.get("before").await.map(|_| ()).map_err(Into::into)
    })
    .await?;
    for node in NODES {
        cluster.wait_node_ready(node).await?;
    }
    cluster.start_pod("after", Claim::Template("slice")).await?;
    cluster.wait_ready("after").await?;
    cluster.verify_visible_devices("after").await?;
    ensure!(cluster.restarts("before").await? == 0, "a running pod was restarted");
    ensure!(cluster.verify_visible_devices("before").await? == before, "a running pod has another device");
    Ok(())
}
