//! Records held against the hardware: at the start, before the kubelet may call,
//! and whenever a GPU comes back or has lost what a record promises.
//!
//! The kubelet does not prepare again what it believes prepared, so a Prepared
//! record whose instance is missing is made again, whatever took it: a reboot, a
//! GPU reset, a new GPU driver, a stranger. A record that is half done is
//! undone. GPU instances are enumerated, not MIG handles: one without a compute
//! instance has no handle. An instance that no record explains is reported, and
//! destroyed only where the node configuration says that the GPU is ours alone.
//!
//! A Prepared record also promises the pages of its shares, which a reboot takes; a
//! page that is there may be in use and is kept. Pages that no record explains and
//! nobody has mounted are removed.
//!
//! A Prepared record also promises what its device was set up with: an MPS
//! control daemon that a reboot took is asked for again, and waited for only
//! shortly, because a keeper that is missing must not keep the daemon from the
//! claims that need none. A daemon that no record explains is let go. An interval
//! or compute mode that no record explains is left: it may be an administrator's.

use crate::engine::claim::{NotGivenBack, Unlocked};
use crate::engine::{HeldState, Inner, RecoveryReport};
use crate::execute::{Hands, StepError, is};
use crate::mps::{self, Mps};
use crate::plan::{Holding, Part, trouble};
use crate::records::{ClaimRecord, Locked};
use crate::shares::{self, Shares};
use crate::sharing::Setup;
use crate::step::{InstanceKey, Step, Undo};
use divvy_api::{ClaimRef, ClaimUid, GpuUuid};
use divvy_model::inventory::{Mig, MigMode, MigToggle, Presence};
use divvy_model::{Gpu, Inventory};
use futures::future::join_all;
use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// How often promises are held against the inventory when nothing has changed.
const ROUND: Duration = Duration::from_secs(10);
/// How long the start may wait for all MPS control daemons together.
const DAEMONS_WITHIN: Duration = Duration::from_secs(5);
/// How long one claim may wait for them later, with its GPUs locked.
const DAEMON_WITHIN: Duration = Duration::from_secs(2);

/// What became of a claim.
enum Settled {
    Unchanged,
    Undone,
    Restored,
    Gone,
}

