//! The only room that changes hardware, and only what a record announces.
//!
//! Each step has its deadline in the GPU's queue; nothing here waits longer,
//! and nothing is retried. What a failed step leaves is taken back by the
//! caller with the same [`undo`](Hands::undo) that releases a claim.

mod files;

use crate::cdi::{Cdi, CdiError};
use crate::gpus::{Gpus, Unavailable};
use crate::mps::{self, Mps, MpsError};
use crate::plan::{Holding, Part};
use crate::records::{ClaimRecord, DeviceRecord, GpuFileError, InstanceIds, Locked};
use crate::shares::policy::Unwritable;
use crate::shares::{PagesError, Shares};
use crate::sharing::MpsLimits;
use crate::step::{InstanceKey, Step, Undo};
use crate::timeslice::{self, TimesliceError};
use divvy_api::sharing::Interval;
use divvy_api::{ClaimUid, GpuUuid};
use divvy_model::inventory::{Condition, Gpu, MigMode, Presence};
use divvy_nvml::{ComputeMode, GpuQueue, NvmlError, RawInstance};
use std::collections::BTreeMap;
use std::time::Instant;

/// Does and undoes steps, none later than a time.
#[derive(Clone)]
pub struct Hands {
    pub gpus: Gpus,
    pub cdi: Cdi,
    pub not_after: Option<Instant>,
}

