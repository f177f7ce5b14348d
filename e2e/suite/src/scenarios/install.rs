//! What an administrator does with the release: configure, upgrade, uninstall.

use crate::objects::{Claim, GPU, MIG, MPS, TIMESLICE, Worker, devices, profile_on, request, uuid};
use crate::world::{World, eventually};
use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, LogParams};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Helm's newer way to wait knows no DaemonSet that is replaced by hand, as the keeper's is.
pub(super) const CHART: [&str; 7] =
    ["upgrade", "divvy", "{chart}", "--values", "{values}", "--wait=legacy", "--timeout=3m"];

/// Longer than the chart lets the nodes take.
const UNINSTALL: [&str; 4] = ["uninstall", "divvy", "--wait", "--timeout=6m"];

/// Pods of a part of Divvy on n1: by UID, whether ready, and the image.
async fn parts(world: &World, component: &str) -> Result<BTreeMap<String, (bool, String)>> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), "divvy");
    let label = format!("app.kubernetes.io/component={component}");
    let here = ListParams::default().labels(&label).fields("spec.nodeName=n1,status.phase=Running");
    let of = |pod: Pod| {
        // Not by its containers: of a node that was away they are ready still, and its pods are taken to be none.
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

pub(super) async fn a_node_configuration_takes_effect_without_a_restart(world: &World) -> Result<()> {
    let before: Vec<_> = parts(world, "node").await?.into_keys().collect();
    let result = configured(world).await;
    world.clean().await?;
    // The other scenarios want every mode everywhere.
    world.helm(&CHART)?;
    eventually("every mode everywhere", || async {
        let on = world.devices("n1").await?.values().all(|device| device.taints.is_none());
        ensure!(on, "some device is tainted");
        Ok(())
    })
    .await?;
    result?;
    let after: Vec<_> = parts(world, "node").await?.into_keys().collect();
    ensure!(before == after, "the daemon's pod was replaced");
    Ok(())
}

async fn configured(world: &World) -> Result<()> {
    let rules = r#"nodeConfig={"rules": [
        {"match": {"products": ["*H100*"], "indices": [3]}, "interval": "Long", "slots": 2},
        {"match": {"indices": [5]}, "modes": ["whole", "timeslice"]}]}"#;
    world.helm(&[&CHART[..], &["--set-json", rules]].concat())?;
    let device = async |name: &str| {
        world.devices("n1").await?.remove(name).with_context(|| format!("{name} is not published"))
    };
    eventually("the configuration in the slices", || async {
        let slots = device("gpu-3-timeslice").await?;
        ensure!(text(&slots, "interval") == Some("Long"), "the interval is {:?}", text(&slots, "interval"));
        let off = device("gpu-5-mps").await?;
        ensure!(off.taints.is_some(), "a mode that is off has no taint");
        Ok(())
    })
    .await?;
    let own =
        async |name: &str| anyhow::Ok(text(&device(name).await?, "uuid").context("no UUID")?.to_owned());
    let (third, fifth) = (own("gpu-3").await?, own("gpu-5").await?);
    world.template("turns", devices(&[request("gpu", TIMESLICE, &uuid(&third))])).await?;
    world.template("off", devices(&[request("gpu", MPS, &uuid(&fifth))])).await?;
    for pod in ["a", "b"] {
        world.pod(pod, Claim::Template("turns")).await?;
        world.ready(pod).await?;
        world.sees_its_devices(pod).await?;
    }
    let interval = || {
        let gpu = world.gpus("n1")?.into_iter().find(|gpu| gpu.uuid == third).context("no such GPU")?;
        anyhow::Ok(gpu.timeslice)
    };
    ensure!(interval()? == 3, "its interval is {}", interval()?);
    // Two slots, both taken; and a mode that is off.
    world.pod("c", Claim::Template("turns")).await?;
    world.pod("d", Claim::Template("off")).await?;
    for pod in ["c", "d"] {
        world.unschedulable(pod).await?;
    }
    world.delete_pod("a").await?;
    world.ready("c").await?;
    ensure!(interval()? == 3, "the first one's end reset the interval of the others");
    for pod in ["b", "c"] {
        world.delete_pod(pod).await?;
    }
    eventually("the driver's own interval again", || async {
        ensure!(interval()? == 0, "it is {}", interval()?);
        Ok(())
    })
    .await
}

