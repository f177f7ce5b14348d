//! A share at the desk: its pages, what was last written there, and what its account tells of it.

use super::past::Past;
use super::{Had, Planned};
use crate::agent::arbiter;
use crate::agent::bell::{Key, TICK};
use crate::agent::door::{Door, Pulse};
use crate::agent::orders::{Order, SPARE, Standing};
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
/// Who has so little left, in nanoseconds of GPU time, may be waiting for more.
const SCARCE: i64 = 500_000;
/// So long after it rang a share was seen by an audit, all of it.
const SEEN: u64 = 1_100_000_000;
/// Who launched last so long ago does not work any more: of who keeps others out, and of the rest, to whom it matters
/// less and who sleep longer between launches.
pub(super) const HOLD: u64 = 15_000_000;
pub(super) const RESTS: u64 = 75_000_000;
/// Who rings again so soon after it came to rest comes and goes: the next time it is given twice as long, up to the most.
/// It is met on the mean of a second, and to lend what it leaves for a moment would have the pages of all others change.
const SOON: u64 = 2 * RESTS;
pub(super) const MOST: u64 = 4 * RESTS;
/// Who has worked for long works on: it is given such a part of that time before it rests, up to the most, so that no more of
/// what it leaves is lost.
pub(super) const STEADY: u64 = 32;
/// Who has just rung is taken to launch for so long: a look that goes by the first launch alone would be too soon.
pub(super) const BURST: u64 = 5_000_000;
/// For so long a look waits for something else that wakes the thread: at those who are awake, and at the rest.
pub(super) const WAITS: [u64; 2] = [6_000_000, 15_000_000];
/// Between two looks at one of the rest, in nanoseconds.
const LOOK: u64 = 20_000_000;
/// One of them is looked at so much sooner where somebody looks at its neighbours.
const SOONER: u64 = 5_000_000;
/// A gate that opens by itself within so long is left to that.
pub(super) const PATIENCE: u64 = HOLD;

/// Until when a gate is closed, and when that is to be said anew; never, if it opens then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Out {
    pub(super) until: u64,
    pub(super) again: u64,
}

impl Out {
    fn opens(self) -> bool {
        self.again > self.until
    }
}

