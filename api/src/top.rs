//! What a node knows of its shares, once a second: the words between the node daemon, which writes them, and
//! `divvy top`, which shows them.
//!
//! A file for each GPU, in the directory [`DIRECTORY`] of the run directory, and replaced as a whole. `divvy top --json`
//! prints the [`ShareNow`] of all of them, so their field names are for scripts to rely on: fields are added, none is
//! renamed.

use crate::{ClaimUid, ShareId};
use serde::{Deserialize, Serialize};

/// Where the files are, below the run directory.
pub const DIRECTORY: &str = "top";
/// Of the files; a reader refuses any other.
pub const VERSION: u32 = 1;

/// The shares of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuNow {
    pub version: u32,
    /// UUID with NVML's prefix.
    pub gpu: String,
    pub shares: Vec<ShareNow>,
}

/// A share. What is asked is by its policy; "of the last second" is of the time between two audits, told for one second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareNow {
    /// When that was, in milliseconds of the system clock.
    pub at_ms: u64,
    /// Absent where the claim is not held any more.
    pub namespace: Option<String>,
    pub claim: Option<String>,
    pub claim_uid: ClaimUid,
    pub share: ShareId,
    /// UUID with NVML's prefix.
    pub gpu: String,
    /// UUID of the MIG instance that the share is of.
    pub mig: Option<String>,
    pub memory_limit_bytes: u64,
    /// What the account page of the share says; absent where it says nothing that can be read.
    pub memory_used_bytes: Option<u64>,
    /// What the GPU driver says that its processes have; absent where it does not, or where they have it by several shares.
    pub memory_measured_bytes: Option<u64>,
    /// Compute time that is promised, and the most that it may have; of the device.
    pub guarantee_percent: u32,
    pub ceiling_percent: u32,
    /// Its part of what nobody is promised.
    pub weight: u32,
    pub priority: u32,
    /// What its processes had in the last second, by NVML; absent where that does not say, as of a MIG instance of which several have shares.
    pub busy_percent: Option<u32>,
    /// What they were charged in the last second, by their own word; absent at the first look.
    pub charged_percent: Option<u32>,
    /// How long their launches waited in the last second, all threads together, by their own word; absent at the first look.
    pub throttled_ms: Option<u64>,
    /// Living processes that are registered on the account page.
    pub processes: u32,
}
