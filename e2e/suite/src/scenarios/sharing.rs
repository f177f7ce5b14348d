//! Claims of every form, and GPUs cut by them.

use crate::objects::{
    Claim, GPU, MIG, admin_request, devices, first_available, profile, profile_on, request, uuid,
};
use crate::world::World;
use anyhow::{Result, ensure};
use serde_json::json;
use std::collections::BTreeSet;

pub(super) async fn a_template_gives_each_pod_its_own_mig_instance(world: &World) -> Result<()> {
    world.template("slice", devices(&[request("gpu", MIG, &profile("1g.10gb"))])).await?;
    for pod in ["a", "b"] {
        world.pod(pod, Claim::Template("slice")).await?;
    }
    let mut seen = Vec::new();
    for pod in ["a", "b"] {
        world.ready(pod).await?;
        seen.push(world.sees_its_devices(pod).await?);
    }
    ensure!(seen[0] != seen[1], "both see {:?}", seen[0]);
    let instances: usize = world.gpus("n1")?.iter().map(|gpu| gpu.instances.len()).sum();
    ensure!(instances == 2, "{instances} instances for two pods");
    Ok(())
}

pub(super) async fn pods_share_a_whole_gpu_by_one_claim(world: &World) -> Result<()> {
    let h100 = "device.attributes['gpu.divvy.dev'].productName.contains('H100')";
    world.claim("shared", devices(&[request("gpu", GPU, h100)])).await?;
    for pod in ["a", "b"] {
        world.pod(pod, Claim::Shared("shared")).await?;
    }
    for pod in ["a", "b"] {
        world.ready(pod).await?;
    }
    let (a, b) = (world.sees_its_devices("a").await?, world.sees_its_devices("b").await?);
    ensure!(a == b && a.len() == 1, "{a:?} and {b:?}");
    world.delete_pod("a").await?;
    ensure!(world.sees_its_devices("b").await? == b, "the other pod's end changed what it sees");
    world.pod("c", Claim::Shared("shared")).await?;
    world.ready("c").await?;
    ensure!(world.sees_its_devices("c").await? == b, "a third pod sees another GPU");
    Ok(())
}

pub(super) async fn memory_selects_the_gpu(world: &World) -> Result<()> {
    let between = "device.capacity['gpu.divvy.dev'].memory.compareTo(quantity('20Gi')) >= 0 && \
                   device.capacity['gpu.divvy.dev'].memory.compareTo(quantity('30Gi')) < 0";
    world.template("middle", devices(&[request("gpu", GPU, between)])).await?;
    world.pod("a", Claim::Template("middle")).await?;
    world.ready("a").await?;
    world.sees_its_devices("a").await?;
    let held = world.holds_one("a").await?;
    ensure!(held.node == "n2", "{held:?} is not the node with small GPUs");
    Ok(())
}

pub(super) async fn two_gpus_are_neighbours_by_nvlink(world: &World) -> Result<()> {
    let mut spec = devices(&[
        request("one", GPU, "'nvlinkGroup' in device.attributes['gpu.divvy.dev']"),
        request("two", GPU, "'nvlinkGroup' in device.attributes['gpu.divvy.dev']"),
    ]);
    spec["devices"]["constraints"] = json!([{"matchAttribute": "gpu.divvy.dev/nvlinkGroup"}]);
    world.template("pair", spec).await?;
    world.pod("a", Claim::Template("pair")).await?;
    world.ready("a").await?;
    let seen = world.sees_its_devices("a").await?;
    ensure!(seen.len() == 2, "{seen:?}");
    Ok(())
}

pub(super) async fn the_first_available_choice_is_taken(world: &World) -> Result<()> {
    let (huge, large, small) = (profile("7g.999gb"), profile("3g.40gb"), profile("1g.10gb"));
    let choice =
        first_available("gpu", &[("huge", MIG, &huge), ("large", MIG, &large), ("small", MIG, &small)]);
    world.template("any", devices(&[choice])).await?;
    world.pod("a", Claim::Template("any")).await?;
    world.ready("a").await?;
    world.sees_its_devices("a").await?;
    let held = world.holds_one("a").await?;
    ensure!(held.device.contains("-3g40gb-"), "{held:?} is not the first that exists");
    Ok(())
}

pub(super) async fn seven_slices_are_seven_pods_and_the_eighth_waits(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(7).uuid;
    world.template("slice", devices(&[request("gpu", MIG, &profile_on("1g.10gb", &gpu))])).await?;
    let seven = ["a", "b", "c", "d", "e", "f", "g"];
    for pod in seven {
        world.pod(pod, Claim::Template("slice")).await?;
    }
    let mut seen = BTreeSet::new();
    for pod in seven {
        world.ready(pod).await?;
        seen.extend(world.sees_its_devices(pod).await?);
    }
    ensure!(seen.len() == 8, "one GPU and seven instances make eight UUIDs, not {seen:?}");
    world.pod("h", Claim::Template("slice")).await?;
    world.unschedulable("h").await?;
    world.delete_pod("d").await?;
    world.ready("h").await?;
    world.sees_its_devices("h").await?;
    Ok(())
}

pub(super) async fn a_gpu_goes_from_mig_to_whole_and_back(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(2).uuid;
    world.template("slice", devices(&[request("gpu", MIG, &profile_on("3g.40gb", &gpu))])).await?;
    world.template("whole", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    for round in ["1", "2"] {
        let (slice, whole) = (format!("slice-{round}"), format!("whole-{round}"));
        world.pod(&slice, Claim::Template("slice")).await?;
        world.ready(&slice).await?;
        ensure!(world.sees_its_devices(&slice).await?.len() == 2, "not an instance");
        world.pod(&whole, Claim::Template("whole")).await?;
        world.unschedulable(&whole).await?;
        world.delete_pod(&slice).await?;
        world.ready(&whole).await?;
        ensure!(world.sees_its_devices(&whole).await? == BTreeSet::from([gpu.clone()]), "not the GPU");
        world.delete_pod(&whole).await?;
    }
    Ok(())
}

pub(super) async fn admin_access_looks_on_and_takes_nothing(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(4).uuid;
    world.template("look", devices(&[admin_request("gpu", GPU, &uuid(&gpu))])).await?;
    world.template("whole", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    world.pod("looks", Claim::Template("look")).await?;
    world.ready("looks").await?;
    world.pod("works", Claim::Template("whole")).await?;
    world.ready("works").await?;
    for pod in ["looks", "works"] {
        ensure!(
            world.sees_its_devices(pod).await? == BTreeSet::from([gpu.clone()]),
            "{pod} sees another GPU"
        );
    }
    world.delete_pod("looks").await?;
    ensure!(world.restarts("works").await? == 0, "the one who looked on disturbed the one who works");
    world.sees_its_devices("works").await?;
    Ok(())
}
