//! Prepares and releases the claims of this node.
//!
//! Prepare: lock the claim and its GPUs, plan, write the Intent record, run the steps, write the
//! Prepared record, answer. A failed step undoes the earlier ones. Unprepare: write Releasing, undo,
//! remove the record. Work runs in the engine's own tasks: a caller that goes away does not stop a
//! plan half-way, and every caller is answered in time. If an undo fails, its record stays, and the
//! next prepare, unprepare or recovery of the claim starts with it.

use crate::cdi::Cdi;
use crate::claims::claim_mutex::ClaimMutexes;
use crate::claims::execute::{Executor, StepError};
use crate::claims::holding::{Access, Holding};
use crate::claims::mps_daemons::MpsDaemons;
use crate::claims::plan;
use crate::claims::plan::{Plan, PlanError, View};
use crate::claims::records::{
    ClaimRecord, Debt, DeviceRecord, HeldState, LockError, Locked, LockedGpu, Locks, PreparedDevice,
    RecordError, Records,
};
use crate::claims::step::{Step, Undo};
use crate::cluster::claim_status::{DeviceData, DeviceFacts};
use crate::containers::Containers;
use crate::gpu::Gpus;
use crate::gpu::epoch::Epoch;
use crate::gpu::part::{InstanceKey, Part};
use crate::gpu::sharing::{Setup, ShareLimits};
use crate::metrics::{ClaimGauges, ShareGauges};
use crate::paths::HostPaths;
use crate::shares::Shares;
use divvy_api::sharing::{Mode, ShareSettings};
use divvy_api::text::error_chain;
use divvy_api::{
    AllocatedClaim, AllocatedDevice, ClaimRef, ClaimUid, DeviceName, GpuUuid, Hold, PoolName, Quantity,
    ShareId,
};
use divvy_model::inventory::Origin;
use divvy_model::{DeviceId, Gpu, Inventory, Mig};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Prepares and releases claims; a clone is the same engine.
///
/// Each call has a task. One task watches the inventory for GPUs that come back or lose instances
/// ([`crate::claims::recover`]). One watches the MPS control daemons of claims ([`MpsDaemons`]). A GPU
/// with idle MIG mode has a task that disables the mode later (`idle_mig`).
#[derive(Clone)]
pub struct Engine {
    pub(super) inner: Arc<Inner>,
}

/// Configuration of the engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    pub paths: HostPaths,
    /// The node's pool. Devices of another pool are refused.
    pub pool: PoolName,
    /// How long MIG mode stays on after the last instance of a GPU was destroyed.
    pub mig_hold_off: Duration,
    /// Prepare and unprepare answer within this time, also when the hardware does not.
    pub answer_timeout: Duration,
}

/// A claim with a record on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldClaim {
    pub claim: ClaimRef,
    pub state: HeldState,
    pub devices: Vec<DeviceName>,
}

/// Result of recovery, which runs before the plugin registers with the kubelet.
#[derive(Debug, Default)]
pub struct RecoveryReport {
    /// Records that could not be read: their path in quarantine, and the cause.
    pub quarantined: Vec<(PathBuf, String)>,
    /// Unfinished claims that were undone.
    pub undone: Vec<ClaimRef>,
    /// Prepared claims with instances or CDI files that had to be restored.
    pub restored: Vec<ClaimRef>,
    /// Claims that could be neither undone nor restored yet, and the cause.
    pub failed: Vec<(ClaimRef, String)>,
    /// GPU instances without a record.
    pub unmanaged: Vec<String>,
}

/// Why the engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("state directory {path} cannot be used; create it, or name another with --state-dir")]
    StateDir {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
}

/// Why a claim was not prepared. Every message names the claim.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error(transparent)]
    Refused(#[from] PlanError),
    #[error("claim {claim}, {devices}: nothing was changed")]
    Locked {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: LockError,
    },
    #[error("claim {claim}: its record cannot be written or read")]
    Record {
        claim: ClaimRef,
        #[source]
        cause: RecordError,
    },
    #[error("claim {claim}, {devices}: not prepared")]
    Step {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: StepError,
    },
    #[error("claim {claim}, {devices}: the steps of an earlier attempt cannot be undone yet")]
    NotUndone {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: StepError,
    },
    #[error("claim {claim}: no answer within {within:?}; work on it continues, retry")]
    Timeout { claim: ClaimRef, within: Duration },
    #[error("claim {claim}: prepare panicked; see the log")]
    Panicked { claim: ClaimRef },
}

