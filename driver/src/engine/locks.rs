//! One lock per claim, within this process: a release never overtakes the
//! prepare that it releases, and a repeated prepare waits for the first.
//! Between processes the locks of the claim's GPUs do.

use divvy_api::ClaimUid;
use std::collections::HashMap;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use tokio::sync::{Mutex, OwnedMutexGuard};

#[derive(Debug, Default)]
pub(crate) struct ClaimLocks {
    claims: StdMutex<HashMap<ClaimUid, Arc<Mutex<()>>>>,
}

/// The claim is ours alone until this is dropped.
pub(crate) struct ClaimLock<'a> {
    locks: &'a ClaimLocks,
    uid: ClaimUid,
    guard: Option<OwnedMutexGuard<()>>,
}

impl ClaimLocks {
    pub(crate) async fn lock(&self, uid: &ClaimUid) -> ClaimLock<'_> {
        let lock = {
            let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
            claims.entry(uid.clone()).or_default().clone()
        };
        ClaimLock { locks: self, uid: uid.clone(), guard: Some(lock.lock_owned().await) }
    }

    /// Whether somebody has the claim or waits for it.
    pub(crate) fn is_busy(&self, uid: &ClaimUid) -> bool {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).contains_key(uid)
    }
}

impl Drop for ClaimLock<'_> {
    fn drop(&mut self) {
        let mut claims = self.locks.claims.lock().unwrap_or_else(PoisonError::into_inner);
        self.guard = None;
        // Nobody waits for it: whoever comes next makes a new one.
        if claims.get(&self.uid).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            claims.remove(&self.uid);
        }
    }
}
