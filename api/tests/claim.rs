//! Reading a ResourceClaim into an AllocatedClaim, and its errors.

use divvy_api::sharing::{Interval, Mode, Sharing};
use divvy_api::{AllocatedClaim, Hold};
use k8s_openapi::api::resource::v1::ResourceClaim;
use proptest::prelude::*;
use serde_json::{Value, json};

const OURS: &str = "gpu.divvy.dev";

fn claim(results: Value, config: Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": "c", "uid": "u-1"},
        "spec": {},
        "status": {"allocation": {"devices": {"results": results, "config": config}}},
    })
}

fn result(request: &str, device: &str) -> Value {
    json!({"request": request, "driver": OURS, "pool": "node-a", "device": device})
}

fn with(mut value: Value, more: Value) -> Value {
    for (key, field) in more.as_object().into_iter().flatten() {
        value[key] = field.clone();
    }
    value
}

fn config(kind: &str, source: &str, requests: &[&str]) -> Value {
    let parameters = json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": kind});
    json!({"source": source, "requests": requests, "opaque": {"driver": OURS, "parameters": parameters}})
}

/// Reads a claim from its object and from JSON, which must agree.
fn read(claim: &Value) -> Result<AllocatedClaim, String> {
    let object: ResourceClaim = serde_json::from_value(claim.clone()).expect("a claim");
    let typed = AllocatedClaim::try_from(&object).map_err(|error| error.to_string());
    let bytes = AllocatedClaim::from_json(claim.to_string().as_bytes()).map_err(|error| error.to_string());
    assert_eq!(typed, bytes);
    typed
}

fn check_refused(claim: &Value, message: &str) {
    assert_eq!(read(claim).expect_err("refused"), message);
}

#[test]
fn other_drivers_are_dropped_and_subrequests_mapped() {
    let foreign = with(result("net", "nic-0"), json!({"driver": "net.example.com"}));
    let read = read(&claim(json!([foreign, result("gpu/big", "gpu-1"), result("gpu", "gpu-0")]), json!([])));
    let read = read.expect("allocated");
    assert_eq!(read.claim.to_string(), "ns/c");
    assert_eq!(read.claim.uid.as_str(), "u-1");
    let rows: Vec<_> =
        read.devices.iter().map(|d| (d.request.as_str(), d.pool.as_str(), d.device.as_str())).collect();
    assert_eq!(rows, [("gpu", "node-a", "gpu-1"), ("gpu", "node-a", "gpu-0")]);
    assert!(read.devices.iter().all(|device| device.hold == Hold::Exclusive));
}

#[test]
fn hold_is_read_from_the_result() {
    let check = |more: Value, expected: Hold| {
        let read = read(&claim(json!([with(result("r", "gpu-0"), more)]), json!([]))).expect("allocated");
        assert_eq!(read.devices[0].hold, expected);
    };
    check(json!({}), Hold::Exclusive);
    check(json!({"adminAccess": false}), Hold::Exclusive);
    check(json!({"adminAccess": true}), Hold::Admin { id: None });
    check(json!({"adminAccess": true, "shareID": "s"}), Hold::Admin { id: Some("s".into()) });
    check(json!({"shareID": "s"}), Hold::Share { id: "s".into(), consumed: [].into() });
    let consumed = [("memory".to_owned(), "10Gi".parse().expect("quantity"))].into();
    check(
        json!({"shareID": "s", "consumedCapacity": {"gpu.divvy.dev/memory": "10240Mi"}}),
        Hold::Share { id: "s".into(), consumed },
    );
}

