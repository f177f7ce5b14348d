//! Administration of the release: configuration, upgrade, uninstall.

use crate::cluster::{Cluster, eventually};
use crate::objects::{Claim, GPU, MIG, MPS, TIMESLICE, Worker, devices, profile_on, request, uuid};
use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, LogParams};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// `--wait=legacy`, because Helm's newer wait does not support the supervisor's DaemonSet with OnDelete.
pub(super) const HELM_UPGRADE: [&str; 7] =
    ["upgrade", "divvy", "{chart}", "--values", "{values}", "--wait=legacy", "--timeout=3m"];

/// The timeout is longer than the chart's timeout for the nodes.
const HELM_UNINSTALL: [&str; 4] = ["uninstall", "divvy", "--wait", "--timeout=6m"];

/// The pods of a component on n1, by UID: whether they are ready, and their image.
pub(super) async fn component_pods(
    cluster: &Cluster,
    component: &str,
) -> Result<BTreeMap<String, (bool, String)>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "divvy");
    let label = format!("app.kubernetes.io/component={component}");
    let here = ListParams::default().labels(&label).fields("spec.nodeName=n1,status.phase=Running");
    let of = |pod: Pod| {
        // The pod's condition decides: the containers of an unreachable node still look ready.
        let conditions = pod.status.clone().and_then(|status| status.conditions).unwrap_or_default();
        let ready =
            conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
        let image = pod.spec.as_ref().and_then(|spec| spec.containers.first()?.image.clone());
        (pod.uid().unwrap_or_default(), (ready, image.unwrap_or_default()))
    };
    Ok(pods.list(&here).await?.items.into_iter().map(of).collect())
}

fn text<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    device.attributes.as_ref()?.get(name)?.string.as_deref()
}

pub(super) async fn node_configuration_applies_without_restart(cluster: &Cluster) -> Result<()> {
    let before: Vec<_> = component_pods(cluster, "node").await?.into_keys().collect();
    let result = with_node_configuration(cluster).await;
    cluster.clean_up().await?;
    // The other scenarios need every mode on every GPU.
    cluster.helm(&HELM_UPGRADE)?;
    eventually("every mode on every GPU", || async {
        let on = cluster.devices("n1").await?.values().all(|device| device.taints.is_none());
        ensure!(on, "some device is tainted");
        Ok(())
    })
    .await?;
    result?;
    let after: Vec<_> = component_pods(cluster, "node").await?.into_keys().collect();
    ensure!(before == after, "the daemon's pod was replaced");
    Ok(())
}

async fn with_node_configuration(cluster: &Cluster) -> Result<()> {
    let rules = r#"nodeConfig={"rules": [
        {"match": {"products": ["*H100*"], "indices": [3]}, "interval": "Long", "slots": 2},
        {"match": {"indices": [5]}, "modes": ["whole", "timeslice"]}]}"#;
    cluster.helm(&[&HELM_UPGRADE[..], &["--set-json", rules]].concat())?;
    let device = async |name: &str| {
        cluster.devices("n1").await?.remove(name).with_context(|| format!("{name} is not published"))
    };
    eventually("the configuration in the slices", || async {
        let slots = device("gpu-3-timeslice").await?;
        ensure!(text(&slots, "interval") == Some("Long"), "the interval is {:?}", text(&slots, "interval"));
        let off = device("gpu-5-mps").await?;
        ensure!(off.taints.is_some(), "a disabled mode has no taint");
        Ok(())
    })
    .await?;
    let own =
        async |name: &str| anyhow::Ok(text(&device(name).await?, "uuid").context("no UUID")?.to_owned());
    let (third, fifth) = (own("gpu-3").await?, own("gpu-5").await?);
    cluster.create_template("timeslice", devices(&[request("gpu", TIMESLICE, &uuid(&third))])).await?;
    cluster.create_template("off", devices(&[request("gpu", MPS, &uuid(&fifth))])).await?;
    for pod in ["a", "b"] {
        cluster.start_pod(pod, Claim::Template("timeslice")).await?;
        cluster.wait_ready(pod).await?;
        cluster.verify_visible_devices(pod).await?;
    }
    let interval = || {
        let gpu = cluster.gpus("n1")?.into_iter().find(|gpu| gpu.uuid == third).context("no such GPU")?;
        anyhow::Ok(gpu.timeslice)
    };
    ensure!(interval()? == 3, "its interval is {}", interval()?);
    // Both slots are taken, and MPS is disabled on that GPU.
    cluster.start_pod("c", Claim::Template("timeslice")).await?;
    cluster.start_pod("d", Claim::Template("off")).await?;
    for pod in ["c", "d"] {
        cluster.wait_unschedulable(pod).await?;
    }
    cluster.delete_pod("a").await?;
    cluster.wait_ready("c").await?;
    ensure!(interval()? == 3, "the end of the first pod reset the interval");
    for pod in ["b", "c"] {
        cluster.delete_pod(pod).await?;
    }
    eventually("the driver's default interval", || async {
        ensure!(interval()? == 0, "it is {}", interval()?);
        Ok(())
    })
    .await
}

