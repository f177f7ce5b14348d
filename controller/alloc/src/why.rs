//! Why a claim gets nothing: of each device, asked alone, what stood in its way.

use crate::World;
use crate::pool::State;
use crate::request::Count;
use crate::search::Search;
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::BTreeMap;
use std::fmt;

/// Why a claim cannot be allocated; every message names the claim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyNot {
    #[error("claim {claim}: {cause}")]
    Claim { claim: String, cause: String },
    #[error("claim {claim}, request {request}: {cause}")]
    Request { claim: String, request: String, cause: String },
    #[error("claim {claim}, request {request}: a selector failed on device {device}: {cause}")]
    Selector { claim: String, request: String, device: String, cause: String },
    #[error(
        "claim {claim} asks for {devices} devices, more than the {} a claim can hold",
        crate::MOST_DEVICES
    )]
    TooMany { claim: String, devices: usize },
    #[error(
        "claim {claim}, request {request} asks for all devices, but pool {pool} is incomplete or invalid"
    )]
    AllOfPool { claim: String, request: String, pool: String },
    #[error("claim {claim}: gave up after {tries} tries")]
    GaveUp { claim: String, tries: usize },
    #[error("claim {claim} does not fit on node {node}: {}", listed(requests, pools))]
    NoFit {
        claim: String,
        node: String,
        requests: Vec<RequestWhy>,
        /// Pools that gave no device, and why.
        pools: Vec<String>,
    },
}

/// What became of the devices for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestWhy {
    /// `gpu`, or `gpu/sub`.
    pub request: String,
    pub wanted: usize,
    /// Devices that would do, were the request alone.
    pub fitting: usize,
    /// Devices by what stood in their way.
    pub obstacles: BTreeMap<Obstacle, usize>,
}

/// What keeps a device from a request; in the order in which it is looked for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    InUse,
    /// Not a device of the class.
    Class {
        class: String,
    },
    /// The request's own selectors.
    Selector,
    Capacity,
    /// The hardware it shares with others is taken.
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
            Self::Constraint => out.write_str("against a constraint"),
        }
    }
}

impl fmt::Display for RequestWhy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request, wanted, fitting, obstacles } = self;
        let all = fitting + obstacles.values().sum::<usize>();
        write!(out, "request {request} wants {wanted} of {all} devices, {fitting} fit")?;
        obstacles.iter().try_for_each(|(obstacle, count)| write!(out, ", {count} {obstacle}"))
    }
}

fn listed(requests: &[RequestWhy], pools: &[String]) -> String {
    let enough = !requests.is_empty() && requests.iter().all(|request| request.fitting >= request.wanted);
    let together = enough.then(|| "each request fits alone, but not all together".to_owned());
    let requests = requests.iter().map(RequestWhy::to_string);
    together.into_iter().chain(requests).chain(pools.iter().cloned()).collect::<Vec<_>>().join("; ")
}

/// `namespace/name` of a claim.
pub(crate) fn called(claim: &ResourceClaim) -> String {
    let part = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".to_owned());
    format!("{}/{}", part(&claim.metadata.namespace), part(&claim.metadata.name))
}

/// Looks at every device alone, after a search found no solution.
pub(crate) fn explain(
    world: &World<'_>,
    claim: &ResourceClaim,
    search: &mut Search<'_, '_>,
) -> Result<WhyNot, WhyNot> {
    let mut requests = Vec::new();
    for request in 0..search.asked.requests.len() {
        for alternative in 0..search.asked.requests[request].alternatives.len() {
            requests.push(explain_one(search, (request, alternative))?);
        }
    }
    let pools = search.pools.pools.iter().filter_map(|pool| match &pool.state {
        State::Usable => None,
        State::Incomplete { have, want } => {
            Some(format!("pool {}/{} has {have} of {want} slices", pool.driver, pool.name))
        }
        State::Invalid { reason } => Some(format!("pool {}/{} is invalid: {reason}", pool.driver, pool.name)),
    });
    let node = world.node.metadata.name.clone().unwrap_or_default();
    Ok(WhyNot::NoFit { claim: called(claim), node, requests, pools: pools.collect() })
}

fn explain_one(search: &mut Search<'_, '_>, slot: (usize, usize)) -> Result<RequestWhy, WhyNot> {
    let mut obstacles = BTreeMap::new();
    let mut fitting = 0;
    for device in 0..search.pools.devices.len() {
        match search.obstacle(slot, device)? {
            Some(obstacle) => *obstacles.entry(obstacle).or_insert(0) += 1,
            None => fitting += 1,
        }
    }
    let alternative = search.alternative(slot);
    let wanted = match alternative.count {
        Count::Exactly(count) => count,
        Count::All => search.all_of(slot)?.len().max(1),
    };
    Ok(RequestWhy { request: alternative.name.clone(), wanted, fitting, obstacles })
}
