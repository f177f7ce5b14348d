//! Why a claim cannot be had: the device, who or what stands against it, and the remedy.

use divvy_api::check::ONE_DAEMON;
use divvy_api::config::Misfit;
use divvy_api::sharing::Mode;
use divvy_api::{ClaimRef, DeviceName, GpuUuid, PoolName, Quantity, RequestName};
use divvy_model::inventory::Condition;
use divvy_model::share::ShareError;

/// Why a claim cannot be had; the message names claim, device and cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("claim {claim}: device {device} {cause}")]
pub struct PlanError {
    pub claim: ClaimRef,
    pub device: DeviceName,
    pub cause: Box<Refusal>,
}

/// What stands against a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("is of pool {pool}, and this node's pool is {ours}")]
    OtherPool { pool: PoolName, ours: PoolName },
    #[error("is not on this node")]
    UnknownDevice,
    #[error(transparent)]
    Consumed(#[from] ShareError),
    #[error("has {left} of memory left beside other shares on {gpu}, and the claim takes {wanted}")]
    Full { gpu: GpuUuid, left: Quantity, wanted: Quantity },
    #[error(
        "has {left} per cent of the cores left beside other shares on {gpu}, and the claim takes {wanted}"
    )]
    Busy { gpu: GpuUuid, left: u32, wanted: u32 },
    #[error("is shared with claim {holder}, which is half done on {gpu}; it is tried again")]
    HalfDone { gpu: GpuUuid, holder: ClaimRef },
    #[error("is on {gpu}, which is missing")]
    Missing { gpu: GpuUuid },
    #[error("cannot be used now: {condition} on {gpu}")]
    Unusable { gpu: GpuUuid, condition: Condition },
    #[error("overlaps what claim {holder} holds on {gpu}")]
    Held { gpu: GpuUuid, holder: ClaimRef },
    #[error("needs {gpu} in mode {wanted}, and claim {holder} holds it in mode {held}")]
    OtherMode { gpu: GpuUuid, wanted: Mode, holder: ClaimRef, held: Mode },
    #[error("has a configuration that does not fit: {0}")]
    Config(#[from] Misfit),
    #[error("is of request {request}: {ONE_DAEMON}")]
    TwoDaemons { request: RequestName },
    #[error("overlaps another device of the same claim")]
    OverlapsItself,
    #[error("overlaps GPU instance {instance} of {gpu}, which Divvy did not make; destroy it or claim it")]
    Foreign { gpu: GpuUuid, instance: u32 },
    #[error("needs MIG mode off on {gpu}, which takes a GPU reset; drain the node and turn it off")]
    NeedsMigOff { gpu: GpuUuid },
    #[error("needs MIG mode on on {gpu}, which takes a GPU reset; drain the node and turn it on")]
    NeedsMigOn { gpu: GpuUuid },
}

impl PlanError {
    /// Whether the cause is something that the inventory may have seen too early.
    pub fn meets_foreign(&self) -> bool {
        matches!(*self.cause, Refusal::Foreign { .. })
    }
}
