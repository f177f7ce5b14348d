//! What prepare would refuse, and what a container could not reach, is found in
//! the objects.

use divvy_api::check::{self, Class, Finding, Objects, Severity};
use divvy_api::sharing::Mode;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use proptest::prelude::*;
use serde_json::{Value, json};

fn claim(devices: Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": "c"}, "spec": {"devices": devices},
    })
}

fn request(name: &str, class: &str) -> Value {
    json!({"name": name, "exactly": {"deviceClassName": class}})
}

fn asking(name: &str, class: &str, more: Value) -> Value {
    let mut request = request(name, class);
    for (key, field) in more.as_object().into_iter().flatten() {
        request["exactly"][key] = field.clone();
    }
    request
}

fn config(parameters: Value, requests: &[&str]) -> Value {
    json!({"requests": requests, "opaque": {"driver": "gpu.divvy.dev", "parameters": parameters}})
}

fn sharing(kind: &str, sharing: Value) -> Value {
    json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": kind, "sharing": sharing})
}

fn mps(kind: &str) -> Value {
    sharing(kind, json!({"strategy": "MPS"}))
}

/// The well-known classes, one of an administrator for each purpose.
fn world() -> Objects {
    let class = |modes: &[Mode], config: Value| {
        let config = json!({"metadata": {"name": "x"}, "spec": {"config": [config]}});
        let class: DeviceClass = serde_json::from_value(config).expect("a class");
        Class::of(&class, Some(modes.iter().copied().collect()))
    };
    let none = || json!({});
    let classes = [
        ("any.example.com", class(&[Mode::Whole, Mode::Mig], none())),
        ("mps-gpu.example.com", class(&[Mode::Whole], config(mps("GpuConfig"), &[]))),
        ("broken.example.com", class(&[Mode::Whole], config(json!({"kind": "GpuConfig"}), &[]))),
        ("nic.example.com", class(&[], none())),
    ];
    let classes = classes.map(|(name, class)| (name.to_owned(), class)).into();
    Objects { classes, ..Objects::default() }
}

fn check(object: &Value, expected: &[&str]) {
    let found = check::object(object.to_string().as_bytes(), &world()).expect("an object");
    let found: Vec<_> = found.iter().map(Finding::to_string).collect();
    assert_eq!(found, expected, "{object:#}");
}

#[test]
fn what_is_well_written_has_no_findings() {
    check(&claim(json!({"requests": [request("gpu", "gpu.divvy.dev")]})), &[]);
    let slots = json!({"capacity": {"requests": {"slots": "2", "memory": "0"}}});
    check(&claim(json!({"requests": [asking("ts", "timeslice.divvy.dev", slots)]})), &[]);
    let part = json!({"capacity": {"requests": {"threads": "30", "memory": "10Gi", "clients": 2}}});
    check(&claim(json!({"requests": [asking("mps", "mps.divvy.dev", part)]})), &[]);
    let big = json!({"capacity": {"requests": {"memory": "40Gi"}}});
    check(&claim(json!({"requests": [asking("gpu", "gpu.divvy.dev", big)]})), &[]);
    check(
        &claim(json!({
            "requests": [
                {"name": "gpu", "firstAvailable": [
                    {"name": "mig", "deviceClassName": "mig-1g.10gb.divvy.dev"},
                    {"name": "whole", "deviceClassName": "gpu.divvy.dev"},
                ]},
                request("net", "nic.example.com"),
            ],
            "config": [config(mps("GpuConfig"), &["gpu"]), config(mps("MigDeviceConfig"), &[])],
        })),
        &[],
    );
    let foreign = json!({"opaque": {"driver": "net.example.com", "parameters": {"mtu": 9}}});
    let odd = json!({"capacity": {"requests": {"bandwidth": "1G"}}});
    check(&claim(json!({"requests": [asking("net", "nic.example.com", odd)], "config": [foreign, {}]})), &[]);
    check(&json!({"apiVersion": "apps/v1", "kind": "Deployment", "spec": 7}), &[]);
}

