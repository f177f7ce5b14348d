//! The scheduler's semantics, by feature.

mod common;

use common::*;
use divvy_alloc::Release;
use serde_json::{Value, json};

fn two_gpus() -> Cluster {
    Cluster::new(&[slice("s", "p", json!({"devices": devices(&["gpu-0", "gpu-1"])}))], &[])
}

#[test]
fn first_free_device_is_taken() {
    check(&two_gpus(), &requests(&[one("r", json!({}))]), &["r=gpu-0"]);
    check(&two_gpus(), &requests(&[one("a", json!({})), one("b", json!({}))]), &["a=gpu-0", "b=gpu-1"]);
    check(&two_gpus(), &requests(&[one("r", json!({"count": 2}))]), &["r=gpu-0", "r=gpu-1"]);
    check(&two_gpus(), &requests(&[]), &[]);
    let held = Cluster::new(
        &[slice("s", "p", json!({"devices": devices(&["gpu-0", "gpu-1"])}))],
        &[held("gpu-0", json!({}))],
    );
    check(&held, &requests(&[one("r", json!({}))]), &["r=gpu-1"]);
    check_not(
        &held,
        &requests(&[one("r", json!({"count": 2}))]),
        "claim ns/c does not fit on node node-a: request r wants 2 of 2 devices, 1 fit, 1 in use",
    );
}

#[test]
fn search_backtracks_to_an_earlier_request() {
    let sized = |name: &str, size: i64| json!({"name": name, "attributes": {"size": {"int": size}}});
    let cluster =
        Cluster::new(&[slice("s", "p", json!({"devices": [sized("big", 2), sized("small", 1)]}))], &[]);
    let big = select("device.attributes['gpu.divvy.dev'].size == 2");
    check(&cluster, &requests(&[one("any", json!({})), one("big", big.clone())]), &["any=small", "big=big"]);
    check_not(
        &cluster,
        &requests(&[one("a", big.clone()), one("b", big)]),
        "each request fits alone, but not all together; \
         request a wants 1 of 2 devices, 1 fit, 1 not selected",
    );
}

#[test]
fn pools_and_slices_are_ordered_by_name() {
    let of = |name: &str, pool: &str, count: i64, device: &str| {
        slice(name, pool, json!({"devices": devices(&[device]), "pool": pool_of(count, 1, pool)}))
    };
    let slices = [of("s9", "p2", 1, "last"), of("s2", "p1", 2, "second"), of("s1", "p1", 2, "first")];
    let all = requests(&[one("r", json!({"allocationMode": "All"}))]);
    check(&Cluster::new(&slices, &[]), &all, &["r=first", "r=second", "r=last"]);
    let bound =
        json!([{"name": "bound", "bindingConditions": ["Ready"], "bindingFailureConditions": ["Failed"]}]);
    let bound = slice("s0", "p0", json!({"devices": bound}));
    check(
        &Cluster::new(&[slices.as_slice(), &[bound]].concat(), &[]),
        &all,
        &["r=first", "r=second", "r=last", "r=bound"],
    );
}

#[test]
fn only_complete_pools_of_the_newest_generation_count() {
    let of = |name: &str, generation: i64, count: i64, device: &str| {
        slice(name, "p", json!({"devices": devices(&[device]), "pool": pool_of(count, generation, "p")}))
    };
    let any = requests(&[one("r", json!({}))]);
    let all = requests(&[one("r", json!({"allocationMode": "All"}))]);
    let renewed = Cluster::new(&[of("old", 1, 1, "old"), of("new", 2, 1, "new")], &[]);
    check(&renewed, &all, &["r=new"]);
    let updating = Cluster::new(&[of("old", 1, 1, "old"), of("new", 2, 2, "new")], &[]);
    check_not(&updating, &any, "pool gpu.divvy.dev/p has 1 of 2 slices");
    check_not(&updating, &all, "requests all devices, but pool gpu.divvy.dev/p is incomplete or invalid");
    let twice = Cluster::new(&[of("a", 1, 2, "gpu-0"), of("b", 1, 2, "gpu-0")], &[]);
    check_not(&twice, &any, "pool gpu.divvy.dev/p is invalid: device gpu-0 is there twice");
    let other = slice("x", "good", json!({"devices": devices(&["gpu-9"])}));
    let mixed = Cluster::new(&[of("a", 1, 2, "gpu-0"), of("b", 1, 2, "gpu-0"), other], &[]);
    check(&mixed, &any, &["r=gpu-9"]);
}

