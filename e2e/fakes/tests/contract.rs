//! The API behaviour that clients may rely on. The tests run on the fake API server, or with
//! `DIVVY_TEST_KUBECONFIG=FILE` on a real one. A test that passes only on the fake reveals a bug of the fake.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use divvy_fakes::apiserver::FakeApi;
use futures::StreamExt;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{
    Api, DeleteParams, ListParams, PartialObjectMeta, Patch, PatchParams, PostParams, Preconditions,
    WatchEvent, WatchParams,
};
use serde_json::{Value, json};

/// A server, and a node name that is unique to the test.
struct TestServer {
    client: kube::Client,
    slices: Api<ResourceSlice>,
    node: String,
    _fake: Option<FakeApi>,
}

impl TestServer {
    async fn new(test: &str) -> Self {
        let (client, fake) = FakeApi::or_real().await.unwrap();
        let server =
            Self { slices: Api::all(client.clone()), client, node: format!("contract-{test}"), _fake: fake };
        server.wipe().await;
        server
    }

    fn own(&self) -> ListParams {
        ListParams::default().fields(&format!("spec.nodeName={}", self.node))
    }

    async fn existing(&self) -> Vec<ResourceSlice> {
        self.slices.list(&self.own()).await.unwrap().items
    }

    async fn wipe(&self) {
        self.slices.delete_collection(&DeleteParams::default(), &self.own()).await.unwrap();
    }

    fn slice(&self, edit: impl FnOnce(&mut Value)) -> ResourceSlice {
        let mut slice = json!({
            "metadata": {"generateName": "00000-"},
            "spec": {
                "driver": "gpu.divvy.dev", "nodeName": self.node,
                "pool": {"name": self.node, "generation": 1, "resourceSliceCount": 1},
                "devices": [{
                    "name": "gpu-0",
                    "capacity": {"memory": {"value": "1024Mi"}},
                    "consumesCounters": [{"counterSet": "gpu-0", "counters": {"memory": {"value": "0.5"}}}],
                    "taints": [{"key": "a", "effect": "NoSchedule"}],
                }],
            },
        });
        edit(&mut slice);
        serde_json::from_value(slice).unwrap()
    }

    async fn create(&self, edit: impl FnOnce(&mut Value)) -> Result<ResourceSlice, kube::Error> {
        self.slices.create(&PostParams::default(), &self.slice(edit)).await
    }
}

fn code<T: std::fmt::Debug>(result: Result<T, kube::Error>) -> u16 {
    match result {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("expected an API error, got {other:?}"),
    }
}

#[tokio::test]
async fn names_are_generated_and_quantities_are_canonical() {
    let server = TestServer::new("names").await;
    let created = server.create(|_| ()).await.unwrap();
    let name = created.metadata.name.clone().unwrap();
    assert!(name.starts_with("00000-") && name.len() == 11, "{name}");
    let device = &created.spec.devices.as_ref().unwrap()[0];
    assert_eq!(device.capacity.as_ref().unwrap()["memory"].value.0, "1Gi");
    assert_eq!(device.consumes_counters.as_ref().unwrap()[0].counters["memory"].value.0, "500m");
    assert!(device.taints.as_ref().unwrap()[0].time_added.is_some());
    assert_eq!(server.slices.get(&name).await.unwrap(), created);
    let long = server.create(|s| s["metadata"]["generateName"] = json!("a".repeat(100))).await.unwrap();
    assert_eq!(long.metadata.name.unwrap().len(), 63);
    server.wipe().await;
}

#[tokio::test]
async fn dry_run_stores_nothing() {
    let server = TestServer::new("dry").await;
    let dry = PostParams { dry_run: true, field_manager: None };
    let answered = server.slices.create(&dry, &server.slice(|_| ())).await.unwrap();
    assert!(answered.spec.devices.unwrap()[0].consumes_counters.is_some());
    assert_eq!(server.existing().await, []);
}

