//! The validator: reports what prepare would reject before a pod waits for it.
//!
//! Admission, `divvy check` and prepare use the same error types, so their messages are equal. All
//! functions are pure; the caller supplies other objects as a [`ClusterView`]. Unknown objects
//! cause no finding, because prepare checks again. A finding is an error only if no allocation
//! could be prepared, or if a container could not use its devices. Other probable mistakes are
//! warnings.

mod capacity;
mod claim;
mod fields;
mod manifest;
mod mounts;
mod pod;
pub mod published;
mod raw;
mod required;
mod types;
mod units;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceClass, ResourceClaim, ResourceClaimTemplate};
pub use manifest::manifest;
use serde::Deserialize;
use serde_json::Value;
pub use types::{
    Class, ClusterView, Finding, GpuMemory, KnownGpus, ONE_DAEMON_PER_CONTAINER, Objects, Severity,
};

/// Checks an object as it was sent, so that duplicate keys are detected. Objects of other kinds
/// have no findings.
///
/// # Errors
/// The JSON is not an object of its kind.
pub fn object(json: &[u8], view: &dyn ClusterView) -> Result<Vec<Finding>, serde_json::Error> {
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
            claim::check(claim_devices(&claim), "spec.devices", &texts, view)
        }
        ("resource.k8s.io/v1", "ResourceClaimTemplate") => {
            let template: ResourceClaimTemplate = serde_json::from_slice(json)?;
            let texts = raw::parameters(json, &["spec", "spec", "devices", "config"]);
            claim::check(template_devices(&template), "spec.spec.devices", &texts, view)
        }
        ("resource.k8s.io/v1", "DeviceClass") => {
            let class: DeviceClass = serde_json::from_slice(json)?;
            let texts = raw::parameters(json, &["spec", "config"]);
            claim::check_class(&class, &texts, view)
        }
        ("v1", "Pod") => pod(&serde_json::from_slice(json)?, view),
        _ => Vec::new(),
    })
}

/// A problem of an object as a whole.
pub fn failed(message: impl std::fmt::Display, instead: Vec<Value>) -> Finding {
    Finding::error("", message).with(instead)
}

/// Why a text is not a quantity, with the quantity that was meant; `None` if it is one.
pub fn quantity_problem(name: &str, text: &str) -> Option<String> {
    units::misspelt(name, text).map(|misspelt| misspelt.message)
}

/// Something to know about an object as a whole.
pub fn hint(message: impl std::fmt::Display) -> Finding {
    Finding::warning("", message)
}

/// Checks a ResourceClaim.
pub fn claim(claim: &ResourceClaim, view: &dyn ClusterView) -> Vec<Finding> {
    claim::check(claim_devices(claim), "spec.devices", &[], view)
}

/// Checks a ResourceClaimTemplate.
pub fn template(template: &ResourceClaimTemplate, view: &dyn ClusterView) -> Vec<Finding> {
    claim::check(template_devices(template), "spec.spec.devices", &[], view)
}

/// Checks a DeviceClass.
pub fn class(class: &DeviceClass, view: &dyn ClusterView) -> Vec<Finding> {
    claim::check_class(class, &[], view)
}

/// Checks how the containers of a Pod use its claims, as far as `view` knows them. The claims have
/// their own checks.
pub fn pod(pod: &Pod, view: &dyn ClusterView) -> Vec<Finding> {
    pod::check(pod, view)
}

fn claim_devices(claim: &ResourceClaim) -> Option<&DeviceClaim> {
    claim.spec.as_ref()?.devices.as_ref()
}

fn template_devices(template: &ResourceClaimTemplate) -> Option<&DeviceClaim> {
    template.spec.as_ref()?.spec.as_ref()?.devices.as_ref()
}
