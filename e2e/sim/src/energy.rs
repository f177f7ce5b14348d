//! Energy of a GPU since its last boot or reset.
//!
//! A GPU uses a tenth of its power limit, and seven tenths while it has processes that were added by
//! hand. The state file has the energy up to the last change of such processes, so that the sum never
//! falls. The work of CUDA programs is not counted: its sums end with their MIG instances.

use crate::state::{Energy, Gpu, State};
use crate::usage::now;

/// Parts of the power limit, in tenths.
const IDLE_TENTHS: u128 = 1;
const BUSY_TENTHS: u128 = 7;

impl Energy {
    pub(crate) fn starting_now() -> Self {
        Self { mj: 0, until_ns: now() }
    }
}

impl Gpu {
    /// Energy in mJ until now.
    pub fn energy_mj(&self) -> u64 {
        self.energy_until(now())
    }

    fn energy_until(&self, at: u64) -> u64 {
        let tenths = if self.processes.is_empty() { IDLE_TENTHS } else { BUSY_TENTHS };
        self.energy.mj + self.millijoules(tenths, at.saturating_sub(self.energy.until_ns))
    }

    fn millijoules(&self, tenths: u128, ns: u64) -> u64 {
        let tenths_of_nanojoules = u128::from(self.model().power_watts) * tenths * u128::from(ns);
        u64::try_from(tenths_of_nanojoules / 10_000_000).unwrap_or(u64::MAX)
    }
}

/// Updates the energy of GPUs that were reset, or whose processes have changed.
pub(crate) fn account(before: &State, after: &mut State) {
    for (old, new) in before.gpus.iter().zip(&mut after.gpus) {
        if old.epoch != new.epoch {
            new.energy = Energy::starting_now();
        } else if old.processes.is_empty() != new.processes.is_empty() {
            let until_ns = now();
            new.energy = Energy { mj: old.energy_until(until_ns), until_ns };
        }
    }
}
