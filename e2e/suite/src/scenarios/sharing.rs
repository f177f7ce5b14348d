//! Claims of every form, and the partitioning of GPUs for them.

use crate::cluster::{Cluster, eventually};
use crate::objects::{
    Claim, GPU, MIG, admin_request, devices, first_available, observer_request, profile, profile_on, request,
    uuid,
};
use anyhow::{Result, ensure};
use serde_json::json;
use std::collections::BTreeSet;

pub(super) async fn template_gives_each_pod_its_own_mig_instance(cluster: &Cluster) -> Result<()> {
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile("1g.10gb"))])).await?;
    for pod in ["a", "b"] {
        cluster.start_pod(pod, Claim::Template("slice")).await?;
    }
    let mut seen = Vec::new();
    for pod in ["a", "b"] {
        cluster.wait_ready(pod).await?;
        seen.push(cluster.verify_visible_devices(pod).await?);
    }
    ensure!(seen[0] != seen[1], "both see {:?}", seen[0]);
    let instances: usize = cluster.gpus("n1")?.iter().map(|gpu| gpu.instances.len()).sum();
    ensure!(instances == 2, "{instances} instances for two pods");
    Ok(())
}

pub(super) async fn pods_share_a_whole_gpu_through_one_claim(cluster: &Cluster) -> Result<()> {
    let h100 = "device.attributes['gpu.divvy.dev'].productName.contains('H100')";
    cluster.create_claim("shared", devices(&[request("gpu", GPU, h100)])).await?;
    for pod in ["a", "b"] {
        cluster.start_pod(pod, Claim::Shared("shared")).await?;
    }
    for pod in ["a", "b"] {
        cluster.wait_ready(pod).await?;
    }
    let (a, b) = (cluster.verify_visible_devices("a").await?, cluster.verify_visible_devices("b").await?);
    ensure!(a == b && a.len() == 1, "{a:?} and {b:?}");
    cluster.delete_pod("a").await?;
    ensure!(
        cluster.verify_visible_devices("b").await? == b,
        "the end of the other pod changed the visible devices"
    );
    cluster.start_pod("c", Claim::Shared("shared")).await?;
    cluster.wait_ready("c").await?;
    ensure!(cluster.verify_visible_devices("c").await? == b, "a third pod sees another GPU");
    Ok(())
}

pub(super) async fn cel_selector_on_memory_selects_the_gpu(cluster: &Cluster) -> Result<()> {
    let between = "device.capacity['gpu.divvy.dev'].memory.compareTo(quantity('20Gi')) >= 0 && \
                   device.capacity['gpu.divvy.dev'].memory.compareTo(quantity('30Gi')) < 0";
    cluster.create_template("middle", devices(&[request("gpu", GPU, between)])).await?;
    cluster.start_pod("a", Claim::Template("middle")).await?;
    cluster.wait_ready("a").await?;
    cluster.verify_visible_devices("a").await?;
    let held = cluster.single_device("a").await?;
    ensure!(held.node == "n2", "{held:?} is not on the node with small GPUs");
    Ok(())
}

pub(super) async fn nvlink_constraint_selects_connected_gpus(cluster: &Cluster) -> Result<()> {
    let mut spec = devices(&[
        request("one", GPU, "'nvlinkGroup' in device.attributes['gpu.divvy.dev']"),
        request("two", GPU, "'nvlinkGroup' in device.attributes['gpu.divvy.dev']"),
    ]);
    spec["devices"]["constraints"] = json!([{"matchAttribute": "gpu.divvy.dev/nvlinkGroup"}]);
    cluster.create_template("pair", spec).await?;
    cluster.start_pod("a", Claim::Template("pair")).await?;
    cluster.wait_ready("a").await?;
    let seen = cluster.verify_visible_devices("a").await?;
    ensure!(seen.len() == 2, "{seen:?}");
    Ok(())
}

pub(super) async fn first_available_request_takes_first_match(cluster: &Cluster) -> Result<()> {
    let (huge, large, small) = (profile("7g.999gb"), profile("3g.40gb"), profile("1g.10gb"));
    let choice =
        first_available("gpu", &[("huge", MIG, &huge), ("large", MIG, &large), ("small", MIG, &small)]);
    cluster.create_template("any", devices(&[choice])).await?;
    cluster.start_pod("a", Claim::Template("any")).await?;
    cluster.wait_ready("a").await?;
    cluster.verify_visible_devices("a").await?;
    let held = cluster.single_device("a").await?;
    ensure!(held.device.contains("-3g40gb-"), "{held:?} is not the first existing choice");
    Ok(())
}