#[test]
fn class_configuration_precedes_that_of_the_claim() {
    let check = |configs: Value, request: &str, expected: &[&str]| {
        let read = read(&claim(json!([result(request, "gpu-0")]), configs)).expect("allocated");
        let kinds: Vec<_> = read.devices[0].configs.iter().map(|applied| applied.config.kind()).collect();
        assert_eq!(kinds, expected);
    };
    let (gpu, mig) = ("GpuConfig", "MigDeviceConfig");
    check(json!([]), "r", &[]);
    check(json!([config(gpu, "FromClaim", &[]), config(mig, "FromClass", &[])]), "r", &[mig, gpu]);
    check(json!([config(gpu, "FromClaim", &["r"])]), "r", &[gpu]);
    check(json!([config(gpu, "FromClaim", &["other"])]), "r", &[]);
    check(json!([config(gpu, "FromClaim", &["r"]), config(mig, "FromClaim", &["r/a"])]), "r/a", &[gpu, mig]);
    check(json!([config(gpu, "FromClaim", &["r/b"])]), "r/a", &[]);
    let foreign =
        json!({"source": "FromClaim", "opaque": {"driver": "net.example.com", "parameters": {"mtu": 9}}});
    check(json!([foreign, {"source": "FromClaim"}]), "r", &[]);
}

#[test]
fn configuration_applies_to_its_requests() {
    let slicing = |interval: &str, source: &str, requests: &[&str]| {
        let sharing = json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}});
        let mut config = config("GpuConfig", source, requests);
        config["opaque"]["parameters"]["sharing"] = sharing;
        config
    };
    let mig = |source, requests: &[&str]| config("MigDeviceConfig", source, requests);
    let check = |configs: &[Value], request: &str, mode, expected: Result<Option<Interval>, ()>| {
        let read = read(&claim(json!([result(request, "gpu-0")]), json!(configs))).expect("allocated");
        let expected = expected.map(|interval| interval.map(Sharing::TimeSlicing));
        assert_eq!(read.devices[0].sharing(mode).map_err(|_| ()), expected, "{configs:?}");
    };
    use Interval::{Long, Short};
    use Mode::{Mps, Timeslice, Whole};
    let (class, author) = ("FromClass", "FromClaim");
    check(&[slicing("Long", author, &[]), slicing("Short", class, &["r"])], "r", Whole, Ok(Some(Long)));
    check(&[slicing("Long", author, &["r"]), slicing("Short", author, &[])], "r", Whole, Ok(Some(Short)));
    check(&[slicing("Long", author, &["r"])], "r/sub", Whole, Ok(Some(Long)));
    check(&[slicing("Long", author, &["r/sub"])], "r/sub", Whole, Ok(Some(Long)));
    check(&[slicing("Long", author, &["r/other"])], "r/sub", Whole, Ok(None));
    check(&[slicing("Long", author, &["r"]), mig(author, &[])], "r", Whole, Ok(Some(Long)));
    check(&[slicing("Long", author, &["r"]), mig(author, &["r"])], "r", Whole, Err(()));
    check(&[slicing("Long", author, &["r/sub"])], "r/sub", Timeslice, Err(()));
    // An alternative of another kind, and a class that the scheduler chose.
    check(&[slicing("Long", author, &["r"]), mig(author, &["r"])], "r/sub", Whole, Ok(Some(Long)));
    check(&[mig(class, &["r"])], "r", Whole, Ok(None));
    check(&[slicing("Long", author, &[])], "r", Mps, Ok(None));
}