#[test]
fn device_is_limited_to_its_nodes() {
    let any = requests(&[one("r", json!({}))]);
    let at = |more: Value| {
        let gone = with(slice("s", "p", json!({"devices": devices(&["gpu-0"])})), json!({}));
        let mut spec = gone["spec"].clone();
        spec.as_object_mut().expect("an object").remove("nodeName");
        Cluster::new(&[with(gone, json!({"spec": with(spec, more)}))], &[])
    };
    let zone = |operator: &str, values: Value| {
        let requirement = json!({"key": "zone", "operator": operator, "values": values});
        json!({"nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}})
    };
    let selector =
        |more: Value| at(more).allocate(&any).map(|result| result.node_selector).expect("allocated");
    let text = |more: Value| serde_json::to_string(&selector(more)).expect("json");
    assert_eq!(text(json!({"allNodes": true})), "null");
    assert!(
        text(json!({"nodeName": NODE}))
            .contains(r#"{"key":"metadata.name","operator":"In","values":["node-a"]}"#)
    );
    assert!(text(zone("In", json!(["z1"]))).contains(r#""matchExpressions":[{"key":"zone""#));
    for elsewhere in
        [json!({"nodeName": "node-b"}), zone("In", json!(["z2"])), zone("DoesNotExist", json!([])), json!({})]
    {
        check_not(&at(elsewhere), &any, "request r wants 1 of 0 devices");
    }
    let each = json!({"perDeviceNodeSelection": true, "devices": [
        {"name": "theirs", "nodeName": "node-b"}, {"name": "ours", "nodeName": NODE},
        {"name": "all", "allNodes": true},
    ]});
    check(&at(each), &requests(&[one("r", json!({"allocationMode": "All"}))]), &["r=ours", "r=all"]);
}

#[test]
fn first_available_takes_the_first_alternative_that_fits() {
    let sub = |name: &str, count: i64| json!({"name": name, "deviceClassName": "any", "count": count});
    let either = |subs: &[Value]| requests(&[json!({"name": "r", "firstAvailable": subs})]);
    check(&two_gpus(), &either(&[sub("one", 1), sub("two", 2)]), &["r/one=gpu-0"]);
    check(&two_gpus(), &either(&[sub("three", 3), sub("two", 2)]), &["r/two=gpu-0", "r/two=gpu-1"]);
    check(&two_gpus(), &either(&[sub("many", 33), sub("one", 1)]), &["r/one=gpu-0"]);
    check_not(
        &two_gpus(),
        &either(&[sub("three", 3), sub("four", 4)]),
        "request r/four wants 4 of 2 devices, 2 fit",
    );
    // The first alternative would leave no device for the second request.
    let both = requests(&[
        json!({"name": "r", "firstAvailable": [sub("two", 2), sub("one", 1)]}),
        one("s", json!({})),
    ]);
    check(&two_gpus(), &both, &["r/one=gpu-0", "s=gpu-1"]);
}

#[test]
fn allocation_mode_all_takes_every_device_or_none() {
    let all = requests(&[one("r", json!({"allocationMode": "All"}))]);
    check(&two_gpus(), &all, &["r=gpu-0", "r=gpu-1"]);
    let busy = Cluster::new(
        &[slice("s", "p", json!({"devices": devices(&["gpu-0", "gpu-1"])}))],
        &[held("gpu-1", json!({}))],
    );
    check_not(&busy, &all, "request r wants 2 of 2 devices, 1 fit, 1 in use");
    check_not(&Cluster::new(&[], &[]), &all, "request r wants 1 of 0 devices");
    let names: Vec<_> = (0..33).map(|n| format!("gpu-{n}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let many = Cluster::new(&[slice("s", "p", json!({"devices": devices(&names)}))], &[]);
    check_not(&many, &all, "claim ns/c requests 33 devices; a claim can have at most 32");
}

#[test]
fn invalid_input_is_refused_with_its_location() {
    let check = |claim: Value, why: &str| check_not(&two_gpus(), &claim, why);
    check(
        requests(&[json!({"name": "r", "exactly": {"deviceClassName": "no"}})]),
        "claim ns/c, request r: DeviceClass \"no\" does not exist",
    );
    check(
        requests(&[json!({"name": "r"})]),
        "claim ns/c, request r: it has neither exactly nor firstAvailable",
    );
    check(
        requests(&[one("r", json!({"allocationMode": "Some"}))]),
        "request r: unknown allocationMode \"Some\"",
    );
    check(
        requests(&[one("r", json!({"count": 0}))]),
        "request r: count 0 is not a positive number of devices",
    );
    check(requests(&[one("r", json!({"count": 33}))]), "claim ns/c requests 33 devices");
    check(requests(&[one("r", json!({"selectors": [{}]}))]), "request r: a selector has no CEL expression");
    check(requests(&[one("r", select("device ="))]), "request r: CEL expression \"device =\"");
    check(requests(&[one("r", select("device.attributes['a'].b"))]), "a selector failed on device gpu-0");
    check(requests(&[one("r", select("device.driver"))]), "returns a string, not true or false");
    check(claim(json!({"requests": [one("r", json!({}))], "constraints": [{}]})), "a constraint needs");
}

#[test]
fn constraints_apply_to_the_covered_devices() {
    let on = |name: &str, group: &str| {
        json!({"name": name, "attributes": {"group": {"string": group},
        "std.example.com/root": {"string": "x"}}})
    };
    let four = json!([on("a0", "a"), on("b0", "b"), on("a1", "a"), on("b1", "b"), {"name": "bare"}]);
    let cluster = |held: &[Value]| Cluster::new(&[slice("s", "p", json!({"devices": four}))], held);
    let pair = |constraint: Value| {
        claim(json!({"requests": [one("r", json!({"count": 2}))], "constraints": [constraint]}))
    };
    let same = json!({"matchAttribute": "gpu.divvy.dev/group"});
    check(&cluster(&[]), &pair(same.clone()), &["r=a0", "r=a1"]);
    check(&cluster(&[held("a1", json!({}))]), &pair(same.clone()), &["r=b0", "r=b1"]);
    check_not(&cluster(&[held("a1", json!({})), held("b1", json!({}))]), &pair(same.clone()), "does not fit");
    let differ = json!({"distinctAttribute": "gpu.divvy.dev/group"});
    check(&cluster(&[]), &pair(differ), &["r=a0", "r=b0"]);
    check(&cluster(&[]), &pair(json!({"matchAttribute": "std.example.com/root"})), &["r=a0", "r=b0"]);
    check_not(
        &cluster(&[]),
        &pair(json!({"matchAttribute": "gpu.divvy.dev/none"})),
        "excluded by a constraint",
    );
    let some = with(same, json!({"requests": ["x", "y/sub"]}));
    let sub = json!({"name": "y", "firstAvailable": [{"name": "sub", "deviceClassName": "any"}]});
    let three =
        claim(json!({"requests": [one("x", json!({})), one("free", json!({})), sub], "constraints": [some]}));
    check(&cluster(&[]), &three, &["x=a0", "free=b0", "y/sub=a1"]);
}

#[test]
fn constraint_on_a_list_excludes_a_second_device() {
    let links = |name: &str, to: &[&str]| json!({"name": name, "attributes": {"links": {"strings": to}}});
    let cluster =
        Cluster::new(&[slice("s", "p", json!({"devices": [links("a", &["1"]), links("b", &["1"])]}))], &[]);
    for constraint in ["matchAttribute", "distinctAttribute"] {
        let of = |count: i64| {
            let constraint = json!({constraint: "gpu.divvy.dev/links"});
            claim(json!({"requests": [one("r", json!({"count": count}))], "constraints": [constraint]}))
        };
        check(&cluster, &of(1), &["r=a"]);
        check_not(&cluster, &of(2), "does not fit");
        let newer = Cluster { release: Release::V1_38, ..cluster.clone() };
        check_not(&newer, &of(1), "a constraint does not support the list attribute of device a");
    }
}

#[test]
fn all_devices_must_satisfy_a_constraint() {
    let on = |name: &str, size: i64| json!({"name": name, "attributes": {"size": {"int": size}}});
    let cluster = Cluster::new(&[slice("s", "p", json!({"devices": [on("a", 1), on("b", 2)]}))], &[]);
    let all = one("r", json!({"allocationMode": "All"}));
    let same = json!({"matchAttribute": "gpu.divvy.dev/size"});
    check_not(
        &cluster,
        &claim(json!({"requests": [all], "constraints": [same]})),
        "request r: it requests all devices, but a constraint excludes device b",
    );
}

#[test]
fn alternatives_leave_room_for_later_requests() {
    let names: Vec<_> = (0..40).map(|n| format!("gpu-{n}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let cluster = Cluster::new(&[slice("s", "p", json!({"devices": devices(&names)}))], &[]);
    let sub = |name: &str, count: i64| json!({"name": name, "deviceClassName": "any", "count": count});
    let either = |name: &str, most: i64, least: i64| {
        let subs = [sub("most", most), sub("least", least)];
        json!({"name": name, "firstAvailable": subs})
    };
    let picked = cluster.allocate(&requests(&[either("a", 32, 16), either("b", 32, 16)])).map(|r| picked(&r));
    let picked = picked.expect("allocated");
    assert_eq!(
        (picked.len(), picked[0].as_str(), picked[31].as_str()),
        (32, "a/least=gpu-0", "b/least=gpu-31")
    );
    check_not(
        &cluster,
        &requests(&[either("a", 32, 16), one("b", json!({"count": 17}))]),
        "claim ns/c requests 33 devices; a claim can have at most 32",
    );
}

#[test]
fn claims_of_a_pod_are_allocated_together() {
    let sized = |name: &str, size: i64| json!({"name": name, "attributes": {"size": {"int": size}}});
    let cluster =
        Cluster::new(&[slice("s", "p", json!({"devices": [sized("big", 2), sized("small", 1)]}))], &[]);
    let any = requests(&[one("any", json!({}))]);
    let big = requests(&[one("big", select("device.attributes['gpu.divvy.dev'].size == 2"))]);
    check(&cluster, &any, &["any=big"]);
    let both = cluster.allocate_pod(&[&any, &big]).expect("allocated");
    assert_eq!(both.iter().map(picked).collect::<Vec<_>>(), [["any=small"], ["big=big"]]);
    let why = cluster.allocate_pod(&[&big, &big]).expect_err("one device is big").to_string();
    assert!(why.contains("claim ns/c, ns/c does not fit on node node-a"), "{why}");
    assert!(why.contains("request big of ns/c wants 1 of 2 devices, 1 fit, 1 not selected"), "{why}");
}

#[test]
fn taints_require_tolerations() {
    let tainted = |effect: &str| {
        let taint = json!([{"key": "gpu.divvy.dev/lost", "value": "yes", "effect": effect}]);
        let devices = json!([{"name": "gpu-0", "taints": taint}]);
        Cluster::new(&[slice("s", "p", json!({"devices": devices}))], &[])
    };
    let tolerating = |toleration: Value| requests(&[one("r", json!({"tolerations": [toleration]}))]);
    let plain = requests(&[one("r", json!({}))]);
    check_not(&tainted("NoSchedule"), &plain, "1 tainted gpu.divvy.dev/lost");
    check_not(&tainted("NoExecute"), &plain, "1 tainted gpu.divvy.dev/lost");
    check(&tainted("None"), &plain, &["r=gpu-0"]);
    check(&tainted("NoExecute"), &tolerating(json!({"operator": "Exists"})), &["r=gpu-0"]);
    check(
        &tainted("NoExecute"),
        &tolerating(json!({"key": "gpu.divvy.dev/lost", "value": "yes"})),
        &["r=gpu-0"],
    );
    check_not(
        &tainted("NoExecute"),
        &tolerating(json!({"key": "gpu.divvy.dev/lost", "value": "no"})),
        "tainted",
    );
    check_not(
        &tainted("NoExecute"),
        &tolerating(json!({"operator": "Exists", "effect": "NoSchedule"})),
        "tainted",
    );
    let admin = requests(&[one("r", json!({"adminAccess": true}))]);
    check_not(&tainted("NoSchedule"), &admin, "tainted");
}

#[test]
fn admin_access_ignores_only_other_claims() {
    let admin = |count: i64| requests(&[one("r", json!({"adminAccess": true, "count": count}))]);
    let busy = Cluster::new(
        &[slice("s", "p", json!({"devices": devices(&["gpu-0"])}))],
        &[held("gpu-0", json!({}))],
    );
    check(&busy, &admin(1), &["r=gpu-0"]);
    check_not(&busy, &admin(2), "does not fit");
    let watched = Cluster::new(
        &[slice("s", "p", json!({"devices": devices(&["gpu-0"])}))],
        &[held("gpu-0", json!({"adminAccess": true}))],
    );
    check(&watched, &requests(&[one("r", json!({}))]), &["r=gpu-0"]);
}

#[test]
fn allocation_includes_class_and_claim_configuration() {
    let opaque = |text: &str| json!({"opaque": {"driver": DRIVER, "parameters": {"say": text}}});
    let spec = json!({"config": [opaque("class")]});
    let cluster = two_gpus().class(with(class("tuned", &[]), json!({"spec": spec})));
    let tuned = |name: &str| json!({"name": name, "exactly": {"deviceClassName": "tuned"}});
    let configs = |requests: &[Value], config: Value| {
        let result =
            cluster.allocate(&claim(json!({"requests": requests, "config": config}))).expect("allocated");
        let config = result.devices.and_then(|devices| devices.config).unwrap_or_default();
        let row = |config: &k8s_openapi::api::resource::v1::DeviceAllocationConfiguration| {
            let say = config.opaque.as_ref().map(|opaque| opaque.parameters.0["say"].clone());
            json!([config.source, config.requests, say])
        };
        Value::from(config.iter().map(row).collect::<Vec<_>>())
    };
    let for_requests = |names: &[&str], text: &str| with(opaque(text), json!({"requests": names}));
    assert_eq!(configs(&[tuned("a"), tuned("b")], json!([])), json!([["FromClass", null, "class"]]));
    assert_eq!(
        configs(&[tuned("a"), one("b", json!({}))], json!([opaque("all"), for_requests(&["b"], "b")])),
        json!([["FromClass", ["a"], "class"], ["FromClaim", null, "all"], ["FromClaim", ["b"], "b"]]),
    );
    let sub = |name: &str, class: &str| json!({"name": name, "deviceClassName": class});
    let either = json!({"name": "r", "firstAvailable": [sub("x", "any"), sub("y", "tuned")]});
    assert_eq!(
        configs(
            &[either, one("s", json!({}))],
            json!([for_requests(&["r/y"], "y"), for_requests(&["r/x", "s"], "x")])
        ),
        json!([["FromClaim", null, "x"]]),
    );
}

#[test]
fn allocated_claim_is_refused() {
    let allocated = with(requests(&[one("r", json!({}))]), json!({"status": {"allocation": {}}}));
    check_not(&two_gpus(), &allocated, "claim ns/c: it is already allocated");
}

/// The API server accepts expressions of up to 10 KiB.
#[test]
fn hostile_expressions_terminate() {
    let nested = |open: &str, inner: &str, close: &str| {
        let times = (10_000 - inner.len()) / (open.len() + close.len());
        open.repeat(times) + inner + &close.repeat(times)
    };
    for expression in [
        nested("(", "true", ")"),
        nested("[", "", "]"),
        nested("!", "true", ""),
        nested("-", "1", ""),
        nested("", "device", ".a"),
        nested("", "device", "[0]"),
        nested("", "1", "+1"),
        nested("", "true", "&&true"),
        nested("true?true:", "true", ""),
        nested("cel.bind(a,1,", "a==1", ")"),
        nested("", "[1]", ".map(x,x)"),
        nested("(", "", ""),
        "cel.bind(1, 2, 3)".to_owned(),
        "x.bind(a, 1, a == 1)".to_owned(),
        "a".repeat(10_241),
    ] {
        match two_gpus().allocate(&requests(&[one("r", select(&expression))])) {
            Ok(result) => assert_eq!(picked(&result), ["r=gpu-0"]),
            Err(why) => assert!(why.to_string().starts_with("claim ns/c, request r: "), "{why}"),
        }
    }
}
