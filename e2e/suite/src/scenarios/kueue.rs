//! The example for Kueue: two jobs, of which the second exceeds the rest of the team's quota. It
//! waits while the first runs, and runs after it. Only images are replaced.

use crate::cluster::{Cluster, eventually};
use crate::objects::IMAGE;
use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::discovery::{self, Scope};
use kube::{Error, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

/// The namespace of the example.
const TEAM: &str = "team-a";

pub(super) async fn job_waits_for_the_quota_of_shares(cluster: &Cluster) -> Result<()> {
    let outcome = second_job_waits(cluster, "share-jobs.yaml", "divvy.dev/shares").await;
    outcome.and(clean_up(cluster).await)
}

pub(super) async fn job_waits_for_the_quota_of_memory(cluster: &Cluster) -> Result<()> {
    let outcome = second_job_waits(cluster, "memory-jobs.yaml", "divvy.dev/gpu-memory").await;
    outcome.and(clean_up(cluster).await)
}

pub(super) async fn share_above_the_limit_of_the_team_is_rejected(cluster: &Cluster) -> Result<()> {
    apply(cluster, documents(cluster, "quota.yaml")?).await?;
    let templates: Api<ResourceClaimTemplate> = Api::namespaced(cluster.client.clone(), TEAM);
    let capacity = json!({"requests": {"memory": "20Gi"}});
    let exactly = json!({"deviceClassName": "share.divvy.dev", "capacity": capacity});
    let devices = json!({"requests": [{"name": "gpu", "exactly": exactly}]});
    let large = json!({"metadata": {"name": "large"}, "spec": {"spec": {"devices": devices}}});
    let large: ResourceClaimTemplate = serde_json::from_value(large)?;
    // The API server needs some seconds to apply a new policy.
    let outcome = eventually("rejection of a large share", || async {
        match templates.create(&PostParams::default(), &large).await {
            Err(Error::Api(refused)) if refused.message.contains("at most 10Gi") => Ok(()),
            Err(error) => bail!("another error: {error}"),
            Ok(_) => {
                templates.delete("large", &DeleteParams::default()).await?;
                bail!("it was created")
            }
        }
    })
    .await;
    outcome.and(clean_up(cluster).await)
}

/// Runs the two jobs of a file. The second must wait for quota of `resource` until the first is done.
async fn second_job_waits(cluster: &Cluster, file: &str, resource: &str) -> Result<()> {
    apply(cluster, documents(cluster, "quota.yaml")?).await?;
    let (jobs, others): (Vec<_>, Vec<_>) =
        documents(cluster, file)?.into_iter().partition(|object| object["kind"] == "Job");
    let [first, second] = <[Value; 2]>::try_from(jobs).ok().context("the example must have two jobs")?;
    let (first_name, second_name) = (name(&first)?, name(&second)?);
    apply(cluster, others).await?;

    let api: Api<Job> = Api::namespaced(cluster.client.clone(), TEAM);
    apply(cluster, vec![first]).await?;
    eventually("admission of the first job", || async {
        ensure!(!is_suspended(&api, &first_name).await?, "it is suspended");
        Ok(())
    })
    .await?;
    apply(cluster, vec![second]).await?;
    eventually("second job without quota", || async {
        let why = waits_for(cluster, &second_name).await?;
        ensure!(why.contains(resource), "it waits for another reason: {why}");
        ensure!(is_suspended(&api, &second_name).await?, "it is not suspended");
        Ok(())
    })
    .await?;
    let (first, second) = (completed(&api, &first_name).await?, completed(&api, &second_name).await?);
    ensure!(
        first.1 <= second.0,
        "the second job started at {:?}, the first ended at {:?}",
        second.0,
        first.1
    );
    Ok(())
}

async fn is_suspended(api: &Api<Job>, name: &str) -> Result<bool> {
    let spec = api.get(name).await?.spec;
    Ok(spec.and_then(|spec| spec.suspend).unwrap_or_default())
}

/// Why Kueue has not reserved quota for a job.
async fn waits_for(cluster: &Cluster, job: &str) -> Result<String> {
    let kind = GroupVersionKind::gvk("kueue.x-k8s.io", "v1beta2", "Workload");
    let workloads: Api<DynamicObject> =
        Api::namespaced_with(cluster.client.clone(), TEAM, &ApiResource::from_gvk(&kind));
    for workload in workloads.list(&ListParams::default()).await? {
        if workload.owner_references().iter().any(|owner| owner.name == job) {
            let conditions = workload.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let reserved = conditions.iter().find(|condition| condition["type"] == "QuotaReserved");
            let reserved = reserved.with_context(|| format!("the workload of {job} has no condition"))?;
            ensure!(reserved["status"] == "False", "job {job} has quota");
            return Ok(reserved["message"].as_str().unwrap_or_default().to_owned());
        }
    }
    bail!("job {job} has no workload")
}

/// Waits until a job is complete. Returns when it started and ended.
async fn completed(api: &Api<Job>, name: &str) -> Result<(String, String)> {
    eventually(&format!("job {name} complete"), || async {
        let status = serde_json::to_value(api.get(name).await?.status)?;
        let time = |field: &str| status[field].as_str().map(str::to_owned);
        let ended = time("completionTime").with_context(|| format!("it is {status}"))?;
        Ok((time("startTime").context("no start")?, ended))
    })
    .await
}

fn name(object: &Value) -> Result<String> {
    object["metadata"]["name"].as_str().map(str::to_owned).context("an object has no name")
}

/// The objects of a file of the example, with the image of the tests.
fn documents(cluster: &Cluster, file: &str) -> Result<Vec<Value>> {
    let path = cluster.manifests.join("examples/kueue").join(file);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut objects = Vec::new();
    for document in serde_norway::Deserializer::from_str(&text) {
        let mut object = Value::deserialize(document)?;
        let containers = object.pointer_mut("/spec/template/spec/containers").and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            container["image"] = json!(IMAGE);
            container["imagePullPolicy"] = json!("Never");
        }
        objects.push(object);
    }
    Ok(objects)
}

