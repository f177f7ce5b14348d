//! Shares: parts of a GPU's memory or of an instance's, each seen and kept by whoever has it.

use crate::objects::{
    Claim, GPU, MIG, MPS, SHARE, TIMESLICE, Worker, devices, profile, profile_on, request, taking, uuid,
};
use crate::seen::Memory;
use crate::world::{World, eventually};
use anyhow::{Result, ensure};
use kube::api::DeleteParams;
use serde_json::Value;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::time::{SystemTime, UNIX_EPOCH};

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// What nvidia-smi tells, then a CUDA program that wants 2 GiB, which each share has.
pub(super) const MODEST: &str = "(nvidia-smi; exec cuda-client 2048)";
/// And one that wants more than any share here.
const GREEDY: &str = "(nvidia-smi; exec cuda-client 30000)";

pub(super) fn part(class: &str, selector: &str, memory: &str) -> Value {
    devices(&[taking(request("gpu", class, selector), &[("memory", memory)])])
}

/// Starts a modest pod and a greedy one on shares of one device: each is told its own size, and the greedy one alone is
/// refused.
async fn side_by_side(world: &World, modest: (&str, u64), greedy: (&str, u64)) -> Result<()> {
    let pods = [("modest", modest, MODEST), ("greedy", greedy, GREEDY)];
    for (pod, (template, _), work) in pods {
        world.start(&Worker::new(pod).claim(Claim::Template(template)).work(work)).await?;
        world.ready(pod).await?;
    }
    ensure!(
        world.holds_one("modest").await? == world.holds_one("greedy").await?,
        "they are on different devices"
    );
    for (pod, (_, size), _) in pods {
        let Memory { told, total, .. } = world.memory(pod).await?;
        ensure!(told.contains(&size), "nvidia-smi in {pod} tells {told:?}, its share has {size} MiB");
        ensure!(total == size, "CUDA in {pod} has {total} MiB, its share {size}");
    }
    let (modest, greedy) = (world.memory("modest").await?, world.memory("greedy").await?);
    ensure!((modest.held, modest.error) == (2048, 0), "the modest one is disturbed: {modest:?}");
    ensure!(greedy.error == OUT_OF_MEMORY, "the greedy one is not refused: {greedy:?}");
    ensure!(greedy.held > greedy.total / 2 && greedy.held < greedy.total, "not its share: {greedy:?}");
    ensure!(world.restarts("modest").await? == 0 && world.restarts("greedy").await? == 0, "one was ended");
    Ok(())
}

