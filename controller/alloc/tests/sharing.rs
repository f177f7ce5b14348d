//! Devices that exclude each other by counters, and devices with multiple allocations.

mod common;

use common::*;
use serde_json::{Value, json};

/// A GPU with 8 memory slices and 7 compute slices, and partitions of it.
fn partitioned(parts: &[(&str, i64, i64)], held: &[Value]) -> Cluster {
    let counters = |memory: i64, compute: i64| {
        json!({"memory": {"value": memory.to_string()},
        "compute": {"value": compute.to_string()}})
    };
    let sets = json!([{"name": "gpu-0", "counters": counters(8, 7)}]);
    let part = |(name, memory, compute): &(&str, i64, i64)| {
        json!({"name": name,
        "consumesCounters": [{"counterSet": "gpu-0", "counters": counters(*memory, *compute)}]})
    };
    let parts: Vec<_> = parts.iter().map(part).collect();
    let pool = pool_of(2, 1, "p");
    let slices = [
        slice("a", "p", json!({"sharedCounters": sets, "pool": pool})),
        slice("b", "p", json!({"devices": parts, "pool": pool})),
    ];
    Cluster::new(&slices, held)
}

const PARTS: &[(&str, i64, i64)] = &[("whole", 8, 7), ("4g-0", 4, 4), ("4g-4", 4, 4), ("3g-0", 4, 3)];

#[test]
fn counters_exclude_overlapping_partitions() {
    let any = requests(&[one("r", json!({}))]);
    check(&partitioned(PARTS, &[]), &any, &["r=whole"]);
    // Two 4g need 8 of 7 compute slices; 4g and 3g fit.
    let mut cluster = partitioned(&PARTS[1..], &[]);
    for (claim, device) in [("one", "r=4g-0"), ("two", "r=3g-0")] {
        assert_eq!(picked(&cluster.take(claim, &any).expect("fits")), [device]);
    }
    check_not(
        &cluster,
        &any,
        "request r wants 1 of 3 devices, 0 fit, 2 in use, 1 overlapping devices in use",
    );
    cluster.release("one");
    check(&cluster, &any, &["r=4g-0"]);
    check(&partitioned(PARTS, &[]), &requests(&[one("r", json!({"count": 2}))]), &["r=4g-0", "r=3g-0"]);
    check_not(
        &partitioned(PARTS, &[]),
        &requests(&[one("r", json!({"count": 3}))]),
        "wants 3 of 4 devices, 4 fit",
    );
    check_not(
        &partitioned(PARTS, &[held("4g-0", json!({}))]),
        &requests(&[one("r", json!({"count": 2}))]),
        "does not fit",
    );
}

#[test]
fn admin_access_consumes_counters() {
    let admin = requests(&[one("r", json!({"adminAccess": true}))]);
    check(&partitioned(PARTS, &[]), &admin, &["r=whole"]);
    check_not(&partitioned(PARTS, &[held("whole", json!({}))]), &admin, "4 overlapping devices in use");
}

#[test]
fn negative_counter_makes_the_pool_unavailable() {
    let held = [held("4g-0", json!({})), held("4g-4", json!({}))];
    check_not(
        &partitioned(&[("4g-0", 4, 4), ("4g-4", 4, 4), ("none", 0, 0)], &held),
        &requests(&[one("r", json!({}))]),
        "1 overlapping",
    );
}

#[test]
fn pools_with_equal_names_have_separate_counters() {
    let mut cluster = partitioned(PARTS, &[held("whole", json!({"driver": "other.example.com"}))]);
    check(&cluster, &requests(&[one("r", json!({}))]), &["r=whole"]);
    cluster.take("mine", &requests(&[one("r", json!({}))])).expect("fits");
    check_not(&cluster, &requests(&[one("r", json!({}))]), "3 overlapping");
}

#[test]
fn undeclared_counter_makes_the_pool_invalid() {
    let stray = json!([{"name": "x", "consumesCounters": [{"counterSet": "no",
        "counters": {"memory": {"value": "1"}}}]}]);
    let cluster = Cluster::new(&[slice("s", "p", json!({"devices": stray}))], &[]);
    check_not(
        &cluster,
        &requests(&[one("r", json!({}))]),
        "is invalid: device x consumes counters of unknown set no",
    );
}

