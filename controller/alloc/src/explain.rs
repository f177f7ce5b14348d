//! Explains a failed search: the obstacle of each device for each request, considered alone.

use crate::error::{AllocationError, RequestFailure, claim_name};
use crate::pool::State;
use crate::request::Count;
use crate::search::{AlternativeIndex, Search};
use crate::view::ClusterView;
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::BTreeMap;

/// Builds the error after a search found no solution.
pub(crate) fn explain(
    cluster: &ClusterView<'_>,
    claim: &ResourceClaim,
    search: &mut Search<'_, '_>,
) -> Result<AllocationError, AllocationError> {
    let mut requests = Vec::new();
    for request in 0..search.parsed.requests.len() {
        for alternative in 0..search.parsed.requests[request].alternatives.len() {
            requests.push(explain_request(search, (request, alternative))?);
        }
    }
    let pools = search.pools.pools.iter().filter_map(|pool| match &pool.state {
        State::Usable => None,
        State::Incomplete { have, want } => {
            Some(format!("pool {}/{} has {have} of {want} slices", pool.driver, pool.name))
        }
        State::Invalid { reason } => Some(format!("pool {}/{} is invalid: {reason}", pool.driver, pool.name)),
    });
    let node = cluster.node.metadata.name.clone().unwrap_or_default();
    Ok(AllocationError::NoFit { claim: claim_name(claim), node, requests, pools: pools.collect() })
}

fn explain_request(
    search: &mut Search<'_, '_>,
    slot: AlternativeIndex,
) -> Result<RequestFailure, AllocationError> {
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
    Ok(RequestFailure { request: alternative.name.clone(), wanted, fitting, obstacles })
}
