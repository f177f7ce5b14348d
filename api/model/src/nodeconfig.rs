//! The node configuration: what an administrator allows each GPU to be used for.
//!
//! One file serves a whole cluster, so rules match by properties of nodes and GPUs. Rules are read
//! in order. For each field, the last matching rule that sets it applies, so exceptions follow
//! general rules. Until the labels of the node are known, a rule that needs them disables all modes
//! on the GPUs it may match. A disabled mode can be enabled later, but an enabled one may be in use.

use crate::health::TaintEffect;
use crate::inventory::Gpu;
use crate::numbers::GpuNumber;
use crate::policy::GpuPolicy;
use divvy_api::names::CONFIG_API_VERSION;
use divvy_api::schema::{self, Field, FieldError, Object, ReadError, Shape};
use divvy_api::sharing::{Interval, Mode};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeConfig {
    pub rules: Vec<Rule>,
}

/// Settings of matching GPUs. An absent field is left to other rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    pub matches: Match,
    pub modes: Option<BTreeSet<Mode>>,
    pub slots: Option<u32>,
    pub interval: Option<Interval>,
    pub mps_clients: Option<u32>,
    pub shares: Option<bool>,
    pub mig_shares: Option<bool>,
    pub dedicated: Option<bool>,
    pub exclusive_ownership: Option<bool>,
    pub health: HealthRule,
}

/// The taints of health states. An absent field is left to other rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthRule {
    pub degraded: Option<TaintEffect>,
    pub needs_reset: Option<TaintEffect>,
    pub stuck: Option<TaintEffect>,
    pub lost: Option<TaintEffect>,
}

/// Conditions of a rule. A GPU must satisfy all of them; an empty one is always satisfied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    pub node_labels: BTreeMap<String, String>,
    /// Patterns with `*` and `?`.
    pub products: Vec<String>,
    /// GPU numbers, the N of `gpu-N`.
    pub indices: BTreeSet<u32>,
}

/// The properties of a GPU that rules match.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    pub number: GpuNumber,
    /// The product name from NVML: `NVIDIA H100 80GB HBM3`.
    pub product: &'a str,
}

impl<'a> From<&'a Gpu> for Subject<'a> {
    fn from(gpu: &'a Gpu) -> Self {
        Self { number: gpu.number, product: &gpu.product }
    }
}

/// Labels of a node.
pub type Labels = BTreeMap<String, String>;

/// Why a file is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeConfigError {
    #[error("line {line}: {fault}")]
    Field { line: usize, fault: FieldError },
    #[error("not YAML: {cause}")]
    NotYaml { cause: String },
}

/// The origin of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    /// No rule set it.
    Default,
    /// The rule with that index.
    Rule(usize),
    /// The rule with that index may apply, once the labels of the node are known.
    Unknown(usize),
}

/// The policy of a GPU, and the rule of each value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    pub policy: GpuPolicy,
    pub modes: ValueOrigin,
    pub slots: ValueOrigin,
    pub interval: ValueOrigin,
    pub mps_clients: ValueOrigin,
    pub shares: ValueOrigin,
    pub mig_shares: ValueOrigin,
    pub exclusive_ownership: ValueOrigin,
    pub health: HealthOrigins,
}

/// The rule of each effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthOrigins {
    pub degraded: ValueOrigin,
    pub needs_reset: ValueOrigin,
    pub stuck: ValueOrigin,
    pub lost: ValueOrigin,
}

impl Default for HealthOrigins {
    fn default() -> Self {
        let default = ValueOrigin::Default;
        Self { degraded: default, needs_reset: default, stuck: default, lost: default }
    }
}

impl NodeConfig {
    /// Parses a file with one document.
    pub fn parse(text: &str) -> Result<Self, NodeConfigError> {
        Self::read(serde_norway::Deserializer::from_str(text))
    }

    /// Reads a YAML document.
    pub fn read(document: serde_norway::Deserializer<'_>) -> Result<Self, NodeConfigError> {
        let value = schema::read(Shape::Object(&NODE_CONFIG), document).map_err(refused)?;
        Ok(Self { rules: list(&value["rules"]).map(rule).collect() })
    }

