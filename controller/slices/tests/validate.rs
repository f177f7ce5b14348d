//! The validator rejects what the API server rejects, and what only the scheduler would notice.
//! The cases follow the API's validation tests, without those for fields that Divvy never sends
//! (node selectors, derived attributes).
#![allow(clippy::unwrap_used, reason = "test helpers")]

use divvy_slices::{Content, Device, validate};
use k8s_openapi::api::resource::v1::{self as api, CounterSet};
use serde_json::{Value, json};

/// A valid counter set and a device that consumes it, as JSON to modify.
fn good() -> Value {
    json!([
        {"counters": [{"name": "gpu-0", "counters": {"memory": {"value": "80Gi"}}}], "devices": []},
        {"counters": [], "devices": [{
            "name": "gpu-0",
            "attributes": {"type": {"string": "gpu"}, "resource.kubernetes.io/numaNode": {"int": 0}},
            "capacity": {"memory": {"value": "80Gi"}},
            "consumesCounters": [{"counterSet": "gpu-0", "counters": {"memory": {"value": "80Gi"}}}],
        }]},
    ])
}

fn contents(value: &Value) -> Vec<Content> {
    let content = |slice: &Value| Content {
        counters: serde_json::from_value::<Vec<CounterSet>>(slice["counters"].clone()).unwrap(),
        devices: devices(&slice["devices"]),
    };
    value.as_array().unwrap().iter().map(content).collect()
}

fn devices(list: &Value) -> Vec<Device> {
    let devices = serde_json::from_value::<Vec<api::Device>>(list.clone()).unwrap();
    devices.into_iter().map(Device::from).collect()
}

fn check_valid(edit: impl FnOnce(&mut Value)) {
    let mut value = good();
    edit(&mut value);
    assert_eq!(validate(&contents(&value)), Ok(()), "{value}");
}

fn check_invalid(words: &str, edit: impl FnOnce(&mut Value)) {
    let mut value = good();
    edit(&mut value);
    let refused = validate(&contents(&value)).expect_err(&value.to_string()).to_string();
    assert!(refused.contains(words), "{refused:?} should say {words:?}");
}

/// Breaks the device, and also a second one after an equal valid device.
fn check_device(words: &str, edit: impl Fn(&mut Value)) {
    check_invalid(words, |value| edit(&mut value[1]["devices"][0]));
    check_invalid(words, |value| {
        let devices = value[1]["devices"].as_array_mut().unwrap();
        let mut second = devices[0].clone();
        second["name"] = json!("gpu-1");
        edit(&mut second);
        devices.push(second);
    });
}

fn many(count: usize, make: impl Fn(usize) -> Value) -> Value {
    (0..count).map(make).collect()
}

fn map(count: usize, prefix: &str, value: Value) -> Value {
    Value::Object((0..count).map(|n| (format!("{prefix}{n}"), value.clone())).collect())
}

#[test]
fn valid_and_empty_pools_pass() {
    check_valid(|_| ());
    check_valid(|value| *value = json!([{"counters": [], "devices": []}]));
}

#[test]
fn slices_have_a_kind_and_a_size_limit() {
    check_invalid("cannot share a slice", |v| {
        let devices = v[1]["devices"].clone();
        v[0]["devices"] = devices;
    });
    check_invalid("9 counter sets; at most 8", |v| {
        v[0]["counters"] =
            many(9, |n| json!({"name": format!("set-{n}"), "counters": {"m": {"value": "1"}}}));
    });
    let devices = |value: &mut Value, count: usize, taint: bool| {
        *value = json!([{"counters": [], "devices": many(count, |n| {
            let mut device = json!({"name": format!("gpu-{n}")});
            if taint && n == 0 {
                device["taints"] = json!([{"key": "a", "effect": "None"}]);
            }
            device
        })}]);
    };
    check_valid(|v| devices(v, 128, false));
    check_invalid("129 devices; at most 128", |v| devices(v, 129, false));
    check_valid(|v| devices(v, 64, true));
    check_invalid("65 devices; at most 64", |v| devices(v, 65, true));
}