impl Inner {
    /// Every record and every GPU, once.
    pub(crate) async fn recover(self: &Arc<Self>) -> RecoveryReport {
        let mut report = RecoveryReport::default();
        match self.records.all() {
            Ok((records, quarantined)) => {
                report.quarantined = quarantined.into_iter().map(|aside| (aside.path, aside.cause)).collect();
                let by = Instant::now() + DAEMONS_WITHIN;
                let settle = async |record: ClaimRecord| {
                    let settled = self.settle_claim(&record.claim.uid, by).await;
                    (record.claim, settled)
                };
                for (claim, settled) in join_all(records.into_iter().map(settle)).await {
                    note(&mut report, claim, settled);
                }
            }
            Err(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "records cannot be listed; nothing recovered"
                );
            }
        }
        self.remove_unexplained_pages();
        let inventory = self.inventory();
        let usable = inventory.gpus.iter().filter(|gpu| is_usable(gpu));
        let unexplained = join_all(usable.map(|gpu| self.settle_gpu(gpu))).await;
        report.unexplained = unexplained.into_iter().flatten().map(|key| key.to_string()).collect();
        report
    }

    /// Pages of claims without a record. A claim has its record before its pages, so
    /// a page that was seen before the record was looked for is explained or left over.
    fn remove_unexplained_pages(&self) {
        let shares = Shares::new(&self.options.paths);
        for uid in shares.claims() {
            if !matches!(self.records.read(&uid), Ok(None)) {
                continue;
            }
            if shares::is_mounted(&self.options.paths.process_root, &uid) {
                tracing::warn!(claim = %uid, "pages of shares that no record explains are in use; left");
                continue;
            }
            match shares.remove(&uid) {
                Ok(()) => tracing::warn!(claim = %uid, "pages of shares that no record explains removed"),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(claim = %uid, error, "pages of shares that no record explains");
                }
            }
        }
    }

    /// Settles GPUs as they come, come back, lose instances or get another
    /// driver. A loss that the inventory shows at once is seen at once; one that
    /// fell between two readings, or could not be made good, at the next round.
    pub(crate) async fn watch(self: Arc<Self>, settled: Arc<Inventory>) {
        let mut inventories = self.gpus.inventory();
        // What changed while the claims were settled.
        inventories.mark_changed();
        let mut last = settled;
        let mut round = tokio::time::interval_at(Instant::now() + ROUND, ROUND);
        loop {
            let mut look_at_all = false;
            tokio::select! {
                () = self.stop.cancelled() => return,
                changed = inventories.changed() => if changed.is_err() { return },
                _ = round.tick() => look_at_all = true,
            }
            let now = inventories.borrow_and_update().clone();
            let others_driver = now.driver_version != last.driver_version && !now.driver_version.is_empty();
            for gpu in now.gpus.iter().filter(|gpu| is_usable(gpu)) {
                let was = last.gpus.iter().find(|was| was.uuid == gpu.uuid);
                let is_new = was.is_none_or(|was| !is_usable(was));
                let changed = was.is_none_or(|was| was.mig != gpu.mig);
                if is_new
                    || others_driver
                    || ((changed || look_at_all) && self.lacks_something(gpu))
                    || (look_at_all && self.is_half_done(gpu))
                {
                    let (inner, gpu) = (self.clone(), gpu.clone());
                    self.tasks.spawn(async move { inner.settle(&gpu).await });
                }
            }
            last = now;
        }
    }

    /// One GPU and the claims on it.
    async fn settle(self: &Arc<Self>, gpu: &Gpu) {
        let mut report = RecoveryReport::default();
        let only = BTreeSet::from([gpu.uuid.clone()]);
        let claims = match self.locks.lock(&only, self.options.answer_within).await {
            Ok(mut locked) => match self.records.index(&mut locked) {
                Ok(()) => self.records.on(&gpu.uuid),
                Err(error) => {
                    tracing::warn!(gpu = %gpu.uuid, error = &error as &dyn std::error::Error, "GPU not settled");
                    return;
                }
            },
            Err(error) => {
                tracing::warn!(gpu = %gpu.uuid, error = &error as &dyn std::error::Error, "GPU not settled");
                return;
            }
        };
        for record in claims {
            let by = Instant::now() + DAEMON_WITHIN;
            let settled = self.settle_claim(&record.claim.uid, by).await;
            note(&mut report, record.claim.clone(), settled);
        }
        self.settle_gpu(gpu).await;
    }

    /// One claim; MPS control daemons are waited for until `by`.
    async fn settle_claim(self: &Arc<Self>, uid: &ClaimUid, by: Instant) -> Result<Settled, NotGivenBack> {
        let settled = self.try_to_settle(uid, by).await;
        let mut unsettled = self.unsettled.lock().unwrap_or_else(PoisonError::into_inner);
        match &settled {
            Ok(_) => unsettled.remove(uid),
            Err(_) => unsettled.insert(uid.clone()),
        };
        settled
    }

    async fn try_to_settle(self: &Arc<Self>, uid: &ClaimUid, by: Instant) -> Result<Settled, NotGivenBack> {
        let _claim = self.claims.lock(uid).await;
        let (mut locked, record) = match self.lock(uid, BTreeSet::new()).await {
            Ok(locked) => locked,
            Err(Unlocked::Record(error)) => return Err(error.into()),
            Err(Unlocked::Lock(error)) => return Err(NotGivenBack::Lock(error)),
        };
        let Some(mut record) = record else { return Ok(Settled::Gone) };
        match record.state {
            HeldState::Intent | HeldState::Releasing => {
                self.give_back(&mut locked, record).await?;
                Ok(Settled::Undone)
            }
            HeldState::Prepared => match self.restore(&mut locked, &mut record, by).await? {
                true => Ok(Settled::Restored),
                false => Ok(Settled::Unchanged),
            },
        }
    }

    /// Makes a prepared claim whole that could not be yet, before it is said to be prepared: its pod starts now, and
    /// the next round may be seconds away.
    pub(crate) async fn make_whole(
        self: &Arc<Self>,
        locked: &mut Locked,
        record: &mut ClaimRecord,
    ) -> Result<(), NotGivenBack> {
        let unsettled = || self.unsettled.lock().unwrap_or_else(PoisonError::into_inner);
        let is_whole = !unsettled().contains(&record.claim.uid);
        if !is_whole {
            self.restore(locked, record, Instant::now() + DAEMON_WITHIN).await?;
            unsettled().remove(&record.claim.uid);
        }
        Ok(())
    }

    /// Makes again what is missing of a prepared claim; says whether anything was.
    async fn restore(
        self: &Arc<Self>,
        locked: &mut Locked,
        record: &mut ClaimRecord,
        by: Instant,
    ) -> Result<bool, NotGivenBack> {
        let before = record.clone();
        let hands = self.hands();
        let mut steps = Vec::new();
        for device in record.devices.iter_mut().filter(|device| device.access.holds()) {
            let Part::Instance(key) = &device.part else { continue };
            let found = hands.find(key, &format!("find {key}")).await?;
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
        announce(record, &steps);
        if record.undo != before.undo {
            self.records.write(locked, record)?;
        }
        hands.run(locked, record, &steps).await.map_err(|failed| failed.cause)?;
        let paged = hands.write_pages(record).await?;
        let written = self.ensure_cdi(record).await? || paged;
        if *record != before {
            self.records.write(locked, record)?;
        }
        if !steps.is_empty() {
            self.look_again(locked);
        }
        let set_up = self.set_up_again(locked, record, by).await?;
        Ok(written || set_up || !steps.is_empty())
    }

    /// What the claim's devices are set up with, as it must be; says whether an
    /// MPS control daemon was missing. Nothing tells whether an interval is still
    /// set, so one claim of the GPU sets it once more.
    async fn set_up_again(
        &self,
        locked: &mut Locked,
        record: &mut ClaimRecord,
        by: Instant,
    ) -> Result<bool, StepError> {
        let hands = Hands { not_after: Some(by.into_std()), ..self.hands() };
        let mps = Mps::new(&self.options.paths);
        let others = self.others(locked, &record.claim.uid);
        let mut missing = false;
        for device in record.devices.clone() {
            let (part, gpu) = (&device.part, device.part.gpu());
            match device.access.setup() {
                None => {}
                Some(Setup::Timeslice(interval)) => {
                    let speaks = others.iter().all(|other| {
                        !other.ready || other.part != *part || other.claim.uid > record.claim.uid
                    });
                    let step = Step::SetInterval { gpu: gpu.clone(), interval };
                    if speaks && step.undo().is_some() {
                        self.hands().run(locked, record, &[step]).await.map_err(|failed| failed.cause)?;
                    }
                }
                Some(Setup::Mps(limits)) => {
                    missing |= mps.actual(part).is_none();
                    let mode =
                        matches!(part, Part::Whole { .. }).then(|| Step::SetComputeMode { gpu: gpu.clone() });
                    let start = Step::StartMps { part: part.clone(), limits };
                    let steps: Vec<Step> = mode.into_iter().chain([start]).collect();
                    hands.run(locked, record, &steps).await.map_err(|failed| failed.cause)?;
                }
            }
        }
        Ok(missing)
    }

    /// The GPU beyond its claims: MIG mode, instances and MPS control daemons
    /// that no record explains.
    async fn settle_gpu(self: &Arc<Self>, gpu: &Gpu) -> Vec<InstanceKey> {
        match self.look_at_gpu(gpu).await {
            Ok(unexplained) => unexplained,
            Err(error) => {
                tracing::warn!(gpu = %gpu.uuid, error = &error as &dyn std::error::Error, "GPU not settled");
                Vec::new()
            }
        }
    }

    async fn look_at_gpu(self: &Arc<Self>, gpu: &Gpu) -> Result<Vec<InstanceKey>, NotGivenBack> {
        let only = BTreeSet::from([gpu.uuid.clone()]);
        let mut locked =
            self.locks.lock(&only, self.options.answer_within).await.map_err(NotGivenBack::Lock)?;
        self.records.index(&mut locked)?;
        let hands = self.hands();
        let held = self.records.holdings(&locked);
        self.let_daemons_go(gpu, &held).await?;
        let mut unexplained = Vec::new();
        let Mig::Supported { .. } = gpu.mig else { return Ok(unexplained) };
        for instance in hands.instances(&gpu.uuid).await? {
            let explained =
                held.iter().any(|holding| matches!(&holding.part, Part::Instance(key) if is(&instance, key)));
            if explained {
                continue;
            }
            let key = InstanceKey {
                gpu: gpu.uuid.clone(),
                profile_id: instance.profile_id,
                placement: instance.placement,
            };
            if gpu.policy.exclusive_ownership {
                match hands.destroy(&key).await {
                    Ok(()) => {
                        tracing::warn!(instance = %key, "destroyed: no record explains it and the GPU is exclusively ours");
                        continue;
                    }
                    Err(error) => tracing::warn!(
                        instance = %key, error = &error as &dyn std::error::Error, "unexplained, and cannot be destroyed"
                    ),
                }
            } else {
                tracing::warn!(instance = %key, "no record explains it; it is left alone");
            }
            unexplained.push(key);
        }
        self.settle_mode(&mut locked, &gpu.uuid).await?;
        if gpu.policy.exclusive_ownership {
            self.look_again(&locked);
        }
        Ok(unexplained)
    }

    /// Ends what no record explains. The directory says that the compute mode was ours.
    async fn let_daemons_go(&self, gpu: &Gpu, held: &[Holding]) -> Result<(), StepError> {
        let mps = Mps::new(&self.options.paths);
        let explains = |target: &str| {
            let clients = held.iter().filter(|held| matches!(held.access.setup(), Some(Setup::Mps(_))));
            clients.map(|held| mps::target(&held.part)).any(|explained| explained == target)
        };
        for target in mps.targets() {
            let rest = target.strip_prefix(gpu.uuid.as_str());
            let is_on_gpu = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
            if !is_on_gpu || explains(&target) {
                continue;
            }
            tracing::warn!(target, "no record explains this MPS control daemon; it is let go");
            mps.release(&mps.dir().join(&target))?;
            if rest == Some("") {
                self.hands().reset_compute_mode(&gpu.uuid).await?;
            }
        }
        Ok(())
    }

    /// A mode that was ours and that a reboot took is nobody's; one that we left
    /// on without instances goes off after the hold-off.
    async fn settle_mode(self: &Arc<Self>, locked: &mut Locked, uuid: &GpuUuid) -> Result<(), NotGivenBack> {
        let Some(gpu) = locked.gpu(uuid).filter(|gpu| gpu.mig_is_ours()) else { return Ok(()) };
        match self.hands().mig_mode_now(uuid).await? {
            MigMode::Off => gpu.set_mig_ours(false).map_err(StepError::from)?,
            MigMode::On => self.rest_later(locked),
        }
        Ok(())
    }

    fn toggles_live(&self, uuid: &GpuUuid) -> bool {
        let inventory = self.inventory();
        let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == *uuid);
        gpu.is_some_and(|gpu| matches!(gpu.mig, Mig::Supported { toggle: MigToggle::Live, .. }))
    }

    /// Whether a claim on it waits to be undone or made good, and nobody is at it.
    fn is_half_done(&self, gpu: &Gpu) -> bool {
        let unsettled = self.unsettled.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let waits = |record: &Arc<ClaimRecord>| {
            let uid = &record.claim.uid;
            (record.state != HeldState::Prepared || unsettled.contains(uid)) && !self.claims.is_busy(uid)
        };
        self.records.on(&gpu.uuid).iter().any(waits)
    }

    /// Whether a record promises an instance that this description lacks.
    fn lacks_something(&self, gpu: &Gpu) -> bool {
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

/// Whether work on the GPU can be tried.
fn is_usable(gpu: &Gpu) -> bool {
    gpu.presence == Presence::Present && trouble(gpu).is_none()
}

/// Adds to the record what takes these steps back, before they are done.
fn announce(record: &mut ClaimRecord, steps: &[Step]) {
    let new: Vec<Undo> =
        steps.iter().filter_map(Step::undo).filter(|undo| !record.undo.contains(undo)).collect();
    // Before the CDI file: undone after it is gone.
    record.undo.splice(0..0, new);
}

fn note(report: &mut RecoveryReport, claim: ClaimRef, settled: Result<Settled, NotGivenBack>) {
    match settled {
        Ok(Settled::Unchanged | Settled::Gone) => {}
        Ok(Settled::Undone) => {
            tracing::info!(%claim, "half-done claim undone");
            report.undone.push(claim);
        }
        Ok(Settled::Restored) => {
            tracing::info!(%claim, "prepared claim made again");
            report.restored.push(claim);
        }
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%claim, error, "claim neither undone nor restored yet");
            report.unsettled.push((claim, chain(error)));
        }
    }
}

/// An error with its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}
