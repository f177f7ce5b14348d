//! Upgrades from an older version and rollbacks to it. Running pods must be kept, counted and
//! released. Allocations of a version without shares have no share ID and count as the whole device.
//!
//! Pods with MPS are left out: the DaemonSet that runs their daemons has another name in versions
//! before divvy-mps-supervisor, so an upgrade stops these daemons.

use super::failures::reboot;
use super::install::{HELM_UPGRADE, component_pods, uninstall_and_verify, upgrade_with_overlap};
use super::shares::{ALLOCATE_2_GIB, share_request};
use crate::cluster::{Cluster, Gpu, eventually, results};
use crate::objects::{Claim, GPU, MIG, SHARE, TIMESLICE, Worker, devices, profile_on, request, uuid};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Whether GPUs are offered in shares: by `gpu-0-share`, or by `gpu-0` in earlier versions.
async fn gpus_are_shareable(cluster: &Cluster) -> Result<bool> {
    let devices = cluster.devices("n1").await?;
    let gpu = devices.get("gpu-0").context("gpu-0 is not published")?;
    let share = devices.get("gpu-0-share").is_some_and(|device| device.taints.is_none());
    Ok(share || gpu.allow_multiple_allocations.unwrap_or(false))
}

async fn wait_shareable(cluster: &Cluster, expected: bool) -> Result<()> {
    eventually(&format!("GPUs shareable: {expected}"), || async {
        ensure!(gpus_are_shareable(cluster).await? == expected, "not yet");
        Ok(())
    })
    .await
}

/// Enables shares by a value of the chart, in place of an upgrade.
pub(super) async fn enabling_shares_keeps_running_pods(cluster: &Cluster) -> Result<()> {
    let result = enable_shares(cluster).await;
    cluster.clean_up().await?;
    cluster.helm(&HELM_UPGRADE)?;
    result
}

async fn enable_shares(cluster: &Cluster) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    // The profile has one placement, so a request that does not fit beside it fits nowhere.
    let instance = profile_on("7g.80gb", &gpus[1].uuid);
    cluster.helm(&[&HELM_UPGRADE[..], &["--set=shares.enabled=false"]].concat())?;
    wait_shareable(cluster, false).await?;
    let old = [("whole", request("gpu", GPU, &uuid(&gpus[0].uuid))), ("mig", request("gpu", MIG, &instance))];
    let mut seen = Vec::new();
    for (pod, request) in old {
        cluster.create_template(pod, devices(&[request])).await?;
        cluster.start_pod(pod, Claim::Template(pod)).await?;
        cluster.wait_ready(pod).await?;
        seen.push(cluster.verify_visible_devices(pod).await?);
    }
    cluster.helm(&HELM_UPGRADE)?;
    wait_shareable(cluster, true).await?;
    for (pod, class, selector) in
        [("share", SHARE, uuid(&gpus[0].uuid)), ("mig-share", MIG, instance.clone())]
    {
        cluster.create_template(pod, share_request(class, &selector, "10Gi")).await?;
        cluster.start_pod(pod, Claim::Template(pod)).await?;
        cluster.wait_unschedulable(pod).await?;
    }
    for ((pod, new), seen) in [("whole", "share"), ("mig", "mig-share")].into_iter().zip(seen) {
        ensure!(cluster.restarts(pod).await? == 0, "pod {pod} was restarted");
        ensure!(cluster.verify_visible_devices(pod).await? == seen, "pod {pod} sees another device");
        cluster.delete_pod(pod).await?;
        cluster.wait_ready(new).await?;
        cluster.verify_visible_devices(new).await?;
    }
    Ok(())
}

/// Pods of the version that e2e/cluster/run --from has installed, and the state of the GPUs.
struct OldPods {
    gpus: Vec<Gpu>,
    /// The visible UUIDs, by pod.
    seen: BTreeMap<&'static str, BTreeSet<String>>,
}

/// A command that ends its container after it has returned.
pub(super) const KILL_CONTAINER: &str = "(sleep 1; kill 1) > /dev/null 2>&1 &";

/// The pods that run before the upgrade.
const RUNNING_PODS: [&str; 3] = ["whole", "mig", "timeslice"];
/// The pods with a whole device. `late` waits for its ConfigMap: the old version allocates its
/// claim, and the new version prepares it.
const EXCLUSIVE_PODS: [&str; 3] = ["whole", "mig", "late"];

