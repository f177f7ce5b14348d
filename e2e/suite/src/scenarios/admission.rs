//! What the cluster as a whole does for pods: names that old pods know, classes
//! by profile, and a word before anybody waits.

use crate::objects::{Claim, GPU, MPS, Worker, admin_request, devices, request, uuid};
use crate::world::{World, eventually};
use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

/// Pods written for a device plugin: no claim, no class.
pub(super) async fn pods_of_the_device_plugin_run_unchanged(world: &World) -> Result<()> {
    let named = [
        ("whole", "nvidia.com/gpu", 1),
        ("shared-a", "nvidia.com/gpu.shared", 1),
        ("shared-b", "nvidia.com/gpu.shared", 1),
        ("slice", "nvidia.com/mig-1g.10gb", 1),
        ("two", "nvidia.com/gpu", 2),
    ];
    eventually("the class of a profile", || async {
        let classes: Api<DeviceClass> = Api::all(world.client.clone());
        classes.get("mig-1g.10gb.divvy.dev").await?;
        Ok(())
    })
    .await?;
    for (pod, resource, count) in named {
        world.start(&Worker::new(pod).limit(resource, count)).await?;
    }
    for (pod, _, count) in named {
        world.ready(pod).await?;
        let seen = world.sees_its_devices(pod).await?;
        let expected = if pod == "slice" { 2 } else { count as usize };
        ensure!(seen.len() == expected, "{pod} sees {seen:?}");
    }
    Ok(())
}

pub(super) async fn each_profile_has_its_class(world: &World) -> Result<()> {
    let classes: Api<DeviceClass> = Api::all(world.client.clone());
    let class = "mig-1g.10gb.divvy.dev";
    let mut profiles = std::collections::BTreeSet::new();
    for node in crate::world::NODES {
        for device in world.devices(node).await?.into_values() {
            let profile = device.attributes.unwrap_or_default().remove("profile");
            profiles.extend(profile.and_then(|profile| profile.string));
        }
    }
    ensure!(profiles.iter().any(|name| name.contains('+')), "no profile with a + among {profiles:?}");
    eventually("a class for each profile", || async {
        for profile in &profiles {
            let name = format!("mig-{}.divvy.dev", profile.replace('+', "."));
            let class = classes.get(&name).await?;
            ensure!(!class.owner_references().is_empty(), "{name} would stay after an uninstall");
            let resource = class.spec.and_then(|spec| spec.extended_resource_name);
            let expected = format!("nvidia.com/mig-{}", profile.replace('+', "."));
            ensure!(resource.as_ref() == Some(&expected), "{name} stands for {resource:?}");
        }
        Ok(())
    })
    .await?;
    world.template("small", devices(&[request("gpu", class, "true")])).await?;
    world.pod("a", Claim::Template("small")).await?;
    world.ready("a").await?;
    world.sees_its_devices("a").await?;
    ensure!(world.holds_one("a").await?.device.contains("-1g10gb-"), "not of the profile");
    // One that is deleted by mistake comes back.
    classes.delete(class, &DeleteParams::default()).await?;
    eventually("the class again", || async {
        classes.get(class).await?;
        Ok(())
    })
    .await
}

