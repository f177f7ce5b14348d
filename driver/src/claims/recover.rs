//! Recovery: compares records with the hardware, at the start and after each change of a GPU.
//!
//! The kubelet does not repeat a prepare that succeeded, so missing parts of a Prepared claim are
//! restored: instances, share pages, MPS daemons, CDI file. The file is withheld while a GPU of the
//! claim is missing. An unfinished record is undone, and debts are settled. An unmanaged instance is
//! reported, and destroyed only on GPUs with exclusive ownership. Time slices and compute modes without
//! a record stay. Files without a record are left to [`crate::claims::leftovers`].

use crate::claims::engine::{ClaimLockError, ReleaseError};
use crate::claims::engine::{Inner, RecoveryReport};
use crate::claims::execute::{Executor, StepError, matches_key};
use crate::claims::holding::Holding;
use crate::claims::records::HeldState;
use crate::claims::records::{ClaimRecord, DeviceRecord, Locked};
use crate::claims::step::{Step, Undo};
use crate::gpu::mps::{self, Mps};
use crate::gpu::part::{InstanceKey, Part};
use crate::gpu::sharing::Setup;
use divvy_api::sharing::Interval;
use divvy_api::text::error_chain;
use divvy_api::{ClaimRef, ClaimUid, GpuUuid};
use divvy_model::inventory::{Mig, MigMode, MigToggle, Presence};
use divvy_model::{Gpu, Inventory};
use futures::future::join_all;
use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Interval at which the records are compared with the inventory when no GPU changes.
const AUDIT_INTERVAL: Duration = Duration::from_secs(10);
/// Time that the start may wait for all MPS control daemons together. Claims that need no daemon
/// must not wait for a missing supervisor.
const ALL_DAEMONS_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a later recovery of one claim may wait for its daemons, with its GPUs locked.
const CLAIM_DAEMONS_TIMEOUT: Duration = Duration::from_secs(2);

/// Result of recovering one claim.
enum ClaimOutcome {
    Unchanged,
    Undone,
    Restored,
    Gone,
}

