//! What a prepared claim's devices turned out to be, from its record and the
//! inventory; told to the claim's owner by [`crate::status`].

use super::Engine;
use crate::plan::Part;
use crate::records::DeviceRecord;
use crate::sharing::Setup;
use crate::status::{DeviceData, DeviceFacts};
use divvy_api::{ClaimUid, Quantity};
use divvy_model::{DeviceId, Inventory};

impl Engine {
    /// The facts of a claim's devices; none of what the node does not know.
    pub fn facts(&self, uid: &ClaimUid) -> Vec<DeviceFacts> {
        let Ok(Some(record)) = self.inner.records.read(uid) else { return Vec::new() };
        let inventory = self.inner.inventory();
        record.devices.iter().filter_map(|device| facts(device, &inventory)).collect()
    }
}

fn facts(device: &DeviceRecord, inventory: &Inventory) -> Option<DeviceFacts> {
    let mode = DeviceId::try_from(&device.device).ok()?.mode();
    let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == *device.part.gpu())?;
    let memory = match (device.access.limits(), &device.part) {
        (Some(limits), _) => limits.memory,
        (None, Part::Whole { .. }) => gpu.memory_bytes,
        (None, Part::Instance(key)) => gpu.profile(key.profile_id)?.memory_mib << 20,
    };
    Some(DeviceFacts {
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: device.share_id.clone(),
        data: DeviceData {
            uuid: gpu.uuid.clone(),
            mig_uuid: device.instance.as_ref().map(|ids| ids.uuid.clone()),
            mode,
            memory: (memory > 0).then(|| Quantity::bytes(memory)),
            interval: match device.access.setup() {
                Some(Setup::Timeslice(interval)) => Some(interval),
                Some(Setup::Mps(_)) | None => None,
            },
        },
    })
}
