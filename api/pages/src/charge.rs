//! Charging a share exactly, without locks, though any process may be killed at any point.
//!
//! # One page
//!
//! An operation of a process is three steps, each one atomic operation on one word:
//! 1. *begin*: its slot counts one more operation in flight;
//! 2. the total of the page changes, by a compare-exchange that succeeds only where the
//!    sum fits the limit, and counts its changes beside the bytes;
//! 3. *end*: its slot holds the bytes, and one operation less is in flight.
//!
//! (A give-back takes the bytes off the slot with its begin, so that a drift is always
//! towards a total that is too high.) Step 2 alone decides who gets the last byte:
//! of two racers that do not fit together one wins, and a request that fits is never
//! refused because of one that does not, since nothing is taken before it is known to fit.
//!
//! A process that is killed leaves its slot behind, and between 2 and 3 also bytes in
//! the total that no slot explains. So **a request is refused only on a settled view**
//! of the page ([`AccountPage::settle`]): read the total; walk the slots; proven-dead owners
//! are marked dead and count for nothing; nothing is in flight; the sum of the living
//! is the total, or is made the total by a compare-exchange from the word that was read;
//! and when the refusal is final the total is still that word. Any operation that changes a slot's
//! bytes begins before it changes the total, so if it was not seen in flight it changes
//! the total after the walk saw its slot, and then the last step fails. The sum is hence
//! the true one at that moment. No order of two counters has to be trusted, nothing is
//! subtracted twice however many repair at once, and a repairer may be killed as well.
//!
//! A dead slot is given to the next owner only by one who settled the page after having
//! seen it dead: its bytes are then out of the total. The generation in the owner word
//! keeps a slow repairer from touching the next owner.
//!
//! # Several pages
//!
//! All pages that name one device add up to one limit. A request goes whole to the first
//! page with room; only if none has, it is split. A split takes pages in their order (by
//! shareID: the same in every process): all the room of a page, *staying in flight* there,
//! then the next. At the last one it needs, it has everything at one moment: it ends
//! everywhere. If the pages end first, it gives back and is refused, if no page that it
//! passed has changed since; otherwise something was freed meanwhile and it starts again.
//!
//! Refused is right: each page it passed was settled and then full until the last page
//! was seen without room, so at that moment the sum of what others hold for good, and of
//! what it holds itself, leaves less than the request. Whoever comes upon a page where a split is in
//! flight, and does not fit, waits instead of failing: the split may yet give back.
//! It waits only for one that is further on in the order of pages, so there is no circle.
//! Waiting is for the length of a few atomic operations unless the other was killed (then
//! it is proven dead, by its peers or by the node, and counts for nothing) or stopped
//! (then the deadline of [`Peers::pause`] ends the wait, and the request is refused).
//!
//! The test of all this runs this very code in every interleaving of its atomic
//! operations, with every process killed at every point (`explore`).

use crate::account::{AccountPage, Fault, Identity, ONE, Slot, above, bytes, with_bytes};
use crate::word::Attempt;
use core::fmt;
pub use fixed::charge_fixed;

/// The most pages that one device can have in one container.
pub const SEATS: usize = 16;

/// What an operation asks of the system around it.
pub trait Peers {
    /// True only with proof: `who` is of the caller's own pid namespace and that process
    /// does not exist, is a zombie, or is another one or another image by now.
    fn gone(&self, who: &Identity) -> bool;

    /// Waits a little, longer with every `round`; false when patience is over.
    fn pause(&self, round: u32) -> bool;

    /// The monotonic clock, in nanoseconds: to charge what a dead process had until it died. Asked for
    /// only where there is one.
    fn now(&self) -> u64;
}

/// The caller's place on one page.
#[derive(Clone, Copy, Debug)]
pub struct Seat<'a> {
    pub page: &'a AccountPage,
    /// The slot that [`AccountPage::register`] gave to this process.
    pub slot: u16,
    /// What the policy allows now, in bytes.
    pub limit: u64,
}