/// Every mode in use; two daemons overlap, and at no moment is there none.
pub(super) async fn an_upgrade_disturbs_no_pod(world: &World) -> Result<()> {
    let result = upgraded(world).await;
    world.clean().await?;
    world.helm(&CHART)?;
    result
}

async fn upgraded(world: &World) -> Result<()> {
    let gpus = world.gpus("n1")?;
    let wanted = [
        ("whole", request("gpu", GPU, &uuid(&gpus[0].uuid))),
        ("mig", request("gpu", MIG, &profile_on("1g.10gb", &gpus[1].uuid))),
        ("timeslice", request("gpu", TIMESLICE, &uuid(&gpus[2].uuid))),
        ("mps", request("gpu", MPS, &uuid(&gpus[3].uuid))),
    ];
    for (mode, request) in &wanted {
        world.template(mode, devices(std::slice::from_ref(request))).await?;
        let worker = Worker::new(mode).claim(Claim::Template(mode));
        let worker = if *mode == "mps" { worker.work("divvy-sim client") } else { worker };
        world.start(&worker).await?;
    }
    let mut before = Vec::new();
    for (mode, _) in &wanted {
        world.ready(mode).await?;
        before.push(world.sees_its_devices(mode).await?);
    }
    let connected = world.connected("mps").await?;
    let keepers: Vec<_> = parts(world, "keeper").await?.into_keys().collect();
    rolls_out(world, &["--set=image.tag=next"], ":next", Claim::Template("mig")).await?;
    for ((mode, _), before) in wanted.iter().zip(&before) {
        ensure!(world.restarts(mode).await? == 0, "pod {mode} was restarted");
        ensure!(world.sees_its_devices(mode).await? == *before, "pod {mode} sees another device");
    }
    let after: Vec<_> = parts(world, "keeper").await?.into_keys().collect();
    ensure!(keepers == after, "the keeper, which waits for somebody to delete its pod, was replaced");
    ensure!(world.connected("mps").await? == connected, "the MPS client had to connect again");

    let pods: Api<Pod> = Api::namespaced(world.client.clone(), "divvy");
    let keeper =
        ListParams::default().labels("app.kubernetes.io/component=keeper").fields("spec.nodeName=n1");
    pods.delete_collection(&DeleteParams::default(), &keeper).await?;
    eventually("the new keeper and its client", || async {
        let now = parts(world, "keeper").await?;
        ensure!(now.len() == 1 && now.values().all(|(_, image)| image.ends_with(":next")), "{now:?}");
        let now = world.connected("mps").await?;
        ensure!(now.server != connected.server, "the client is still at the old server");
        Ok(())
    })
    .await
}

/// So many pods come while two daemons overlap, which takes a few seconds.
const MIDST: u32 = 6;
const BETWEEN: Duration = Duration::from_millis(300);

