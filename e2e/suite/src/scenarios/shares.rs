//! Shares: parts of the memory of a GPU or a MIG instance. Each pod sees its own part and cannot exceed it.

use crate::cluster::{Cluster, eventually};
use crate::objects::{
    Claim, GPU, MIG, MPS, SHARE, TIMESLICE, Worker, devices, profile, profile_on, request, uuid,
    with_capacity,
};
use crate::observations::ProgramMemory;
use anyhow::{Result, ensure};
use kube::api::DeleteParams;
use serde_json::Value;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::time::{SystemTime, UNIX_EPOCH};

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// Runs nvidia-smi, then a CUDA program that allocates 2 GiB, which fits every share.
pub(super) const ALLOCATE_2_GIB: &str = "(nvidia-smi; exec cuda-client 2048)";
/// The same with more memory than any share here.
const ALLOCATE_30_GB: &str = "(nvidia-smi; exec cuda-client 30000)";

pub(super) fn share_request(class: &str, selector: &str, memory: &str) -> Value {
    devices(&[with_capacity(request("gpu", class, selector), &[("memory", memory)])])
}

/// Starts a modest and a greedy pod on shares of one device. Each must see the size of its share,
/// and only the greedy one may be refused memory.
async fn side_by_side(cluster: &Cluster, modest: (&str, u64), greedy: (&str, u64)) -> Result<()> {
    let pods = [("modest", modest, ALLOCATE_2_GIB), ("greedy", greedy, ALLOCATE_30_GB)];
    for (pod, (template, _), work) in pods {
        cluster.start_worker(&Worker::new(pod).claim(Claim::Template(template)).work(work)).await?;
        cluster.wait_ready(pod).await?;
    }
    ensure!(
        cluster.single_device("modest").await? == cluster.single_device("greedy").await?,
        "they are on different devices"
    );
    for (pod, (_, size), _) in pods {
        let ProgramMemory { nvidia_smi, total, .. } = cluster.program_memory(pod).await?;
        ensure!(
            nvidia_smi.contains(&size),
            "nvidia-smi in {pod} prints {nvidia_smi:?}, its share has {size} MiB"
        );
        ensure!(total == size, "CUDA in {pod} reports {total} MiB, its share has {size}");
    }
    let (modest, greedy) = (cluster.program_memory("modest").await?, cluster.program_memory("greedy").await?);
    ensure!((modest.held, modest.error) == (2048, 0), "the modest pod is disturbed: {modest:?}");
    ensure!(greedy.error == OUT_OF_MEMORY, "the greedy pod is not refused: {greedy:?}");
    ensure!(
        greedy.held > greedy.total / 2 && greedy.held < greedy.total,
        "the greedy pod does not get its share: {greedy:?}"
    );
    ensure!(
        cluster.restarts("modest").await? == 0 && cluster.restarts("greedy").await? == 0,
        "a pod was restarted"
    );
    Ok(())
}

pub(super) async fn two_shares_of_a_gpu_keep_their_limits(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(0).uuid;
    cluster.create_template("ten", share_request(SHARE, &uuid(&gpu), "10Gi")).await?;
    cluster.create_template("twenty", share_request(SHARE, &uuid(&gpu), "20Gi")).await?;
    side_by_side(cluster, ("twenty", 20 << 10), ("ten", 10 << 10)).await?;
    // The shares occupy the GPU, so a claim for the whole GPU does not fit.
    cluster.create_template("whole", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    cluster.start_pod("whole", Claim::Template("whole")).await?;
    cluster.wait_unschedulable("whole").await?;
    for pod in ["modest", "greedy"] {
        cluster.delete_pod(pod).await?;
    }
    cluster.wait_ready("whole").await?;
    cluster.verify_visible_devices("whole").await?;
    Ok(())
}

pub(super) async fn two_shares_of_a_mig_instance_keep_their_limits(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(1).uuid;
    let instance = profile_on("1g.10gb", &gpu);
    cluster.create_template("three", share_request(MIG, &instance, "3Gi")).await?;
    cluster.create_template("five", share_request(MIG, &instance, "5Gi")).await?;
    side_by_side(cluster, ("three", 3 << 10), ("five", 5 << 10)).await
}

pub(super) async fn shares_run_beside_other_modes(cluster: &Cluster) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    let of = |n: usize| gpus[n].uuid.as_str();
    cluster.create_template("share", share_request(SHARE, &uuid(of(0)), "10Gi")).await?;
    cluster.create_template("mig", devices(&[request("gpu", MIG, &profile_on("3g.40gb", of(1)))])).await?;
    cluster.create_template("timeslice", devices(&[request("gpu", TIMESLICE, &uuid(of(2)))])).await?;
    cluster.create_template("whole", devices(&[request("gpu", GPU, &uuid(of(3)))])).await?;
    let pods = ["share", "mig", "timeslice", "whole"];
    for pod in pods {
        cluster.start_worker(&Worker::new(pod).claim(Claim::Template(pod)).work(ALLOCATE_2_GIB)).await?;
    }
    for pod in pods {
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
        let memory = cluster.program_memory(pod).await?;
        ensure!((memory.held, memory.error) == (2048, 0), "{pod}: {memory:?}");
        // Pods without a share see the device's whole memory.
        ensure!((memory.total == 10 << 10) == (pod == "share"), "{pod}: {memory:?}");
    }
    Ok(())
}

