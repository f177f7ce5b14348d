//! A share in the grant table: its pages, what was last written there, and what its account shows.

use super::grant_history::GrantHistory;
use crate::shares::MappedPolicy;
use crate::shares::scheduler::controller::{self, CoRunners};
use crate::shares::scheduler::doorbell::{Door, WakeEvent};
use crate::shares::scheduler::grants::{GrantUpdate, SPARE, ShareStatus};
use crate::shares::snapshot::ShareKey;
use divvy_pages::PolicyPage;
use divvy_pages::policy::{UNBOUNDED, accrued};
use divvy_pages::{Compute, GpuUuid};
use rustix::thread::futex::{self, Flags};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Between two looks at who is awake and in debt, or cannot be heard, in nanoseconds.
pub(crate) const TICK: u64 = 10_000_000;
/// Validity of a rate in nanoseconds: an audit may be late, and two may be lost.
pub(crate) const GRANT: u64 = 3_500_000_000;
/// Rates that ended this long ago are ignored, in nanoseconds.
const STALE: u64 = 60_000_000_000;
/// A share with at most this balance, in nanoseconds of GPU time, may be waiting for more.
const SCARCE: i64 = 500_000;
/// An audit this long after a ring has seen the share at work, in nanoseconds.
const SEEN: u64 = 1_100_000_000;
/// Idle timeouts in nanoseconds: of shares that block others, and of all other shares. The latter
/// sleep longer between launches, and their delay matters less.
pub(crate) const HOLD: u64 = 15_000_000;
pub(crate) const RESTS: u64 = 75_000_000;
/// A share that rings again within this time is intermittent: its next idle timeout is twice as
/// long, up to [`MOST`]. Lending its time for a moment would change the pages of all other shares.
const SOON: u64 = 2 * RESTS;
pub(crate) const MOST: u64 = 4 * RESTS;
/// A share that was active for long gets a longer idle timeout: its active time divided by this, up
/// to [`MOST`]. So a larger part of its time is never lost.
pub(crate) const STEADY: u64 = 32;
/// A share that has just rung is expected to launch for this time, in nanoseconds. A check of the
/// first launch alone would be too early.
pub(crate) const BURST: u64 = 5_000_000;
/// A check waits for this time for another event that wakes the thread: for active shares, and for
/// others.
pub(crate) const WAITS: [u64; 2] = [6_000_000, 15_000_000];
/// Between two looks at one of the rest, in nanoseconds.
const LOOK: u64 = 20_000_000;
/// A share is checked earlier by this time if a neighbour is checked, in nanoseconds.
const SOONER: u64 = 5_000_000;
/// A gate that opens by itself within this time is left alone, in nanoseconds.
pub(crate) const PATIENCE: u64 = HOLD;

/// The time until which a gate is closed, and the time of its next renewal; never, if it opens
/// then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Out {
    pub(crate) until: u64,
    pub(crate) again: u64,
}

impl Out {
    fn opens(self) -> bool {
        self.again > self.until
    }
}

/// A share of a GPU, as an audit found it.
#[derive(Debug)]
pub(crate) struct PlannedShare {
    pub(crate) key: ShareKey,
    /// The instance that it is of.
    pub(crate) mig: Option<GpuUuid>,
    /// Its policy page, and its account.
    pub(crate) policy: PathBuf,
    pub(crate) account: Arc<File>,
    pub(crate) compute: Compute,
    /// Its processes and its memory suit exclusive quanta.
    pub(crate) suits_quanta: bool,
    pub(crate) standing: ShareStatus,
}

/// The grants of a share since the last audit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GrantSummary {
    /// By the mean.
    pub(crate) memory: controller::ControllerState,
    /// Its demand before its gate was closed in the meantime.
    pub(crate) wanted: Option<u64>,
    /// The highest rate that its page has told since then, of the library's nanoseconds a second; 0: none.
    pub(crate) highest: u64,
    /// Its co-runners; their usage is measured by NVML.
    pub(crate) company: CoRunners,
}

