//! The other processes of a share: whom to ask for proof of death, and how long to wait for them.

use crate::system::System;
use core::cell::Cell;
use divvy_pages::{Identity, Peers};

/// How long a request waits for other processes of the share before it is refused, in nanoseconds. The node
/// tells of the dead that no peer can prove within two seconds; and a hook may ask a second time.
pub(crate) const PATIENCE: u64 = 3_000_000_000;

/// The other processes of the share.
pub(crate) struct Neighbours<'a, S> {
    pub(crate) system: &'a S,
    pub(crate) me: Option<Identity>,
    /// When the wait began; the clock is read only by one who waits.
    pub(crate) start: Cell<Option<u64>>,
}

impl<'a, S: System> Neighbours<'a, S> {
    pub(crate) fn new(system: &'a S, me: Option<Identity>) -> Self {
        Self { system, me, start: Cell::new(None) }
    }
}

impl<S: System> Peers for Neighbours<'_, S> {
    fn gone(&self, who: &Identity) -> bool {
        self.me.is_some_and(|me| me != *who && self.system.gone(&me, who))
    }

    fn pause(&self, round: u32) -> bool {
        let nap = match round {
            0..=8 => 0,
            9..=64 => 20_000,
            _ => 200_000,
        };
        self.system.nap(nap);
        let now = self.system.now();
        let start = self.start.get().unwrap_or(now);
        self.start.set(Some(start));
        now.saturating_sub(start) < PATIENCE
    }

    fn now(&self) -> u64 {
        self.system.now()
    }
}

/// Asks for proof of the first sixteen only.
pub(crate) struct Few<'a, P> {
    pub(crate) peers: &'a P,
    pub(crate) asked: Cell<u32>,
}

impl<P: Peers> Peers for Few<'_, P> {
    fn gone(&self, who: &Identity) -> bool {
        self.asked.set(self.asked.get().saturating_add(1));
        self.asked.get() <= 16 && self.peers.gone(who)
    }

    fn pause(&self, _round: u32) -> bool {
        false
    }

    fn now(&self) -> u64 {
        self.peers.now()
    }
}

/// Asks for no proof: what the node says of the dead is enough.
pub(crate) struct Unasked<'a, S>(pub(crate) &'a S);

impl<S: System> Peers for Unasked<'_, S> {
    fn gone(&self, _who: &Identity) -> bool {
        false
    }

    fn pause(&self, _round: u32) -> bool {
        false
    }

    fn now(&self) -> u64 {
        self.0.now()
    }
}