/// Root in a container may move the library away. Its processes then use the GPU without limits
/// until the node daemon's second audit.
const BYPASS_LIBRARY: &str = "(mv /run/divvy /run/mine; exec cuda-client 30000)";

pub(super) async fn process_that_bypasses_the_library_is_killed(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(2).uuid;
    cluster.create_template("ten", share_request(SHARE, &uuid(&gpu), "10Gi")).await?;
    for (pod, work) in [("honest", ALLOCATE_2_GIB), ("attacker", BYPASS_LIBRARY)] {
        cluster.start_worker(&Worker::new(pod).claim(Claim::Template("ten")).work(work)).await?;
    }
    eventually("the attacker killed and reported", || async {
        ensure!(cluster.restarts("attacker").await? > 0, "it still runs");
        ensure!(!cluster.pod_events("attacker", "ShareLimitViolated").await?.is_empty(), "there is no event");
        Ok(())
    })
    .await?;
    let honest = cluster.program_memory("honest").await?;
    ensure!((honest.held, honest.error) == (2048, 0), "the neighbour is disturbed: {honest:?}");
    ensure!(cluster.restarts("honest").await? == 0, "the neighbour was restarted");
    ensure!(
        cluster.pod_events("honest", "ShareLimitViolated").await?.is_empty(),
        "the neighbour is reported"
    );
    Ok(())
}

/// How many times a pod is started or deleted.
const ROUNDS: u64 = 60;

/// Starts and deletes pods of every mode in random order, while the node daemon is killed twice.
pub(super) async fn random_claims_of_every_mode(cluster: &Cluster) -> Result<()> {
    let wanted = [
        ("whole", devices(&[request("gpu", GPU, "true")])),
        ("mig", devices(&[request("gpu", MIG, &profile("1g.10gb"))])),
        ("timeslice", devices(&[request("gpu", TIMESLICE, "true")])),
        ("mps", devices(&[request("gpu", MPS, "true")])),
        ("share", share_request(SHARE, "true", "10Gi")),
        ("part", share_request(MIG, &profile("1g.10gb"), "3Gi")),
    ];
    for (name, spec) in &wanted {
        cluster.create_template(name, spec.clone()).await?;
    }
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    println!("random claims: seed {seed}");
    let mut live: Vec<String> = Vec::new();
    for turn in 0..ROUNDS {
        let dice =
            usize::try_from(BuildHasherDefault::<DefaultHasher>::default().hash_one((seed, turn)) >> 33)?;
        if turn == ROUNDS / 3 || turn == ROUNDS * 2 / 3 {
            cluster.ctl("crash", "n1-driver")?;
        }
        if dice % 3 == 0 && !live.is_empty() {
            let pod = live.swap_remove(dice / 3 % live.len());
            cluster.pods.delete(&pod, &DeleteParams::default()).await?;
        } else {
            let mode = wanted[dice / 3 % wanted.len()].0;
            let pod = format!("{mode}-{turn}");
            cluster.start_pod(&pod, Claim::Template(mode)).await?;
            live.push(pod);
        }
    }
    let mut running = 0;
    for pod in &live {
        if cluster.wait_settled(pod).await? {
            cluster.verify_visible_devices(pod).await?;
            ensure!(cluster.restarts(pod).await? == 0, "pod {pod} was restarted");
            running += 1;
        }
    }
    ensure!(running > 0, "none of {} pods runs", live.len());
    Ok(())
}