/// Why a step was not done.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error("cannot {step}")]
    Hardware {
        step: String,
        #[source]
        cause: NvmlError,
    },
    #[error("cannot {step}")]
    Unavailable {
        step: String,
        #[source]
        cause: Unavailable,
    },
    #[error("{key} is not there; somebody else destroyed it")]
    Gone { key: InstanceKey },
    #[error("{key} has no compute instance")]
    Hollow { key: InstanceKey },
    #[error("the inventory has no {gpu}")]
    Unknown { gpu: GpuUuid },
    #[error("cannot {step}")]
    Timeslice {
        step: String,
        #[source]
        cause: TimesliceError,
    },
    #[error(transparent)]
    Mps(#[from] MpsError),
    #[error(transparent)]
    GpuFile(#[from] GpuFileError),
    #[error(transparent)]
    Pages(#[from] PagesError),
    #[error(transparent)]
    Unwritable(#[from] Unwritable),
    #[error(transparent)]
    Cdi(#[from] CdiError),
    #[error("the task that writes the CDI file failed")]
    Task,
}

/// A step that failed, after those that were done.
#[derive(Debug)]
pub struct Failed {
    pub cause: StepError,
    /// What takes back the steps that were done or may have been, in their order.
    pub undo: Vec<Undo>,
}

impl StepError {
    /// Whether the hardware may have changed all the same.
    fn may_have_taken_effect(&self) -> bool {
        match self {
            Self::Hardware { cause, .. } => cause.may_take_effect(),
            Self::Timeslice { cause, .. } => cause.may_have_taken_effect(),
            // What was asked for stays asked for.
            Self::Mps(_) => true,
            _ => false,
        }
    }
}

impl Hands {
    /// Does the steps in order; afterwards the devices of the record have their ids.
    pub async fn run(
        &self,
        locked: &mut Locked,
        record: &mut ClaimRecord,
        steps: &[Step],
    ) -> Result<(), Failed> {
        let mut done = Vec::new();
        let mut made = BTreeMap::new();
        for step in steps {
            let begun = Instant::now();
            if let Err(cause) = self.step(locked, record, &mut made, step).await {
                let partly =
                    matches!(step, Step::WritePages | Step::WriteCdi) || cause.may_have_taken_effect();
                done.extend(step.undo().filter(|_| partly));
                return Err(Failed { cause, undo: done });
            }
            done.extend(step.undo());
            tracing::debug!(claim = %record.claim, %step, elapsed_us = begun.elapsed().as_micros() as u64, "step done");
        }
        Ok(())
    }

    /// One step; `made` has the ids of the GPU instances that earlier steps made.
    async fn step(
        &self,
        locked: &mut Locked,
        record: &mut ClaimRecord,
        made: &mut BTreeMap<InstanceKey, u32>,
        step: &Step,
    ) -> Result<(), StepError> {
        match step {
            Step::EnableMig { gpu } => self.enable_mig(locked, gpu).await,
            Step::DisableMig { gpu } => self.disable_mig(locked, gpu).await,
            Step::CreateGpuInstance(key) => {
                let queue = self.queue(&key.gpu, step)?;
                let created = queue.create_gpu_instance(key.profile_id, key.placement).await;
                made.insert(key.clone(), created.map_err(|cause| hardware(step, cause))?);
                Ok(())
            }
            Step::CreateComputeInstance(key) => {
                let gpu_instance = match made.get(key) {
                    Some(gpu_instance) => *gpu_instance,
                    None => {
                        self.find(key, step).await?.ok_or_else(|| StepError::Gone { key: key.clone() })?.id
                    }
                };
                let queue = self.queue(&key.gpu, step)?;
                let created = queue.create_compute_instance(gpu_instance).await;
                let created = created.map_err(|cause| hardware(step, cause))?;
                let ids = InstanceIds { gpu_instance, compute_instance: created.id, uuid: created.uuid };
                let own = |device: &&mut DeviceRecord| device.holds(key);
                record.devices.iter_mut().filter(own).for_each(|device| device.instance = Some(ids.clone()));
                Ok(())
            }
            Step::SetInterval { gpu, interval } => self.set_interval(gpu, *interval, step).await,
            Step::SetComputeMode { gpu } => {
                self.set_compute_mode(gpu, ComputeMode::ExclusiveProcess, step).await
            }
            Step::StartMps { part, limits } => self.start_mps(record, part, *limits).await,
            Step::Join(_) => Ok(()),
            Step::WritePages => self.write_pages(record).await.map(drop),
            Step::WriteCdi => self.write_cdi(record).await,
        }
    }

    async fn set_interval(
        &self,
        gpu: &GpuUuid,
        interval: Interval,
        step: &impl ToString,
    ) -> Result<(), StepError> {
        let set = timeslice::set(self.cdi.paths(), gpu, interval, self.not_after).await;
        set.map_err(|cause| StepError::Timeslice { step: step.to_string(), cause })?;
        tracing::info!(%gpu, %interval, "time slice set");
        Ok(())
    }

    /// Back to DEFAULT, where it is EXCLUSIVE_PROCESS.
    pub async fn reset_compute_mode(&self, gpu: &GpuUuid) -> Result<(), StepError> {
        let undo = Undo::ResetComputeMode { gpu: gpu.clone() };
        self.set_compute_mode(gpu, ComputeMode::Default, &undo).await
    }

    async fn set_compute_mode(
        &self,
        gpu: &GpuUuid,
        mode: ComputeMode,
        step: &impl ToString,
    ) -> Result<(), StepError> {
        let set = self.queue(gpu, step)?.set_compute_mode(mode).await;
        set.map_err(|cause| hardware(step, cause))
    }

    /// The daemon of a part that the record holds.
    async fn start_mps(
        &self,
        record: &mut ClaimRecord,
        part: &Part,
        limits: MpsLimits,
    ) -> Result<(), StepError> {
        let device = match part {
            Part::Whole { gpu } => gpu.to_string(),
            Part::Instance(key) => {
                let known = record.devices.iter().find(|device| device.holds(key));
                match known.and_then(|device| device.instance.as_ref()) {
                    Some(ids) => ids.uuid.clone(),
                    None => self.ids(key).await?.uuid,
                }
            }
        };
        let by = Instant::now() + mps::START_WITHIN;
        let by = self.not_after.map_or(by, |not_after| by.min(not_after));
        Ok(self.mps().start(part, &device, limits, by.into()).await?)
    }

    fn mps(&self) -> Mps {
        Mps::new(self.cdi.paths())
    }

    /// The ids of an instance that exists, with its first compute instance.
    async fn ids(&self, key: &InstanceKey) -> Result<InstanceIds, StepError> {
        let step = format!("find {key}");
        let found = self.find(key, &step).await?.ok_or_else(|| StepError::Gone { key: key.clone() })?;
        let compute = found.compute_instances.into_iter().min_by_key(|compute| compute.id);
        let compute = compute.ok_or_else(|| StepError::Hollow { key: key.clone() })?;
        Ok(InstanceIds { gpu_instance: found.id, compute_instance: compute.id, uuid: compute.uuid })
    }

    /// The instance of that profile at that start, if it exists.
    pub async fn find(
        &self,
        key: &InstanceKey,
        step: &impl ToString,
    ) -> Result<Option<RawInstance>, StepError> {
        let found = self.queue(&key.gpu, step)?.instance(key.profile_id, key.placement.start).await;
        let found = found.map_err(|cause| hardware(step, cause))?;
        Ok(found.filter(|instance| is(instance, key)))
    }

    /// MIG mode on, and ours if we were the ones who turned it on.
    pub async fn enable_mig(&self, locked: &mut Locked, gpu: &GpuUuid) -> Result<(), StepError> {
        let step = Step::EnableMig { gpu: gpu.clone() };
        if let Some(locked) = locked.gpu(gpu) {
            locked.set_mode_off(None);
        }
        // Asked: the inventory may be from before a reset, which turns the mode off.
        if self.mig_mode_now(gpu).await? == MigMode::On {
            return Ok(());
        }
        if let Some(locked) = locked.gpu(gpu) {
            locked.set_mig_ours(true)?;
        }
        let queue = self.queue(gpu, &step)?;
        queue.set_mig_mode(MigMode::On).await.map_err(|cause| hardware(&step, cause))?;
        tracing::info!(%gpu, "MIG mode turned on");
        // The toggle may give the GPU another minor.
        self.gpus.refresh(gpu).await;
        Ok(())
    }

    /// MIG mode off.
    pub async fn disable_mig(&self, locked: &mut Locked, gpu: &GpuUuid) -> Result<(), StepError> {
        let step = Step::DisableMig { gpu: gpu.clone() };
        if let Some(locked) = locked.gpu(gpu) {
            locked.set_mode_off(None);
        }
        let queue = self.queue(gpu, &step)?;
        queue.set_mig_mode(MigMode::Off).await.map_err(|cause| hardware(&step, cause))?;
        if let Some(locked) = locked.gpu(gpu) {
            locked.set_mig_ours(false)?;
        }
        tracing::info!(%gpu, "MIG mode turned off");
        self.gpus.refresh(gpu).await;
        Ok(())
    }

    /// Takes steps back, last first. All are tried, but for those on a GPU on
    /// which one has failed; the first failure is the one to tell. What is gone
    /// is undone, and so is everything on a GPU that is lost. What another claim
    /// stands on as well (`others` are all on these GPUs) is left to that claim.
    pub async fn undo(&self, uid: &ClaimUid, undo: &[Undo], others: &[Holding]) -> Result<(), StepError> {
        let mut failed: BTreeMap<Option<&GpuUuid>, StepError> = BTreeMap::new();
        let mut first = None;
        for undo in undo.iter().rev().filter(|undo| !undo.is_others_too(others)) {
            if failed.contains_key(&undo.gpu()) {
                continue;
            }
            if let Err(cause) = self.undo_one(uid, undo).await {
                tracing::debug!(claim = %uid, %undo, error = &cause as &dyn std::error::Error, "not undone yet");
                first.get_or_insert(undo.gpu());
                failed.insert(undo.gpu(), cause);
            }
        }
        match first.and_then(|first| failed.remove(&first)) {
            None => Ok(()),
            Some(cause) => Err(cause),
        }
    }

    async fn undo_one(&self, uid: &ClaimUid, undo: &Undo) -> Result<(), StepError> {
        let result = match undo {
            Undo::RemoveCdi => return Ok(self.cdi.remove_claim(uid)?),
            Undo::RemovePages => return Ok(Shares::new(self.cdi.paths()).remove(uid)?),
            Undo::DestroyGpuInstance(key) | Undo::DestroyComputeInstances(key) => {
                self.take_down(key, undo, matches!(undo, Undo::DestroyGpuInstance(_))).await
            }
            Undo::ResetInterval { gpu } => self.set_interval(gpu, Interval::Default, undo).await,
            Undo::ResetComputeMode { gpu } => self.reset_compute_mode(gpu).await,
            Undo::StopMps { part } => {
                let by = Instant::now() + mps::STOP_WITHIN;
                // Processes and files, whatever becomes of the GPU.
                return Ok(self.mps().stop(part, by.into()).await?);
            }
        };
        match result {
            // Its instances and settings went with it, and it comes back without them.
            Err(StepError::Hardware { cause: NvmlError::Lost { .. }, .. }) => Ok(()),
            Err(_) if undo.gpu().is_some_and(|gpu| self.is_gone(gpu)) => Ok(()),
            result => result,
        }
    }

    /// An instance that is in nobody's record, with what is in it.
    pub async fn destroy(&self, key: &InstanceKey) -> Result<(), StepError> {
        self.take_down(key, &Undo::DestroyGpuInstance(key.clone()), true).await
    }

    /// The MIG mode, as the hardware has it.
    pub async fn mig_mode_now(&self, gpu: &GpuUuid) -> Result<MigMode, StepError> {
        let step = format!("read MIG mode of {gpu}");
        self.queue(gpu, &step)?.mig_mode().await.map_err(|cause| hardware(&step, cause))
    }

    async fn take_down(&self, key: &InstanceKey, undo: &Undo, whole: bool) -> Result<(), StepError> {
        let Some(found) = self.find(key, undo).await? else { return Ok(()) };
        let queue = self.queue(&key.gpu, undo)?;
        for compute in &found.compute_instances {
            let gone = queue.destroy_compute_instance(found.id, compute.id).await;
            gone.map_err(|cause| hardware(undo, cause))?;
        }
        if whole {
            queue.destroy_gpu_instance(found.id).await.map_err(|cause| hardware(undo, cause))?;
        }
        Ok(())
    }

    /// The GPU instances on a GPU, as the hardware has them.
    pub async fn instances(&self, gpu: &GpuUuid) -> Result<Vec<RawInstance>, StepError> {
        let step = format!("list GPU instances of {gpu}");
        self.queue(gpu, &step)?.instances().await.map_err(|cause| hardware(&step, cause))
    }

    fn queue(&self, gpu: &GpuUuid, step: &impl ToString) -> Result<GpuQueue, StepError> {
        let queue = self.gpus.queue(gpu);
        let queue = queue.map_err(|cause| StepError::Unavailable { step: step.to_string(), cause })?;
        Ok(match self.not_after {
            Some(when) => queue.not_after(when),
            None => queue,
        })
    }

    fn minor(&self, gpu: &GpuUuid) -> Result<u32, StepError> {
        self.gpu(gpu).map(|gpu| gpu.minor)
    }

    fn gpu(&self, gpu: &GpuUuid) -> Result<Gpu, StepError> {
        let inventory = self.gpus.inventory().borrow().clone();
        let found = inventory.gpus.iter().find(|known| known.uuid == *gpu).cloned();
        found.ok_or_else(|| StepError::Unknown { gpu: gpu.clone() })
    }

    fn is_gone(&self, gpu: &GpuUuid) -> bool {
        let inventory = self.gpus.inventory().borrow().clone();
        inventory.gpus.iter().any(|known| {
            let lost = || known.conditions.contains(&Condition::Lost);
            known.uuid == *gpu && (known.presence == Presence::Missing || lost())
        })
    }
}

/// Whether an instance of the hardware is the one that a key names.
pub fn is(instance: &RawInstance, key: &InstanceKey) -> bool {
    instance.profile_id == key.profile_id && instance.placement.start == key.placement.start
}

fn hardware(step: &impl ToString, cause: NvmlError) -> StepError {
    StepError::Hardware { step: step.to_string(), cause }
}