/// The devices of a mode that is turned off go once no claim is allocated on them, and return at once.
pub(super) async fn devices_of_a_mode_that_is_off_are_removed(cluster: &Cluster) -> Result<()> {
    let result = with_removed_modes(cluster).await;
    cluster.clean_up().await?;
    cluster.helm(&HELM_UPGRADE)?;
    eventually("every mode on every GPU", || async {
        let devices = cluster.devices("n1").await?;
        ensure!(devices.contains_key("gpu-5-mps"), "gpu-5-mps is not published");
        ensure!(devices.values().all(|device| device.taints.is_none()), "some device is tainted");
        Ok(())
    })
    .await?;
    result
}

async fn with_removed_modes(cluster: &Cluster) -> Result<()> {
    let published = cluster.devices("n1").await?;
    let own = |name: &str| published.get(name).and_then(|device| text(device, "uuid").map(str::to_owned));
    let fifth = own("gpu-5").context("gpu-5 has no UUID")?;
    cluster.create_template("timeslice", devices(&[request("gpu", TIMESLICE, &uuid(&fifth))])).await?;
    cluster.create_template("whole", devices(&[request("gpu", GPU, &uuid(&fifth))])).await?;
    cluster.start_pod("a", Claim::Template("timeslice")).await?;
    cluster.wait_ready("a").await?;
    let rules = r#"nodeConfig={"rules": [{"match": {"indices": [5]}, "dedicated": true}]}"#;
    let delay = r#"controller.env=[{"name": "DIVVY_REMOVAL_DELAY", "value": "5s"}]"#;
    cluster.helm(&[&HELM_UPGRADE[..], &["--set-json", rules, "--set-json", delay]].concat())?;
    let of_fifth = async || {
        let names = cluster.devices("n1").await?.into_keys();
        anyhow::Ok(names.filter(|name| *name == "gpu-5" || name.starts_with("gpu-5-")).collect::<Vec<_>>())
    };
    eventually("only the mode in use beside the whole GPU", || async {
        let names = of_fifth().await?;
        ensure!(names == ["gpu-5", "gpu-5-timeslice"], "{names:?} are published");
        Ok(())
    })
    .await?;
    ensure!(!cluster.node_events("ModeInUse").await?.is_empty(), "no event names the claim of pod a");
    cluster.start_pod("b", Claim::Template("whole")).await?;
    cluster.wait_unschedulable("b").await?;
    cluster.delete_pod("a").await?;
    cluster.wait_ready("b").await?;
    eventually("only the whole GPU", || async {
        let names = of_fifth().await?;
        ensure!(names == ["gpu-5"], "{names:?} are published");
        Ok(())
    })
    .await
}

