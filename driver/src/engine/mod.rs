//! The claim's life on this node: allocated, prepared, released.
//!
//! ```text
//! prepare    lock claim, lock GPUs ─▶ plan ─▶ Intent ─▶ steps ─▶ Prepared ─▶ answer
//!                                               └─ a step failed ─▶ undo ─▶ no record
//! unprepare  lock claim, lock GPUs ─▶ Releasing ─▶ undo ─▶ no record
//! recovery   as unprepare for what is half done; what is Prepared is made again if it is missing
//! ```
//!
//! Work runs in tasks of the engine: a caller that goes away does not stop a
//! plan half-way, and one that waits is answered in time whatever the hardware
//! does. What is left when an undo fails is an Intent record; the next prepare,
//! unprepare or recovery of the claim begins with it.
//!
//! Tasks: one per call under way, one that watches the inventory for GPUs that
//! come back or lose instances ([`crate::recover`]), one that watches the MPS
//! control daemons of claims ([`Daemons`]), and for each GPU without instances
//! one that waits to turn MIG mode off ([`mode`]).

pub(crate) mod claim;
mod daemons;
mod facts;
mod locks;
mod mode;
mod shares;

pub use daemons::{Daemon, Daemons, lost};
pub use shares::{ChangeError, HeldShare};

use crate::cdi::Cdi;
use crate::execute::{Hands, StepError};
use crate::gpus::Gpus;
use crate::paths::HostPaths;
use crate::plan::PlanError;
use crate::records::{LockError, Locks, RecordError, Records};
use crate::step::InstanceKey;
use divvy_api::{AllocatedClaim, ClaimRef, ClaimUid, DeviceName, GpuUuid, PoolName, RequestName, ShareId};
use divvy_model::inventory::Origin;
use divvy_model::{Inventory, Mig};
use locks::ClaimLocks;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Prepares and releases claims; a clone is the same engine.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

/// What the engine is told at its start.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    pub paths: HostPaths,
    /// The node's pool; devices of any other are refused.
    pub pool: PoolName,
    /// How long MIG mode stays on after the last instance.
    pub mig_hold_off: Duration,
    /// Whatever happens, prepare and unprepare answer within this time.
    pub answer_within: Duration,
}

/// A device as the kubelet is told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedDevice {
    pub requests: Vec<RequestName>,
    pub pool: PoolName,
    pub device: DeviceName,
    pub cdi_ids: Vec<String>,
    pub share_id: Option<ShareId>,
}

/// A claim that has a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldClaim {
    pub claim: ClaimRef,
    pub state: HeldState,
    pub devices: Vec<DeviceName>,
}

/// How far the claim has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HeldState {
    /// Announced; the hardware may or may not have changed.
    Intent,
    /// The kubelet has its devices or may ask for them.
    Prepared,
    /// Being given back.
    Releasing,
}

/// What was found and done before registration.
#[derive(Debug, Default)]
pub struct RecoveryReport {
    /// Records that could not be read, where they lie now, and why.
    pub quarantined: Vec<(PathBuf, String)>,
    /// Half-done claims that were undone.
    pub undone: Vec<ClaimRef>,
    /// Prepared claims whose instances or CDI files were made again.
    pub restored: Vec<ClaimRef>,
    /// Claims that could be neither undone nor restored yet, and why.
    pub unsettled: Vec<(ClaimRef, String)>,
    /// GPU instances that no record explains.
    pub unexplained: Vec<String>,
}

/// Why the engine cannot start at all.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("state directory {path} cannot be used; create it, or name another with --state-dir")]
    StateDir {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
}

/// Why a claim was not prepared; every message names the claim.
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
    #[error("claim {claim}: its record cannot be kept")]
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
    #[error("claim {claim}, {devices}: what an earlier attempt left cannot be undone yet")]
    NotUndone {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: StepError,
    },
    #[error("claim {claim}: no answer within {within:?}; it is still being worked on, retry")]
    Late { claim: ClaimRef, within: Duration },
    #[error("claim {claim}: preparing it crashed; see the log")]
    Crashed { claim: ClaimRef },
}

/// Why a claim was not released; every message names the claim.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareError {
    #[error("claim {uid}: nothing was changed")]
    Locked {
        uid: ClaimUid,
        #[source]
        cause: LockError,
    },
    #[error("claim {uid}: its record cannot be kept")]
    Record {
        uid: ClaimUid,
        #[source]
        cause: RecordError,
    },
    #[error("claim {claim}, {devices}: not given back yet")]
    Step {
        claim: ClaimRef,
        devices: String,
        #[source]
        cause: StepError,
    },
    #[error("claim {uid}: no answer within {within:?}; it is still being worked on, retry")]
    Late { uid: ClaimUid, within: Duration },
    #[error("claim {uid}: releasing it crashed; see the log")]
    Crashed { uid: ClaimUid },
}

/// What the engine's tasks share.
pub(crate) struct Inner {
    pub(crate) options: EngineOptions,
    pub(crate) gpus: Gpus,
    pub(crate) cdi: Cdi,
    pub(crate) records: Records,
    pub(crate) locks: Arc<Locks>,
    pub(crate) claims: ClaimLocks,
    /// Claims that recovery could not settle; it tries them again.
    pub(crate) unsettled: Mutex<BTreeSet<ClaimUid>>,
    daemons: watch::Sender<Arc<Daemons>>,
    /// Somebody's record has changed; who watches over what records say looks again.
    prepared_or_released: Notify,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
}