/// A device request with time slicing for a MIG instance, which would do nothing.
fn useless() -> Value {
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

/// The sentence with which an object is refused.
async fn refused(what: &str, made: impl Future<Output = Result<()>>) -> Result<String> {
    match made.await {
        Err(error) => Ok(format!("{error:#}")),
        Ok(()) => bail!("{what} was accepted"),
    }
}

pub(super) async fn what_prepare_would_refuse_is_not_accepted(world: &World) -> Result<()> {
    let says = |what: &str, sentence: &str, words: &[&str]| {
        let holds = words.iter().all(|word| sentence.contains(word));
        ensure!(holds, "{what} is refused, but not for {words:?}: {sentence}");
        Ok(())
    };
    // A webhook answers from the moment its certificate is known.
    eventually("a verdict", || async {
        let made = world.claim("useless", useless()).await;
        if made.is_ok() {
            world.claims.delete("useless", &DeleteParams::default()).await?;
        }
        ensure!(made.is_err(), "the claim was accepted");
        Ok(())
    })
    .await?;
    let sentence = refused("a claim", world.claim("useless", useless())).await?;
    says("a claim", &sentence, &["TimeSlicing", "MIG instance"])?;
    let sentence = refused("a template", world.template("useless", useless())).await?;
    says("a template", &sentence, &["TimeSlicing", "MIG instance"])?;

    let classes: Api<DeviceClass> = Api::all(world.client.clone());
    let class: DeviceClass = serde_json::from_value(json!({
        "metadata": {"name": "mistyped"},
        "spec": {"config": [{"opaque": {"driver": "gpu.divvy.dev", "parameters": {
            "apiVersion": "resource.divvy.dev/v1alpha1", "kind": "GpuConfig", "shraing": {},
        }}}]},
    }))?;
    let made = async { Ok(classes.create(&PostParams::default(), &class).await.map(|_| ())?) };
    says("a class", &refused("a class", made).await?, &["shraing"])?;

    let gpus = world.gpus("n1")?;
    for (name, gpu) in [("one", &gpus[0]), ("two", &gpus[1])] {
        world.template(name, devices(&[request("gpu", MPS, &uuid(&gpu.uuid))])).await?;
    }
    let both = Worker::new("both").claim(Claim::Template("one")).claim(Claim::Template("two"));
    says("a pod", &refused("a pod", world.start(&both)).await?, &["MPS"])?;
    let mut covered = Worker::new("covered").claim(Claim::Template("one")).json();
    covered["spec"]["volumes"] = json!([{"name": "shm", "emptyDir": {"medium": "Memory"}}]);
    covered["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "shm", "mountPath": "/dev/shm"}]);
    let pod: Pod = serde_json::from_value(covered)?;
    let made = async { Ok(world.pods.create(&PostParams::default(), &pod).await.map(|_| ())?) };
    says("a pod", &refused("a pod", made).await?, &["/dev/shm"])?;
    Ok(())
}

/// A daemon's token names its node, and with it no slice of another can be written.
pub(super) async fn a_nodes_driver_writes_its_own_slices_only(world: &World) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), "divvy");
    let here = ListParams::default().labels("app.kubernetes.io/component=node").fields("spec.nodeName=n1");
    let pod = pods.list(&here).await?.items.pop().context("no daemon on n1")?;
    let accounts: Api<ServiceAccount> = Api::namespaced(world.client.clone(), "divvy");
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
    let slices: Api<ResourceSlice> = Api::all(world.with_token(token)?);
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
    let made = async { Ok(slices.create(&dry, &slice("n2")?).await.map(|_| ())?) };
    let sentence = refused("a slice of another node", made).await?;
    ensure!(sentence.contains("the daemon of node n1"), "it is refused, but says {sentence}");
    Ok(())
}

/// What a claim holds is told in its status, for people and for other controllers.
pub(super) async fn a_claims_status_tells_its_devices(world: &World) -> Result<()> {
    let gpu = world.gpus("n1")?.remove(4).uuid;
    world.claim("owns", devices(&[request("gpu", GPU, &uuid(&gpu))])).await?;
    world.claim("looks-on", devices(&[admin_request("gpu", GPU, &uuid(&gpu))])).await?;
    // Not the other way round: the allocator wants room for whoever looks on, and counts it no longer.
    for name in ["looks-on", "owns"] {
        world.pod(name, Claim::Shared(name)).await?;
        world.ready(name).await?;
        eventually(&format!("the status of claim {name}"), || async {
            let claim = world.claims.get(name).await?;
            let devices = claim.status.and_then(|status| status.devices).unwrap_or_default();
            let told = devices.first().context("no device in it")?;
            let data = serde_json::to_value(&told.data)?;
            ensure!(data.to_string().contains(&gpu), "it says {data}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// While a device plugin serves a name of ours on a node, our GPUs there are not
/// given out: the two would not know of each other.
pub(super) async fn beside_a_device_plugin_our_gpus_wait(world: &World) -> Result<()> {
    world.serves("n2", "nvidia.com/gpu", 2).await?;
    let result = beside(world).await;
    world.serves("n2", "nvidia.com/gpu", 0).await?;
    result?;
    tainted(world, false).await?;
    // What waited runs now.
    world.ready("waits").await?;
    world.sees_its_devices("waits").await?;
    Ok(())
}

async fn beside(world: &World) -> Result<()> {
    tainted(world, true).await?;
    let l4 = "device.attributes['gpu.divvy.dev'].productName.contains('L4')";
    world.template("small", devices(&[request("gpu", GPU, l4)])).await?;
    world.pod("waits", Claim::Template("small")).await?;
    world.unschedulable("waits").await?;
    let told = world.node_events("DevicePlugin").await?;
    ensure!(!told.is_empty(), "no event tells it");
    Ok(())
}

async fn tainted(world: &World, expected: bool) -> Result<()> {
    eventually(&format!("GPUs of n2 tainted: {expected}"), || async {
        let key = "gpu.divvy.dev/device-plugin";
        let devices = world.devices("n2").await?;
        let with = devices.values().filter(|device| {
            device.taints.iter().flatten().any(|taint| taint.key == key && taint.effect == "NoSchedule")
        });
        let with = with.count();
        ensure!(with == if expected { devices.len() } else { 0 }, "{with} of {} are", devices.len());
        Ok(())
    })
    .await
}
