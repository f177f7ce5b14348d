//! Shares of a GPU's time: each pod has what its claim and its class say, while pods come and classes change.

use crate::objects::{Claim, SHARE, Worker, devices, request, taking, uuid};
use crate::world::{World, eventually};
use anyhow::{Result, ensure};
use divvy_api::top::ShareNow;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

/// A program that never rests, and says every three seconds what it had.
const WORK: &str = "(exec cuda-client 64 work)";

/// Two pods that never rest: each has its part of the GPU's time while the other works, and no more, with the node daemon
/// dead neither; and its part again when that is back.
pub(super) async fn two_shares_of_a_gpu_get_their_parts_of_its_time(world: &World) -> Result<()> {
    let gpu = uuid(&world.gpus("n1")?.remove(0).uuid);
    let parts = [("thirty", "30"), ("sixty", "60")];
    for (name, cores) in parts {
        let taken = taking(request("gpu", SHARE, &gpu), &[("memory", "10Gi"), ("cores", cores)]);
        world.template(name, devices(&[taken])).await?;
        world.start(&Worker::new(name).claim(Claim::Template(name)).work(WORK)).await?;
        // One after the other: while the scheduler (1.37.0) writes a claim it counts its capacity twice, and whoever
        // finds no room in that moment is not tried again before something changes.
        world.ready(name).await?;
    }
    // What each got before the other began, and until the node saw both, is not its part.
    have_their_parts(world, parts, 4).await?;
    world.ctl("kill", "n1-driver")?;
    for (name, cores) in parts {
        let since = world.windows(name).await?;
        for window in since + 1..since + 4 {
            has_no_more(world, name, cores.parse()?, window).await?;
        }
    }
    world.ctl("start", "n1-driver")?;
    let since = world.windows(parts[1].0).await?;
    have_their_parts(world, parts, since + 1).await?;
    // Whoever looks on from elsewhere sees both.
    let shown = world.output(&["top", "n1"])?;
    let shown: Vec<ShareNow> = shown.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let works = |share: &&ShareNow| share.claim.is_some() && share.busy_percent.is_some_and(|busy| busy > 0);
    let mut asked: Vec<u32> = shown.iter().filter(works).map(|share| share.guarantee_percent).collect();
    asked.sort_unstable();
    ensure!(asked == [30, 60], "divvy top shows {shown:?}");
    // What is guaranteed is not guaranteed twice.
    let eleven = taking(request("gpu", SHARE, &gpu), &[("memory", "1Gi"), ("cores", "11")]);
    world.template("eleven", devices(&[eleven])).await?;
    world.pod("eleven", Claim::Template("eleven")).await?;
    world.unschedulable("eleven").await
}

async fn have_their_parts(world: &World, parts: [(&str, &str); 2], from: usize) -> Result<()> {
    for (name, cores) in parts {
        let busy = its_part(world, name, cores.parse()?, from).await?;
        println!("    a share of {cores} % had {busy} % of the GPU's time");
    }
    Ok(())
}

/// What a pod had in the first window that is its part, or the most it had in one if that is nearly. It must not have had
/// more in any; but a machine with so much on it has moments when a pod does not come to launch.
async fn its_part(world: &World, pod: &str, cores: f64, from: usize) -> Result<f64> {
    let mut had = Vec::new();
    for window in from..from + 8 {
        let busy = has_no_more(world, pod, cores, window).await?;
        if busy >= cores - 3.0 {
            return Ok(busy);
        }
        had.push(busy);
    }
    let most = had.iter().copied().fold(0.0, f64::max);
    ensure!(most >= cores * 0.8, "a share of {cores} % had no more than {had:?} %");
    Ok(most)
}

async fn has_no_more(world: &World, pod: &str, cores: f64, window: usize) -> Result<f64> {
    let busy = world.busy(pod, window).await?;
    ensure!(busy <= cores + 3.0, "a share of {cores} % had {busy} %");
    Ok(busy)
}

/// A class of shares for this scenario, with that ShareConfig.
async fn class(world: &World, name: &str, config: &Value) -> Result<()> {
    let class: DeviceClass = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {
            "selectors": [{"cel": {"expression":
                "device.driver == 'gpu.divvy.dev' && device.attributes['gpu.divvy.dev'].type == 'gpu'"}}],
            "config": configured(config),
        },
    }))?;
    Api::all(world.client.clone()).create(&PostParams::default(), &class).await?;
    Ok(())
}

