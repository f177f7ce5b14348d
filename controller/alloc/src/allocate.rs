//! Allocation of one claim.

use crate::error::{AllocationError, claim_name};
use crate::stack::on_large_stack;
use crate::view::ClusterView;
use crate::{allocations, explain, pool, request, result, search};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};

/// Allocates devices for a claim on the node, as the scheduler would. `share_id` generates the ID of
/// each share of a device with multiple allocations.
///
/// # Errors
///
/// Fails if the claim or the cluster cannot be parsed, or if no combination of devices fits.
pub fn allocate(
    cluster: &ClusterView<'_>,
    claim: &ResourceClaim,
    share_id: &mut dyn FnMut() -> String,
) -> Result<AllocationResult, AllocationError> {
    let refused = |cause: String| AllocationError::Claim { claim: claim_name(claim), cause };
    let found = on_large_stack(|| find(cluster, claim)).unwrap_or_else(|cause| Err(refused(cause)));
    let mut allocation = found?;
    let results = allocation.devices.iter_mut().flat_map(|devices| devices.results.iter_mut().flatten());
    results.filter_map(|result| result.share_id.as_mut()).for_each(|id| *id = share_id());
    Ok(allocation)
}

/// Like [`allocate`], but with blank share IDs.
fn find(cluster: &ClusterView<'_>, claim: &ResourceClaim) -> Result<AllocationResult, AllocationError> {
    let allocations = allocations::Allocations::read(cluster.claims)?;
    let pools = pool::Pools::gather(cluster, &allocations);
    let parsed = request::ParsedClaim::read(claim, cluster.classes)?;
    let mut search = search::Search::new(&pools, &allocations, &parsed)?;
    match search.run()? {
        Some(picks) => Ok(result::write(cluster, claim, &parsed, &pools, &picks)),
        None => Err(explain::explain(cluster, claim, &mut search)?),
    }
}