/// The request does not fit, or patience with others was over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// All slots belong to living processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSlot;

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the share has no room for the request")
    }
}

impl fmt::Display for NoSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("all slots of the account page belong to living processes")
    }
}

impl core::error::Error for Full {}
impl core::error::Error for NoSlot {}

/// Charges `bytes` to the seats, which are all pages of one device in the order of their
/// shareIDs: whole to the first that has room, split where none has.
#[inline]
pub fn charge(seats: &[Seat<'_>], bytes: u64, peers: &impl Peers) -> Result<(), Full> {
    let attempt = Attempt::begin();
    if is_whole(seats, bytes) { Ok(()) } else { charge_split(seats, bytes, peers, attempt) }
}

#[inline]
fn is_whole(seats: &[Seat<'_>], bytes: u64) -> bool {
    bytes == 0 || seats.iter().any(|seat| seat.take(bytes))
}

#[cold]
fn charge_split(
    seats: &[Seat<'_>],
    bytes: u64,
    peers: &impl Peers,
    mut attempt: Attempt,
) -> Result<(), Full> {
    let mut patience = Patience { peers, round: 0 };
    loop {
        let end = split(seats, bytes, &mut patience);
        match end {
            End::Taken => return Ok(()),
            End::Changed if patience.pause(attempt) => {}
            End::Changed | End::Waited | End::Full => {
                let fault = if end == End::Full { Fault::Refused } else { Fault::Waited };
                seats.iter().take(1).for_each(|seat| seat.page.count(fault));
                return Err(Full);
            }
        }
        attempt = Attempt::begin();
        if is_whole(seats, bytes) {
            return Ok(());
        }
    }
}

/// Charges `bytes` whatever the limits say: for what is there already.
pub fn force(seats: &[Seat<'_>], bytes: u64) {
    if bytes > 0
        && !seats.iter().any(|seat| seat.take(bytes))
        && let Some(seat) = seats.last()
        && let Some(slot) = seat.page.slot(seat.slot)
    {
        slot.begin();
        seat.page
            .total
            .word
            .update(|total| changed(total, crate::account::bytes(total).saturating_add(bytes)));
        slot.end(bytes);
    }
}

/// Gives back `bytes`, from the last seat on which the process holds any to the first:
/// which page an allocation was charged to is not kept, as only the sums matter.
#[inline]
pub fn uncharge(seats: &[Seat<'_>], bytes: u64) {
    let mut rest = bytes;
    for seat in seats.iter().rev() {
        rest -= seat.give(rest);
        if rest == 0 {
            return;
        }
    }
    seats.iter().take(1).for_each(|seat| seat.page.count(Fault::Unheld));
}

struct Patience<'a, P> {
    peers: &'a P,
    round: u32,
}

impl<P: Peers> Patience<'_, P> {
    fn pause(&mut self, _attempt: Attempt) -> bool {
        #[cfg(test)]
        crate::explore::again(_attempt);
        self.round = self.round.saturating_add(1);
        self.peers.pause(self.round)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Taken,
    /// It does not fit.
    Full,
    /// Something was freed on a page that had been passed.
    Changed,
    /// Patience with others was over.
    Waited,
}

fn split(seats: &[Seat<'_>], bytes: u64, patience: &mut Patience<'_, impl Peers>) -> End {
    let mut rest = bytes;
    // What was taken of each page, and its total as it was left.
    let mut passed = [(0_u64, 0_u64); SEATS];
    let mut end = End::Full;
    for (seat, (taken, left)) in seats.iter().zip(&mut passed) {
        match seat.pass(rest, patience) {
            Pass::All => {
                rest = 0;
                break;
            }
            Pass::Some { bytes, total } => {
                (*taken, *left) = (bytes, total);
                rest -= bytes;
            }
            Pass::Waited => {
                end = End::Waited;
                break;
            }
        }
    }
    if rest == 0 {
        for (seat, (taken, _)) in seats.iter().zip(passed).filter(|(_, (taken, _))| *taken > 0) {
            seat.keep(taken);
        }
        return End::Taken;
    }
    let same = |(seat, (_, left)): (&Seat<'_>, (u64, u64))| seat.page.total.word.load() == left;
    if end == End::Full && !seats.iter().zip(passed).all(same) {
        end = End::Changed;
    }
    for (seat, (taken, _)) in seats.iter().zip(passed).filter(|(_, (taken, _))| *taken > 0) {
        seat.give_up(taken);
    }
    end
}

enum Pass {
    /// The rest fitted here and is charged.
    All,
    /// So much was taken, all there was, and this is the total since. It stays in flight.
    Some { bytes: u64, total: u64 },
    /// Patience was over.
    Waited,
}

impl Seat<'_> {
    fn room(&self, total: u64) -> u64 {
        self.limit.saturating_sub(bytes(total))
    }

    /// Charges all of `amount` here, if it fits at this moment.
    #[inline]
    fn take(&self, amount: u64) -> bool {
        let Some(slot) = self.page.slot(self.slot) else { return false };
        if self.room(self.page.total.word.load()) < amount {
            return false;
        }
        slot.begin();
        let more = |total| (self.room(total) >= amount).then(|| changed(total, bytes(total) + amount));
        let taken = self.page.total.word.change(more).is_ok();
        slot.end(if taken { amount } else { 0 });
        taken
    }

    /// Charges all of `rest` if it fits, otherwise takes what room there is and stays in flight.
    fn pass(&self, rest: u64, patience: &mut Patience<'_, impl Peers>) -> Pass {
        let Some(slot) = self.page.slot(self.slot) else { return Pass::Waited };
        loop {
            let attempt = Attempt::begin();
            let Some(total) = self.page.settle(Some(self.slot), patience.peers) else {
                if patience.pause(attempt) {
                    continue;
                }
                return Pass::Waited;
            };
            let room = self.room(total);
            if room >= rest {
                if self.take(rest) {
                    return Pass::All;
                }
            } else if room == 0 {
                return Pass::Some { bytes: 0, total };
            } else {
                slot.begin();
                let taken = changed(total, bytes(total) + room);
                if self.page.total.word.swap_if(total, taken) {
                    return Pass::Some { bytes: room, total: taken };
                }
                slot.end(0);
            }
        }
    }

    /// What [`Seat::pass`] took is charged for good.
    fn keep(&self, taken: u64) {
        if let Some(slot) = self.page.slot(self.slot) {
            slot.end(taken);
        }
    }

    /// What [`Seat::pass`] took is given back.
    fn give_up(&self, taken: u64) {
        self.page.drop_bytes(taken);
        self.keep(0);
    }

    /// Gives back up to `amount`; how much it was.
    #[inline]
    fn give(&self, amount: u64) -> u64 {
        let Some(slot) = self.page.slot(self.slot) else { return 0 };
        if bytes(slot.held.load()) == 0 {
            return 0;
        }
        let before =
            slot.held.update(|held| with_bytes(held, bytes(held).saturating_sub(amount)).wrapping_add(ONE));
        let given = bytes(before).min(amount);
        self.page.drop_bytes(given);
        slot.end(0);
        given
    }
}

/// The total with other bytes, counted as a change.
fn changed(total: u64, bytes: u64) -> u64 {
    with_bytes(total.wrapping_add(ONE), bytes)
}

impl Slot {
    #[inline]
    fn begin(&self) {
        self.held.update(|held| held.wrapping_add(ONE));
    }

    #[inline]
    fn end(&self, charged: u64) {
        self.held.update(|held| {
            let ended = if above(held) == 0 { held } else { held - ONE };
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

mod fixed;
mod slots;
#[cfg(test)]
mod tests;
