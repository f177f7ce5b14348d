//! Extended resources of device plugins, classes per MIG profile, admission checks, and the status of claims.

use crate::cluster::{Cluster, eventually};
use crate::objects::{Claim, GPU, MPS, Worker, admin_request, devices, request, uuid};
use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

/// Pods that were written for a device plugin: without claim and class.
pub(super) async fn device_plugin_pods_run_unchanged(cluster: &Cluster) -> Result<()> {
    let named = [
        ("whole", "nvidia.com/gpu", 1),
        ("shared-a", "nvidia.com/gpu.shared", 1),
        ("shared-b", "nvidia.com/gpu.shared", 1),
        ("slice", "nvidia.com/mig-1g.10gb", 1),
        ("two", "nvidia.com/gpu", 2),
    ];
    eventually("the DeviceClass of a profile", || async {
        let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
        classes.get("mig-1g.10gb.divvy.dev").await?;
        Ok(())
    })
    .await?;
    for (pod, resource, count) in named {
        cluster.start_worker(&Worker::new(pod).limit(resource, count)).await?;
    }
    for (pod, _, count) in named {
        cluster.wait_ready(pod).await?;
        let seen = cluster.verify_visible_devices(pod).await?;
        let expected = if pod == "slice" { 2 } else { count as usize };
        ensure!(seen.len() == expected, "{pod} sees {seen:?}");
    }
    Ok(())
}

pub(super) async fn each_mig_profile_has_a_device_class(cluster: &Cluster) -> Result<()> {
    let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    let class = "mig-1g.10gb.divvy.dev";
    let mut profiles = std::collections::BTreeSet::new();
    for node in crate::cluster::NODES {
        for device in cluster.devices(node).await?.into_values() {
            let profile = device.attributes.unwrap_or_default().remove("profile");
            profiles.extend(profile.and_then(|profile| profile.string));
        }
    }
    ensure!(profiles.iter().any(|name| name.contains('+')), "no profile contains a +: {profiles:?}");
    eventually("a class for each profile", || async {
        for profile in &profiles {
            let name = format!("mig-{}.divvy.dev", profile.replace('+', "."));
            let class = classes.get(&name).await?;
            ensure!(
                !class.owner_references().is_empty(),
                "{name} has no owner, so it would stay after an uninstall"
            );
            let resource = class.spec.and_then(|spec| spec.extended_resource_name);
            let expected = format!("nvidia.com/mig-{}", profile.replace('+', "."));
            ensure!(resource.as_ref() == Some(&expected), "{name} has the extended resource {resource:?}");
        }
        Ok(())
    })
    .await?;
    cluster.create_template("small", devices(&[request("gpu", class, "true")])).await?;
    cluster.start_pod("a", Claim::Template("small")).await?;
    cluster.wait_ready("a").await?;
    cluster.verify_visible_devices("a").await?;
    ensure!(cluster.single_device("a").await?.device.contains("-1g10gb-"), "the device has another profile");
    // A deleted class is recreated.
    classes.delete(class, &DeleteParams::default()).await?;
    eventually("the recreated class", || async {
        classes.get(class).await?;
        Ok(())
    })
    .await
}

/// A device request with time slicing for a MIG instance, which has no effect.
fn ineffective_claim() -> Value {
    let mut spec = devices(&[request("gpu", "mig.divvy.dev", "true")]);
    spec["devices"]["config"] = json!([{"opaque": {
        "driver": "gpu.divvy.dev",
        "parameters": {
            "apiVersion": "resource.divvy.dev/v1alpha1",
            "kind": "MigDeviceConfig",
            "sharing": {"strategy": "TimeSlicing"},
        },
    }}]);
    spec
}

/// The error message with which an object is rejected.
async fn rejection(what: &str, created: impl Future<Output = Result<()>>) -> Result<String> {
    match created.await {
        Err(error) => Ok(format!("{error:#}")),
        Ok(()) => bail!("{what} was accepted"),
    }
}

