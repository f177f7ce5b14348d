//! The real `divvy-controller` as a process against the fake API server.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod world;

use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceSlice};
use serde_json::{Value, json};
use world::{NAMESPACE, World, until};

const CLASS: &str = "mig-1g.10gb.divvy.dev";

#[tokio::test]
async fn classes_follow_what_nodes_offer() {
    let world = World::new().await;
    world.slice("n1-a", &["1g.10gb", "1g.10gb+me"]);
    world.class("mig-1g.10gb.me.divvy.dev", None);
    let controller = world.start(&["--class-hold-off", "0s"]);
    let owner = world.class("mig.divvy.dev", None);
    until("the class is made", || world.api.get::<DeviceClass>("", CLASS).is_some()).await;
    let class = world.api.get::<DeviceClass>("", CLASS).unwrap();
    let owners = class.metadata.owner_references.unwrap();
    assert_eq!(owners[0].uid, owner["metadata"]["uid"].as_str().unwrap());
    let spec = class.spec.unwrap();
    assert_eq!(spec.extended_resource_name.as_deref(), Some("nvidia.com/mig-1g.10gb"));

    world.class("somebody-elses", Some("nvidia.com/mig-1g.10gb"));
    let resource = || world.api.get::<DeviceClass>("", CLASS)?.spec?.extended_resource_name;
    until("the resource name is given up", || resource().is_none()).await;
    world.api.delete::<DeviceClass>("", "somebody-elses");
    until("the resource name is taken again", || resource().is_some()).await;

    world.api.delete_all::<ResourceSlice>();
    until("the class goes with the last slice", || world.api.get::<DeviceClass>("", CLASS).is_none()).await;
    let theirs = world.api.get::<DeviceClass>("", "mig-1g.10gb.me.divvy.dev").unwrap();
    assert_eq!(theirs.metadata.labels, None, "what is not ours is not touched");
    assert_eq!(controller.stop().await, Some(0));
    let lease = world.api.get::<Lease>(NAMESPACE, "divvy-controller").unwrap().spec.unwrap();
    assert_eq!(lease.holder_identity.as_deref(), Some(""), "the lease is given back");
}

fn config(parameters: Value) -> Value {
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"namespace": "ns", "name": "c"},
        "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.divvy.dev"}}],
            "config": [{"opaque": {"driver": "gpu.divvy.dev", "parameters": parameters}}],
        }},
    });
    world::review("resource.k8s.io", "ResourceClaim", claim)
}

#[tokio::test]
async fn the_api_server_can_ask_and_gets_an_answer_whatever_it_sends() {
    let world = World::new().await;
    let controller = world.start(&[]);
    let webhook = world.webhook(&controller).await;
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
    let other = world::review("apps", "Deployment", json!({"spec": 7}));
    assert_eq!(webhook.post(&other).await.1["response"]["allowed"], json!(true));

    let shown = world.api.get::<Secret>(NAMESPACE, "divvy-webhook-certificate").unwrap().data;
    controller.kill();
    let controller = world.start(&[]);
    let webhook = world.webhook(&controller).await;
    assert_eq!(webhook.post(&bad).await.1["response"]["allowed"], json!(false));
    assert_eq!(world.api.get::<Secret>(NAMESPACE, "divvy-webhook-certificate").unwrap().data, shown);
}

#[tokio::test]
async fn a_pod_is_judged_with_the_claims_it_names() {
    let world = World::new().await;
    let controller = world.start(&[]);
    let webhook = world.webhook(&controller).await;
    let pod = |template: &str| {
        world::review(
            "",
            "Pod",
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ns", "name": "p"},
                "spec": {
                    "containers": [{"name": "main", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                        "resources": {"claims": [{"name": "gpu"}]}}],
                    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
                    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}],
                },
            }),
        )
    };
    let template = |name: &str, class: &str, selectors: Value| {
        let request = json!({"name": "gpu", "exactly": {"deviceClassName": class, "selectors": selectors}});
        world.api.put(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
            "metadata": {"namespace": "ns", "name": name},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        }))
    };
    let of_type = |type_: &str| json!([{"cel": {"expression": format!("device.attributes['gpu.divvy.dev'].type == '{type_}'")}}]);
    world.classes_with_selectors();
    template("mps", "mps.divvy.dev", json!([]));
    template("theirs", "shared-gpu", json!([]));
    template("narrowed-to-mps", "in-turns-or-mps", of_type("mps"));
    template("narrowed-to-turns", "in-turns-or-mps", of_type("timeslice"));
    template("whole", "gpu.divvy.dev", json!([]));
    let allowed = async |name: &str| webhook.post(&pod(name)).await.1["response"]["allowed"].clone();
    // The class of an administrator is known once its selectors were asked.
    for name in ["theirs", "narrowed-to-mps"] {
        world::until_async("an administrator's class is read", async || allowed(name).await == json!(false))
            .await;
    }
    assert_eq!(allowed("mps").await, json!(false));
    assert_eq!(allowed("narrowed-to-turns").await, json!(true));
    assert_eq!(allowed("whole").await, json!(true));
    assert_eq!(allowed("absent").await, json!(true), "a template may come later");

    world.api.fail_next("get", "resourceclaimtemplates", 1, 403);
    assert_eq!(webhook.post(&pod("mps")).await.0, 503, "failurePolicy decides");
}

