//! GPUs fail and appear, and the GPU driver is replaced, while pods run. Times are printed and only
//! compared with generous limits, because the machine that runs the cluster may be busy.

use super::install::component_pods;
use super::shares::share_request;
use crate::cluster::{Cluster, eventually};
use crate::objects::{Claim, GPU, MIG, MPS, SHARE, TIMESLICE, Worker, devices, profile_on, request, uuid};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::resource::v1::Device;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Limit for a change of the hardware to reach the ResourceSlices. The GPU daemon's own goals are 2 s
/// for a fatal XID and 30 s for a new GPU.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until the published devices of a node fulfil a condition. Returns the time since `begun`.
async fn published(
    cluster: &Cluster,
    node: &str,
    begun: Instant,
    is_met: impl Fn(&BTreeMap<String, Device>) -> bool,
) -> Result<Duration> {
    loop {
        let devices = cluster.devices(node).await?;
        let elapsed = begun.elapsed();
        if is_met(&devices) {
            return Ok(elapsed);
        }
        ensure!(elapsed < PUBLISH_TIMEOUT, "not after {elapsed:?}; the devices are {:?}", devices.keys());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn has_taint(device: &Device, key: &str) -> bool {
    device.taints.iter().flatten().any(|taint| taint.key == key)
}

/// The device of a whole GPU.
fn whole<'a>(devices: &'a BTreeMap<String, Device>, gpu: &str) -> Option<(&'a str, &'a Device)> {
    let is_whole = |(name, device): &(&'a String, &'a Device)| {
        let uuid = device.attributes.as_ref().and_then(|all| all.get("uuid")?.string.as_deref());
        uuid == Some(gpu) && name.strip_prefix("gpu-").is_some_and(|number| number.parse::<u32>().is_ok())
    };
    devices.iter().find(is_whole).map(|(name, device)| (name.as_str(), device))
}

/// A fatal XID taints every device of its GPU, and a reset ends the taint.
pub(super) async fn fatal_xid_taints_the_gpu(cluster: &Cluster) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    let (sick, other) = (&gpus[6].uuid, &gpus[5].uuid);
    let lost = "gpu.divvy.dev/gpu-lost";
    cluster.create_template("sick", devices(&[request("gpu", GPU, &uuid(sick))])).await?;
    let begun = Instant::now();
    cluster.sim("n1", &["xid", sick, "79"])?;
    let tainted = published(cluster, "n1", begun, |devices| {
        whole(devices, sick).is_some_and(|(_, device)| has_taint(device, lost))
    });
    let result = tainted.await;
    if let Ok(elapsed) = &result {
        println!("    taint after XID 79: {:.2} s", elapsed.as_secs_f64());
    }
    let result = match result {
        Ok(_) => avoids_lost_gpu(cluster, other, lost).await,
        Err(error) => Err(error),
    };
    // The daemon must read the energy counter again before it can fall.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let begun = Instant::now();
    cluster.sim("n1", &["reset", sick])?;
    let healthy = published(cluster, "n1", begun, |devices| {
        whole(devices, sick).is_some_and(|(_, device)| device.taints.is_none())
    });
    println!("    taint removed after a reset: {:.2} s", healthy.await?.as_secs_f64());
    result?;
    // The pod that waits gets the GPU.
    cluster.wait_ready("sick").await?;
    cluster.verify_visible_devices("sick").await?;
    Ok(())
}

async fn avoids_lost_gpu(cluster: &Cluster, other: &str, lost: &str) -> Result<()> {
    cluster.start_pod("sick", Claim::Template("sick")).await?;
    cluster.wait_unschedulable("sick").await?;
    let devices = cluster.devices("n1").await?;
    let (_, other) = whole(&devices, other).context("the other GPU is not published")?;
    ensure!(!has_taint(other, lost), "another GPU is tainted");
    Ok(())
}

