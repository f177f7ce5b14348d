//! Energy of a GPU since its last boot or reset.
//!
//! A GPU uses a tenth of its power limit, and seven tenths while it has processes that were added by
//! hand or while CUDA processes work. The state file has the energy up to the last change of such
//! processes, so that the sum never falls.

use crate::state::{Energy, Gpu, State};
use crate::usage::{GpuUsage, Place, UsageMonitor, now};
use std::sync::Arc;

/// Parts of the power limit, in tenths.
const IDLE_TENTHS: u128 = 1;
const BUSY_TENTHS: u128 = 7;
/// Largest number of GPU instances of a GPU.
const MAX_INSTANCES: u32 = 15;

impl Energy {
    pub(crate) fn starting_now() -> Self {
        Self { until_ns: now(), ..Self::default() }
    }
}

impl Gpu {
    /// Energy in mJ. `self` is as stored, and `cuda_ns` is from [`cuda_time`].
    pub fn energy_mj(&self, cuda_ns: u64) -> u64 {
        let cuda_ns = cuda_ns.saturating_sub(self.energy.cuda_before_ns);
        self.energy_without_cuda(now()) + self.millijoules(BUSY_TENTHS - IDLE_TENTHS, cuda_ns)
    }

    fn energy_without_cuda(&self, at: u64) -> u64 {
        let tenths = if self.processes.is_empty() { IDLE_TENTHS } else { BUSY_TENTHS };
        self.energy.mj + self.millijoules(tenths, at.saturating_sub(self.energy.until_ns))
    }

    fn millijoules(&self, tenths: u128, ns: u64) -> u64 {
        let tenths_of_nanojoules = u128::from(self.model().power_watts) * tenths * u128::from(ns);
        u64::try_from(tenths_of_nanojoules / 10_000_000).unwrap_or(u64::MAX)
    }
}

/// GPU time in ns that CUDA processes have used since the simulator was created.
pub fn cuda_time(monitor: &UsageMonitor, slot: usize) -> u64 {
    let instances = std::iter::once(None).chain((0..MAX_INSTANCES).map(|gi| Some((gi, 0))));
    instances
        .filter_map(|instance| monitor.busy_time(Place { slot, instance }))
        .map(|(_at, busy_ns)| busy_ns)
        .sum()
}

/// Updates the energy of GPUs that were reset, or whose processes have changed.
pub(crate) fn account(before: &State, after: &mut State, usage: Option<&Arc<GpuUsage>>) {
    for (slot, (old, new)) in before.gpus.iter().zip(&mut after.gpus).enumerate() {
        if old.epoch != new.epoch {
            let monitor = usage.and_then(|usage| UsageMonitor::new(usage).ok());
            let cuda_before_ns = monitor.map_or(0, |monitor| cuda_time(&monitor, slot));
            new.energy = Energy { cuda_before_ns, ..Energy::starting_now() };
        } else if old.processes.is_empty() != new.processes.is_empty() {
            let until_ns = now();
            (new.energy.mj, new.energy.until_ns) = (old.energy_without_cuda(until_ns), until_ns);
        }
    }
}
