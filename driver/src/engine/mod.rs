//! The claim's life on this node: allocated, prepared, released.

use crate::cdi::Cdi;
use crate::gpus::Gpus;
use crate::paths::HostPaths;
use divvy_api::{AllocatedClaim, ClaimRef, ClaimUid, DeviceName, PoolName, RequestName, ShareId};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Prepares and releases claims; a clone is the same engine.
#[derive(Clone)]
pub struct Engine;

/// What the engine is told at its start.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    pub paths: HostPaths,
    /// The node's pool; devices of any other are refused.
    pub pool: PoolName,
    /// How long MIG mode stays on after the last instance.
    pub mig_hold_off: Duration,
    /// Whether GPU instances that no record explains may be destroyed.
    pub exclusive_ownership: bool,
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
    #[error("claim {claim}: no answer within {within:?}; it is still being worked on, retry")]
    Late { claim: ClaimRef, within: Duration },
}

/// Why a claim was not released; every message names the claim.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareError {
    #[error("claim {uid}: no answer within {within:?}; it is still being worked on, retry")]
    Late { uid: ClaimUid, within: Duration },
}

impl Engine {
    /// Local recovery, then ready: half-done claims are undone, missing
    /// instances and CDI files of prepared claims made again. A record that
    /// cannot be read is set aside, never a reason to fail.
    pub async fn start(options: EngineOptions, gpus: Gpus, cdi: Cdi) -> Result<(Self, RecoveryReport), StartError> {
        let _ = (options, gpus, cdi);
        Ok((Self, RecoveryReport::default()))
    }

    /// Makes the claim's devices ready; repeated, it answers the same bytes.
    pub async fn prepare(&self, claim: &AllocatedClaim) -> Result<Vec<PreparedDevice>, PrepareError> {
        Err(PrepareError::Late { claim: claim.claim.clone(), within: Duration::ZERO })
    }

    /// Gives the claim's devices back, from its record alone; an unknown claim is released already.
    pub async fn unprepare(&self, uid: &ClaimUid) -> Result<(), UnprepareError> {
        Err(UnprepareError::Late { uid: uid.clone(), within: Duration::ZERO })
    }

    /// Every claim with a record, to be held against the API server.
    pub fn held(&self) -> Vec<HeldClaim> {
        Vec::new()
    }

    /// The devices of a claim that is prepared and whose CDI file is as it must be.
    pub fn prepared(&self, uid: &ClaimUid) -> Option<Vec<PreparedDevice>> {
        let _ = uid;
        None
    }

    /// Waits for what is under way; nothing is given back.
    pub async fn shutdown(&self) {}
}
