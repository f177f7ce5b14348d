//! Measures how much memory a context takes on a GPU.
//!
//! NVML reports the memory of a process, and its account the allocations. The difference is its
//! contexts and modules. A process that was charged one context has one. Only whole GPUs are
//! measured: in a MIG instance a context is smaller.

use super::slot_corrections::slots_of;
use crate::shares::snapshot::{ProcessMemory, Slot, Snapshot};

/// The smallest context with the modules that its process loads, in bytes. `None` if no process
/// with a single context was stable.
pub(crate) fn smallest(snapshot: &Snapshot) -> Option<u64> {
    let size = |usage: &ProcessMemory| {
        let (process, bytes) = (snapshot.processes.get(&usage.pid)?, usage.bytes?);
        let slots = slots_of(snapshot, process, usage.device);
        let (first, _) = slots.first()?;
        let sum =
            |field: fn(&Slot) -> u64| slots.iter().map(|(_, slot)| field(slot)).fold(0, u64::saturating_add);
        let (held, context) = (sum(|slot| slot.report.held), sum(|slot| slot.report.context));
        // Managed memory is charged in full but may not be on the device.
        let is_plain = slots.iter().all(|(_, slot)| slot.is_stable && slot.report.managed == 0);
        let is_one = context > 0 && context == snapshot.shares[*first].policy.memory.context;
        (is_plain && is_one).then(|| bytes.checked_sub(held.checked_sub(context)?))?
    };
    snapshot.uses.iter().filter(|usage| usage.device.mig.is_none()).filter_map(size).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture};

    const MIB: u64 = 1 << 20;

    #[test]
    fn context_is_the_memory_beyond_allocations() {
        let check = |fixture: &Fixture, expected: Option<u64>| {
            assert_eq!(smallest(&fixture.snapshot()), expected.map(|mib| mib * MIB));
        };
        let mut fixture = Fixture::share(10_000);
        check(&fixture, None);
        fixture.process(7).has(1518);
        check(&fixture, None);
        fixture.slot(7, 1000 + CONTEXT);
        check(&fixture, Some(518));
        // A process with a larger context, then one with a smaller.
        fixture.process(8).has(700).slot(8, CONTEXT);
        check(&fixture, Some(518));
        fixture.process(9).has(510).slot(9, CONTEXT);
        check(&fixture, Some(510));
    }

    #[test]
    fn unstable_or_managed_processes_are_not_measured() {
        let check = |change: fn(&mut Fixture)| {
            let mut fixture = Fixture::share(10_000);
            fixture.process(7).has(1518).slot(7, 1000 + CONTEXT);
            change(&mut fixture);
            assert_eq!(smallest(&fixture.snapshot()), None);
        };
        check(|fixture| _ = fixture.moving(7));
        check(|fixture| _ = fixture.managed(7, 10));
        // Two contexts, less than one, and a charge beyond the memory in use.
        check(|fixture| fixture.slot_mut(7).report.context = 2 * CONTEXT * MIB);
        check(|fixture| fixture.slot_mut(7).report.context = CONTEXT * MIB / 2);
        check(|fixture| fixture.slot_mut(7).report.held = 3000 * MIB);
    }
}
