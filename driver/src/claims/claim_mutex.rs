//! One mutex per claim, within this process. Between processes the locks of the claim's GPUs exclude.

use divvy_api::ClaimUid;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// The mutexes of all claims; a clone has the same mutexes.
///
/// Two instances exist, and they nest; a single one would deadlock. The outer one belongs to the
/// callers of the engine: gRPC service, reconciliation and class updates. They hold it while they
/// read the claim from the API server and act on the answer, so that no prepare comes in between.
/// The inner one belongs to the engine, whose own recovery takes only that one.
#[derive(Clone, Debug, Default)]
pub struct ClaimMutexes {
    by_claim: Arc<Mutex<HashMap<ClaimUid, Weak<AsyncMutex<()>>>>>,
}

impl ClaimMutexes {
    /// Waits for the claim's mutex, which is unlocked when the guard is dropped.
    pub async fn lock(&self, claim: &ClaimUid) -> OwnedMutexGuard<()> {
        let mutex = {
            let mut mutexes = self.by_claim.lock().unwrap_or_else(PoisonError::into_inner);
            match mutexes.get(claim).and_then(Weak::upgrade) {
                Some(mutex) => mutex,
                None => {
                    mutexes.retain(|_, mutex| mutex.strong_count() > 0);
                    let mutex = Arc::new(AsyncMutex::new(()));
                    mutexes.insert(claim.clone(), Arc::downgrade(&mutex));
                    mutex
                }
            }
        };
        mutex.lock_owned().await
    }

    /// Whether a task holds the claim's mutex or waits for it.
    pub fn is_busy(&self, claim: &ClaimUid) -> bool {
        let mutexes = self.by_claim.lock().unwrap_or_else(PoisonError::into_inner);
        mutexes.get(claim).is_some_and(|mutex| mutex.strong_count() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn mutex_excludes_tasks_of_the_same_claim_only() {
        let mutexes = ClaimMutexes::default();
        let first = mutexes.lock(&"a".into()).await;
        assert!(mutexes.lock(&"a".into()).now_or_never().is_none());
        assert!(mutexes.lock(&"b".into()).now_or_never().is_some());
        assert!(mutexes.is_busy(&"a".into()) && !mutexes.is_busy(&"b".into()));
        drop(first);
        assert!(!mutexes.is_busy(&"a".into()));
        assert!(mutexes.lock(&"a".into()).now_or_never().is_some());
        let _last = mutexes.lock(&"c".into()).await;
        assert_eq!(mutexes.by_claim.lock().unwrap().len(), 1);
    }
}