impl OldPods {
    fn uuid(&self, n: usize) -> String {
        uuid(&self.gpus[n].uuid)
    }

    /// An instance of the second GPU whose profile has one placement.
    fn instance(&self) -> String {
        profile_on("4g.40gb", &self.gpus[1].uuid)
    }
}

/// The upgrade that fits the installed version.
pub(super) async fn upgrade_keeps_running_pods(cluster: &Cluster) -> Result<()> {
    match gpus_are_shareable(cluster).await? {
        true => upgrade_and_roll_back(cluster).await,
        false => upgrade_from_before_shares(cluster).await,
    }
}

const HELM_ROLLBACK: [&str; 5] = ["rollback", "divvy", "1", "--wait=legacy", "--timeout=3m"];

/// Upgrades from a version with shares, and rolls back to it.
async fn upgrade_and_roll_back(cluster: &Cluster) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    let on = |class: &str, selector: &str| devices(&[request("gpu", class, selector)]);
    let of = |n: usize| uuid(&gpus[n].uuid);
    let mig = |profile: &str, n: usize| profile_on(profile, &gpus[n].uuid);
    let running = [
        ("whole", on(GPU, &of(0))),
        ("mig", on(MIG, &mig("3g.40gb", 1))),
        ("timeslice", on(TIMESLICE, &of(2))),
        ("share", share_request(SHARE, &of(3), "10Gi")),
        ("mig-share", share_request(MIG, &mig("1g.10gb", 4), "4Gi")),
    ];
    let again = [
        ("whole-again", on(GPU, &of(0))),
        ("over-mig", on(MIG, &mig("7g.80gb", 1))),
        ("over-timeslice", on(GPU, &of(2))),
        ("over-share", on(GPU, &of(3))),
        ("over-mig-share", on(GPU, &of(4))),
    ];
    let either = format!("{} || {}", of(3), of(5));
    let others = [
        ("new", on(MIG, &mig("1g.10gb", 6))),
        ("later", share_request(SHARE, &either, "10Gi")),
        ("beside-share", share_request(SHARE, &of(3), "10Gi")),
    ];
    for (name, spec) in running.iter().chain(&again).chain(&others) {
        cluster.create_template(name, spec.clone()).await?;
    }
    let mut pods: BTreeMap<&str, (i32, BTreeSet<String>)> = BTreeMap::new();
    for (pod, _) in &running {
        cluster.start_worker(&Worker::new(pod).claim(Claim::Template(pod)).work(ALLOCATE_2_GIB)).await?;
        cluster.wait_ready(pod).await?;
        pods.insert(pod, (0, cluster.verify_visible_devices(pod).await?));
    }

    let of_earlier_version = cluster.single_device("share").await?.device == "gpu-3";

    // Without migShares the instance of mig-share becomes exclusive while shares hold it.
    let exclusive_instances = ["--set-json", "nodeConfig={}"];
    upgrade_with_overlap(cluster, &exclusive_instances, ":0", Claim::Template("new")).await?;
    eventually("shares on their own devices", || async {
        ensure!(cluster.devices("n1").await?.contains_key("gpu-3-share"), "not yet");
        Ok(())
    })
    .await?;
    verify_undisturbed(cluster, &pods).await?;
    verify_held_once(cluster, &again).await?;
    for pod in ["whole", "share"] {
        cluster.exec(pod, &["sh", "-c", KILL_CONTAINER])?;
        eventually(&format!("pod {pod} started again"), || async {
            ensure!(cluster.restarts(pod).await? > 0, "it was not restarted");
            Ok(())
        })
        .await?;
        cluster.wait_ready(pod).await?;
        if let Some((restarts, _)) = pods.get_mut(pod) {
            *restarts = cluster.restarts(pod).await?;
        }
    }
    // While a share of an earlier version exists, new shares use other GPUs.
    for pod in ["later", "beside-share"] {
        cluster.start_worker(&Worker::new(pod).claim(Claim::Template(pod)).work(ALLOCATE_2_GIB)).await?;
    }
    cluster.wait_ready("later").await?;
    pods.insert("later", (0, cluster.verify_visible_devices("later").await?));
    let expected = if of_earlier_version { "gpu-5-share" } else { "gpu-3-share" };
    let held = cluster.single_device("later").await?.device;
    ensure!(held == expected, "the new share is on {held}, not on {expected}");
    verify_undisturbed(cluster, &pods).await?;
    if of_earlier_version {
        cluster.wait_unschedulable("beside-share").await?;
        cluster.delete_pod("share").await?;
        pods.remove("share");
        // The first new share on that GPU.
        cluster.wait_ready("beside-share").await?;
        cluster.verify_visible_devices("beside-share").await?;
        // The earlier version does not publish the devices of these shares.
        cluster.delete_pod("later").await?;
        pods.remove("later");
    } else {
        cluster.wait_ready("beside-share").await?;
    }
    cluster.delete_pod("beside-share").await?;

    cluster.helm(&HELM_ROLLBACK)?;
    eventually("the older daemon", || async {
        let now = component_pods(cluster, "node").await?;
        let replaced = now.values().all(|(ready, image)| *ready && image.ends_with(":from"));
        ensure!(now.len() == 1 && replaced, "{now:?}");
        Ok(())
    })
    .await?;
    verify_undisturbed(cluster, &pods).await?;
    if of_earlier_version {
        cluster
            .start_worker(&Worker::new("share").claim(Claim::Template("share")).work(ALLOCATE_2_GIB))
            .await?;
        cluster.wait_ready("share").await?;
        pods.insert("share", (0, cluster.verify_visible_devices("share").await?));
    }
    for (pod, _) in &again {
        cluster.start_pod(pod, Claim::Template(pod)).await?;
    }
    for (pod, _) in &again {
        cluster.wait_unschedulable(pod).await?;
    }
    for pod in pods.keys() {
        cluster.delete_pod(pod).await?;
    }
    for (pod, _) in &again {
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
    }
    Ok(())
}

