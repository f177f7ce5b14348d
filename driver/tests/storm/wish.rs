//! What people ask for: `spec.devices` of claims, drawn.

use crate::sequence::Dice;
use serde_json::{Value, json};
use std::fmt;

/// Models of the node, as their products are called.
const PRODUCTS: [&str; 4] = ["H100", "A30", "L4", "T4"];
const PROFILES: [&str; 7] = ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "1g.6gb", "2g.12gb"];
/// What `firstAvailable` chooses from.
const KINDS: [Kind; 6] = [Kind::Whole, Kind::Mig, Kind::Timeslice, Kind::Mps, Kind::Share, Kind::ShareOfMig];

#[derive(Clone, Copy)]
enum Kind {
    Whole,
    Mig,
    Timeslice,
    Mps,
    Share,
    ShareOfMig,
}

/// The devices of one claim, shown as they are written.
#[derive(Clone)]
pub(crate) struct Wish(pub(crate) Value);

impl fmt::Debug for Wish {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.0)
    }
}

/// Some devices.
pub(crate) fn wish(dice: &mut Dice) -> Wish {
    let mut requests = Vec::new();
    let mut configs = Vec::new();
    let count = if dice.once_in(6) { 2 } else { 1 };
    for at in 0..count {
        requests.push(request(dice, &format!("r{at}"), &mut configs));
    }
    let mut devices = json!({"requests": requests, "config": configs});
    let sliced = |request: &Value| request["exactly"]["deviceClassName"] == "mig.divvy.dev";
    if count > 1 && requests.iter().all(sliced) {
        // Two instances of one GPU.
        devices["constraints"] = json!([{"matchAttribute": "gpu.divvy.dev/parentUUID"}]);
    }
    Wish(devices)
}

/// One request; what configures it is added to the claim's configurations.
fn request(dice: &mut Dice, name: &str, configs: &mut Vec<Value>) -> Value {
    let mut configure = |kind: &str, sharing: Value| {
        let parameters =
            json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": kind, "sharing": sharing});
        configs.push(
            json!({"requests": [name], "opaque": {"driver": "gpu.divvy.dev", "parameters": parameters}}),
        );
    };
    let exactly = match dice.below(54) {
        0..6 => asked(dice, Kind::Whole),
        6..8 => {
            let interval = dice.of(&["Short", "Medium", "Long"]);
            let turns = json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}});
            configure("GpuConfig", turns);
            asked(dice, Kind::Whole)
        }
        8 => {
            configure("GpuConfig", mps(dice));
            asked(dice, Kind::Whole)
        }
        9..18 => asked(dice, Kind::Mig),
        18 => {
            configure("MigDeviceConfig", mps(dice));
            asked(dice, Kind::Mig)
        }
        19..25 => asked(dice, Kind::Timeslice),
        25..33 => asked(dice, Kind::Mps),
        33..35 => with(asked(dice, Kind::Whole), json!({"count": 2})),
        35..37 => {
            let kind = *dice.of(&[Kind::Whole, Kind::Timeslice, Kind::Mps]);
            with(asked(dice, kind), json!({"adminAccess": true}))
        }
        40..47 => asked(dice, Kind::Share),
        47..54 => asked(dice, Kind::ShareOfMig),
        _ => {
            let mut alternative = |name: &str| {
                let kind = *dice.of(&KINDS);
                with(asked(dice, kind), json!({"name": name}))
            };
            let alternatives = [alternative("a"), alternative("b"), alternative("c")];
            return json!({"name": name, "firstAvailable": alternatives});
        }
    };
    json!({"name": name, "exactly": exactly})
}

fn asked(dice: &mut Dice, kind: Kind) -> Value {
    let mut selectors = Vec::new();
    let mut select = |expression: String| selectors.push(json!({"cel": {"expression": expression}}));
    let attribute = |name: &str| format!("device.attributes['gpu.divvy.dev'].{name}");
    if matches!(kind, Kind::Mig | Kind::ShareOfMig) {
        select(format!("{} == '{}'", attribute("profile"), dice.of(&PROFILES)));
    } else if dice.once_in(2) {
        select(format!("{}.contains('{}')", attribute("productName"), dice.of(&PRODUCTS)));
    }
    let (class, capacity) = match kind {
        Kind::Whole => ("gpu.divvy.dev", json!({})),
        Kind::Mig => ("mig.divvy.dev", json!({})),
        Kind::Share => ("gpu.divvy.dev", json!({"memory": dice.of(&["3Gi", "6Gi", "11Gi"])})),
        Kind::ShareOfMig => ("mig.divvy.dev", json!({"memory": dice.of(&["2Gi", "4Gi"])})),
        Kind::Timeslice => ("timeslice.divvy.dev", dice.of(&[json!({}), json!({"slots": "2"})]).clone()),
        Kind::Mps => {
            let some = json!({"memory": "2Gi", "threads": "20"});
            let more = json!({"memory": "9Gi", "threads": "60", "clients": "3"});
            ("mps.divvy.dev", dice.of(&[json!({}), some, more]).clone())
        }
    };
    let mut request = json!({"deviceClassName": class, "selectors": selectors});
    if capacity != json!({}) {
        request["capacity"] = json!({"requests": capacity});
    }
    request
}

fn mps(dice: &mut Dice) -> Value {
    let whole = json!({"strategy": "MPS"});
    let limited = json!({
        "strategy": "MPS",
        "mpsConfig": {"defaultActiveThreadPercentage": 30, "defaultPinnedDeviceMemoryLimit": "2Gi"},
    });
    dice.of(&[whole, limited]).clone()
}

fn with(mut value: Value, more: Value) -> Value {
    for (key, field) in more.as_object().into_iter().flatten() {
        value[key] = field.clone();
    }
    value
}
