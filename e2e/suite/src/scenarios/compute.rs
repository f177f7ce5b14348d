//! Shares of a GPU's compute time: each pod gets the part that its claim and class define, while
//! pods start and classes change.

use crate::cluster::{Cluster, eventually};
use crate::objects::{Claim, SHARE, Worker, devices, request, uuid, with_capacity};
use anyhow::{Result, ensure};
use divvy_api::top::ShareUsage;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

/// A program that always demands the GPU, and reports its part of the time every three seconds.
const BUSY_PROGRAM: &str = "(exec cuda-client 64 work)";

/// Two busy pods each get their part of the GPU's time and no more. Without the node daemon they
/// still get no more, and after its restart they get their parts again.
pub(super) async fn two_shares_get_their_compute_time(cluster: &Cluster) -> Result<()> {
    let gpu = uuid(&cluster.gpus("n1")?.remove(0).uuid);
    let parts = [("thirty", "30"), ("sixty", "60")];
    for (name, cores) in parts {
        let taken = with_capacity(request("gpu", SHARE, &gpu), &[("memory", "10Gi"), ("cores", cores)]);
        cluster.create_template(name, devices(&[taken])).await?;
        cluster.start_worker(&Worker::new(name).claim(Claim::Template(name)).work(BUSY_PROGRAM)).await?;
        // One after the other: while the scheduler (1.37.0) writes a claim, it counts the capacity
        // twice. A pod that does not fit at that moment is only retried after another change.
        cluster.wait_ready(name).await?;
    }
    // The first windows do not count: the other pod may not have started, or the node daemon not
    // have measured both.
    verify_parts(cluster, parts, 4).await?;
    cluster.ctl("kill", "n1-driver")?;
    for (name, cores) in parts {
        let since = cluster.window_count(name).await?;
        for window in since + 1..since + 4 {
            verify_ceiling(cluster, name, cores.parse()?, window).await?;
        }
    }
    cluster.ctl("start", "n1-driver")?;
    let since = cluster.window_count(parts[1].0).await?;
    verify_parts(cluster, parts, since + 1).await?;
    // `divvy top` shows both shares.
    let shown = cluster.output(&["top", "n1"])?;
    let shown: Vec<ShareUsage> = shown.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let is_busy = |share: &&ShareUsage| {
        share.claim.is_some() && share.compute_used_nvml_percent.is_some_and(|busy| busy > 0)
    };
    let mut requests: Vec<u32> =
        shown.iter().filter(is_busy).map(|share| share.compute_request_percent).collect();
    requests.sort_unstable();
    ensure!(requests == [30, 60], "divvy top shows {shown:?}");
    // 90 % are requested already, so 11 % more do not fit.
    let eleven = with_capacity(request("gpu", SHARE, &gpu), &[("memory", "1Gi"), ("cores", "11")]);
    cluster.create_template("eleven", devices(&[eleven])).await?;
    cluster.start_pod("eleven", Claim::Template("eleven")).await?;
    cluster.wait_unschedulable("eleven").await
}

async fn verify_parts(cluster: &Cluster, parts: [(&str, &str); 2], from: usize) -> Result<()> {
    for (name, cores) in parts {
        let busy = compute_part(cluster, name, cores.parse()?, from).await?;
        println!("    a share of {cores} % used {busy} % of the GPU's time");
    }
    Ok(())
}

/// The part of a pod in the first window that reaches its request. On a loaded machine a pod cannot
/// always launch in time; then it is the maximum over eight windows, at least 80 % of the request.
/// No window may exceed the request.
async fn compute_part(cluster: &Cluster, pod: &str, cores: f64, from: usize) -> Result<f64> {
    let mut used = Vec::new();
    for window in from..from + 8 {
        let busy = verify_ceiling(cluster, pod, cores, window).await?;
        if busy >= cores - 3.0 {
            return Ok(busy);
        }
        used.push(busy);
    }
    let most = used.iter().copied().fold(0.0, f64::max);
    ensure!(most >= cores * 0.8, "a share of {cores} % used only {used:?} %");
    Ok(most)
}

async fn verify_ceiling(cluster: &Cluster, pod: &str, cores: f64, window: usize) -> Result<f64> {
    let busy = cluster.busy_percent(pod, window).await?;
    ensure!(busy <= cores + 3.0, "a share of {cores} % used {busy} %");
    Ok(busy)
}

/// Creates a class of shares with that ShareConfig.
async fn create_class(cluster: &Cluster, name: &str, config: &Value) -> Result<()> {
    let class: DeviceClass = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {
            "selectors": [{"cel": {"expression":
                "device.driver == 'gpu.divvy.dev' && device.attributes['gpu.divvy.dev'].type == 'share'"}}],
            "config": class_config(config),
        },
    }))?;
    Api::all(cluster.client.clone()).create(&PostParams::default(), &class).await?;
    Ok(())
}