/// Verifies that no device of a running pod is allocated again.
async fn verify_held_once(cluster: &Cluster, again: &[(&str, Value)]) -> Result<()> {
    for (pod, _) in again {
        cluster.start_pod(pod, Claim::Template(pod)).await?;
    }
    for (pod, _) in again {
        cluster.wait_unschedulable(pod).await?;
    }
    for (pod, _) in again {
        cluster.delete_pod(pod).await?;
    }
    Ok(())
}

/// Verifies that no container was restarted, and that each sees its devices and memory limit. The
/// pods have a number of restarts and visible UUIDs.
async fn verify_undisturbed(cluster: &Cluster, pods: &BTreeMap<&str, (i32, BTreeSet<String>)>) -> Result<()> {
    for (pod, (restarts, seen)) in pods {
        let now = cluster.restarts(pod).await?;
        ensure!(now == *restarts, "pod {pod} has {now} restarts instead of {restarts}");
        ensure!(cluster.verify_visible_devices(pod).await? == *seen, "pod {pod} sees another device");
        let memory = cluster.program_memory(pod).await?;
        ensure!((memory.held, memory.error) == (2048, 0), "{pod}: {memory:?}");
        let limit = match *pod {
            "share" | "later" => Some(10 << 10),
            "mig-share" => Some(4 << 10),
            _ => None,
        };
        ensure!(limit.is_none_or(|limit| memory.total == limit), "{pod} has another limit: {memory:?}");
    }
    Ok(())
}

async fn upgrade_from_before_shares(cluster: &Cluster) -> Result<()> {
    let old = before(cluster).await?;
    upgrade_with_overlap(cluster, &[], ":0", Claim::Template("new")).await?;
    wait_shareable(cluster, true).await?;
    verify_kept(cluster, &old).await?;
    verify_counted(cluster, &old).await?;
    verify_new_prepares(cluster, &old).await?;
    verify_released(cluster, &old).await?;
    cluster.clean_up().await?;
    // Removes everything that both versions have created on the nodes and in the cluster.
    uninstall_and_verify(cluster).await
}

