//! MIG mode at rest: off, on GPUs where we turned it on.
//!
//! The mode serves every claim on the GPU, so no claim's record takes it back;
//! the GPU's file says that it is ours. After the last instance it stays on for
//! a hold-off, because churn must not pay the toggle each time, and then goes
//! off, because a GPU in MIG mode has fewer multiprocessors to give. A failed
//! prepare does not wait: it leaves the GPU as it found it.

use super::Inner;
use crate::plan::Part;
use crate::records::{Locked, LockedGpu};
use divvy_api::GpuUuid;
use divvy_model::inventory::Presence;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Inner {
    /// Leaves the mode as it was when the GPUs were locked: off where we have
    /// turned it on since, waiting to be turned off where it was on already.
    pub(super) async fn rest_as_before(self: &Arc<Self>, locked: &mut Locked) {
        for uuid in self.idle(locked) {
            match locked.gpu(&uuid) {
                Some(gpu) if gpu.mig_was_ours() => self.schedule(gpu),
                _ => self.rest(locked, &uuid).await,
            }
        }
    }

    /// Turns the mode off after the hold-off where nobody needs it by then.
    pub(crate) fn rest_later(self: &Arc<Self>, locked: &mut Locked) {
        for uuid in self.idle(locked) {
            if let Some(gpu) = locked.gpu(&uuid) {
                self.schedule(gpu);
            }
        }
    }

    fn schedule(self: &Arc<Self>, gpu: &mut LockedGpu) {
        let (inner, uuid) = (self.clone(), gpu.uuid().clone());
        let task = self.tasks.spawn(async move {
            tokio::select! {
                () = inner.stop.cancelled() => {}
                () = tokio::time::sleep(inner.options.mig_hold_off) => inner.hold_off_over(uuid).await,
            }
        });
        gpu.set_mode_off(Some(task.abort_handle()));
    }

    async fn hold_off_over(self: &Arc<Self>, uuid: GpuUuid) {
        let only = BTreeSet::from([uuid.clone()]);
        let mut locked = match self.locks.lock(&only, self.options.answer_within).await {
            Ok(locked) => locked,
            Err(error) => {
                tracing::warn!(gpu = %uuid, error = &error as &dyn std::error::Error, "MIG mode stays on");
                return;
            }
        };
        if let Some(gpu) = locked.gpu(&uuid) {
            // From here on nobody ends this task half-way.
            gpu.mode_off_ran();
        }
        if let Err(error) = self.records.index(&mut locked) {
            tracing::warn!(gpu = %uuid, error = &error as &dyn std::error::Error, "MIG mode stays on");
            return;
        }
        if self.idle(&locked).contains(&uuid) {
            self.rest(&mut locked, &uuid).await;
        }
    }

    /// Turns the mode off at once where nobody needs it; answers where it stayed on.
    pub(super) async fn rest_now(self: &Arc<Self>) -> Vec<GpuUuid> {
        let inventory = self.inventory();
        let mut on = Vec::new();
        for gpu in inventory.gpus.iter().filter(|gpu| gpu.presence == Presence::Present) {
            let only = BTreeSet::from([gpu.uuid.clone()]);
            let rested = async {
                let mut locked = self.locks.lock(&only, self.options.answer_within).await.ok()?;
                self.records.index(&mut locked).ok()?;
                if self.idle(&locked).contains(&gpu.uuid) {
                    self.rest(&mut locked, &gpu.uuid).await;
                }
                (!locked.gpu(&gpu.uuid)?.mig_is_ours()).then_some(())
            };
            if rested.await.is_none() {
                on.push(gpu.uuid.clone());
            }
        }
        on
    }

    /// Off, unless somebody else has an instance there; then the mode is theirs.
    async fn rest(self: &Arc<Self>, locked: &mut Locked, uuid: &GpuUuid) {
        let hands = self.hands();
        let off = match hands.instances(uuid).await {
            Ok(instances) if instances.is_empty() => hands.disable_mig(locked, uuid).await,
            Ok(_) => {
                tracing::info!(gpu = %uuid, "MIG mode left on: there are GPU instances that Divvy did not make");
                match locked.gpu(uuid) {
                    Some(gpu) => gpu.set_mig_ours(false).map_err(Into::into),
                    None => Ok(()),
                }
            }
            Err(error) => Err(error),
        };
        if let Err(error) = off {
            let retry_s = self.options.mig_hold_off.as_secs();
            tracing::warn!(gpu = %uuid, error = &error as &dyn std::error::Error, retry_s, "MIG mode not turned off");
            if let Some(gpu) = locked.gpu(uuid) {
                self.schedule(gpu);
            }
        }
    }

    /// The locked GPUs whose MIG mode is ours and that no claim has an instance on.
    fn idle(&self, locked: &Locked) -> Vec<GpuUuid> {
        let held = self.records.holdings(locked);
        let has_instance = |uuid: &GpuUuid| {
            held.iter().any(|holding| matches!(&holding.part, Part::Instance(key) if key.gpu == *uuid))
        };
        let ours = locked.gpus().iter().filter(|gpu| gpu.mig_is_ours());
        ours.map(|gpu| gpu.uuid()).filter(|uuid| !has_instance(uuid)).cloned().collect()
    }
}