#[test]
fn errors_name_the_claim() {
    let one = || json!([result("r", "gpu-0")]);
    check_refused(&json!({"metadata": {"name": "c"}, "spec": {}}), "claim ?/c has no namespace");
    let unallocated = json!({"metadata": {"namespace": "ns", "name": "c", "uid": "u"}, "spec": {}});
    check_refused(&unallocated, "claim ns/c is not allocated");
    check_refused(&claim(json!([]), json!([])), "claim ns/c has no device of driver gpu.divvy.dev");
    check_refused(
        &claim(json!([result("r", "")]), json!([])),
        "claim ns/c has no device in an allocation result",
    );
    check_refused(
        &claim(json!([result("a", "gpu-0"), result("b", "gpu-0")]), json!([])),
        "claim ns/c holds device gpu-0 twice",
    );
    check_refused(
        &claim(json!([with(result("r", "gpu-0"), json!({"consumedCapacity": {"memory": "1"}}))]), json!([])),
        "claim ns/c, device gpu-0: consumes capacity but has no shareID",
    );
    let share = json!({"shareID": "s", "consumedCapacity": {"memory": "1", "gpu.divvy.dev/memory": "1"}});
    check_refused(
        &claim(json!([with(result("r", "gpu-0"), share)]), json!([])),
        "claim ns/c, device gpu-0: capacity memory is given twice",
    );
    check_refused(
        &claim(one(), json!([config("Nonsense", "FromClaim", &[])])),
        "claim ns/c, request r: field kind is \"Nonsense\", expected GpuConfig, MigDeviceConfig or \
         ShareConfig",
    );
    check_refused(
        &claim(one(), json!([config("GpuConfig", "FromTheMoon", &[])])),
        "claim ns/c, request r: configuration is from \"FromTheMoon\", expected FromClass or FromClaim",
    );
    let bad = with(result("r", "gpu-0"), json!({"shareID": "s", "consumedCapacity": {"memory": "ten"}}));
    let refused = read(&claim(json!([bad]), json!([]))).expect_err("refused");
    assert!(refused.starts_with("claim ns/c, device gpu-0: \"ten\" is not a quantity"), "{refused}");
}

#[test]
fn duplicate_key_is_detected_in_json() {
    let text =
        claim(json!([result("r", "gpu-0")]), json!([config("GpuConfig", "FromClaim", &[])])).to_string();
    let twice = text.replace(r#""kind":"GpuConfig""#, r#""kind":"GpuConfig","kind":"GpuConfig""#);
    let refused = AllocatedClaim::from_json(twice.as_bytes()).expect_err("refused").to_string();
    assert_eq!(refused, "claim ns/c, request r: field kind is given twice");
}

fn any_result() -> impl Strategy<Value = Value> {
    let text =
        || prop_oneof![Just(""), Just("r"), Just("r/a"), Just("r/"), Just("/"), Just("gpu-0"), Just("é")];
    let driver = prop_oneof![Just(OURS), Just("net.example.com"), Just("")];
    let amount = prop_oneof![Just("1Gi"), Just("-1"), Just("x")];
    (
        text(),
        driver,
        text(),
        text(),
        any::<Option<bool>>(),
        prop::option::of(text()),
        prop::option::of(amount),
    )
        .prop_map(|(request, driver, pool, device, admin, share, amount)| {
            json!({
                "request": request, "driver": driver, "pool": pool, "device": device, "adminAccess": admin,
                "shareID": share, "consumedCapacity": amount.map(|amount| json!({"memory": amount})),
            })
        })
}

fn any_config() -> impl Strategy<Value = Value> {
    let kind = prop_oneof![Just("GpuConfig"), Just("MigDeviceConfig"), Just("No")];
    let source = prop_oneof![Just("FromClass"), Just("FromClaim"), Just("")];
    let requests = prop::collection::vec(prop_oneof![Just("r"), Just("r/a"), Just("")], 0..3);
    (kind, source, requests).prop_map(|(kind, source, requests)| config(kind, source, &requests))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_allocation_is_read_or_rejected_by_name(
        results in prop::collection::vec(any_result(), 0..5),
        configs in prop::collection::vec(any_config(), 0..4),
    ) {
        match read(&claim(json!(results), json!(configs))) {
            Ok(read) => {
                prop_assert!(!read.devices.is_empty());
                let ours = results.iter().filter(|result| result["driver"] == OURS).count();
                prop_assert_eq!(read.devices.len(), ours);
            }
            Err(message) => prop_assert!(message.starts_with("claim ns/c"), "{}", message),
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..400) {
        let _ = AllocatedClaim::from_json(&bytes);
        let config = config("GpuConfig", "FromClaim", &["r"]);
        let whole = claim(json!([result("r", "gpu-0")]), json!([config])).to_string();
        let _ = AllocatedClaim::from_json(&whole.as_bytes()[..cut.min(whole.len())]);
    }
}