async fn before(cluster: &Cluster) -> Result<OldPods> {
    let mut old = OldPods { gpus: cluster.gpus("n1")?, seen: BTreeMap::new() };
    cluster.create_claim("whole", devices(&[request("gpu", GPU, &old.uuid(0))])).await?;
    let templates = [
        ("mig", request("gpu", MIG, &old.instance())),
        ("timeslice", request("gpu", TIMESLICE, &old.uuid(2))),
        ("late", request("gpu", GPU, &old.uuid(5))),
        ("new", request("gpu", MIG, &profile_on("1g.10gb", &old.gpus[6].uuid))),
    ];
    for (name, request) in templates {
        cluster.create_template(name, devices(&[request])).await?;
    }
    let workers = [
        Worker::new("whole").claim(Claim::Shared("whole")).work(ALLOCATE_2_GIB),
        Worker::new("mig").claim(Claim::Template("mig")).work(ALLOCATE_2_GIB),
        Worker::new("timeslice").claim(Claim::Template("timeslice")).work(ALLOCATE_2_GIB),
        Worker::new("late").claim(Claim::Template("late")).config("late"),
    ];
    for worker in &workers {
        cluster.start_worker(worker).await?;
    }
    for pod in RUNNING_PODS {
        cluster.wait_ready(pod).await?;
        old.seen.insert(pod, cluster.verify_visible_devices(pod).await?);
    }
    for pod in RUNNING_PODS {
        cluster.program_memory(pod).await?;
    }
    eventually("allocation of the waiting pod", || cluster.allocated_devices("late")).await?;
    for pod in EXCLUSIVE_PODS {
        for claim in cluster.claims_of(pod).await? {
            ensure!(results(&claim)?.iter().all(|result| result.share_id.is_none()), "{pod} has a share ID");
        }
    }
    old.gpus = cluster.gpus("n1")?;
    Ok(old)
}

/// Verifies that the pods, the GPUs and the claims' status are unchanged.
async fn verify_kept(cluster: &Cluster, old: &OldPods) -> Result<()> {
    for (pod, seen) in &old.seen {
        ensure!(cluster.restarts(pod).await? == 0, "pod {pod} was restarted");
        ensure!(cluster.verify_visible_devices(pod).await? == *seen, "pod {pod} sees another device");
        let mut status = Vec::new();
        for claim in cluster.claims_of(pod).await? {
            verify_status_devices(&claim)?;
            status.extend(claim.status.and_then(|status| status.devices).unwrap_or_default());
        }
        let status = serde_json::to_string(&status)?;
        ensure!(
            seen.iter().all(|uuid| status.contains(uuid)),
            "{pod} sees {seen:?}, the status of its claim is {status}"
        );
    }
    let gpus = cluster.gpus("n1")?;
    for (n, gpu) in gpus.iter().enumerate().take(RUNNING_PODS.len()) {
        ensure!(*gpu == old.gpus[n], "GPU {n} was {:?}, and is {gpu:?}", old.gpus[n]);
    }
    for node in crate::cluster::NODES {
        let metrics = cluster.output(&["metrics", node])?;
        for expected in ["divvy_records_quarantined_total 0", "divvy_unmanaged_mig_instances 0"] {
            ensure!(
                metrics.lines().any(|line| line == expected),
                "the metrics of {node} do not contain {expected}"
            );
        }
    }
    Ok(())
}

/// Verifies that the status lists each allocated device exactly once.
fn verify_status_devices(claim: &ResourceClaim) -> Result<()> {
    let listed = claim.status.as_ref().and_then(|status| status.devices.as_ref());
    let listed: BTreeSet<_> =
        listed.into_iter().flatten().map(|device| (&device.pool, &device.device, &device.share_id)).collect();
    let allocated: BTreeSet<_> =
        results(claim)?.iter().map(|result| (&result.pool, &result.device, &result.share_id)).collect();
    ensure!(listed == allocated, "claim {} has {allocated:?}, its status lists {listed:?}", claim.name_any());
    Ok(())
}

