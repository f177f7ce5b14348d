//! Runs the real `divvy-controller` process against the fake API server.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod cluster;

use cluster::{NAMESPACE, TestCluster, until};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use serde_json::{Value, json};

const CLASS: &str = "mig-1g.10gb.divvy.dev";

#[tokio::test]
async fn classes_follow_the_offered_profiles() {
    let cluster = TestCluster::new().await;
    cluster.slice("n1-a", &["1g.10gb", "1g.10gb+me"]);
    cluster.class("mig-1g.10gb.me.divvy.dev", None);
    let controller = cluster.start(&["--class-hold-off", "0s"]);
    let owner = cluster.class("mig.divvy.dev", None);
    until("the class exists", || cluster.api.get::<DeviceClass>("", CLASS).is_some()).await;
    let class = cluster.api.get::<DeviceClass>("", CLASS).unwrap();
    let owners = class.metadata.owner_references.unwrap();
    assert_eq!(owners[0].uid, owner["metadata"]["uid"].as_str().unwrap());
    let spec = class.spec.unwrap();
    assert_eq!(spec.extended_resource_name.as_deref(), Some("nvidia.com/mig-1g.10gb"));

    cluster.class("another-owners", Some("nvidia.com/mig-1g.10gb"));
    let resource = || cluster.api.get::<DeviceClass>("", CLASS)?.spec?.extended_resource_name;
    until("the resource name is removed", || resource().is_none()).await;
    cluster.api.delete::<DeviceClass>("", "another-owners");
    until("the resource name is set again", || resource().is_some()).await;

    cluster.api.delete_all::<ResourceSlice>();
    until("the class is deleted with the last slice", || cluster.api.get::<DeviceClass>("", CLASS).is_none())
        .await;
    let theirs = cluster.api.get::<DeviceClass>("", "mig-1g.10gb.me.divvy.dev").unwrap();
    assert_eq!(theirs.metadata.labels, None, "a class of another owner was changed");
    assert_eq!(controller.stop().await, Some(0));
    let lease = cluster.api.get::<Lease>(NAMESPACE, "divvy-controller").unwrap().spec.unwrap();
    assert_eq!(lease.holder_identity.as_deref(), Some(""), "the lease was not released");
}

#[tokio::test]
async fn slices_with_known_kinds_are_not_read() {
    let cluster = TestCluster::new().await;
    cluster.class("mig.divvy.dev", None);
    for node in 0..600 {
        cluster.annotated_slice(&format!("n{node}"), &["1g.10gb"]);
    }
    let _controller = cluster.start(&["--class-hold-off", "0s"]);
    let has = |class: &str| cluster.api.get::<DeviceClass>("", class).is_some();
    until("the class exists", || has(CLASS)).await;
    let reads = || cluster.api.count("get", "resourceslices");
    assert_eq!(reads(), 1, "600 equal slices");

    cluster.annotated_slice("n600", &["1g.10gb"]);
    for node in 0..300 {
        cluster.annotated_slice(&format!("n{node}"), &["3g.40gb"]);
    }
    until("the second class exists", || has("mig-3g.40gb.divvy.dev")).await;
    assert_eq!(reads(), 2, "one new fingerprint");
    cluster.slice("old", &["7g.80gb"]);
    until("the class of the slice without annotation exists", || has("mig-7g.80gb.divvy.dev")).await;
    assert_eq!(reads(), 3);
    for node in 0..300 {
        cluster.api.delete::<ResourceSlice>("", &format!("n{node}"));
    }
    until("the second class is gone", || !has("mig-3g.40gb.divvy.dev")).await;
    assert!(has(CLASS));
    let requests = cluster.api.requests();
    let follows = requests.iter().filter(|request| request.resource == "resourceslices");
    assert!(follows.filter(|request| request.verb != "get").all(|request| request.metadata_only));
}

#[tokio::test]
async fn classes_wait_until_failed_reads_succeed() {
    let cluster = TestCluster::new().await;
    cluster.class("mig.divvy.dev", None);
    cluster.annotated_slice("n1", &["1g.10gb"]);
    cluster.annotated_slice("n2", &["3g.40gb"]);
    cluster.class(CLASS, None);
    cluster.api.fail_next("get", "resourceslices", 2, 500);
    let _controller = cluster.start(&["--class-hold-off", "0s"]);
    let class = "mig-3g.40gb.divvy.dev";
    until("the class exists", || cluster.api.get::<DeviceClass>("", class).is_some()).await;
    assert!((3..=4).contains(&cluster.api.count("get", "resourceslices")));
}

