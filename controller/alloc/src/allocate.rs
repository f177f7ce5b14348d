//! Allocation of one claim, or of all claims of a pod.

use crate::allocations::Allocations;
use crate::error::{AllocationError, claim_name};
use crate::pool::Pools;
use crate::request::ParsedClaim;
use crate::search::{Problem, Search};
use crate::selectors::Selectors;
use crate::stack::on_large_stack;
use crate::view::ClusterView;
use crate::{explain, result};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};

/// Allocates devices for a claim on the node, as the scheduler would. `share_id` generates the ID of
/// each share of a device with multiple allocations.
///
/// # Errors
///
/// Fails if the claim or the cluster cannot be parsed, if no combination of devices fits, or if none
/// is found within the limit of steps.
pub fn allocate(
    cluster: &ClusterView<'_>,
    claim: &ResourceClaim,
    share_id: &mut dyn FnMut() -> String,
) -> Result<AllocationResult, AllocationError> {
    let mut found = allocate_pod(cluster, &[claim], share_id)?;
    let bug = || AllocationError::Claim { claim: claim_name(claim), cause: "it got no result".to_owned() };
    found.pop().ok_or_else(bug)
}

/// Allocates devices for all claims of a pod together, and returns the allocations in the order of
/// the claims. A claim gets other devices than alone if a later claim needs those.
///
/// # Errors
///
/// Fails as [`allocate`], for all claims at once.
pub fn allocate_pod(
    cluster: &ClusterView<'_>,
    claims: &[&ResourceClaim],
    share_id: &mut dyn FnMut() -> String,
) -> Result<Vec<AllocationResult>, AllocationError> {
    let refused = |cause| {
        let names: Vec<_> = claims.iter().map(|claim| claim_name(claim)).collect();
        Err(AllocationError::Claim { claim: names.join(", "), cause })
    };
    let mut found = on_large_stack(|| find(cluster, claims)).unwrap_or_else(refused)?;
    let results = found.iter_mut().flat_map(|allocation| allocation.devices.iter_mut());
    let results = results.flat_map(|devices| devices.results.iter_mut().flatten());
    results.filter_map(|result| result.share_id.as_mut()).for_each(|id| *id = share_id());
    Ok(found)
}

/// Like [`allocate_pod`], but with blank share IDs.
fn find(
    cluster: &ClusterView<'_>,
    claims: &[&ResourceClaim],
) -> Result<Vec<AllocationResult>, AllocationError> {
    let allocations = Allocations::read(cluster.claims, cluster.release)?;
    let pools = Pools::gather(cluster, &allocations);
    let mut selectors = Selectors::default();
    let mut read = |claim| ParsedClaim::read(claim, cluster.classes, &mut selectors);
    let parsed = claims.iter().copied().map(&mut read).collect::<Result<Vec<_>, _>>()?;
    let mut search = Search::new(Problem {
        pools: &pools,
        allocations: &allocations,
        claims: &parsed,
        selectors: &selectors,
        release: cluster.release,
    })?;
    let Some(picks) = search.run()? else {
        return Err(explain::explain(cluster, &mut search)?);
    };
    let write = |((claim, parsed), picks): ((&&ResourceClaim, &ParsedClaim<'_>), &Vec<_>)| {
        result::write(cluster, claim, parsed, &pools, picks)
    };
    Ok(claims.iter().zip(&parsed).zip(&picks).map(write).collect())
}