pub(super) async fn eighth_pod_waits_for_a_free_mig_slice(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(7).uuid;
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile_on("1g.10gb", &gpu))])).await?;
    let seven = ["a", "b", "c", "d", "e", "f", "g"];
    for pod in seven {
        cluster.start_pod(pod, Claim::Template("slice")).await?;
    }
    let mut seen = BTreeSet::new();
    for pod in seven {
        cluster.wait_ready(pod).await?;
        seen.extend(cluster.verify_visible_devices(pod).await?);
    }
    ensure!(seen.len() == 8, "one GPU and seven instances make eight UUIDs, not {seen:?}");
    cluster.start_pod("h", Claim::Template("slice")).await?;
    cluster.wait_unschedulable("h").await?;
    cluster.delete_pod("d").await?;
    cluster.wait_ready("h").await?;
    cluster.verify_visible_devices("h").await?;
    Ok(())
}

pub(super) async fn gpu_switches_between_mig_and_whole(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(2).uuid;
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile_on("3g.40gb", &gpu))])).await?;
    cluster.create_template("whole", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    for round in ["1", "2"] {
        let (slice, whole) = (format!("slice-{round}"), format!("whole-{round}"));
        cluster.start_pod(&slice, Claim::Template("slice")).await?;
        cluster.wait_ready(&slice).await?;
        ensure!(cluster.verify_visible_devices(&slice).await?.len() == 2, "the pod does not see an instance");
        cluster.start_pod(&whole, Claim::Template("whole")).await?;
        cluster.wait_unschedulable(&whole).await?;
        cluster.delete_pod(&slice).await?;
        cluster.wait_ready(&whole).await?;
        ensure!(
            cluster.verify_visible_devices(&whole).await? == BTreeSet::from([gpu.clone()]),
            "the pod does not see the GPU"
        );
        cluster.delete_pod(&whole).await?;
    }
    Ok(())
}

pub(super) async fn admin_access_does_not_consume_the_gpu(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(4).uuid;
    cluster.create_template("admin", devices(&[admin_request("gpu", GPU, &uuid(&gpu))])).await?;
    cluster.create_template("whole", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    cluster.start_pod("observer", Claim::Template("admin")).await?;
    cluster.wait_ready("observer").await?;
    cluster.start_pod("owner", Claim::Template("whole")).await?;
    cluster.wait_ready("owner").await?;
    for pod in ["observer", "owner"] {
        ensure!(
            cluster.verify_visible_devices(pod).await? == BTreeSet::from([gpu.clone()]),
            "{pod} sees another GPU"
        );
    }
    cluster.delete_pod("observer").await?;
    ensure!(cluster.restarts("owner").await? == 0, "the pod with admin access disturbed the owner");
    cluster.verify_visible_devices("owner").await?;
    Ok(())
}

/// An agent with observer devices sees every GPU of the node, whatever claims hold.
pub(super) async fn monitoring_agent_sees_gpus_in_use(cluster: &Cluster) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    let requests = [
        ("whole", request("gpu", GPU, &uuid(&gpus[3].uuid))),
        ("part", request("gpu", MIG, &profile_on("3g.40gb", &gpus[4].uuid))),
    ];
    for (name, request) in requests {
        cluster.create_template(name, devices(&[request])).await?;
        cluster.start_pod(name, Claim::Template(name)).await?;
        cluster.wait_ready(name).await?;
    }
    let all: BTreeSet<String> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let list: Vec<&String> = all.iter().collect();
    let node = format!("device.attributes['gpu.divvy.dev'].uuid in {list:?}");
    cluster.create_template("observe", devices(&[observer_request("gpus", &node)])).await?;
    for agent in ["agent-a", "agent-b"] {
        cluster.start_pod(agent, Claim::Template("observe")).await?;
        cluster.wait_ready(agent).await?;
        eventually(&format!("all GPUs in {agent}"), || async {
            let seen = cluster.visible_uuids(agent).await?;
            ensure!(all.is_subset(&seen), "it sees {seen:?} of {all:?}");
            Ok(())
        })
        .await?;
    }
    for pod in ["whole", "part"] {
        ensure!(cluster.restarts(pod).await? == 0, "an agent disturbed pod {pod}");
        cluster.verify_visible_devices(pod).await?;
    }
    Ok(())
}
