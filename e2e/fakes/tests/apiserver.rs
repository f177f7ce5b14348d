//! Failures that tests inject into the fake API server. Its normal behaviour is tested in `contract.rs`.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use divvy_fakes::apiserver::{FakeApi, FakeApiOptions, Gates, Outage};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, ListParams, PostParams, WatchEvent, WatchParams};
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
async fn disabled_gate_drops_its_fields_silently() {
    let (api, slices) = started().await;
    api.set_gates(Gates { partitionable_devices: false, device_taints: false, ..Gates::default() });
    let created = slices.create(&PostParams::default(), &slice(|_| ())).await.unwrap();
    let device = &created.spec.devices.as_ref().unwrap()[0];
    assert_eq!((&device.consumes_counters, &device.taints), (&None, &None));
}

#[tokio::test]
async fn watch_returns_410_after_history_is_discarded() {
    let (api, slices) = started().await;
    let version = slices.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let created = slices.create(&PostParams::default(), &slice(|_| ())).await.unwrap();
    let name = created.metadata.name.unwrap();
    api.delete_all::<ResourceSlice>();
    let params = WatchParams::default().fields("spec.driver=gpu.divvy.dev,spec.nodeName=n1");
    let mut events = slices.watch(&params, &version).await.unwrap().boxed();
    let Some(Ok(WatchEvent::Added(added))) = events.next().await else { panic!("expected an addition") };
    assert_eq!(added.metadata.name.as_ref(), Some(&name));
    let Some(Ok(WatchEvent::Deleted(last))) = events.next().await else { panic!("expected a deletion") };
    let number = |text: &str| text.parse::<u64>().unwrap();
    assert!(number(&last.metadata.resource_version.unwrap()) > number(&version) + 1);
    api.forget_history();
    let mut events = slices.watch(&params, &version).await.unwrap().boxed();
    assert!(matches!(events.next().await, Some(Ok(WatchEvent::Error(status))) if status.code == 410));
}

#[tokio::test]
async fn outage_closes_watches_and_refuses_connections() {
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
async fn failure_of_a_request_can_be_injected() {
    let (api, slices) = started().await;
    api.fail_next("create", "resourceslices", 1, 500);
    assert_eq!(code(slices.create(&PostParams::default(), &slice(|_| ())).await), 500);
    slices.create(&PostParams::default(), &slice(|_| ())).await.unwrap();
}

#[tokio::test]
async fn kubeconfig_connects_to_the_server() {
    let (api, _) = started().await;
    api.put(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}));
    let dir = tempfile::tempdir().unwrap();
    let path = api.kubeconfig_path(dir.path()).unwrap();
    let kubeconfig = kube::config::Kubeconfig::read_from(path).unwrap();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
    let nodes: Api<Node> = Api::all(kube::Client::try_from(config).unwrap());
    assert_eq!(nodes.get("n1").await.unwrap().metadata.uid, api.get::<Node>("", "n1").unwrap().metadata.uid);
}