impl Engine {
    /// Local recovery, then ready: half-done claims are undone, missing
    /// instances and CDI files of prepared claims made again. A record that
    /// cannot be read is set aside, never a reason to fail.
    pub async fn start(
        options: EngineOptions,
        gpus: Gpus,
        cdi: Cdi,
    ) -> Result<(Self, RecoveryReport), StartError> {
        let state = &options.paths.state_dir;
        let unusable = |cause| StartError::StateDir { path: state.clone(), cause };
        let records = Records::open(state).map_err(unusable)?;
        let locks = Locks::open(state).map_err(unusable)?;
        let inner = Arc::new(Inner {
            options,
            gpus,
            cdi,
            records,
            locks: Arc::new(locks),
            claims: ClaimLocks::default(),
            unsettled: Mutex::default(),
            daemons: watch::Sender::default(),
            prepared_or_released: Notify::new(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        });
        let explainer = Arc::downgrade(&inner);
        let ours = move |gpu: &GpuUuid, profile_id: u32, start: u32| {
            explainer
                .upgrade()
                .is_some_and(|inner| inner.records.explains(&inner.locks, gpu, profile_id, start))
        };
        inner.gpus.set_ours(Arc::new(ours));
        let settled = inner.inventory();
        let report = inner.recover().await;
        inner.tasks.spawn(inner.clone().watch(settled));
        inner.tasks.spawn(inner.clone().watch_daemons());
        Ok((Self { inner }, report))
    }

    /// Makes the claim's devices ready; repeated, it answers the same bytes.
    pub async fn prepare(&self, claim: &AllocatedClaim) -> Result<Vec<PreparedDevice>, PrepareError> {
        let (inner, owned) = (self.inner.clone(), claim.clone());
        let within = inner.options.answer_within;
        let task = self.inner.tasks.spawn(async move { inner.prepare(&owned).await });
        match timeout(within, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(PrepareError::Crashed { claim: claim.claim.clone() }),
            Err(_) => Err(PrepareError::Late { claim: claim.claim.clone(), within }),
        }
    }

    /// Gives the claim's devices back, from its record alone; an unknown claim is released already.
    pub async fn unprepare(&self, uid: &ClaimUid) -> Result<(), UnprepareError> {
        let (inner, owned) = (self.inner.clone(), uid.clone());
        let within = inner.options.answer_within;
        let task = self.inner.tasks.spawn(async move { inner.unprepare(&owned).await });
        match timeout(within, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(UnprepareError::Crashed { uid: uid.clone() }),
            Err(_) => Err(UnprepareError::Late { uid: uid.clone(), within }),
        }
    }

    /// Every claim with a record, to be held against the API server.
    pub fn held(&self) -> Vec<HeldClaim> {
        let records = match self.inner.records.all() {
            Ok((records, _)) => records,
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "records cannot be listed");
                return Vec::new();
            }
        };
        let held = |record: crate::records::ClaimRecord| HeldClaim {
            devices: record.devices.into_iter().map(|device| device.device).collect(),
            claim: record.claim,
            state: record.state,
        };
        records.into_iter().map(held).collect()
    }

    /// The devices of a claim that is prepared and whose pages and CDI file are as
    /// they must be; none says that [`Self::prepare`] has something to do or to look at.
    pub fn prepared(&self, uid: &ClaimUid) -> Option<Vec<PreparedDevice>> {
        let record = self.inner.records.read(uid).ok()??;
        if record.state != HeldState::Prepared {
            return None;
        }
        let devices = self.inner.hands().known_cdi_devices(&record)?;
        let written = self.inner.cdi.claim_is_written_at_once(uid, &devices) == Some(true)
            && self.inner.hands().pages_are_written(&record);
        written.then(|| record.answer())
    }

    /// The MPS control daemons that prepared claims stand on, now and from now on.
    pub fn daemons(&self) -> watch::Receiver<Arc<Daemons>> {
        self.inner.daemons.subscribe()
    }

    /// How many records were set aside since the start.
    pub fn quarantined(&self) -> u64 {
        self.inner.records.quarantined()
    }

    /// GPU instances that no record explains, as the inventory has them now.
    pub fn unexplained(&self) -> Vec<InstanceKey> {
        let inventory = self.inner.inventory();
        let mut unexplained = Vec::new();
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
                    unexplained.push(key);
                }
            }
        }
        unexplained
    }

    /// Turns MIG mode off, without the hold-off, where it is ours and no claim needs it;
    /// answers the GPUs on which that did not work. One that is not there has nothing on.
    pub async fn rest_now(&self) -> Vec<GpuUuid> {
        self.inner.rest_now().await
    }

    /// Ends the engine's own tasks and waits for calls under way; nothing is given back.
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

    pub(crate) fn hands(&self) -> Hands {
        Hands { gpus: self.gpus.clone(), cdi: self.cdi.clone(), not_after: None }
    }

    /// Hands that leave a part of the answer's time for taking back what they did.
    pub(crate) fn hurried_hands(&self, begun: Instant) -> Hands {
        Hands { not_after: Some(begun + self.options.answer_within.mul_f32(0.75)), ..self.hands() }
    }
}
