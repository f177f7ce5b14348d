//! The fake API server keeps the promises that clients hang on, seen through
//! a real client over TLS.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use divvy_fakes::apiserver::{FakeApi, FakeApiOptions, Gates, Outage};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent, WatchParams,
};
use serde_json::{Value, json};

async fn started() -> (FakeApi, Api<ResourceSlice>) {
    let api = FakeApi::start(FakeApiOptions::default()).await.unwrap();
    let slices = Api::all(api.client().unwrap());
    (api, slices)
}

fn slice(edit: impl FnOnce(&mut Value)) -> ResourceSlice {
    let mut slice = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"generateName": "00000-"},
        "spec": {
            "driver": "gpu.divvy.dev", "nodeName": "n1",
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
            "devices": [{
                "name": "gpu-0",
                "capacity": {"memory": {"value": "1024Mi"}},
                "consumesCounters": [{"counterSet": "gpu-0", "counters": {"memory": {"value": "1024Mi"}}}],
                "taints": [{"key": "a", "effect": "NoSchedule"}],
            }],
        },
    });
    edit(&mut slice);
    serde_json::from_value(slice).unwrap()
}

fn code<T: std::fmt::Debug>(result: Result<T, kube::Error>) -> u16 {
    match result {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("expected an API error, got {other:?}"),
    }
}

#[tokio::test]
async fn names_are_generated_and_quantities_are_canonical() {
    let (api, slices) = started().await;
    let created = slices.create(&PostParams::default(), &slice(|_| ())).await.unwrap();
    let name = created.metadata.name.clone().unwrap();
    assert!(name.starts_with("00000-") && name.len() == 11, "{name}");
    let device = &created.spec.devices.as_ref().unwrap()[0];
    assert_eq!(device.capacity.as_ref().unwrap()["memory"].value.0, "1Gi");
    assert!(device.taints.as_ref().unwrap()[0].time_added.is_some());
    assert_eq!(api.get::<ResourceSlice>("", &name), Some(created));
}

#[tokio::test]
async fn a_dry_run_answers_and_stores_nothing() {
    let (api, slices) = started().await;
    let dry = PostParams { dry_run: true, field_manager: None };
    slices.create(&dry, &slice(|_| ())).await.unwrap();
    assert!(api.list::<ResourceSlice>().is_empty());
    assert_eq!(api.count("create", "resourceslices"), 0);
}

#[tokio::test]
async fn a_write_with_an_old_version_or_uid_conflicts() {
    let (_api, slices) = started().await;
    let first = slices.create(&PostParams::default(), &slice(|_| ())).await.unwrap();
    let name = first.metadata.name.clone().unwrap();
    let mut second = first.clone();
    second.spec.pool.generation = 2;
    let second = slices.replace(&name, &PostParams::default(), &second).await.unwrap();
    assert_eq!(second.metadata.generation, Some(2));
    assert_eq!(code(slices.replace(&name, &PostParams::default(), &first).await), 409);
    let old = DeleteParams::default().preconditions(Preconditions {
        uid: second.metadata.uid.clone(),
        resource_version: first.metadata.resource_version.clone(),
    });
    assert_eq!(code(slices.delete(&name, &old).await), 409);
    slices.delete(&name, &DeleteParams::default()).await.unwrap();
    assert_eq!(code(slices.delete(&name, &DeleteParams::default()).await), 404);
}

#[tokio::test]
async fn an_update_that_changes_nothing_keeps_the_version() {
    let (_api, slices) = started().await;
    let first = slices.create(&PostParams::default(), &slice(|_| ())).await.unwrap();
    let again =
        slices.replace(first.metadata.name.as_ref().unwrap(), &PostParams::default(), &first).await.unwrap();
    assert_eq!(again.metadata.resource_version, first.metadata.resource_version);
}

async fn check_refused(edit: impl FnOnce(&mut Value)) {
    let (_api, slices) = started().await;
    assert_eq!(code(slices.create(&PostParams::default(), &slice(edit)).await), 422);
}

#[tokio::test]
async fn slices_that_break_a_rule_are_refused() {
    check_refused(|s| s["spec"]["sharedCounters"] = json!([])).await;
    check_refused(|s| s["spec"]["devices"][0]["name"] = json!("GPU_0")).await;
    check_refused(|s| s["spec"]["devices"][0]["taints"][0]["effect"] = json!("NoRun")).await;
    check_refused(|s| s["spec"]["allNodes"] = json!(true)).await;
    check_refused(|s| s["spec"]["devices"][0]["attributes"] = json!({"v": {"version": "v1.2.3"}})).await;
    check_refused(|s| {
        s["spec"]["devices"][0]["capacity"]["memory"]["requestPolicy"] = json!({"default": "1Mi"})
    })
    .await;
    check_refused(|s| {
        let device = s["spec"]["devices"][0].clone();
        s["spec"]["devices"] = (0..65)
            .map(|n| {
                let mut d = device.clone();
                d["name"] = json!(format!("gpu-{n}"));
                d
            })
            .collect();
    })
    .await;
}

