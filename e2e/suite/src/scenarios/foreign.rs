//! Pods that were written for other GPU schedulers, with `foreignRequests.enabled` in the chart.

use super::install::HELM_UPGRADE;
use super::shares::ALLOCATE_2_GIB;
use crate::cluster::{Cluster, eventually};
use crate::objects::Worker;
use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};

/// HAMi counts GPUs, MiB and per cent as extended resources. KAI counts MiB in an annotation.
fn foreign_pods() -> [(&'static str, Value, u64); 3] {
    let pod = |name, scheduler: &str, annotations: Value, limits: Value| {
        let mut pod = Worker::new(name).work(ALLOCATE_2_GIB).json();
        pod["metadata"]["annotations"] = annotations;
        pod["spec"]["schedulerName"] = scheduler.into();
        pod["spec"]["containers"][0]["resources"] = json!({"limits": limits});
        pod
    };
    let hami = json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10240, "nvidia.com/gpucores": 30});
    let percentage = json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 25});
    let h100 = json!({"nvidia.com/use-gputype": "H100"});
    let kai = json!({"gpu-memory": "4096"});
    [
        ("hami", pod("hami", "hami-scheduler", json!({}), hami), 10 << 10),
        ("hami-percentage", pod("hami-percentage", "hami-scheduler", h100, percentage), 20 << 10),
        ("kai", pod("kai", "kai-scheduler", kai, json!({})), 4 << 10),
    ]
}

pub(super) async fn hami_and_kai_pods_get_shares(cluster: &Cluster) -> Result<()> {
    let settings = r#"foreignRequests={"enabled": true, "templateHoldOff": "2s",
        "models": {"H100": {"memory": "80Gi"}}}"#;
    cluster.helm(&[&HELM_UPGRADE[..], &["--set-json", settings]].concat())?;
    let result = with_foreign_requests(cluster).await;
    cluster.clean_up().await?;
    cluster.helm(&HELM_UPGRADE)?;
    result
}

async fn with_foreign_requests(cluster: &Cluster) -> Result<()> {
    let create = async |pod: &Value| -> Result<()> {
        let pod: Pod = serde_json::from_value(pod.clone())?;
        cluster.pods.create(&PostParams::default(), &pod).await?;
        Ok(())
    };
    for (name, pod, size) in foreign_pods() {
        // The webhook works once its certificate is known to the API server.
        eventually(&format!("pod {name} is admitted"), || create(&pod)).await?;
        cluster.wait_ready(name).await?;
        let memory = cluster.program_memory(name).await?;
        ensure!(memory.total == size, "CUDA in {name} reports {} MiB, expected {size}", memory.total);
        ensure!(memory.error == 0, "{name} cannot allocate 2 GiB: {memory:?}");
    }
    let mut fraction = Worker::new("fraction").json();
    fraction["metadata"]["annotations"] = json!({"gpu-fraction": "0.5"});
    let refused = create(&fraction).await.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(refused.contains("foreignRequests.gpuMemory"), "half of a GPU of unknown size: {refused:?}");

    let ours = ListParams::default().labels("app.kubernetes.io/managed-by=divvy");
    let names =
        async || anyhow::Ok(cluster.templates.list(&ours).await?.iter().map(|t| t.name_any()).collect());
    let created: Vec<String> = names().await?;
    ensure!(created.len() == 3, "the controller created {created:?}");
    cluster.delete_all_pods().await?;
    eventually("templates without a pod are deleted", || async {
        let left: Vec<String> = names().await?;
        ensure!(left.is_empty(), "{left:?} still exist");
        Ok(())
    })
    .await
}
