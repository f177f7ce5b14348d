//! Sessions of the video engines: a quota.
//!
//! Encoders and decoders are engines of their own, which the driver gives to whoever opens a session. A share may have so
//! many open at once; that is all that is held. What a session does with the engine, and how long, is not.
//!
//! Each process counts its own sessions in its slot, so those of the dead count for nothing. Who opens one adds it
//! first and then looks at the sum: of several at once the last to add sees all, so the quota is never passed, and who finds
//! it passed takes its own away and looks again.

use crate::device::Device;
use crate::neighbours::Neighbours;
use crate::place::Place;
use crate::system::System;
use divvy_pages::account::Slot;
use divvy_pages::sync::AtomicU32;
use divvy_pages::sync::Ordering::SeqCst;
use divvy_pages::{AccountPage, Codec, Flags, Full, Peers, SlotState};

/// Looks at the sum before an attempt among many others at once is given up.
const ATTEMPTS: u32 = 64;

/// What a session is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Encoder,
    Decoder,
}

impl Engine {
    fn quota(self, codec: Codec) -> Option<u32> {
        match self {
            Self::Encoder => codec.encoders,
            Self::Decoder => codec.decoders,
        }
    }

    fn of(self, slot: &Slot) -> &AtomicU32 {
        let [encoders, decoders] = slot.sessions();
        match self {
            Self::Encoder => encoders,
            Self::Decoder => decoders,
        }
    }
}

/// Counts one less, if there is one: a child of a fork has the parent's sessions in its memory and none in its slot.
fn take_back(sessions: &AtomicU32) {
    let _ = sessions.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
}

impl<S: System> Device<'_, S> {
    /// Before a session is opened: counts it. `Err`: the share has as many as it may. Of several shares of a device the
    /// first is asked.
    pub fn open_session(&self, engine: Engine) -> Result<(), Full> {
        let Some((place, page, own)) = self.own() else { return Ok(()) };
        let quota = place.policy().and_then(|(_, policy)| engine.quota(policy.codec));
        let quota = quota.filter(|_| !place.flags().has(Flags::OBSERVE_ONLY));
        let sessions = engine.of(own);
        for _ in 0..ATTEMPTS {
            sessions.fetch_add(1, SeqCst);
            let Some(quota) = quota else { return Ok(()) };
            if self.open(page, own, engine) <= quota {
                return Ok(());
            }
            take_back(sessions);
            if self.open(page, own, engine) >= quota {
                break;
            }
            self.ledger.system.nap(20_000);
        }
        Err(Full)
    }

    /// After it was closed, or was not opened after all.
    pub fn close_session(&self, engine: Engine) {
        if let Some((_, _, own)) = self.own() {
            take_back(engine.of(own));
        }
    }

    fn own(&self) -> Option<(&Place, &AccountPage, &Slot)> {
        let place = self.places.places().next()?;
        let page = place.account()?;
        let slot = page.slots().get(usize::from(place.seat()?.slot))?;
        Some((place, page, slot))
    }

    /// The sessions of all living processes.
    fn open(&self, page: &AccountPage, own: &Slot, engine: Engine) -> u32 {
        let peers = Neighbours::new(&self.ledger.system, self.ledger.system.identity());
        let lives = |slot: &&Slot| {
            let has_some = slot.owner().state() == SlotState::Live && engine.of(slot).load(SeqCst) > 0;
            has_some && (core::ptr::eq(*slot, own) || !slot.is_told_dead() && !peers.gone(&slot.identity()))
        };
        let open = page.slots().iter().filter(lives).map(|slot| engine.of(slot).load(SeqCst));
        open.fold(0, u32::saturating_add)
    }
}
