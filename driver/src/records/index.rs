//! Records, with what others hold on each GPU kept at hand.
//!
//! A claim's own record is always read from its file. The index answers the
//! one question that would otherwise read every file, "who holds something on
//! this GPU", and it is asked under the GPU's lock alone, after [`Records::index`]
//! has held it against the generation.

use super::ClaimRecord;
use super::locks::{Locked, LockedGpu, Locks};
use super::store::{Quarantined, RecordError, Store};
use crate::plan::Holding;
use crate::step::Undo;
use divvy_api::{ClaimUid, GpuUuid};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All records of the node.
#[derive(Debug)]
pub struct Records {
    store: Store,
    index: Mutex<Index>,
}

#[derive(Debug, Default)]
struct Index {
    by_gpu: HashMap<GpuUuid, BTreeMap<ClaimUid, Arc<ClaimRecord>>>,
    /// Instances (profile id, start) of all records, as read without the lock
    /// at a generation: a description of the hardware may lean on it, no decision.
    glimpsed: HashMap<GpuUuid, (u64, BTreeSet<(u32, u32)>)>,
}

impl Records {
    /// The records under the state directory, and those that had to be set aside.
    pub fn open(state: &Path) -> io::Result<Self> {
        Ok(Self { store: Store::open(state)?, index: Mutex::default() })
    }

    /// Every record that can be read, by UID.
    pub fn all(&self) -> Result<(Vec<ClaimRecord>, Vec<Quarantined>), RecordError> {
        let (mut records, mut quarantined) = (Vec::new(), Vec::new());
        for uid in self.store.list()? {
            match self.store.read(&uid) {
                Ok(Ok(record)) => records.extend(record),
                Ok(Err(aside)) => quarantined.push(aside),
                // Not a record of ours, or a disk that fails for this file: the others count all the same.
                Err(error) => {
                    tracing::warn!(claim = %uid, error = &error as &dyn std::error::Error, "record left out")
                }
            }
        }
        Ok((records, quarantined))
    }

    /// The claim's record; one that cannot be understood is set aside and counts as none.
    pub fn read(&self, uid: &ClaimUid) -> Result<Option<ClaimRecord>, RecordError> {
        Ok(self.store.read(uid)?.unwrap_or_default())
    }

    /// How many records were set aside since the start.
    pub fn quarantined(&self) -> u64 {
        self.store.quarantined()
    }

    /// Reads anew what another process has changed on the locked GPUs.
    pub fn index(&self, locked: &mut Locked) -> Result<(), RecordError> {
        if locked.gpus().iter().all(|gpu| gpu.is_indexed()) {
            return Ok(());
        }
        let (records, _) = self.all()?;
        let mut index = self.lock();
        for gpu in locked.gpus_mut().iter_mut().filter(|gpu| !gpu.is_indexed()) {
            index.replace(gpu.uuid(), &records);
            gpu.set_indexed();
        }
        Ok(())
    }

    /// What the claims hold on the locked GPUs; [`Self::index`] comes first.
    pub fn holdings(&self, locked: &Locked) -> Vec<Holding> {
        let index = self.lock();
        let of_gpu = |gpu: &LockedGpu| {
            let records = index.by_gpu.get(gpu.uuid()).into_iter().flat_map(|records| records.values());
            // A record is found on each GPU that it touches, and counts on each with what is there.
            let holdings = records.flat_map(|record| record.holdings());
            holdings.filter(|held| held.part.gpu() == gpu.uuid()).collect::<Vec<_>>()
        };
        locked.gpus().iter().flat_map(of_gpu).collect()
    }

    /// The records that touch a GPU.
    pub fn on(&self, gpu: &GpuUuid) -> Vec<Arc<ClaimRecord>> {
        self.lock().by_gpu.get(gpu).map(|records| records.values().cloned().collect()).unwrap_or_default()
    }

    /// Whether a record explains an instance. Asked without the lock, by whoever
    /// describes the hardware: on a miss the files are looked at again if
    /// another process has moved the generation.
    pub fn explains(&self, locks: &Locks, gpu: &GpuUuid, profile_id: u32, start: u32) -> bool {
        let at = (profile_id, start);
        {
            let index = self.lock();
            let records = index.by_gpu.get(gpu);
            if records.is_some_and(|records| {
                records.values().any(|record| instances(record, gpu).any(|is| is == at))
            }) {
                return true;
            }
        }
        let Some(now) = locks.peek(gpu) else { return false };
        if let Some((generation, seen)) = self.lock().glimpsed.get(gpu)
            && *generation == now
        {
            return seen.contains(&at);
        }
        let Ok((records, _)) = self.all() else { return false };
        let seen: BTreeSet<_> = records.iter().flat_map(|record| instances(record, gpu)).collect();
        let explained = seen.contains(&at);
        self.lock().glimpsed.insert(gpu.clone(), (now, seen));
        explained
    }

    /// Writes the record. The GPUs that it touches must be locked.
    pub fn write(&self, locked: &mut Locked, record: &ClaimRecord) -> Result<(), RecordError> {
        move_on(locked)?;
        self.store.write(record)?;
        let record = Arc::new(record.clone());
        let mut index = self.lock();
        for gpu in record.gpus() {
            index.by_gpu.entry(gpu).or_default().insert(record.claim.uid.clone(), record.clone());
        }
        Ok(())
    }

    /// Removes the record. The GPUs that it touches must be locked.
    pub fn remove(&self, locked: &mut Locked, uid: &ClaimUid) -> Result<(), RecordError> {
        move_on(locked)?;
        self.store.remove(uid)?;
        let mut index = self.lock();
        for gpu in locked.gpus() {
            if let Some(records) = index.by_gpu.get_mut(gpu.uuid()) {
                records.remove(uid);
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index {
    fn replace(&mut self, gpu: &GpuUuid, records: &[ClaimRecord]) {
        let touch = |record: &&ClaimRecord| record.gpus().contains(gpu);
        let records = records.iter().filter(touch);
        let by_uid = records.map(|record| (record.claim.uid.clone(), Arc::new(record.clone()))).collect();
        self.by_gpu.insert(gpu.clone(), by_uid);
    }
}

fn move_on(locked: &mut Locked) -> Result<(), RecordError> {
    locked.gpus_mut().iter_mut().try_for_each(|gpu| Ok(gpu.move_on()?))
}

/// The instances on a GPU that a record makes its own.
fn instances<'a>(record: &'a ClaimRecord, gpu: &'a GpuUuid) -> impl Iterator<Item = (u32, u32)> + 'a {
    record.undo.iter().filter_map(move |undo| match undo {
        Undo::DestroyGpuInstance(key) if key.gpu == *gpu => Some((key.profile_id, key.placement.start)),
        _ => None,
    })
}
