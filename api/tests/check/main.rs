//! Findings for claims, templates and classes.

mod any;
mod pods;

use divvy_api::check::{self, Class, Finding, Objects};
use divvy_api::sharing::Mode;
use k8s_openapi::api::resource::v1::DeviceClass;
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

/// Divvy's own classes, and some of an administrator.
fn view() -> Objects {
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
    let found = check::object(object.to_string().as_bytes(), &view()).expect("an object");
    let found: Vec<_> = found.iter().map(Finding::to_string).collect();
    assert_eq!(found, expected, "{object:#}");
}

#[test]
fn valid_objects_have_no_findings() {
    check(&claim(json!({"requests": [request("gpu", "gpu.divvy.dev")]})), &[]);
    let slots = json!({"capacity": {"requests": {"slots": "2"}}});
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
fn configuration_errors_match_prepare() {
    let check = |requests: &[Value], configs: &[Value], expected: &[&str]| {
        check(&claim(json!({"requests": requests, "config": configs})), expected);
    };
    let (gpu, mig) = (|| request("r", "gpu.divvy.dev"), || request("r", "mig.divvy.dev"));
    check(
        &[mig()],
        &[config(sharing("MigDeviceConfig", json!({"strategy": "TimeSlicing"})), &[])],
        &["error: spec.devices.config[0].opaque.parameters: field sharing.strategy is TimeSlicing, which \
             has no effect on a MIG instance; use MPS, or a GpuConfig for a whole GPU"],
    );
    check(
        &[gpu()],
        &[config(mps("MigDeviceConfig"), &["r"])],
        &["error: spec.devices.config[0]: request r: MigDeviceConfig is for MIG instances, but the device \
             is a whole GPU; use GpuConfig"],
    );
    check(
        &[gpu()],
        &[config(mps("MigDeviceConfig"), &[])],
        &["warning: spec.devices.config[0]: MigDeviceConfig applies to no device of this claim; remove it"],
    );
    check(&[gpu(), request("other", "unknown.example.com")], &[config(mps("MigDeviceConfig"), &[])], &[]);
    check(
        &[request("r", "timeslice.divvy.dev")],
        &[config(sharing("GpuConfig", json!({"strategy": "TimeSlicing"})), &["r"])],
        &["error: spec.devices.config[0]: request r: GpuConfig is for whole GPUs, but the device is a \
             time-slice; its interval is set by the node configuration, so remove the configuration"],
    );
    check(
        &[request("r", "any.example.com")],
        &[config(mps("GpuConfig"), &["r"])],
        &["error: spec.devices.config[0]: request r: GpuConfig is for whole GPUs, but the device is a MIG \
             instance; use MigDeviceConfig"],
    );
    let selected =
        json!({"selectors": [{"cel": {"expression": "device.attributes['gpu.divvy.dev'].type == 'gpu'"}}]});
    check(
        &[asking("r", "any.example.com", selected)],
        &[config(mps("GpuConfig"), &["r"])],
        &["warning: spec.devices.config[0]: request r: GpuConfig is for whole GPUs, but the device is a \
             MIG instance; use MigDeviceConfig"],
    );
    check(
        &[gpu()],
        &[config(mps("GpuConfig"), &["s"])],
        &[
            "error: spec.devices.config[0].requests: the claim has no request s; name one of its requests",
            "warning: spec.devices.config[0]: GpuConfig applies to no device of this claim; remove it",
        ],
    );
    check(
        &[request("r", "broken.example.com")],
        &[],
        &["error: spec.devices.requests[0].exactly.deviceClassName: the configuration of its DeviceClass \
             is invalid: field apiVersion is missing, expected \"resource.divvy.dev/v1alpha1\""],
    );
    check(
        &[asking("r", "gpu.divvy.dev", json!({"adminAccess": true}))],
        &[],
        &["warning: spec.devices.requests[0].exactly.adminAccess: adminAccess only observes: no device is \
             created or configured for it, and the scheduler finds no such device on a GPU that a claim \
             holds; use class observer.divvy.dev, whose devices are always free"],
    );
}

#[test]
fn observer_needs_admin_access_and_a_toleration() {
    let check = |request: Value, expected: &[&str]| check(&claim(json!({"requests": [request]})), expected);
    let toleration = json!({"key": "gpu.divvy.dev/observer", "operator": "Exists"});
    let observer = |more: Value| asking("r", "observer.divvy.dev", more);
    check(observer(json!({"adminAccess": true, "tolerations": [toleration]})), &[]);
    check(observer(json!({"adminAccess": true, "tolerations": [{"operator": "Exists"}]})), &[]);
    let no_access = "error: spec.devices.requests[0].exactly.adminAccess: class observer.divvy.dev is for \
         monitoring; set adminAccess: true, in a namespace with the label \
         resource.kubernetes.io/admin-access: \"true\"";
    let no_toleration = "error: spec.devices.requests[0].exactly.tolerations: the scheduler gives a device \
         of class observer.divvy.dev only to a request with the toleration {key: gpu.divvy.dev/observer, \
         operator: Exists}; add it";
    check(observer(json!({"tolerations": [toleration]})), &[no_access]);
    check(observer(json!({})), &[no_access, no_toleration]);
    for other in [
        json!({"key": "gpu.divvy.dev/mode-off", "operator": "Exists"}),
        json!({"key": "gpu.divvy.dev/observer", "operator": "Equal", "value": "x"}),
        json!({"key": "gpu.divvy.dev/observer", "operator": "Exists", "effect": "NoExecute"}),
    ] {
        check(observer(json!({"adminAccess": true, "tolerations": [other]})), &[no_toleration]);
    }
    check(
        json!({"name": "r", "firstAvailable": [{"name": "a", "deviceClassName": "observer.divvy.dev"}]}),
        &["error: spec.devices.requests[0].firstAvailable[0].deviceClassName: an alternative cannot have \
             adminAccess, which class observer.divvy.dev requires; use exactly"],
    );
}

#[test]
fn duplicate_key_is_detected() {
    let text = claim(json!({
        "requests": [request("r", "gpu.divvy.dev")], "config": [{}, config(mps("GpuConfig"), &[])],
    }));
    let text = text.to_string().replace(r#""strategy":"MPS""#, r#""strategy":"MPS","strategy":"MPS""#);
    let found = check::object(text.as_bytes(), &view()).expect("an object");
    let found: Vec<_> = found.iter().map(Finding::to_string).collect();
    let expected = "error: spec.devices.config[1].opaque.parameters: field sharing.strategy is given twice";
    assert_eq!(found, [expected]);
}

#[test]
fn mps_request_has_one_device() {
    let refused = |path: &str| {
        format!(
            "error: {path}: request r: each of its devices has its own MPS control daemon, but a container \
             can use only one; request one device"
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
fn impossible_amounts_are_rejected() {
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
        Some("a time-slice does not guarantee memory; use a selector instead, or request a MIG instance"),
    );
    check(slice, "threads", "5", Some("a time-slice has no capacity threads; use one of slots"));
    let threads = "per cent of the multiprocessors, a whole number from 1 to 100";
    check(mps, "threads", "101", Some(&format!("threads is 101, expected {threads}")));
    check(mps, "threads", "-1", Some(&format!("threads is -1, expected {threads}")));
    check(mps, "clients", "61", Some("clients is 61, expected a whole number from 1 to 60"));
    check(
        mps,
        "memory",
        "1023Ki",
        Some("memory is 1023Ki, expected at least 1Mi; write an amount such as 10Gi"),
    );
    check(mps, "memory", "1500Ki", None);
    check(
        mps,
        "memory",
        "much",
        Some("memory: \"much\" is not a quantity: write a number with a suffix such as 500m, 10Gi or 1e3"),
    );
    check(
        "gpu.divvy.dev",
        "slots",
        "1",
        Some(
            "a whole GPU has no capacity slots; use one of memory, multiprocessors, copyEngines, decoders, \
             encoders, jpegEngines, ofaEngines",
        ),
    );
    check("any.example.com", "memory", "10Gi", None);
    check(
        mps,
        "net.example.com/bandwidth",
        "1",
        Some("an MPS share has no capacity net.example.com/bandwidth; use one of threads, clients, memory"),
    );
    for amount in ["1M", "1000Ki"] {
        check(
            "share.divvy.dev",
            "memory",
            amount,
            Some(&format!("memory is {amount}, expected at least 1Mi; write an amount such as 10Gi")),
        );
    }
    for class in ["mig.divvy.dev", "share.divvy.dev"] {
        for (amount, remedy) in [("101", ""), ("500m", "; write 50"), ("30500m", "")] {
            let expected = "per cent of the compute time, a whole number from 0 to 100";
            check(class, "cores", amount, Some(&format!("cores is {amount}, expected {expected}{remedy}")));
        }
    }
    for amount in ["1", "30", "100"] {
        check(
            "gpu.divvy.dev",
            "cores",
            amount,
            Some("a whole GPU has no capacity cores; use share.divvy.dev for part of a GPU"),
        );
    }
    check("gpu.divvy.dev", "memory", "40Gi", None);
    check("gpu.divvy.dev", "multiprocessors", "132", None);
    check("mig.divvy.dev", "multiprocessors", "16", None);
    check("unknown.example.com", "slots", "0", None);
}

#[test]
fn all_faults_of_a_configuration_are_reported() {
    let config =
        config(share_config(json!({"ceilng": 20, "weight": "2", "schedule": [{"from": "1:00"}]})), &[]);
    let devices = json!({"requests": [share("share.divvy.dev", "10Gi")], "config": [config]});
    let at = "error: spec.devices.config[0].opaque.parameters:";
    let faults = [
        "field ceilng is unknown to ShareConfig; did you mean ceiling?",
        "field schedule[0].from is \"1:00\", expected a time of day in UTC from 00:00 to 23:59, in quotes",
        "field schedule[0].to is missing, expected a time of day in UTC from 00:00 to 23:59, in quotes",
        "field weight is \"2\", expected a whole number from 1 to 10000",
    ];
    let faults: Vec<_> = faults.iter().map(|fault| format!("{at} {fault}")).collect();
    check(&claim(devices), &faults.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn cores_alone_takes_all_memory() {
    let check = |amounts: Value, expected: &[&str]| {
        let request = asking("r", "share.divvy.dev", json!({"capacity": {"requests": amounts}}));
        check(&claim(json!({"requests": [request]})), expected);
    };
    let alone = "warning: spec.devices.requests[0].exactly.capacity.requests: cores without memory takes all \
         memory of the GPU, so no other share fits; request memory too, such as memory: 10Gi";
    check(json!({"cores": 30}), &[alone]);
    check(json!({"cores": 30, "memory": "10Gi"}), &[]);
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
fn share_class_requires_a_share_size() {
    let expected = "request r: its DeviceClass is for part of a GPU; set memory or cores in \
         capacity.requests, or use gpu.divvy.dev for a whole GPU";
    let check = |request: Value, expected: &[&str]| check(&claim(json!({"requests": [request]})), expected);
    check(share("share.divvy.dev", "10Gi"), &[]);
    let path = "error: spec.devices.requests[0].exactly";
    check(request("r", "share.divvy.dev"), &[&format!("{path}: {expected}")]);
    let facts =
        asking("r", "share.divvy.dev", json!({"capacity": {"requests": {"memory": "1Gi", "decoders": "1"}}}));
    check(
        facts,
        &["error: spec.devices.requests[0].exactly.capacity.requests[decoders]: a share does not guarantee \
             decoders; use a selector instead, or request a MIG instance"],
    );
    let asked = asking("r", "share.divvy.dev", json!({"capacity": {"requests": {"cores": "0"}}}));
    check(asked, &[&format!("{path}: {expected}")]);
    let list = json!({"name": "r", "firstAvailable": [
        {"name": "a", "deviceClassName": "gpu.divvy.dev"},
        {"name": "b", "deviceClassName": "share.divvy.dev"},
    ]});
    let path = "error: spec.devices.requests[0].firstAvailable[1]";
    check(list, &[&format!("{path}: {}", expected.replace("request r:", "request r/b:"))]);
}

#[test]
fn share_smaller_than_a_context_is_warned_of() {
    let check = |class: &str, memory: &str, expected: &[&str]| {
        check(&claim(json!({"requests": [share(class, memory)]})), expected);
    };
    let path = "warning: spec.devices.requests[0].exactly.capacity.requests[memory]";
    let why =
        "a CUDA context takes about 300Mi per process, so no process can start with 200Mi; request more";
    check("share.divvy.dev", "200Mi", &[&format!("{path}: {why}")]);
    check("share.divvy.dev", "300Mi", &[]);
    // Whole devices have no limit, and MPS clients do not load the library that charges contexts.
    for class in ["gpu.divvy.dev", "mig.divvy.dev", "mps.divvy.dev"] {
        check(class, "200Mi", &[]);
    }
}

#[test]
fn share_accepts_only_share_config() {
    let check = |request: Value, config: Value, expected: &[&str]| {
        check(&claim(json!({"requests": [request], "config": [config]})), expected);
    };
    let whole = || request("r", "gpu.divvy.dev");
    let part = || share("share.divvy.dev", "10Gi");
    check(part(), config(share_config(json!({})), &["r"]), &[]);
    check(share("mig.divvy.dev", "1Gi"), config(share_config(json!({})), &[]), &[]);
    check(
        part(),
        config(mps("GpuConfig"), &["r"]),
        &["error: spec.devices.config[0]: request r: GpuConfig is for whole GPUs, but the device is a \
             share; remove the configuration"],
    );
    check(
        part(),
        config(mps("GpuConfig"), &[]),
        &["warning: spec.devices.config[0]: GpuConfig applies to no device of this claim; remove it"],
    );
    check(
        whole(),
        config(share_config(json!({})), &["r"]),
        &["error: spec.devices.config[0]: request r: ShareConfig is for shares, but the device is a whole \
             GPU; request part of a GPU with share.divvy.dev"],
    );
    check(
        part(),
        config(share_config(json!({"injection": "shim"})), &[]),
        &["error: spec.devices.requests[0].exactly: request r: field injection of ShareConfig may only be \
             set in a DeviceClass, not in a claim; remove it"],
    );
    check(part(), config(share_config(json!({"ceiling": 50})), &["r"]), &[]);
    check(
        part(),
        config(share_config(json!({"weight": 50})), &["r"]),
        &["error: spec.devices.config[0]: request r: field weight of ShareConfig may only be set in a \
             DeviceClass, not in a claim; remove it"],
    );
}

#[test]
fn class_is_checked_on_its_own() {
    let class = |name: &str, config: Value| {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
            "metadata": {"name": name}, "spec": {"config": [config]},
        })
    };
    check(&class("new.example.com", config(mps("GpuConfig"), &[])), &[]);
    check(
        &class("new.example.com", config(sharing("GpuConfig", json!({})), &[])),
        &["error: spec.config[0].opaque.parameters: field sharing.strategy is missing, expected \
             TimeSlicing or MPS"],
    );
    check(
        &class("mig.divvy.dev", config(mps("GpuConfig"), &[])),
        &["warning: spec.config[0]: GpuConfig applies to no device of this class; remove it"],
    );
    let settings = share_config(json!({"injection": "shim", "observeOnly": true}));
    check(&class("mig.divvy.dev", config(settings.clone(), &[])), &[]);
    check(
        &class("mps.divvy.dev", config(settings, &[])),
        &["warning: spec.config[0]: ShareConfig applies to no device of this class; remove it"],
    );
}
