//! Every mode of a GPU: side by side on a node, one after the other on a GPU, and
//! never two of them on one.

use crate::objects::{
    Claim, GPU, MIG, MPS, TIMESLICE, devices, first_available, profile_on, request, taking, uuid,
};
use crate::world::{ComputeMode, Gpu, World};
use anyhow::{Result, ensure};
use serde_json::Value;

/// Every mode, with a request for it on one GPU.
fn every_mode(gpu: &Gpu) -> [(&'static str, Value); 4] {
    [
        ("whole", request("gpu", GPU, &uuid(&gpu.uuid))),
        ("mig", request("gpu", MIG, &profile_on("3g.40gb", &gpu.uuid))),
        ("timeslice", request("gpu", TIMESLICE, &uuid(&gpu.uuid))),
        ("mps", request("gpu", MPS, &uuid(&gpu.uuid))),
    ]
}

async fn templates(world: &World, gpu: &Gpu) -> Result<()> {
    for (name, request) in every_mode(gpu) {
        world.template(name, devices(&[request])).await?;
    }
    Ok(())
}

pub(super) async fn all_modes_run_on_one_node_at_once(world: &World) -> Result<()> {
    let gpus = world.gpus("n1")?;
    for (n, gpu) in gpus.iter().take(4).enumerate() {
        let (mode, request) = &every_mode(gpu)[n];
        world.template(mode, devices(std::slice::from_ref(request))).await?;
    }
    let pods = ["whole", "mig", "timeslice-a", "timeslice-b", "mps-a", "mps-b"];
    for pod in pods {
        world.pod(pod, Claim::Template(pod.split('-').next().unwrap_or(pod))).await?;
    }
    for pod in pods {
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
    }
    ensure!(
        world.holds_one("mps-a").await? == world.holds_one("mps-b").await?,
        "two claims of one MPS device hold different ones"
    );
    let now = world.gpus("n1")?;
    let exclusive: Vec<_> =
        now.iter().filter(|gpu| gpu.compute_mode != ComputeMode::DEFAULT).map(|gpu| &gpu.uuid).collect();
    ensure!(exclusive == [&gpus[3].uuid], "only the MPS daemon's GPU is its own, not {exclusive:?}");
    let cut: Vec<_> = now.iter().filter(|gpu| !gpu.instances.is_empty()).map(|gpu| &gpu.uuid).collect();
    ensure!(cut == [&gpus[1].uuid], "only one GPU is cut, not {cut:?}");
    Ok(())
}

/// Each turn, the next mode waits for the last claim of the one before.
pub(super) async fn one_gpu_goes_through_every_mode(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(5);
    templates(world, &gpu).await?;
    let turns = ["timeslice", "mps", "mig", "whole", "mps", "timeslice", "mig"];
    let name = |turn: usize| format!("{}-{turn}", turns[turn]);
    world.pod(&name(0), Claim::Template(turns[0])).await?;
    for turn in 0..turns.len() {
        world.ready(&name(turn)).await?;
        world.sees_its_devices(&name(turn)).await?;
        if turn + 1 < turns.len() {
            world.pod(&name(turn + 1), Claim::Template(turns[turn + 1])).await?;
            world.unschedulable(&name(turn + 1)).await?;
        }
        world.delete_pod(&name(turn)).await?;
    }
    Ok(())
}

pub(super) async fn slots_add_up_and_keep_every_other_mode_away(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(6);
    templates(world, &gpu).await?;
    let slots = |n| devices(&[taking(request("gpu", TIMESLICE, &uuid(&gpu.uuid)), &[("slots", n)])]);
    world.template("two", slots("2")).await?;
    // Four slots: two of one claim, one each of two. One after the other: while the
    // scheduler (1.37.0) writes a claim it counts its shares twice, and whoever finds
    // no room in that moment is not tried again before something changes.
    for (pod, template) in [("two", "two"), ("a", "timeslice"), ("b", "timeslice")] {
        world.pod(pod, Claim::Template(template)).await?;
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
    }
    world.pod("late", Claim::Template("timeslice")).await?;
    world.unschedulable("late").await?;
    for mode in ["whole", "mig", "mps"] {
        world.pod(mode, Claim::Template(mode)).await?;
        world.unschedulable(mode).await?;
        world.delete_pod(mode).await?;
    }
    world.delete_pod("a").await?;
    world.ready("late").await?;
    // One is left, and still no other mode has a place.
    world.pod("whole", Claim::Template("whole")).await?;
    for pod in ["two", "b"] {
        world.delete_pod(pod).await?;
    }
    world.unschedulable("whole").await?;
    world.sees_its_devices("late").await?;
    world.delete_pod("late").await?;
    world.ready("whole").await?;
    world.sees_its_devices("whole").await?;
    Ok(())
}

pub(super) async fn one_claim_may_mix_modes_of_different_gpus(world: &World) -> Result<()> {
    let gpus = world.gpus("n1")?;
    let mixed = devices(&[
        request("slice", MIG, &profile_on("1g.10gb", &gpus[2].uuid)),
        request("turns", TIMESLICE, &uuid(&gpus[3].uuid)),
    ]);
    world.template("mixed", mixed).await?;
    world.pod("a", Claim::Template("mixed")).await?;
    world.ready("a").await?;
    let seen = world.sees_its_devices("a").await?;
    ensure!(seen.len() == 3, "an instance, its GPU and another GPU make three UUIDs, not {seen:?}");
    Ok(())
}

/// A list that mixes modes takes the first that can be had.
pub(super) async fn a_list_of_choices_may_mix_modes(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(1);
    let (cut, own) = (profile_on("7g.80gb", &gpu.uuid), uuid(&gpu.uuid));
    let choice = first_available("gpu", &[("cut", MIG, &cut), ("turns", TIMESLICE, &own)]);
    world.template("any", devices(&[choice])).await?;
    world.template("timeslice", devices(&[request("gpu", TIMESLICE, &own)])).await?;
    world.pod("first", Claim::Template("timeslice")).await?;
    world.ready("first").await?;
    world.pod("a", Claim::Template("any")).await?;
    world.ready("a").await?;
    world.sees_its_devices("a").await?;
    let held = world.holds_one("a").await?;
    ensure!(held.device.ends_with("-timeslice"), "{held:?} cannot be had while the GPU is time-sliced");
    Ok(())
}
