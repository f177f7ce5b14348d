//! MPS: clients of several users and claims on one GPU, and failures that they survive.

use crate::cluster::{Cluster, ComputeMode, Gpu, eventually};
use crate::objects::{Claim, GPU, MPS, Worker, devices, request, uuid, with_capacity};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::json;

/// A stand-in for a CUDA program that uses 1 GiB of memory.
const MPS_CLIENT: &str = "divvy-sim client --memory 1024 --name trainer";
/// The same without the environment variables that the driver sets in the container.
const MPS_CLIENT_WITHOUT_LIMITS: &str = "env -u CUDA_MPS_ACTIVE_THREAD_PERCENTAGE \
    -u CUDA_MPS_PINNED_DEVICE_MEM_LIMIT \
                        divvy-sim client --memory 1024 --name trainer";

fn client<'a>(name: &'a str, template: &'a str, user: i64) -> Worker<'a> {
    Worker::new(name).claim(Claim::Template(template)).user(user).work(MPS_CLIENT)
}

/// The number of such programs on the GPU.
fn trainer_count(cluster: &Cluster, uuid: &str) -> Result<usize> {
    let gpu = of(cluster, uuid)?;
    Ok(gpu.processes.iter().filter(|process| process.name == "trainer" && process.memory_mib == 1024).count())
}

fn of(cluster: &Cluster, uuid: &str) -> Result<Gpu> {
    cluster.gpus("n1")?.into_iter().find(|gpu| gpu.uuid == uuid).context("the GPU is gone")
}

pub(super) async fn mps_serves_clients_of_two_users(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(3).uuid;
    let small = request("gpu", MPS, &uuid(&gpu));
    let large = with_capacity(small.clone(), &[("threads", "50"), ("memory", "30Gi")]);
    cluster.create_template("small", devices(&[small])).await?;
    cluster.create_template("large", devices(&[large])).await?;
    cluster.start_worker(&client("large", "large", 1000)).await?;
    let large = cluster.mps_client("large").await?;
    cluster.start_worker(&client("small", "small", 2000)).await?;
    let small = cluster.mps_client("small").await?;
    ensure!(
        large.mps && small.mps && large.server == small.server,
        "the clients have different servers: {large:?}, {small:?}"
    );
    ensure!(large.device == gpu && small.device == gpu, "another GPU: {large:?}, {small:?}");
    ensure!(
        (large.thread_percentage, large.memory_limit_mib) == (50.0, Some(30 << 10)),
        "not the claim's own limits: {large:?}"
    );
    // A fourth, the default of the node configuration.
    ensure!(small.thread_percentage == 25.0, "not the default limits: {small:?}");
    let careless =
        Worker::new("careless").claim(Claim::Template("small")).user(3000).work(MPS_CLIENT_WITHOUT_LIMITS);
    cluster.start_worker(&careless).await?;
    let careless = cluster.mps_client("careless").await?;
    ensure!(
        (careless.thread_percentage, careless.memory_limit_mib) == (50.0, Some(30 << 10)),
        "without its own limits, a client must get those of the largest claim: {careless:?}"
    );
    ensure!(trainer_count(cluster, &gpu)? == 3, "not three processes: {:?}", of(cluster, &gpu)?);
    // All threads are allocated (100 %).
    cluster.start_pod("late", Claim::Template("small")).await?;
    cluster.wait_unschedulable("late").await?;
    cluster.delete_pod("large").await?;
    cluster.wait_ready("late").await?;
    Ok(())
}

pub(super) async fn mps_clients_survive_a_node_daemon_kill(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(2).uuid;
    cluster.create_template("client", devices(&[request("gpu", MPS, &uuid(&gpu))])).await?;
    for (pod, user) in [("stays", 1000), ("goes", 2000)] {
        cluster.start_worker(&client(pod, "client", user)).await?;
    }
    let before = cluster.mps_client("stays").await?;
    cluster.mps_client("goes").await?;
    cluster.ctl("kill", "n1-driver")?;
    ensure!(
        of(cluster, &gpu)?.compute_mode == ComputeMode::EXCLUSIVE_PROCESS,
        "the GPU is not exclusive any more"
    );
    cluster.ctl("start", "n1-driver")?;
    cluster.delete_pod("goes").await?;
    cluster.start_worker(&client("new", "client", 3000)).await?;
    let new = cluster.mps_client("new").await?;
    ensure!(new.server == before.server, "another server: {before:?}, then {new:?}");
    ensure!(cluster.mps_client("stays").await? == before, "the client had to reconnect");
    ensure!(cluster.restarts("stays").await? == 0, "a running client was restarted");
    Ok(())
}

/// The MPS daemons end with the supervisor's pod. The clients fail, their containers restart, and
/// connect to a new daemon.
pub(super) async fn mps_supervisor_restarts_its_daemons(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(1).uuid;
    cluster.create_template("client", devices(&[request("gpu", MPS, &uuid(&gpu))])).await?;
    cluster.start_worker(&client("a", "client", 1000)).await?;
    let before = cluster.mps_client("a").await?;
    let supervisors: Api<Pod> = Api::namespaced(cluster.client.clone(), "divvy");
    let here =
        ListParams::default().labels("app.kubernetes.io/component=mps-supervisor").fields("spec.nodeName=n1");
    supervisors.delete_collection(&DeleteParams::default(), &here).await?;
    eventually("another server", || async {
        let now = cluster.mps_client("a").await?;
        ensure!(now.server != before.server, "it is connected to {}", now.server);
        Ok(())
    })
    .await?;
    eventually("restart of the container after the end of its server", || async {
        ensure!(cluster.restarts("a").await? > 0, "the container was not restarted");
        Ok(())
    })
    .await?;
    ensure!(trainer_count(cluster, &gpu)? == 1, "{:?}", of(cluster, &gpu)?);
    // The GPU accepts new clients, and is released afterwards.
    cluster.start_worker(&client("b", "client", 2000)).await?;
    cluster.mps_client("b").await?;
    Ok(())
}

/// As in NVIDIA's DRA driver: one claim for a whole GPU, and MPS for the pods that use it.
pub(super) async fn pods_share_a_claim_with_mps(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(0).uuid;
    let mut spec = devices(&[request("gpu", GPU, &uuid(&gpu))]);
    spec["devices"]["config"] = json!([{"opaque": {
        "driver": "gpu.divvy.dev",
        "parameters": {
            "apiVersion": "resource.divvy.dev/v1alpha1",
            "kind": "GpuConfig",
            "sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 40}},
        },
    }}]);
    cluster.create_claim("shared", spec).await?;
    for (pod, user) in [("a", 1000), ("b", 2000)] {
        cluster
            .start_worker(&Worker::new(pod).claim(Claim::Shared("shared")).user(user).work(MPS_CLIENT))
            .await?;
    }
    for pod in ["a", "b"] {
        let got = cluster.mps_client(pod).await?;
        ensure!(got.mps && got.thread_percentage == 40.0, "{pod} does not have the claim's limit: {got:?}");
    }
    cluster.delete_pod("a").await?;
    ensure!(
        of(cluster, &gpu)?.compute_mode == ComputeMode::EXCLUSIVE_PROCESS,
        "the end of the first pod stopped the daemon of the second"
    );
    ensure!(cluster.restarts("b").await? == 0, "the pod was restarted");
    Ok(())
}
