//! Findings for pods: devices that a container cannot use, and paths that it must not cover.

use crate::{check, request, share, view};
use divvy_api::check::{Finding, Objects, Severity};
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use serde_json::{Value, json};

/// A pod with one container that uses claims from these templates.
pub(crate) fn pod(templates: &[(&str, Value)], uses: Value, container: Value) -> (Value, Objects) {
    let mut view = view();
    let mut claims = Vec::new();
    for (name, devices) in templates {
        let template: ResourceClaimTemplate =
            serde_json::from_value(json!({"spec": {"spec": {"devices": devices}}})).expect("a template");
        let devices =
            template.spec.and_then(|spec| spec.spec).and_then(|spec| spec.devices).expect("devices");
        view.templates.insert(("ns".to_owned(), (*name).to_owned()), devices);
        claims.push(json!({"name": name, "resourceClaimTemplateName": name}));
    }
    claims.push(json!({"name": "not-yet", "resourceClaimName": "not-yet"}));
    let mut container = container;
    container["name"] = json!("main");
    container["resources"] = json!({"claims": uses});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ns", "name": "p"},
        "spec": {"resourceClaims": claims, "containers": [container]},
    });
    (pod, view)
}

/// The findings without warnings, which other tests compare.
fn errors(found: &[Finding]) -> Vec<String> {
    let errors = found.iter().filter(|finding| finding.severity == Severity::Error);
    errors.map(Finding::to_string).collect()
}

fn check_pod(templates: &[(&str, Value)], uses: Value, container: Value, expected: &[&str]) {
    let (pod, view) = pod(templates, uses, container);
    let found = check::object(pod.to_string().as_bytes(), &view).expect("a pod");
    let found = errors(&found);
    assert_eq!(found, expected, "{pod:#}");
}

fn devices(class: &str) -> Value {
    json!({"requests": [request("r", class)]})
}

#[test]
fn container_can_use_one_mps_daemon() {
    let mps_claim = || devices("mps.divvy.dev");
    let use_of = |names: &[&str]| -> Value { names.iter().map(|name| json!({"name": name})).collect() };
    let none = || json!({});
    check_pod(&[("a", mps_claim())], use_of(&["a", "not-yet"]), none(), &[]);
    check_pod(&[("a", mps_claim()), ("b", mps_claim())], use_of(&["a"]), none(), &[]);
    check_pod(&[("a", mps_claim()), ("b", devices("gpu.divvy.dev"))], use_of(&["a", "b"]), none(), &[]);
    let two_claims = "error: spec.containers[0].resources.claims: container main uses MPS requests of the \
         claims a and b, but a container can use only one MPS control daemon; use each claim in its own \
         container";
    check_pod(&[("a", mps_claim()), ("b", mps_claim())], use_of(&["a", "b"]), none(), &[two_claims]);
    check_pod(
        &[("a", mps_claim()), ("b", devices("mps-gpu.example.com"))],
        use_of(&["a", "b"]),
        none(),
        &[two_claims],
    );
    let two = |more: Value| {
        let mut devices = more;
        devices["requests"] = json!([request("q", "mps.divvy.dev"), request("r", "mps.divvy.dev")]);
        devices
    };
    let two_requests = "error: spec.containers[0].resources.claims: container main uses the MPS requests q \
         and r of claim a, but a container can use only one MPS control daemon; add the constraint \
         matchAttribute gpu.divvy.dev/uuid to the claim, or use each request in its own container";
    let constraint = |attribute: &str, requests: &[&str]| -> Value {
        let constraint = json!({"matchAttribute": attribute, "requests": requests});
        json!({"constraints": [constraint]})
    };
    check_pod(&[("a", two(none()))], use_of(&["a"]), none(), &[two_requests]);
    check_pod(&[("a", two(none()))], json!([{"name": "a", "request": "q"}]), none(), &[]);
    let uuid = "gpu.divvy.dev/uuid";
    check_pod(&[("a", two(constraint(uuid, &["q", "r"])))], use_of(&["a"]), none(), &[]);
    check_pod(&[("a", two(constraint(uuid, &[])))], use_of(&["a"]), none(), &[]);
    check_pod(&[("a", two(constraint(uuid, &["q"])))], use_of(&["a"]), none(), &[two_requests]);
    let product = "gpu.divvy.dev/productName";
    check_pod(&[("a", two(constraint(product, &[])))], use_of(&["a"]), none(), &[two_requests]);
    let either = json!({"requests": [{"name": "r", "firstAvailable": [
        {"name": "mps", "deviceClassName": "mps.divvy.dev"},
        {"name": "other", "deviceClassName": "mps.divvy.dev"},
    ]}]});
    check_pod(&[("a", either)], use_of(&["a"]), none(), &[]);
}