impl Inner {
    /// Recovers every claim with a record, and every usable GPU, once.
    pub(crate) async fn recover(self: &Arc<Self>) -> RecoveryReport {
        let mut report = RecoveryReport::default();
        match self.records.all() {
            Ok((records, quarantined)) => {
                report.quarantined = quarantined.into_iter().map(|aside| (aside.path, aside.cause)).collect();
                // First and without a lock, so that no file outlives a failing recovery.
                for record in records.iter().filter(|record| record.state == HeldState::Prepared) {
                    let _logged = self.withhold_or_minors(record);
                }
                let by = Instant::now() + ALL_DAEMONS_TIMEOUT;
                let settle = async |record: ClaimRecord| {
                    let outcome = self.recover_claim(&record.claim.uid, by).await;
                    (record.claim, outcome)
                };
                for (claim, outcome) in join_all(records.into_iter().map(settle)).await {
                    add_to_report(&mut report, claim, outcome);
                }
            }
            Err(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "cannot list the records; no claim is recovered"
                );
            }
        }
        let inventory = self.inventory();
        let usable = inventory.gpus.iter().filter(|gpu| gpu.is_usable());
        let unmanaged = join_all(usable.map(|gpu| self.recover_gpu(gpu))).await;
        report.unmanaged = unmanaged.into_iter().flatten().map(|key| key.to_string()).collect();
        report
    }

    /// Recovers GPUs that appear, come back, lose instances, or get another minor or driver, and
    /// withholds the CDI files of GPUs that disappear. A loss that the
    /// inventory shows is handled at once; the audit handles losses between two readings and
    /// retries what failed.
    pub(crate) async fn watch_inventory(self: Arc<Self>, outcome: Arc<Inventory>) {
        let mut inventories = self.gpus.inventory();
        // The inventory may have changed during the first recovery.
        inventories.mark_changed();
        let mut last = outcome;
        let mut audit = tokio::time::interval_at(Instant::now() + AUDIT_INTERVAL, AUDIT_INTERVAL);
        loop {
            let mut is_audit = false;
            tokio::select! {
                () = self.stop.cancelled() => return,
                changed = inventories.changed() => if changed.is_err() { return },
                _ = audit.tick() => is_audit = true,
            }
            let now = inventories.borrow_and_update().clone();
            let driver_changed = now.driver_version != last.driver_version && !now.driver_version.is_empty();
            for gpu in &now.gpus {
                let was = last.gpus.iter().find(|was| was.uuid == gpu.uuid);
                let is_new = was.is_none_or(|was| !was.is_usable());
                let changed = was.is_none_or(|was| was.mig != gpu.mig);
                let files_change = was
                    .is_none_or(|was| (was.presence, was.minor) != (gpu.presence, gpu.minor))
                    || (is_audit && self.has_unfinished_claim(gpu) && gpu.presence == Presence::Unread);
                let hardware_changed = gpu.is_usable()
                    && (is_new
                        || driver_changed
                        || ((changed || is_audit) && self.misses_instance(gpu))
                        || (is_audit && (self.has_unfinished_claim(gpu) || self.has_debts(gpu))));
                if files_change || hardware_changed {
                    let (inner, gpu) = (self.clone(), gpu.clone());
                    self.tasks.spawn(async move { inner.recover_gpu_and_claims(&gpu).await });
                }
            }
            last = now;
        }
    }

    /// Recovers one GPU and the claims on it.
    async fn recover_gpu_and_claims(self: &Arc<Self>, gpu: &Gpu) {
        let mut report = RecoveryReport::default();
        let only = BTreeSet::from([gpu.uuid.clone()]);
        let claims = match self.locks.lock(&only, self.options.answer_timeout).await {
            Ok(mut locked) => match self.records.index(&mut locked) {
                Ok(()) => self.records.on(&gpu.uuid),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(gpu = %gpu.uuid, error, "cannot read the records; GPU not recovered");
                    return;
                }
            },
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(gpu = %gpu.uuid, error, "cannot lock the GPU; not recovered");
                return;
            }
        };
        for record in claims {
            let by = Instant::now() + CLAIM_DAEMONS_TIMEOUT;
            let outcome = self.recover_claim(&record.claim.uid, by).await;
            add_to_report(&mut report, record.claim.clone(), outcome);
        }
        if gpu.is_usable() {
            self.recover_gpu(gpu).await;
        }
    }

    /// Recovers one claim. `by` is the deadline for its MPS control daemons.
    async fn recover_claim(
        self: &Arc<Self>,
        uid: &ClaimUid,
        by: Instant,
    ) -> Result<ClaimOutcome, ReleaseError> {
        let outcome = self.try_recover_claim(uid, by).await;
        let mut unrecovered = self.unrecovered.lock().unwrap_or_else(PoisonError::into_inner);
        match &outcome {
            Ok(_) => unrecovered.remove(uid),
            Err(_) => unrecovered.insert(uid.clone()),
        };
        outcome
    }

    async fn try_recover_claim(
        self: &Arc<Self>,
        uid: &ClaimUid,
        by: Instant,
    ) -> Result<ClaimOutcome, ReleaseError> {
        let _claim = self.claims.lock(uid).await;
        let (mut locked, record) = match self.lock(uid, BTreeSet::new()).await {
            Ok(locked) => locked,
            Err(ClaimLockError::Record(error)) => return Err(error.into()),
            Err(ClaimLockError::Lock(error)) => return Err(ReleaseError::Lock(error)),
        };
        let Some(mut record) = record else { return Ok(ClaimOutcome::Gone) };
        match record.state {
            HeldState::Intent | HeldState::Releasing => {
                self.release(&mut locked, record).await?;
                Ok(ClaimOutcome::Undone)
            }
            HeldState::Prepared => match self.restore(&mut locked, &mut record, by).await? {
                true => Ok(ClaimOutcome::Restored),
                false => Ok(ClaimOutcome::Unchanged),
            },
        }
    }

    /// Restores a prepared claim that could not be restored yet, before prepare answers again: its
    /// pod starts now, and the next audit may be seconds away.
    pub(crate) async fn finish_recovery(
        self: &Arc<Self>,
        locked: &mut Locked,
        record: &mut ClaimRecord,
    ) -> Result<(), ReleaseError> {
        let unrecovered = || self.unrecovered.lock().unwrap_or_else(PoisonError::into_inner);
        let is_whole = !unrecovered().contains(&record.claim.uid);
        if !is_whole {
            self.restore(locked, record, Instant::now() + CLAIM_DAEMONS_TIMEOUT).await?;
            unrecovered().remove(&record.claim.uid);
        }
        Ok(())
    }

    /// Restores the missing parts of a prepared claim; returns whether anything was missing.
    async fn restore(
        self: &Arc<Self>,
        locked: &mut Locked,
        record: &mut ClaimRecord,
        by: Instant,
    ) -> Result<bool, ReleaseError> {
        self.withhold_or_minors(record)?;
        let before = record.clone();
        let executor = self.executor();
        let now = self.epoch();
        let was_reset = record.epoch.is_over(&now);
        // Until NVML is open, instances are not checked, and whether they are of this epoch stays open.
        if !record.gpus().iter().any(|gpu| executor.is_unread(gpu)) {
            record.epoch = now;
        }
        let others = self.others(locked, &record.claim.uid);
        let mut steps = Vec::new();
        for device in record.devices.iter_mut().filter(|device| device.access.holds()) {
            let Part::Instance(key) = &device.part else { continue };
            // The instance is checked when NVML is open again.
            if device.instance.is_some() && executor.is_unread(&key.gpu) {
                continue;
            }
            let found = executor.find(key, &format!("find {key}")).await?;
            // An instance that exists after a reset, and that no other claim created, has another owner.
            if was_reset
                && found.is_some()
                && others.iter().all(|other| other.made.is_empty() || other.part != device.part)
            {
                record.undo.retain(|undo| !undo.destroys(&device.part));
            }
            match found {
                None => {
                    if self.toggles_live(&key.gpu) {
                        steps.push(Step::EnableMig { gpu: key.gpu.clone() });
                    }
                    steps.push(Step::CreateGpuInstance(key.clone()));
                    steps.push(Step::CreateComputeInstance(key.clone()));
                    device.instance = None;
                }
                Some(found) if found.compute_instances.is_empty() => {
                    steps.push(Step::CreateComputeInstance(key.clone()));
                    device.instance = None;
                }
                Some(found) => {
                    let same = device.instance.as_ref().is_some_and(|ids| {
                        ids.gpu_instance == found.id
                            && found
                                .compute_instances
                                .iter()
                                .any(|compute| compute.id == ids.compute_instance && compute.uuid == ids.uuid)
                    });
                    if !same {
                        device.instance = None;
                    }
                }
            }
        }
        let is_other = |device: &DeviceRecord| {
            device.access.holds() && device.instance.is_none() && matches!(device.part, Part::Instance(_))
        };
        if record.devices.iter().any(is_other) {
            // Its ids may be another instance's by now.
            self.withhold(record, "an instance of it is not the one that it names");
        }
        add_undo(record, &steps);
        if (&record.undo, &record.epoch) != (&before.undo, &before.epoch) {
            self.records.write(locked, record)?;
        }
        executor.run(locked, record, &steps).await.map_err(|failed| failed.cause)?;
        let paged = executor.write_pages(record).await?;
        let written = self.ensure_cdi(record).await? || paged;
        if *record != before {
            self.records.write(locked, record)?;
        }
        if !steps.is_empty() {
            self.refresh_gpus(locked);
        }
        let set_up = self.restore_setup(locked, record, by).await?;
        Ok(written || set_up || !steps.is_empty())
    }

    /// Restores the sharing setup of the claim's devices; returns whether an MPS control daemon was
    /// missing. An interval cannot be read back, so one claim of each GPU sets it again.
    async fn restore_setup(
        &self,
        locked: &mut Locked,
        record: &mut ClaimRecord,
        by: Instant,
    ) -> Result<bool, StepError> {
        let executor = Executor { not_after: Some(by.into_std()), ..self.executor() };
        let mps = Mps::new(&self.options.paths);
        let others = self.others(locked, &record.claim.uid);
        let mut missing = false;
        for device in record.devices.clone() {
            let (part, gpu) = (&device.part, device.part.gpu());
            // Set up when NVML is open again.
            if executor.is_unread(gpu) {
                continue;
            }
            match device.access.setup() {
                None | Some(Setup::Timeslice(Interval::Default)) => {}
                Some(Setup::Timeslice(interval)) => {
                    let is_first = others.iter().all(|other| {
                        !other.ready || other.part != *part || other.claim.uid > record.claim.uid
                    });
                    let step = Step::SetInterval { gpu: gpu.clone(), interval };
                    if is_first {
                        self.executor().run(locked, record, &[step]).await.map_err(|failed| failed.cause)?;
                    }
                }
                Some(Setup::Mps(limits)) => {
                    missing |= mps.actual(part).is_none();
                    let mode =
                        matches!(part, Part::Whole { .. }).then(|| Step::SetComputeMode { gpu: gpu.clone() });
                    let start = Step::StartMps { part: part.clone(), limits };
                    let steps: Vec<Step> = mode.into_iter().chain([start]).collect();
                    executor.run(locked, record, &steps).await.map_err(|failed| failed.cause)?;
                }
            }
        }
        Ok(missing)
    }

    /// Handles MIG mode, instances and MPS control daemons of the GPU that have no record. Returns
    /// the unmanaged instances that remain.
    pub(crate) async fn recover_gpu(self: &Arc<Self>, gpu: &Gpu) -> Vec<InstanceKey> {
        match self.try_recover_gpu(gpu).await {
            Ok(unmanaged) => unmanaged,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(gpu = %gpu.uuid, error, "GPU not recovered");
                Vec::new()
            }
        }
    }

    async fn try_recover_gpu(self: &Arc<Self>, gpu: &Gpu) -> Result<Vec<InstanceKey>, ReleaseError> {
        let only = BTreeSet::from([gpu.uuid.clone()]);
        let mut locked =
            self.locks.lock(&only, self.options.answer_timeout).await.map_err(ReleaseError::Lock)?;
        self.records.index(&mut locked)?;
        let debts = self.settle_debts(&locked, &gpu.uuid).await;
        let executor = self.executor();
        let held = self.records.holdings(&locked);
        self.stop_unmanaged_daemons(gpu, &held).await?;
        let mut unmanaged = Vec::new();
        let Mig::Supported { .. } = gpu.mig else { return Ok(unmanaged) };
        for instance in executor.instances(&gpu.uuid).await? {
            let recorded = held
                .iter()
                .any(|holding| matches!(&holding.part, Part::Instance(key) if matches_key(&instance, key)));
            let owed =
                debts.iter().any(|debt| debt.has_instance(instance.profile_id, instance.placement.start));
            if recorded || owed {
                continue;
            }
            let key = InstanceKey {
                gpu: gpu.uuid.clone(),
                profile_id: instance.profile_id,
                placement: instance.placement,
            };
            if gpu.policy.exclusive_ownership {
                match executor.destroy(&key).await {
                    Ok(()) => {
                        tracing::warn!(
                            instance = %key,
                            "unmanaged instance destroyed: Divvy owns this GPU exclusively"
                        );
                        continue;
                    }
                    Err(error) => tracing::warn!(
                        instance = %key, error = &error as &dyn std::error::Error,
                        "unmanaged instance cannot be destroyed"
                    ),
                }
            } else {
                tracing::warn!(instance = %key, "instance has no record and is left alone");
            }
            unmanaged.push(key);
        }
        self.reconcile_mig_mode(&mut locked, &gpu.uuid).await?;
        if gpu.policy.exclusive_ownership {
            self.refresh_gpus(&locked);
        }
        Ok(unmanaged)
    }

    /// Stops MPS control daemons without a record. A daemon's directory implies that Divvy set the
    /// GPU's compute mode, so that is reset too.
    async fn stop_unmanaged_daemons(&self, gpu: &Gpu, held: &[Holding]) -> Result<(), StepError> {
        let mps = Mps::new(&self.options.paths);
        let has_claim = |target: &str| {
            let clients = held.iter().filter(|held| matches!(held.access.setup(), Some(Setup::Mps(_))));
            clients.map(|held| mps::target(&held.part)).any(|recorded| recorded == target)
        };
        for target in mps.targets() {
            let suffix = target.strip_prefix(gpu.uuid.as_str());
            let is_on_gpu = suffix.is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('-'));
            if !is_on_gpu || has_claim(&target) {
                continue;
            }
            tracing::warn!(target, "MPS control daemon has no record; stopping it");
            mps.release(&mps.dir().join(&target))?;
            if suffix == Some("") {
                self.executor().reset_compute_mode(&gpu.uuid).await?;
            }
        }
        Ok(())
    }

    /// Updates the ownership of MIG mode: after a reboot turned it off, it is not Divvy's any more.
    /// If it is on and the GPU has no instance, it is disabled after the hold-off.
    async fn reconcile_mig_mode(
        self: &Arc<Self>,
        locked: &mut Locked,
        uuid: &GpuUuid,
    ) -> Result<(), ReleaseError> {
        let Some(gpu) = locked.gpu(uuid).filter(|gpu| gpu.mig_is_ours()) else { return Ok(()) };
        match self.executor().read_mig_mode(uuid).await? {
            MigMode::Off => gpu.set_mig_ours(false).map_err(StepError::from)?,
            MigMode::On => self.disable_mig_when_idle(locked),
        }
        Ok(())
    }

    fn toggles_live(&self, uuid: &GpuUuid) -> bool {
        let inventory = self.inventory();
        let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == *uuid);
        gpu.is_some_and(|gpu| matches!(gpu.mig, Mig::Supported { toggle: MigToggle::Live, .. }))
    }

    /// Whether a claim on the GPU waits to be undone or restored and no call is working on it.
    fn has_unfinished_claim(&self, gpu: &Gpu) -> bool {
        let unrecovered = self.unrecovered.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let waits = |record: &Arc<ClaimRecord>| {
            let uid = &record.claim.uid;
            (record.state != HeldState::Prepared || unrecovered.contains(uid)) && !self.claims.is_busy(uid)
        };
        self.records.on(&gpu.uuid).iter().any(waits)
    }

    /// Whether a prepared claim holds an instance that the inventory does not show.
    fn misses_instance(&self, gpu: &Gpu) -> bool {
        let Mig::Supported { instances, .. } = &gpu.mig else { return false };
        let missing = |part: &Part| {
            matches!(part, Part::Instance(key) if key.gpu == gpu.uuid && !instances.iter().any(|instance| {
                instance.profile_id == key.profile_id && instance.placement.start == key.placement.start
            }))
        };
        self.records.on(&gpu.uuid).iter().any(|record| {
            record.state == HeldState::Prepared && record.holdings().any(|holding| missing(&holding.part))
        })
    }
}

/// Adds the undo steps of `steps` to the record, which is written before the steps run.
fn add_undo(record: &mut ClaimRecord, steps: &[Step]) {
    let new: Vec<Undo> =
        steps.iter().filter_map(Step::undo).filter(|undo| !record.undo.contains(undo)).collect();
    // In front of the CDI file's undo: the list runs in reverse, so the file is removed first.
    record.undo.splice(0..0, new);
}

/// Adds the result of one claim to the report, and logs it.
fn add_to_report(report: &mut RecoveryReport, claim: ClaimRef, outcome: Result<ClaimOutcome, ReleaseError>) {
    match outcome {
        Ok(ClaimOutcome::Unchanged | ClaimOutcome::Gone) => {}
        Ok(ClaimOutcome::Undone) => {
            tracing::info!(%claim, "unfinished claim undone");
            report.undone.push(claim);
        }
        Ok(ClaimOutcome::Restored) => {
            tracing::info!(%claim, "prepared claim restored");
            report.restored.push(claim);
        }
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%claim, error, "cannot undo or restore the claim yet");
            report.failed.push((claim, error_chain(error)));
        }
    }
}