/// Why a claim was not released. Every message names the claim.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareError {
    #[error("claim {uid}: nothing was changed")]
    Locked {
        uid: ClaimUid,
        #[source]
        cause: LockError,
    },
    #[error("claim {uid}: its record cannot be written or read")]
    Record {
        uid: ClaimUid,
        #[source]
        cause: RecordError,
    },
    #[error("claim {claim}, {devices}: not released yet")]
    Step {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: StepError,
    },
    #[error("claim {uid}: nothing was changed, because container {container} still uses it")]
    InUse { uid: ClaimUid, container: String },
    #[error("claim {uid}: no answer within {within:?}; work on it continues, retry")]
    Timeout { uid: ClaimUid, within: Duration },
    #[error("claim {uid}: release panicked; see the log")]
    Panicked { uid: ClaimUid },
}

/// State that the engine's tasks share.
pub(crate) struct Inner {
    pub(crate) options: EngineOptions,
    /// The epoch in which this process started.
    pub(crate) started: Epoch,
    pub(crate) gpus: Gpus,
    pub(crate) cdi: Cdi,
    pub(crate) records: Records,
    pub(crate) locks: Arc<Locks>,
    /// Inner mutexes of claims: a release never overtakes the prepare that it releases, and a
    /// repeated prepare waits for the first. Callers hold an outer mutex of their own around it.
    pub(crate) claims: ClaimMutexes,
    /// Claims that recovery could not undo or restore; the next audit tries them again.
    pub(crate) unrecovered: Mutex<BTreeSet<ClaimUid>>,
    pub(crate) mps_daemons: watch::Sender<Arc<MpsDaemons>>,
    /// Notified after each change of a record, for tasks that follow records.
    pub(crate) prepared_or_released: Notify,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
}

