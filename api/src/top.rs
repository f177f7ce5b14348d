//! The usage of shares that the node daemon publishes once a second, and that `divvy top` shows.
//!
//! Each GPU has a file in [`DIRECTORY`] below the run directory; it is replaced as a whole. `divvy
//! top --json` prints the [`ShareUsage`] objects of all files.

use crate::{ClaimUid, ShareId};
use serde::{Deserialize, Serialize};

/// Directory of the files, below the run directory.
pub const DIRECTORY: &str = "top";
/// Version of the files. A reader rejects any other.
pub const VERSION: u32 = 1;

/// The shares of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuUsage {
    pub version: u32,
    /// UUID with NVML's prefix.
    pub gpu: String,
    pub shares: Vec<ShareUsage>,
}

/// The usage of a share. Values per second cover the time between the last two audits, scaled to
/// one second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareUsage {
    /// Time of the sample, in milliseconds since the Unix epoch.
    pub sampled_at_ms: u64,
    /// Missing if the claim is not held any more.
    pub namespace: Option<String>,
    pub claim: Option<String>,
    pub claim_uid: ClaimUid,
    pub share: ShareId,
    /// UUID with NVML's prefix.
    pub gpu: String,
    /// UUID of the MIG instance, if the share is part of one.
    pub mig: Option<String>,
    pub memory_limit_bytes: u64,
    /// Memory by the account page of the share; missing if the page cannot be read.
    pub memory_used_bytes: Option<u64>,
    /// Memory of its processes by NVML; missing if NVML does not report it, or if a process uses
    /// several shares.
    pub memory_used_nvml_bytes: Option<u64>,
    /// Guaranteed percent of the compute time of the device, and the ceiling.
    pub compute_request_percent: u32,
    pub compute_limit_percent: u32,
    /// Weight for compute time that is not guaranteed.
    pub weight: u32,
    pub priority: u32,
    /// Utilization by NVML in percent, during the last second; missing if NVML does not report it,
    /// as for a MIG instance with several shares.
    pub compute_used_nvml_percent: Option<u32>,
    /// Utilization in percent that the library charged during the last second; missing in the first
    /// sample.
    pub compute_used_percent: Option<u32>,
    /// Milliseconds of the last second for which launches were throttled, summed over all threads;
    /// missing in the first sample.
    pub throttled_ms: Option<u64>,
    /// Living processes that are registered on the account page.
    pub processes: u32,
    /// How the GPU time since the last audit is known; missing until it is, and in files of daemons
    /// before these totals.
    pub gpu_time_attribution: Option<GpuTimeAttribution>,
    /// Missing in files of daemons before these totals.
    pub totals: Option<ShareTotals>,
}

/// Running totals of a share since the node daemon first saw it. They begin at 0 again when the
/// daemon restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ShareTotals {
    /// GPU time used, in milliseconds: the sum of what each audit found, by its attribution.
    pub gpu_time_used_ms: u64,
    /// Time for which launches were throttled, in milliseconds, summed over all threads. Lacks what
    /// a process waited after the last audit if another process takes its slot before the next one.
    pub throttled_ms: u64,
    /// Time for which the share had the device, in milliseconds. This and the next two are missing
    /// as long as the share never needed a quantum to launch.
    pub granted_ms: Option<u64>,
    /// Number of times the share got the device.
    pub hand_overs: Option<u64>,
    /// Number of times the share had to share the device, because its work did not complete in time.
    pub late_hand_overs: Option<u64>,
}

/// How the GPU time of a share is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuTimeAttribution {
    /// The library measures it with events while no other share launches.
    Events,
    /// NVML reports it per process, or per MIG instance for its only share.
    Nvml,
    /// The library reports it, corrected by the total of NVML's samples.
    Samples,
    /// The library reports it, and nothing else is known.
    Reported,
}

impl GpuTimeAttribution {
    /// Its name in JSON and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::Nvml => "nvml",
            Self::Samples => "samples",
            Self::Reported => "reported",
        }
    }
}
