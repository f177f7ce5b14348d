//! The scenarios: nodes with sequences of claims. Each model has sequences for modes and shares,
//! and random ones. All are deterministic.

mod modes;
mod random;
mod script;
mod shares;

use crate::common::{Cluster, DRIVER, NODE, with};
use crate::gpus::{self, gpu, in_mode, inventory_of, node};
use crate::nodes;
use divvy_api::sharing::Mode;
use divvy_catalogue as catalogue;
use divvy_catalogue::{GpuModel, Model};
use divvy_model::Inventory;
use divvy_model::inventory::{Condition, MigMode, Origin, Presence};
use modes::modes;
use random::random;
use serde_json::{Value, json};
use shares::{mig_shares, shares, turned_off, upgraded, without_counters};
use std::collections::BTreeSet;

pub(crate) struct Scenario {
    pub(crate) name: String,
    pub(crate) node: Inventory,
    /// If set, the slices have no counters, and these devices are held.
    without_counters: Option<BTreeSet<String>>,
    pub(crate) sequences: Vec<Sequence>,
}

impl Scenario {
    fn new(name: String, node: Inventory, sequences: Vec<Sequence>) -> Self {
        Self { name, node, without_counters: None, sequences }
    }

    pub(crate) fn published(&self) -> Cluster {
        match &self.without_counters {
            None => nodes::published(&self.node),
            Some(held) => nodes::published_without_counters(&self.node, held),
        }
    }
}

/// Steps on a node without allocated claims.
pub(crate) struct Sequence {
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
}

pub(crate) enum Step {
    Take {
        name: String,
        claim: Value,
        /// The required outcome, if the sequence tests it.
        accepted: Option<bool>,
    },
    /// A claim that was allocated before the current slices were published: exclusively, or with
    /// shares of the given amounts of memory.
    Held {
        name: String,
        device: String,
        shares: Vec<String>,
    },
    Release(String),
}

impl Step {
    /// The step for the upstream allocator, with the API server's defaults.
    pub(crate) fn wire(&self) -> Value {
        match self {
            Self::Take { name, claim, .. } => {
                let mut claim =
                    with(claim.clone(), json!({"metadata": {"namespace": "ns", "name": name, "uid": name}}));
                let requests = claim["spec"]["devices"]["requests"].as_array_mut();
                for request in requests.into_iter().flatten() {
                    let alternatives = match request.get_mut("exactly") {
                        Some(one) => vec![one],
                        None => request["firstAvailable"].as_array_mut().into_iter().flatten().collect(),
                    };
                    for one in alternatives {
                        *one = with(json!({"allocationMode": "ExactCount", "count": 1}), one.clone());
                    }
                }
                json!({"take": claim})
            }
            Self::Held { name, device, shares } => {
                let result = json!({"request": "r", "driver": DRIVER, "pool": NODE, "device": device});
                let share = |(number, memory)| {
                    let consumed = json!({"memory": memory, "cores": "0"});
                    let id = format!("{name}-{number}");
                    with(result.clone(), json!({"shareID": id, "consumedCapacity": consumed}))
                };
                let results: Vec<Value> = match shares.is_empty() {
                    true => vec![result],
                    false => shares.iter().enumerate().map(share).collect(),
                };
                let metadata = json!({"namespace": "ns", "name": name, "uid": name});
                let status = json!({"allocation": {"devices": {"results": results}}});
                json!({"held": {"metadata": metadata, "spec": {}, "status": status}})
            }
            Self::Release(name) => json!({"release": name}),
        }
    }

    /// A readable text that is complete enough to detect changes of the step.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Take { name, claim, .. } => format!("{name}: {}", described(&claim["spec"]["devices"])),
            Self::Held { name, device, shares } if shares.is_empty() => format!("{name} had {device}"),
            Self::Held { name, device, shares } => format!("{name} had {} of {device}", shares.join(" and ")),
            Self::Release(name) => format!("release {name}"),
        }
    }
}

fn described(devices: &Value) -> String {
    let mut parts: Vec<String> =
        devices["requests"].as_array().into_iter().flatten().map(described_request).collect();
    for constraint in devices["constraints"].as_array().into_iter().flatten() {
        let constraint = constraint.as_object().into_iter().flatten();
        parts.extend(constraint.map(|(kind, attribute)| format!("{kind} {}", bare(attribute))));
    }
    parts.join(", ")
}

