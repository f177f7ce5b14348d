//! Selectors evaluate as in the API server.

use super::Selector;
use k8s_openapi::api::resource::v1::Device;
use serde_json::{from_value, json};

fn matches(expression: &str) -> Result<bool, String> {
    let wire: Device = from_value(json!({
        "name": "gpu-0",
        "attributes": {
            "type": {"string": "mig"},
            "profile": {"string": "1g.10gb"},
            "index": {"int": 3},
            "ready": {"bool": true},
            "driverVersion": {"version": "580.95.5"},
            "peers": {"strings": ["a", "b"]},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:16"},
        },
        "capacity": {"memory": {"value": "9984Mi"}, "multiprocessors": {"value": "16"}},
    }))
    .expect("a device");
    Selector::compile(expression)?.matches("gpu.divvy.dev", &wire)
}

#[test]
fn expressions_select() {
    let check = |expected: bool, expressions: &[&str]| {
        for expression in expressions {
            assert_eq!(matches(expression), Ok(expected), "{expression}");
        }
    };
    check(
        true,
        &[
            "true",
            "device.driver == 'gpu.divvy.dev'",
            "device.attributes['gpu.divvy.dev'].type == 'mig'",
            "device.attributes[device.driver].index > 2",
            "device.attributes['gpu.divvy.dev'].index == 3.0",
            "device.attributes['gpu.divvy.dev'].ready",
            "device.attributes['gpu.divvy.dev'].profile.matches('^1g[.]')",
            "device.attributes['gpu.divvy.dev'].profile in ['1g.10gb', '2g.20gb']",
            "'a' in device.attributes['gpu.divvy.dev'].peers",
            "device.attributes['gpu.divvy.dev'].peers.exists(peer, peer == 'b')",
            "device.attributes['resource.kubernetes.io'].pcieRoot == 'pci0000:16'",
            "device.allowMultipleAllocations == false",
            "'gpu.divvy.dev' in device.attributes",
            "has(device.attributes['gpu.divvy.dev'].profile)",
            "device.attributes['no.example.com'].?x.orValue('none') == 'none'",
            "device.capacity['gpu.divvy.dev'].memory.isGreaterThan(quantity('9Gi'))",
            "device.capacity['gpu.divvy.dev'].memory.compareTo(quantity('9984Mi')) == 0",
            "device.capacity['gpu.divvy.dev'].memory == quantity('10468982784')",
            "device.capacity['gpu.divvy.dev'].multiprocessors.asInteger() == 16",
            "quantity('1Gi').add(quantity('1Gi')).sub(1).isLessThan(quantity('2Gi'))",
            "quantity('-1').sign() == -1 && !quantity('1500m').isInteger()",
            "quantity('500m').asApproximateFloat() == 0.5",
            "isQuantity('10Gi') && !isQuantity('ten')",
            "device.attributes['gpu.divvy.dev'].driverVersion.isGreaterThan(semver('570.0.0'))",
            "device.attributes['gpu.divvy.dev'].driverVersion.compareTo(semver('580.95.5')) == 0",
            "device.attributes['gpu.divvy.dev'].driverVersion.major() == 580",
            "semver('v1.02', true) == semver('1.2.0') && isSemver('1.0.0') && !isSemver('v1')",
            "cel.bind(dra, device.attributes['gpu.divvy.dev'], dra.type == 'mig' && dra.index == 3)",
            "cel.bind(a, 1, cel.bind(b, a + 1, b == 2))",
        ],
    );
    check(
        false,
        &[
            "device.driver == 'other'",
            "device.attributes['gpu.divvy.dev'].type == 'gpu'",
            "has(device.attributes['gpu.divvy.dev'].nothing)",
            "has(device.attributes['no.example.com'].x)",
            "'no.example.com' in device.attributes",
            "device.capacity['gpu.divvy.dev'].memory.isLessThan(quantity('9Gi'))",
            "device.attributes['gpu.divvy.dev'].type == 1",
        ],
    );
}

#[test]
fn invalid_expressions_are_errors_not_false() {
    for (expression, cause) in [
        ("device.attributes['gpu.divvy.dev'].nothing == 1", "No such key"),
        ("device.attributes['no.example.com'].x == 1", "No such key"),
        ("device.nothing", ""),
        ("nothing == 1", "nothing"),
        ("device.driver", "true or false"),
        ("quantity('ten') == quantity('1')", "not a quantity"),
        ("semver('v1') == semver('1.0.0')", "not a semantic version"),
        ("device.driver ==", "CEL expression"),
        ("device.driver.isGreaterThan(quantity('1'))", ""),
    ] {
        let found = matches(expression).expect_err(expression);
        assert!(found.contains(cause), "{expression}: {found}");
    }
}