pub(super) async fn admission_rejects_claims_that_prepare_would_refuse(cluster: &Cluster) -> Result<()> {
    let mentions = |what: &str, message: &str, words: &[&str]| {
        let contains_all = words.iter().all(|word| message.contains(word));
        ensure!(contains_all, "{what} is rejected, but not because of {words:?}: {message}");
        Ok(())
    };
    // The webhook works once its certificate is known to the API server.
    eventually("the webhook", || async {
        let created = cluster.create_claim("useless", ineffective_claim()).await;
        if created.is_ok() {
            cluster.claims.delete("useless", &DeleteParams::default()).await?;
        }
        ensure!(created.is_err(), "the claim was accepted");
        Ok(())
    })
    .await?;
    let message = rejection("a claim", cluster.create_claim("useless", ineffective_claim())).await?;
    mentions("a claim", &message, &["TimeSlicing", "MIG instance"])?;
    let message = rejection("a template", cluster.create_template("useless", ineffective_claim())).await?;
    mentions("a template", &message, &["TimeSlicing", "MIG instance"])?;

    let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    let class: DeviceClass = serde_json::from_value(json!({
        "metadata": {"name": "mistyped"},
        "spec": {"config": [{"opaque": {"driver": "gpu.divvy.dev", "parameters": {
            "apiVersion": "resource.divvy.dev/v1alpha1", "kind": "GpuConfig", "shraing": {},
        }}}]},
    }))?;
    let created = async { Ok(classes.create(&PostParams::default(), &class).await.map(|_| ())?) };
    mentions("a class", &rejection("a class", created).await?, &["shraing"])?;

    let gpus = cluster.gpus("n1")?;
    for (name, gpu) in [("one", &gpus[0]), ("two", &gpus[1])] {
        cluster.create_template(name, devices(&[request("gpu", MPS, &uuid(&gpu.uuid))])).await?;
    }
    let both = Worker::new("both").claim(Claim::Template("one")).claim(Claim::Template("two"));
    mentions("a pod", &rejection("a pod", cluster.start_worker(&both)).await?, &["MPS"])?;
    let mut covered = Worker::new("covered").claim(Claim::Template("one")).json();
    covered["spec"]["volumes"] = json!([{"name": "shm", "emptyDir": {"medium": "Memory"}}]);
    covered["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "shm", "mountPath": "/dev/shm"}]);
    let pod: Pod = serde_json::from_value(covered)?;
    let created = async { Ok(cluster.pods.create(&PostParams::default(), &pod).await.map(|_| ())?) };
    mentions("a pod", &rejection("a pod", created).await?, &["/dev/shm"])?;
    Ok(())
}

/// A daemon's token is bound to its node, so it cannot write slices of another node.
pub(super) async fn node_daemon_writes_only_its_own_slices(cluster: &Cluster) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "divvy");
    let here = ListParams::default().labels("app.kubernetes.io/component=node").fields("spec.nodeName=n1");
    let pod = pods.list(&here).await?.items.pop().context("no daemon on n1")?;
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), "divvy");
    let request = TokenRequest {
        spec: Some(TokenRequestSpec {
            bound_object_ref: Some(BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(pod.name_any()),
                uid: pod.uid(),
            }),
            ..TokenRequestSpec::default()
        }),
        ..TokenRequest::default()
    };
    let account = pod.spec.and_then(|spec| spec.service_account_name).context("no service account")?;
    let token = accounts.create_token_request(&account, &PostParams::default(), &request).await?;
    let token = token.status.and_then(|status| status.token).context("no token")?;
    let slices: Api<ResourceSlice> = Api::all(cluster.with_token(token)?);
    let slice = |node: &str| -> Result<ResourceSlice> {
        Ok(serde_json::from_value(json!({
            "metadata": {"generateName": "divvy-e2e-"},
            "spec": {
                "driver": "gpu.divvy.dev", "nodeName": node,
                "pool": {"name": node, "generation": 0, "resourceSliceCount": 1},
            },
        }))?)
    };
    let dry = PostParams { dry_run: true, field_manager: None };
    slices.create(&dry, &slice("n1")?).await.context("a slice of its own node")?;
    let created = async { Ok(slices.create(&dry, &slice("n2")?).await.map(|_| ())?) };
    let message = rejection("a slice of another node", created).await?;
    ensure!(message.contains("the daemon of node n1"), "it is refused, but the message is {message}");
    Ok(())
}

/// The status of a claim lists its devices, for users and for other controllers.
pub(super) async fn claim_status_lists_its_devices(cluster: &Cluster) -> Result<()> {
    let gpu = cluster.gpus("n1")?.remove(4).uuid;
    cluster.create_claim("owner", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    cluster.create_claim("admin", devices(&[admin_request("gpu", GPU, &uuid(&gpu))])).await?;
    // In this order: the allocator requires free capacity for admin access, although it does not
    // count it later.
    for name in ["admin", "owner"] {
        cluster.start_pod(name, Claim::Shared(name)).await?;
        cluster.wait_ready(name).await?;
        eventually(&format!("the status of claim {name}"), || async {
            let claim = cluster.claims.get(name).await?;
            let devices = claim.status.and_then(|status| status.devices).unwrap_or_default();
            let device = devices.first().context("it lists no device")?;
            let data = serde_json::to_value(&device.data)?;
            ensure!(data.to_string().contains(&gpu), "the device data is {data}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// While a device plugin serves one of our resource names on a node, our GPUs there must not be
/// allocated. The plugin and the driver do not know of each other's allocations.
pub(super) async fn gpus_are_tainted_while_a_device_plugin_runs(cluster: &Cluster) -> Result<()> {
    cluster.set_extended_resource("n2", "nvidia.com/gpu", 2).await?;
    let result = with_device_plugin(cluster).await;
    cluster.set_extended_resource("n2", "nvidia.com/gpu", 0).await?;
    result?;
    wait_tainted(cluster, false).await?;
    // The waiting pod runs now.
    cluster.wait_ready("waits").await?;
    cluster.verify_visible_devices("waits").await?;
    Ok(())
}

async fn with_device_plugin(cluster: &Cluster) -> Result<()> {
    wait_tainted(cluster, true).await?;
    let l4 = "device.attributes['gpu.divvy.dev'].productName.contains('L4')";
    cluster.create_template("small", devices(&[request("gpu", GPU, l4)])).await?;
    cluster.start_pod("waits", Claim::Template("small")).await?;
    cluster.wait_unschedulable("waits").await?;
    let events = cluster.node_events("DevicePlugin").await?;
    ensure!(!events.is_empty(), "there is no DevicePlugin event");
    Ok(())
}

async fn wait_tainted(cluster: &Cluster, expected: bool) -> Result<()> {
    eventually(&format!("GPUs of n2 tainted: {expected}"), || async {
        let key = "gpu.divvy.dev/device-plugin";
        let devices = cluster.devices("n2").await?;
        let tainted = devices.values().filter(|device| {
            device.taints.iter().flatten().any(|taint| taint.key == key && taint.effect == "NoSchedule")
        });
        let tainted = tainted.count();
        ensure!(
            tainted == if expected { devices.len() } else { 0 },
            "{tainted} of {} are tainted",
            devices.len()
        );
        Ok(())
    })
    .await
}
