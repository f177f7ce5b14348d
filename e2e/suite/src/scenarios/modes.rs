//! The modes of GPUs: all of them on one node, one after the other on a GPU, and never two on one GPU.

use crate::cluster::{Cluster, ComputeMode, Gpu};
use crate::objects::{
    Claim, GPU, MIG, MPS, TIMESLICE, devices, first_available, profile_on, request, uuid, with_capacity,
};
use anyhow::{Result, ensure};
use serde_json::Value;

/// Every mode, with a request for it on that GPU.
fn every_mode(gpu: &Gpu) -> [(&'static str, Value); 4] {
    [
        ("whole", request("gpu", GPU, &uuid(&gpu.uuid))),
        ("mig", request("gpu", MIG, &profile_on("3g.40gb", &gpu.uuid))),
        ("timeslice", request("gpu", TIMESLICE, &uuid(&gpu.uuid))),
        ("mps", request("gpu", MPS, &uuid(&gpu.uuid))),
    ]
}

async fn templates(cluster: &Cluster, gpu: &Gpu) -> Result<()> {
    for (name, request) in every_mode(gpu) {
        cluster.create_template(name, devices(&[request])).await?;
    }
    Ok(())
}

pub(super) async fn all_modes_run_on_one_node(cluster: &Cluster) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    for (n, gpu) in gpus.iter().take(4).enumerate() {
        let (mode, request) = &every_mode(gpu)[n];
        cluster.create_template(mode, devices(std::slice::from_ref(request))).await?;
    }
    let pods = ["whole", "mig", "timeslice-a", "timeslice-b", "mps-a", "mps-b"];
    for pod in pods {
        cluster.start_pod(pod, Claim::Template(pod.split('-').next().unwrap_or(pod))).await?;
    }
    for pod in pods {
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
    }
    ensure!(
        cluster.single_device("mps-a").await? == cluster.single_device("mps-b").await?,
        "two claims of one MPS device hold different ones"
    );
    let now = cluster.gpus("n1")?;
    let exclusive: Vec<_> =
        now.iter().filter(|gpu| gpu.compute_mode != ComputeMode::DEFAULT).map(|gpu| &gpu.uuid).collect();
    ensure!(
        exclusive == [&gpus[3].uuid],
        "only the GPU of the MPS daemon must be exclusive, not {exclusive:?}"
    );
    let cut: Vec<_> = now.iter().filter(|gpu| !gpu.instances.is_empty()).map(|gpu| &gpu.uuid).collect();
    ensure!(cut == [&gpus[1].uuid], "only one GPU must be partitioned, not {cut:?}");
    Ok(())
}

/// Each mode waits for the last claim of the previous mode.
pub(super) async fn one_gpu_switches_through_every_mode(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(5);
    templates(cluster, &gpu).await?;
    let modes = ["timeslice", "mps", "mig", "whole", "mps", "timeslice", "mig"];
    let name = |turn: usize| format!("{}-{turn}", modes[turn]);
    cluster.start_pod(&name(0), Claim::Template(modes[0])).await?;
    for turn in 0..modes.len() {
        cluster.wait_ready(&name(turn)).await?;
        cluster.verify_visible_devices(&name(turn)).await?;
        if turn + 1 < modes.len() {
            cluster.start_pod(&name(turn + 1), Claim::Template(modes[turn + 1])).await?;
            cluster.wait_unschedulable(&name(turn + 1)).await?;
        }
        cluster.delete_pod(&name(turn)).await?;
    }
    Ok(())
}

pub(super) async fn timeslice_slots_exclude_other_modes(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(6);
    templates(cluster, &gpu).await?;
    let slots = |n| devices(&[with_capacity(request("gpu", TIMESLICE, &uuid(&gpu.uuid)), &[("slots", n)])]);
    cluster.create_template("two", slots("2")).await?;
    // Four slots: two for one claim, and one each for two claims. One after the other: while the
    // scheduler (1.37.0) writes a claim, it counts the shares twice. A pod that does not fit then
    // is only retried after another change.
    for (pod, template) in [("two", "two"), ("a", "timeslice"), ("b", "timeslice")] {
        cluster.start_pod(pod, Claim::Template(template)).await?;
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
    }
    cluster.start_pod("late", Claim::Template("timeslice")).await?;
    cluster.wait_unschedulable("late").await?;
    for mode in ["whole", "mig", "mps"] {
        cluster.start_pod(mode, Claim::Template(mode)).await?;
        cluster.wait_unschedulable(mode).await?;
        cluster.delete_pod(mode).await?;
    }
    cluster.delete_pod("a").await?;
    cluster.wait_ready("late").await?;
    // One slot is still in use, so no other mode fits.
    cluster.start_pod("whole", Claim::Template("whole")).await?;
    for pod in ["two", "b"] {
        cluster.delete_pod(pod).await?;
    }
    cluster.wait_unschedulable("whole").await?;
    cluster.verify_visible_devices("late").await?;
    cluster.delete_pod("late").await?;
    cluster.wait_ready("whole").await?;
    cluster.verify_visible_devices("whole").await?;
    Ok(())
}

pub(super) async fn one_claim_may_mix_modes(cluster: &Cluster) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    let mixed = devices(&[
        request("slice", MIG, &profile_on("1g.10gb", &gpus[2].uuid)),
        request("timeslice", TIMESLICE, &uuid(&gpus[3].uuid)),
    ]);
    cluster.create_template("mixed", mixed).await?;
    cluster.start_pod("a", Claim::Template("mixed")).await?;
    cluster.wait_ready("a").await?;
    let seen = cluster.verify_visible_devices("a").await?;
    ensure!(seen.len() == 3, "an instance, its GPU and another GPU make three UUIDs, not {seen:?}");
    Ok(())
}

/// A list with several modes gets the first available one.
pub(super) async fn first_available_list_may_mix_modes(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(1);
    let (cut, own) = (profile_on("7g.80gb", &gpu.uuid), uuid(&gpu.uuid));
    let choice = first_available("gpu", &[("cut", MIG, &cut), ("timeslice", TIMESLICE, &own)]);
    cluster.create_template("any", devices(&[choice])).await?;
    cluster.create_template("timeslice", devices(&[request("gpu", TIMESLICE, &own)])).await?;
    cluster.start_pod("first", Claim::Template("timeslice")).await?;
    cluster.wait_ready("first").await?;
    cluster.start_pod("a", Claim::Template("any")).await?;
    cluster.wait_ready("a").await?;
    cluster.verify_visible_devices("a").await?;
    let held = cluster.single_device("a").await?;
    ensure!(held.device.ends_with("-timeslice"), "{held:?} cannot be allocated while the GPU is time-sliced");
    Ok(())
}
