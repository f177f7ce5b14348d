//! What the GPU driver may have taken of its own for the processes of a share: pure.
//!
//! A context is charged by an estimate, the policy's figure, before it is made. What the
//! GPU driver really takes (contexts, modules, local memory) is measured and written to
//! the slot within an audit or two, and counts against the limit from then on. What is
//! charged never passes the limit. So honest processes stand above it only by what was
//! taken unasked since one of them was last charged:
//! - *Contexts.* Any number of processes may be started at once, and all of them be charged
//!   before one is measured. 300 MiB is the estimate, and current data centre GPUs take 300
//!   to 600 MiB for a context with its libraries: one estimate more for each process, and as
//!   nobody has a context who was not charged, no more than the process is charged. All
//!   charges together fit into the limit, so this is never more than the limit, however
//!   many processes there are; one that is registered and charged nothing adds nothing.
//! - *Modules*, stacks of kernels and the like, loaded when the limit is reached already.
//!   Programs load most of that with their contexts, while there is room. So of this there
//!   are [`LATE`] estimates for all processes together, and with the first sort at most
//!   [`ALLOWANCE`] for each.
//!
//! Somebody who allocates behind the library in registered processes has that as well, and
//! no test by amounts could tell. But to have an estimate of the first sort a process must
//! be charged one and have a context, which takes about an estimate itself. So beside
//! contexts a share never has more than its limit and [`LATE`] estimates.

use super::super::look::Look;
use super::Tenant;
use divvy_api::sharing::CONTEXT;

/// How many estimates of a context may be taken for one process.
const ALLOWANCE: u64 = 2;
/// How many for all processes of a share, beside one for the context of each.
const LATE: u64 = 4;

fn estimate(look: &Look, tenant: &Tenant<'_>) -> u64 {
    let estimates = tenant.shares.iter().map(|at| look.shares[*at].policy.memory.context);
    // What was measured of a context is charged, and is no reason to let more pass.
    estimates.max().unwrap_or_default().min(CONTEXT)
}

/// For one process.
pub(super) fn of_one(look: &Look, tenant: &Tenant<'_>) -> u64 {
    estimate(look, tenant).saturating_mul(ALLOWANCE)
}

/// For processes that have that limit together. Nothing for those that are not registered.
pub(super) fn of_all(look: &Look, tenants: &[&Tenant<'_>], limit: u64) -> u64 {
    let registered = || tenants.iter().filter(|tenant| tenant.is_registered());
    let (mut first, mut late) = (0_u64, 0_u64);
    for tenant in registered() {
        let beyond = tenant.beyond().min(of_one(look, tenant));
        let of_context = beyond.min(estimate(look, tenant)).min(tenant.held);
        first = first.saturating_add(of_context);
        late = late.saturating_add(beyond - of_context);
    }
    let most = registered().map(|tenant| estimate(look, tenant)).max().unwrap_or_default();
    // The page is the tenant's word, and may say that more is charged than fits.
    first.min(limit).saturating_add(late.min(most.saturating_mul(LATE)))
}
