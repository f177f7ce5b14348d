//! An allocated ResourceClaim as the driver sees it.
//!
//! [`AllocatedClaim::try_from`] drops results of other drivers and maps sub-requests to their base
//! request. It orders configuration by upstream precedence: class before claim, earlier before
//! later; see [`AllocatedDevice::sharing`]. Malformed input is an error that names the claim.
//! [`AllocatedClaim::from_json`] also detects duplicate keys in a configuration, because it reads
//! the bytes of the API server.

use crate::config::{self, AppliedConfig, ConfigError, ConfigMismatch, DeviceConfig, Source};
use crate::names::{ClaimRef, DRIVER, DeviceName, PoolName, RequestName, ShareId};
use crate::quantity::{Quantity, QuantityError};
use crate::sharing::{Mode, ShareSettings, Sharing};
use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, OpaqueDeviceConfiguration, ResourceClaim,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, BTreeSet};

/// An allocated claim with our driver's results, in their order. Invariant: `devices` is not empty,
/// and (pool, device, hold) is unique.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedClaim {
    pub claim: ClaimRef,
    /// The name of the claim in its pod, if it was created from a template.
    pub pod_claim: Option<String>,
    pub devices: Vec<AllocatedDevice>,
}

/// One allocation result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedDevice {
    /// The base request.
    pub request: RequestName,
    /// The request as in the allocation: `gpu`, or `gpu/small` for an alternative of a prioritized
    /// list.
    pub chosen: String,
    pub pool: PoolName,
    pub device: DeviceName,
    /// The DeviceClass of the request, if the spec of the claim still names one.
    pub class: Option<String>,
    pub hold: Hold,
    /// Configuration for the request, lowest precedence first.
    pub configs: Vec<AppliedConfig>,
}

impl AllocatedDevice {
    /// How the pods of the claim share the device, which has the given mode. `None` for
    /// adminAccess, which changes nothing on a device.
    ///
    /// # Errors
    /// A configuration is not valid for this kind of device.
    pub fn sharing(&self, mode: Mode) -> Result<Option<Sharing>, ConfigMismatch> {
        match self.hold {
            Hold::Admin { .. } => Ok(None),
            Hold::Exclusive | Hold::Share { .. } => config::effective(&self.configs, mode),
        }
    }

    /// The settings of the [`Share`], if the claim holds one.
    ///
    /// # Errors
    /// A configuration is not valid for a share.
    pub fn share_settings(&self) -> Result<ShareSettings, ConfigMismatch> {
        config::share_settings(&self.configs)
    }
}

/// How the claim holds the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// No other claim may hold it.
    Exclusive,
    /// One of several allocations of the device. The consumed capacities tell whether other claims
    /// fit (see [`Share`]). Capacities of our domain are stored without it.
    Share { id: ShareId, consumed: BTreeMap<String, Quantity> },
    /// adminAccess: observes the device and owns nothing. It has an id if the device allows
    /// multiple allocations.
    Admin { id: Option<ShareId> },
}

impl Hold {
    /// The scheduler's id of the allocation, if the device allows several.
    pub fn share_id(&self) -> Option<&ShareId> {
        match self {
            Self::Share { id, .. } => Some(id),
            Self::Admin { id } => id.as_ref(),
            Self::Exclusive => None,
        }
    }
}

/// Part of the memory of a GPU or MIG instance, with or without part of its compute time. Whether
/// an allocation is a share or the whole device depends on the memory of the device, so
/// `divvy-model` creates this type.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Share {
    pub id: ShareId,
    /// Bytes; never 0.
    pub memory: u64,
    /// Guaranteed percent of the compute time, 0 to 100. With 0, the share gets a part of the time
    /// that is not guaranteed.
    pub cores: u32,
}

/// Why a ResourceClaim is invalid. Every message names the claim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    #[error("the API server's response is not a ResourceClaim: {cause}")]
    Unreadable { cause: String },
    #[error("claim {claim} has no {field}")]
    Missing { claim: String, field: &'static str },
    #[error("claim {claim} is not allocated")]
    NotAllocated { claim: Box<ClaimRef> },
    #[error("claim {claim} has no device of driver {DRIVER}")]
    NotOurs { claim: Box<ClaimRef> },
    #[error("claim {claim}, request {request}: {cause}")]
    Config { claim: Box<ClaimRef>, request: String, cause: ConfigError },
    #[error(
        "claim {claim}, request {request}: configuration is from {source_name:?}, expected FromClass or \
         FromClaim"
    )]
    ConfigSource { claim: Box<ClaimRef>, request: String, source_name: String },
    #[error("claim {claim}, device {device}: {cause}")]
    Capacity { claim: Box<ClaimRef>, device: DeviceName, cause: QuantityError },
    #[error("claim {claim}, device {device}: capacity {capacity} is given twice")]
    CapacityTwice { claim: Box<ClaimRef>, device: DeviceName, capacity: String },
    #[error("claim {claim}, device {device}: consumes capacity but has no shareID")]
    NoShareId { claim: Box<ClaimRef>, device: DeviceName },
    #[error("claim {claim} holds device {device} twice")]
    Repeated { claim: Box<ClaimRef>, device: DeviceName },
}

