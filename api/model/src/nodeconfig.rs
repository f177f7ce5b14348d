//! The node configuration: what an administrator lets be made of which GPU.
//!
//! ```yaml
//! apiVersion: resource.divvy.dev/v1alpha1
//! kind: NodeConfig
//! rules:
//!   - slots: 8                                    # every GPU
//!   - match: {products: ["*A100*"]}
//!     modes: [whole, mig]
//!   - match: {nodeLabels: {pool: training}, indices: [0, 1]}
//!     dedicated: true
//! ```
//!
//! One file serves a whole cluster, so rules choose by what differs between
//! nodes. They are read in order and the last that says something of a field
//! holds, field by field: broad rules come first, exceptions after them.
//!
//! What is not known is not guessed: as long as the labels of the node are not
//! read, a rule that needs them turns all modes off on the GPUs it may concern. A
//! mode that is off is never wrong for long, one that was on may be in use.

use crate::inventory::Gpu;
use crate::numbers::GpuNumber;
use crate::policy::GpuPolicy;
use divvy_api::names::CONFIG_API_VERSION;
use divvy_api::schema::{self, Fault, Field, Object, Shape, Unread};
use divvy_api::sharing::{Interval, Mode};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeConfig {
    pub rules: Vec<Rule>,
}

/// What some GPUs offer; a field that is absent is left to other rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    pub matches: Match,
    pub modes: Option<BTreeSet<Mode>>,
    pub slots: Option<u32>,
    pub interval: Option<Interval>,
    pub mps_clients: Option<u32>,
    pub shares: Option<bool>,
    pub dedicated: Option<bool>,
    pub exclusive_ownership: Option<bool>,
}

/// Which GPUs a rule is for: those that all of it matches. What is empty matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    pub node_labels: BTreeMap<String, String>,
    /// Patterns with `*` and `?`.
    pub products: Vec<String>,
    /// GPU numbers, the N of `gpu-N`.
    pub indices: BTreeSet<u32>,
}

/// What of a GPU a rule may choose by.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    pub number: GpuNumber,
    /// As NVML names it: `NVIDIA H100 80GB HBM3`.
    pub product: &'a str,
}

impl<'a> From<&'a Gpu> for Subject<'a> {
    fn from(gpu: &'a Gpu) -> Self {
        Self { number: gpu.number, product: &gpu.product }
    }
}

/// Labels of a node.
pub type Labels = BTreeMap<String, String>;

/// Why a file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeConfigError {
    #[error("line {line}: {fault}")]
    Field { line: usize, fault: Fault },
    #[error("not YAML: {cause}")]
    NotYaml { cause: String },
}

/// Who said what holds for a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// Nobody.
    Default,
    /// The rule of that index.
    Rule(usize),
    /// The rule of that index may, once the labels of the node are known.
    Unknown(usize),
}

/// What a GPU gets, and by which rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    pub policy: GpuPolicy,
    pub modes: Said,
    pub slots: Said,
    pub interval: Said,
    pub mps_clients: Said,
    pub shares: Said,
    pub exclusive_ownership: Said,
}

impl NodeConfig {
    /// Reads a file of one document.
    pub fn parse(text: &str) -> Result<Self, NodeConfigError> {
        Self::read(serde_norway::Deserializer::from_str(text))
    }

    /// Reads a document of YAML.
    pub fn read(document: serde_norway::Deserializer<'_>) -> Result<Self, NodeConfigError> {
        let value = schema::read(Shape::Object(&NODE_CONFIG), document).map_err(refused)?;
        Ok(Self { rules: list(&value["rules"]).map(rule).collect() })
    }

    /// What the configuration makes of a GPU. `otherwise` holds where no rule says
    /// anything; `labels` are `None` while they have not been read.
    pub fn explain(&self, otherwise: &GpuPolicy, labels: Option<&Labels>, gpu: Subject<'_>) -> Explained {
        let mut policy = otherwise.clone();
        let (mut modes, mut slots, mut interval) = (Said::Default, Said::Default, Said::Default);
        let (mut mps_clients, mut shares, mut exclusive_ownership) =
            (Said::Default, Said::Default, Said::Default);
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
            let said = Said::Rule(index);
            set(&mut policy.modes, &mut modes, rule.modes.clone(), said);
            set(&mut policy.slots, &mut slots, rule.slots, said);
            set(&mut policy.interval, &mut interval, rule.interval, said);
            set(&mut policy.mps_clients, &mut mps_clients, rule.mps_clients, said);
            set(&mut policy.shares, &mut shares, rule.shares, said);
            set(&mut policy.exclusive_ownership, &mut exclusive_ownership, rule.exclusive_ownership, said);
            dedicated = rule.dedicated.map(|yes| (yes, index)).or(dedicated);
        }
        if let Some((true, index)) = dedicated {
            (policy.modes, modes) = ([Mode::Whole].into(), Said::Rule(index));
            (policy.shares, shares) = (false, Said::Rule(index));
        }
        if let Some(index) = unknown {
            (policy.modes, modes) = (BTreeSet::new(), Said::Unknown(index));
        }
        Explained { policy, modes, slots, interval, mps_clients, shares, exclusive_ownership }
    }

    /// Whether a rule chooses by the node's labels.
    pub fn needs_labels(&self) -> bool {
        self.rules.iter().any(|rule| !rule.matches.node_labels.is_empty())
    }
}

