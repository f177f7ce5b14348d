//! Prepare and unprepare, step by step, under the claim's and the GPUs' locks.

use super::{HeldState, Inner, PrepareError, PreparedDevice, UnprepareError};
use crate::execute::StepError;
use crate::plan::{self, Access, Holding, Plan, PlanError, View};
use crate::records::{ClaimRecord, DeviceRecord, LockError, Locked, RecordError};
use crate::step::{Step, Undo};
use divvy_api::{AllocatedClaim, AllocatedDevice, ClaimUid, GpuUuid, Hold};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a claim's GPUs are not ours to work on.
pub(crate) enum Unlocked {
    Lock(LockError),
    Record(RecordError),
}

/// Why a claim is still there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotGivenBack {
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
        let no_record = |cause| PrepareError::Record { claim: claim.claim.clone(), cause };
        let locked_out =
            |cause| PrepareError::Locked { claim: claim.claim.clone(), devices: devices(), cause };
        let _claim = self.claims.lock(uid).await;
        let gpus = plan::gpus(claim, &self.inventory());
        let (mut locked, before) = self.lock(uid, gpus).await.map_err(|unlocked| match unlocked {
            Unlocked::Lock(cause) => locked_out(cause),
            Unlocked::Record(cause) => no_record(cause),
        })?;
        let not_done = |not| match not {
            NotGivenBack::Record(cause) => no_record(cause),
            NotGivenBack::Lock(cause) => locked_out(cause),
            NotGivenBack::Step(cause) => {
                PrepareError::NotUndone { claim: claim.claim.clone(), devices: devices(), cause }
            }
        };
        match before {
            Some(mut record) if record.state == HeldState::Prepared && is_of(&record, claim) => {
                let step =
                    |cause| PrepareError::Step { claim: claim.claim.clone(), devices: devices(), cause };
                self.make_whole(&mut locked, &mut record).await.map_err(|not| match not {
                    NotGivenBack::Step(cause) => step(cause),
                    not => not_done(not),
                })?;
                return self.answer(record).await.map_err(step);
            }
            // Half done, or of an allocation that is no more.
            Some(record) => self.give_back(&mut locked, record).await.map_err(not_done)?,
            None => {}
        }

        let plan = self.plan(claim, &locked).await?;
        let mut record = ClaimRecord::intent(&plan);
        self.records.write(&mut locked, &record).map_err(no_record)?;
        self.cdi.write_metadata(claim, &self.inventory());
        let shows = plan.steps.iter().any(Step::shows);
        let failed = match self.hurried_hands(begun).run(&mut locked, &mut record, &plan.steps).await {
            Ok(()) => {
                record.state = HeldState::Prepared;
                match self.records.write(&mut locked, &record) {
                    Ok(()) => None,
                    Err(cause) => Some((plan.undo(), no_record(cause))),
                }
            }
            Err(failed) => {
                let (claim, devices) = (claim.claim.clone(), devices());
                Some((failed.undo, PrepareError::Step { claim, devices, cause: failed.cause }))
            }
        };
        if let Some((undo, error)) = failed {
            self.roll_back(&mut locked, &record, &undo).await;
            self.look_again(&locked);
            return Err(error);
        }
        if shows {
            self.look_again(&locked);
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
        let no_record = |cause| UnprepareError::Record { uid: uid.clone(), cause };
        let _claim = self.claims.lock(uid).await;
        let (mut locked, record) = match self.lock(uid, BTreeSet::new()).await {
            Ok((locked, Some(record))) => (locked, record),
            // No claim of ours ever had such a UID.
            Ok((_, None)) | Err(Unlocked::Record(RecordError::Uid { .. })) => return Ok(()),
            Err(Unlocked::Record(cause)) => return Err(no_record(cause)),
            Err(Unlocked::Lock(cause)) => return Err(UnprepareError::Locked { uid: uid.clone(), cause }),
        };
        let (claim, devices) =
            (record.claim.clone(), names(record.devices.iter().map(|d| d.device.as_str())));
        self.give_back(&mut locked, record).await.map_err(|not| match not {
            NotGivenBack::Record(cause) => no_record(cause),
            NotGivenBack::Lock(cause) => UnprepareError::Locked { uid: uid.clone(), cause },
            NotGivenBack::Step(cause) => {
                UnprepareError::Step { claim: claim.clone(), devices: devices.clone(), cause }
            }
        })?;
        tracing::info!(
            %claim, %uid, devices, elapsed_us = begun.elapsed().as_micros() as u64, "claim released"
        );
        Ok(())
    }

    /// Locks the GPUs of the claim's record and these, and reads the record
    /// under the lock: another process may have changed it meanwhile.
    pub(crate) async fn lock(
        &self,
        uid: &ClaimUid,
        gpus: BTreeSet<GpuUuid>,
    ) -> Result<(Locked, Option<ClaimRecord>), Unlocked> {
        let within: Duration = self.options.answer_within.mul_f32(0.5);
        let mut wanted = gpus;
        loop {
            let mut locked = self.locks.lock(&wanted, within).await.map_err(Unlocked::Lock)?;
            self.records.index(&mut locked).map_err(Unlocked::Record)?;
            match self.records.read(uid).map_err(Unlocked::Record)? {
                Some(record) if !locked.covers(&record.gpus()) => wanted.extend(record.gpus()),
                record => return Ok((locked, record)),
            }
        }
    }

    /// Plans with what is known; where somebody else's instance matters, only
    /// after a look at the hardware.
    async fn plan(&self, claim: &AllocatedClaim, locked: &Locked) -> Result<Plan, PlanError> {
        let first = self.plan_now(claim, locked);
        let look = match &first {
            Ok(plan) => plan.meets_foreign,
            Err(error) => error.meets_foreign(),
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
        let ours = locked.gpus().iter().filter(|gpu| gpu.mig_is_ours());
        let mig_enabled = ours.map(|gpu| gpu.uuid().clone()).collect();
        let inventory = self.inventory();
        let view =
            View { pool: &self.options.pool, inventory: &inventory, held: &held, mig_enabled: &mig_enabled };
        plan::plan(claim, view)
    }

    /// The answer of a claim that is prepared, with its pages and its CDI file as they must be.
    async fn answer(&self, mut record: ClaimRecord) -> Result<Vec<PreparedDevice>, StepError> {
        self.hands().write_pages(&mut record).await?;
        self.ensure_cdi(&mut record).await?;
        Ok(record.answer())
    }

    /// Whether the claim's CDI file had to be written again.
    pub(crate) async fn ensure_cdi(&self, record: &mut ClaimRecord) -> Result<bool, StepError> {
        let devices = self.hands().cdi_devices(record).await?;
        let written = match self.cdi.claim_is_written_at_once(&record.claim.uid, &devices) {
            Some(written) => written,
            // A node or module that is missing is made first, and that may take seconds.
            None => {
                let (cdi, uid) = (self.cdi.clone(), record.claim.uid.clone());
                let written = tokio::task::spawn_blocking(move || cdi.claim_is_written(&uid, &devices));
                written.await.map_err(|_| StepError::Task)?
            }
        };
        if written {
            return Ok(false);
        }
        self.hands().write_cdi(record).await?;
        tracing::info!(claim = %record.claim, "CDI file written again");
        Ok(true)
    }

    /// Takes a failed prepare back. What cannot be taken back stays announced.
    async fn roll_back(self: &Arc<Self>, locked: &mut Locked, record: &ClaimRecord, undo: &[Undo]) {
        let uid = &record.claim.uid;
        let others = self.others(locked, uid);
        let undone = match self.hands().undo(uid, undo, &others).await {
            Ok(()) => self.records.remove(locked, uid).map_err(NotGivenBack::from),
            Err(cause) => Err(cause.into()),
        };
        match undone {
            Ok(()) => self.rest_as_before(locked).await,
            Err(error) => tracing::warn!(
                claim = %record.claim, %uid, error = &error as &dyn std::error::Error,
                "failed prepare not undone yet; the claim's next call begins with it"
            ),
        }
    }

    /// Undoes all that the record announces, then removes it.
    pub(crate) async fn give_back(
        self: &Arc<Self>,
        locked: &mut Locked,
        mut record: ClaimRecord,
    ) -> Result<(), NotGivenBack> {
        let hardware = record.undo.iter().any(|undo| undo.gpu().is_some());
        if hardware && record.state == HeldState::Prepared {
            record.state = HeldState::Releasing;
            // Without the mark a retry finds a prepared claim without instance,
            // and makes it before it takes it back: slow, not wrong. A full
            // disk must not keep a pod from ending.
            if let Err(error) = self.records.write(locked, &record) {
                tracing::warn!(claim = %record.claim, error = &error as &dyn std::error::Error, "release not marked");
            }
        }
        let others = self.others(locked, &record.claim.uid);
        self.hands().undo(&record.claim.uid, &record.undo, &others).await?;
        self.records.remove(locked, &record.claim.uid)?;
        self.prepared_or_released.notify_one();
        if record.undo.iter().any(Undo::shows) {
            self.rest_later(locked);
            self.look_again(locked);
        }
        Ok(())
    }

    /// What other claims hold on the locked GPUs.
    pub(crate) fn others(&self, locked: &Locked, uid: &ClaimUid) -> Vec<Holding> {
        let mut held = self.records.holdings(locked);
        held.retain(|holding| holding.claim.uid != *uid);
        held
    }

    /// Has the inventory describe the locked GPUs anew, without waiting for it.
    pub(crate) fn look_again(&self, locked: &Locked) {
        for gpu in locked.gpus() {
            self.gpus.refresh_soon(gpu.uuid());
        }
    }
}

/// Whether the record is of this allocation of the claim. Capacities and
/// configuration do not change under an allocation.
pub(super) fn is_of(record: &ClaimRecord, claim: &AllocatedClaim) -> bool {
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
