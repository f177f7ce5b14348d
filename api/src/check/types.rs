//! Findings, classes and the view of other objects, for all checks.

use super::published::{SelectorProblem, nearest};
use crate::config::{ConfigError, DeviceConfig};
use crate::foreign;
use crate::names::DRIVER;
use crate::sharing::Mode;
use k8s_openapi::api::resource::v1::DeviceRequest;
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceClass, DeviceSelector, OpaqueDeviceConfiguration};
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The reason why a request for MPS must have one device.
pub const ONE_DAEMON_PER_CONTAINER: &str = "each of its devices has its own MPS control daemon, \
     but a container can use only one; request one device";

/// The DeviceClass of shares.
const SHARE_CLASS: &str = "share.divvy.dev";

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The object is rejected.
    Error,
    /// The object is accepted, but is probably a mistake.
    Warning,
}

/// A problem of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// The path of the field from the root of the object:
    /// `spec.devices.config[0].opaque.parameters`.
    pub path: String,
    /// The cause and, after a semicolon, the remedy.
    pub message: String,
    /// The objects, or parts of them, that the message says to use instead.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub instead: Vec<Value>,
}

/// A GPU model and the memory that it publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    pub model: String,
    pub bytes: u64,
}

/// The GPUs that claims can get.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownGpus {
    /// Empty if no GPU is known.
    pub models: Vec<GpuMemory>,
    /// Whether the cluster has no other models.
    pub complete: bool,
}

/// The relevant properties of a DeviceClass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Class {
    /// The modes of its devices; empty if none of them is ours.
    pub modes: BTreeSet<Mode>,
    /// Whether its claims must request a share size.
    pub needs_share: bool,
    /// Its configuration for our driver, in order.
    pub configs: Vec<Result<DeviceConfig, ConfigError>>,
}

/// Access to other objects. `None` means "unknown", never "does not exist".
pub trait ClusterView {
    /// The class with that name.
    fn class(&self, name: &str) -> Option<Class> {
        Class::well_known(name)
    }
    /// The modes of a class that the selectors of a request leave. Selectors are CEL, which this
    /// crate does not evaluate; by default all modes remain.
    fn filter_modes(&self, modes: BTreeSet<Mode>, _selectors: &[DeviceSelector]) -> BTreeSet<Mode> {
        modes
    }
    /// The problems of a selector for devices of these modes. This crate does not read CEL.
    fn selector_problems(&self, _expression: &str, _modes: &BTreeSet<Mode>) -> Vec<SelectorProblem> {
        Vec::new()
    }
    /// The names of MIG profiles that GPUs have; empty if unknown.
    fn profiles(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
    /// The GPUs that claims can get.
    fn gpus(&self) -> KnownGpus {
        KnownGpus::default()
    }
    /// How bad it is that an object is for another driver. In a cluster, that driver may be there.
    fn other_driver(&self) -> Severity {
        Severity::Error
    }
    /// The devices that a ResourceClaim requests.
    fn claim(&self, _namespace: &str, _name: &str) -> Option<DeviceClaim> {
        None
    }
    /// The devices that claims from a ResourceClaimTemplate request.
    fn template(&self, _namespace: &str, _name: &str) -> Option<DeviceClaim> {
        None
    }
}

/// A set of objects by name; claims and templates by namespace and name.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    pub classes: BTreeMap<String, Class>,
    pub claims: BTreeMap<(String, String), DeviceClaim>,
    pub templates: BTreeMap<(String, String), DeviceClaim>,
}

impl ClusterView for Objects {
    fn class(&self, name: &str) -> Option<Class> {
        self.classes.get(name).cloned().or_else(|| Class::well_known(name))
    }
    fn claim(&self, namespace: &str, name: &str) -> Option<DeviceClaim> {
        self.claims.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }
    fn template(&self, namespace: &str, name: &str) -> Option<DeviceClaim> {
        self.templates.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }
}

