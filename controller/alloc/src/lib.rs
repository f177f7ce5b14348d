//! Offline allocation with the scheduler's semantics: given slices, classes and
//! existing claims, which devices would this claim get on this node, or why none?
//!
//! It follows the upstream structured allocator, so that what is tried here holds
//! on a cluster: first fit over pools, slices and devices in the order published,
//! with backtracking over requests; counters per (driver, pool); consumable
//! capacity; taints; constraints; adminAccess; CEL selectors. Where an upstream
//! version had a bug that was fixed later, the fix is what is followed.
//!
//! The way of a claim: [`pool`] gathers what the node can reach, [`ledger`] says
//! what is taken, [`request`] reads what is asked, [`search`] tries, [`result`]
//! writes the answer as the scheduler would, and [`why`] explains a failure by
//! asking of each device, alone, what stands in its way.
//!
//! Not followed, because a default cluster has them off: derived attributes
//! (refused), compatibility groups and optional node operations (ignored).
//!
//! Pure: no I/O, no clock. The work is bounded by a number of tries, not by time.

mod capacity;
mod cel;
mod constraint;
mod ledger;
mod node;
mod pool;
mod request;
mod result;
mod search;
mod selects;
mod taint;
mod why;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};

pub use selects::selected;
pub use why::{Obstacle, RequestWhy, WhyNot};

/// What the scheduler sees when it asks about one node.
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    /// All slices of the cluster.
    pub slices: &'a [ResourceSlice],
    pub classes: &'a [DeviceClass],
    /// All claims; those with an allocation say what is taken.
    pub claims: &'a [ResourceClaim],
    pub node: &'a Node,
}

/// The most devices one claim can hold.
pub(crate) const MOST_DEVICES: usize = 32;

/// CEL is parsed and evaluated by recursion, and the longest expression that
/// the API server takes needs more stack than a thread commonly has: up to 256 MiB
/// in an unoptimized build.
const STACK_BYTES: usize = 512 << 20;

/// Finds devices for a claim on the node, as the scheduler would.
///
/// `share_id` makes the id of each share of a multi-allocation device.
pub fn allocate(
    world: &World<'_>,
    claim: &ResourceClaim,
    share_id: &mut dyn FnMut() -> String,
) -> Result<AllocationResult, WhyNot> {
    let refused = |cause: String| WhyNot::Claim { claim: why::called(claim), cause };
    let found = deep(|| find(world, claim)).unwrap_or_else(|cause| Err(refused(cause)));
    let mut allocation = found?;
    let results = allocation.devices.iter_mut().flat_map(|devices| devices.results.iter_mut().flatten());
    results.filter_map(|result| result.share_id.as_mut()).for_each(|id| *id = share_id());
    Ok(allocation)
}

/// Runs on a stack that holds the deepest expression; says why it could not.
fn deep<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("divvy-alloc".to_owned()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, work).map_err(|cause| cause.to_string())?;
        thread.join().map_err(|_| "the allocator panicked; this is a bug".to_owned())
    })
}

/// As [`allocate`], with the ids of shares left blank.
fn find(world: &World<'_>, claim: &ResourceClaim) -> Result<AllocationResult, WhyNot> {
    let ledger = ledger::Ledger::read(world.claims)?;
    let pools = pool::Pools::gather(world, &ledger);
    let asked = request::Asked::read(claim, world.classes)?;
    let mut search = search::Search::new(&pools, &ledger, &asked)?;
    match search.run()? {
        Some(picks) => Ok(result::write(world, claim, &asked, &pools, &picks)),
        None => Err(why::explain(world, claim, &mut search)?),
    }
}
