//! One at a time per claim, between the kubelet's calls and reconciliation.
//!
//! Reconciliation asks the API server whether a pod uses a claim and then
//! releases it; a prepare that came between the two would be undone under a
//! starting pod. Whoever has the turn can trust what it has read.

use divvy_api::ClaimUid;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokio::sync::{Mutex as Turn, OwnedMutexGuard};

/// Turns of all claims; a clone is the same.
#[derive(Clone, Default)]
pub struct Turns {
    by_claim: Arc<Mutex<HashMap<ClaimUid, Weak<Turn<()>>>>>,
}

impl Turns {
    /// Waits for the claim's turn; it ends when the guard is dropped.
    pub async fn take(&self, claim: &ClaimUid) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.by_claim.lock().unwrap_or_else(PoisonError::into_inner);
            match turns.get(claim).and_then(Weak::upgrade) {
                Some(turn) => turn,
                None => {
                    turns.retain(|_, turn| turn.strong_count() > 0);
                    let turn = Arc::new(Turn::new(()));
                    turns.insert(claim.clone(), Arc::downgrade(&turn));
                    turn
                }
            }
        };
        turn.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn claims_wait_for_themselves_and_not_for_each_other() {
        let turns = Turns::default();
        let first = turns.take(&"a".into()).await;
        assert!(turns.take(&"a".into()).now_or_never().is_none());
        assert!(turns.take(&"b".into()).now_or_never().is_some());
        drop(first);
        assert!(turns.take(&"a".into()).now_or_never().is_some());
        let _last = turns.take(&"c".into()).await;
        assert_eq!(turns.by_claim.lock().unwrap().len(), 1);
    }
}