#[tokio::test]
async fn write_with_an_old_version_or_uid_conflicts() {
    let server = TestServer::new("conflict").await;
    let first = server.create(|_| ()).await.unwrap();
    let name = first.metadata.name.clone().unwrap();
    let mut second = first.clone();
    second.spec.pool.generation = 2;
    let second = server.slices.replace(&name, &PostParams::default(), &second).await.unwrap();
    assert_eq!(second.metadata.generation, Some(2));
    assert_eq!(code(server.slices.replace(&name, &PostParams::default(), &first).await), 409);
    let old = |uid: Option<String>, version: &ResourceSlice| {
        let resource_version = version.metadata.resource_version.clone();
        DeleteParams::default().preconditions(Preconditions { uid, resource_version })
    };
    assert_eq!(code(server.slices.delete(&name, &old(second.metadata.uid.clone(), &first)).await), 409);
    assert_eq!(code(server.slices.delete(&name, &old(Some("other".to_owned()), &second)).await), 409);
    server.slices.delete(&name, &old(second.metadata.uid.clone(), &second)).await.unwrap();
    assert_eq!(code(server.slices.delete(&name, &DeleteParams::default()).await), 404);
    assert_eq!(code(server.slices.replace(&name, &PostParams::default(), &second).await), 404);
}

#[tokio::test]
async fn update_without_changes_keeps_the_version() {
    let server = TestServer::new("same").await;
    let first = server.create(|_| ()).await.unwrap();
    let name = first.metadata.name.clone().unwrap();
    let again = server.slices.replace(&name, &PostParams::default(), &first).await.unwrap();
    assert_eq!(again.metadata.resource_version, first.metadata.resource_version);
    server.wipe().await;
}

#[tokio::test]
async fn invalid_slices_are_rejected() {
    let server = TestServer::new("refused").await;
    type Edit = fn(&mut Value);
    let device = |n: usize| json!({"name": format!("gpu-{n}"), "taints": [{"key": "a", "effect": "None"}]});
    let refused: [(&str, Edit); 12] = [
        ("devices beside counters", |s| s["spec"]["sharedCounters"] = json!([])),
        ("device name", |s| s["spec"]["devices"][0]["name"] = json!("GPU_0")),
        ("taint effect", |s| s["spec"]["devices"][0]["taints"][0]["effect"] = json!("NoRun")),
        ("two selections", |s| s["spec"]["allNodes"] = json!(true)),
        ("no selection", |s| s["spec"]["nodeName"] = Value::Null),
        ("version", |s| s["spec"]["devices"][0]["attributes"] = json!({"v": {"version": "v1.2.3"}})),
        ("no value", |s| s["spec"]["devices"][0]["attributes"] = json!({"v": {}})),
        ("long text", |s| s["spec"]["devices"][0]["attributes"] = json!({"v": {"string": "a".repeat(65)}})),
        ("policy", |s| {
            s["spec"]["devices"][0]["capacity"]["memory"]["requestPolicy"] = json!({"default": "1Mi"})
        }),
        ("no slices", |s| s["spec"]["pool"]["resourceSliceCount"] = json!(0)),
        ("twins", |s| {
            let twin = s["spec"]["devices"][0].clone();
            s["spec"]["devices"] = json!([twin, twin]);
        }),
        ("attributes", |s| {
            s["spec"]["devices"][0]["attributes"] =
                Value::Object((0..32).map(|n| (format!("a{n}"), json!({"int": 1}))).collect());
        }),
    ];
    for (what, edit) in refused {
        assert_eq!(code(server.create(edit).await), 422, "{what}");
    }
    assert_eq!(code(server.create(|s| s["spec"]["devices"] = (0..65).map(device).collect()).await), 422);
    assert_eq!(
        code(
            server
                .create(|s| {
                    let set = |n: usize| json!({"name": format!("s{n}"), "counters": {"m": {"value": "1"}}});
                    s["spec"]["devices"] = Value::Null;
                    s["spec"]["sharedCounters"] = (0..9).map(set).collect();
                })
                .await
        ),
        422
    );
    let mut moved = server.create(|_| ()).await.unwrap();
    moved.spec.pool.name = "other".to_owned();
    let name = moved.metadata.name.clone().unwrap();
    assert_eq!(code(server.slices.replace(&name, &PostParams::default(), &moved).await), 422);
    server.wipe().await;
}

