//! Random `spec.devices` of claims, as users write them.

use crate::sequence::Rng;
use serde_json::{Value, json};
use std::fmt;

/// Product names of the GPU models of the node.
const PRODUCTS: [&str; 4] = ["H100", "A30", "L4", "T4"];
/// MIG profiles of these models. The smallest one is drawn more often.
const PROFILES: [&str; 7] = ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "1g.6gb", "2g.12gb"];
/// The kinds of the alternatives of a `firstAvailable` request.
const KINDS: [Kind; 6] = [Kind::Whole, Kind::Mig, Kind::Timeslice, Kind::Mps, Kind::Share, Kind::ShareOfMig];

#[derive(Clone, Copy)]
/// The kind of device that a request selects.
enum Kind {
    Whole,
    Mig,
    Timeslice,
    Mps,
    Share,
    ShareOfMig,
}

/// The `spec.devices` of one claim. `Debug` prints it as JSON.
#[derive(Clone)]
pub(crate) struct ClaimSpec(pub(crate) Value);

impl fmt::Debug for ClaimSpec {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.0)
    }
}

/// One or two random requests.
pub(crate) fn random_claim_spec(rng: &mut Rng) -> ClaimSpec {
    let mut requests = Vec::new();
    let mut configs = Vec::new();
    let count = if rng.once_in(6) { 2 } else { 1 };
    for at in 0..count {
        requests.push(request(rng, &format!("r{at}"), &mut configs));
    }
    let mut devices = json!({"requests": requests, "config": configs});
    let is_mig = |request: &Value| request["exactly"]["deviceClassName"] == "mig.divvy.dev";
    if count > 1 && requests.iter().all(is_mig) {
        // Both instances on one GPU.
        devices["constraints"] = json!([{"matchAttribute": "gpu.divvy.dev/parentUUID"}]);
    }
    ClaimSpec(devices)
}

/// One random request. Its configuration, if any, is appended to `configs`.
fn request(rng: &mut Rng, name: &str, configs: &mut Vec<Value>) -> Value {
    let mut configure = |kind: &str, sharing: Value| {
        let parameters =
            json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": kind, "sharing": sharing});
        configs.push(
            json!({"requests": [name], "opaque": {"driver": "gpu.divvy.dev", "parameters": parameters}}),
        );
    };
    let exactly = match rng.below(54) {
        0..6 => device_request(rng, Kind::Whole),
        6..8 => {
            let interval = rng.choose(&["Short", "Medium", "Long"]);
            let timeslicing = json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}});
            configure("GpuConfig", timeslicing);
            device_request(rng, Kind::Whole)
        }
        8 => {
            configure("GpuConfig", mps_sharing(rng));
            device_request(rng, Kind::Whole)
        }
        9..18 => device_request(rng, Kind::Mig),
        18 => {
            configure("MigDeviceConfig", mps_sharing(rng));
            device_request(rng, Kind::Mig)
        }
        19..25 => device_request(rng, Kind::Timeslice),
        25..33 => device_request(rng, Kind::Mps),
        33..35 => with_fields(device_request(rng, Kind::Whole), json!({"count": 2})),
        35..37 => {
            let kind = *rng.choose(&[Kind::Whole, Kind::Timeslice, Kind::Mps]);
            with_fields(device_request(rng, kind), json!({"adminAccess": true}))
        }
        40..47 => device_request(rng, Kind::Share),
        47..54 => device_request(rng, Kind::ShareOfMig),
        _ => {
            let mut alternative = |name: &str| {
                let kind = *rng.choose(&KINDS);
                with_fields(device_request(rng, kind), json!({"name": name}))
            };
            let alternatives = [alternative("a"), alternative("b"), alternative("c")];
            return json!({"name": name, "firstAvailable": alternatives});
        }
    };
    json!({"name": name, "exactly": exactly})
}

/// A device request of this kind, with a random selector and capacity.
fn device_request(rng: &mut Rng, kind: Kind) -> Value {
    let mut selectors = Vec::new();
    let mut select = |expression: String| selectors.push(json!({"cel": {"expression": expression}}));
    let attribute = |name: &str| format!("device.attributes['gpu.divvy.dev'].{name}");
    if matches!(kind, Kind::Mig | Kind::ShareOfMig) {
        select(format!("{} == '{}'", attribute("profile"), rng.choose(&PROFILES)));
    } else if rng.once_in(2) {
        select(format!("{}.contains('{}')", attribute("productName"), rng.choose(&PRODUCTS)));
    }
    let (class, capacity) = match kind {
        Kind::Whole => ("gpu.divvy.dev", json!({})),
        Kind::Mig => ("mig.divvy.dev", json!({})),
        Kind::Share => ("share.divvy.dev", json!({"memory": rng.choose(&["3Gi", "6Gi", "11Gi"])})),
        Kind::ShareOfMig => ("mig.divvy.dev", json!({"memory": rng.choose(&["2Gi", "4Gi"])})),
        Kind::Timeslice => ("timeslice.divvy.dev", rng.choose(&[json!({}), json!({"slots": "2"})]).clone()),
        Kind::Mps => {
            let some = json!({"memory": "2Gi", "threads": "20"});
            let more = json!({"memory": "9Gi", "threads": "60", "clients": "3"});
            ("mps.divvy.dev", rng.choose(&[json!({}), some, more]).clone())
        }
    };
    let mut request = json!({"deviceClassName": class, "selectors": selectors});
    if capacity != json!({}) {
        request["capacity"] = json!({"requests": capacity});
    }
    request
}

/// A random MPS configuration.
fn mps_sharing(rng: &mut Rng) -> Value {
    let whole = json!({"strategy": "MPS"});
    let limited = json!({
        "strategy": "MPS",
        "mpsConfig": {"defaultActiveThreadPercentage": 30, "defaultPinnedDeviceMemoryLimit": "2Gi"},
    });
    rng.choose(&[whole, limited]).clone()
}

/// Adds the fields of `more` to an object.
fn with_fields(mut value: Value, more: Value) -> Value {
    for (key, field) in more.as_object().into_iter().flatten() {
        value[key] = field.clone();
    }
    value
}