#[test]
fn volumes_over_mps_paths_are_rejected() {
    let mounting = |path: &str| json!({"volumeMounts": [{"name": "v", "mountPath": path}]});
    let refused = |path: &str| {
        format!(
            "error: spec.containers[0].volumeMounts[0].mountPath: container main uses MPS and mounts a \
             volume at {path}, which MPS clients and their control daemon need; remove the volume"
        )
    };
    let uses = || json!([{"name": "a"}]);
    for path in ["/dev/shm", "/dev/shm/", "//dev/./shm", "/dev/x/../shm"] {
        check_pod(&[("a", devices("mps.divvy.dev"))], uses(), mounting(path), &[&refused("/dev/shm")]);
        check_pod(&[("a", devices("gpu.divvy.dev"))], uses(), mounting(path), &[]);
    }
    check_pod(
        &[("a", devices("mps-gpu.example.com"))],
        uses(),
        mounting("/tmp/nvidia-mps"),
        &[&refused("/tmp/nvidia-mps")],
    );
    check_pod(&[("a", devices("mps.divvy.dev"))], uses(), mounting("/tmp"), &[]);
    check_pod(&[("a", devices("mps.divvy.dev"))], json!([]), mounting("/dev/shm"), &[]);
}

#[test]
fn extended_resource_of_share_class_is_rejected() {
    let check = |class: &str, expected: &[&str]| {
        let name = format!("deviceclass.resource.kubernetes.io/{class}");
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ns", "name": "p"},
            "spec": {"containers": [{"name": "main", "resources": {"limits": {name: "1", "cpu": "1"}}}]},
        });
        check(&pod, expected);
    };
    check("gpu.divvy.dev", &[]);
    check(
        "share.divvy.dev",
        &["error: \
             spec.containers[0].resources.limits[deviceclass.resource.kubernetes.io/share.divvy.dev]: \
             deviceclass.resource.kubernetes.io/share.divvy.dev cannot set a share size, but its \
             DeviceClass is for part of a GPU; use a ResourceClaim"],
    );
}

#[test]
fn volumes_near_share_files_are_rejected() {
    const KEPT: &str = "where the files that enforce share limits are mounted; remove the volume";
    const BELOW: &str = "above the files that enforce the limits of its share, and others can access that \
         volume; use an emptyDir that no other container mounts, or mount it elsewhere";
    let templates =
        || [("a", json!({"requests": [share("share.divvy.dev", "1Gi")]})), ("b", devices("gpu.divvy.dev"))];
    // A volume of the pod, its mount path, and whether a second container mounts it too.
    let check = |volume: Value, path: &str, uses: &str, second: bool, expected: Option<&str>| {
        let mount = json!({"volumeMounts": [{"name": "v", "mountPath": path}]});
        let (mut pod, view) = pod(&templates(), json!([{"name": uses}]), mount.clone());
        // An unknown claim may be a share.
        pod["spec"]["resourceClaims"].as_array_mut().expect("claims").truncate(2);
        let mut volume = volume;
        volume["name"] = json!("v");
        pod["spec"]["volumes"] = json!([volume]);
        if second {
            let mut other = json!({"name": "other", "volumeMounts": mount["volumeMounts"]});
            other["volumeMounts"][0]["mountPath"] = json!("/data");
            pod["spec"]["containers"].as_array_mut().expect("containers").push(other);
        }
        let found = check::object(pod.to_string().as_bytes(), &view).expect("a pod");
        let found = errors(&found);
        let at = "error: spec.containers[0].volumeMounts[0].mountPath: container main mounts a volume at";
        let expected: Vec<_> = expected.iter().map(|why| format!("{at} {path}, {why}")).collect();
        assert_eq!(found, expected, "{pod:#}");
    };
    let (empty, config) = (json!({"emptyDir": {}}), json!({"configMap": {"name": "c"}}));
    for path in ["/run/divvy", "/run/divvy/u/s/policy", "/var/run/divvy/u", "/run/./x/..//divvy/"] {
        check(config.clone(), path, "a", false, Some(KEPT));
        check(empty.clone(), path, "b", false, Some(KEPT));
    }
    check(config.clone(), "/etc/ld.so.preload", "a", false, Some(KEPT));
    check(config.clone(), "/etc/ld.so.preload", "b", false, None);
    for path in ["/run", "/etc", "/var/run/"] {
        check(empty.clone(), path, "a", false, None);
        check(empty.clone(), path, "a", true, Some(BELOW));
        check(config.clone(), path, "a", false, Some(BELOW));
        check(config.clone(), path, "b", true, None);
    }
    for path in ["/run/divvyish", "/etc/ld.so.preload.d", "/data"] {
        check(config.clone(), path, "a", true, None);
    }
    // A claim that does not exist yet.
    let (mut pod, _) = pod(&[], json!([{"name": "not-yet"}]), json!({}));
    pod["spec"]["containers"][0]["volumeDevices"] = json!([{"name": "v", "devicePath": "/run/divvy/x"}]);
    pod["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/var/run/divvy/shares"}}]);
    let found = check::object(pod.to_string().as_bytes(), &view()).expect("a pod");
    let found = errors(&found);
    let expected = [
        "error: spec.volumes[0].hostPath.path: the pod uses a share, and this is the directory of the pages \
         of shares on the node; remove the volume",
        "error: spec.containers[0].volumeDevices[0].devicePath: container main mounts a volume at \
         /run/divvy/x, where the files that enforce share limits are mounted; remove the volume",
    ];
    assert_eq!(found, expected);
}