impl TryFrom<&ResourceClaim> for AllocatedClaim {
    type Error = ClaimError;
    fn try_from(claim: &ResourceClaim) -> Result<Self, ClaimError> {
        read(claim, |_, opaque| DeviceConfig::from_value(&opaque.parameters.0))
    }
}

impl AllocatedClaim {
    /// Reads a claim from the JSON bytes of the API server.
    pub fn from_json(json: &[u8]) -> Result<Self, ClaimError> {
        let unreadable = |cause: serde_json::Error| ClaimError::Unreadable { cause: cause.to_string() };
        let claim: ResourceClaim = serde_json::from_slice(json).map_err(unreadable)?;
        let texts = serde_json::from_slice::<RawClaim<'_>>(json).map_err(unreadable)?.parameters();
        read(&claim, |index, opaque| match texts.get(index).copied().flatten() {
            Some(text) => DeviceConfig::parse(text.get()),
            None => DeviceConfig::from_value(&opaque.parameters.0),
        })
    }
}

/// The base of a request: `gpu/sub` belongs to `gpu`.
fn base(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

/// Whether a configuration for `requests` applies to the result's request.
fn applies(requests: Option<&Vec<String>>, request: &str) -> bool {
    let named = requests.map_or(&[] as &[String], Vec::as_slice);
    named.is_empty() || named.iter().any(|name| name == request || name == base(request))
}

type ParseConfig<'a> = dyn Fn(usize, &OpaqueDeviceConfiguration) -> Result<DeviceConfig, ConfigError> + 'a;

fn read(
    claim: &ResourceClaim,
    parse: impl Fn(usize, &OpaqueDeviceConfiguration) -> Result<DeviceConfig, ConfigError>,
) -> Result<AllocatedClaim, ClaimError> {
    let reference = reference(claim)?;
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = match allocation {
        Some(allocation) => allocation.devices.as_ref(),
        None => return Err(ClaimError::NotAllocated { claim: reference.into() }),
    };
    let configs = devices.and_then(|devices| devices.config.as_deref()).unwrap_or_default();
    let results = devices.and_then(|devices| devices.results.as_deref()).unwrap_or_default();
    let mut seen = BTreeSet::new();
    let devices = results
        .iter()
        .filter(|result| result.driver == DRIVER)
        .map(|result| {
            let class = class_of(claim, &result.request);
            let device = read_result(&reference, result, class, configs, &parse)?;
            let key = (
                result.pool.as_str(),
                result.device.as_str(),
                result.admin_access,
                result.share_id.as_deref(),
            );
            match seen.insert(key) {
                true => Ok(device),
                false => Err(ClaimError::Repeated { claim: reference.clone().into(), device: device.device }),
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    match devices.is_empty() {
        true => Err(ClaimError::NotOurs { claim: reference.into() }),
        false => Ok(AllocatedClaim { claim: reference, pod_claim: pod_claim(claim), devices }),
    }
}

/// The kubelet's annotation on claims created from a template. An invalid name is dropped.
fn pod_claim(claim: &ResourceClaim) -> Option<String> {
    let name = claim.metadata.annotations.as_ref()?.get("resource.kubernetes.io/pod-claim-name")?;
    let label = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    let is_label = (1..=63).contains(&name.len()) && name.bytes().all(label);
    is_label.then(|| name.clone())
}

fn reference(claim: &ResourceClaim) -> Result<ClaimRef, ClaimError> {
    let metadata = &claim.metadata;
    let called = || {
        let part = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".to_owned());
        format!("{}/{}", part(&metadata.namespace), part(&metadata.name))
    };
    let field = |text: &Option<String>, field| match text {
        Some(text) if !text.is_empty() => Ok(text.clone()),
        _ => Err(ClaimError::Missing { claim: called(), field }),
    };
    Ok(ClaimRef {
        namespace: field(&metadata.namespace, "namespace")?,
        name: field(&metadata.name, "name")?,
        uid: field(&metadata.uid, "uid")?.into(),
    })
}

fn read_result(
    claim: &ClaimRef,
    result: &DeviceRequestAllocationResult,
    class: Option<String>,
    configs: &[DeviceAllocationConfiguration],
    parse: &ParseConfig<'_>,
) -> Result<AllocatedDevice, ClaimError> {
    let filled = |text: &str, field| match text.is_empty() {
        true => Err(ClaimError::Missing { claim: claim.to_string(), field }),
        false => Ok(text.to_owned()),
    };
    Ok(AllocatedDevice {
        request: filled(base(&result.request), "request name in an allocation result")?.into(),
        chosen: result.request.clone(),
        pool: filled(&result.pool, "pool in an allocation result")?.into(),
        device: filled(&result.device, "device in an allocation result")?.into(),
        class,
        hold: hold(claim, result)?,
        configs: configs_of(claim, &result.request, configs, parse)?,
    })
}

/// The DeviceClass of a request or of its alternative.
fn class_of(claim: &ResourceClaim, chosen: &str) -> Option<String> {
    let requests = claim.spec.as_ref()?.devices.as_ref()?.requests.as_ref()?;
    let request = requests.iter().find(|request| request.name == base(chosen))?;
    if let Some(exactly) = &request.exactly {
        return Some(exactly.device_class_name.clone());
    }
    let (_, alternative) = chosen.split_once('/')?;
    let mut alternatives = request.first_available.iter().flatten();
    Some(alternatives.find(|one| one.name == alternative)?.device_class_name.clone())
}

fn hold(claim: &ClaimRef, result: &DeviceRequestAllocationResult) -> Result<Hold, ClaimError> {
    if result.admin_access == Some(true) {
        return Ok(Hold::Admin { id: result.share_id.as_deref().map(Into::into) });
    }
    let device = || DeviceName::from(result.device.as_str());
    let consumed = result.consumed_capacity.as_ref().filter(|consumed| !consumed.is_empty());
    let Some(id) = &result.share_id else {
        return match consumed {
            Some(_) => Err(ClaimError::NoShareId { claim: claim.clone().into(), device: device() }),
            None => Ok(Hold::Exclusive),
        };
    };
    let mut ours = BTreeMap::new();
    for (name, wire) in consumed.into_iter().flatten() {
        let name =
            name.strip_prefix(DRIVER).and_then(|rest| rest.strip_prefix('/')).unwrap_or(name).to_owned();
        let amount = Quantity::try_from(wire).map_err(|cause| ClaimError::Capacity {
            claim: claim.clone().into(),
            device: device(),
            cause,
        })?;
        if ours.insert(name.clone(), amount).is_some() {
            return Err(ClaimError::CapacityTwice {
                claim: claim.clone().into(),
                device: device(),
                capacity: name,
            });
        }
    }
    Ok(Hold::Share { id: id.as_str().into(), consumed: ours })
}

fn configs_of(
    claim: &ClaimRef,
    request: &str,
    configs: &[DeviceAllocationConfiguration],
    parse: &ParseConfig<'_>,
) -> Result<Vec<AppliedConfig>, ClaimError> {
    let (mut of_class, mut of_claim) = (Vec::new(), Vec::new());
    for (index, entry) in configs.iter().enumerate() {
        let Some(opaque) = entry.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else {
            continue;
        };
        if !applies(entry.requests.as_ref(), request) {
            continue;
        }
        let ranked = match entry.source.as_str() {
            "FromClass" => &mut of_class,
            "FromClaim" => &mut of_claim,
            source_name => {
                let (claim, request, source_name) =
                    (claim.clone().into(), request.to_owned(), source_name.to_owned());
                return Err(ClaimError::ConfigSource { claim, request, source_name });
            }
        };
        let config = parse(index, opaque).map_err(|cause| ClaimError::Config {
            claim: claim.clone().into(),
            request: request.to_owned(),
            cause,
        })?;
        // The scheduler fills in the requests of class configuration.
        let named = entry.requests.iter().flatten().any(|name| name == request);
        let source = match (entry.source.as_str(), named) {
            ("FromClass", _) => Source::Class,
            (_, false) => Source::Claim,
            (_, true) => Source::Request,
        };
        ranked.push(AppliedConfig { config, source });
    }
    of_class.append(&mut of_claim);
    Ok(of_class)
}

/// The path to the opaque parameters, which are kept as text.
#[derive(Deserialize)]
struct RawClaim<'a> {
    #[serde(borrow)]
    status: Option<RawStatus<'a>>,
}

#[derive(Deserialize)]
struct RawStatus<'a> {
    #[serde(borrow)]
    allocation: Option<RawAllocation<'a>>,
}

#[derive(Deserialize)]
struct RawAllocation<'a> {
    #[serde(borrow)]
    devices: Option<RawDevices<'a>>,
}

#[derive(Deserialize)]
struct RawDevices<'a> {
    #[serde(borrow)]
    config: Option<Vec<RawConfig<'a>>>,
}

#[derive(Deserialize)]
struct RawConfig<'a> {
    #[serde(borrow)]
    opaque: Option<RawOpaque<'a>>,
}

#[derive(Deserialize)]
struct RawOpaque<'a> {
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}

impl<'a> RawClaim<'a> {
    /// The parameters of each configuration, in order.
    fn parameters(self) -> Vec<Option<&'a RawValue>> {
        let configs = self.status.and_then(|status| status.allocation);
        let configs = configs.and_then(|allocation| allocation.devices).and_then(|devices| devices.config);
        configs.unwrap_or_default().into_iter().map(|config| config.opaque?.parameters).collect()
    }
}