    /// All faults of a document; [`NodeConfig::read`] stops at the first one.
    pub fn faults(document: &Value) -> Vec<FieldError> {
        schema::faults(Shape::Object(&NODE_CONFIG), document)
    }

    /// The policy of a GPU. `otherwise` has the values that no rule sets; `labels` are `None` until
    /// they are read.
    pub fn explain(&self, otherwise: &GpuPolicy, labels: Option<&Labels>, gpu: Subject<'_>) -> Explained {
        let mut policy = otherwise.clone();
        let (mut modes, mut slots, mut interval) =
            (ValueOrigin::Default, ValueOrigin::Default, ValueOrigin::Default);
        let (mut mps_clients, mut shares, mut mig_shares, mut exclusive_ownership) =
            (ValueOrigin::Default, ValueOrigin::Default, ValueOrigin::Default, ValueOrigin::Default);
        let mut health = HealthOrigins::default();
        let (mut dedicated, mut unknown) = (None, None);
        for (index, rule) in self.rules.iter().enumerate() {
            match rule.matches.of(labels, gpu) {
                Some(false) => continue,
                Some(true) => {}
                None => {
                    unknown = Some(index);
                    continue;
                }
            }
            let origin = ValueOrigin::Rule(index);
            set(&mut policy.modes, &mut modes, rule.modes.clone(), origin);
            set(&mut policy.slots, &mut slots, rule.slots, origin);
            set(&mut policy.interval, &mut interval, rule.interval, origin);
            set(&mut policy.mps_clients, &mut mps_clients, rule.mps_clients, origin);
            set(&mut policy.shares, &mut shares, rule.shares, origin);
            set(&mut policy.mig_shares, &mut mig_shares, rule.mig_shares, origin);
            set(&mut policy.exclusive_ownership, &mut exclusive_ownership, rule.exclusive_ownership, origin);
            let effects = &mut policy.health;
            set(&mut effects.degraded, &mut health.degraded, rule.health.degraded, origin);
            set(&mut effects.needs_reset, &mut health.needs_reset, rule.health.needs_reset, origin);
            set(&mut effects.stuck, &mut health.stuck, rule.health.stuck, origin);
            set(&mut effects.lost, &mut health.lost, rule.health.lost, origin);
            dedicated = rule.dedicated.map(|yes| (yes, index)).or(dedicated);
        }
        if let Some((true, index)) = dedicated {
            (policy.modes, modes) = ([Mode::Whole].into(), ValueOrigin::Rule(index));
            (policy.shares, shares) = (false, ValueOrigin::Rule(index));
        }
        if let Some(index) = unknown {
            (policy.modes, modes) = (BTreeSet::new(), ValueOrigin::Unknown(index));
        }
        Explained {
            policy,
            modes,
            slots,
            interval,
            mps_clients,
            shares,
            mig_shares,
            exclusive_ownership,
            health,
        }
    }

    /// Whether a rule matches by the node's labels.
    pub fn needs_labels(&self) -> bool {
        self.rules.iter().any(|rule| !rule.matches.node_labels.is_empty())
    }
}

fn set<T>(field: &mut T, by: &mut ValueOrigin, value: Option<T>, origin: ValueOrigin) {
    if let Some(value) = value {
        (*field, *by) = (value, origin);
    }
}

impl Match {
    /// Whether the rule matches a GPU; `None` if that depends on unknown labels.
    fn of(&self, labels: Option<&Labels>, gpu: Subject<'_>) -> Option<bool> {
        let product =
            self.products.is_empty() || self.products.iter().any(|glob| glob_matches(glob, gpu.product));
        let index = self.indices.is_empty() || self.indices.contains(&gpu.number.0);
        if !product || !index {
            return Some(false);
        }
        if self.node_labels.is_empty() {
            return Some(true);
        }
        labels.map(|labels| self.node_labels.iter().all(|(key, value)| labels.get(key) == Some(value)))
    }
}