fn class_config(config: &Value) -> Value {
    let mut parameters = json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": "ShareConfig"});
    for (field, value) in config.as_object().into_iter().flatten() {
        parameters[field] = value.clone();
    }
    json!([{"opaque": {"driver": "gpu.divvy.dev", "parameters": parameters}}])
}

/// Starts a busy pod on a share of that class; the request names memory only.
async fn start_busy_pod(cluster: &Cluster, pod: &str, class: &str, gpu: &str) -> Result<()> {
    let taken = with_capacity(request("gpu", class, gpu), &[("memory", "10Gi")]);
    cluster.create_template(pod, devices(&[taken])).await?;
    cluster.start_worker(&Worker::new(pod).claim(Claim::Template(pod)).work(BUSY_PROGRAM)).await?;
    cluster.wait_ready(pod).await
}

/// Waits for a three-second window in which the pod's part of the GPU's time is between `least` and
/// `most` per cent.
async fn wait_for_busy_percent(cluster: &Cluster, pod: &str, least: f64, most: f64) -> Result<()> {
    let begun = cluster.window_count(pod).await?;
    let used = eventually(&format!("pod {pod} using {least} to {most} % of the GPU's time"), || async {
        let used = cluster.busy_percent_since(pod, begun).await?;
        ensure!((least..=most).contains(&used), "it used {used} %");
        Ok(used)
    })
    .await?;
    println!("    {pod} used {used} % of the GPU's time");
    Ok(())
}

/// Runs a scenario with these classes, and deletes them afterwards.
async fn with_device_classes(
    cluster: &Cluster,
    classes: &[(&str, Value)],
    scenario: impl Future<Output = Result<()>>,
) -> Result<()> {
    for (name, config) in classes {
        create_class(cluster, name, config).await?;
    }
    let result = scenario.await;
    let api: Api<DeviceClass> = Api::all(cluster.client.clone());
    for (name, _) in classes {
        let deleted = api.delete(name, &DeleteParams::default()).await;
        // A failure of the scenario is the more useful error.
        if result.is_ok() {
            deleted?;
        }
    }
    result
}

/// A changed class applies to running pods too.
pub(super) async fn class_change_applies_to_running_pods(cluster: &Cluster) -> Result<()> {
    const CLASS: &str = "tidal.example.com";
    with_device_classes(cluster, &[(CLASS, json!({"ceiling": 30}))], async {
        let gpu = uuid(&cluster.gpus("n1")?.remove(0).uuid);
        start_busy_pod(cluster, "tidal", CLASS, &gpu).await?;
        wait_for_busy_percent(cluster, "tidal", 24.0, 33.0).await?;
        let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
        for (ceiling, least, most) in [(70, 56.0, 73.0), (10, 7.0, 13.0)] {
            let patch = Patch::Merge(json!({"spec": {"config": class_config(&json!({"ceiling": ceiling}))}}));
            classes.patch(CLASS, &PatchParams::default(), &patch).await?;
            wait_for_busy_percent(cluster, "tidal", least, most).await?;
        }
        ensure!(cluster.restarts("tidal").await? == 0, "the pod was restarted");
        Ok(())
    })
    .await
}

/// A pod with high priority takes the GPU; after its end the other pod gets it again.
pub(super) async fn high_priority_pod_goes_first(cluster: &Cluster) -> Result<()> {
    const LOW: &str = "batch.example.com";
    const HIGH: &str = "serving.example.com";
    let classes = [(LOW, json!({"priority": "Low"})), (HIGH, json!({"priority": "High"}))];
    with_device_classes(cluster, &classes, async {
        let gpu = uuid(&cluster.gpus("n1")?.remove(0).uuid);
        start_busy_pod(cluster, "batch", LOW, &gpu).await?;
        wait_for_busy_percent(cluster, "batch", 80.0, 101.0).await?;
        start_busy_pod(cluster, "serving", HIGH, &gpu).await?;
        wait_for_busy_percent(cluster, "serving", 80.0, 101.0).await?;
        // The low-priority pod is not starved.
        wait_for_busy_percent(cluster, "batch", 0.1, 10.0).await?;
        cluster.delete_pod("serving").await?;
        wait_for_busy_percent(cluster, "batch", 80.0, 101.0).await?;
        ensure!(cluster.restarts("batch").await? == 0, "the pod was restarted");
        Ok(())
    })
    .await
}