/// Verifies that devices of the old pods cannot be allocated again, and that other devices can.
async fn verify_counted(cluster: &Cluster, old: &OldPods) -> Result<()> {
    let on = |class: &str, selector: &str| devices(&[request("gpu", class, selector)]);
    let mig = |profile: &str, n: usize| on(MIG, &profile_on(profile, &old.gpus[n].uuid));
    let refused: [(&str, Value); 8] = [
        ("share-of-whole", share_request(SHARE, &old.uuid(0), "10Gi")),
        ("share-of-mig", share_request(MIG, &old.instance(), "10Gi")),
        ("whole-again", on(GPU, &old.uuid(0))),
        ("slot-of-whole", on(TIMESLICE, &old.uuid(0))),
        ("mig-of-whole", mig("1g.10gb", 0)),
        ("mig-over-mig", mig("7g.80gb", 1)),
        ("share-over-mig", share_request(SHARE, &old.uuid(1), "10Gi")),
        ("share-of-late", share_request(SHARE, &old.uuid(5), "10Gi")),
    ];
    let either = format!("{} || {}", old.uuid(0), old.uuid(4));
    let runs = [("elsewhere", share_request(SHARE, &either, "10Gi")), ("beside-mig", mig("3g.40gb", 1))];
    for (pod, spec) in refused.iter().chain(&runs) {
        cluster.create_template(pod, spec.clone()).await?;
        cluster.start_worker(&Worker::new(pod).claim(Claim::Template(pod)).work(ALLOCATE_2_GIB)).await?;
    }
    for (pod, _) in &refused {
        cluster.wait_unschedulable(pod).await?;
    }
    for (pod, _) in &runs {
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
    }
    ensure!(
        cluster.single_device("elsewhere").await?.device == "gpu-4-share",
        "the share is on an occupied GPU"
    );
    ensure!(cluster.program_memory("elsewhere").await?.total == 10 << 10, "the share does not have its size");
    // The first two stay, to get the released devices later.
    for (pod, _) in &refused[2..] {
        cluster.delete_pod(pod).await?;
    }
    Ok(())
}

/// Verifies that the new version prepares allocations of the old one: for a new pod, for a pod that
/// joins a claim, for a restarted container, and after a reboot.
async fn verify_new_prepares(cluster: &Cluster, old: &OldPods) -> Result<()> {
    let late = cluster.allocated_devices("late").await?;
    let configs: Api<ConfigMap> = Api::default_namespaced(cluster.client.clone());
    let config = serde_json::from_value(json!({"metadata": {"name": "late"}}))?;
    configs.create(&PostParams::default(), &config).await?;
    cluster.start_pod("joins", Claim::Shared("whole")).await?;
    for pod in ["late", "joins"] {
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
    }
    ensure!(cluster.allocated_devices("late").await? == late, "its allocation has changed");
    for pod in ["whole", "mig"] {
        cluster.exec(pod, &["sh", "-c", KILL_CONTAINER])?;
        eventually(&format!("pod {pod} started again"), || async {
            ensure!(cluster.restarts(pod).await? > 0, "it was not restarted");
            Ok(())
        })
        .await?;
        cluster.wait_ready(pod).await?;
        ensure!(cluster.verify_visible_devices(pod).await? == old.seen[pod], "pod {pod} sees another device");
        ensure!(cluster.program_memory(pod).await?.error == 0, "pod {pod} cannot allocate memory");
    }

    reboot(cluster, || Ok(String::new())).await?;
    for pod in RUNNING_PODS.into_iter().chain(["late", "joins", "elsewhere", "beside-mig"]) {
        eventually(&format!("pod {pod} started after the reboot"), || async {
            let least = if ["whole", "mig"].contains(&pod) { 2 } else { 1 };
            ensure!(cluster.restarts(pod).await? >= least, "it was not restarted");
            Ok(())
        })
        .await?;
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
        for claim in cluster.claims_of(pod).await? {
            verify_status_devices(&claim)?;
        }
    }
    for pod in ["share-of-whole", "share-of-mig"] {
        cluster.wait_unschedulable(pod).await?;
    }
    configs.delete("late", &DeleteParams::default()).await?;
    Ok(())
}

/// Verifies that a share of the devices is available after the end of the old pods, and then the
/// whole device.
async fn verify_released(cluster: &Cluster, old: &OldPods) -> Result<()> {
    for pod in ["joins", "whole", "mig"] {
        cluster.delete_pod(pod).await?;
    }
    for pod in ["share-of-whole", "share-of-mig"] {
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
        ensure!(
            cluster.program_memory(pod).await?.total == 10 << 10,
            "the share of {pod} does not have its size"
        );
        cluster.delete_pod(pod).await?;
    }
    cluster.delete_pod("beside-mig").await?;
    for (pod, n) in [("first", 0), ("second", 1)] {
        cluster.create_template(pod, devices(&[request("gpu", GPU, &old.uuid(n))])).await?;
        cluster.start_pod(pod, Claim::Template(pod)).await?;
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
    }
    Ok(())
}