#[test]
fn list_attribute_lowers_the_slice_limit() {
    let devices = |list: Value| {
        json!([{"counters": [], "devices": many(65, |n| json!({
            "name": format!("gpu-{n}"), "attributes": {"list": list},
        }))}])
    };
    for list in [
        json!({"ints": [1]}),
        json!({"bools": [true]}),
        json!({"strings": ["a"]}),
        json!({"versions": ["1.0.0"]}),
    ] {
        check_invalid("65 devices; at most 64", |v| *v = devices(list));
    }
}

#[test]
fn names_are_unique_and_well_formed() {
    check_invalid("device \"gpu-0\" is duplicated", |v| {
        let twin = v[1].clone();
        v.as_array_mut().unwrap().push(twin);
    });
    check_invalid("counter set \"gpu-0\" is duplicated", |v| {
        let twin = v[0].clone();
        v.as_array_mut().unwrap().push(twin);
    });
    for name in ["", "GPU-0", "-gpu", "gpu-", "gpu_0", &"a".repeat(64)] {
        check_device("is not a DNS label", |d| d["name"] = json!(name));
    }
}

#[test]
fn attributes_are_well_formed() {
    for name in ["", "a-b", "1a", "a/b/c", "/a", "UPPER.dom/a", &"a".repeat(33)] {
        check_device("is not a C identifier", |d| d["attributes"] = json!({name: {"int": 1}}));
    }
    check_device("exactly one value", |d| d["attributes"]["type"] = json!({}));
    check_device("exactly one value", |d| d["attributes"]["type"] = json!({"int": 1, "string": "a"}));
    check_device("list attribute must not be empty", |d| d["attributes"]["type"] = json!({"ints": []}));
    check_device("at most 64 bytes", |d| d["attributes"]["type"] = json!({"string": "ü".repeat(33)}));
    check_device("33 attributes and capacities; at most 32", |d| {
        d["attributes"] = map(32, "a", json!({"int": 1}))
    });
    check_device("49 attribute values; at most 48", |d| {
        d["attributes"] = json!({"list": {"ints": vec![1; 49]}});
    });
    for version in ["v1.2.3", "1.2", "01.2.3", "1.2.3-", "1.2.3-01", "1.2.3+"] {
        check_device("semantic version", |d| d["attributes"]["type"] = json!({"version": version}));
    }
    for version in ["1.2.3", "0.0.0-alpha.1+build.5", "1.0.0--", "1.0.0-0a"] {
        check_valid(|v| v[1]["devices"][0]["attributes"]["type"] = json!({"version": version}));
    }
}

#[test]
fn capacities_have_a_policy_exactly_when_shared() {
    for text in ["", "1.5", "-1", "1e30", "many"] {
        check_device("is not a whole, non-negative quantity", |d| {
            d["capacity"]["memory"]["value"] = json!(text)
        });
    }
    check_device("does not allow multiple allocations", |d| {
        d["capacity"]["memory"]["requestPolicy"] = json!({"default": "1Gi"});
    });
    check_device("would take all of it", |d| d["allowMultipleAllocations"] = json!(true));
}

