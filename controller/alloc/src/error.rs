//! Why a claim cannot be allocated.

use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::BTreeMap;
use std::fmt;

/// Limit of devices in one claim, set by the API.
pub(crate) const CLAIM_DEVICES_MAX: usize = 32;

/// Why a claim cannot be allocated. Every message names the claim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    #[error("claim {claim}: {cause}")]
    Claim { claim: String, cause: String },
    #[error("claim {claim}, request {request}: {cause}")]
    Request { claim: String, request: String, cause: String },
    #[error("claim {claim}, request {request}: a selector failed on device {device}: {cause}")]
    Selector { claim: String, request: String, device: String, cause: String },
    #[error("claim {claim} requests {devices} devices; a claim can have at most {CLAIM_DEVICES_MAX}")]
    TooMany { claim: String, devices: usize },
    #[error(
        "claim {claim}, request {request} requests all devices, but pool {pool} is incomplete or invalid"
    )]
    AllOfPool { claim: String, request: String, pool: String },
    #[error("claim {claim}: the search stopped after {steps} steps without a result")]
    GaveUp { claim: String, steps: usize },
    #[error("claim {claim} does not fit on node {node}: {}", listed(requests, pools))]
    NoFit {
        claim: String,
        node: String,
        requests: Vec<RequestFailure>,
        /// Unusable pools, with the reason.
        pools: Vec<String>,
    },
}

/// The devices that were considered for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFailure {
    /// `gpu`, or `gpu/sub`.
    pub request: String,
    pub wanted: usize,
    /// Number of devices that fit this request alone.
    pub fitting: usize,
    /// Number of devices by their first obstacle.
    pub obstacles: BTreeMap<Obstacle, usize>,
}

/// Why a device does not fit a request, in the order of the checks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    InUse,
    /// A selector of the class rejects it.
    Class {
        class: String,
    },
    /// A selector of the request rejects it.
    Selector,
    Capacity,
    /// Overlapping devices hold its counters.
    Counters,
    Taint {
        key: String,
    },
    Constraint,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse => out.write_str("in use"),
            Self::Class { class } => write!(out, "not of class {class}"),
            Self::Selector => out.write_str("not selected"),
            Self::Capacity => out.write_str("without enough capacity"),
            Self::Counters => out.write_str("overlapping devices in use"),
            Self::Taint { key } => write!(out, "tainted {key}"),
            Self::Constraint => out.write_str("excluded by a constraint"),
        }
    }
}

impl fmt::Display for RequestFailure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request, wanted, fitting, obstacles } = self;
        let all = fitting + obstacles.values().sum::<usize>();
        write!(out, "request {request} wants {wanted} of {all} devices, {fitting} fit")?;
        obstacles.iter().try_for_each(|(obstacle, count)| write!(out, ", {count} {obstacle}"))
    }
}

fn listed(requests: &[RequestFailure], pools: &[String]) -> String {
    let enough = !requests.is_empty() && requests.iter().all(|request| request.fitting >= request.wanted);
    let together = enough.then(|| "each request fits alone, but not all together".to_owned());
    let requests = requests.iter().map(RequestFailure::to_string);
    together.into_iter().chain(requests).chain(pools.iter().cloned()).collect::<Vec<_>>().join("; ")
}

/// `namespace/name` of a claim.
pub(crate) fn claim_name(claim: &ResourceClaim) -> String {
    let part = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".to_owned());
    format!("{}/{}", part(&claim.metadata.namespace), part(&claim.metadata.name))
}