impl Engine {
    /// Recovers from the local records, then returns: unfinished claims are undone, and missing
    /// instances and CDI files of prepared claims are restored. A record that cannot be read is
    /// quarantined and is no reason to fail.
    pub async fn start(
        options: EngineOptions,
        gpus: Gpus,
        cdi: Cdi,
    ) -> Result<(Self, RecoveryReport), StartError> {
        let state = &options.paths.state_dir;
        let unusable = |cause| StartError::StateDir { path: state.clone(), cause };
        let records = Records::open(state).map_err(unusable)?;
        let locks = Locks::open(state).map_err(unusable)?;
        let started = Epoch::now(&options.paths.proc_root, &options.paths.sys_root);
        let inner = Arc::new(Inner {
            options,
            started,
            gpus,
            cdi,
            records,
            locks: Arc::new(locks),
            claims: ClaimMutexes::default(),
            unrecovered: Mutex::default(),
            mps_daemons: watch::Sender::default(),
            prepared_or_released: Notify::new(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        });
        let weak = Arc::downgrade(&inner);
        let ownership = move |gpu: &GpuUuid, profile_id: u32, start: u32| {
            weak.upgrade()
                .is_some_and(|inner| inner.records.has_instance(&inner.locks, gpu, profile_id, start))
        };
        inner.gpus.set_ownership(Arc::new(ownership));
        let weak = Arc::downgrade(&inner);
        let usage =
            move |gpu: &GpuUuid| weak.upgrade().map(|inner| inner.records.usage(gpu)).unwrap_or_default();
        inner.gpus.set_usage(Arc::new(usage));
        let recovered = inner.inventory();
        let report = inner.recover().await;
        inner.publish_debts();
        inner.tasks.spawn(inner.clone().watch_inventory(recovered));
        inner.tasks.spawn(inner.clone().watch_mps_daemons());
        Ok((Self { inner }, report))
    }

    /// Prepares the claim's devices. A repeated call returns the same answer.
    pub async fn prepare(&self, claim: &AllocatedClaim) -> Result<Vec<PreparedDevice>, PrepareError> {
        let (inner, owned) = (self.inner.clone(), claim.clone());
        let within = inner.options.answer_timeout;
        let task = self.inner.tasks.spawn(async move { inner.prepare(&owned).await });
        match timeout(within, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(PrepareError::Panicked { claim: claim.claim.clone() }),
            Err(_) => Err(PrepareError::Timeout { claim: claim.claim.clone(), within }),
        }
    }

    /// Like [`Self::unprepare`], but refuses while a container of the claim runs. The
    /// kubelet calls unprepare every minute for a pod that was deleted by force, even if its container
    /// still runs (Kubernetes 1.37, `reconcileLoop` of the DRA manager), and repeats a refused call.
    ///
    /// # Errors
    /// A container uses the claim, or those of [`Self::unprepare`].
    pub async fn unprepare_unused(&self, uid: &ClaimUid) -> Result<(), UnprepareError> {
        match Containers::new(&self.inner.options.paths).running(uid) {
            Some(container) => Err(UnprepareError::InUse { uid: uid.clone(), container }),
            None => self.unprepare(uid).await,
        }
    }

    /// Releases the claim's devices from its record alone. An unknown claim counts as released.
    pub async fn unprepare(&self, uid: &ClaimUid) -> Result<(), UnprepareError> {
        let (inner, owned) = (self.inner.clone(), uid.clone());
        let within = inner.options.answer_timeout;
        let task = self.inner.tasks.spawn(async move { inner.unprepare(&owned).await });
        match timeout(within, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(UnprepareError::Panicked { uid: uid.clone() }),
            Err(_) => Err(UnprepareError::Timeout { uid: uid.clone(), within }),
        }
    }

    /// The gauges of claims and shares for `/metrics`.
    pub fn gauges(&self) -> ClaimGauges {
        let count = |held: Vec<HeldClaim>| {
            let count = |state| held.iter().filter(|claim| claim.state == state).count();
            vec![
                ("intent", count(HeldState::Intent)),
                ("prepared", count(HeldState::Prepared)),
                ("releasing", count(HeldState::Releasing)),
            ]
        };
        let shares = self.shares().into_iter().map(|held| ShareGauges {
            namespace: held.claim.namespace,
            claim_uid: held.claim.uid,
            claim: held.claim.name,
            device: held.device.to_string(),
            share: held.share,
            memory_limit: held.limit,
            memory_used: held.used,
        });
        ClaimGauges {
            quarantined: self.quarantined(),
            unmanaged_instances: self.unmanaged().len(),
            // Gauges keep their values while the records cannot be read.
            claims: self.held().map(count).unwrap_or_default(),
            shares: shares.collect(),
        }
    }

    /// Whether a claim holds a time-slice of the GPU. True while the records cannot be read.
    pub fn holds_timeslice(&self, gpu: &Gpu) -> bool {
        let device = DeviceId::Timeslice(gpu.number).name();
        match self.held() {
            Ok(held) => held.iter().any(|claim| claim.devices.contains(&device)),
            Err(_) => true,
        }
    }

    /// Every claim with a record, for comparison with the API server.
    ///
    /// # Errors
    /// A record cannot be read, so its claim is not known.
    pub fn held(&self) -> Result<Vec<HeldClaim>, RecordError> {
        let held = |record: crate::claims::records::ClaimRecord| HeldClaim {
            devices: record.devices.into_iter().map(|device| device.device).collect(),
            claim: record.claim,
            state: record.state,
        };
        Ok(self.inner.records.complete()?.into_iter().map(held).collect())
    }

    /// The devices of every prepared claim and their parts of GPUs.
    ///
    /// # Errors
    /// A record cannot be read, so its claim is not known.
    pub fn held_parts(&self) -> Result<Vec<HeldPart>, RecordError> {
        let prepared =
            self.inner.records.complete()?.into_iter().filter(|record| record.state == HeldState::Prepared);
        let parts = prepared.flat_map(|record| {
            let claim = record.claim;
            record.devices.into_iter().map(move |device| HeldPart {
                claim: claim.clone(),
                device: device.device,
                share_id: device.share_id,
                part: device.part,
            })
        });
        Ok(parts.collect())
    }

    /// The devices of a claim that is prepared, has its pages and CDI file in place, and whose GPUs
    /// are not missing. `None` means that [`Self::prepare`] has work to do or needs to query the hardware.
    pub fn prepared(&self, uid: &ClaimUid) -> Option<Vec<PreparedDevice>> {
        let record = self.inner.records.read(uid).ok()??;
        if record.state != HeldState::Prepared {
            return None;
        }
        let devices = self.inner.executor().known_cdi_devices(&record)?;
        let written = self.inner.cdi.claim_is_written_nonblocking(uid, &devices) == Some(true)
            && self.inner.executor().pages_are_written(&record);
        written.then(|| record.answer())
    }

    /// The MPS control daemons that prepared claims use, and their changes.
    pub fn mps_daemons(&self) -> watch::Receiver<Arc<MpsDaemons>> {
        self.inner.mps_daemons.subscribe()
    }

    /// Number of records that were quarantined since the start.
    pub fn quarantined(&self) -> u64 {
        self.inner.records.quarantined()
    }

    /// GPU instances without a record, according to the current inventory.
    pub fn unmanaged(&self) -> Vec<InstanceKey> {
        let inventory = self.inner.inventory();
        let mut unmanaged = Vec::new();
        for gpu in &inventory.gpus {
            let Mig::Supported { instances, .. } = &gpu.mig else { continue };
            let records = self.inner.records.on(&gpu.uuid);
            for instance in instances.iter().filter(|instance| instance.origin == Origin::Foreign) {
                let key = InstanceKey {
                    gpu: gpu.uuid.clone(),
                    profile_id: instance.profile_id,
                    placement: instance.placement,
                };
                if !records.iter().any(|record| record.devices.iter().any(|device| device.holds(&key))) {
                    unmanaged.push(key);
                }
            }
        }
        unmanaged
    }

    /// Disables MIG mode, without the hold-off, on GPUs where Divvy enabled it and no claim needs
    /// it. Returns the present GPUs on which it could not be disabled.
    pub async fn disable_idle_mig(&self) -> Vec<GpuUuid> {
        self.inner.disable_idle_mig_now().await
    }

    /// Stops the engine's own tasks and waits for calls in progress. No claim is released.
    pub async fn shutdown(&self) {
        self.inner.stop.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }
}

impl Inner {
    pub(crate) fn inventory(&self) -> Arc<Inventory> {
        self.gpus.inventory().borrow().clone()
    }

