//! Charges memory to a share exactly and without locks; any process may be killed at any point.
//!
//! [`AccountPage::settle`] explains when a request is refused, [`SlotRef`] how one page is charged,
//! and [`charge`] how several pages of a device are. The tests run this code in every interleaving
//! of its atomic operations, with a kill of every process at every point (`explore`).

use crate::account::{
    AccountPage, Fault, Identity, ONE_OPERATION, Owner, Slot, SlotState, above, bytes, effective_bytes,
    with_bytes,
};
use crate::sync::Ordering::{AcqRel, Acquire};
use crate::word::Attempt;
use core::fmt;

/// Most pages of one device in one container.
pub const MAX_PAGES: usize = 16;

/// The environment of the protocol: other processes and the clock.
pub trait Peers {
    /// True only if the process is proven dead: it is in the PID namespace of the caller, and it
    /// does not exist, is a zombie, or is another process or another image.
    fn is_dead(&self, identity: &Identity) -> bool;

    /// Waits, longer with every `round`; false after the timeout.
    fn back_off(&self, round: u32) -> bool;

    /// The monotonic clock, in nanoseconds. It is read only to charge the GPU time of a dead
    /// process.
    fn now_ns(&self) -> u64;
}

/// One slot of the calling process, with its page and limit.
///
/// An operation has three steps, each an atomic operation on one word:
/// 1. *begin*: the slot counts one more operation in flight;
/// 2. the total changes, by a compare-exchange that succeeds only if the sum is within the limit;
///    it also counts its changes;
/// 3. *end*: the slot holds the bytes and counts one operation less in flight.
///
/// A free takes the bytes off the slot in its begin, so the total can only be too high, never too
/// low. Step 2 alone decides which process gets the last byte. If two requests do not fit
/// together, one wins. A request that fits is never refused for one that does not, because nothing
/// is taken before it is known to fit.
#[derive(Clone, Copy, Debug)]
pub struct SlotRef<'a> {
    pub page: &'a AccountPage,
    /// The slot index that [`AccountPage::register`] returned.
    pub slot: u16,
    /// The present limit of the policy, in bytes.
    pub limit: u64,
}

/// The request exceeds the limit, or waiting for other processes timed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// All slots belong to living processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSlot;

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request exceeds the limit of the share")
    }
}

impl fmt::Display for NoSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("all slots of the account page belong to living processes")
    }
}

impl core::error::Error for Refused {}
impl core::error::Error for NoSlot {}