fn set<T>(field: &mut T, by: &mut Said, value: Option<T>, said: Said) {
    if let Some(value) = value {
        (*field, *by) = (value, said);
    }
}

impl Match {
    /// Whether the rule is for a GPU; `None` where the labels would have to be known.
    fn of(&self, labels: Option<&Labels>, gpu: Subject<'_>) -> Option<bool> {
        let product = self.products.is_empty() || self.products.iter().any(|glob| like(glob, gpu.product));
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

/// Whether a product is of a pattern. `NVIDIA-H100-80GB-HBM3` is how node labels
/// write `NVIDIA H100 80GB HBM3`, so case and dashes make no difference.
fn like(pattern: &str, product: &str) -> bool {
    let plain = |text: &str| -> Vec<char> {
        text.chars().map(|c| if c == '-' { ' ' } else { c.to_ascii_lowercase() }).collect()
    };
    let (pattern, product) = (plain(pattern), plain(product));
    // The last star, and how much of the product it takes so far.
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

fn refused(unread: Unread<serde_norway::Error>) -> NodeConfigError {
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
    let mode = |name: &Value| Mode::ALL.into_iter().find(|mode| name.as_str() == Some(mode.as_str()));
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
        dedicated: value["dedicated"].as_bool(),
        exclusive_ownership: value["exclusiveOwnership"].as_bool(),
    }
}

impl fmt::Display for Said {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => out.write_str("default"),
            Self::Rule(index) => write!(out, "rules[{index}]"),
            Self::Unknown(index) => write!(out, "rules[{index}] needs the labels of the node"),
        }
    }
}

/// The document, for the reader and the reference.
pub static NODE_CONFIG: Object = Object {
    name: "NodeConfig",
    about: "What may be made of the GPUs of each node: the file given to `divvy-node --config`, one for a whole cluster. Rules are read in order; for each field the last rule that says it and matches the GPU holds.",
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
            about: "Broad rules first, exceptions after them.",
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
            about: "Which GPUs the rule is for.",
        },
        Field {
            name: "modes",
            shape: Shape::List(&Shape::OneOf(&["whole", "mig", "timeslice", "mps"])),
            required: false,
            absent: "all four",
            about: "Which modes the GPU offers. A mode that is off stays published with a taint: claims that have it keep it, new ones go elsewhere. An empty list offers nothing.",
        },
        Field {
            name: "slots",
            shape: Shape::Count(1, 256),
            required: false,
            absent: "4",
            about: "How many slots the GPU's time-slice device has. While claims hold time-slices of the GPU, fewer take effect when they are gone.",
        },
        Field {
            name: "interval",
            shape: Shape::OneOf(Interval::NAMES),
            required: false,
            absent: "Default",
            about: "How long a process of a time-slice runs before the next has its turn. While claims hold time-slices of the GPU, another one takes effect when they are gone.",
        },
        Field {
            name: "mpsClients",
            shape: Shape::Count(1, 60),
            required: false,
            absent: "4",
            about: "An MPS claim that names no memory or threads gets one of so many parts.",
        },
        Field {
            name: "shares",
            shape: Shape::Flag,
            required: false,
            absent: "the flag `--shares`, which is on by default",
            about: "The whole GPU and its MIG instances are dealt out in shares too. Without, each goes to one claim at a time; claims that have shares keep them.",
        },
        Field {
            name: "dedicated",
            shape: Shape::Flag,
            required: false,
            absent: "false",
            about: "The GPU goes to one claim at a time, whole: as `modes: [whole]` and `shares: false`, whatever other rules say of them.",
        },
        Field {
            name: "exclusiveOwnership",
            shape: Shape::Flag,
            required: false,
            absent: "the flag `--exclusive-ownership`, which is off by default",
            about: "All GPU instances on the GPU are Divvy's: those that no claim explains are destroyed.",
        },
    ],
};

static MATCH: Object = Object {
    name: "Match",
    about: "A GPU must be of all that is given.",
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
            about: "Patterns of product names, one of which must match the whole name: `*` is any text, `?` any character. Case does not matter, and a dash is as good as a space.",
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
