//! Disables MIG mode on GPUs where Divvy enabled it, once they are idle.
//!
//! The mode serves all claims on a GPU, so it is not part of any claim's undo list; the GPU's lock
//! file says whether Divvy enabled it. After the last instance the mode stays on for a hold-off, so
//! that frequent claims do not pay for the toggle each time. Then it is disabled, because a GPU in
//! MIG mode offers fewer multiprocessors. A failed prepare restores the earlier mode at once.

use crate::claims::engine::Inner;
use crate::claims::records::{Debt, Locked, LockedGpu};
use crate::gpu::part::Part;
use divvy_api::GpuUuid;
use divvy_model::inventory::Presence;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Inner {
    /// Restores the mode that the GPUs had when they were locked: disables it at once if it was
    /// enabled since, after the hold-off if it was already on.
    pub(crate) async fn restore_mig_mode(self: &Arc<Self>, locked: &mut Locked) {
        for uuid in self.idle(locked) {
            match locked.gpu(&uuid) {
                Some(gpu) if gpu.mig_was_ours() => self.schedule_mig_off(gpu),
                _ => self.disable_idle_mig(locked, &uuid).await,
            }
        }
    }

    /// Disables the mode after the hold-off on the locked GPUs that no claim needs then.
    pub(crate) fn disable_mig_when_idle(self: &Arc<Self>, locked: &mut Locked) {
        for uuid in self.idle(locked) {
            if let Some(gpu) = locked.gpu(&uuid) {
                self.schedule_mig_off(gpu);
            }
        }
    }

    fn schedule_mig_off(self: &Arc<Self>, gpu: &mut LockedGpu) {
        let (inner, uuid) = (self.clone(), gpu.uuid().clone());
        let task = self.tasks.spawn(async move {
            tokio::select! {
                () = inner.stop.cancelled() => {}
                () = tokio::time::sleep(inner.options.mig_hold_off) => {
                    inner.disable_mig_after_hold_off(uuid).await;
                }
            }
        });
        gpu.set_mig_off_task(Some(task.abort_handle()));
    }

    async fn disable_mig_after_hold_off(self: &Arc<Self>, uuid: GpuUuid) {
        let only = BTreeSet::from([uuid.clone()]);
        let mut locked = match self.locks.lock(&only, self.options.answer_timeout).await {
            Ok(locked) => locked,
            Err(error) => {
                tracing::warn!(
                    gpu = %uuid, error = &error as &dyn std::error::Error,
                    "cannot lock the GPU; MIG mode stays on"
                );
                return;
            }
        };
        if let Some(gpu) = locked.gpu(&uuid) {
            // From here on the task must not be aborted half-way.
            gpu.clear_mig_off_task();
        }
        if let Err(error) = self.records.index(&mut locked) {
            tracing::warn!(
                gpu = %uuid, error = &error as &dyn std::error::Error,
                "cannot read the records; MIG mode stays on"
            );
            return;
        }
        if self.idle(&locked).contains(&uuid) {
            self.disable_idle_mig(&mut locked, &uuid).await;
        }
    }

    /// Disables the mode now on all idle GPUs; returns the GPUs on which it is still enabled.
    pub(crate) async fn disable_idle_mig_now(self: &Arc<Self>) -> Vec<GpuUuid> {
        let inventory = self.inventory();
        let mut on = Vec::new();
        for gpu in inventory.gpus.iter().filter(|gpu| gpu.presence == Presence::Present) {
            let only = BTreeSet::from([gpu.uuid.clone()]);
            let disabled = async {
                let mut locked = self.locks.lock(&only, self.options.answer_timeout).await.ok()?;
                self.records.index(&mut locked).ok()?;
                if self.idle(&locked).contains(&gpu.uuid) {
                    self.disable_idle_mig(&mut locked, &gpu.uuid).await;
                }
                (!locked.gpu(&gpu.uuid)?.mig_is_ours()).then_some(())
            };
            if disabled.await.is_none() {
                on.push(gpu.uuid.clone());
            }
        }
        on
    }

    /// Disables the mode, unless the GPU has instances of another owner; then the mode is theirs too.
    async fn disable_idle_mig(self: &Arc<Self>, locked: &mut Locked, uuid: &GpuUuid) {
        let executor = self.executor();
        let off = match executor.instances(uuid).await {
            Ok(instances) if instances.is_empty() => executor.disable_mig(locked, uuid).await,
            Ok(_) => {
                tracing::info!(
                    gpu = %uuid,
                    "MIG mode stays on: the GPU has instances that Divvy did not create"
                );
                match locked.gpu(uuid) {
                    Some(gpu) => gpu.set_mig_ours(false).map_err(Into::into),
                    None => Ok(()),
                }
            }
            Err(error) => Err(error),
        };
        if let Err(error) = off {
            let retry_s = self.options.mig_hold_off.as_secs();
            let error = &error as &dyn std::error::Error;
            tracing::warn!(
                gpu = %uuid, error, retry_s,
                "cannot disable MIG mode; retrying after the hold-off"
            );
            if let Some(gpu) = locked.gpu(uuid) {
                self.schedule_mig_off(gpu);
            }
        }
    }

    /// The locked GPUs on which Divvy enabled MIG mode, and no claim holds or left an instance.
    fn idle(&self, locked: &Locked) -> Vec<GpuUuid> {
        let held = self.records.holdings(locked);
        let has_instance = |uuid: &GpuUuid| {
            let debts = self.records.debts(uuid);
            let parts = debts.iter().flat_map(Debt::parts).chain(held.iter().map(|held| held.part.clone()));
            parts.into_iter().any(|part| matches!(part, Part::Instance(key) if key.gpu == *uuid))
        };
        let ours = locked.gpus().iter().filter(|gpu| gpu.mig_is_ours());
        ours.map(|gpu| gpu.uuid()).filter(|uuid| !has_instance(uuid)).cloned().collect()
    }
}
