//! The one validator: what prepare would refuse, hardware faults apart, is told
//! before a pod waits for it. Admission, `divvy check` and prepare say the same
//! sentence, because they take it from the same errors.
//!
//! All functions are pure. What has to be looked up (which devices a DeviceClass
//! stands for, the claims that a pod names) comes in as a [`World`] that the
//! caller fills; what it does not know is let through, since prepare looks again.
//! A finding is an error only where no allocation could be prepared or a
//! container could not reach what it is given; all else that looks like a slip is
//! a warning.

mod capacity;
mod claim;
mod mounts;
mod pod;
mod raw;

use crate::config::{ConfigError, DeviceConfig};
use crate::names::DRIVER;
use crate::sharing::Mode;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceClass, DeviceSelector, OpaqueDeviceConfiguration, ResourceClaim, ResourceClaimTemplate,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Why a request for MPS has one device.
pub const ONE_DAEMON: &str = "its devices have MPS control daemons of their own, and a container reaches one only; ask for one device per request";

/// The class of those who want a part of a GPU and would rather be told than get it all.
const SHARE_CLASS: &str = "share.divvy.dev";

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The object is to be refused.
    Error,
    /// It can be had, but is hardly meant so.
    Warning,
}

/// Something to tell about an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// The field, from the object's root: `spec.devices.config[0].opaque.parameters`.
    pub path: String,
    /// The cause and, after a semicolon, the remedy.
    pub message: String,
}

/// What a DeviceClass stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Class {
    /// What its devices make of a GPU; empty where none of them is ours.
    pub modes: BTreeSet<Mode>,
    /// Whether a claim of it has to name a part.
    pub part: bool,
    /// Its configuration for our driver, in order.
    pub configs: Vec<Result<DeviceConfig, ConfigError>>,
}

/// What is known beside the object itself. `None` is "not known", never "none".
pub trait World {
    /// The class of that name.
    fn class(&self, name: &str) -> Option<Class> {
        Class::well_known(name)
    }
    /// What the selectors of a request leave of its class's modes. They are CEL,
    /// which is not this crate's business; without an answer they leave all.
    fn narrow(&self, modes: BTreeSet<Mode>, _selectors: &[DeviceSelector]) -> BTreeSet<Mode> {
        modes
    }
    /// The devices that a ResourceClaim asks for.
    fn claim(&self, _namespace: &str, _name: &str) -> Option<DeviceClaim> {
        None
    }
    /// The devices that claims of a ResourceClaimTemplate ask for.
    fn template(&self, _namespace: &str, _name: &str) -> Option<DeviceClaim> {
        None
    }
}

/// A world of objects by name; claims and templates by namespace and name.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    pub classes: BTreeMap<String, Class>,
    pub claims: BTreeMap<(String, String), DeviceClaim>,
    pub templates: BTreeMap<(String, String), DeviceClaim>,
}

impl World for Objects {
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

impl Class {
    /// The classes that Divvy brings; those of single MIG profiles by their pattern.
    pub fn well_known(name: &str) -> Option<Self> {
        let mode = match name {
            "gpu.divvy.dev" | SHARE_CLASS => Mode::Whole,
            "timeslice.divvy.dev" => Mode::Timeslice,
            "mps.divvy.dev" => Mode::Mps,
            "mig.divvy.dev" => Mode::Mig,
            name if name.starts_with("mig-") && name.ends_with(".divvy.dev") => Mode::Mig,
            _ => return None,
        };
        Some(Self { modes: [mode].into(), part: name == SHARE_CLASS, configs: Vec::new() })
    }

    /// A class as it is written. `modes` is what its selectors were found to
    /// match; for a class that Divvy brings its name says it.
    pub fn of(class: &DeviceClass, modes: Option<BTreeSet<Mode>>) -> Self {
        let known = class.metadata.name.as_deref().and_then(Self::well_known).unwrap_or_default();
        let modes = modes.unwrap_or(known.modes);
        let configs = class.spec.iter().flat_map(|spec| spec.config.iter().flatten());
        let ours = configs.filter_map(|config| ours(config.opaque.as_ref()));
        let configs = ours.map(|opaque| DeviceConfig::from_value(&opaque.parameters.0)).collect();
        Self { modes, part: known.part, configs }
    }
}

/// A configuration that is for our driver.
fn ours(opaque: Option<&OpaqueDeviceConfiguration>) -> Option<&OpaqueDeviceConfiguration> {
    opaque.filter(|opaque| opaque.driver == DRIVER)
}

/// Checks an object as it was sent, where a key that is given twice can still be
/// seen. Objects of kinds that are not Divvy's business have no findings; an
/// error says why it is not an object of its kind.
pub fn object(json: &[u8], world: &dyn World) -> Result<Vec<Finding>, serde_json::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Kind {
        #[serde(default)]
        kind: String,
        #[serde(default)]
        api_version: String,
    }
    let Kind { kind, api_version } = serde_json::from_slice(json)?;
    Ok(match (api_version.as_str(), kind.as_str()) {
        ("resource.k8s.io/v1", "ResourceClaim") => {
            let claim: ResourceClaim = serde_json::from_slice(json)?;
            let texts = raw::parameters(json, &["spec", "devices", "config"]);
            claim::check(claim_devices(&claim), "spec.devices", &texts, world)
        }
        ("resource.k8s.io/v1", "ResourceClaimTemplate") => {
            let template: ResourceClaimTemplate = serde_json::from_slice(json)?;
            let texts = raw::parameters(json, &["spec", "spec", "devices", "config"]);
            claim::check(template_devices(&template), "spec.spec.devices", &texts, world)
        }
        ("resource.k8s.io/v1", "DeviceClass") => {
            let class: DeviceClass = serde_json::from_slice(json)?;
            let texts = raw::parameters(json, &["spec", "config"]);
            claim::check_class(&class, &texts, world)
        }
        ("v1", "Pod") => pod(&serde_json::from_slice(json)?, world),
        _ => Vec::new(),
    })
}

/// Checks a ResourceClaim.
pub fn claim(claim: &ResourceClaim, world: &dyn World) -> Vec<Finding> {
    claim::check(claim_devices(claim), "spec.devices", &[], world)
}

/// Checks a ResourceClaimTemplate.
pub fn template(template: &ResourceClaimTemplate, world: &dyn World) -> Vec<Finding> {
    claim::check(template_devices(template), "spec.spec.devices", &[], world)
}

/// Checks a DeviceClass.
pub fn class(class: &DeviceClass, world: &dyn World) -> Vec<Finding> {
    claim::check_class(class, &[], world)
}

/// Checks how the containers of a Pod use its claims, as far as `world` knows
/// them; the claims themselves have their own check.
pub fn pod(pod: &Pod, world: &dyn World) -> Vec<Finding> {
    pod::check(pod, world)
}

fn claim_devices(claim: &ResourceClaim) -> Option<&DeviceClaim> {
    claim.spec.as_ref()?.devices.as_ref()
}

fn template_devices(template: &ResourceClaimTemplate) -> Option<&DeviceClaim> {
    template.spec.as_ref()?.spec.as_ref()?.devices.as_ref()
}

impl Finding {
    fn error(path: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { severity: Severity::Error, path: path.into(), message: message.to_string() }
    }

    fn warning(path: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { severity: Severity::Warning, path: path.into(), message: message.to_string() }
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
