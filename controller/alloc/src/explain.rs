//! Explains a failed search: the obstacle of each device for each request, considered alone.

use crate::error::{AllocationError, RequestFailure};
use crate::pool::State;
use crate::request::Count;
use crate::search::{Search, Slot};
use crate::view::ClusterView;
use std::collections::BTreeMap;

/// Builds the error after a search found no solution.
pub(crate) fn explain(
    cluster: &ClusterView<'_>,
    search: &mut Search<'_, '_>,
) -> Result<AllocationError, AllocationError> {
    search.restart();
    let claims = search.problem().claims;
    let mut requests = Vec::new();
    for (claim, parsed) in claims.iter().enumerate() {
        for (request, wanted) in parsed.requests.iter().enumerate() {
            for alternative in 0..wanted.alternatives.len() {
                let mut failure = explain_request(search, Slot { claim, request, alternative })?;
                if claims.len() > 1 {
                    failure.request = format!("{} of {}", failure.request, parsed.claim);
                }
                requests.push(failure);
            }
        }
    }
    let pools = search.problem().pools.pools.iter().filter_map(|pool| match &pool.state {
        State::Usable => None,
        State::Incomplete { have, want } => {
            Some(format!("pool {}/{} has {have} of {want} slices", pool.driver, pool.name))
        }
        State::Invalid { reason } => Some(format!("pool {}/{} is invalid: {reason}", pool.driver, pool.name)),
    });
    let node = cluster.node.metadata.name.clone().unwrap_or_default();
    let claim = claims.iter().map(|claim| claim.claim.as_str()).collect::<Vec<_>>().join(", ");
    Ok(AllocationError::NoFit { claim, node, requests, pools: pools.collect() })
}

fn explain_request(search: &mut Search<'_, '_>, slot: Slot) -> Result<RequestFailure, AllocationError> {
    let mut obstacles = BTreeMap::new();
    let mut fitting = 0;
    let devices = &search.problem().pools.devices;
    for (index, _) in devices.iter().enumerate().filter(|(_, device)| device.here) {
        match search.obstacle(slot, index)? {
            Some(obstacle) => *obstacles.entry(obstacle).or_insert(0) += 1,
            None => fitting += 1,
        }
    }
    let alternative = search.alternative(slot);
    let wanted = match alternative.count {
        Count::Exactly(count) => count,
        Count::All => search.wanted(slot).max(1),
    };
    Ok(RequestFailure { request: alternative.name.clone(), wanted, fitting, obstacles })
}