/// Divvy's own classes that are not of a single profile.
const OWN_CLASSES: [&str; 6] = [
    "gpu.divvy.dev",
    SHARE_CLASS,
    "mig.divvy.dev",
    "timeslice.divvy.dev",
    "mps.divvy.dev",
    crate::names::OBSERVER_CLASS,
];

/// The class that a name most likely means, if no class has the name.
pub(super) fn meant_class(view: &dyn ClusterView, name: &str) -> Option<&'static str> {
    let is_other =
        view.class(name).is_some() || OWN_CLASSES.contains(&name) || foreign::counterpart(name).is_some();
    if is_other || name.is_empty() {
        return None;
    }
    // Names of an administrator's own classes are not alike in the domain.
    let (_, domain) = name.split_once('.').unwrap_or((name, "divvy.dev"));
    (strsim::jaro_winkler(domain, "divvy.dev") > 0.8).then(|| nearest(name, OWN_CLASSES)).flatten()
}

/// The class of a request, or the one that its name most likely means.
pub(super) fn class_of(view: &dyn ClusterView, name: &str) -> Option<Class> {
    view.class(name).or_else(|| view.class(meant_class(view, name)?))
}

/// The DeviceClass of each request and alternative, with the path of its name.
pub(super) fn class_names<'a>(request: &'a DeviceRequest, path: &str) -> Vec<(String, &'a str)> {
    let exact = request
        .exactly
        .iter()
        .map(|one| (format!("{path}.exactly.deviceClassName"), one.device_class_name.as_str()));
    let alternatives = request.first_available.iter().flatten().enumerate().map(|(index, one)| {
        (format!("{path}.firstAvailable[{index}].deviceClassName"), one.device_class_name.as_str())
    });
    exact.chain(alternatives).collect()
}

impl Class {
    /// Divvy's own classes; those of single MIG profiles match a name pattern.
    pub fn well_known(name: &str) -> Option<Self> {
        let mode = match name {
            "gpu.divvy.dev" => Mode::Whole,
            SHARE_CLASS => Mode::Share,
            "timeslice.divvy.dev" => Mode::Timeslice,
            "mps.divvy.dev" => Mode::Mps,
            "mig.divvy.dev" => Mode::Mig,
            name if name.starts_with("mig-") && name.ends_with(".divvy.dev") => Mode::Mig,
            _ => return None,
        };
        Some(Self { modes: [mode].into(), needs_share: name == SHARE_CLASS, configs: Vec::new() })
    }

    /// A class from its object. `modes` are the modes that its selectors match; for Divvy's own
    /// classes the name tells.
    pub fn of(class: &DeviceClass, modes: Option<BTreeSet<Mode>>) -> Self {
        let known = class.metadata.name.as_deref().and_then(Self::well_known).unwrap_or_default();
        let modes = modes.unwrap_or(known.modes);
        let configs = class.spec.iter().flat_map(|spec| spec.config.iter().flatten());
        let ours = configs.filter_map(|config| ours(config.opaque.as_ref()));
        let configs = ours.map(|opaque| DeviceConfig::from_value(&opaque.parameters.0)).collect();
        Self { modes, needs_share: known.needs_share, configs }
    }
}

/// The configuration, if it is for our driver.
pub(super) fn ours(opaque: Option<&OpaqueDeviceConfiguration>) -> Option<&OpaqueDeviceConfiguration> {
    opaque.filter(|opaque| opaque.driver == DRIVER)
}

impl Finding {
    pub(super) fn error(path: impl Into<String>, message: impl fmt::Display) -> Self {
        let (path, message) = (path.into(), message.to_string());
        Self { severity: Severity::Error, path, message, instead: Vec::new() }
    }

    pub(super) fn warning(path: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { severity: Severity::Warning, ..Self::error(path, message) }
    }

    pub(super) fn with(mut self, instead: Vec<Value>) -> Self {
        self.instead = instead;
        self
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}: {}", self.severity, self.path, self.message)
    }
}