/// Whether a product matches a pattern. Case is ignored, and dashes equal spaces, because node
/// labels write `NVIDIA-H100-80GB-HBM3` for `NVIDIA H100 80GB HBM3`.
fn glob_matches(pattern: &str, product: &str) -> bool {
    let plain = |text: &str| -> Vec<char> {
        text.chars().map(|c| if c == '-' { ' ' } else { c.to_ascii_lowercase() }).collect()
    };
    let (pattern, product) = (plain(pattern), plain(product));
    // The last star, and how many characters it matches so far.
    let (mut at, mut of, mut star) = (0, 0, None);
    while of < product.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, of));
                at += 1;
            }
            Some(c) if *c == '?' || *c == product[of] => (at, of) = (at + 1, of + 1),
            _ => match star {
                Some((begin, taken)) => {
                    star = Some((begin, taken + 1));
                    (at, of) = (begin + 1, taken + 1);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|c| *c == '*')
}

fn refused(unread: ReadError<serde_norway::Error>) -> NodeConfigError {
    match unread.fault {
        None => NodeConfigError::NotYaml { cause: unread.cause.to_string() },
        Some(fault) => {
            let line = unread.cause.location().map_or(1, |place| place.line());
            NodeConfigError::Field { line, fault }
        }
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn count(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn rule(value: &Value) -> Rule {
    let matches = &value["match"];
    let labels = matches["nodeLabels"].as_object().into_iter().flatten();
    let labels = labels.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
    let modes = value["modes"].as_array();
    let effect = |state: &str| value["health"][state].as_str().and_then(TaintEffect::from_name);
    let mode = |name: &Value| Mode::LISTED.into_iter().find(|mode| name.as_str() == Some(mode.as_str()));
    Rule {
        matches: Match {
            node_labels: labels.collect(),
            products: list(&matches["products"])
                .filter_map(|glob| glob.as_str().map(str::to_owned))
                .collect(),
            indices: list(&matches["indices"]).filter_map(count).collect(),
        },
        modes: modes.map(|modes| modes.iter().filter_map(mode).collect()),
        slots: count(&value["slots"]),
        interval: value["interval"].as_str().and_then(Interval::from_name),
        mps_clients: count(&value["mpsClients"]),
        shares: value["shares"].as_bool(),
        mig_shares: value["migShares"].as_bool(),
        dedicated: value["dedicated"].as_bool(),
        exclusive_ownership: value["exclusiveOwnership"].as_bool(),
        health: HealthRule {
            degraded: effect("degraded"),
            needs_reset: effect("needsReset"),
            stuck: effect("stuck"),
            lost: effect("lost"),
        },
    }
}

impl fmt::Display for ValueOrigin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => out.write_str("default"),
            Self::Rule(index) => write!(out, "rules[{index}]"),
            Self::Unknown(index) => write!(out, "rules[{index}] needs the labels of the node"),
        }
    }
}

/// The document, for the parser and the reference documentation.
pub static NODE_CONFIG: Object = Object {
    name: "NodeConfig",
    about: "Policies for the GPUs of each node: the file of `divvy-node --config`, one for a whole \
         cluster. Rules are read in order. For each field, the last rule that sets it and matches the GPU \
         applies.",
    fields: &[
        Field {
            name: "apiVersion",
            shape: Shape::Literally(CONFIG_API_VERSION),
            required: true,
            absent: "",
            about: "The version of this document.",
        },
        Field { name: "kind", shape: Shape::Literally("NodeConfig"), required: true, absent: "", about: "" },
        Field {
            name: "rules",
            shape: Shape::List(&Shape::Object(&RULE)),
            required: false,
            absent: "every GPU offers every mode",
            about: "General rules first, then exceptions.",
        },
    ],
};