    pub(crate) fn executor(&self) -> Executor {
        Executor { gpus: self.gpus.clone(), cdi: self.cdi.clone(), not_after: None }
    }

    /// An executor with a deadline that leaves a quarter of the answer time for undoing its steps.
    pub(crate) fn executor_with_deadline(&self, begun: Instant) -> Executor {
        Executor { not_after: Some(begun + self.options.answer_timeout.mul_f32(0.75)), ..self.executor() }
    }
}

/// Why the GPUs of a claim could not be locked, or its record not be read under the locks.
pub(crate) enum ClaimLockError {
    Lock(LockError),
    Record(RecordError),
}

/// Why a claim could not be released.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReleaseError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Lock(#[from] LockError),
}

impl Inner {
    pub(super) async fn prepare(
        self: &Arc<Self>,
        claim: &AllocatedClaim,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let begun = Instant::now();
        let uid = &claim.claim.uid;
        let devices = || names(claim.devices.iter().map(|device| device.device.as_str()));
        let record_error = |cause| PrepareError::Record { claim: claim.claim.clone(), cause };
        let locked_out =
            |cause| PrepareError::Locked { claim: claim.claim.clone(), devices: devices(), cause };
        let _claim = self.claims.lock(uid).await;
        let gpus = plan::gpus(claim, &self.inventory());
        let (mut locked, before) = self.lock(uid, gpus).await.map_err(|unlocked| match unlocked {
            ClaimLockError::Lock(cause) => locked_out(cause),
            ClaimLockError::Record(cause) => record_error(cause),
        })?;
        let release_error = |not| match not {
            ReleaseError::Record(cause) => record_error(cause),
            ReleaseError::Lock(cause) => locked_out(cause),
            ReleaseError::Step(cause) => {
                PrepareError::NotUndone { claim: claim.claim.clone(), devices: devices(), cause }
            }
        };
        match before {
            Some(mut record) if record.state == HeldState::Prepared && is_same_allocation(&record, claim) => {
                let step =
                    |cause| PrepareError::Step { claim: claim.claim.clone(), devices: devices(), cause };
                self.finish_recovery(&mut locked, &mut record).await.map_err(|not| match not {
                    ReleaseError::Step(cause) => step(cause),
                    not => release_error(not),
                })?;
                let answer = self.answer(record).await.map_err(step);
                if answer.is_err() {
                    // The hardware may have lost what the record names; recovery follows from a reading.
                    self.refresh_gpus(&locked);
                }
                return answer;
            }
            // Unfinished, or of an earlier allocation of the same claim.
            Some(record) => self.release(&mut locked, record).await.map_err(release_error)?,
            None => {}
        }

        let plan = self.plan(claim, &locked).await?;
        let mut record = ClaimRecord::intent(&plan, self.epoch());
        self.records.write(&mut locked, &record).map_err(record_error)?;
        self.cdi.write_metadata(claim, &self.inventory());
        let changes_inventory = plan.steps.iter().any(Step::changes_inventory);
        let failed = match self.executor_with_deadline(begun).run(&mut locked, &mut record, &plan.steps).await
        {
            Ok(()) => {
                record.state = HeldState::Prepared;
                match self.records.write(&mut locked, &record) {
                    Ok(()) => None,
                    Err(cause) => Some((plan.undo(), record_error(cause))),
                }
            }
            Err(failed) => {
                let (claim, devices) = (claim.claim.clone(), devices());
                Some((failed.undo, PrepareError::Step { claim, devices, cause: failed.cause }))
            }
        };
        if let Some((undo, error)) = failed {
            self.roll_back(&mut locked, &record, &undo).await;
            self.refresh_gpus(&locked);
            return Err(error);
        }
        if changes_inventory {
            self.refresh_gpus(&locked);
        }
        self.prepared_or_released.notify_one();
        tracing::info!(
            claim = %record.claim, uid = %uid, devices = devices(),
            elapsed_us = begun.elapsed().as_micros() as u64, "claim prepared"
        );
        Ok(record.answer())
    }