fn config(parameters: Value) -> Value {
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": "c"},
        "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.divvy.dev"}}],
            "config": [{"opaque": {"driver": "gpu.divvy.dev", "parameters": parameters}}],
        }},
    });
    cluster::review("resource.k8s.io", "ResourceClaim", claim)
}

#[tokio::test]
async fn webhook_answers_valid_and_malformed_reviews() {
    let cluster = TestCluster::new().await;
    let controller = cluster.start(&[]);
    let webhook = cluster.webhook(&controller).await;
    let good = config(json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": "GpuConfig"}));
    let (code, answer) = webhook.post(&good).await;
    assert_eq!((code, &answer["response"]), (200, &json!({"uid": "u", "allowed": true})));
    let bad =
        config(json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": "GpuConfig", "shoring": {}}));
    let (code, answer) = webhook.post(&bad).await;
    assert_eq!((code, &answer["response"]["allowed"]), (200, &json!(false)));
    let message = answer["response"]["status"]["message"].as_str().unwrap();
    assert!(
        message.contains("spec.devices.config[0].opaque.parameters") && message.contains("shoring"),
        "{message}"
    );
    for malformed in ["", "{", "[]", "{\"apiVersion\":\"admission.k8s.io/v1\",\"kind\":\"AdmissionReview\"}"]
    {
        assert_eq!(webhook.send(malformed.as_bytes()).await.0, 400, "{malformed:?}");
    }
    let other = cluster::review("apps", "Deployment", json!({"spec": 7}));
    assert_eq!(webhook.post(&other).await.1["response"]["allowed"], json!(true));

    let shown = cluster.api.get::<Secret>(NAMESPACE, "divvy-webhook-certificate").unwrap().data;
    controller.kill();
    let controller = cluster.start(&[]);
    let webhook = cluster.webhook(&controller).await;
    assert_eq!(webhook.post(&bad).await.1["response"]["allowed"], json!(false));
    assert_eq!(cluster.api.get::<Secret>(NAMESPACE, "divvy-webhook-certificate").unwrap().data, shown);
}

#[tokio::test]
async fn pod_is_reviewed_with_its_claims() {
    let cluster = TestCluster::new().await;
    let controller = cluster.start(&[]);
    let webhook = cluster.webhook(&controller).await;
    let pod = |template: &str| {
        cluster::review(
            "",
            "Pod",
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ns", "name": "p"},
                "spec": {
                    "containers": [{"name": "main", "volumeMounts": [{"name": "shm",
                        "mountPath": "/dev/shm"}],
                        "resources": {"claims": [{"name": "gpu"}]}}],
                    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
                    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}],
                },
            }),
        )
    };
    let template = |name: &str, class: &str, selectors: Value| {
        let request = json!({"name": "gpu", "exactly": {"deviceClassName": class, "selectors": selectors}});
        cluster.api.put(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
            "metadata": {"namespace": "ns", "name": name},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        }))
    };
    let of_type = |type_: &str| {
        let expression = format!("device.attributes['gpu.divvy.dev'].type == '{type_}'");
        json!([{"cel": {"expression": expression}}])
    };
    cluster.classes_with_selectors();
    template("mps", "mps.divvy.dev", json!([]));
    template("theirs", "shared-gpu", json!([]));
    template("narrowed-to-mps", "timeslice-or-mps", of_type("mps"));
    template("narrowed-to-timeslice", "timeslice-or-mps", of_type("timeslice"));
    template("whole", "gpu.divvy.dev", json!([]));
    let allowed = async |name: &str| webhook.post(&pod(name)).await.1["response"]["allowed"].clone();
    // An administrator's class is indexed only after its selectors were evaluated.
    for name in ["theirs", "narrowed-to-mps"] {
        cluster::until_async("the class is indexed", async || allowed(name).await == json!(false)).await;
    }
    assert_eq!(allowed("mps").await, json!(false));
    assert_eq!(allowed("narrowed-to-timeslice").await, json!(true));
    assert_eq!(allowed("whole").await, json!(true));
    assert_eq!(allowed("absent").await, json!(true), "the template may be created later");

    cluster.api.fail_next("get", "resourceclaimtemplates", 1, 403);
    assert_eq!(webhook.post(&pod("mps")).await.0, 503, "failurePolicy must decide");
}

/// A pod as HAMi's users write it.
fn hami_pod(name: &str, memory_mib: u32) -> Value {
    let limits = json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": memory_mib, "nvidia.com/gpucores": 30});
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ns", "name": name},
        "spec": {"schedulerName": "hami-scheduler",
            "containers": [{"name": "main", "image": "x", "resources": {"limits": limits}}]},
    })
}