fn described_request(request: &Value) -> String {
    let alternatives = request["firstAvailable"].as_array();
    let alternatives = alternatives.map_or(vec![&request["exactly"]], |list| list.iter().collect());
    let described = |one: &Value| {
        let mut text = bare(&one["deviceClassName"]).trim_end_matches(".divvy.dev").to_owned();
        let mut add = |more: String| text = format!("{text} {more}");
        for selector in one["selectors"].as_array().into_iter().flatten() {
            let expression = bare(&selector["cel"]["expression"]);
            add(format!("[{}]", expression.replace("device.", "").replace("['gpu.divvy.dev']", "")));
        }
        for (name, amount) in one["capacity"]["requests"].as_object().into_iter().flatten() {
            add(format!("{name}={}", bare(amount)));
        }
        for field in ["count", "allocationMode", "adminAccess"] {
            if !one[field].is_null() {
                add(format!("{field}={}", bare(&one[field])));
            }
        }
        if !one["tolerations"].is_null() {
            add("tolerant".to_owned());
        }
        text
    };
    let alternatives: Vec<String> = alternatives.into_iter().map(described).collect();
    format!("{}={}", bare(&request["name"]), alternatives.join(" or "))
}

fn bare(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios: Vec<Scenario> = catalogue::all()
        .map(Model::row)
        .map(|model| {
            let named = |name: &str, steps| Sequence { name: name.to_owned(), steps };
            let mut sequences = vec![
                named("modes", modes(model)),
                named("shares", shares(model)),
                named("shares after an upgrade", upgraded(model)),
            ];
            sequences.extend(random(model, 6, &model.key));
            Scenario::new(format!("1x{}", model.key), inventory_of(&model.key, 1), sequences)
        })
        .collect();
    for model in catalogue::all().map(Model::row) {
        let mut node = inventory_of(&model.key, 1);
        node.gpus[0].policy.shares = false;
        let steps = turned_off(model);
        let sequences = vec![Sequence { name: "shares after they are turned off".to_owned(), steps }];
        scenarios.push(Scenario::new(format!("1x{} without shares", model.key), node, sequences));
        let mut node = inventory_of(&model.key, 1);
        node.gpus[0].policy.mig_shares = true;
        let steps = mig_shares(model);
        if !steps.is_empty() {
            let sequences = vec![Sequence { name: "shares of an instance".to_owned(), steps }];
            scenarios.push(Scenario::new(format!("1x{} with MIG shares", model.key), node, sequences));
        }
    }
    for (key, count, sequences) in [
        ("H100-SXM5-80GB", 2, 60),
        ("H100-SXM5-80GB", 4, 20),
        ("B200-180GB", 2, 20),
        ("RTX-PRO-6000", 2, 30),
        ("A30-24GB", 2, 20),
        ("L4", 3, 20),
    ] {
        let (model, name) = (row(key), format!("{count}x{key}"));
        let node = inventory_of(key, count);
        let sequences = random(model, sequences, &name);
        scenarios.push(Scenario::new(name, node, sequences));
    }
    let h100 = row("H100-SXM5-80GB");
    scenarios.push(Scenario::new("odd H100s".to_owned(), odd(), random(h100, 40, "odd")));
    let (held, steps) = without_counters(h100);
    let sequences = vec![Sequence { name: "shares from before".to_owned(), steps }];
    let mut scenario =
        Scenario::new("2xH100 without counters".to_owned(), inventory_of(&h100.key, 2), sequences);
    scenario.without_counters = Some(held);
    scenarios.push(scenario);
    scenarios
}

fn row(key: &str) -> &'static GpuModel {
    catalogue::find(key).expect(key).row()
}

/// Four GPUs that each have a reason to refuse some claims, and an Ampere GPU in MIG mode.
fn odd() -> Inventory {
    let h100 = |number| gpu(row("H100-SXM5-80GB"), number);
    let mut gpus = vec![h100(0), gpus::with_instance(h100(1), 9, 4, Origin::Foreign), h100(2), h100(3)];
    gpus[0].policy.modes = [Mode::Timeslice, Mode::Mig].into();
    (gpus[0].policy.slots, gpus[2].policy.slots) = (1, 7);
    (gpus[1].policy.mps_clients, gpus[2].policy.mps_clients) = (1, 3);
    gpus[2].policy.mig_shares = true;
    gpus[2].conditions = vec![Condition::Mps { cause: "dead".to_owned() }];
    gpus[3].presence = Presence::Missing;
    gpus.push(in_mode(gpu(row("A100-SXM4-80GB"), 4), MigMode::On));
    node(gpus)
}