static RULE: Object = Object {
    name: "Rule",
    about: "",
    fields: &[
        Field {
            name: "match",
            shape: Shape::Object(&MATCH),
            required: false,
            absent: "all GPUs",
            about: "The GPUs that the rule applies to.",
        },
        Field {
            name: "modes",
            shape: Shape::List(&Shape::OneOf(&["whole", "mig", "timeslice", "mps"])),
            required: false,
            absent: "all four",
            about: "The modes that the GPU offers. The devices of a disabled mode get a taint: existing \
                 claims keep them, and new ones are not scheduled to them. The controller lets them be \
                 removed after 10 minutes without a claim. An empty list disables all modes.",
        },
        Field {
            name: "slots",
            shape: Shape::Count(1, 256),
            required: false,
            absent: "4",
            about: "Slots of the GPU's time-slice device. A lower number takes effect when no claim holds \
                 time-slices of the GPU.",
        },
        Field {
            name: "interval",
            shape: Shape::OneOf(Interval::NAMES),
            required: false,
            absent: "Default",
            about: "The time slice of a process. A change takes effect when no claim holds time-slices of \
                 the GPU.",
        },
        Field {
            name: "mpsClients",
            shape: Shape::Count(1, 60),
            required: false,
            absent: "4",
            about: "An MPS claim without memory or threads gets one of this many equal parts.",
        },
        Field {
            name: "shares",
            shape: Shape::Flag,
            required: false,
            absent: "the flag `--shares`, which is on by default",
            about: "The GPU is also offered in shares, if mode `whole` is. Existing shares stay if it is \
                 turned off.",
        },
        Field {
            name: "migShares",
            shape: Shape::Flag,
            required: false,
            absent: "false",
            about: "MIG instances are offered in shares, if `shares` is set too. A claim that requests no \
                 memory still gets the whole instance. Existing claims keep their instances.",
        },
        Field {
            name: "dedicated",
            shape: Shape::Flag,
            required: false,
            absent: "false",
            about: "One claim at a time gets the whole GPU: equals `modes: [whole]` and `shares: false`, \
                 and overrides other rules for these fields.",
        },
        Field {
            name: "exclusiveOwnership",
            shape: Shape::Flag,
            required: false,
            absent: "the flag `--exclusive-ownership`, which is off by default",
            about: "All GPU instances on the GPU belong to Divvy: instances without a claim are destroyed.",
        },
        Field {
            name: "health",
            shape: Shape::Object(&HEALTH),
            required: false,
            absent: "the defaults of each state",
            about: "What the taint of a GPU or MIG instance does in each health state.",
        },
    ],
};

static HEALTH: Object = Object {
    name: "Health",
    about: "The effect of the taint of each health state. `None` sets no taint, and claims are prepared. \
         `NoSchedule` keeps new claims away. `NoExecute` also evicts the pods that use the device.",
    fields: &[
        Field {
            name: "degraded",
            shape: Shape::OneOf(TaintEffect::NAMES),
            required: false,
            absent: "None",
            about: "The GPU works, with less redundancy or speed.",
        },
        Field {
            name: "needsReset",
            shape: Shape::OneOf(TaintEffect::NAMES),
            required: false,
            absent: "NoSchedule",
            about: "The GPU must be reset before it works again.",
        },
        Field {
            name: "stuck",
            shape: Shape::OneOf(TaintEffect::NAMES),
            required: false,
            absent: "NoSchedule",
            about: "A hardware call on the GPU does not return.",
        },
        Field {
            name: "lost",
            shape: Shape::OneOf(TaintEffect::NAMES),
            required: false,
            absent: "NoSchedule",
            about: "The GPU is unreachable or needs a reboot of the node.",
        },
    ],
};

static MATCH: Object = Object {
    name: "Match",
    about: "A GPU must match all fields that are set.",
    fields: &[
        Field {
            name: "nodeLabels",
            shape: Shape::Map(&Shape::Label),
            required: false,
            absent: "any node",
            about: "Labels that the node must have, with these values.",
        },
        Field {
            name: "products",
            shape: Shape::List(&Shape::Text),
            required: false,
            absent: "any product",
            about: "Patterns of product names, one of which must match the whole name: `*` is any text, `?` \
                 any character. Case is ignored, and a dash equals a space.",
        },
        Field {
            name: "indices",
            shape: Shape::List(&Shape::Count(0, u32::MAX)),
            required: false,
            absent: "any GPU of the node",
            about: "Numbers of GPUs, the N of `gpu-N`.",
        },
    ],
};

#[cfg(test)]
mod tests;
