//! A share at the desk: its pages, what was last written there, and what its account tells of it.

use super::past::Past;
use super::{Had, Planned};
use crate::agent::arbiter;
use crate::agent::bell::{Key, TICK};
use crate::agent::door::{Door, Pulse, Rang};
use crate::agent::orders::{Order, Standing};
use crate::shares::Mapped;
use divvy_pages::PolicyPage;
use divvy_pages::policy::{UNBOUNDED, accrued};
use rustix::thread::futex::{self, Flags};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// For so long a rate holds: an audit may come late, and two may be lost.
pub(super) const GRANT: u64 = 3_500_000_000;
/// Rates that ended so long ago tell nothing any more.
const STALE: u64 = 60_000_000_000;
/// For so long a gate stays closed by itself.
pub(super) const CLOSED: u64 = 200_000_000;
/// Who has so little left, in nanoseconds of GPU time, may be waiting for more.
const SCARCE: i64 = 500_000;
/// So long after it rang a share was seen by an audit, all of it.
const SEEN: u64 = 1_100_000_000;
/// Who launched last so long ago does not work any more: of who keeps others out, and of the rest, to whom it matters
/// less and who sleep longer between launches.
pub(super) const HOLD: u64 = 20_000_000;
pub(super) const RESTS: u64 = 60_000_000;
/// Between two looks whether somebody rests who keeps nobody out, in nanoseconds.
const LOOK: u64 = 40_000_000;

#[derive(Debug)]
pub(super) struct Seat {
    pub(super) key: Key,
    file: (u64, u64),
    page: Mapped,
    account: Arc<File>,
    pub(super) door: Arc<Door>,
    /// Its door was waited at, so that who rang is known.
    pub(super) is_heard: bool,
    /// Nothing can be read from its account: the kernel cannot wait for it either.
    pub(super) is_cut: bool,
    pub(super) standing: Standing,
    pub(super) order: Order,
    granted_until: u64,
    closed_until: u64,
    /// The last call, 0 before the first, and what the doorbell was before it.
    call: u32,
    pub(super) doorbell: u32,
    /// When it rang, or the audit before.
    woke: u64,
    /// When it was last seen to work, by its own word, and whether that is long ago.
    pub(super) works: u64,
    /// When it was looked at last.
    looked: u64,
    pub(super) rests: bool,
    /// It worked, as far as is known.
    pub(super) has_worked: bool,
    past: Past,
    was_closed: bool,
    /// See [`Had`].
    highest: u64,
}

impl Seat {
    /// `is_beside`: there are others on the GPU.
    pub(super) fn new(planned: &Planned, is_beside: bool, now: u64) -> io::Result<Self> {
        let file = identity(&planned.policy)?;
        let page = Mapped::open(&planned.policy)?;
        let mut standing = planned.standing;
        let words = page.page().ok_or(io::ErrorKind::InvalidData)?;
        // Of an agent before this one.
        if words.granted(now.saturating_sub(STALE)).is_some() {
            standing.memory = arbiter::Memory::inherited(words.kept());
        }
        let (closed_until, is_asked, is_doubted) =
            (words.closed_until(), words.call() > 0, words.is_doubted());
        Ok(Self {
            key: planned.key.clone(),
            file,
            page,
            account: Arc::clone(&planned.account),
            door: Arc::new(Door::of(&planned.account)?),
            is_heard: false,
            is_cut: false,
            standing,
            order: Order { rate: None, is_asked, is_beside, is_doubted, memory: standing.memory },
            granted_until: 0,
            closed_until,
            call: 0,
            doorbell: 0,
            woke: 0,
            works: now,
            looked: 0,
            rests: false,
            has_worked: false,
            past: Past::new(now),
            was_closed: false,
            highest: 0,
        })
    }

    pub(super) fn is_of(&self, planned: &Planned) -> bool {
        self.key == planned.key
            && Arc::ptr_eq(&self.account, &planned.account)
            && identity(&planned.policy).is_ok_and(|file| file == self.file)
    }

    fn words(&self) -> Option<&PolicyPage> {
        self.page.page()
    }

    /// An audit found it so.
    pub(super) fn found(self, standing: Standing, now: u64) -> Self {
        // NVML has the word again of who rang a second ago; but high priority is a matter of milliseconds.
        let is_old = self.woke + SEEN <= now && !standing.is_high;
        Self { standing: Standing { is_awake: self.standing.is_awake && !is_old, ..standing }, ..self }
    }

    /// It may have rung, or come to rest.
    pub(super) fn is_due(&self, now: u64, rang: &Rang) -> bool {
        let has_rung = self.order.is_asked && (!self.is_heard || rang.may_be(&self.door));
        // Whoever woke us, a look is due a little sooner than it would be waited for.
        has_rung || self.is_at_work() && self.may_rest().max(self.looked + self.pause() / 2) <= now
    }

    /// Between two looks whether it rests, so that one look serves several.
    pub(super) fn pause(&self) -> u64 {
        if self.standing.is_awake { TICK } else { LOOK }
    }

    /// When it may have come to rest at the earliest, as far as is known.
    pub(super) fn may_rest(&self) -> u64 {
        let hold = if self.standing.is_awake { HOLD } else { RESTS };
        self.works.max(self.woke).saturating_add(hold)
    }