/// An upgrade while every mode is in use: two daemons overlap, and one of them is always ready.
pub(super) async fn upgrade_does_not_disturb_pods(cluster: &Cluster) -> Result<()> {
    let result = upgrade_with_all_modes(cluster).await;
    cluster.clean_up().await?;
    cluster.helm(&HELM_UPGRADE)?;
    result
}

async fn upgrade_with_all_modes(cluster: &Cluster) -> Result<()> {
    let gpus = cluster.gpus("n1")?;
    let wanted = [
        ("whole", request("gpu", GPU, &uuid(&gpus[0].uuid))),
        ("mig", request("gpu", MIG, &profile_on("1g.10gb", &gpus[1].uuid))),
        ("timeslice", request("gpu", TIMESLICE, &uuid(&gpus[2].uuid))),
        ("mps", request("gpu", MPS, &uuid(&gpus[3].uuid))),
    ];
    for (mode, request) in &wanted {
        cluster.create_template(mode, devices(std::slice::from_ref(request))).await?;
        let worker = Worker::new(mode).claim(Claim::Template(mode));
        let worker = if *mode == "mps" { worker.work("divvy-sim client") } else { worker };
        cluster.start_worker(&worker).await?;
    }
    let mut before = Vec::new();
    for (mode, _) in &wanted {
        cluster.wait_ready(mode).await?;
        before.push(cluster.verify_visible_devices(mode).await?);
    }
    let connected = cluster.mps_client("mps").await?;
    let supervisors: Vec<_> = component_pods(cluster, "mps-supervisor").await?.into_keys().collect();
    upgrade_with_overlap(cluster, &["--set=image.tag=next"], ":next", Claim::Template("mig")).await?;
    for ((mode, _), before) in wanted.iter().zip(&before) {
        ensure!(cluster.restarts(mode).await? == 0, "pod {mode} was restarted");
        ensure!(cluster.verify_visible_devices(mode).await? == *before, "pod {mode} sees another device");
    }
    let after: Vec<_> = component_pods(cluster, "mps-supervisor").await?.into_keys().collect();
    ensure!(supervisors == after, "the supervisor was replaced before its pod was deleted");
    ensure!(cluster.mps_client("mps").await? == connected, "the MPS client had to connect again");

    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "divvy");
    let supervisor =
        ListParams::default().labels("app.kubernetes.io/component=mps-supervisor").fields("spec.nodeName=n1");
    pods.delete_collection(&DeleteParams::default(), &supervisor).await?;
    eventually("the new supervisor and its client", || async {
        let now = component_pods(cluster, "mps-supervisor").await?;
        ensure!(now.len() == 1 && now.values().all(|(_, image)| image.ends_with(":next")), "{now:?}");
        let now = cluster.mps_client("mps").await?;
        ensure!(now.server != connected.server, "the client is still connected to the old server");
        Ok(())
    })
    .await
}

/// Pods to start while two daemons overlap, which takes a few seconds.
const NEW_PODS: u32 = 6;
/// The interval between these pods.
const POD_INTERVAL: Duration = Duration::from_millis(300);