#[test]
fn request_policies_are_consistent() {
    let check = |words: &str, policy: Value| {
        let edit = |d: &mut Value| {
            d["allowMultipleAllocations"] = json!(true);
            d["capacity"]["memory"]["requestPolicy"] = policy.clone();
        };
        if words.is_empty() {
            check_valid(|v| edit(&mut v[1]["devices"][0]))
        } else {
            check_device(words, edit)
        }
    };
    check("", json!({"default": "80Gi", "validRange": {"min": "0", "max": "80Gi", "step": "1Mi"}}));
    check("", json!({"default": "2Gi", "validValues": ["1Gi", "2Gi"]}));
    check("", json!({"default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}));
    check("", json!({"default": "1Gi"}));
    check("must have a default", json!({"validRange": {"min": "0"}}));
    check("must have a default", json!({"validValues": ["0"]}));
    check("default exceeds the capacity", json!({"default": "81Gi"}));
    check("must not have both", json!({"default": "1", "validValues": ["1"], "validRange": {"min": "0"}}));
    check("must be within the range", json!({"default": "1Gi", "validRange": {"min": "2Gi"}}));
    check(
        "maximum exceeds the capacity",
        json!({"default": "1Gi", "validRange": {"min": "0", "max": "81Gi"}}),
    );
    check("must be within the range", json!({"default": "3Gi", "validRange": {"min": "0", "max": "2Gi"}}));
    check("a value exceeds the capacity", json!({"default": "1Gi", "validValues": ["1Gi", "81Gi"]}));
    check(
        "maximum must be a multiple of the step",
        json!({"default": "0", "validRange": {"min": "0", "max": "80Gi", "step": "3Gi"}}),
    );
    check("is not a whole", json!({"default": "500m", "validRange": {"min": "0"}}));
    check("step must be positive", json!({"default": "1Gi", "validRange": {"min": "0", "step": "0"}}));
    check("multiple of the step", json!({"default": "1Gi", "validRange": {"min": "0", "step": "3Gi"}}));
    check("first step exceeds", json!({"default": "1Gi", "validRange": {"min": "1Gi", "step": "80Gi"}}));
    check("ascending", json!({"default": "1Gi", "validValues": ["2Gi", "1Gi"]}));
    check("must be one of the values", json!({"default": "3Gi", "validValues": ["1Gi", "2Gi"]}));
    check("11 valid values", json!({"default": "1", "validValues": many(11, |n| json!(n.to_string()))}));
}

#[test]
fn consumed_counters_exist_and_suffice() {
    check_invalid("33 counters; at most 32", |v| {
        v[0]["counters"][0]["counters"] = map(33, "c", json!({"value": "1"}))
    });
    check_invalid("counters must not be empty", |v| v[0]["counters"][0]["counters"] = json!({}));
    check_device("3 consumed counter sets; at most 2", |d| {
        let one = d["consumesCounters"][0].clone();
        d["consumesCounters"] = json!([one, one, one]);
    });
    check_device("is duplicated", |d| {
        let one = d["consumesCounters"][0].clone();
        d["consumesCounters"] = json!([one, one]);
    });
    check_device("counter set gpu-1 does not exist", |d| {
        d["consumesCounters"][0]["counterSet"] = json!("gpu-1")
    });
    check_device("has no counter cores", |d| {
        d["consumesCounters"][0]["counters"] = json!({"cores": {"value": "1"}});
    });
    check_device("more of counter memory", |d| {
        d["consumesCounters"][0]["counters"]["memory"]["value"] = json!("81Gi")
    });
    check_device("consumes no counters", |d| d["consumesCounters"] = Value::Null);
}

#[test]
fn taints_are_limited_and_well_formed() {
    let taint =
        |key: &str, value: &str, effect: &str| json!([{"key": key, "value": value, "effect": effect}]);
    check_valid(|v| v[1]["devices"][0]["taints"] = taint("gpu.divvy.dev/gpu-lost", "", "NoExecute"));
    check_device("17 taints; at most 16", |d| {
        d["taints"] = many(17, |n| taint(&format!("k{n}"), "", "None")[0].clone())
    });
    check_device("None, NoSchedule or NoExecute", |d| d["taints"] = taint("a", "", "Never"));
    check_device("is not a label key", |d| d["taints"] = taint("a b", "", "None"));
    check_device("is not a label value", |d| d["taints"] = taint("a", "x y", "None"));
}

#[test]
fn binding_conditions_come_in_pairs() {
    check_valid(|v| {
        v[1]["devices"][0]["bindingConditions"] = json!(["a"]);
        v[1]["devices"][0]["bindingFailureConditions"] = json!(["b"]);
    });
    check_device("both be set", |d| d["bindingConditions"] = json!(["a"]));
    check_device("both be set", |d| {
        d["bindingConditions"] = json!(["a"]);
        d["bindingFailureConditions"] = json!(["a"]);
    });
    check_device("5 binding conditions", |d| d["bindingConditions"] = json!(["a", "b", "c", "d", "e"]));
}

#[test]
fn device_must_not_select_a_node() {
    check_device("has a node selection of its own", |d| d["nodeName"] = json!("other"));
}