    /// As far as is known.
    pub(super) fn is_at_work(&self) -> bool {
        self.standing.is_awake || self.standing.wants > 0 && !self.rests
    }

    /// Its launches are paced, so that its account says when they come.
    pub(super) fn is_seen(&self) -> bool {
        self.order.rate.is_some()
    }

    /// Whether it is awake that was not, or the other way round.
    pub(super) fn look(&mut self, now: u64) -> bool {
        self.looked = now;
        let read = Pulse::read(&self.account);
        self.is_cut = read.is_err();
        let Ok(pulse) = read else { return false };
        self.works = self.works.max(pulse.refilled.min(now));
        let was = (self.standing.is_awake, self.rests);
        if self.order.is_asked && pulse.doorbell != self.doorbell {
            (self.standing.is_awake, self.woke, self.works, self.rests) = (true, now, now, false);
        } else if let Some(rate) = self.order.rate {
            let left = pulse.balance.saturating_add(accrued(rate, now.saturating_sub(pulse.refilled)));
            let quiet = now.saturating_sub(self.works.max(self.woke));
            self.standing.is_awake &= left < 0 || quiet <= HOLD;
            self.rests = left >= SCARCE && quiet > RESTS;
        }
        // Who begins for the first time has not been seen to rest, if that was soon.
        if self.rests != was.1 || self.standing.is_awake && !self.has_worked {
            self.past.moves(now);
        }
        (self.standing.is_awake, self.rests) != was
    }

    /// Has the page say that; true where it is watched for something else from now on.
    pub(super) fn obey(&mut self, order: Order, is_out: bool, now: u64) -> bool {
        let had = std::mem::replace(&mut self.order, order);
        let was_out = self.closed_until > 0;
        self.highest = self.highest.max(self.rate_of(had)).max(self.rate_of(order));
        if let Some(page) = self.page.page() {
            if let Some(rate) = order.rate
                && (had.rate != order.rate || self.granted_until < now + GRANT - arbiter::SECOND / 2)
            {
                self.granted_until = now + GRANT;
                page.grant(rate, self.granted_until);
                page.keep(order.memory.kept());
            }
            let is_divided = order.rate.is_some() && !self.standing.is_limited;
            // The page has the last word, as it was changed where its class was.
            if is_divided != page.is_divided() {
                page.divide(is_divided);
            }
            if order.is_doubted != page.is_doubted() {
                page.doubt(order.is_doubted);
            }
            if had.is_asked && !order.is_asked {
                page.ask(false, 0);
            }
            // Who sleeps by the rate that was may have more by now.
            if had.rate.is_some_and(|had| order.rate > Some(had.saturating_add(had / 4))) {
                wake(page);
            }
        }
        if order.is_asked && (!had.is_asked || self.call == 0) {
            self.ask(now);
        }
        self.close(is_out, now);
        self.past.holds(&self.order.memory, order.is_beside, is_out, now);
        had.is_asked != order.is_asked || was_out != is_out
    }

    /// What the doorbell says is read before: a launch that comes in between rings.
    fn ask(&mut self, now: u64) {
        let Ok(pulse) = Pulse::read(&self.account) else {
            // Tried again with the next order.
            self.order.is_asked = false;
            return;
        };
        // Of the clock, so that no agent's number is one that an earlier one has used.
        self.call = ((now / 1_000_000) as u32).max(self.call + 1) & (u32::MAX >> 2);
        self.doorbell = pulse.doorbell;
        if let Some(page) = self.words() {
            page.ask(true, self.call);
        }
    }

    pub(super) fn close(&mut self, is_out: bool, now: u64) {
        let Some(page) = self.page.page() else { return };
        if is_out {
            self.was_closed = true;
            if self.closed_until < now + CLOSED * 3 / 4 {
                self.closed_until = now + CLOSED;
                page.close(self.closed_until);
            }
        } else if self.closed_until > 0 {
            self.closed_until = 0;
            page.close(0);
            wake(page);
        }
    }

    /// It is no share to be divided any more.
    pub(super) fn release(&mut self) {
        self.close(false, 0);
        if let Some(page) = self.words() {
            page.divide(false);
            page.ask(false, 0);
        }
    }

    /// What its launches are paced by: without a grant by its record, if at all.
    fn rate_of(&self, order: Order) -> u64 {
        let of_record = if self.standing.is_limited { self.standing.terms.ceiling } else { UNBOUNDED };
        order.rate.unwrap_or(of_record)
    }

    /// Up to which NVML tells what it had.
    pub(super) fn had(&mut self, until: u64) -> Had {
        let ((granted, allowed), company) = self.past.until(until);
        let wanted = std::mem::take(&mut self.was_closed).then_some(self.standing.wants);
        let highest = self.highest;
        self.highest = self.rate_of(self.order);
        Had { memory: self.order.memory.with_granted(granted, allowed), wanted, highest, company }
    }
}

/// Everybody who waits for the share's gate or for its time.
fn wake(page: &PolicyPage) {
    // It fails for no word of ours.
    let _ = futex::wake(page.gate(), Flags::empty(), i32::MAX as u32);
}

fn identity(path: &std::path::Path) -> io::Result<(u64, u64)> {
    path.metadata().map(|meta| (meta.dev(), meta.ino()))
}
