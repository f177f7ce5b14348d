//! GPU numbers are ours and stay: `gpu-N` is the NVML minor at first sight,
//! then kept by GPU UUID. A GPU that is missing after a reboot keeps its
//! number, and a new GPU never takes one that is in use, although the driver
//! hands the minor out again.

use divvy_api::GpuUuid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The N of `gpu-N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuNumber(pub u32);

impl fmt::Display for GpuNumber {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.0)
    }
}

/// Who has which number. The driver keeps it as a file in its state directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuNumbers {
    by_uuid: BTreeMap<GpuUuid, GpuNumber>,
}

impl GpuNumbers {
    /// The number of a GPU: the one it has, or its minor if free, or the lowest free one.
    pub fn number(&mut self, uuid: &GpuUuid, minor: u32) -> GpuNumber {
        if let Some(number) = self.by_uuid.get(uuid) {
            return *number;
        }
        let taken = |n: u32| self.by_uuid.values().any(|have| have.0 == n);
        let number = GpuNumber(if taken(minor) { (0..).find(|n| !taken(*n)).unwrap_or(minor) } else { minor });
        self.by_uuid.insert(uuid.clone(), number);
        number
    }

    /// Gives the number of a GPU back; only an operator asks for this.
    pub fn forget(&mut self, uuid: &GpuUuid) -> Option<GpuNumber> {
        self.by_uuid.remove(uuid)
    }

    /// All numbers given, by UUID.
    pub fn iter(&self) -> impl Iterator<Item = (&GpuUuid, GpuNumber)> {
        self.by_uuid.iter().map(|(uuid, number)| (uuid, *number))
    }
}