/// Upgrades the release while pods with such a claim come: two daemons overlap, at no moment is there none, and the
/// pods run, none of their claims refused by the one daemon for what the other has published.
pub(super) async fn rolls_out(world: &World, arguments: &[&str], tag: &str, claim: Claim<'_>) -> Result<()> {
    // A daemon that is not ready is replaced without one beside it, and after an
    // outage the kubelet tells of readiness only with its next probe.
    eventually("a daemon that is ready", || async {
        let now = parts(world, "node").await?;
        ensure!(now.len() == 1 && now.values().all(|(ready, _)| *ready), "{now:?}");
        Ok(())
    })
    .await?;
    let mut helm = world.spawn_helm(&[&CHART[..], arguments].concat())?;
    let (mut most, mut least, mut new) = (0, usize::MAX, 0);
    let (began, mut overlap) = (Instant::now(), None);
    // Helm may be content before the old daemon has gone.
    loop {
        let now = parts(world, "node").await?;
        most = most.max(now.len());
        least = least.min(now.values().filter(|(ready, _)| *ready).count());
        if now.len() > 1 {
            // In the midst of it claims come: before the new one publishes, before it is called, and after.
            let since = overlap.get_or_insert_with(Instant::now).elapsed();
            if new < MIDST && since >= BETWEEN * new {
                world.pod(&format!("new-{new}"), claim).await?;
                new += 1;
            }
        }
        let replaced = now.len() == 1 && now.values().all(|(_, image)| image.ends_with(tag));
        match helm.try_wait()? {
            Some(status) if !status.success() => bail!("helm upgrade: {status}"),
            Some(_) if replaced => break,
            _ => ensure!(began.elapsed() < Duration::from_secs(240), "not after four minutes: {now:?}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ensure!(most > 1, "no two daemons overlapped");
    ensure!(least > 0, "for a moment no daemon was ready");
    for pod in (0..new).map(|n| format!("new-{n}")) {
        world.ready(&pod).await?;
        world.sees_its_devices(&pod).await?;
        for claim in world.claims_of(&pod).await? {
            let failed = world.pod_events(&claim.name_any(), "PrepareFailed").await?;
            ensure!(failed.is_empty(), "the claim of {pod} was refused: {:?}", failed[0].message);
        }
    }
    Ok(())
}

pub(super) async fn uninstall_is_refused_while_claims_live_and_leaves_nothing(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(2).uuid;
    world.template("slice", devices(&[request("gpu", MIG, &profile_on("1g.10gb", &gpu))])).await?;
    world.pod("lives", Claim::Template("slice")).await?;
    world.ready("lives").await?;
    ensure!(world.helm(&UNINSTALL).is_err(), "an uninstall under a running pod was accepted");
    let said = leave_said(world).await?;
    ensure!(said.contains("default/lives-"), "the refusal does not name the claim: {said}");
    // Nothing was taken away.
    ensure!(world.restarts("lives").await? == 0, "the pod was restarted");
    world.pod("more", Claim::Template("slice")).await?;
    world.ready("more").await?;
    for pod in ["lives", "more"] {
        world.delete_pod(pod).await?;
    }
    is_uninstalled(world).await?;
    world.ctl("install", "")?;
    world.published().await
}

/// What the job of the hook printed.
async fn leave_said(world: &World) -> Result<String> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), "divvy");
    let job = ListParams::default().labels("app.kubernetes.io/component=leave");
    let pod = pods.list(&job).await?.items.pop().context("no pod of the hook")?;
    Ok(pods.logs(&pod.name_any(), &LogParams::default()).await?)
}

/// Uninstalls the release: nothing of it is left.
pub(super) async fn is_uninstalled(world: &World) -> Result<()> {
    world.helm(&UNINSTALL)?;
    let slices: Api<ResourceSlice> = Api::all(world.client.clone());
    let classes: Api<DeviceClass> = Api::all(world.client.clone());
    eventually("nothing left", || async {
        let left = world.output(&["leftovers"])?;
        ensure!(left.trim().is_empty(), "{left}");
        ensure!(slices.list(&ListParams::default()).await?.items.is_empty(), "slices are left");
        ensure!(classes.list(&ListParams::default()).await?.items.is_empty(), "classes are left");
        Ok(())
    })
    .await?;
    for node in crate::world::NODES {
        for gpu in world.gpus(node)? {
            ensure!(gpu.instances.is_empty() && !gpu.mig.current, "{node} is left with {gpu:?}");
        }
    }
    Ok(())
}
