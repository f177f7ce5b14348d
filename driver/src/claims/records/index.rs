//! All records, with an in-memory index of the holdings on each GPU.
//!
//! A claim's own record is always read from its file. The index exists because finding the holders
//! of a GPU would otherwise read every file. It is used only under the GPU's lock, after
//! [`Records::index`] compared it with the generation in the lock file. Another instance of the
//! driver, as during an upgrade, bumps the generation when it changes a record.

use super::debts::Debt;
use super::locks::{Locked, LockedGpu, Locks};
use super::record::ClaimRecord;
use super::store::{Quarantined, RecordError, Store};
use crate::claims::holding::Holding;
use crate::claims::step::Undo;
use crate::gpu::GpuUsage;
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
    /// Instances (profile id, start) of all records, read without the lock at a generation. Good
    /// enough to describe the hardware, but not for decisions.
    unlocked_readings: HashMap<GpuUuid, (u64, BTreeSet<(u32, u32)>)>,
}

impl Records {
    /// Opens the records under the state directory.
    pub fn open(state: &Path) -> io::Result<Self> {
        Ok(Self { store: Store::open(state)?, index: Mutex::default() })
    }

    /// Every record that can be read, in the order of UIDs, and those that were quarantined now.
    pub fn all(&self) -> Result<(Vec<ClaimRecord>, Vec<Quarantined>), RecordError> {
        let (mut records, mut quarantined) = (Vec::new(), Vec::new());
        for uid in self.store.list()? {
            match self.store.read(&uid) {
                Ok(Ok(record)) => records.extend(record),
                Ok(Err(quarantine)) => quarantined.push(quarantine),
                // Not a record, or a read error for this file: the other records still count.
                Err(error) => {
                    tracing::warn!(claim = %uid, error = &error as &dyn std::error::Error, "record skipped")
                }
            }
        }
        Ok((records, quarantined))
    }

    /// Every record. Unlike [`Self::all`] it fails if a record exists that cannot be read, so that an
    /// empty list means that no claim is held.
    pub fn complete(&self) -> Result<Vec<ClaimRecord>, RecordError> {
        let mut records = Vec::new();
        for uid in self.store.list()? {
            match self.store.read(&uid) {
                Ok(record) => records.extend(record.unwrap_or_default()),
                Err(error) if error.is_no_record() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(records)
    }

    /// The claim's record. A record that cannot be decoded is quarantined and counts as absent.
    pub fn read(&self, uid: &ClaimUid) -> Result<Option<ClaimRecord>, RecordError> {
        Ok(self.store.read(uid)?.unwrap_or_default())
    }

    /// Number of records that were quarantined since the start.
    pub fn quarantined(&self) -> u64 {
        self.store.quarantined()
    }

    /// Updates the index for the locked GPUs if another process changed their records.
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

    /// The holdings of claims on the locked GPUs. Call [`Self::index`] before.
    pub fn holdings(&self, locked: &Locked) -> Vec<Holding> {
        let index = self.lock();
        let of_gpu = |gpu: &LockedGpu| {
            let records = index.by_gpu.get(gpu.uuid()).into_iter().flat_map(|records| records.values());
            // The index has a record under each GPU that it concerns; take only this GPU's parts.
            let holdings = records.flat_map(|record| record.holdings());
            holdings.filter(|held| held.part.gpu() == gpu.uuid()).collect::<Vec<_>>()
        };
        locked.gpus().iter().flat_map(of_gpu).collect()
    }

    /// The records that concern a GPU, according to the index.
    pub fn on(&self, gpu: &GpuUuid) -> Vec<Arc<ClaimRecord>> {
        self.lock().by_gpu.get(gpu).map(|records| records.values().cloned().collect()).unwrap_or_default()
    }

    /// The debts of a GPU.
    pub fn debts(&self, gpu: &GpuUuid) -> Vec<Debt> {
        self.store.debts.of(gpu)
    }

    /// The GPUs that have debts.
    pub fn gpus_with_debts(&self) -> Vec<GpuUuid> {
        self.store.debts.gpus()
    }

    /// Writes a debt. Its GPU must be locked.
    pub fn add_debt(&self, debt: &Debt) -> Result<(), RecordError> {
        self.store.debts.add(debt)
    }

    /// Removes the debt of a claim. The GPU must be locked.
    pub fn remove_debt(&self, gpu: &GpuUuid, claim: &ClaimUid) -> Result<(), RecordError> {
        self.store.debts.remove(gpu, claim)
    }

    /// Whether a record or a debt has this instance. Callable without the lock, for descriptions of the
    /// hardware: on a miss the files are read again if another process bumped the generation.
    pub fn has_instance(&self, locks: &Locks, gpu: &GpuUuid, profile_id: u32, start: u32) -> bool {
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
        if self.debts(gpu).iter().any(|debt| debt.has_instance(profile_id, start)) {
            return true;
        }
        let Some(now) = locks.peek(gpu) else { return false };
        if let Some((generation, recorded)) = self.lock().unlocked_readings.get(gpu)
            && *generation == now
        {
            return recorded.contains(&at);
        }
        let Ok((records, _)) = self.all() else { return false };
        let recorded: BTreeSet<_> = records.iter().flat_map(|record| instances(record, gpu)).collect();
        let found = recorded.contains(&at);
        self.lock().unlocked_readings.insert(gpu.clone(), (now, recorded));
        found
    }

    /// How records use the GPU. Callable without the lock: on a miss the files are read.
    pub fn usage(&self, gpu: &GpuUuid) -> GpuUsage {
        let indexed = self.on(gpu);
        let records: Vec<Arc<ClaimRecord>> = if indexed.is_empty() {
            // An unreadable directory must not look like no records.
            let Ok((records, _)) = self.all() else {
                return GpuUsage { named: true, instances: true, debts: true };
            };
            records.into_iter().filter(|record| record.gpus().contains(gpu)).map(Arc::new).collect()
        } else {
            indexed
        };
        let has_instance = |record: &Arc<ClaimRecord>| instances(record, gpu).next().is_some();
        let instances = records.iter().any(has_instance);
        GpuUsage { named: !records.is_empty(), instances, debts: !self.debts(gpu).is_empty() }
    }

    /// Writes the record. The GPUs that it concerns must be locked.
    pub fn write(&self, locked: &mut Locked, record: &ClaimRecord) -> Result<(), RecordError> {
        bump_generation(locked)?;
        self.store.write(record)?;
        let record = Arc::new(record.clone());
        let mut index = self.lock();
        for gpu in record.gpus() {
            index.by_gpu.entry(gpu).or_default().insert(record.claim.uid.clone(), record.clone());
        }
        Ok(())
    }

    /// Removes the record. The GPUs that it concerns must be locked.
    pub fn remove(&self, locked: &mut Locked, uid: &ClaimUid) -> Result<(), RecordError> {
        bump_generation(locked)?;
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

fn bump_generation(locked: &mut Locked) -> Result<(), RecordError> {
    locked.gpus_mut().iter_mut().try_for_each(|gpu| Ok(gpu.bump_generation()?))
}

/// The instances on a GPU that were created for the record's claim.
fn instances<'a>(record: &'a ClaimRecord, gpu: &'a GpuUuid) -> impl Iterator<Item = (u32, u32)> + 'a {
    record.undo.iter().filter_map(move |undo| match undo {
        Undo::DestroyGpuInstance(key) if key.gpu == *gpu => Some((key.profile_id, key.placement.start)),
        _ => None,
    })
}