pub(super) async fn two_shares_of_a_gpu_see_and_keep_their_own(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(0).uuid;
    world.template("ten", part(SHARE, &uuid(&gpu), "10Gi")).await?;
    world.template("twenty", part(SHARE, &uuid(&gpu), "20Gi")).await?;
    side_by_side(world, ("twenty", 20 << 10), ("ten", 10 << 10)).await?;
    // The GPU is theirs together: no claim of the whole finds a place.
    world.template("whole", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    world.pod("whole", Claim::Template("whole")).await?;
    world.unschedulable("whole").await?;
    for pod in ["modest", "greedy"] {
        world.delete_pod(pod).await?;
    }
    world.ready("whole").await?;
    world.sees_its_devices("whole").await?;
    Ok(())
}

pub(super) async fn two_shares_of_an_instance_see_and_keep_their_own(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(1).uuid;
    let instance = profile_on("1g.10gb", &gpu);
    world.template("three", part(MIG, &instance, "3Gi")).await?;
    world.template("five", part(MIG, &instance, "5Gi")).await?;
    side_by_side(world, ("three", 3 << 10), ("five", 5 << 10)).await
}

pub(super) async fn shares_run_beside_other_modes(world: &World) -> Result<()> {
    let gpus = world.gpus("n1")?;
    let of = |n: usize| gpus[n].uuid.as_str();
    world.template("share", part(SHARE, &uuid(of(0)), "10Gi")).await?;
    world.template("mig", devices(&[request("gpu", MIG, &profile_on("3g.40gb", of(1)))])).await?;
    world.template("timeslice", devices(&[request("gpu", TIMESLICE, &uuid(of(2)))])).await?;
    world.template("whole", devices(&[request("gpu", GPU, &uuid(of(3)))])).await?;
    let pods = ["share", "mig", "timeslice", "whole"];
    for pod in pods {
        world.start(&Worker::new(pod).claim(Claim::Template(pod)).work(MODEST)).await?;
    }
    for pod in pods {
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
        let memory = world.memory(pod).await?;
        ensure!((memory.held, memory.error) == (2048, 0), "{pod}: {memory:?}");
        // Whoever has no share is told the device's own memory.
        ensure!((memory.total == 10 << 10) == (pod == "share"), "{pod}: {memory:?}");
    }
    Ok(())
}

/// Root in a container may move the library away: its processes have what they want of the GPU until the node's daemon
/// has looked twice.
const ROUND_THE_LIBRARY: &str = "(mv /run/divvy /run/mine; exec cuda-client 30000)";

pub(super) async fn who_goes_round_the_library_is_ended(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(2).uuid;
    world.template("ten", part(SHARE, &uuid(&gpu), "10Gi")).await?;
    for (pod, work) in [("honest", MODEST), ("tricky", ROUND_THE_LIBRARY)] {
        world.start(&Worker::new(pod).claim(Claim::Template("ten")).work(work)).await?;
    }
    eventually("the tricky one's process ended, and told", || async {
        ensure!(world.restarts("tricky").await? > 0, "it runs");
        ensure!(!world.pod_events("tricky", "ShareBroken").await?.is_empty(), "no event tells it");
        Ok(())
    })
    .await?;
    let honest = world.memory("honest").await?;
    ensure!((honest.held, honest.error) == (2048, 0), "the neighbour is disturbed: {honest:?}");
    ensure!(world.restarts("honest").await? == 0, "the neighbour was ended");
    ensure!(world.pod_events("honest", "ShareBroken").await?.is_empty(), "the neighbour is blamed");
    Ok(())
}

/// How often somebody starts or deletes a pod.
const TURNS: u64 = 60;

/// Pods of every mode, started and deleted in an order that nobody chose, while the node daemon dies twice.
pub(super) async fn claims_of_every_mode_come_and_go(world: &World) -> Result<()> {
    let wanted = [
        ("whole", devices(&[request("gpu", GPU, "true")])),
        ("mig", devices(&[request("gpu", MIG, &profile("1g.10gb"))])),
        ("timeslice", devices(&[request("gpu", TIMESLICE, "true")])),
        ("mps", devices(&[request("gpu", MPS, "true")])),
        ("share", part(SHARE, "true", "10Gi")),
        ("part", part(MIG, &profile("1g.10gb"), "3Gi")),
    ];
    for (name, spec) in &wanted {
        world.template(name, spec.clone()).await?;
    }
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    println!("claims at random: seed {seed}");
    let mut live: Vec<String> = Vec::new();
    for turn in 0..TURNS {
        let dice =
            usize::try_from(BuildHasherDefault::<DefaultHasher>::default().hash_one((seed, turn)) >> 33)?;
        if turn == TURNS / 3 || turn == TURNS * 2 / 3 {
            world.ctl("crash", "n1-driver")?;
        }
        if dice % 3 == 0 && !live.is_empty() {
            let pod = live.swap_remove(dice / 3 % live.len());
            world.pods.delete(&pod, &DeleteParams::default()).await?;
        } else {
            let mode = wanted[dice / 3 % wanted.len()].0;
            let pod = format!("{mode}-{turn}");
            world.pod(&pod, Claim::Template(mode)).await?;
            live.push(pod);
        }
    }
    let mut running = 0;
    for pod in &live {
        if world.settled(pod).await? {
            world.sees_its_devices(pod).await?;
            ensure!(world.restarts(pod).await? == 0, "pod {pod} was restarted");
            running += 1;
        }
    }
    ensure!(running > 0, "of {} pods none runs", live.len());
    Ok(())
}