#[tokio::test]
async fn a_gate_that_is_off_drops_its_fields_silently() {
    let (api, slices) = started().await;
    api.set_gates(Gates { partitionable_devices: false, device_taints: false, ..Gates::default() });
    let created = slices.create(&PostParams::default(), &slice(|_| ())).await.unwrap();
    let device = &created.spec.devices.as_ref().unwrap()[0];
    assert_eq!((&device.consumes_counters, &device.taints), (&None, &None));
}

#[tokio::test]
async fn a_watch_tells_each_change_in_order_and_says_410_when_history_is_gone() {
    let (api, slices) = started().await;
    let version = slices.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let created = slices.create(&PostParams::default(), &slice(|_| ())).await.unwrap();
    let name = created.metadata.name.unwrap();
    api.delete_all::<ResourceSlice>();
    let params = WatchParams::default().fields("spec.driver=gpu.divvy.dev,spec.nodeName=n1");
    let mut events = slices.watch(&params, &version).await.unwrap().boxed();
    assert!(
        matches!(events.next().await, Some(Ok(WatchEvent::Added(s))) if s.metadata.name.as_ref() == Some(&name))
    );
    let Some(Ok(WatchEvent::Deleted(last))) = events.next().await else { panic!("expected a deletion") };
    let number = |text: &str| text.parse::<u64>().unwrap();
    assert!(number(&last.metadata.resource_version.unwrap()) > number(&version) + 1);
    api.forget_history();
    let mut events = slices.watch(&params, &version).await.unwrap().boxed();
    assert!(matches!(events.next().await, Some(Ok(WatchEvent::Error(status))) if status.code == 410));
}

#[tokio::test]
async fn an_outage_cuts_watches_and_refuses_connections() {
    let (api, slices) = started().await;
    let mut events = slices.watch(&WatchParams::default(), "0").await.unwrap().boxed();
    api.set_unavailable(true);
    assert!(!matches!(events.next().await, Some(Ok(_))));
    assert!(slices.list(&ListParams::default()).await.is_err());
    api.set_outage(None);
    slices.list(&ListParams::default()).await.unwrap();
    let in_process: Api<ResourceSlice> = Api::all(api.client_in_process());
    in_process.list(&ListParams::default()).await.unwrap();
    api.set_outage(Some(Outage::Refuse));
    assert!(in_process.list(&ListParams::default()).await.is_err());
}

#[tokio::test]
async fn a_claim_keeps_spec_and_status_apart_and_waits_for_its_finalizers() {
    let (api, _) = started().await;
    let claims: Api<ResourceClaim> = Api::namespaced(api.client().unwrap(), "default");
    let claim: ResourceClaim = serde_json::from_value(json!({
        "metadata": {"name": "c", "finalizers": ["resource.kubernetes.io/delete-protection"]},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.divvy.dev"}}]}},
        "status": {"reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]},
    }))
    .unwrap();
    let created = claims.create(&PostParams::default(), &claim).await.unwrap();
    assert_eq!(created.status.and_then(|status| status.reserved_for), None);
    let status = json!({"status": {"allocation": {"devices": {"results": [
        {"request": "gpu", "driver": "gpu.divvy.dev", "pool": "n1", "device": "gpu-0"}]}}}});
    let merge = PatchParams::default();
    let allocated = claims.patch_status("c", &merge, &Patch::Merge(&status)).await.unwrap();
    assert!(allocated.status.unwrap().allocation.is_some());
    claims.delete("c", &DeleteParams::default()).await.unwrap();
    assert!(claims.get("c").await.unwrap().metadata.deletion_timestamp.is_some());
    claims.patch("c", &merge, &Patch::Merge(json!({"metadata": {"finalizers": null}}))).await.unwrap();
    assert_eq!(claims.get_opt("c").await.unwrap(), None);
}

#[tokio::test]
async fn a_request_can_be_ordered_to_fail() {
    let (api, slices) = started().await;
    api.fail_next("create", "resourceslices", 1, 500);
    assert_eq!(code(slices.create(&PostParams::default(), &slice(|_| ())).await), 500);
    slices.create(&PostParams::default(), &slice(|_| ())).await.unwrap();
}

#[tokio::test]
async fn a_kubeconfig_leads_to_the_server() {
    let (api, _) = started().await;
    api.put(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}));
    let dir = tempfile::tempdir().unwrap();
    let path = api.kubeconfig_path(dir.path()).unwrap();
    let kubeconfig = kube::config::Kubeconfig::read_from(path).unwrap();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
    let nodes: Api<Node> = Api::all(kube::Client::try_from(config).unwrap());
    assert_eq!(nodes.get("n1").await.unwrap().metadata.uid, api.get::<Node>("", "n1").unwrap().metadata.uid);
}