#[derive(Debug)]
pub(crate) struct ShareState {
    pub(crate) key: ShareKey,
    file: (u64, u64),
    page: MappedPolicy,
    account: Arc<File>,
    pub(crate) door: Arc<Door>,
    /// Nothing can be read from its account: the kernel cannot wait for it either.
    pub(crate) is_cut: bool,
    pub(crate) standing: ShareStatus,
    pub(crate) order: GrantUpdate,
    /// Whether its page tells it that it is divided and that it is doubted; none: the page has the
    /// last word, as it may have been changed where its class was. At each order it would be the
    /// one thing that is read of a page, and is in no cache.
    says: Option<[bool; 2]>,
    granted_until: u64,
    closed_until: u64,
    /// It is kept out, and until when is not known.
    is_out: bool,
    /// When its gate was opened last, or opens by itself.
    opened: u64,
    /// The last call, 0 before the first, and what the doorbell was before it.
    call: u32,
    pub(crate) doorbell: u32,
    /// When it rang, or the audit before.
    pub(crate) woke: u64,
    /// When it was last seen to work, by its own word, and whether that is long ago.
    pub(crate) works: u64,
    /// When it was looked at last.
    looked: u64,
    pub(crate) rests: bool,
    /// Since when, and how long it is to launch nothing before that is so.
    rested: u64,
    patience: u64,
    /// The end of its activity may be noticed late.
    pub(crate) is_moot: bool,
    /// It worked, as far as is known.
    pub(crate) has_worked: bool,
    /// Whether it does, and since when that is so.
    stays: (bool, u64),
    past: GrantHistory,
    was_closed: bool,
    /// See [`GrantSummary`].
    highest: u64,
}

impl ShareState {
    /// `is_beside`: there are others on the GPU.
    pub(crate) fn new(planned: &PlannedShare, is_beside: bool, now: u64) -> io::Result<Self> {
        let file = identity(&planned.policy)?;
        let page = MappedPolicy::open(&planned.policy)?;
        let mut standing = planned.standing;
        let words = page.page().ok_or(io::ErrorKind::InvalidData)?;
        // The grant of an earlier agent.
        if words.granted(now.saturating_sub(STALE)).is_some() {
            standing.memory = controller::ControllerState::inherited(words.agent_state());
        }
        let (closed_until, is_asked, is_doubted) =
            (words.gate_closed_until(), words.wakeup_request() > 0, words.is_unattributed());
        Ok(Self {
            key: planned.key.clone(),
            file,
            page,
            account: Arc::clone(&planned.account),
            door: Arc::new(Door::of(&planned.account)?),
            is_cut: false,
            standing,
            order: GrantUpdate { rate: None, is_asked, is_beside, is_doubted, memory: standing.memory },
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
            past: GrantHistory::new(now),
            was_closed: false,
            highest: 0,
        })
    }

    pub(crate) fn is_of(&self, planned: &PlannedShare) -> bool {
        self.key == planned.key
            && Arc::ptr_eq(&self.account, &planned.account)
            && identity(&planned.policy).is_ok_and(|file| file == self.file)
    }

    fn words(&self) -> Option<&PolicyPage> {
        self.page.page()
    }

    /// An audit found it so.
    pub(crate) fn found(self, standing: ShareStatus, now: u64) -> Self {
        // NVML has the word again of who rang a second ago; but high priority is a matter of milliseconds.
        let is_old = self.woke + SEEN <= now && !standing.is_high;
        let standing = ShareStatus { is_awake: self.standing.is_awake && !is_old, ..standing };
        Self { standing, says: None, ..self }
    }

    /// Whether its activity must be checked when its GPU is checked.
    pub(crate) fn is_due(&self, now: u64) -> bool {
        let soon = if self.standing.is_awake { 0 } else { SOONER };
        self.is_watched() && self.due() <= now.saturating_add(soon)
    }

    /// It works and may become idle. A share whose gate is closed cannot show its demand.
    pub(crate) fn is_watched(&self) -> bool {
        self.is_at_work() && self.is_seen() && !self.is_out
    }

    /// From when on a look may find that it has come to rest, as far as is known.
    pub(crate) fn due(&self) -> u64 {
        let (rests, pause) = match self.standing.is_awake {
            true if self.has_just_rung() => (0, BURST + BURST / 2),
            true => {
                let rests = self.works.max(self.woke.saturating_add(BURST)).saturating_add(HOLD);
                // A share in debt is not idle by then.
                (rests, if rests > self.looked { 0 } else { TICK })
            }
            false => (self.works.max(self.woke).saturating_add(self.patience()), LOOK),
        };
        // A share whose gate was closed has not shown yet whether it continues.
        rests.max(self.looked + pause).max(self.opened + TICK)
    }

    /// It blocks others, and was not checked since it rang. The first check of such a share is
    /// earlier: short work has ended by then, and the gates open by themselves unless it rings
    /// again.
    fn has_just_rung(&self) -> bool {
        self.standing.is_high && self.looked == self.woke
    }

    /// How long it is to launch nothing before it rests.
    fn patience(&self) -> u64 {
        let (is_at_work, since) = self.stays;
        let worked = if is_at_work { self.works.saturating_sub(since) } else { 0 };
        if self.is_moot { MOST } else { self.patience.max(MOST.min(worked / STEADY)) }
    }