/// Creates or updates objects.
async fn apply(cluster: &Cluster, objects: Vec<Value>) -> Result<()> {
    for object in objects {
        let object: DynamicObject = serde_json::from_value(object)?;
        let types = object.types.clone().context("no kind")?;
        let kind = GroupVersionKind::try_from(&types)?;
        let (resource, capabilities) = discovery::pinned_kind(&cluster.client, &kind).await?;
        let api: Api<DynamicObject> = match capabilities.scope {
            Scope::Cluster => Api::all_with(cluster.client.clone(), &resource),
            Scope::Namespaced => Api::namespaced_with(cluster.client.clone(), TEAM, &resource),
        };
        let (owner, patch) = (PatchParams::apply("divvy-e2e").force(), Patch::Apply(&object));
        let applied = api.patch(&object.name_any(), &owner, &patch).await;
        applied.with_context(|| format!("{} {}", kind.kind, object.name_any()))?;
    }
    Ok(())
}

/// Deletes the jobs and templates, and waits until no claim is left. The quota stays.
async fn clean_up(cluster: &Cluster) -> Result<()> {
    let (all, client) = (ListParams::default(), || cluster.client.clone());
    let jobs: Api<Job> = Api::namespaced(client(), TEAM);
    jobs.delete_collection(&DeleteParams::background(), &all).await?;
    let templates: Api<ResourceClaimTemplate> = Api::namespaced(client(), TEAM);
    templates.delete_collection(&DeleteParams::default(), &all).await?;
    let (pods, claims): (Api<Pod>, Api<ResourceClaim>) =
        (Api::namespaced(client(), TEAM), Api::namespaced(client(), TEAM));
    eventually("jobs of the example gone", || async {
        ensure!(pods.list(&all).await?.items.is_empty(), "some pods still exist");
        ensure!(claims.list(&all).await?.items.is_empty(), "some claims still exist");
        Ok(())
    })
    .await
}
