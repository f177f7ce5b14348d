//! Runs steps and undo steps. This is the only module that changes hardware, and only after a
//! record with the undo was written.
//!
//! Each step has its deadline in the GPU's queue; nothing here waits longer, and nothing is
//! retried. The caller undoes a failed step with the same [`undo`](Executor::undo) that
//! releases a claim.

use crate::cdi::{Cdi, CdiError, CdiId, ClaimDevice, DeviceNodes, MpsClient};
use crate::claims::holding::{Access, Holding};
use crate::claims::records::{ClaimRecord, DeviceRecord, GpuFileError, InstanceIds, Locked};
use crate::claims::step::{Step, Undo};
use crate::gpu::mps::{Mps, MpsError};
use crate::gpu::part::{InstanceKey, Part};
use crate::gpu::sharing::{MpsLimits, Setup, ShareLimits};
use crate::gpu::timeslice::TimesliceError;
use crate::gpu::{Gpus, Unavailable, mps, timeslice};
use crate::shares::policy::{Unwritable, policy};
use crate::shares::{Contexts, PagesError, Shares};
use divvy_api::sharing::{CUDA_CONTEXT_BYTES, Interval};
use divvy_api::{ClaimUid, GpuUuid, ShareId};
use divvy_model::inventory::{Gpu, MigMode, Presence};
use divvy_nvml::{ComputeMode, GpuQueue, NvmlError, RawInstance};
use divvy_pages::Policy;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Runs steps and undo steps, none of them after `not_after`.
#[derive(Clone)]
pub struct Executor {
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
    #[error("{key} does not exist; something other than Divvy destroyed it")]
    Gone { key: InstanceKey },
    #[error("{key} has no compute instance")]
    NoComputeInstance { key: InstanceKey },
    #[error("{gpu} is not in the inventory")]
    UnknownGpu { gpu: GpuUuid },
    #[error(
        "{gpu} is missing, or was not read since the node started, so its device nodes are unknown; the \
         claim's containers can start when it is back"
    )]
    NotRead { gpu: GpuUuid },
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
    #[error("the task that writes the CDI file panicked")]
    Task,
}

/// A step that failed after others were done.
#[derive(Debug)]
pub struct RunError {
    pub cause: StepError,
    /// The undo of the steps that were done or may have been done, in the order of the steps.
    pub undo: Vec<Undo>,
}

/// Undo steps that were not done.
#[derive(Debug)]
pub struct NotUndone {
    /// In the order of the steps, those that were skipped included.
    pub left: Vec<Undo>,
    /// Why the first one was not done.
    pub cause: StepError,
}

impl StepError {
    /// Whether the hardware may have changed nevertheless.
    fn may_have_taken_effect(&self) -> bool {
        match self {
            Self::Hardware { cause, .. } => cause.may_take_effect(),
            Self::Timeslice { cause, .. } => cause.may_have_taken_effect(),
            // The request to the supervisor stays in place.
            Self::Mps(_) => true,
            _ => false,
        }
    }
}

impl Executor {
    /// Runs the steps in order and stores the ids of new instances in the record's devices.
    pub async fn run(
        &self,
        locked: &mut Locked,
        record: &mut ClaimRecord,
        steps: &[Step],
    ) -> Result<(), RunError> {
        let mut done = Vec::new();
        let mut made = BTreeMap::new();
        for step in steps {
            let begun = Instant::now();
            let result = self.step(locked, record, &mut made, step).await;
            if let Some(gpu) = step.undo().as_ref().and_then(Undo::gpu) {
                self.gpus.note_change(gpu);
            }
            if let Err(cause) = result {
                let partly =
                    matches!(step, Step::WritePages | Step::WriteCdi) || cause.may_have_taken_effect();
                done.extend(step.undo().filter(|_| partly));
                return Err(RunError { cause, undo: done });
            }
            done.extend(step.undo());
            tracing::debug!(
                claim = %record.claim, %step, elapsed_us = begun.elapsed().as_micros() as u64,
                "step done"
            );
        }
        Ok(())
    }

    /// Runs one step; `made` has the ids of the GPU instances that earlier steps created.
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

    /// Resets the compute mode to DEFAULT.
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