    pub(super) async fn unprepare(self: &Arc<Self>, uid: &ClaimUid) -> Result<(), UnprepareError> {
        let begun = Instant::now();
        let record_error = |cause| UnprepareError::Record { uid: uid.clone(), cause };
        let _claim = self.claims.lock(uid).await;
        let (mut locked, record) = match self.lock(uid, BTreeSet::new()).await {
            Ok((locked, Some(record))) => (locked, record),
            // No record ever had such a UID.
            Ok((_, None)) | Err(ClaimLockError::Record(RecordError::Uid { .. })) => return Ok(()),
            Err(ClaimLockError::Record(cause)) => return Err(record_error(cause)),
            Err(ClaimLockError::Lock(cause)) => {
                return Err(UnprepareError::Locked { uid: uid.clone(), cause });
            }
        };
        let (claim, devices) =
            (record.claim.clone(), names(record.devices.iter().map(|d| d.device.as_str())));
        self.release(&mut locked, record).await.map_err(|not| match not {
            ReleaseError::Record(cause) => record_error(cause),
            ReleaseError::Lock(cause) => UnprepareError::Locked { uid: uid.clone(), cause },
            ReleaseError::Step(cause) => {
                UnprepareError::Step { claim: claim.clone(), devices: devices.clone(), cause }
            }
        })?;
        tracing::info!(
            %claim, %uid, devices, elapsed_us = begun.elapsed().as_micros() as u64, "claim released"
        );
        Ok(())
    }

    /// Locks these GPUs and those of the claim's record, and reads the record under the locks,
    /// since another process may change it until then.
    pub(crate) async fn lock(
        &self,
        uid: &ClaimUid,
        gpus: BTreeSet<GpuUuid>,
    ) -> Result<(Locked, Option<ClaimRecord>), ClaimLockError> {
        let within: Duration = self.options.answer_timeout.mul_f32(0.5);
        let mut wanted = gpus;
        loop {
            let mut locked = self.locks.lock(&wanted, within).await.map_err(ClaimLockError::Lock)?;
            self.records.index(&mut locked).map_err(ClaimLockError::Record)?;
            match self.records.read(uid).map_err(ClaimLockError::Record)? {
                Some(record) if !locked.covers(&record.gpus()) => wanted.extend(record.gpus()),
                record => return Ok((locked, record)),
            }
        }
    }

    /// Plans from the current inventory. If an instance that Divvy did not create or a failed reading is
    /// involved, the GPUs are read again first.
    async fn plan(&self, claim: &AllocatedClaim, locked: &Locked) -> Result<Plan, PlanError> {
        for gpu in locked.gpus().iter().map(LockedGpu::uuid) {
            self.settle_debts(locked, gpu).await;
        }
        let first = self.plan_now(claim, locked);
        let look = match &first {
            Ok(plan) => plan.involves_foreign,
            Err(error) => error.may_be_outdated(),
        };
        if !look {
            return first;
        }
        for gpu in locked.gpus() {
            self.gpus.refresh(gpu.uuid()).await;
        }
        self.plan_now(claim, locked)
    }

