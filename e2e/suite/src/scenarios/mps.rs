//! MPS: clients of several users and claims on one GPU, and what they survive.

use crate::objects::{Claim, GPU, MPS, Worker, devices, request, taking, uuid};
use crate::world::{ComputeMode, Gpu, World, eventually};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::json;

/// A stand-in for a CUDA program with a GiB of memory.
const CLIENT: &str = "divvy-sim client --memory 1024 --name trainer";
/// The same in a container that lost what we put into its environment.
const CARELESS: &str = "env -u CUDA_MPS_ACTIVE_THREAD_PERCENTAGE -u CUDA_MPS_PINNED_DEVICE_MEM_LIMIT \
                        divvy-sim client --memory 1024 --name trainer";

fn client<'a>(name: &'a str, template: &'a str, user: i64) -> Worker<'a> {
    Worker::new(name).claim(Claim::Template(template)).user(user).work(CLIENT)
}

/// The GPU's trainers, by memory.
fn trainers(world: &World, uuid: &str) -> Result<usize> {
    let gpu = of(world, uuid)?;
    Ok(gpu.processes.iter().filter(|process| process.name == "trainer" && process.memory_mib == 1024).count())
}

fn of(world: &World, uuid: &str) -> Result<Gpu> {
    world.gpus("n1")?.into_iter().find(|gpu| gpu.uuid == uuid).context("the GPU is gone")
}

pub(super) async fn two_users_are_clients_of_one_gpu_at_once(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(3).uuid;
    let small = request("gpu", MPS, &uuid(&gpu));
    let large = taking(small.clone(), &[("threads", "50"), ("memory", "30Gi")]);
    world.template("small", devices(&[small])).await?;
    world.template("large", devices(&[large])).await?;
    world.start(&client("large", "large", 1000)).await?;
    let large = world.connected("large").await?;
    world.start(&client("small", "small", 2000)).await?;
    let small = world.connected("small").await?;
    ensure!(large.mps && small.mps && large.server == small.server, "two daemons: {large:?}, {small:?}");
    ensure!(large.device == gpu && small.device == gpu, "another GPU: {large:?}, {small:?}");
    ensure!(
        (large.thread_percentage, large.memory_limit_mib) == (50.0, Some(30 << 10)),
        "not the claim's own limits: {large:?}"
    );
    // One part of four, as the node configuration says.
    ensure!(small.thread_percentage == 25.0, "not the default limits: {small:?}");
    let careless = Worker::new("careless").claim(Claim::Template("small")).user(3000).work(CARELESS);
    world.start(&careless).await?;
    let careless = world.connected("careless").await?;
    ensure!(
        (careless.thread_percentage, careless.memory_limit_mib) == (50.0, Some(30 << 10)),
        "whoever lost its own limits is held to the largest claim's: {careless:?}"
    );
    ensure!(trainers(world, &gpu)? == 3, "not three processes: {:?}", of(world, &gpu)?);
    // Of 100 % of the threads all are given.
    world.pod("late", Claim::Template("small")).await?;
    world.unschedulable("late").await?;
    world.delete_pod("large").await?;
    world.ready("late").await?;
    Ok(())
}

pub(super) async fn clients_outlive_the_node_daemon(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(2).uuid;
    world.template("client", devices(&[request("gpu", MPS, &uuid(&gpu))])).await?;
    for (pod, user) in [("stays", 1000), ("goes", 2000)] {
        world.start(&client(pod, "client", user)).await?;
    }
    let before = world.connected("stays").await?;
    world.connected("goes").await?;
    world.ctl("kill", "n1-driver")?;
    ensure!(of(world, &gpu)?.compute_mode == ComputeMode::EXCLUSIVE_PROCESS, "the GPU is anybody's");
    world.ctl("start", "n1-driver")?;
    world.delete_pod("goes").await?;
    world.start(&client("new", "client", 3000)).await?;
    let new = world.connected("new").await?;
    ensure!(new.server == before.server, "another server: {before:?}, then {new:?}");
    ensure!(world.connected("stays").await? == before, "it had to connect again");
    ensure!(world.restarts("stays").await? == 0, "a running client was restarted");
    Ok(())
}

/// With its pod the daemons end: the clients fail, their containers start again,
/// and find a new daemon.
pub(super) async fn a_deleted_keeper_comes_back_with_its_daemons(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(1).uuid;
    world.template("client", devices(&[request("gpu", MPS, &uuid(&gpu))])).await?;
    world.start(&client("a", "client", 1000)).await?;
    let before = world.connected("a").await?;
    let keepers: Api<Pod> = Api::namespaced(world.client.clone(), "divvy");
    let here = ListParams::default().labels("app.kubernetes.io/component=keeper").fields("spec.nodeName=n1");
    keepers.delete_collection(&DeleteParams::default(), &here).await?;
    eventually("another server", || async {
        let now = world.connected("a").await?;
        ensure!(now.server != before.server, "it is connected to {}", now.server);
        Ok(())
    })
    .await?;
    eventually("its server ended and its container noticed", || async {
        ensure!(world.restarts("a").await? > 0, "it was not started again");
        Ok(())
    })
    .await?;
    ensure!(trainers(world, &gpu)? == 1, "{:?}", of(world, &gpu)?);
    // The GPU still takes clients, and is given back.
    world.start(&client("b", "client", 2000)).await?;
    world.connected("b").await?;
    Ok(())
}

/// As in NVIDIA's driver: a whole GPU of one claim, and MPS for the pods that use it.
pub(super) async fn pods_share_one_claims_gpu_by_mps(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(0).uuid;
    let mut spec = devices(&[request("gpu", GPU, &uuid(&gpu))]);
    spec["devices"]["config"] = json!([{"opaque": {
        "driver": "gpu.divvy.dev",
        "parameters": {
            "apiVersion": "resource.divvy.dev/v1alpha1",
            "kind": "GpuConfig",
            "sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 40}},
        },
    }}]);
    world.claim("shared", spec).await?;
    for (pod, user) in [("a", 1000), ("b", 2000)] {
        world.start(&Worker::new(pod).claim(Claim::Shared("shared")).user(user).work(CLIENT)).await?;
    }
    for pod in ["a", "b"] {
        let got = world.connected(pod).await?;
        ensure!(got.mps && got.thread_percentage == 40.0, "{pod} is not held to the claim's limit: {got:?}");
    }
    world.delete_pod("a").await?;
    ensure!(
        of(world, &gpu)?.compute_mode == ComputeMode::EXCLUSIVE_PROCESS,
        "the first pod's end took the daemon from the second"
    );
    ensure!(world.restarts("b").await? == 0, "it was restarted");
    Ok(())
}