#[tokio::test]
async fn watch_reports_changes_of_selected_objects() {
    let server = TestServer::new("watch").await;
    let list = server.slices.list(&server.own()).await.unwrap();
    let params =
        WatchParams::default().fields(&format!("spec.driver=gpu.divvy.dev,spec.nodeName={}", server.node));
    let from = list.metadata.resource_version.unwrap();
    let mut events = server.slices.watch(&params, &from).await.unwrap().boxed();
    let mut slice = server.create(|_| ()).await.unwrap();
    server.create(|s| s["spec"]["nodeName"] = json!("contract-elsewhere")).await.unwrap();
    slice.spec.pool.generation = 2;
    let name = slice.metadata.name.clone().unwrap();
    server.slices.replace(&name, &PostParams::default(), &slice).await.unwrap();
    server.wipe().await;
    let mut seen = Vec::new();
    while seen.len() < 3 {
        let version = |slice: &ResourceSlice| -> u64 {
            slice.metadata.resource_version.as_ref().unwrap().parse().unwrap()
        };
        seen.push(match events.next().await.unwrap().unwrap() {
            WatchEvent::Added(s) => ("added", s.metadata.name.clone(), version(&s)),
            WatchEvent::Modified(s) => ("modified", s.metadata.name.clone(), version(&s)),
            WatchEvent::Deleted(s) => ("deleted", s.metadata.name.clone(), version(&s)),
            WatchEvent::Bookmark(_) => continue,
            WatchEvent::Error(status) => panic!("{status:?}"),
        });
    }
    let kinds: Vec<&str> = seen.iter().map(|event| event.0).collect();
    assert_eq!(kinds, ["added", "modified", "deleted"]);
    assert!(seen.iter().all(|event| event.1.as_ref() == Some(&name)));
    assert!(seen.is_sorted_by(|a, b| a.2 < b.2), "versions must increase: {seen:?}");
    let elsewhere = ListParams::default().fields("spec.nodeName=contract-elsewhere");
    server.slices.delete_collection(&DeleteParams::default(), &elsewhere).await.unwrap();
}

#[tokio::test]
async fn pages_contain_every_object_once() {
    let server = TestServer::new("pages").await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(server.create(|_| ()).await.unwrap().metadata.name.unwrap());
    }
    made.sort();
    let (mut seen, mut sizes, mut token) = (Vec::new(), Vec::new(), None);
    loop {
        let params = ListParams { limit: Some(2), continue_token: token, ..server.own() };
        let page = server.slices.list(&params).await.unwrap();
        sizes.push(page.items.len());
        seen.extend(page.items.into_iter().filter_map(|slice| slice.metadata.name));
        token = page.metadata.continue_.filter(|token| !token.is_empty());
        if token.is_none() {
            break;
        }
    }
    seen.sort();
    assert_eq!((seen, sizes), (made, vec![2, 2, 1]));
    server.wipe().await;
}

#[tokio::test]
async fn selector_on_unindexed_field_is_rejected() {
    let server = TestServer::new("fields").await;
    assert_eq!(code(server.slices.list(&ListParams::default().fields("spec.allNodes=true")).await), 400);
}