/// Upgrades the release while pods with such a claim start. Two daemons must overlap, one of them
/// always ready. The pods must run, and neither daemon may refuse a claim because of devices that
/// the other has published.
pub(super) async fn upgrade_with_overlap(
    cluster: &Cluster,
    arguments: &[&str],
    tag: &str,
    claim: Claim<'_>,
) -> Result<()> {
    // A daemon that is not ready would be replaced without an overlap, and after an outage the
    // kubelet reports readiness only after the next probe.
    eventually("a ready daemon", || async {
        let now = component_pods(cluster, "node").await?;
        ensure!(now.len() == 1 && now.values().all(|(ready, _)| *ready), "{now:?}");
        Ok(())
    })
    .await?;
    let mut helm = cluster.spawn_helm(&[&HELM_UPGRADE[..], arguments].concat())?;
    let (mut most, mut least, mut new) = (0, usize::MAX, 0);
    let (began, mut overlap) = (Instant::now(), None);
    // Helm may return before the old daemon has ended.
    loop {
        let now = component_pods(cluster, "node").await?;
        most = most.max(now.len());
        least = least.min(now.values().filter(|(ready, _)| *ready).count());
        if now.len() > 1 {
            // Claims during the overlap: before the new daemon publishes, before it is called, and after.
            let since = overlap.get_or_insert_with(Instant::now).elapsed();
            if new < NEW_PODS && since >= POD_INTERVAL * new {
                cluster.start_pod(&format!("new-{new}"), claim).await?;
                new += 1;
            }
        }
        let replaced = now.len() == 1 && now.values().all(|(_, image)| image.ends_with(tag));
        match helm.try_wait()? {
            Some(status) if !status.success() => bail!("helm upgrade: {status}"),
            Some(_) if replaced => break,
            _ => ensure!(
                began.elapsed() < Duration::from_secs(240),
                "the upgrade is not complete after four minutes: {now:?}"
            ),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ensure!(most > 1, "no two daemons overlapped");
    ensure!(least > 0, "at one moment no daemon was ready");
    for pod in (0..new).map(|n| format!("new-{n}")) {
        cluster.wait_ready(&pod).await?;
        cluster.verify_visible_devices(&pod).await?;
        for claim in cluster.claims_of(&pod).await? {
            let failed = cluster.pod_events(&claim.name_any(), "PrepareFailed").await?;
            ensure!(failed.is_empty(), "the claim of {pod} was refused: {:?}", failed[0].message);
        }
    }
    Ok(())
}

pub(super) async fn uninstall_is_refused_while_claims_exist(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(2).uuid;
    cluster.create_template("slice", devices(&[request("gpu", MIG, &profile_on("1g.10gb", &gpu))])).await?;
    cluster.start_pod("lives", Claim::Template("slice")).await?;
    cluster.wait_ready("lives").await?;
    ensure!(cluster.helm(&HELM_UNINSTALL).is_err(), "an uninstall under a running pod was accepted");
    let log = hook_log(cluster).await?;
    ensure!(log.contains("default/lives-"), "the refusal does not name the claim: {log}");
    // The driver still works.
    ensure!(cluster.restarts("lives").await? == 0, "the pod was restarted");
    cluster.start_pod("more", Claim::Template("slice")).await?;
    cluster.wait_ready("more").await?;
    for pod in ["lives", "more"] {
        cluster.delete_pod(pod).await?;
    }
    uninstall_and_verify(cluster).await?;
    cluster.ctl("install", "")?;
    cluster.wait_for_slices().await
}

/// The output of the hook's job.
async fn hook_log(cluster: &Cluster) -> Result<String> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "divvy");
    let job = ListParams::default().labels("app.kubernetes.io/component=decommission");
    let pod = pods.list(&job).await?.items.pop().context("no pod of the hook")?;
    Ok(pods.logs(&pod.name_any(), &LogParams::default()).await?)
}

/// Uninstalls the release, and verifies that nothing of it is left.
pub(super) async fn uninstall_and_verify(cluster: &Cluster) -> Result<()> {
    cluster.helm(&HELM_UNINSTALL)?;
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    eventually("no leftovers", || async {
        let left = cluster.output(&["leftovers"])?;
        ensure!(left.trim().is_empty(), "{left}");
        ensure!(slices.list(&ListParams::default()).await?.items.is_empty(), "slices are left");
        ensure!(classes.list(&ListParams::default()).await?.items.is_empty(), "classes are left");
        Ok(())
    })
    .await?;
    for node in crate::cluster::NODES {
        for gpu in cluster.gpus(node)? {
            ensure!(gpu.instances.is_empty() && !gpu.mig.current, "{node} is left with {gpu:?}");
        }
    }
    Ok(())
}
