//! Applies every file of manifests/examples. Only images and commands are replaced; claims, classes
//! and resources stay as written.

use crate::cluster::Cluster;
use crate::objects::{Claim, IDLE, test_container};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{ResourceExt, discovery};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::Path;

pub(super) async fn every_example_runs(cluster: &Cluster) -> Result<()> {
    let dir = cluster.manifests.join("examples");
    let mut files: Vec<_> = std::fs::read_dir(&dir)
        .with_context(|| format!("{}", dir.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .collect();
    files.sort();
    ensure!(!files.is_empty(), "{} has no examples", dir.display());
    for file in files {
        let mut classes = Vec::new();
        let result = run_example(cluster, &file, &mut classes).await;
        let deployments: Api<Deployment> = Api::default_namespaced(cluster.client.clone());
        deployments.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        let api: Api<DeviceClass> = Api::all(cluster.client.clone());
        for class in classes {
            api.delete(&class, &DeleteParams::default()).await?;
        }
        result.with_context(|| format!("{}", file.display()))?;
        cluster.clean_up().await?;
    }
    Ok(())
}

/// Applies a file and waits for its pods. The caller must delete the classes that it adds to `classes`.
async fn run_example(cluster: &Cluster, file: &Path, classes: &mut Vec<String>) -> Result<()> {
    let text = std::fs::read_to_string(file)?;
    let (mut expected, mut templates) = (0, Vec::new());
    for document in serde_norway::Deserializer::from_str(&text) {
        let mut object = Value::deserialize(document)?;
        expected += use_test_container(&mut object);
        let object: DynamicObject = serde_json::from_value(object)?;
        if object.types.as_ref().is_some_and(|types| types.kind == "ResourceClaimTemplate") {
            templates.push(object.name_any());
        }
        let types = object.types.clone().context("no kind")?;
        let (resource, _) =
            discovery::pinned_kind(&cluster.client, &GroupVersionKind::try_from(&types)?).await?;
        let api: Api<DynamicObject> = match resource.kind.as_str() {
            "DeviceClass" => {
                classes.push(object.name_any());
                Api::all_with(cluster.client.clone(), &resource)
            }
            _ => Api::default_namespaced_with(cluster.client.clone(), &resource),
        };
        api.create(&PostParams::default(), &object).await?;
    }
    // A file with templates only gets a pod for each template.
    if expected == 0 {
        for template in &templates {
            cluster.start_pod(&format!("with-{template}"), Claim::Template(template)).await?;
        }
        expected = templates.len();
    }
    ensure!(expected > 0, "the file has no pod and no template");
    crate::cluster::eventually("all pods of the example", || async {
        let pods = cluster.pods.list(&ListParams::default()).await?.items.len();
        ensure!(pods == expected, "{pods} of {expected} pods exist");
        Ok(())
    })
    .await?;
    for pod in cluster.pods.list(&ListParams::default()).await? {
        let name = pod.name_any();
        cluster.wait_ready(&name).await?;
        cluster.verify_visible_devices(&name).await?;
    }
    Ok(())
}

/// Replaces the image and the command of a pod's containers. Returns the number of pods that the
/// object creates.
fn use_test_container(object: &mut Value) -> usize {
    let (path, count) = match object["kind"].as_str() {
        Some("Pod") => ("/spec", 1),
        Some("Deployment") => ("/spec/template/spec", object["spec"]["replicas"].as_u64().unwrap_or(1)),
        _ => return 0,
    };
    let Some(spec) = object.pointer_mut(path).and_then(Value::as_object_mut) else { return 0 };
    spec.insert("terminationGracePeriodSeconds".to_owned(), json!(2));
    for container in spec.get_mut("containers").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(container) = container.as_object_mut() else { continue };
        container.retain(|field, _| ["name", "resources", "volumeMounts"].contains(&field.as_str()));
        container.extend(test_container(IDLE));
    }
    usize::try_from(count).unwrap_or(usize::MAX)
}