fn configured(config: &Value) -> Value {
    let mut parameters = json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": "ShareConfig"});
    for (field, value) in config.as_object().into_iter().flatten() {
        parameters[field] = value.clone();
    }
    json!([{"opaque": {"driver": "gpu.divvy.dev", "parameters": parameters}}])
}

/// A pod that works on a share of that class, which names memory only.
async fn works(world: &World, pod: &str, class: &str, gpu: &str) -> Result<()> {
    let taken = taking(request("gpu", class, gpu), &[("memory", "10Gi")]);
    world.template(pod, devices(&[taken])).await?;
    world.start(&Worker::new(pod).claim(Claim::Template(pod)).work(WORK)).await?;
    world.ready(pod).await
}

/// Waits until a pod had that much in three seconds, in per cent of the GPU's time.
async fn comes_to(world: &World, pod: &str, least: f64, most: f64) -> Result<()> {
    let begun = world.windows(pod).await?;
    let had = eventually(&format!("pod {pod} has {least} to {most} % of the GPU's time"), || async {
        let had = world.busy_since(pod, begun).await?;
        ensure!((least..=most).contains(&had), "it had {had} %");
        Ok(had)
    })
    .await?;
    println!("    {pod} had {had} % of the GPU's time");
    Ok(())
}

/// Classes, and a scenario that ends with them.
async fn with_classes(
    world: &World,
    classes: &[(&str, Value)],
    played: impl Future<Output = Result<()>>,
) -> Result<()> {
    for (name, config) in classes {
        class(world, name, config).await?;
    }
    let result = played.await;
    let api: Api<DeviceClass> = Api::all(world.client.clone());
    for (name, _) in classes {
        let deleted = api.delete(name, &DeleteParams::default()).await;
        // Why the scenario failed says more.
        if result.is_ok() {
            deleted?;
        }
    }
    result
}

/// Who changes a class means the pods that run, too.
pub(super) async fn a_changed_class_takes_effect_without_restarting_pods(world: &World) -> Result<()> {
    const CLASS: &str = "tidal.example.com";
    with_classes(world, &[(CLASS, json!({"ceiling": 30}))], async {
        let gpu = uuid(&world.gpus("n1")?.remove(0).uuid);
        works(world, "tidal", CLASS, &gpu).await?;
        comes_to(world, "tidal", 24.0, 33.0).await?;
        let classes: Api<DeviceClass> = Api::all(world.client.clone());
        for (ceiling, least, most) in [(70, 56.0, 73.0), (10, 7.0, 13.0)] {
            let patch = Patch::Merge(json!({"spec": {"config": configured(&json!({"ceiling": ceiling}))}}));
            classes.patch(CLASS, &PatchParams::default(), &patch).await?;
            comes_to(world, "tidal", least, most).await?;
        }
        ensure!(world.restarts("tidal").await? == 0, "the pod was restarted");
        Ok(())
    })
    .await
}

/// A pod of high priority comes and has the GPU; when it goes, the other goes on.
pub(super) async fn a_pod_of_high_priority_goes_first(world: &World) -> Result<()> {
    const LOW: &str = "batch.example.com";
    const HIGH: &str = "serving.example.com";
    let classes = [(LOW, json!({"priority": "Low"})), (HIGH, json!({"priority": "High"}))];
    with_classes(world, &classes, async {
        let gpu = uuid(&world.gpus("n1")?.remove(0).uuid);
        works(world, "batch", LOW, &gpu).await?;
        comes_to(world, "batch", 80.0, 101.0).await?;
        works(world, "serving", HIGH, &gpu).await?;
        comes_to(world, "serving", 80.0, 101.0).await?;
        // It is not starved altogether.
        comes_to(world, "batch", 0.1, 10.0).await?;
        world.delete_pod("serving").await?;
        comes_to(world, "batch", 80.0, 101.0).await?;
        ensure!(world.restarts("batch").await? == 0, "the pod was restarted");
        Ok(())
    })
    .await
}
