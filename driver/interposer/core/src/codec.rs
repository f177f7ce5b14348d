//! Quota on concurrent sessions of the video engines.
//!
//! The quota limits how many encoder or decoder sessions a share has open at once. It does not
//! limit the engine time of a session. Each process counts its own sessions in its slot, so
//! sessions of dead processes are not counted. A process increments its counter first and then
//! reads the sum: of several concurrent opens the last one sees all, so the quota is never
//! exceeded. A process that finds the quota exceeded decrements its counter and retries.

use crate::pages::SharePages;
use crate::peers::PeerProcesses;
use crate::process_state::Device;
use crate::system::System;
use divvy_pages::account::Slot;
use divvy_pages::sync::AtomicU32;
use divvy_pages::sync::Ordering::SeqCst;
use divvy_pages::{AccountPage, Codec, Flags, Peers, Refused, SlotState};

/// Maximum number of attempts to open a session while other processes also open sessions.
const MAX_ATTEMPTS: u32 = 64;

/// The engine that a session uses.
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

    fn counter(self, slot: &Slot) -> &AtomicU32 {
        let [encoders, decoders] = slot.codec_sessions();
        match self {
            Self::Encoder => encoders,
            Self::Decoder => decoders,
        }
    }
}

/// Decrements the count if it is not 0. After fork, a child knows the parent's sessions but its
/// slot counts none.
fn decrement(sessions: &AtomicU32) {
    let _ = sessions.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
}

impl<S: System> Device<'_, S> {
    /// Counts a session before it is opened. If a device has several shares, the first share's
    /// quota applies.
    ///
    /// # Errors
    /// [`Refused`] if the share has reached its quota.
    pub fn open_session(&self, engine: Engine) -> Result<(), Refused> {
        let Some((share, page, own)) = self.own_slot() else { return Ok(()) };
        let quota = share.policy().and_then(|(_, policy)| engine.quota(policy.codec));
        let quota = quota.filter(|_| !share.flags().has(Flags::OBSERVE_ONLY));
        let sessions = engine.counter(own);
        for _ in 0..MAX_ATTEMPTS {
            sessions.fetch_add(1, SeqCst);
            let Some(quota) = quota else { return Ok(()) };
            if self.count_open(page, own, engine) <= quota {
                return Ok(());
            }
            decrement(sessions);
            if self.count_open(page, own, engine) >= quota {
                break;
            }
            self.process.system.sleep(20_000);
        }
        Err(Refused)
    }

    /// Removes a session from the count, after it was closed or the driver failed to open it.
    pub fn close_session(&self, engine: Engine) {
        if let Some((_, _, own)) = self.own_slot() {
            decrement(engine.counter(own));
        }
    }

    fn own_slot(&self) -> Option<(&SharePages, &AccountPage, &Slot)> {
        let share = self.pages.shares().next()?;
        let page = share.account()?;
        let slot = page.slots().get(usize::from(share.slot_ref()?.slot))?;
        Some((share, page, slot))
    }

    /// Returns the number of open sessions of all living processes.
    fn count_open(&self, page: &AccountPage, own: &Slot, engine: Engine) -> u32 {
        let peers = PeerProcesses::new(&self.process.system, self.process.system.identity());
        let lives = |slot: &&Slot| {
            let has_some = slot.owner().state() == SlotState::Live && engine.counter(slot).load(SeqCst) > 0;
            has_some
                && (core::ptr::eq(*slot, own) || !slot.is_declared_dead() && !peers.is_dead(&slot.identity()))
        };
        let open = page.slots().iter().filter(lives).map(|slot| engine.counter(slot).load(SeqCst));
        open.fold(0, u32::saturating_add)
    }
}
