//! Checks shares against their limits and acts on violations.
//!
//! [`checks`], [`compute_limit`] and [`ungranted`] find violations in a snapshot, [`remediation`]
//! kills offenders and reports. The node's part of the account pages is written by
//! [`slot_corrections`].

pub(crate) mod checks;
pub(crate) mod compute_limit;
pub(crate) mod context_size;
mod kill;
pub(crate) mod remediation;
pub(crate) mod slot_corrections;
pub(crate) mod ungranted;