/// Applies the patch of an answer, as the API server does.
fn patched(mut pod: Value, answer: &Value) -> Value {
    assert_eq!(answer["response"]["patchType"], json!("JSONPatch"), "{answer}");
    let patch: ByteString = serde_json::from_value(answer["response"]["patch"].clone()).unwrap();
    let operations: Vec<Value> = serde_json::from_slice(&patch.0).unwrap();
    for operation in operations {
        let (parent, field) = operation["path"].as_str().unwrap().rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap()[field] = operation["value"].clone();
    }
    pod
}

#[tokio::test]
async fn ported_pod_has_its_template_while_it_runs() {
    let cluster = TestCluster::new().await;
    let flags = ["--foreign-requests", "true", "--template-hold-off", "500ms", "--lease-duration", "5s"];
    let controller = cluster.start(&flags);
    let webhook = cluster.webhook(&controller).await.foreign_requests();
    let mutating = || cluster.api.get::<MutatingWebhookConfiguration>("", "divvy-foreign-requests").unwrap();
    let trusted = || mutating().webhooks.unwrap().remove(0).client_config.ca_bundle.is_some();
    until("the mutating webhook is trusted", trusted).await;

    let names = || {
        let templates = cluster.api.list::<ResourceClaimTemplate>().into_iter();
        templates.filter_map(|template| template.metadata.name).collect::<Vec<_>>()
    };
    let create = async |name: &str, memory| {
        let pod = hami_pod(name, memory);
        let (code, answer) = webhook.post(&cluster::review("", "Pod", pod.clone())).await;
        assert_eq!((code, &answer["response"]["allowed"]), (200, &json!(true)), "{answer}");
        assert_eq!(names(), [""; 0], "a review has no side effects");
        let pod = patched(pod, &answer);
        assert_eq!(pod["spec"]["schedulerName"], "default-scheduler");
        cluster.api.put(pod.clone());
        pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"].as_str().unwrap().to_owned()
    };
    let name = create("a", 10240).await;
    until("the template exists", || names() == [name.as_str()]).await;
    let template = cluster.api.get::<ResourceClaimTemplate>("ns", &name).unwrap();
    let request = template.spec.unwrap().spec.unwrap().devices.unwrap().requests.unwrap().remove(0);
    let request = request.exactly.unwrap();
    let amounts = request.capacity.unwrap().requests.unwrap();
    assert_eq!(
        (request.device_class_name.as_str(), amounts["memory"].0.as_str()),
        ("share.divvy.dev", "10Gi")
    );
    assert_eq!(template.metadata.labels.unwrap()["app.kubernetes.io/managed-by"], "divvy");

    cluster.api.delete::<Pod>("ns", "a");
    until("the template is deleted", || names().is_empty()).await;
    assert_eq!(create("b", 10240).await, name, "the name is a hash of the request");
    until("the template exists again", || names() == [name.as_str()]).await;
    controller.kill();
    let mut finished = serde_json::to_value(cluster.api.get::<Pod>("ns", "b").unwrap()).unwrap();
    finished["status"] = json!({"phase": "Succeeded"});
    (finished["apiVersion"], finished["kind"]) = (json!("v1"), json!("Pod"));
    cluster.api.put(finished);
    let _controller = cluster.start(&flags);
    until("a finished pod releases it", || names().is_empty()).await;
}

#[tokio::test]
async fn foreign_requests_are_refused_with_a_remedy() {
    let cluster = TestCluster::new().await;
    let controller = cluster.start(&["--foreign-requests", "true"]);
    let webhook = cluster.webhook(&controller).await.foreign_requests();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": "ns", "name": "p", "annotations": {"gpu-fraction": "0.5"}},
        "spec": {"containers": [{"name": "main", "image": "x"}]},
    });
    let (_, answer) = webhook.post(&cluster::review("", "Pod", pod)).await;
    assert_eq!(answer["response"]["allowed"], json!(false));
    let message = answer["response"]["status"]["message"].as_str().unwrap();
    assert!(message.contains("gpu-fraction") && message.contains("foreignRequests.gpuMemory"), "{message}");
    let other = cluster::review("", "Pod", hami_pod("p", 0));
    let mut update = other.clone();
    update["request"]["operation"] = json!("UPDATE");
    assert_eq!(webhook.post(&update).await.1["response"], json!({"uid": "u", "allowed": true}));
}

