//! When to try again, and when to look.

use super::Limits;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;
use tokio::time::Instant;

/// Doubling pauses, spread so that a fleet does not come back in one moment.
#[derive(Debug)]
pub(super) struct Backoff {
    first: Duration,
    most: Duration,
    failures: u32,
}

impl Backoff {
    pub(super) fn new((first, most): (Duration, Duration)) -> Self {
        Self { first, most, failures: 0 }
    }

    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Between three quarters and all of the pause.
    pub(super) fn next(&mut self) -> Duration {
        let pause = doubled((self.first, self.most), self.failures);
        self.failures = self.failures.saturating_add(1);
        let spread = RandomState::new().hash_one(self.failures) % 256;
        pause.mul_f64(0.75 + 0.25 * spread as f64 / 256.0)
    }
}

/// When the slices are looked at next.
#[derive(Debug)]
pub(super) struct Due {
    settle: Duration,
    refused: Duration,
    repair: (Duration, Duration),
    at: Option<Instant>,
    /// Nothing happens before, but for a new inventory.
    hold: Option<Instant>,
    /// First of the deletions that are waited for.
    deleting_since: Option<Instant>,
    node_check: bool,
    edits: u32,
    last_edit: Option<Instant>,
}

/// Deletions are waited for no longer than this many times the quiet after one.
const SETTLE_AT_MOST: u32 = 4;
/// An edit this long after the one before is the first of its kind again.
const EDITS_FORGOTTEN: Duration = Duration::from_secs(120);

impl Due {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            settle: limits.settle,
            refused: limits.refused,
            repair: limits.repair,
            at: None,
            hold: None,
            deleting_since: None,
            node_check: false,
            edits: 0,
            last_edit: None,
        }
    }

    pub(super) fn is_set(&self) -> bool {
        self.at.is_some()
    }

    /// The moment; only asked for while one is set.
    pub(super) fn at(&self) -> Instant {
        let at = self.at.unwrap_or_else(Instant::now);
        self.hold.map_or(at, |hold| hold.max(at))
    }

    /// There is something new to publish.
    pub(super) fn now(&mut self) {
        self.hold = None;
        self.at = Some(Instant::now());
    }

    /// Somebody deleted a slice: soon, when the deletions pause.
    pub(super) fn deleted(&mut self) {
        let now = Instant::now();
        let since = *self.deleting_since.get_or_insert(now);
        self.node_check = true;
        self.at = Some((now + self.settle).min(since + self.settle * SETTLE_AT_MOST));
    }

    /// Somebody edited a slice: later, and later still if he goes on.
    pub(super) fn edited(&mut self) {
        let now = Instant::now();
        if self.last_edit.is_none_or(|last| now - last > EDITS_FORGOTTEN) {
            self.edits = 0;
        }
        self.last_edit = Some(now);
        let at = now + doubled(self.repair, self.edits);
        self.edits = self.edits.saturating_add(1);
        self.at = Some(self.at.map_or(at, |due| due.min(at)));
    }

    /// The server refused: once more after minutes.
    pub(super) fn refused(&mut self) {
        let at = Instant::now() + self.refused;
        self.hold = Some(at);
        self.at = Some(at);
    }

    /// Looked at now.
    pub(super) fn clear(&mut self) {
        self.at = None;
        self.deleting_since = None;
    }

    /// Whether the Node may have been re-created since it was last read.
    pub(super) fn take_node_check(&mut self) -> bool {
        std::mem::take(&mut self.node_check)
    }
}

fn doubled((first, most): (Duration, Duration), times: u32) -> Duration {
    first.saturating_mul(1 << times.min(20)).min(most)
}