#[test]
fn a_configuration_is_judged_as_prepare_does() {
    let check = |requests: &[Value], configs: &[Value], expected: &[&str]| {
        check(&claim(json!({"requests": requests, "config": configs})), expected);
    };
    let (gpu, mig) = (|| request("r", "gpu.divvy.dev"), || request("r", "mig.divvy.dev"));
    check(
        &[mig()],
        &[config(sharing("MigDeviceConfig", json!({"strategy": "TimeSlicing"})), &[])],
        &[
            "error: spec.devices.config[0].opaque.parameters: field sharing.strategy is TimeSlicing, which does nothing on a MIG instance; use MPS, or a GpuConfig for a whole GPU",
        ],
    );
    check(
        &[gpu()],
        &[config(mps("MigDeviceConfig"), &["r"])],
        &[
            "error: spec.devices.config[0]: request r: MigDeviceConfig is for MIG instances, and the device is a whole GPU; use GpuConfig",
        ],
    );
    check(
        &[gpu()],
        &[config(mps("MigDeviceConfig"), &[])],
        &["warning: spec.devices.config[0]: MigDeviceConfig is for no device of this claim; remove it"],
    );
    check(&[gpu(), request("other", "unknown.example.com")], &[config(mps("MigDeviceConfig"), &[])], &[]);
    check(
        &[request("r", "timeslice.divvy.dev")],
        &[config(sharing("GpuConfig", json!({"strategy": "TimeSlicing"})), &["r"])],
        &[
            "error: spec.devices.config[0]: request r: GpuConfig is for whole GPUs, and the device is a time-slice; its interval is set by the node configuration, so remove the configuration",
        ],
    );
    check(
        &[request("r", "any.example.com")],
        &[config(mps("GpuConfig"), &["r"])],
        &[
            "error: spec.devices.config[0]: request r: GpuConfig is for whole GPUs, and the device is a MIG instance; use MigDeviceConfig",
        ],
    );
    let selected =
        json!({"selectors": [{"cel": {"expression": "device.attributes['gpu.divvy.dev'].type == 'gpu'"}}]});
    check(
        &[asking("r", "any.example.com", selected)],
        &[config(mps("GpuConfig"), &["r"])],
        &[
            "warning: spec.devices.config[0]: request r: GpuConfig is for whole GPUs, and the device is a MIG instance; use MigDeviceConfig",
        ],
    );
    check(
        &[gpu()],
        &[config(mps("GpuConfig"), &["s"])],
        &[
            "error: spec.devices.config[0].requests: the claim has no request s; name one of its requests",
            "warning: spec.devices.config[0]: GpuConfig is for no device of this claim; remove it",
        ],
    );
    check(
        &[request("r", "broken.example.com")],
        &[],
        &[
            r#"error: spec.devices.requests[0].exactly.deviceClassName: the configuration of its DeviceClass is refused: field apiVersion is missing, expected "resource.divvy.dev/v1alpha1""#,
        ],
    );
    check(
        &[asking("r", "gpu.divvy.dev", json!({"adminAccess": true}))],
        &[],
        &[
            "warning: spec.devices.requests[0].exactly.adminAccess: adminAccess looks on: no device is made or set up for it, and the scheduler finds no device on a GPU that somebody holds",
        ],
    );
}

