//! Debts: hardware that a released claim could not restore, because NVML is closed, the GPU is sick
//! or a tool is missing.
//!
//! A claim is released although steps are left, once no process of it is left. Until the debt is
//! settled, everything that overlaps it is tainted and refused. A debt is void after a reboot or a reload
//! of the GPU driver. Its instances are void after a reset too, and if the instance at that place has
//! other ids: then another owner created it.

use crate::claims::engine::{Inner, ReleaseError};
use crate::claims::execute::NotUndone;
use crate::claims::records::{ClaimRecord, Debt, Locked};
use crate::claims::step::Undo;
use crate::claims::uses::{self, Owner};
use crate::gpu::epoch::Epoch;
use crate::gpu::part::Part;
use divvy_api::text::error_chain;
use divvy_api::{ClaimUid, GpuUuid};
use divvy_model::inventory::{Condition, Mig, Origin};
use divvy_model::{Gpu, Inventory};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Not;
use std::sync::Arc;
use std::time::Duration;

/// Time before the undo steps of a debt are tried again. Processes that end and short failures of a tool
/// take less.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);

impl Inner {
    /// The current epoch.
    pub(crate) fn epoch(&self) -> Epoch {
        self.started.with_module(&self.options.paths.sys_root)
    }

    /// Writes the steps that are left as debts of their GPUs.
    ///
    /// # Errors
    /// The cause of the failed undo, if files of the claim are left or a process uses the claim.
    pub(crate) async fn leave_debts(
        self: &Arc<Self>,
        record: &ClaimRecord,
        not: NotUndone,
    ) -> Result<(), ReleaseError> {
        let NotUndone { left, cause } = not;
        let uid = &record.claim.uid;
        if left.iter().any(|undo| undo.gpu().is_none()) || self.is_in_use(uid).await {
            return Err(cause.into());
        }
        let why = error_chain(&cause);
        for mut debt in Debt::of_claim(&record.claim, &record.devices, &[], &left, &self.epoch(), &why) {
            debt.reading = self.gpus.last_health(&debt.gpu);
            tracing::warn!(
                claim = %record.claim, %uid, gpu = %debt.gpu, left = %debt,
                "claim released with a debt; the rest is undone when the hardware allows"
            );
            self.records.add_debt(&debt)?;
            self.tasks.spawn(self.clone().settle_soon(debt.gpu));
        }
        self.publish_debts();
        Ok(())
    }

    /// Settles the debts of a GPU after a moment: many causes, such as a busy GPU, are short. The audit
    /// does the rest.
    async fn settle_soon(self: Arc<Self>, gpu: GpuUuid) {
        tokio::select! {
            () = self.stop.cancelled() => return,
            () = tokio::time::sleep(FIRST_RETRY_DELAY) => {}
        }
        let inventory = self.inventory();
        if let Some(gpu) = inventory.gpus.iter().find(|known| known.uuid == gpu && known.is_usable()) {
            self.recover_gpu(gpu).await;
        }
    }

    /// Settles the debts of a locked GPU, as far as the hardware allows, and returns the others.
    pub(crate) async fn settle_debts(&self, locked: &Locked, gpu: &GpuUuid) -> Vec<Debt> {
        let debts = self.records.debts(gpu);
        if debts.is_empty() {
            return debts;
        }
        let count = debts.len();
        let mut left = Vec::new();
        for debt in debts {
            match self.settle(locked, &debt).await {
                Ok(how) => tracing::info!(claim = %debt.claim, %gpu, how, "debt settled"),
                Err(error) => {
                    tracing::debug!(claim = %debt.claim, %gpu, error, "debt not settled yet");
                    left.push(debt);
                }
            }
        }
        if left.len() < count {
            // Instances of a void debt have another owner now.
            self.gpus.refresh(gpu).await;
        }
        self.publish_debts();
        left
    }