    fn plan_now(&self, claim: &AllocatedClaim, locked: &Locked) -> Result<Plan, PlanError> {
        let held = self.records.holdings(locked);
        let ownership = locked.gpus().iter().filter(|gpu| gpu.mig_is_ours());
        let mig_enabled = ownership.map(|gpu| gpu.uuid().clone()).collect();
        let mut inventory = self.inventory();
        let debts: Vec<Debt> = locked.gpus().iter().flat_map(|gpu| self.records.debts(gpu.uuid())).collect();
        self.disown_instances(&mut inventory, &debts, &claim.claim.uid);
        let view = View {
            pool: &self.options.pool,
            inventory: &inventory,
            held: &held,
            debts: &debts,
            mig_enabled: &mig_enabled,
        };
        plan::plan(claim, view)
    }

    /// The answer for a prepared claim, after its pages and CDI file were written if necessary.
    async fn answer(&self, mut record: ClaimRecord) -> Result<Vec<PreparedDevice>, StepError> {
        self.executor().write_pages(&mut record).await?;
        self.ensure_cdi(&mut record).await?;
        Ok(record.answer())
    }

    /// Removes the claim's CDI file if one of its GPUs is missing or has another minor: its nodes may be
    /// another GPU's by now. Returns the minors of the GPUs. [`Self::ensure_cdi`] writes the file again.
    pub(crate) fn withhold_or_minors(&self, record: &ClaimRecord) -> Result<BTreeSet<u32>, StepError> {
        let minors =
            self.executor().minors(record).inspect_err(|cause| self.withhold(record, &error_chain(cause)))?;
        if !self.cdi.claim_names_gpus(&record.claim.uid, &minors) {
            self.withhold(record, "a GPU of it has another minor");
        }
        Ok(minors)
    }

    /// Removes the claim's CDI file, so that no container starts with devices that may be another's.
    pub(crate) fn withhold(&self, record: &ClaimRecord, cause: &str) {
        match self.cdi.withhold_claim(&record.claim.uid) {
            Ok(true) => tracing::warn!(claim = %record.claim, cause, "CDI file withheld"),
            Ok(false) => {}
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(claim = %record.claim, error, "CDI file cannot be withheld");
            }
        }
    }

    /// Writes the claim's CDI file if it is missing or differs; returns whether it did. Fails and
    /// removes the file if a GPU is missing.
    pub(crate) async fn ensure_cdi(&self, record: &mut ClaimRecord) -> Result<bool, StepError> {
        let minors = self.withhold_or_minors(record)?;
        // Without the GPU driver the file cannot be made again, but it is still right.
        let is_unread = record.devices.iter().any(|device| self.executor().is_unread(device.part.gpu()));
        if is_unread && self.cdi.claim_names_gpus(&record.claim.uid, &minors) {
            return Ok(false);
        }
        let devices = self.executor().cdi_devices(record).await?;
        let written = match self.cdi.claim_is_written_nonblocking(&record.claim.uid, &devices) {
            Some(written) => written,
            // Missing device nodes or modules are created first, which may take seconds.
            None => {
                let (cdi, uid) = (self.cdi.clone(), record.claim.uid.clone());
                let written = tokio::task::spawn_blocking(move || cdi.claim_is_written(&uid, &devices));
                written.await.map_err(|_| StepError::Task)?
            }
        };
        if written {
            return Ok(false);
        }
        self.executor().write_cdi(record).await?;
        tracing::info!(claim = %record.claim, "CDI file written again");
        Ok(true)
    }

    /// Undoes a failed prepare. Steps that cannot be undone now stay in the record.
    async fn roll_back(self: &Arc<Self>, locked: &mut Locked, record: &ClaimRecord, undo: &[Undo]) {
        let uid = &record.claim.uid;
        let others = self.others(locked, uid);
        let undone = match self.executor().undo(uid, undo, &others).await {
            Ok(()) => self.records.remove(locked, uid).map_err(ReleaseError::from),
            Err(not) => Err(not.cause.into()),
        };
        match undone {
            Ok(()) => self.restore_mig_mode(locked).await,
            Err(error) => tracing::warn!(
                claim = %record.claim, %uid, error = &error as &dyn std::error::Error,
                "failed prepare not undone yet; the next call for the claim starts with it"
            ),
        }
    }

    /// Runs all undo steps of the record, then removes the record. Steps that the hardware refuses
    /// are left as debts if no process of the claim is left.
    pub(crate) async fn release(
        self: &Arc<Self>,
        locked: &mut Locked,
        mut record: ClaimRecord,
    ) -> Result<(), ReleaseError> {
        let hardware = record.undo.iter().any(|undo| undo.gpu().is_some());
        if hardware && record.state == HeldState::Prepared {
            record.state = HeldState::Releasing;
            // Without this mark a retry finds a prepared claim without its instance, and restores
            // the instance before it destroys it: slow, but correct. A full disk must not keep a
            // pod from terminating.
            if let Err(error) = self.records.write(locked, &record) {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(
                    claim = %record.claim, error,
                    "cannot mark the record as Releasing; releasing anyway"
                );
            }
        }
        let mut undo = record.undo.clone();
        if record.epoch.is_over(&self.epoch()) {
            undo.retain(|undo| !undo.is_done_by_epoch());
        }
        let others = self.others(locked, &record.claim.uid);
        if let Err(not) = self.executor().undo(&record.claim.uid, &undo, &others).await {
            self.leave_debts(&record, not).await?;
        }
        self.records.remove(locked, &record.claim.uid)?;
        self.pass_recovery_on(&record, &others);
        self.prepared_or_released.notify_one();
        if record.undo.iter().any(Undo::changes_inventory) {
            self.disable_mig_when_idle(locked);
            self.refresh_gpus(locked);
        }
        Ok(())
    }

    /// Marks the claims that share a part with a released claim as unrecovered if that one was: only one
    /// claim sets up a part for all.
    fn pass_recovery_on(&self, released: &ClaimRecord, others: &[Holding]) {
        let mut unrecovered = self.unrecovered.lock().unwrap_or_else(PoisonError::into_inner);
        if unrecovered.remove(&released.claim.uid) {
            let shares = |other: &&Holding| released.devices.iter().any(|device| device.part == other.part);
            unrecovered.extend(others.iter().filter(shares).map(|other| other.claim.uid.clone()));
        }
    }

    /// The holdings of other claims on the locked GPUs.
    pub(crate) fn others(&self, locked: &Locked, uid: &ClaimUid) -> Vec<Holding> {
        let mut held = self.records.holdings(locked);
        held.retain(|holding| holding.claim.uid != *uid);
        held
    }

    /// Requests a new reading of the locked GPUs, without waiting for it.
    pub(crate) fn refresh_gpus(&self, locked: &Locked) {
        for gpu in locked.gpus() {
            self.gpus.refresh_soon(gpu.uuid());
        }
    }
}

