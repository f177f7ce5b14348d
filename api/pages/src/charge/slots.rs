//! Who has a slot on a page, and what becomes of the slots of the dead.
//!
//! A slot is free, claimed for a moment, its owner's, or a dead one's. One that held bytes is freed only by who has settled the
//! page after having seen it dead ([`super`] says why); whoever frees one charges the share what its owner had of the GPU and did not pay.

use super::{NoSlot, Peers, changed};
use crate::account::{
    AccountPage, Fault, Identity, Owner, Slot, SlotState, above, bytes, weighs, with_bytes,
};
use crate::sync::Ordering::{AcqRel, Acquire};

impl AccountPage {
    /// Gives this process a slot. An image of the same process before exec has lost its
    /// memory with exec: its slot is given up.
    pub fn register(&self, me: &Identity, peers: &impl Peers) -> Result<u16, NoSlot> {
        for slot in self.slots() {
            let owner = slot.owner();
            if owner.state() == SlotState::Live && owner.pid() == me.pid && slot.was(me) {
                slot.owner.swap_if(owner.0, owner.becomes(SlotState::Dead).0);
            }
        }
        if let Some(index) = self.claim(me) {
            return Ok(index);
        }
        self.bury(peers);
        self.tidy(None, peers);
        self.claim(me).ok_or_else(|| {
            self.count(Fault::NoSlot);
            NoSlot
        })
    }

    fn claim(&self, me: &Identity) -> Option<u16> {
        for (slot, index) in self.slots.iter().zip(0_u16..) {
            let owner = slot.owner();
            let claimed = Owner::new(me.pid, owner.generation(), SlotState::Claimed);
            if owner.state() == SlotState::Free && slot.owner.swap_if(owner.0, claimed.0) {
                slot.introduce(me);
                self.high.word.update(|high| high.max(u64::from(index) + 1));
                slot.owner.store(claimed.becomes(SlotState::Live).0);
                return Some(index);
            }
        }
        None
    }

    /// Frees the slots of the proven dead that held nothing, and marks the others dead.
    fn bury(&self, peers: &impl Peers) {
        for slot in self.slots() {
            let owner = slot.owner();
            let dead = owner.becomes(SlotState::Dead);
            if owner.state() == SlotState::Live
                && slot.gone(owner, peers)
                && slot.owner.swap_if(owner.0, dead.0)
                && slot.held.load() == 0
            {
                self.free(slot, dead, None, peers);
            }
        }
    }

    /// One attempt to make the total true and to free the slots of the dead; false where something
    /// came between. By the process in that slot, if it has one.
    pub fn tidy(&self, by: Option<u16>, peers: &impl Peers) -> bool {
        self.settle(by, peers).is_some()
    }

    /// Frees the slot of a dead owner, and charges the share the GPU time that it had and did not pay; for the node it is whoever
    /// does so that was charged. Read before: as soon as it is free the slot is another's.
    fn free(&self, slot: &Slot, dead: Owner, by: Option<u16>, peers: &impl Peers) {
        let unpaid = i64::try_from(slot.unpaid(peers.now())).unwrap_or(i64::MAX);
        if slot.owner.swap_if(dead.0, dead.next().0) && unpaid > 0 {
            let less = |balance: i64| Some(balance.saturating_sub(unpaid));
            let _ = self.balance().fetch_update(AcqRel, Acquire, less);
            if let Some(slot) = by.and_then(|by| self.slot(by)) {
                slot.worked(unpaid, 0);
            }
        }
    }

    /// The total word, after a walk in which nothing was in flight, no owner was dead and the
    /// total was the sum of the slots. It is so at one moment if the total is still that word
    /// after the walk, which whoever acts on it checks. `None` where something came between.
    pub(super) fn settle(&self, by: Option<u16>, peers: &impl Peers) -> Option<u64> {
        let seen = self.total.word.load();
        let mut sum = 0_u64;
        let mut in_flight = false;
        let mut dead = Dead { slots: [None; 16], count: 0 };
        for slot in self.slots() {
            let owner = slot.owner();
            let gone = match owner.state() {
                SlotState::Free | SlotState::Claimed => continue,
                SlotState::Dead => true,
                SlotState::Live => {
                    let held = slot.held.load();
                    let line = slot.line();
                    let told = line.about == owner && line.dead;
                    let weight = weighs(owner.0, held, line);
                    let gone = told || (held > 0 || weight > 0) && slot.gone(owner, peers);
                    if !gone {
                        in_flight |= above(held) > 0;
                        sum = sum.saturating_add(weight);
                    } else if !slot.owner.swap_if(owner.0, owner.becomes(SlotState::Dead).0) {
                        in_flight = true;
                    }
                    gone
                }
            };
            if gone {
                dead.saw(slot, owner.becomes(SlotState::Dead));
            }
        }
        if in_flight {
            return None;
        }
        if bytes(seen) == bytes(with_bytes(0, sum)) && dead.count == 0 {
            return Some(seen);
        }
        let settled = changed(seen, sum);
        if !self.total.word.swap_if(seen, settled) {
            return None;
        }
        for (slot, owner) in dead.slots.into_iter().flatten() {
            self.free(slot, owner, by, peers);
        }
        Some(settled)
    }
}

/// The dead slots that a walk saw, with their owners, as far as there is room: the others
/// count for nothing either, and are freed by a later walk.
struct Dead<'a> {
    slots: [Option<(&'a Slot, Owner)>; 16],
    count: usize,
}

impl<'a> Dead<'a> {
    fn saw(&mut self, slot: &'a Slot, owner: Owner) {
        if let Some(room) = self.slots.get_mut(self.count) {
            *room = Some((slot, owner));
        }
        self.count += 1;
    }
}

impl Slot {
    fn gone(&self, owner: Owner, peers: &impl Peers) -> bool {
        let who = self.identity();
        who.pid == owner.pid() && peers.gone(&who)
    }

    /// True where the slot is of the image that this process had before exec. (One of the same image is
    /// another copy of the library in this process: both hold what they hold.)
    fn was(&self, me: &Identity) -> bool {
        let who = self.identity();
        let same_process = who.pid == me.pid && who.namespace == me.namespace && who.start == me.start;
        same_process && who.image != me.image && who.image != 0 && me.image != 0
    }
}