    async fn settle(&self, locked: &Locked, debt: &Debt) -> Result<&'static str, String> {
        let uid = &debt.claim.uid;
        // Its record was quarantined and the claim was prepared again.
        if !matches!(self.records.read(uid), Ok(None)) {
            return Err("the claim has a record".to_owned());
        }
        if self.is_in_use(uid).await {
            return Err("containers use the claim".to_owned());
        }
        let is_over = debt.epoch.is_over(&self.epoch());
        let was_reset = is_over || self.was_reset(debt).await;
        let mut undo = debt.undo.clone();
        undo.retain(|undo| !(is_over && undo.is_done_by_epoch() || was_reset && undo.is_done_by_reset()));
        let mut foreign = false;
        for (key, ids) in &debt.instances {
            let destroys = |undo: &Undo| undo.destroys(&Part::Instance(key.clone()));
            if !undo.iter().any(destroys) {
                continue;
            }
            let found = self.executor().find(key, &format!("find {key}")).await;
            let found = found.map_err(|error| error_chain(&error))?;
            // Without compute instances, an earlier attempt was interrupted.
            let is_other = found
                .is_some_and(|found| found.compute_instances.iter().any(|compute| compute.uuid != ids.uuid));
            if is_other {
                undo.retain(|undo| !destroys(undo));
                foreign = true;
            }
        }
        let others = self.others(locked, uid);
        self.executor().undo(uid, &undo, &others).await.map_err(|not| error_chain(&not.cause))?;
        self.records.remove_debt(&debt.gpu, uid).map_err(|error| error_chain(&error))?;
        Ok(match (was_reset, foreign) {
            (true, _) => "the GPUs were reset since",
            (false, true) => "another owner created the instance again",
            (false, false) => "undone",
        })
    }

    /// Whether the GPU was reset since the debt was written.
    async fn was_reset(&self, debt: &Debt) -> bool {
        let (Some(before), Ok(queue)) = (debt.reading, self.gpus.queue(&debt.gpu)) else { return false };
        queue.health().await.is_ok_and(|now| now.is_after_reset(&before))
    }

    /// Whether the GPU has debts. It is cheap enough for every audit.
    pub(crate) fn has_debts(&self, gpu: &Gpu) -> bool {
        !self.records.debts(&gpu.uuid).is_empty()
    }

    /// Shows the debts as conditions of their GPUs.
    pub(crate) fn publish_debts(&self) {
        let mut conditions: BTreeMap<GpuUuid, Vec<Condition>> = BTreeMap::new();
        for gpu in self.records.gpus_with_debts() {
            let of_debt = |debt: &Debt| {
                let (parts, undo) = (debt.parts(), debt.to_string());
                let condition =
                    move |part: Part| Condition::Debt { placement: part.placement(), undo: undo.clone() };
                parts.into_iter().map(condition).collect::<Vec<_>>()
            };
            let all: Vec<Condition> = self.records.debts(&gpu).iter().flat_map(of_debt).collect();
            if !all.is_empty() {
                conditions.insert(gpu, all);
            }
        }
        self.gpus.set_debts(conditions);
    }

    /// Whether a process on the node uses the claim. If the processes cannot be read, one may.
    async fn is_in_use(&self, uid: &ClaimUid) -> bool {
        let root = self.options.paths.process_root.clone();
        let wanted = BTreeSet::from([Owner::Claim(uid.clone())]);
        let scan = tokio::task::spawn_blocking(move || uses::mounted(&root, &wanted));
        scan.await.is_ok_and(|mounted| mounted.is_ok_and(|mounted| mounted.is_empty())).not()
    }
}

impl Inner {
    /// Marks the instances that a quarantined record of the claim holds as foreign: the claim uses them as
    /// they are, and its debt destroys them.
    pub(crate) fn disown_instances(&self, inventory: &mut Arc<Inventory>, debts: &[Debt], claim: &ClaimUid) {
        let own: Vec<&Debt> =
            debts.iter().filter(|debt| debt.claim.uid == *claim && !debt.held.is_empty()).collect();
        if own.is_empty() {
            return;
        }
        for gpu in &mut Arc::make_mut(inventory).gpus {
            let Mig::Supported { instances, .. } = &mut gpu.mig else { continue };
            for instance in instances {
                let (profile, start) = (instance.profile_id, instance.placement.start);
                if own.iter().any(|debt| debt.gpu == gpu.uuid && debt.has_instance(profile, start)) {
                    instance.origin = Origin::Foreign;
                }
            }
        }
    }
}