#[test]
fn a_key_given_twice_is_seen() {
    let text = claim(json!({
        "requests": [request("r", "gpu.divvy.dev")], "config": [{}, config(mps("GpuConfig"), &[])],
    }));
    let text = text.to_string().replace(r#""strategy":"MPS""#, r#""strategy":"MPS","strategy":"MPS""#);
    let found = check::object(text.as_bytes(), &world()).expect("an object");
    let found: Vec<_> = found.iter().map(Finding::to_string).collect();
    let expected = "error: spec.devices.config[1].opaque.parameters: field sharing.strategy is given twice";
    assert_eq!(found, [expected]);
}

#[test]
fn a_request_has_one_mps_daemon() {
    let refused = |path: &str| {
        format!(
            "error: {path}: request r: its devices have MPS control daemons of their own, and a container reaches one only; ask for one device per request"
        )
    };
    let check = |request: Value, more: Value, refused: Option<String>| {
        let mut devices = more;
        devices["requests"] = json!([request]);
        check(&claim(devices), &refused.iter().map(String::as_str).collect::<Vec<_>>());
    };
    let exactly = || Some(refused("spec.devices.requests[0].exactly"));
    let two = |class| asking("r", class, json!({"count": 2}));
    let config = |kind| json!({"config": [config(mps(kind), &[])]});
    let same_gpu = || json!({"constraints": [{"requests": ["r"], "matchAttribute": "gpu.divvy.dev/uuid"}]});
    check(two("gpu.divvy.dev"), json!({}), None);
    check(two("gpu.divvy.dev"), config("GpuConfig"), exactly());
    check(two("mig.divvy.dev"), config("MigDeviceConfig"), exactly());
    check(two("mps-gpu.example.com"), json!({}), exactly());
    check(two("mps.divvy.dev"), json!({}), exactly());
    check(two("mps.divvy.dev"), same_gpu(), None);
    check(asking("r", "mps.divvy.dev", json!({"allocationMode": "All"})), json!({}), exactly());
    check(request("r", "mps.divvy.dev"), json!({}), None);
    let alternative = json!({"name": "r", "firstAvailable": [
        {"name": "a", "deviceClassName": "mps.divvy.dev", "count": 2},
    ]});
    let path = "spec.devices.requests[0].firstAvailable[0]";
    check(alternative, json!({}), Some(refused(path).replace("request r:", "request r/a:")));
}

#[test]
fn amounts_that_no_device_has_are_refused() {
    let check = |class: &str, name: &str, amount: &str, message: Option<&str>| {
        let amounts = json!({"capacity": {"requests": {name: amount}}});
        let expected = message.map(|message| {
            format!("error: spec.devices.requests[0].exactly.capacity.requests[{name}]: {message}")
        });
        let expected: Vec<_> = expected.iter().map(String::as_str).collect();
        check(&claim(json!({"requests": [asking("r", class, amounts)]})), &expected);
    };
    let (slice, mps) = ("timeslice.divvy.dev", "mps.divvy.dev");
    check(slice, "slots", "0", Some("slots is 0, expected a whole number from 1"));
    check(slice, "slots", "1500m", Some("slots is 1500m, expected a whole number from 1"));
    check(slice, "gpu.divvy.dev/slots", "3", Some("capacities are published without a domain; write slots"));
    check(
        slice,
        "memory",
        "1Gi",
        Some("a time-slice promises no memory; select on it instead, or ask for a MIG instance"),
    );
    check(slice, "threads", "5", Some("a time-slice has no capacity threads; ask for slots"));
    let threads = "per cent of the multiprocessors, a whole number from 1 to 100";
    check(mps, "threads", "101", Some(&format!("threads is 101, expected {threads}")));
    check(mps, "threads", "-1", Some(&format!("threads is -1, expected {threads}")));
    check(mps, "clients", "61", Some("clients is 61, expected a whole number from 1 to 60"));
    check(mps, "memory", "1023Ki", Some("memory is 1023Ki, expected at least 1Mi"));
    check(mps, "memory", "1500Ki", None);
    check(
        mps,
        "memory",
        "much",
        Some("\"much\" is not a quantity: write a number with a suffix such as 500m, 10Gi or 1e3"),
    );
    check(
        "gpu.divvy.dev",
        "slots",
        "1",
        Some(
            "a whole GPU has no capacity slots; ask for memory, multiprocessors, copyEngines, decoders, encoders, jpegEngines, ofaEngines",
        ),
    );
    check("any.example.com", "memory", "10Gi", None);
    check(
        mps,
        "net.example.com/bandwidth",
        "1",
        Some("a share of MPS has no capacity net.example.com/bandwidth; ask for threads, clients, memory"),
    );
    for (class, amount) in [("gpu.divvy.dev", "0"), ("mig.divvy.dev", "1M"), ("share.divvy.dev", "1000Ki")] {
        check(class, "memory", amount, Some(&format!("memory is {amount}, expected at least 1Mi")));
    }
    let cores = "cores is 30, and shares do not limit compute time yet; leave it out";
    check("gpu.divvy.dev", "cores", "30", Some(cores));
    check("mig.divvy.dev", "cores", "30", Some(cores));
    check("gpu.divvy.dev", "cores", "0", None);
    check("gpu.divvy.dev", "multiprocessors", "132", None);
    check("unknown.example.com", "slots", "0", None);
}

fn share(class: &str, memory: &str) -> Value {
    asking("r", class, json!({"capacity": {"requests": {"memory": memory}}}))
}

fn share_config(more: Value) -> Value {
    let mut config = json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": "ShareConfig"});
    for (key, field) in more.as_object().into_iter().flatten() {
        config[key] = field.clone();
    }
    config
}

#[test]
fn the_class_of_shares_wants_a_part() {
    let wanted = "request r: its DeviceClass is for a part of a GPU; name how much memory in capacity.requests, or use gpu.divvy.dev for all of it";
    let check = |request: Value, expected: &[&str]| check(&claim(json!({"requests": [request]})), expected);
    check(share("share.divvy.dev", "10Gi"), &[]);
    let path = "error: spec.devices.requests[0].exactly";
    check(request("r", "share.divvy.dev"), &[&format!("{path}: {wanted}")]);
    for other in [json!({"multiprocessors": "16"}), json!({"cores": "0"})] {
        let asked = asking("r", "share.divvy.dev", json!({"capacity": {"requests": other}}));
        check(asked, &[&format!("{path}: {wanted}")]);
    }
    let list = json!({"name": "r", "firstAvailable": [
        {"name": "a", "deviceClassName": "gpu.divvy.dev"},
        {"name": "b", "deviceClassName": "share.divvy.dev"},
    ]});
    let path = "error: spec.devices.requests[0].firstAvailable[1]";
    check(list, &[&format!("{path}: {}", wanted.replace("request r:", "request r/b:"))]);
    let facts =
        asking("r", "share.divvy.dev", json!({"capacity": {"requests": {"memory": "1Gi", "decoders": "1"}}}));
    check(
        facts,
        &[
            "warning: spec.devices.requests[0].exactly.capacity.requests[decoders]: a share promises no decoders, the amount only keeps other shares out; select on it instead",
        ],
    );
}

#[test]
fn a_share_takes_the_configuration_of_shares_and_no_other() {
    let check = |request: Value, config: Value, expected: &[&str]| {
        check(&claim(json!({"requests": [request], "config": [config]})), expected);
    };
    let whole = || request("r", "gpu.divvy.dev");
    let part = || share("gpu.divvy.dev", "10Gi");
    check(part(), config(share_config(json!({})), &["r"]), &[]);
    check(share("mig.divvy.dev", "1Gi"), config(share_config(json!({})), &[]), &[]);
    check(
        part(),
        config(mps("GpuConfig"), &["r"]),
        &[
            "error: spec.devices.config[0]: request r: GpuConfig is for whole GPUs, and the device is a share; remove the configuration",
        ],
    );
    check(
        part(),
        config(mps("GpuConfig"), &[]),
        &["warning: spec.devices.config[0]: GpuConfig is for no device of this claim; remove it"],
    );
    check(
        whole(),
        config(share_config(json!({})), &["r"]),
        &[
            "error: spec.devices.config[0]: request r: ShareConfig is for shares, and the device is a whole GPU; use GpuConfig",
        ],
    );
    check(
        part(),
        config(share_config(json!({"injection": "shim"})), &[]),
        &[
            "error: spec.devices.requests[0].exactly: request r: field injection of ShareConfig is for a DeviceClass to say, and this one is of a claim; remove it",
        ],
    );
    check(
        part(),
        config(share_config(json!({"ceiling": 50})), &["r"]),
        &[
            "error: spec.devices.config[0].opaque.parameters: field ceiling is about compute time, which shares do not limit yet; remove it",
        ],
    );
}

#[test]
fn a_class_is_judged_by_itself() {
    let class = |name: &str, config: Value| {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
            "metadata": {"name": name}, "spec": {"config": [config]},
        })
    };
    check(&class("new.example.com", config(mps("GpuConfig"), &[])), &[]);
    check(
        &class("new.example.com", config(sharing("GpuConfig", json!({})), &[])),
        &[
            "error: spec.config[0].opaque.parameters: field sharing.strategy is missing, expected TimeSlicing or MPS",
        ],
    );
    check(
        &class("mig.divvy.dev", config(mps("GpuConfig"), &[])),
        &["warning: spec.config[0]: GpuConfig is for no device of this class; remove it"],
    );
    let settings = share_config(json!({"injection": "shim", "observeOnly": true}));
    check(&class("mig.divvy.dev", config(settings.clone(), &[])), &[]);
    check(
        &class("mps.divvy.dev", config(settings, &[])),
        &["warning: spec.config[0]: ShareConfig is for no device of this class; remove it"],
    );
}