/// A GPU that is added to a running node is published and used; when it is taken out again, it can be
/// forgotten.
pub(super) async fn plugged_gpu_is_published(cluster: &Cluster) -> Result<()> {
    let before = cluster.gpus("n2")?;
    let begun = Instant::now();
    cluster.sim("n2", &["plug", "L4"])?;
    let new = cluster.gpus("n2")?.into_iter().find(|gpu| before.iter().all(|was| was.uuid != gpu.uuid));
    let new = new.context("no GPU was plugged")?.uuid;
    let result = use_plugged_gpu(cluster, &new, begun).await;
    cluster.clean_up().await?;
    cluster.sim("n2", &["unplug", &new])?;
    let begun = Instant::now();
    let missing = published(cluster, "n2", begun, |devices| {
        whole(devices, &new).is_none_or(|(_, device)| has_taint(device, "gpu.divvy.dev/gpu-missing"))
    });
    println!("    taint after the GPU was unplugged: {:.2} s", missing.await?.as_secs_f64());
    if let Some((name, _)) = whole(&cluster.devices("n2").await?, &new) {
        cluster.output(&["node", "n2", "forget", name])?;
    }
    let begun = Instant::now();
    published(cluster, "n2", begun, |devices| whole(devices, &new).is_none()).await?;
    result
}

async fn use_plugged_gpu(cluster: &Cluster, new: &str, begun: Instant) -> Result<()> {
    let usable = published(cluster, "n2", begun, |devices| {
        whole(devices, new).is_some_and(|(_, device)| device.taints.is_none())
    });
    println!("    plugged GPU published after {:.2} s", usable.await?.as_secs_f64());
    cluster.create_template("new", devices(&[request("gpu", GPU, &uuid(new))])).await?;
    cluster.start_pod("new", Claim::Template("new")).await?;
    cluster.wait_ready("new").await?;
    cluster.verify_visible_devices("new").await?;
    Ok(())
}

/// The label that the GPU operator's driver manager sets on the Node.
const OPERAND_LABEL: &str = "nvidia.com/gpu.deploy.client";
/// Programs that use the GPU for a few seconds; a longer use would block the unload of the driver. The
/// first may be refused memory, until the agent has found that the container's last program is dead.
const BRIEF_PROGRAMS: &str =
    "(nvidia-smi; for n in 1 2 3; do timeout 3 cuda-client 2048; done; exec sleep 2147483647)";
const BRIEF_MPS_CLIENT: &str = "(divvy-sim client --for 3; exec sleep 2147483647)";
/// Another version than the simulator's default.
const NEW_DRIVER: &str = "590.44.01";

/// A driver upgrade as the GPU operator does it. Containers of every mode restart while NVML is closed,
/// and with the new driver. Only pods with MPS must be deleted before.
pub(super) async fn containers_restart_during_a_driver_upgrade(cluster: &Cluster) -> Result<()> {
    let old = cluster.driver_version("n1")?;
    let result = upgrade_driver(cluster, &old).await;
    // The other scenarios need the driver. Whatever is missing is set back.
    cluster.set_node_label("n1", OPERAND_LABEL, None).await?;
    if cluster.driver_version("n1")? != old {
        cluster.clean_up().await?;
        pause_operands(cluster).await?;
        let restored = replace_driver(cluster, &old).await;
        cluster.set_node_label("n1", OPERAND_LABEL, None).await?;
        restored?;
    }
    wait_serving(cluster, true).await?;
    result
}

/// The pods of the scenario, with the visible UUIDs.
type Pods = BTreeMap<&'static str, BTreeSet<String>>;

async fn upgrade_driver(cluster: &Cluster, old: &str) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    let on = |class: &str, selector: &str| devices(&[request("gpu", class, selector)]);
    let mig = |profile: &str, n: usize| profile_on(profile, &gpus[n].uuid);
    let wanted = [
        ("whole", on(GPU, &uuid(&gpus[0].uuid))),
        ("mig", on(MIG, &mig("3g.40gb", 1))),
        ("timeslice", on(TIMESLICE, &uuid(&gpus[2].uuid))),
        ("mps", on(MPS, &uuid(&gpus[3].uuid))),
        ("share", share_request(SHARE, &uuid(&gpus[4].uuid), "10Gi")),
        ("mig-share", share_request(MIG, &mig("1g.10gb", 5), "4Gi")),
    ];
    let mut pods = Pods::new();
    for (pod, spec) in &wanted {
        cluster.create_template(pod, spec.clone()).await?;
        pods.insert(pod, start_program(cluster, pod).await?);
    }

    pause_operands(cluster).await?;
    restart_containers(cluster, &pods).await?;
    println!("    containers of {} modes restarted while NVML was closed", pods.len());

    // An MPS server keeps the driver in use as long as its claim is prepared.
    cluster.delete_pod("mps").await?;
    pods.remove("mps");
    replace_driver(cluster, NEW_DRIVER).await?;
    cluster.set_node_label("n1", OPERAND_LABEL, None).await?;
    wait_serving(cluster, true).await?;
    restart_containers(cluster, &pods).await?;
    println!("    containers of {} modes restarted with driver {NEW_DRIVER} after {old}", pods.len());
    let mps = Pods::from([("mps", start_program(cluster, "mps").await?)]);
    restart_containers(cluster, &mps).await?;
    pods.extend(mps);
    for pod in pods.keys() {
        cluster.delete_pod(pod).await?;
    }
    Ok(())
}