/// Charges `bytes` to the pages of one device, which are in the order of their shareIDs.
///
/// All pages of a device add up to one limit. The request goes whole to the first page with enough
/// free bytes. If there is none, it is split: it takes all free bytes of a page, *staying in
/// flight* there, then goes on to the next. When it has enough, it holds all of it at one moment
/// and ends everywhere. If the pages run out, it releases what it took. It is refused if no page
/// that it passed has changed since; otherwise bytes were freed meanwhile, and it starts again.
///
/// A refusal is correct: each passed page was settled and then full until the last page was seen
/// without free bytes. So at that moment the bytes held by others left less than the request. A
/// process that meets a split in flight and does not fit waits, because the split may release its
/// bytes. It waits only for a split further on in the page order, so there is no cycle. A wait
/// takes a few atomic operations. A killed process is proven dead and no longer counts. For a
/// stopped process, [`Peers::back_off`] times out and the request is refused.
///
/// # Errors
/// [`Refused`] if the limit is reached or the wait timed out.
#[inline]
pub fn charge(slots: &[SlotRef<'_>], bytes: u64, peers: &impl Peers) -> Result<(), Refused> {
    let attempt = Attempt::begin();
    if charge_whole(slots, bytes) { Ok(()) } else { charge_split(slots, bytes, peers, attempt) }
}

#[inline]
fn charge_whole(slots: &[SlotRef<'_>], bytes: u64) -> bool {
    bytes == 0 || slots.iter().any(|slot_ref| slot_ref.take(bytes))
}

#[cold]
fn charge_split(
    slots: &[SlotRef<'_>],
    bytes: u64,
    peers: &impl Peers,
    mut attempt: Attempt,
) -> Result<(), Refused> {
    let mut wait = Wait { peers, round: 0 };
    loop {
        let end = split(slots, bytes, &mut wait);
        match end {
            End::Taken => return Ok(()),
            End::Changed if wait.pause(attempt) => {}
            End::Changed | End::TimedOut | End::Refused => {
                let fault = if end == End::Refused { Fault::Refused } else { Fault::TimedOut };
                slots.iter().take(1).for_each(|slot_ref| slot_ref.page.count_fault(fault));
                return Err(Refused);
            }
        }
        attempt = Attempt::begin();
        if charge_whole(slots, bytes) {
            return Ok(());
        }
    }
}

/// Charges `bytes` regardless of the limits, for memory that is allocated already.
pub fn force_charge(slots: &[SlotRef<'_>], bytes: u64) {
    if bytes > 0
        && !slots.iter().any(|slot_ref| slot_ref.take(bytes))
        && let Some(slot_ref) = slots.last()
        && let Some(slot) = slot_ref.page.slot(slot_ref.slot)
    {
        slot.begin();
        slot_ref
            .page
            .total
            .word
            .update(|total| changed(total, crate::account::bytes(total).saturating_add(bytes)));
        slot.end(bytes);
    }
}

/// Releases `bytes`, from the last page on which the process holds any to the first. The page of
/// each allocation is not recorded, since only the sums matter.
#[inline]
pub fn uncharge(slots: &[SlotRef<'_>], bytes: u64) {
    let mut rest = bytes;
    for slot_ref in slots.iter().rev() {
        rest -= slot_ref.free(rest);
        if rest == 0 {
            return;
        }
    }
    slots.iter().take(1).for_each(|slot_ref| slot_ref.page.count_fault(Fault::FreeUnderflow));
}

struct Wait<'a, P> {
    peers: &'a P,
    round: u32,
}

impl<P: Peers> Wait<'_, P> {
    fn pause(&mut self, _attempt: Attempt) -> bool {
        #[cfg(test)]
        crate::steps::repeat_from(_attempt.history);
        self.round = self.round.saturating_add(1);
        self.peers.back_off(self.round)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Taken,
    /// The request exceeds the limit.
    Refused,
    /// Bytes were freed on a page that had been passed.
    Changed,
    /// Waiting for other processes timed out.
    TimedOut,
}

fn split(slots: &[SlotRef<'_>], bytes: u64, wait: &mut Wait<'_, impl Peers>) -> End {
    let mut rest = bytes;
    // The bytes taken from each page, and the total after that.
    let mut passed = [(0_u64, 0_u64); MAX_PAGES];
    let mut end = End::Refused;
    for (slot_ref, (taken, left)) in slots.iter().zip(&mut passed) {
        match slot_ref.pass(rest, wait) {
            Pass::All => {
                rest = 0;
                break;
            }
            Pass::Some { bytes, total } => {
                (*taken, *left) = (bytes, total);
                rest -= bytes;
            }
            Pass::TimedOut => {
                end = End::TimedOut;
                break;
            }
        }
    }
    if rest == 0 {
        for (slot_ref, (taken, _)) in slots.iter().zip(passed).filter(|(_, (taken, _))| *taken > 0) {
            slot_ref.keep(taken);
        }
        return End::Taken;
    }
    let same = |(slot_ref, (_, left)): (&SlotRef<'_>, (u64, u64))| slot_ref.page.total.word.load() == left;
    if end == End::Refused && !slots.iter().zip(passed).all(same) {
        end = End::Changed;
    }
    for (slot_ref, (taken, _)) in slots.iter().zip(passed).filter(|(_, (taken, _))| *taken > 0) {
        slot_ref.release(taken);
    }
    end
}

enum Pass {
    /// The rest fitted on this page and is charged.
    All,
    /// All free bytes of this page were taken; `total` is the total after that. They stay in
    /// flight.
    Some { bytes: u64, total: u64 },
    /// Waiting for other processes timed out.
    TimedOut,
}

impl SlotRef<'_> {
    fn free_bytes(&self, total: u64) -> u64 {
        self.limit.saturating_sub(bytes(total))
    }

    /// Charges all of `amount` to this page if it fits at this moment.
    #[inline]
    fn take(&self, amount: u64) -> bool {
        let Some(slot) = self.page.slot(self.slot) else { return false };
        if self.free_bytes(self.page.total.word.load()) < amount {
            return false;
        }
        slot.begin();
        let more = |total| (self.free_bytes(total) >= amount).then(|| changed(total, bytes(total) + amount));
        let taken = self.page.total.word.change(more).is_ok();
        slot.end(if taken { amount } else { 0 });
        taken
    }

    /// Charges all of `rest` if it fits; otherwise takes the free bytes and stays in flight.
    fn pass(&self, rest: u64, wait: &mut Wait<'_, impl Peers>) -> Pass {
        let Some(slot) = self.page.slot(self.slot) else { return Pass::TimedOut };
        loop {
            let attempt = Attempt::begin();
            let Some(total) = self.page.settle(Some(self.slot), wait.peers) else {
                if wait.pause(attempt) {
                    continue;
                }
                return Pass::TimedOut;
            };
            let free = self.free_bytes(total);
            if free >= rest {
                if self.take(rest) {
                    return Pass::All;
                }
            } else if free == 0 {
                return Pass::Some { bytes: 0, total };
            } else {
                slot.begin();
                let taken = changed(total, bytes(total) + free);
                if self.page.total.word.swap_if(total, taken) {
                    return Pass::Some { bytes: free, total: taken };
                }
                slot.end(0);
            }
        }
    }

    /// Ends a [`SlotRef::pass`] and keeps its bytes charged.
    fn keep(&self, taken: u64) {
        if let Some(slot) = self.page.slot(self.slot) {
            slot.end(taken);
        }
    }

    /// Ends a [`SlotRef::pass`] and releases its bytes.
    fn release(&self, taken: u64) {
        self.page.drop_bytes(taken);
        self.keep(0);
    }

    /// Releases up to `amount` bytes and returns how many.
    #[inline]
    fn free(&self, amount: u64) -> u64 {
        let Some(slot) = self.page.slot(self.slot) else { return 0 };
        if bytes(slot.held.load()) == 0 {
            return 0;
        }
        let before = slot
            .held
            .update(|held| with_bytes(held, bytes(held).saturating_sub(amount)).wrapping_add(ONE_OPERATION));
        let given = bytes(before).min(amount);
        self.page.drop_bytes(given);
        slot.end(0);
        given
    }
}

/// The total with other bytes, counted as one more change.
fn changed(total: u64, bytes: u64) -> u64 {
    with_bytes(total.wrapping_add(ONE_OPERATION), bytes)
}

impl Slot {
    #[inline]
    fn begin(&self) {
        self.held.update(|held| held.wrapping_add(ONE_OPERATION));
    }

    #[inline]
    fn end(&self, charged: u64) {
        self.held.update(|held| {
            let ended = if above(held) == 0 { held } else { held - ONE_OPERATION };
            with_bytes(ended, bytes(ended).saturating_add(charged))
        });
    }
}

impl AccountPage {
    #[inline]
    fn drop_bytes(&self, amount: u64) {
        self.total.word.update(|total| changed(total, bytes(total).saturating_sub(amount)));
    }
}

impl AccountPage {
    /// Assigns a slot to this process and returns its index. Exec freed the memory of an earlier
    /// image of the process, so the slot of that image is released.
    ///
    /// # Errors
    /// [`NoSlot`] if all slots belong to living processes.
    pub fn register(&self, me: &Identity, peers: &impl Peers) -> Result<u16, NoSlot> {
        for slot in self.slots() {
            let owner = slot.owner();
            if owner.state() == SlotState::Live && owner.pid() == me.pid && slot.is_before_exec(me) {
                slot.owner.swap_if(owner.0, owner.becomes(SlotState::Dead).0);
            }
        }
        if let Some(index) = self.claim(me) {
            return Ok(index);
        }
        self.reap(peers);
        self.reconcile(None, peers);
        self.claim(me).ok_or_else(|| {
            self.count_fault(Fault::NoSlot);
            NoSlot
        })
    }

    fn claim(&self, me: &Identity) -> Option<u16> {
        for (slot, index) in self.slots.iter().zip(0_u16..) {
            let owner = slot.owner();
            let claimed = Owner::new(me.pid, owner.generation(), SlotState::Claimed);
            if owner.state() == SlotState::Free && slot.owner.swap_if(owner.0, claimed.0) {
                slot.init(me);
                self.used_slots.word.update(|used_slots| used_slots.max(u64::from(index) + 1));
                slot.owner.store(claimed.becomes(SlotState::Live).0);
                return Some(index);
            }
        }
        None
    }

    /// Frees the slots of proven dead processes that hold nothing, and marks the others dead.
    fn reap(&self, peers: &impl Peers) {
        for slot in self.slots() {
            let owner = slot.owner();
            let dead = owner.becomes(SlotState::Dead);
            if owner.state() == SlotState::Live
                && slot.is_dead(owner, peers)
                && slot.owner.swap_if(owner.0, dead.0)
                && slot.held.load() == 0
            {
                self.free(slot, dead, None, peers);
            }
        }
    }

    /// Tries once to correct the total and to free the slots of dead processes; false if a
    /// concurrent change interfered. `by` is the slot of the caller, if it has one.
    pub fn reconcile(&self, by: Option<u16>, peers: &impl Peers) -> bool {
        self.settle(by, peers).is_some()
    }

    /// Frees the slot of a dead owner, and charges the share for its unpaid GPU time. The time is
    /// also added to the slot of the caller, so the node sees it as charged. It is read before the
    /// slot is freed, because a new owner may take the slot at once.
    fn free(&self, slot: &Slot, dead: Owner, by: Option<u16>, peers: &impl Peers) {
        let (owed, (begin, end)) = slot.unpaid(peers.now_ns());
        if slot.owner.swap_if(dead.0, dead.next().0) && (owed > 0 || end > begin) {
            let unpaid = i64::try_from(owed + self.charge_interval(begin, end)).unwrap_or(i64::MAX);
            let less = |balance: i64| Some(balance.saturating_sub(unpaid));
            let _ = self.balance().fetch_update(AcqRel, Acquire, less);
            if let Some(slot) = by.and_then(|by| self.slot(by)) {
                slot.add_gpu_time(unpaid, 0);
            }
        }
    }

    /// The total word of a settled page, or `None` if a concurrent change interfered. **A request
    /// is refused only on a settled page.**
    ///
    /// A killed process leaves its slot behind, and possibly bytes in the total that no slot
    /// accounts for. So this reads the total and walks the slots. Slots of proven dead processes
    /// are marked dead and do not count. If an operation is in flight, the page is not settled. The
    /// sum of the living must be the total, or becomes the total by a compare-exchange from the
    /// word that was read. A refusal is final only if the total still is that word afterwards.
    ///
    /// This is correct: an operation that changes a slot begins before it changes the total. If the
    /// walk did not see it in flight, it changes the total after the walk saw its slot, and then
    /// the last check fails. So the sum was the true one at that moment. Nothing is subtracted
    /// twice, however many processes repair at once, and a repairing process may be killed as well.
    ///
    /// A dead slot is reused only after the page was settled with the slot dead, so its bytes are
    /// out of the total. The generation in the owner word keeps a slow repairer from changing the
    /// next owner's slot.
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
                    let is_reported_dead = line.owner == owner && line.dead;
                    let weight = effective_bytes(owner.0, held, line);
                    let gone = is_reported_dead || (held > 0 || weight > 0) && slot.is_dead(owner, peers);
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
                dead.push(slot, owner.becomes(SlotState::Dead));
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

/// The dead slots that a walk found, with their owners, up to 16. Others do not count either, and a
/// later walk frees them.
struct Dead<'a> {
    slots: [Option<(&'a Slot, Owner)>; 16],
    count: usize,
}

impl<'a> Dead<'a> {
    fn push(&mut self, slot: &'a Slot, owner: Owner) {
        if let Some(entry) = self.slots.get_mut(self.count) {
            *entry = Some((slot, owner));
        }
        self.count += 1;
    }
}

impl Slot {
    fn is_dead(&self, owner: Owner, peers: &impl Peers) -> bool {
        let identity = self.identity();
        identity.pid == owner.pid() && peers.is_dead(&identity)
    }

    /// True if the slot belongs to the image that this process had before exec. A slot of the same
    /// image belongs to another copy of the library in this process, and both are valid.
    fn is_before_exec(&self, me: &Identity) -> bool {
        let identity = self.identity();
        let same_process =
            identity.pid == me.pid && identity.namespace == me.namespace && identity.start == me.start;
        same_process && identity.image != me.image && identity.image != 0 && me.image != 0
    }
}

/// Charges memory that must stay on the device (not managed memory), for a share with memory
/// over-commit. The share may hold `soft` bytes of it, and `slot_ref.limit` bytes in all.
///
/// Both limits apply to one total: `limit` to all bytes, `soft` to all but managed memory. The slots
/// hold the managed bytes. A process updates its slot after the total when they grow, and before it
/// when they shrink. If the total has the same word before and after the slots are read, their sum is
/// at most the managed bytes at that time. A free in between would have changed the total. The
/// charge then succeeds only from that same total. An allocation in progress counts as device memory
/// until the slot says otherwise.
///
/// # Errors
/// [`Refused`] as for [`charge`].
#[inline]
pub fn charge_fixed(
    slot_ref: &SlotRef<'_>,
    soft: u64,
    amount: u64,
    peers: &impl Peers,
) -> Result<(), Refused> {
    let attempt = Attempt::begin();
    // The request fits even if no memory is managed.
    let least = SlotRef { limit: soft.min(slot_ref.limit), ..*slot_ref };
    if amount == 0 || least.take(amount) { Ok(()) } else { settled(slot_ref, soft, amount, peers, attempt) }
}

#[cold]
fn settled(
    slot_ref: &SlotRef<'_>,
    soft: u64,
    amount: u64,
    peers: &impl Peers,
    mut attempt: Attempt,
) -> Result<(), Refused> {
    let mut wait = Wait { peers, round: 0 };
    let Some(slot) = slot_ref.page.slot(slot_ref.slot) else { return Err(Refused) };
    loop {
        let Some(total) = slot_ref.page.settle(Some(slot_ref.slot), peers) else {
            if wait.pause(attempt) {
                attempt = Attempt::begin();
                continue;
            }
            slot_ref.page.count_fault(Fault::TimedOut);
            return Err(Refused);
        };
        let limit = slot_ref.limit.min(soft.saturating_add(slot_ref.page.managed()));
        if limit.saturating_sub(bytes(total)) >= amount {
            slot.begin();
            let taken = slot_ref.page.total.word.swap_if(total, changed(total, bytes(total) + amount));
            slot.end(if taken { amount } else { 0 });
            if taken {
                return Ok(());
            }
        } else if slot_ref.page.total.word.load() == total {
            slot_ref.page.count_fault(Fault::Refused);
            return Err(Refused);
        }
    }
}

impl AccountPage {
    /// Managed bytes of the living processes, by their slots.
    fn managed(&self) -> u64 {
        let managed = self.slots().iter().filter_map(|slot| {
            let owner = slot.owner();
            let line = slot.line();
            let is_dead = line.owner == owner && line.dead;
            (owner.state() == SlotState::Live && !is_dead).then(|| slot.managed())
        });
        managed.fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests;