#[tokio::test]
async fn claim_separates_status_and_waits_for_finalizers() {
    let server = TestServer::new("claim").await;
    let claims: Api<ResourceClaim> = Api::namespaced(server.client.clone(), "default");
    let claim: ResourceClaim = serde_json::from_value(json!({
        // Not a finalizer of Kubernetes, which a controller would remove.
        "metadata": {"name": "contract", "finalizers": ["divvy.dev/contract"]},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.divvy.dev"}}]}},
        "status": {"reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]},
    }))
    .unwrap();
    let created = claims.create(&PostParams::default(), &claim).await.unwrap();
    assert_eq!(created.status.and_then(|status| status.reserved_for), None);
    let status = json!({"status": {"allocation": {"devices": {"results": [
        {"request": "gpu", "driver": "gpu.divvy.dev", "pool": "contract", "device": "gpu-0"}]}}}});
    let merge = PatchParams::default();
    let allocated = claims.patch_status("contract", &merge, &Patch::Merge(&status)).await.unwrap();
    assert!(allocated.status.unwrap().allocation.is_some());
    let renamed = json!({"metadata": {"labels": {"a": "b"}}, "status": null});
    let labelled = claims.patch("contract", &merge, &Patch::Merge(&renamed)).await.unwrap();
    assert!(labelled.status.unwrap().allocation.is_some(), "the main endpoint must not change the status");
    claims.delete("contract", &DeleteParams::default()).await.unwrap();
    assert!(claims.get("contract").await.unwrap().metadata.deletion_timestamp.is_some());
    let release = json!({"metadata": {"finalizers": null}});
    claims.patch("contract", &merge, &Patch::Merge(&release)).await.unwrap();
    assert_eq!(claims.get_opt("contract").await.unwrap(), None);
}

/// A read of the slices of the test with an `Accept` header. Returns the status code and the answer.
async fn read_as(server: &TestServer, path: &str, accept: &str) -> (u16, Value) {
    let request = axum::http::Request::get(format!("/apis/resource.k8s.io/v1/resourceslices{path}"));
    let request = request.header("Accept", accept).body(Vec::new()).unwrap();
    match server.client.request::<Value>(request).await {
        Ok(answer) => (200, answer),
        Err(kube::Error::Api(status)) => (status.code, Value::Null),
        Err(other) => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn metadata_is_served_without_the_spec() {
    let server = TestServer::new("metadata").await;
    let created = server.create(|slice| slice["metadata"]["annotations"] = json!({"a": "b"})).await.unwrap();
    let name = created.metadata.name.clone().unwrap();
    const ONE: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
    const LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
    let selected = format!("?fieldSelector=spec.nodeName={}", server.node);
    let (_, one) = read_as(&server, &format!("/{name}"), ONE).await;
    let (_, list) = read_as(&server, &selected, LIST).await;
    assert_eq!(
        (&list["kind"], &list["apiVersion"]),
        (&json!("PartialObjectMetadataList"), &json!("meta.k8s.io/v1"))
    );
    assert!(list["metadata"]["resourceVersion"].is_string());
    for object in [&one, &list["items"][0]] {
        assert_eq!(object["metadata"]["annotations"]["a"], "b");
        assert_eq!(object["metadata"]["name"], json!(name));
        assert_eq!(object["spec"], Value::Null);
    }
    assert_eq!(
        (&one["kind"], &one["apiVersion"]),
        (&json!("PartialObjectMetadata"), &json!("meta.k8s.io/v1"))
    );
    assert_eq!(read_as(&server, &selected, ONE).await.0, 406, "the kind of one object for a list");

    let slices: Api<PartialObjectMeta<ResourceSlice>> = Api::all(server.client.clone());
    let from = list["metadata"]["resourceVersion"].as_str().unwrap();
    let params = WatchParams::default().fields(&format!("spec.nodeName={}", server.node));
    let mut events = slices.watch(&params, from).await.unwrap().boxed();
    server.wipe().await;
    loop {
        match events.next().await.unwrap().unwrap() {
            WatchEvent::Deleted(last) => {
                assert_eq!(last.metadata.name, Some(name));
                assert_eq!(last.types.unwrap().kind, "PartialObjectMetadata");
                return;
            }
            WatchEvent::Bookmark(_) => {}
            other => panic!("{other:?}"),
        }
    }
}