#[tokio::test]
async fn second_replica_takes_over_the_lease() {
    let cluster = TestCluster::new().await;
    let holder = || {
        let lease = cluster.api.get::<Lease>(NAMESPACE, "divvy-controller")?;
        let holder = lease.spec?.holder_identity?;
        (!holder.is_empty()).then(|| holder.split('_').next().unwrap_or_default().to_owned())
    };
    // Long enough to keep the leader's lease alive on a busy machine, short enough for a test.
    let lease = ["--lease-duration", "5s"];
    let one = cluster.start(&[&["--identity", "one"], &lease[..]].concat());
    until("the first replica leads", || holder().as_deref() == Some("one")).await;
    let two = cluster.start(&[&["--identity", "two"], &lease[..]].concat());
    let webhook = cluster.webhook(&two).await;
    assert_eq!(webhook.send(b"").await.0, 400, "a replica that does not lead must answer too");
    assert_eq!(holder().as_deref(), Some("one"));
    one.kill();
    until("the second replica leads", || holder().as_deref() == Some("two")).await;
}

#[tokio::test]
async fn decommission_waits_for_claims_then_deletes_everything() {
    let cluster = TestCluster::new().await;
    cluster.slice("n1-a", &["1g.10gb"]);
    cluster.class("mig.divvy.dev", None);
    let controller = cluster.start(&[]);
    cluster.webhook(&controller).await;
    until("the class exists", || cluster.api.get::<DeviceClass>("", CLASS).is_some()).await;
    let container = json!({"name": "node", "args": ["--run-dir", "/r"]});
    cluster.api.put(json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"namespace": NAMESPACE,
            "name": "divvy-node", "generation": 1},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {"spec": {"containers": [container]}}},
    }));
    cluster.api.put(json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": NAMESPACE,
            "name": "divvy-controller"},
        "spec": {"replicas": 1, "selector": {}, "template": {}},
    }));
    let claim = |name: &str, driver: &str| {
        let result = json!({"request": "r", "driver": driver, "pool": "n1", "device": "gpu-0"});
        cluster.api.put(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": "ns", "name": name},
            "spec": {}, "status": {"allocation": {"devices": {"results": [result]}}},
        }))
    };
    claim("theirs", "gpu.nvidia.com");
    claim("ours", "gpu.divvy.dev");
    let mut refused = cluster.decommission(&[]);
    assert_eq!(refused.exit_status().await, Some(1));
    assert!(refused.log().contains("claim ns/ours on node n1, used by no pod"), "{}", refused.log());
    assert!(cluster.api.list::<DeviceTaintRule>().is_empty(), "the taint was not reverted");

    let mut decommission = cluster.decommission(&["--wait", "1m"]);
    until("the devices are tainted", || !cluster.api.list::<DeviceTaintRule>().is_empty()).await;
    cluster.api.delete::<k8s_openapi::api::resource::v1::ResourceClaim>("ns", "ours");
    let daemons = || cluster.api.get::<DaemonSet>(NAMESPACE, "divvy-node").unwrap();
    let args = || daemons().spec.template.spec.unwrap().containers[0].args.clone().unwrap();
    until("the DaemonSet is patched", || args().iter().any(|arg| arg == "--decommission")).await;
    let mut rolled_out = serde_json::to_value(daemons()).unwrap();
    rolled_out["apiVersion"] = json!("apps/v1");
    rolled_out["kind"] = json!("DaemonSet");
    rolled_out["status"] = json!({
        "observedGeneration": rolled_out["metadata"]["generation"], "desiredNumberScheduled": 1,
        "currentNumberScheduled": 1,
        "numberMisscheduled": 0, "updatedNumberScheduled": 1, "numberReady": 1,
    });
    cluster.api.put(rolled_out);
    let replicas = || cluster.api.get::<Deployment>(NAMESPACE, "divvy-controller")?.spec.replicas;
    until("the controller is scaled to 0", || replicas() == Some(0)).await;
    assert_eq!(controller.stop().await, Some(0));
    assert_eq!(decommission.exit_status().await, Some(0), "{}", decommission.log());
    let remaining = (
        cluster.api.get::<DeviceClass>("", CLASS),
        cluster.api.list::<Secret>(),
        cluster.api.list::<Lease>(),
        cluster.api.list::<DeviceTaintRule>(),
    );
    assert_eq!(remaining, (None, vec![], vec![], vec![]));
    assert!(
        cluster.api.get::<DeviceClass>("", "mig.divvy.dev").is_some(),
        "an object of the chart was deleted"
    );
    assert!(cluster.api.get::<ValidatingWebhookConfiguration>("", "divvy").is_some());
}