    /// Starts the daemon of a part that the record holds.
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
                    None => self.find_ids(key).await?.uuid,
                }
            }
        };
        let by = Instant::now() + mps::START_TIMEOUT;
        let by = self.not_after.map_or(by, |not_after| by.min(not_after));
        Ok(self.mps().start(part, &device, limits, by.into()).await?)
    }

    fn mps(&self) -> Mps {
        Mps::new(self.cdi.paths())
    }

    /// The ids of an existing instance and of its first compute instance.
    async fn find_ids(&self, key: &InstanceKey) -> Result<InstanceIds, StepError> {
        let step = format!("find {key}");
        let found = self.find(key, &step).await?.ok_or_else(|| StepError::Gone { key: key.clone() })?;
        let compute = found.compute_instances.into_iter().min_by_key(|compute| compute.id);
        let compute = compute.ok_or_else(|| StepError::NoComputeInstance { key: key.clone() })?;
        Ok(InstanceIds { gpu_instance: found.id, compute_instance: compute.id, uuid: compute.uuid })
    }

    /// The instance with that profile and start, if it exists. `step` is named in errors.
    pub async fn find(
        &self,
        key: &InstanceKey,
        step: &impl ToString,
    ) -> Result<Option<RawInstance>, StepError> {
        let found = self.queue(&key.gpu, step)?.instance(key.profile_id, key.placement.start).await;
        let found = found.map_err(|cause| hardware(step, cause))?;
        Ok(found.filter(|instance| matches_key(instance, key)))
    }

    /// Enables MIG mode; the GPU's lock file then says that Divvy did, unless it was on already.
    pub async fn enable_mig(&self, locked: &mut Locked, gpu: &GpuUuid) -> Result<(), StepError> {
        let step = Step::EnableMig { gpu: gpu.clone() };
        if let Some(locked) = locked.gpu(gpu) {
            locked.set_mig_off_task(None);
        }
        // Queried, because the inventory may be older than a reset, which turns the mode off.
        if self.read_mig_mode(gpu).await? == MigMode::On {
            return Ok(());
        }
        if let Some(locked) = locked.gpu(gpu) {
            locked.set_mig_ours(true)?;
        }
        let queue = self.queue(gpu, &step)?;
        queue.set_mig_mode(MigMode::On).await.map_err(|cause| hardware(&step, cause))?;
        tracing::info!(%gpu, "MIG mode turned on");
        // The GPU's minor number may change with the mode.
        self.gpus.refresh(gpu).await;
        Ok(())
    }

    /// Disables MIG mode.
    pub async fn disable_mig(&self, locked: &mut Locked, gpu: &GpuUuid) -> Result<(), StepError> {
        let step = Step::DisableMig { gpu: gpu.clone() };
        if let Some(locked) = locked.gpu(gpu) {
            locked.set_mig_off_task(None);
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

    /// Runs undo steps, last first. After a failure the other steps on the same GPU are skipped, and
    /// those on other GPUs still run. State that is gone counts as undone. State that one of
    /// `others`, the other holdings on these GPUs, depends on is left to that claim's undo.
    pub async fn undo(&self, uid: &ClaimUid, undo: &[Undo], others: &[Holding]) -> Result<(), NotUndone> {
        let mut left = Vec::new();
        let mut first = None;
        for undo in undo.iter().rev().filter(|undo| !others.iter().any(|held| held.depends_on(undo))) {
            if left.iter().any(|failed: &Undo| failed.gpu() == undo.gpu()) {
                left.push(undo.clone());
                continue;
            }
            if let Err(cause) = self.undo_one(uid, undo).await {
                tracing::debug!(
                    claim = %uid, %undo, error = &cause as &dyn std::error::Error,
                    "not undone yet"
                );
                left.push(undo.clone());
                first.get_or_insert(cause);
            }
        }
        left.reverse();
        match first {
            None => Ok(()),
            Some(cause) => Err(NotUndone { left, cause }),
        }
    }

    async fn undo_one(&self, uid: &ClaimUid, undo: &Undo) -> Result<(), StepError> {
        match undo {
            Undo::RemoveCdi => Ok(self.cdi.remove_claim(uid)?),
            Undo::RemovePages => Ok(Shares::new(self.cdi.paths()).remove(uid)?),
            Undo::DestroyGpuInstance(key) | Undo::DestroyComputeInstances(key) => {
                self.destroy_instance(key, undo, matches!(undo, Undo::DestroyGpuInstance(_))).await
            }
            Undo::ResetInterval { gpu } => self.set_interval(gpu, Interval::Default, undo).await,
            Undo::ResetComputeMode { gpu } => self.reset_compute_mode(gpu).await,
            Undo::StopMps { part } => {
                let by = Instant::now() + mps::STOP_TIMEOUT;
                Ok(self.mps().stop(part, by.into()).await?)
            }
        }
    }

    /// Destroys an instance without a record, and its compute instances.
    pub async fn destroy(&self, key: &InstanceKey) -> Result<(), StepError> {
        self.destroy_instance(key, &Undo::DestroyGpuInstance(key.clone()), true).await
    }

    /// Reads the MIG mode from the hardware.
    pub async fn read_mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, StepError> {
        let step = format!("read MIG mode of {gpu}");
        self.queue(gpu, &step)?.mig_mode().await.map_err(|cause| hardware(&step, cause))
    }

    async fn destroy_instance(&self, key: &InstanceKey, undo: &Undo, whole: bool) -> Result<(), StepError> {
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

    /// Reads the GPU instances from the hardware.
    pub async fn instances(&self, gpu: &GpuUuid) -> Result<Vec<RawInstance>, StepError> {
        let step = format!("list GPU instances of {gpu}");
        self.queue(gpu, &step)?.instances().await.map_err(|cause| hardware(&step, cause))
    }

    fn queue(&self, gpu: &GpuUuid, step: &impl ToString) -> Result<GpuQueue, StepError> {
        let queue = self.gpus.queue(gpu);
        let queue = queue.map_err(|cause| StepError::Unavailable { step: step.to_string(), cause })?;
        Ok(match self.not_after {
            Some(when) => queue.with_deadline(when),
            None => queue,
        })
    }

    /// The minor of a GPU that was read in this boot. Any other minor may be another GPU's.
    fn minor(&self, gpu: &GpuUuid) -> Result<u32, StepError> {
        let gpu = self.gpu(gpu)?;
        match gpu.presence {
            Presence::Present | Presence::Unread => Ok(gpu.minor),
            Presence::Missing => Err(StepError::NotRead { gpu: gpu.uuid }),
        }
    }

    /// The minors of all GPUs of the record.
    pub fn minors(&self, record: &ClaimRecord) -> Result<BTreeSet<u32>, StepError> {
        record.devices.iter().map(|device| self.minor(device.part.gpu())).collect()
    }

    /// Whether NVML does not show the GPU now, although its last description is valid.
    pub fn is_unread(&self, gpu: &GpuUuid) -> bool {
        self.gpu(gpu).is_ok_and(|gpu| gpu.presence == Presence::Unread)
    }

    fn gpu(&self, gpu: &GpuUuid) -> Result<Gpu, StepError> {
        let inventory = self.gpus.inventory().borrow().clone();
        let found = inventory.gpus.iter().find(|known| known.uuid == *gpu).cloned();
        found.ok_or_else(|| StepError::UnknownGpu { gpu: gpu.clone() })
    }
}

/// Whether an instance on the hardware is the one that the key names.
pub fn matches_key(instance: &RawInstance, key: &InstanceKey) -> bool {
    instance.profile_id == key.profile_id && instance.placement.start == key.placement.start
}

fn hardware(step: &impl ToString, cause: NvmlError) -> StepError {
    StepError::Hardware { step: step.to_string(), cause }
}

impl Executor {
    /// Writes the pages of the claim's shares where they are missing or differ; returns whether any did.
    pub async fn write_pages(&self, record: &mut ClaimRecord) -> Result<bool, StepError> {
        for device in record.devices.iter_mut().filter(|device| device.access.limits().is_some()) {
            if let (Part::Instance(key), None) = (&device.part, &device.instance) {
                device.instance = Some(self.find_ids(key).await?);
            }
        }
        let shares = Shares::new(self.cdi.paths());
        let mut written = false;
        for (device, share, limits) in record.shares() {
            let policy = self.policy(&record.claim.uid, device, share, limits)?;
            written |= shares.write(&record.claim.uid, share, &policy)?;
        }
        Ok(written)
    }

    /// Whether [`Self::write_pages`] would have nothing to do. False if only the hardware can tell.
    pub fn pages_are_written(&self, record: &ClaimRecord) -> bool {
        let shares = Shares::new(self.cdi.paths());
        record.shares().all(|(device, share, limits)| {
            let uid = &record.claim.uid;
            let known = device.instance.is_some() || matches!(device.part, Part::Whole { .. });
            let policy = known.then(|| self.policy(uid, device, share, limits));
            policy.is_some_and(|policy| policy.is_ok_and(|policy| shares.is_written(uid, share, &policy)))
        })
    }

    fn policy(
        &self,
        claim: &ClaimUid,
        device: &DeviceRecord,
        share: &ShareId,
        limits: ShareLimits,
    ) -> Result<Policy, StepError> {
        let gpu = self.gpu(device.part.gpu())?;
        let whole =
            matches!(device.part, Part::Whole { .. }).then(|| divvy_pages::GpuUuid::parse(gpu.uuid.as_str()));
        let context = whole
            .flatten()
            .map_or(CUDA_CONTEXT_BYTES, |gpu| Contexts::new(self.cdi.paths()).of(gpu, limits.memory));
        let mig = device.instance.as_ref().map(|ids| ids.uuid.as_str());
        Ok(policy(claim, share, &device.part, mig, limits, &gpu, context)?)
    }

    /// Writes the claim's CDI file from the record and the current device nodes.
    pub async fn write_cdi(&self, record: &mut ClaimRecord) -> Result<(), StepError> {
        let devices = self.cdi_devices(record).await?;
        match self.cdi.write_claim_nonblocking(&record.claim.uid, &devices) {
            Some(written) => drop(written?),
            // Missing device nodes or modules are created first, which may take seconds.
            None => {
                let (cdi, uid) = (self.cdi.clone(), record.claim.uid.clone());
                let written = tokio::task::spawn_blocking(move || cdi.write_claim(&uid, &devices)).await;
                written.map_err(|_| StepError::Task)??;
            }
        }
        for device in &mut record.devices {
            let id = CdiId::new(&record.claim.uid, &device.device, device.share_id.as_ref());
            device.cdi_ids = vec![id.into()];
        }
        Ok(())
    }

    /// The devices of the record for the CDI file. Ids that the record does not have yet are read
    /// from the hardware.
    pub async fn cdi_devices(&self, record: &mut ClaimRecord) -> Result<Vec<ClaimDevice>, StepError> {
        let mut devices = Vec::with_capacity(record.devices.len());
        for device in &mut record.devices {
            if let (true, Part::Instance(key), None) = (device.access.holds(), &device.part, &device.instance)
            {
                device.instance = Some(self.find_ids(key).await?);
            }
            let nodes = match self.known_nodes(device)? {
                Some(nodes) => nodes,
                None => {
                    let instances = self.live_instances(&device.part).await;
                    DeviceNodes::Admin { minor: self.minor(device.part.gpu())?, instances }
                }
            };
            devices.push(self.cdi_device(device, nodes));
        }
        Ok(without_duplicates(devices))
    }

    /// The same without hardware access; `None` if the record alone is not enough.
    pub fn known_cdi_devices(&self, record: &ClaimRecord) -> Option<Vec<ClaimDevice>> {
        let known = |device: &DeviceRecord| Some(self.cdi_device(device, self.known_nodes(device).ok()??));
        record.devices.iter().map(known).collect::<Option<_>>().map(without_duplicates)
    }

    fn cdi_device(&self, device: &DeviceRecord, nodes: DeviceNodes) -> ClaimDevice {
        let mps = match device.access.setup() {
            Some(Setup::Mps(limits)) => Some(MpsClient { dir: self.mps().of(&device.part), limits }),
            Some(Setup::Timeslice(_)) | None => None,
        };
        ClaimDevice {
            request: device.request.clone(),
            device: device.device.clone(),
            share: device.share_id.clone(),
            nodes,
            mps,
            injection: device.access.limits().map(|limits| limits.settings.injection),
        }
    }

    fn known_nodes(&self, device: &DeviceRecord) -> Result<Option<DeviceNodes>, StepError> {
        let minor = self.minor(device.part.gpu())?;
        Ok(match (device.access, &device.part, &device.instance) {
            (Access::Admin, ..) | (_, Part::Instance(_), None) => None,
            (_, Part::Instance(_), Some(ids)) => Some(DeviceNodes::Mig {
                minor,
                gpu_instance: ids.gpu_instance,
                compute_instance: ids.compute_instance,
            }),
            (_, Part::Whole { .. }, _) => Some(DeviceNodes::Gpu { minor }),
        })
    }

    /// The instances that admin access shows, with their compute instances: all live instances of
    /// the GPU, or only the one of a MIG device.
    async fn live_instances(&self, part: &Part) -> Vec<(u32, Vec<u32>)> {
        let Ok(queue) = self.gpus.queue(part.gpu()) else { return Vec::new() };
        let instances = queue.instances().await.unwrap_or_default();
        let wanted = |instance: &RawInstance| match part {
            Part::Whole { .. } => true,
            Part::Instance(key) => matches_key(instance, key),
        };
        let nodes = |instance: RawInstance| {
            (instance.id, instance.compute_instances.iter().map(|compute| compute.id).collect())
        };
        instances.into_iter().filter(wanted).map(nodes).collect()
    }
}

/// Removes repeated devices: a claim may hold a device and have admin access to it, and a CDI file
/// names each device once.
fn without_duplicates(mut devices: Vec<ClaimDevice>) -> Vec<ClaimDevice> {
    let mut seen = BTreeSet::new();
    devices.retain(|device| seen.insert((device.device.clone(), device.share.clone())));
    devices
}