#[derive(Debug)]
pub(super) struct Seat {
    pub(super) key: Key,
    file: (u64, u64),
    page: Mapped,
    account: Arc<File>,
    pub(super) door: Arc<Door>,
    /// Nothing can be read from its account: the kernel cannot wait for it either.
    pub(super) is_cut: bool,
    pub(super) standing: Standing,
    pub(super) order: Order,
    /// Whether its page tells it that it is divided and that it is doubted; none: the page has the last word, as it may have been
    /// changed where its class was. At each order it would be the one thing that is read of a page, and is in no cache.
    says: Option<[bool; 2]>,
    granted_until: u64,
    closed_until: u64,
    /// It is kept out, and until when is not known.
    is_out: bool,
    /// When its gate was opened last, or opens by itself.
    opened: u64,
    /// The last call, 0 before the first, and what the doorbell was before it.
    call: u32,
    pub(super) doorbell: u32,
    /// When it rang, or the audit before.
    pub(super) woke: u64,
    /// When it was last seen to work, by its own word, and whether that is long ago.
    pub(super) works: u64,
    /// When it was looked at last.
    looked: u64,
    pub(super) rests: bool,
    /// Since when, and how long it is to launch nothing before that is so.
    rested: u64,
    patience: u64,
    /// It matters to nobody when it comes to rest.
    pub(super) is_moot: bool,
    /// It worked, as far as is known.
    pub(super) has_worked: bool,
    /// Whether it does, and since when that is so.
    stays: (bool, u64),
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
            is_cut: false,
            standing,
            order: Order { rate: None, is_asked, is_beside, is_doubted, memory: standing.memory },
            says: None,
            granted_until: 0,
            closed_until,
            is_out: closed_until > 0,
            opened: 0,
            call: 0,
            doorbell: 0,
            woke: 0,
            works: now,
            looked: 0,
            rests: false,
            rested: 0,
            patience: RESTS,
            is_moot: false,
            has_worked: false,
            stays: (false, now),
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
        let standing = Standing { is_awake: self.standing.is_awake && !is_old, ..standing };
        Self { standing, says: None, ..self }
    }

    /// Whether it is to be looked at for what it may have come to, where somebody looks at its GPU.
    pub(super) fn is_due(&self, now: u64) -> bool {
        let soon = if self.standing.is_awake { 0 } else { SOONER };
        self.is_watched() && self.due() <= now.saturating_add(soon)
    }

    /// It works and may come to rest. Who is kept out cannot show what it wants.
    pub(super) fn is_watched(&self) -> bool {
        self.is_at_work() && self.is_seen() && !self.is_out
    }

    /// From when on a look may find that it has come to rest, as far as is known.
    pub(super) fn due(&self) -> u64 {
        let (rests, pause) = match self.standing.is_awake {
            true if self.has_just_rung() => (0, BURST + BURST / 2),
            true => {
                let rests = self.works.max(self.woke.saturating_add(BURST)).saturating_add(HOLD);
                // Who is in debt does not rest by then.
                (rests, if rests > self.looked { 0 } else { TICK })
            }
            false => (self.works.max(self.woke).saturating_add(self.patience()), LOOK),
        };
        // Who was kept out has not shown yet whether it goes on.
        rests.max(self.looked + pause).max(self.opened + TICK)
    }

    /// It keeps others out, and has not been looked at since it rang. The first look at such a one comes sooner: what is short is
    /// over by then, and the gates open by themselves if it does not ring again.
    fn has_just_rung(&self) -> bool {
        self.standing.is_high && self.looked == self.woke
    }

    /// How long it is to launch nothing before it rests.
    fn patience(&self) -> u64 {
        let (is_at_work, since) = self.stays;
        let worked = if is_at_work { self.works.saturating_sub(since) } else { 0 };
        if self.is_moot { MOST } else { self.patience.max(MOST.min(worked / STEADY)) }
    }

    /// When it is looked at for that though nobody else is.
    pub(super) fn late(&self) -> u64 {
        if self.standing.is_awake && self.has_just_rung() {
            return self.woke.saturating_add(BURST + HOLD - SPARE);
        }
        self.due().saturating_add(WAITS[usize::from(!self.standing.is_awake)])
    }

    /// As far as is known.
    pub(super) fn is_at_work(&self) -> bool {
        self.standing.is_awake || self.standing.wants > 0 && !self.rests
    }

    /// Where it has come to rest, or begun to work: how long it had not.
    pub(super) fn came_or_went(&mut self, now: u64) -> Option<u64> {
        let (was, since) = self.stays;
        (was != self.is_at_work()).then(|| {
            self.stays = (!was, now);
            now.saturating_sub(since)
        })
    }

    /// Its launches are paced, so that its account says when they come.
    pub(super) fn is_seen(&self) -> bool {
        self.order.rate.is_some()
    }

    /// Whether it is awake that was not, or the other way round.
    pub(super) fn look(&mut self, now: u64) -> bool {
        let has_just_rung = self.has_just_rung();
        self.looked = now;
        let read = Pulse::read(&self.account);
        self.is_cut = read.is_err();
        let Ok(pulse) = read else { return false };
        self.works = self.works.max(pulse.refilled.min(now));
        let was = (self.standing.is_awake, self.rests);
        if self.order.is_asked && pulse.doorbell != self.doorbell {
            let is_soon = self.rests && now < self.rested + SOON;
            self.patience = if is_soon { MOST.min(2 * self.patience) } else { RESTS };
            (self.standing.is_awake, self.woke, self.works, self.rests) = (true, now, now, false);
        } else if let Some(rate) = self.order.rate {
            let left = pulse.balance.saturating_add(accrued(rate, now.saturating_sub(pulse.refilled)));
            let quiet = now.saturating_sub(self.works.max(self.woke));
            let goes_on = match has_just_rung {
                true => quiet <= BURST || self.works > self.woke.saturating_add(BURST),
                false => quiet < HOLD,
            };
            self.standing.is_awake &= left < 0 || goes_on;
            self.rests = left >= SCARCE && quiet > self.patience();
            if self.rests && !was.1 {
                self.rested = now;
            }
        }
        self.doorbell = pulse.doorbell;
        // Who begins for the first time has not been seen to rest, if that was soon.
        if self.rests != was.1 || self.standing.is_awake && !self.has_worked {
            self.past.moves(now);
        }
        (self.standing.is_awake, self.rests) != was
    }

    /// Has the page say that, and that its gate is closed, if it is.
    pub(super) fn obey(&mut self, order: Order, out: Option<Out>, now: u64) {
        let had = std::mem::replace(&mut self.order, order);
        self.highest = self.highest.max(self.rate_of(had)).max(self.rate_of(order));
        if let Some(page) = self.page.page() {
            if let Some(rate) = order.rate
                && (had.rate != order.rate || self.granted_until < now + GRANT - arbiter::SECOND / 2)
            {
                self.granted_until = now + GRANT;
                page.grant(rate, self.granted_until);
                page.keep(order.memory.kept());
            }
            let says = [order.rate.is_some() && !self.standing.is_limited, order.is_doubted];
            if self.says.replace(says) != Some(says) {
                let [is_divided, is_doubted] = says;
                if is_divided != page.is_divided() {
                    page.divide(is_divided);
                }
                if is_doubted != page.is_doubted() {
                    page.doubt(is_doubted);
                }
            }
            if had.is_asked && !order.is_asked {
                page.ask(false, 0);
            }
            // Who sleeps by the rate that was may have more by now; a little is not worth to be woken.
            if had.rate.is_some_and(|had| order.rate > Some(had.saturating_add(had / 2))) {
                wake(page);
            }
        }
        if order.is_asked && (!had.is_asked || self.call == 0) {
            self.ask(now);
        }
        self.close(out.map(|out| out.until), now);
        self.is_out = out.is_some_and(|out| !out.opens());
        self.past.holds(&self.order.memory, order.is_beside, out.is_some(), now);
        if let Some(out) = out.filter(|out| out.opens()) {
            self.opened = out.until;
            self.past.holds(&self.order.memory, order.is_beside, false, out.until);
        }
    }

    /// What the doorbell says is read before: a launch that comes in between rings.
    fn ask(&mut self, now: u64) {
        // Of this very look it is known.
        if self.looked != now || self.is_cut {
            let Ok(pulse) = Pulse::read(&self.account) else {
                // Tried again with the next order.
                self.order.is_asked = false;
                return;
            };
            self.doorbell = pulse.doorbell;
        }
        // Of the clock, so that no agent's number is one that an earlier one has used.
        self.call = ((now / 1_000_000) as u32).max(self.call + 1) & (u32::MAX >> 2);
        if let Some(page) = self.words() {
            page.ask(true, self.call);
        }
    }

    /// Closes its gate until then, or opens it.
    pub(super) fn close(&mut self, until: Option<u64>, now: u64) {
        let Some(page) = self.page.page() else { return };
        if let Some(until) = until {
            self.was_closed = true;
            if self.closed_until < until {
                self.closed_until = until;
                page.close(until);
            }
        } else if self.closed_until > 0 {
            page.close(0);
            if self.closed_until > now + PATIENCE {
                wake(page);
            }
            (self.closed_until, self.opened) = (0, self.closed_until.min(now));
        }
    }

    /// It is no share to be divided any more.
    pub(super) fn release(&mut self) {
        self.close(None, 0);
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