#[tokio::test]
async fn failed_decommission_restores_the_daemonset() {
    let cluster = TestCluster::new().await;
    let spec = json!({
        "selector": {"matchLabels": {"a": "b"}},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"spec": {"containers": [{"name": "node", "args": ["--run-dir", "/r"]}]}},
    });
    let before = cluster.api.put(json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"namespace": NAMESPACE,
            "name": "divvy-node", "generation": 1},
        "spec": spec,
    }));
    let mut decommission = cluster.decommission(&["--timeout", "0s"]);
    assert_eq!(decommission.exit_status().await, Some(1));
    assert!(
        decommission.log().contains("has not started the rollout after 0ns; see the log"),
        "{}",
        decommission.log()
    );
    let after = serde_json::to_value(cluster.api.get::<DaemonSet>(NAMESPACE, "divvy-node").unwrap()).unwrap();
    assert_eq!(after["spec"], before["spec"]);
    assert!(cluster.api.list::<DeviceTaintRule>().is_empty());
}

/// The controller's annotations of the Node.
fn removals(cluster: &TestCluster) -> (Option<String>, Option<String>) {
    let annotations = cluster.api.get::<Node>("", "n1").unwrap().metadata.annotations.unwrap_or_default();
    let text = |key: &str| annotations.get(key).cloned();
    (text("gpu.divvy.dev/removable"), text("gpu.divvy.dev/allocated"))
}

/// The first slice of the node, with the modes that are off.
fn modes_off(cluster: &TestCluster, modes: &str) {
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u", "controller": true});
    cluster.api.put(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"name": "00000-n1", "ownerReferences": [owner],
            "annotations": {"gpu.divvy.dev/modes-off": modes}},
        "spec": {"driver": "gpu.divvy.dev", "nodeName": "n1",
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1}},
    }));
}

fn allocate(cluster: &TestCluster, name: &str, device: &str) {
    let result = json!({"request": "r", "driver": "gpu.divvy.dev", "pool": "n1", "device": device});
    cluster.api.put(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": name, "uid": name},
        "spec": {}, "status": {"allocation": {"devices": {"results": [result]}}},
    }));
}

fn has_event(cluster: &TestCluster, reason: &str, part: &str) -> bool {
    let matches = |event: Event| {
        event.reason.as_deref() == Some(reason) && event.note.is_some_and(|note| note.contains(part))
    };
    cluster.api.list::<Event>().into_iter().any(matches)
}

#[tokio::test]
async fn removal_is_approved_when_the_last_claim_has_ended() {
    let cluster = TestCluster::new().await;
    cluster
        .api
        .put(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": {"a": "b"}}}));
    allocate(&cluster, "a", "gpu-0-mps");
    modes_off(&cluster, "timeslice@7:0 mps@7:0 mig:0");
    let flags = ["--removal-delay", "1s", "--lease-duration", "5s"];
    let controller = cluster.start(&flags);
    until("the unused mode is removable", || removals(&cluster).0.as_deref() == Some("timeslice@7:0")).await;
    until("an event names the claim", || has_event(&cluster, "ModeInUse", "claim ns/a")).await;
    cluster.api.delete::<ResourceClaim>("ns", "a");
    until("both are removable", || removals(&cluster).0.as_deref() == Some("timeslice@7:0 mps@7:0")).await;
    modes_off(&cluster, "timeslice@8:0 mps:0 mig:0");
    until("the new closing is removable", || removals(&cluster).0.as_deref() == Some("timeslice@8:0")).await;
    // A claim that was allocated too late.
    allocate(&cluster, "late", "gpu-0-mps");
    until("the claim is named", || removals(&cluster).1.is_some_and(|text| text.contains("\"late\""))).await;
    until("an event names it", || has_event(&cluster, "AllocatedAfterRemoval", "claim ns/late")).await;
    allocate(&cluster, "later", "gpu-0-timeslice");
    until("the approval is withdrawn", || removals(&cluster).0.is_none()).await;
    modes_off(&cluster, "timeslice@8:0 mps@9:0 mig:0");
    // The next leader keeps the name of a claim whose device was published again.
    controller.kill();
    let _controller = cluster.start(&flags);
    cluster.api.delete::<ResourceClaim>("ns", "later");
    until("the next leader approves", || removals(&cluster).0.as_deref() == Some("timeslice@8:0")).await;
    assert!(removals(&cluster).1.is_some_and(|text| text.contains("\"late\"")));
    cluster.api.delete::<ResourceClaim>("ns", "late");
    until("no claim is named", || removals(&cluster).1.is_none()).await;
    assert_eq!(cluster.api.get::<Node>("", "n1").unwrap().metadata.labels.unwrap()["a"], "b");
}