/// A pod of one container that uses claims made of these templates, and more.
fn pod(templates: &[(&str, Value)], uses: Value, container: Value) -> (Value, Objects) {
    let mut world = world();
    let mut claims = Vec::new();
    for (name, devices) in templates {
        let template: ResourceClaimTemplate =
            serde_json::from_value(json!({"spec": {"spec": {"devices": devices}}})).expect("a template");
        let devices =
            template.spec.and_then(|spec| spec.spec).and_then(|spec| spec.devices).expect("devices");
        world.templates.insert(("ns".to_owned(), (*name).to_owned()), devices);
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
    (pod, world)
}

fn check_pod(templates: &[(&str, Value)], uses: Value, container: Value, expected: &[&str]) {
    let (pod, world) = pod(templates, uses, container);
    let found = check::object(pod.to_string().as_bytes(), &world).expect("a pod");
    let found: Vec<_> = found.iter().map(Finding::to_string).collect();
    assert_eq!(found, expected, "{pod:#}");
}

fn devices(class: &str) -> Value {
    json!({"requests": [request("r", class)]})
}

#[test]
fn a_container_reaches_one_mps_daemon() {
    let mps_claim = || devices("mps.divvy.dev");
    let use_of = |names: &[&str]| -> Value { names.iter().map(|name| json!({"name": name})).collect() };
    let none = || json!({});
    check_pod(&[("a", mps_claim())], use_of(&["a", "not-yet"]), none(), &[]);
    check_pod(&[("a", mps_claim()), ("b", mps_claim())], use_of(&["a"]), none(), &[]);
    check_pod(&[("a", mps_claim()), ("b", devices("gpu.divvy.dev"))], use_of(&["a", "b"]), none(), &[]);
    let two_claims = "error: spec.containers[0].resources.claims: container main uses MPS requests of the claims a and b, and a container reaches one MPS control daemon only; give each claim a container of its own";
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
    let two_requests = "error: spec.containers[0].resources.claims: container main uses the MPS requests q and r of claim a, and a container reaches one MPS control daemon only; add the constraint matchAttribute gpu.divvy.dev/uuid to the claim, or give each request a container of its own";
    let constraint = |attribute: &str, requests: &[&str]| json!({"constraints": [{"matchAttribute": attribute, "requests": requests}]});
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
fn nothing_lies_over_what_an_mps_client_is_given() {
    let mounting = |path: &str| json!({"volumeMounts": [{"name": "v", "mountPath": path}]});
    let refused = |path: &str| {
        format!(
            "error: spec.containers[0].volumeMounts[0].mountPath: container main uses MPS and mounts a volume at {path}, where clients and MPS control daemon meet; remove the volume"
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
fn an_extended_resource_is_for_no_part() {
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
        &[
            "error: spec.containers[0].resources.limits[deviceclass.resource.kubernetes.io/share.divvy.dev]: deviceclass.resource.kubernetes.io/share.divvy.dev names no part, and its DeviceClass is for a part of a GPU; ask for it in a ResourceClaim",
        ],
    );
}

#[test]
fn nothing_lies_over_or_under_what_keeps_a_share() {
    const KEPT: &str = "where the limits of shares are kept; remove the volume";
    const BELOW: &str = "below which the limits of its share are kept, and others reach that volume; use an emptyDir that no other container mounts, or mount it elsewhere";
    let templates =
        || [("a", json!({"requests": [share("share.divvy.dev", "1Gi")]})), ("b", devices("gpu.divvy.dev"))];
    // A volume of the pod, where the container mounts it, and whether a second one does too.
    let check = |volume: Value, path: &str, uses: &str, second: bool, expected: Option<&str>| {
        let mount = json!({"volumeMounts": [{"name": "v", "mountPath": path}]});
        let (mut pod, world) = pod(&templates(), json!([{"name": uses}]), mount.clone());
        // What is not known may be a share.
        pod["spec"]["resourceClaims"].as_array_mut().expect("claims").truncate(2);
        let mut volume = volume;
        volume["name"] = json!("v");
        pod["spec"]["volumes"] = json!([volume]);
        if second {
            let mut other = json!({"name": "other", "volumeMounts": mount["volumeMounts"]});
            other["volumeMounts"][0]["mountPath"] = json!("/data");
            pod["spec"]["containers"].as_array_mut().expect("containers").push(other);
        }
        let found = check::object(pod.to_string().as_bytes(), &world).expect("a pod");
        let found: Vec<_> = found.iter().map(Finding::to_string).collect();
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
    // A claim that is not there yet.
    let (mut pod, _) = pod(&[], json!([{"name": "not-yet"}]), json!({}));
    pod["spec"]["containers"][0]["volumeDevices"] = json!([{"name": "v", "devicePath": "/run/divvy/x"}]);
    pod["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/var/run/divvy/shares"}}]);
    let found = check::object(pod.to_string().as_bytes(), &world()).expect("a pod");
    let found: Vec<_> = found.iter().map(Finding::to_string).collect();
    let expected = [
        "error: spec.volumes[0].hostPath.path: the pod uses a share, and the volume is where the node keeps the pages of shares; remove the volume",
        "error: spec.containers[0].volumeDevices[0].devicePath: container main mounts a volume at /run/divvy/x, where the limits of shares are kept; remove the volume",
    ];
    assert_eq!(found, expected);
}

/// Claims around the rules: names that meet and names that do not.
fn any_claim() -> impl Strategy<Value = Value> {
    let name = || prop_oneof![Just("r"), Just("r/a"), Just("a"), Just(""), Just("/")];
    let class = || {
        prop_oneof![
            Just("gpu.divvy.dev"),
            Just("mig.divvy.dev"),
            Just("mps.divvy.dev"),
            Just("timeslice.divvy.dev"),
            Just("any.example.com"),
            Just("mps-gpu.example.com"),
            Just("share.divvy.dev"),
            Just("broken.example.com"),
            Just("?"),
        ]
    };
    let amount = prop_oneof![Just("1"), Just("-1"), Just("1Gi"), Just("x"), Just("9e18"), Just("1n")];
    let capacity = prop_oneof![
        Just("slots"),
        Just("memory"),
        Just("cores"),
        Just("gpu.divvy.dev/threads"),
        Just("/"),
        Just("")
    ];
    let exactly = (name(), class(), any::<Option<i64>>(), any::<Option<bool>>(), capacity, amount).prop_map(
        |(name, class, count, admin, capacity, amount)| {
            let capacity = json!({"requests": {capacity: amount}});
            asking(name, class, json!({"count": count, "adminAccess": admin, "capacity": capacity}))
        },
    );
    let first = (name(), name(), class()).prop_map(|(name, sub, class)| {
        json!({"name": name, "firstAvailable": [{"name": sub, "deviceClassName": class}]})
    });
    let requests = prop::collection::vec(prop_oneof![exactly, first], 0..4);
    let parameters = prop_oneof![
        Just(mps("GpuConfig")),
        Just(mps("MigDeviceConfig")),
        Just(share_config(json!({}))),
        Just(share_config(json!({"injection": "preload"}))),
        Just(json!({})),
        Just(json!(null)),
        Just(sharing("GpuConfig", json!({"strategy": "TimeSlicing"}))),
    ];
    let config = (parameters, prop::collection::vec(name(), 0..3))
        .prop_map(|(parameters, requests)| config(parameters, &requests));
    (requests, prop::collection::vec(config, 0..3))
        .prop_map(|(requests, configs)| claim(json!({"requests": requests, "config": configs})))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_claim_is_judged_alike_by_text_and_by_type(claim in any_claim()) {
        let typed: ResourceClaim = serde_json::from_value(claim.clone()).expect("a claim");
        let by_text = check::object(claim.to_string().as_bytes(), &world()).expect("a claim");
        prop_assert_eq!(&by_text, &check::claim(&typed, &world()));
        let paths = |finding: &Finding| finding.path.starts_with("spec.devices.") && !finding.message.is_empty();
        prop_assert!(by_text.iter().all(paths), "{:?}", by_text);
    }

    #[test]
    fn any_pod_is_judged(claims in prop::collection::vec(any_claim(), 0..3), path in "(/|dev|shm|run|var|divvy|etc|ld.so.preload|[.]|é){0,6}") {
        let names = ["a", "b", "c"];
        let templates: Vec<_> =
            names.iter().zip(&claims).map(|(name, claim)| (*name, claim["spec"]["devices"].clone())).collect();
        let uses = templates.iter().map(|(name, _)| json!({"name": name})).collect();
        let (pod, world) = pod(&templates, uses, json!({"volumeMounts": [{"name": "v", "mountPath": path}]}));
        let found = check::object(pod.to_string().as_bytes(), &world).expect("a pod");
        prop_assert!(found.iter().all(|finding| finding.severity == Severity::Error));
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), claim in any_claim(), cut in 0usize..400) {
        let _ = check::object(&bytes, &world());
        let text = claim.to_string();
        let _ = check::object(&text.as_bytes()[..cut.min(text.len())], &world());
    }
}
