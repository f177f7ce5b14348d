//! What a context takes of a GPU's memory, by the processes of a look: pure.
//!
//! The GPU driver says what a process has, its account what it allocated: the rest is its contexts and modules. Whoever was charged one
//! context has one. Only of whole GPUs: in an instance a context is smaller, by how much is that instance's affair.

use super::lines;
use super::look::{Look, Slot, Use};

/// The least that one takes with what its process loads, in bytes; none where nobody has one who stood still.
pub(super) fn least(look: &Look) -> Option<u64> {
    let of = |usage: &Use| {
        let (process, bytes) = (look.processes.get(&usage.pid)?, usage.bytes?);
        let slots = lines::of(look, process, usage.device);
        let (first, _) = slots.first()?;
        let sum =
            |field: fn(&Slot) -> u64| slots.iter().map(|(_, slot)| field(slot)).fold(0, u64::saturating_add);
        let (held, context) = (sum(|slot| slot.report.held), sum(|slot| slot.report.context));
        // Managed memory is charged whole, and may not be on the device.
        let is_plain = slots.iter().all(|(_, slot)| slot.still && slot.report.managed == 0);
        let is_one = context > 0 && context == look.shares[*first].policy.memory.context;
        (is_plain && is_one).then(|| bytes.checked_sub(held.checked_sub(context)?))?
    };
    look.uses.iter().filter(|usage| usage.device.mig.is_none()).filter_map(of).min()
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_a_process_has_and_did_not_allocate_is_its_context() {
        let check = |scene: &Scene, expected: Option<u64>| {
            assert_eq!(least(&scene.look()), expected.map(|mib| mib * MIB));
        };
        let mut scene = Scene::share(10_000);
        check(&scene, None);
        scene.process(7).has(1518);
        check(&scene, None);
        scene.slot(7, 1000 + CONTEXT);
        check(&scene, Some(518));
        // Another has loaded more, and one less.
        scene.process(8).has(700).slot(8, CONTEXT);
        check(&scene, Some(518));
        scene.process(9).has(510).slot(9, CONTEXT);
        check(&scene, Some(510));
    }

    #[test]
    fn who_moves_or_has_managed_memory_or_says_what_cannot_be_tells_nothing() {
        let check = |change: fn(&mut Scene)| {
            let mut scene = Scene::share(10_000);
            scene.process(7).has(1518).slot(7, 1000 + CONTEXT);
            change(&mut scene);
            assert_eq!(least(&scene.look()), None);
        };
        check(|scene| _ = scene.moving(7));
        check(|scene| _ = scene.managed(7, 10));
        // Two contexts, less than one, and more than it has.
        check(|scene| scene.slot_mut(7).report.context = 2 * CONTEXT * MIB);
        check(|scene| scene.slot_mut(7).report.context = CONTEXT * MIB / 2);
        check(|scene| scene.slot_mut(7).report.held = 3000 * MIB);
    }
}