#[tokio::test]
async fn of_two_replicas_one_writes_and_the_other_takes_over() {
    let world = World::new().await;
    let holder = || {
        let lease = world.api.get::<Lease>(NAMESPACE, "divvy-controller")?;
        let holder = lease.spec?.holder_identity?;
        (!holder.is_empty()).then(|| holder.split('_').next().unwrap_or_default().to_owned())
    };
    // Long enough that a busy machine does not make a living leader look silent,
    // short enough to wait for.
    let lease = ["--lease-duration", "5s"];
    let one = world.start(&[&["--identity", "one"], &lease[..]].concat());
    until("the first leads", || holder().as_deref() == Some("one")).await;
    let two = world.start(&[&["--identity", "two"], &lease[..]].concat());
    let webhook = world.webhook(&two).await;
    assert_eq!(webhook.send(b"").await.0, 400, "who does not lead answers as well");
    assert_eq!(holder().as_deref(), Some("one"));
    one.kill();
    until("the second leads", || holder().as_deref() == Some("two")).await;
}

#[tokio::test]
async fn leaving_is_refused_while_a_claim_is_allocated_and_leaves_nothing() {
    let world = World::new().await;
    world.slice("n1-a", &["1g.10gb"]);
    world.class("mig.divvy.dev", None);
    let controller = world.start(&[]);
    world.webhook(&controller).await;
    until("the class is made", || world.api.get::<DeviceClass>("", CLASS).is_some()).await;
    let container = json!({"name": "node", "args": ["--run-dir", "/r"]});
    world.api.put(json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"namespace": NAMESPACE, "name": "divvy-node", "generation": 1},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {"spec": {"containers": [container]}}},
    }));
    world.api.put(json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": NAMESPACE, "name": "divvy-controller"},
        "spec": {"replicas": 1, "selector": {}, "template": {}},
    }));
    let claim = |name: &str, driver: &str| {
        let result = json!({"request": "r", "driver": driver, "pool": "n1", "device": "gpu-0"});
        world.api.put(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"namespace": "ns", "name": name},
            "spec": {}, "status": {"allocation": {"devices": {"results": [result]}}},
        }))
    };
    claim("theirs", "gpu.nvidia.com");
    claim("ours", "gpu.divvy.dev");
    let mut refused = world.leave(&[]);
    assert_eq!(refused.ended().await, Some(1));
    assert!(refused.log().contains("claim ns/ours on node n1, used by no pod"), "{}", refused.log());
    assert!(world.api.list::<DeviceTaintRule>().is_empty(), "everything is as before");

    let mut leave = world.leave(&["--wait", "1m"]);
    until("devices are tainted", || !world.api.list::<DeviceTaintRule>().is_empty()).await;
    world.api.delete::<k8s_openapi::api::resource::v1::ResourceClaim>("ns", "ours");
    let daemons = || world.api.get::<DaemonSet>(NAMESPACE, "divvy-node").unwrap();
    let args = || daemons().spec.template.spec.unwrap().containers[0].args.clone().unwrap();
    until("the daemons are told to leave", || args().iter().any(|arg| arg == "--leave")).await;
    let mut left = serde_json::to_value(daemons()).unwrap();
    left["apiVersion"] = json!("apps/v1");
    left["kind"] = json!("DaemonSet");
    left["status"] = json!({
        "observedGeneration": left["metadata"]["generation"], "desiredNumberScheduled": 1, "currentNumberScheduled": 1,
        "numberMisscheduled": 0, "updatedNumberScheduled": 1, "numberReady": 1,
    });
    world.api.put(left);
    let replicas = || world.api.get::<Deployment>(NAMESPACE, "divvy-controller")?.spec.replicas;
    until("the controller is to stop", || replicas() == Some(0)).await;
    assert_eq!(controller.stop().await, Some(0));
    assert_eq!(leave.ended().await, Some(0), "{}", leave.log());
    let left = (
        world.api.get::<DeviceClass>("", CLASS),
        world.api.list::<Secret>(),
        world.api.list::<Lease>(),
        world.api.list::<DeviceTaintRule>(),
    );
    assert_eq!(left, (None, vec![], vec![], vec![]));
    assert!(
        world.api.get::<DeviceClass>("", "mig.divvy.dev").is_some(),
        "what the chart owns is the chart's"
    );
    assert!(world.api.get::<ValidatingWebhookConfiguration>("", "divvy").is_some());
}

#[tokio::test]
async fn nodes_that_do_not_leave_are_put_as_they_were() {
    let world = World::new().await;
    let spec = json!({
        "selector": {"matchLabels": {"a": "b"}},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"spec": {"containers": [{"name": "node", "args": ["--run-dir", "/r"]}]}},
    });
    let before = world.api.put(json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"namespace": NAMESPACE, "name": "divvy-node", "generation": 1},
        "spec": spec,
    }));
    let mut leave = world.leave(&["--within", "0s"]);
    assert_eq!(leave.ended().await, Some(1));
    assert!(leave.log().contains("not every node has left"), "{}", leave.log());
    let after = serde_json::to_value(world.api.get::<DaemonSet>(NAMESPACE, "divvy-node").unwrap()).unwrap();
    assert_eq!(after["spec"], before["spec"]);
    assert!(world.api.list::<DeviceTaintRule>().is_empty());
}