/// Two shareable GPUs of 80Gi in steps of 1Gi. A claim without a request takes all memory. Each
/// GPU's counter permits one holder: the shareable device or a partition.
fn shared(held: &[Value]) -> Cluster {
    let policy = json!({"default": "80Gi", "validRange": {"min": "1Gi", "max": "80Gi", "step": "1Gi"}});
    let gpu = |name: &str| {
        json!({
            "name": name, "allowMultipleAllocations": true,
            "capacity": {"memory": {"value": "80Gi", "requestPolicy": policy}},
            "consumesCounters": [{"counterSet": name, "counters": {"all": {"value": "1"}}}],
        })
    };
    let part = |name: &str, gpu: &str| {
        json!({"name": name, "consumesCounters": [{"counterSet": gpu,
        "counters": {"all": {"value": "1"}}}]})
    };
    let set = |name: &str| json!({"name": name, "counters": {"all": {"value": "1"}}});
    let pool = pool_of(2, 1, "p");
    let devices = json!([gpu("gpu-0"), part("part-0", "gpu-0"), gpu("gpu-1"), part("part-1", "gpu-1")]);
    let slices = [
        slice("a", "p", json!({"sharedCounters": [set("gpu-0"), set("gpu-1")], "pool": pool})),
        slice("b", "p", json!({"devices": devices, "pool": pool})),
    ];
    Cluster::new(&slices, held)
}

fn memory(amount: &str) -> Value {
    let shares = "device.allowMultipleAllocations";
    requests(&[one("r", with(select(shares), json!({"capacity": {"requests": {"memory": amount}}})))])
}

#[test]
fn shares_fill_one_device_before_the_next() {
    let mut cluster = shared(&[]);
    for (name, amount, device) in [
        ("a", "50Gi", "r=gpu-0"),
        ("b", "40Gi", "r=gpu-1"),
        ("c", "30Gi", "r=gpu-0"),
        ("d", "40Gi", "r=gpu-1"),
    ] {
        assert_eq!(picked(&cluster.take(name, &memory(amount)).expect("fits")), [device], "{name}");
    }
    check_not(&cluster, &memory("1Gi"), "2 without enough capacity");
    cluster.release("c");
    check(&cluster, &memory("30Gi"), &["r=gpu-0"]);
    check_not(&cluster, &memory("31Gi"), "does not fit");
}

#[test]
fn share_reports_its_consumed_capacity() {
    let share = |claim: &Value| {
        let result = shared(&[]).allocate(claim).expect("fits").devices.and_then(|devices| devices.results);
        let result = result.unwrap_or_default().remove(0);
        json!([result.share_id, result.consumed_capacity])
    };
    assert_eq!(share(&memory("1500Mi")), json!(["share-1", {"memory": "2Gi"}]));
    assert_eq!(share(&requests(&[one("r", json!({}))])), json!(["share-1", {"memory": "80Gi"}]));
    let part = requests(&[one("r", select("!device.allowMultipleAllocations"))]);
    assert_eq!(share(&part), json!([null, null]));
}

#[test]
fn first_claim_decides_the_mode_of_a_gpu() {
    let part = requests(&[one("r", select("!device.allowMultipleAllocations"))]);
    let mut cluster = shared(&[]);
    cluster.take("share", &memory("10Gi")).expect("fits");
    assert_eq!(picked(&cluster.take("part", &part).expect("fits")), ["r=part-1"]);
    // The second share of gpu-0 consumes no counter; a partition holds gpu-1.
    check(&cluster, &memory("70Gi"), &["r=gpu-0"]);
    check_not(&cluster, &memory("71Gi"), "1 without enough capacity, 1 overlapping devices in use");
    check_not(&cluster, &part, "does not fit");
    cluster.release("share");
    check(&cluster, &part, &["r=part-0"]);
}

#[test]
fn requests_of_a_claim_may_share_a_device() {
    let half = |name: &str| {
        one(
            name,
            with(
                select("device.allowMultipleAllocations"),
                json!({"capacity": {"requests": {"memory": "40Gi"}}}),
            ),
        )
    };
    check(&shared(&[]), &requests(&[half("a"), half("b"), half("c")]), &["a=gpu-0", "b=gpu-0", "c=gpu-1"]);
    let twice = with(
        select("device.allowMultipleAllocations"),
        json!({"count": 2, "capacity": {"requests": {"memory": "1Gi"}}}),
    );
    check(&shared(&[]), &requests(&[one("r", twice)]), &["r=gpu-0", "r=gpu-1"]);
}

#[test]
fn exclusive_claims_and_shares_exclude_each_other() {
    check(&shared(&[held("gpu-0", json!({}))]), &memory("1Gi"), &["r=gpu-1"]);
    check_not(&shared(&[]), &memory("81Gi"), "2 without enough capacity");
    let other = json!({"capacity": {"requests": {"tokens": "1"}}});
    check_not(&shared(&[]), &requests(&[one("r", other)]), "4 without enough capacity");
    let all = with(
        select("device.allowMultipleAllocations"),
        json!({"allocationMode": "All", "capacity": {"requests": {"memory": "60Gi"}}}),
    );
    let all = requests(&[one("r", all)]);
    check(&shared(&[]), &all, &["r=gpu-0", "r=gpu-1"]);
    let used = held("gpu-1", json!({"shareID": "s", "consumedCapacity": {"memory": "30Gi"}}));
    check_not(&shared(&[used]), &all, "request r wants 2 of 4 devices, 1 fit");
}