/// Starts the pod of a mode. Returns its visible UUIDs.
async fn start_program(cluster: &Cluster, pod: &str) -> Result<BTreeSet<String>> {
    let work = if pod == "mps" { BRIEF_MPS_CLIENT } else { BRIEF_PROGRAMS };
    cluster.start_worker(&Worker::new(pod).claim(Claim::Template(pod)).work(work)).await?;
    cluster.wait_ready(pod).await?;
    let seen = cluster.verify_visible_devices(pod).await?;
    verify_program(cluster, pod).await?;
    Ok(seen)
}

/// Asks the clients of the driver to let go of it, and waits until the node daemon has.
async fn pause_operands(cluster: &Cluster) -> Result<()> {
    cluster.set_node_label("n1", OPERAND_LABEL, Some("paused-for-driver-upgrade")).await?;
    wait_serving(cluster, false).await
}

/// Replaces the driver. Retries while programs of containers use it.
async fn replace_driver(cluster: &Cluster, version: &str) -> Result<()> {
    eventually("the old driver unloaded", || async { cluster.sim("n1", &["driver", "unload"]).map(|_| ()) })
        .await?;
    cluster.sim("n1", &["driver", "load", version])?;
    Ok(())
}

/// Waits until the node daemon of n1 is ready, or is not.
async fn wait_serving(cluster: &Cluster, serves: bool) -> Result<()> {
    eventually(&format!("the daemon of n1 ready: {serves}"), || async {
        let now = component_pods(cluster, "node").await?;
        ensure!(now.len() == 1 && now.values().all(|(ready, _)| *ready == serves), "{now:?}");
        Ok(())
    })
    .await
}

/// Kills the main process of each pod. Each container must run again and see the same devices.
async fn restart_containers(cluster: &Cluster, pods: &Pods) -> Result<()> {
    let mut before = BTreeMap::new();
    for pod in pods.keys() {
        before.insert(pod, cluster.restarts(pod).await?);
        cluster.exec(pod, &["sh", "-c", super::upgrade::KILL_CONTAINER])?;
    }
    for (pod, restarts) in before {
        eventually(&format!("pod {pod} started again"), || async {
            ensure!(cluster.restarts(pod).await? > restarts, "it was not restarted");
            Ok(())
        })
        .await?;
        cluster.wait_ready(pod).await?;
        ensure!(cluster.verify_visible_devices(pod).await? == pods[pod], "pod {pod} sees another device");
        verify_program(cluster, pod).await?;
    }
    Ok(())
}

/// Verifies that the program of the pod's container could use its device.
async fn verify_program(cluster: &Cluster, pod: &str) -> Result<()> {
    if pod == "mps" {
        let client = cluster.mps_client(pod).await?;
        ensure!(client.mps, "the program does not use MPS: {client:?}");
        return Ok(());
    }
    let memory = eventually(&format!("memory of pod {pod}"), || async {
        let memory = cluster.program_memory(pod).await?;
        ensure!((memory.held, memory.error) == (2048, 0), "{memory:?}");
        Ok(memory)
    })
    .await?;
    let limit = match pod {
        "share" => Some(10 << 10),
        "mig-share" => Some(4 << 10),
        _ => None,
    };
    ensure!(limit.is_none_or(|limit| memory.total == limit), "{pod} has another limit: {memory:?}");
    Ok(())
}