/// Whether the record belongs to this allocation of the claim. Capacities and configuration are not
/// compared: they cannot change within an allocation.
pub(super) fn is_same_allocation(record: &ClaimRecord, claim: &AllocatedClaim) -> bool {
    let same = |(record, claim): (&DeviceRecord, &AllocatedDevice)| {
        record.request == claim.request
            && record.pool == claim.pool
            && record.device == claim.device
            && match &claim.hold {
                Hold::Admin { .. } => record.access == Access::Admin,
                hold => record.access != Access::Admin && record.share_id.as_ref() == hold.share_id(),
            }
    };
    record.devices.len() == claim.devices.len() && record.devices.iter().zip(&claim.devices).all(same)
}

fn names<'a>(devices: impl Iterator<Item = &'a str>) -> String {
    devices.collect::<Vec<_>>().join(", ")
}

impl Engine {
    /// Facts about a claim's devices for its status; devices that this node does not know are left out.
    pub fn facts(&self, uid: &ClaimUid) -> Vec<DeviceFacts> {
        let Ok(Some(record)) = self.inner.records.read(uid) else { return Vec::new() };
        let inventory = self.inner.inventory();
        record.devices.iter().filter_map(|device| facts(device, &inventory)).collect()
    }
}

fn facts(device: &DeviceRecord, inventory: &Inventory) -> Option<DeviceFacts> {
    let mode = match (DeviceId::try_from(&device.device).ok()?.mode(), device.access) {
        // Earlier versions allocated shares on the device of the whole GPU.
        (Mode::Whole, Access::Share(_)) => Mode::Share,
        (mode, _) => mode,
    };
    let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == *device.part.gpu())?;
    let memory = match (device.access.limits(), &device.part) {
        (Some(limits), _) => limits.memory,
        (None, Part::Whole { .. }) => gpu.memory_bytes,
        (None, Part::Instance(key)) => gpu.profile(key.profile_id)?.memory_mib << 20,
    };
    Some(DeviceFacts {
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: device.share_id.clone(),
        data: DeviceData {
            uuid: gpu.uuid.clone(),
            mig_uuid: device.instance.as_ref().map(|ids| ids.uuid.clone()),
            mode,
            memory: (memory > 0).then(|| Quantity::bytes(memory)),
            interval: match device.access.setup() {
                Some(Setup::Timeslice(interval)) => Some(interval),
                Some(Setup::Mps(_)) | None => None,
            },
        },
    })
}