    /// The time of this check if no other share is checked.
    pub(crate) fn late(&self) -> u64 {
        if self.standing.is_awake && self.has_just_rung() {
            return self.woke.saturating_add(BURST + HOLD - SPARE);
        }
        self.due().saturating_add(WAITS[usize::from(!self.standing.is_awake)])
    }

    /// As far as is known.
    pub(crate) fn is_at_work(&self) -> bool {
        self.standing.is_awake || self.standing.wants > 0 && !self.rests
    }

    /// Where it has come to rest, or begun to work: how long it had not.
    pub(crate) fn came_or_went(&mut self, now: u64) -> Option<u64> {
        let (was, since) = self.stays;
        (was != self.is_at_work()).then(|| {
            self.stays = (!was, now);
            now.saturating_sub(since)
        })
    }

    /// Its launches are paced, so that its account says when they come.
    pub(crate) fn is_seen(&self) -> bool {
        self.order.rate.is_some()
    }

    /// Whether it is awake that was not, or the other way round.
    pub(crate) fn look(&mut self, now: u64) -> bool {
        let has_just_rung = self.has_just_rung();
        self.looked = now;
        let read = WakeEvent::read(&self.account);
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
        // A share that begins for the first time was not seen idle if that was recent.
        if self.rests != was.1 || self.standing.is_awake && !self.has_worked {
            self.past.moves(now);
        }
        (self.standing.is_awake, self.rests) != was
    }

    /// Has the page say that, and that its gate is closed, if it is.
    pub(crate) fn obey(&mut self, order: GrantUpdate, out: Option<Out>, now: u64) {
        let had = std::mem::replace(&mut self.order, order);
        self.highest = self.highest.max(self.rate_of(had)).max(self.rate_of(order));
        if let Some(page) = self.page.page() {
            if let Some(rate) = order.rate
                && (had.rate != order.rate
                    || self.granted_until < now + GRANT - controller::NS_PER_SECOND / 2)
            {
                self.granted_until = now + GRANT;
                page.grant(rate, self.granted_until);
                page.set_agent_state(order.memory.kept());
            }
            let says = [order.rate.is_some() && !self.standing.is_limited, order.is_doubted];
            if self.says.replace(says) != Some(says) {
                let [is_divided, is_doubted] = says;
                if is_divided != page.is_agent_limited() {
                    page.set_agent_limited(is_divided);
                }
                if is_doubted != page.is_unattributed() {
                    page.set_unattributed(is_doubted);
                }
            }
            if had.is_asked && !order.is_asked {
                page.request_wakeup(false, 0);
            }
            // A share that sleeps by the earlier rate may have more time by now; a small gain is
            // not worth a wake.
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

    /// The doorbell is read before: a launch in between rings.
    fn ask(&mut self, now: u64) {
        // Of this very look it is known.
        if self.looked != now || self.is_cut {
            let Ok(pulse) = WakeEvent::read(&self.account) else {
                // Tried again with the next order.
                self.order.is_asked = false;
                return;
            };
            self.doorbell = pulse.doorbell;
        }
        // From the clock, so that no earlier agent has used the number.
        self.call = ((now / 1_000_000) as u32).max(self.call + 1) & (u32::MAX >> 2);
        if let Some(page) = self.words() {
            page.request_wakeup(true, self.call);
        }
    }

    /// Closes its gate until then, or opens it.
    pub(crate) fn close(&mut self, until: Option<u64>, now: u64) {
        let Some(page) = self.page.page() else { return };
        if let Some(until) = until {
            self.was_closed = true;
            if self.closed_until < until {
                self.closed_until = until;
                page.close_gate_until(until);
            }
        } else if self.closed_until > 0 {
            page.close_gate_until(0);
            if self.closed_until > now + PATIENCE {
                wake(page);
            }
            (self.closed_until, self.opened) = (0, self.closed_until.min(now));
        }
    }

    /// It is no share to be divided any more.
    pub(crate) fn release(&mut self) {
        self.close(None, 0);
        if let Some(page) = self.words() {
            page.set_agent_limited(false);
            page.request_wakeup(false, 0);
        }
    }

    /// The rate of its launches: without a grant the one of its record, if any.
    fn rate_of(&self, order: GrantUpdate) -> u64 {
        let of_record = if self.standing.is_limited { self.standing.terms.ceiling } else { UNBOUNDED };
        order.rate.unwrap_or(of_record)
    }

    /// Up to which NVML tells what it had.
    pub(crate) fn had(&mut self, until: u64) -> GrantSummary {
        let ((granted, allowed), company) = self.past.until(until);
        let wanted = std::mem::take(&mut self.was_closed).then_some(self.standing.wants);
        let highest = self.highest;
        self.highest = self.rate_of(self.order);
        GrantSummary { memory: self.order.memory.with_granted(granted, allowed), wanted, highest, company }
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
