//! Every file of manifests/examples, as a user applies it. Only images and
//! commands are the suite's: claims, classes and resources stay as written.

use crate::objects::{Claim, STAYS, suites};
use crate::world::World;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{ResourceExt, discovery};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::Path;

pub(super) async fn every_example_runs(world: &World) -> Result<()> {
    let dir = world.manifests.join("examples");
    let mut files: Vec<_> = std::fs::read_dir(&dir)
        .with_context(|| format!("{}", dir.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .collect();
    files.sort();
    ensure!(!files.is_empty(), "{} has no examples", dir.display());
    for file in files {
        let mut classes = Vec::new();
        let result = runs(world, &file, &mut classes).await;
        let deployments: Api<Deployment> = Api::default_namespaced(world.client.clone());
        deployments.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        let api: Api<DeviceClass> = Api::all(world.client.clone());
        for class in classes {
            api.delete(&class, &DeleteParams::default()).await?;
        }
        result.with_context(|| format!("{}", file.display()))?;
        world.clean().await?;
    }
    Ok(())
}

/// The classes that it brings are the caller's to remove.
async fn runs(world: &World, file: &Path, classes: &mut Vec<String>) -> Result<()> {
    let text = std::fs::read_to_string(file)?;
    let (mut expected, mut templates) = (0, Vec::new());
    for document in serde_norway::Deserializer::from_str(&text) {
        let mut object = Value::deserialize(document)?;
        expected += ours(&mut object);
        let object: DynamicObject = serde_json::from_value(object)?;
        if object.types.as_ref().is_some_and(|types| types.kind == "ResourceClaimTemplate") {
            templates.push(object.name_any());
        }
        let types = object.types.clone().context("no kind")?;
        let (resource, _) =
            discovery::pinned_kind(&world.client, &GroupVersionKind::try_from(&types)?).await?;
        let api: Api<DynamicObject> = match resource.kind.as_str() {
            "DeviceClass" => {
                classes.push(object.name_any());
                Api::all_with(world.client.clone(), &resource)
            }
            _ => Api::default_namespaced_with(world.client.clone(), &resource),
        };
        api.create(&PostParams::default(), &object).await?;
    }
    // One that shows only what to ask for gets pods of the suite's.
    if expected == 0 {
        for template in &templates {
            world.pod(&format!("with-{template}"), Claim::Template(template)).await?;
        }
        expected = templates.len();
    }
    ensure!(expected > 0, "it has no pod and no template");
    crate::world::eventually("all its pods", || async {
        let pods = world.pods.list(&ListParams::default()).await?.items.len();
        ensure!(pods == expected, "there are {pods} of {expected}");
        Ok(())
    })
    .await?;
    for pod in world.pods.list(&ListParams::default()).await? {
        let name = pod.name_any();
        world.ready(&name).await?;
        world.sees_its_devices(&name).await?;
    }
    Ok(())
}

/// Gives a pod's containers the suite's image and command; answers how many pods it makes.
fn ours(object: &mut Value) -> usize {
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
        container.extend(suites(STAYS));
    }
    usize::try_from(count).unwrap_or(usize::MAX)
}
