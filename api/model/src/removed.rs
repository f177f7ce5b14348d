//! Devices that were removed because their mode is off, and claims that overlap them.

use crate::closing::{Allocated, GpuMode, Removals};
use crate::device::DeviceId;
use crate::inventory::Inventory;
use divvy_api::{ClaimUid, DeviceName};

impl Allocated {
    /// The GPU and the mode of the device, see [`gpu_mode`].
    pub fn gpu_mode(&self) -> Option<GpuMode> {
        gpu_mode(&self.device)
    }
}

/// The GPU and the mode of a device; `None` if the name is not one of this driver. An observer takes part
/// in no mode.
pub fn gpu_mode(device: &DeviceName) -> Option<GpuMode> {
    match DeviceId::try_from(device).ok()? {
        DeviceId::Observer(_) => None,
        id => Some((id.gpu(), id.mode())),
    }
}

impl Removals {
    /// A claim on a removed device that overlaps `device`, so that `claim` must not get it: the
    /// scheduler allocated `device` while it did not charge the other one. Claims on the same device and
    /// claims that are both named here are left to the records of the node.
    pub fn overlap(&self, node: &Inventory, claim: &ClaimUid, device: &DeviceName) -> Option<&Allocated> {
        if self.allocated.iter().any(|entry| entry.claim.uid == *claim) {
            return None;
        }
        let id = DeviceId::try_from(device).ok()?;
        let (gpu, part) = id.resolve(node).ok()?;
        let overlaps = |entry: &&Allocated| {
            let Ok(other) = DeviceId::try_from(&entry.device) else { return false };
            let in_the_way = match (part, other.resolve(node)) {
                (Some((_, here)), Ok((_, Some((_, there))))) => here.overlaps(there),
                (_, Ok(_)) => true,
                (_, Err(_)) => false,
            };
            let is_off = other.gpu() == id.gpu() && !gpu.policy.offers(other.mode());
            entry.device != *device && is_off && in_the_way
        };
        self.allocated.iter().find(overlaps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Mig;
    use crate::inventory::tests::{gpu, mig, profile};
    use divvy_api::ClaimRef;
    use divvy_api::sharing::Mode;

    #[test]
    fn claim_that_overlaps_a_claim_on_a_removed_device_is_found() {
        let profiles = vec![profile(19, "1g.10gb", &[(0, 1), (1, 1)])];
        let mut one = gpu(0, mig(profiles));
        one.policy.modes = [Mode::Whole].into();
        let node = Inventory { gpus: vec![one, gpu(1, Mig::Unsupported)], ..Inventory::default() };
        let removals = |device: &str| {
            let claim = ClaimRef { namespace: "ns".to_owned(), name: "c".to_owned(), uid: "u".into() };
            Removals { allocated: vec![Allocated { device: device.into(), claim }], ..Removals::default() }
        };
        let check = |removed: &str, claim: &str, device: &str, expected: bool| {
            let found = removals(removed).overlap(&node, &claim.into(), &device.into()).is_some();
            assert_eq!(found, expected, "{removed} {claim} {device}");
        };
        check("gpu-0-timeslice", "other", "gpu-0", true);
        check("gpu-0-timeslice", "u", "gpu-0", false);
        check("gpu-0-timeslice", "other", "gpu-0-timeslice", false);
        check("gpu-0-timeslice", "other", "gpu-0-mig-1g10gb-19-0", true);
        check("gpu-0-mig-1g10gb-19-0", "other", "gpu-0-mig-1g10gb-19-1", false);
        check("gpu-0-mig-1g10gb-19-0", "other", "gpu-0-mps", true);
        check("gpu-0-timeslice", "other", "gpu-1", false);
        check("gpu-1-timeslice", "other", "gpu-1", false);
        check("gpu-0", "other", "gpu-0-mps", false);
        check("new-device", "other", "gpu-0", false);
    }
}