/// A device of a prepared claim, and the part of a GPU that it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPart {
    pub claim: ClaimRef,
    pub device: DeviceName,
    pub share_id: Option<ShareId>,
    pub part: Part,
}

/// A share of a prepared claim, for accounting and for changes of its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldShare {
    pub claim: ClaimRef,
    pub device: DeviceName,
    pub share: ShareId,
    /// Memory limit, in bytes.
    pub limit: u64,
    pub settings: ShareSettings,
    /// Memory in use, in bytes, according to the share's account page; `None` if it cannot be read.
    pub used: Option<u64>,
}

/// Why the settings of shares were not changed. Every message names the claim. The earlier settings
/// stay in force, and the next call tries the change again.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    #[error("claim {claim}, {devices}: the settings of its shares are not changed")]
    Locked {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: LockError,
    },
    #[error("claim {claim}, {devices}: the pages of its shares cannot be changed")]
    Pages {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: StepError,
    },
    #[error("claim {claim}: its record cannot be written or read")]
    Record {
        claim: ClaimRef,
        #[source]
        cause: RecordError,
    },
    #[error("claim {claim}: changing its shares panicked; see the log")]
    Panicked { claim: ClaimRef },
}

impl Engine {
    /// The shares of all prepared claims.
    pub fn shares(&self) -> Vec<HeldShare> {
        let pages = Shares::new(&self.inner.options.paths);
        let (records, _) = self.inner.records.all().unwrap_or_default();
        let of_claim = |record: &ClaimRecord| {
            let held = record.shares().map(|(device, share, limits)| HeldShare {
                claim: record.claim.clone(),
                device: device.device.clone(),
                share: share.clone(),
                limit: limits.memory,
                settings: limits.settings,
                used: pages.used(&record.claim.uid, share),
            });
            held.collect::<Vec<_>>()
        };
        let prepared = records.iter().filter(|record| record.state == HeldState::Prepared);
        prepared.flat_map(of_claim).collect()
    }

    /// Applies the settings in `claim` to its running shares; returns whether any setting differed.
    /// Claims that are not prepared, or have another allocation by now, are left alone.
    pub async fn change_shares(&self, claim: &AllocatedClaim) -> Result<bool, ChangeError> {
        let (inner, owned) = (self.inner.clone(), claim.clone());
        // Runs to its end even if the caller goes away.
        let task = self.inner.tasks.spawn(async move { inner.change_shares(&owned).await });
        task.await.map_err(|_| ChangeError::Panicked { claim: claim.claim.clone() })?
    }
}

impl Inner {
    async fn change_shares(&self, claim: &AllocatedClaim) -> Result<bool, ChangeError> {
        let uid = &claim.claim.uid;
        let record_error = |cause| ChangeError::Record { claim: claim.claim.clone(), cause };
        let names = || names(claim.devices.iter().map(|device| device.device.as_str()));
        let _claim = self.claims.lock(uid).await;
        let (mut locked, record) =
            self.lock(uid, BTreeSet::new()).await.map_err(|unlocked| match unlocked {
                ClaimLockError::Lock(cause) => {
                    ChangeError::Locked { claim: claim.claim.clone(), devices: names(), cause }
                }
                ClaimLockError::Record(cause) => record_error(cause),
            })?;
        let Some(mut record) =
            record.filter(|record| record.state == HeldState::Prepared && is_same_allocation(record, claim))
        else {
            return Ok(false);
        };
        let mut changed = false;
        for (held, device) in record.devices.iter_mut().zip(&claim.devices) {
            let (Access::Share(limits), Ok(settings)) = (held.access, device.share_settings()) else {
                continue;
            };
            // The library is already mounted in the running containers.
            let settings = ShareSettings { injection: limits.settings.injection, ..settings };
            changed |= settings != limits.settings;
            held.access = Access::Share(ShareLimits { settings, ..limits });
        }
        if changed {
            // The record is written last: until it has the new settings, the change is retried.
            self.executor().write_pages(&mut record).await.map_err(|cause| ChangeError::Pages {
                claim: claim.claim.clone(),
                devices: names(),
                cause,
            })?;
            self.records.write(&mut locked, &record).map_err(record_error)?;
        }
        Ok(changed)
    }
}
