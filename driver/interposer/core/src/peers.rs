//! Access to the other processes of a share: proof of death, and how long to wait for them.

use crate::system::System;
use core::cell::Cell;
use divvy_pages::{Identity, Peers};

/// How long a request waits for other processes of the share before it is refused. The node reports
/// dead processes that no peer can prove dead within two seconds, and a hook may try twice.
pub(crate) const PEER_WAIT_TIMEOUT_NS: u64 = 3_000_000_000;

/// The other processes of the share, checked with system calls.
pub(crate) struct PeerProcesses<'a, S> {
    pub(crate) system: &'a S,
    pub(crate) me: Option<Identity>,
    /// Start of the wait; `None` before the first pause, so that only a waiting process reads the
    /// clock.
    pub(crate) start: Cell<Option<u64>>,
}

impl<'a, S: System> PeerProcesses<'a, S> {
    pub(crate) fn new(system: &'a S, me: Option<Identity>) -> Self {
        Self { system, me, start: Cell::new(None) }
    }
}

impl<S: System> Peers for PeerProcesses<'_, S> {
    fn is_dead(&self, peer: &Identity) -> bool {
        self.me.is_some_and(|me| me != *peer && self.system.gone(&me, peer))
    }

    fn back_off(&self, round: u32) -> bool {
        let nap = match round {
            0..=8 => 0,
            9..=64 => 20_000,
            _ => 200_000,
        };
        self.system.sleep(nap);
        let now = self.system.now();
        let start = self.start.get().unwrap_or(now);
        self.start.set(Some(start));
        now.saturating_sub(start) < PEER_WAIT_TIMEOUT_NS
    }

    fn now_ns(&self) -> u64 {
        self.system.now()
    }
}

/// Maximum number of peers that a process checks at its start.
const PEER_CHECKS_MAX: u32 = 16;

/// Checks only the first [`PEER_CHECKS_MAX`] processes for proof of death.
pub(crate) struct LimitedPeers<'a, P> {
    pub(crate) peers: &'a P,
    pub(crate) checked: Cell<u32>,
}

impl<P: Peers> Peers for LimitedPeers<'_, P> {
    fn is_dead(&self, peer: &Identity) -> bool {
        self.checked.set(self.checked.get().saturating_add(1));
        self.checked.get() <= PEER_CHECKS_MAX && self.peers.is_dead(peer)
    }

    fn back_off(&self, _round: u32) -> bool {
        false
    }

    fn now_ns(&self) -> u64 {
        self.peers.now_ns()
    }
}

/// Checks no process: only deaths that the node reported count.
pub(crate) struct DeclaredDeaths<'a, S>(pub(crate) &'a S);

impl<S: System> Peers for DeclaredDeaths<'_, S> {
    fn is_dead(&self, _who: &Identity) -> bool {
        false
    }

    fn back_off(&self, _round: u32) -> bool {
        false
    }

    fn now_ns(&self) -> u64 {
        self.0.now()
    }
}
