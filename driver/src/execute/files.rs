//! What the containers of a claim find: the pages of its shares, and the CDI file that
//! names its devices. Both are said by the record, and by the hardware where the record
//! does not know an id yet.

use super::{Hands, StepError, is};
use crate::cdi::{CdiId, ClaimDevice, DeviceNodes, MpsClient};
use crate::plan::{Access, Part};
use crate::records::{ClaimRecord, DeviceRecord};
use crate::shares::policy::policy;
use crate::shares::{Contexts, Shares};
use crate::sharing::{Setup, ShareLimits};
use divvy_api::sharing::CONTEXT;
use divvy_api::{ClaimUid, ShareId};
use divvy_nvml::RawInstance;
use divvy_pages::{GpuUuid, Policy};
use std::collections::BTreeSet;

impl Hands {
    /// Has the pages of the claim's shares be as they must; says whether anything had to be done.
    pub async fn write_pages(&self, record: &mut ClaimRecord) -> Result<bool, StepError> {
        for device in record.devices.iter_mut().filter(|device| device.access.limits().is_some()) {
            if let (Part::Instance(key), None) = (&device.part, &device.instance) {
                device.instance = Some(self.ids(key).await?);
            }
        }
        let shares = Shares::new(self.cdi.paths());
        let mut written = false;
        for (device, share, limits) in record.shares() {
            let policy = self.policy(&record.claim.uid, device, share, limits)?;
            written |= shares.write(&record.claim.uid, share, &policy)?;
        }
        Ok(written)
    }

    /// Whether there would be nothing to do, as far as that can be said without a look at the hardware.
    pub fn pages_are_written(&self, record: &ClaimRecord) -> bool {
        let shares = Shares::new(self.cdi.paths());
        record.shares().all(|(device, share, limits)| {
            let uid = &record.claim.uid;
            let known = device.instance.is_some() || matches!(device.part, Part::Whole { .. });
            let policy = known.then(|| self.policy(uid, device, share, limits));
            policy.is_some_and(|policy| policy.is_ok_and(|policy| shares.is_written(uid, share, &policy)))
        })
    }

    fn policy(
        &self,
        claim: &ClaimUid,
        device: &DeviceRecord,
        share: &ShareId,
        limits: ShareLimits,
    ) -> Result<Policy, StepError> {
        let gpu = self.gpu(device.part.gpu())?;
        let whole = matches!(device.part, Part::Whole { .. }).then(|| GpuUuid::parse(gpu.uuid.as_str()));
        let context =
            whole.flatten().map_or(CONTEXT, |gpu| Contexts::new(self.cdi.paths()).of(gpu, limits.memory));
        Ok(policy(claim, device, share, limits, &gpu, context)?)
    }

    /// Writes the claim's CDI file from the record and what the hardware is now.
    pub async fn write_cdi(&self, record: &mut ClaimRecord) -> Result<(), StepError> {
        let devices = self.cdi_devices(record).await?;
        match self.cdi.write_claim_at_once(&record.claim.uid, &devices) {
            Some(written) => drop(written?),
            // A node or module that is missing is made first, and that may take seconds.
            None => {
                let (cdi, uid) = (self.cdi.clone(), record.claim.uid.clone());
                let written = tokio::task::spawn_blocking(move || cdi.write_claim(&uid, &devices)).await;
                written.map_err(|_| StepError::Task)??;
            }
        }
        for device in &mut record.devices {
            let id = CdiId::new(&record.claim.uid, &device.device, device.share_id.as_ref());
            device.cdi_ids = vec![id.into()];
        }
        Ok(())
    }

    /// The devices of the record as the CDI file names them; what the record has
    /// no ids for is looked up on the hardware.
    pub async fn cdi_devices(&self, record: &mut ClaimRecord) -> Result<Vec<ClaimDevice>, StepError> {
        let mut devices = Vec::with_capacity(record.devices.len());
        for device in &mut record.devices {
            if let (true, Part::Instance(key), None) = (device.access.holds(), &device.part, &device.instance)
            {
                device.instance = Some(self.ids(key).await?);
            }
            let nodes = match self.known_nodes(device)? {
                Some(nodes) => nodes,
                None => {
                    let instances = self.live(&device.part).await;
                    DeviceNodes::Admin { minor: self.minor(device.part.gpu())?, instances }
                }
            };
            devices.push(self.cdi_device(device, nodes));
        }
        Ok(once_each(devices))
    }

    /// The same without a look at the hardware, where that can be said.
    pub fn known_cdi_devices(&self, record: &ClaimRecord) -> Option<Vec<ClaimDevice>> {
        let known = |device: &DeviceRecord| Some(self.cdi_device(device, self.known_nodes(device).ok()??));
        record.devices.iter().map(known).collect::<Option<_>>().map(once_each)
    }

    fn cdi_device(&self, device: &DeviceRecord, nodes: DeviceNodes) -> ClaimDevice {
        let mps = match device.access.setup() {
            Some(Setup::Mps(limits)) => Some(MpsClient { dir: self.mps().of(&device.part), limits }),
            Some(Setup::Timeslice(_)) | None => None,
        };
        ClaimDevice {
            request: device.request.clone(),
            device: device.device.clone(),
            share: device.share_id.clone(),
            nodes,
            mps,
            injection: device.access.limits().map(|limits| limits.settings.injection),
        }
    }

    fn known_nodes(&self, device: &DeviceRecord) -> Result<Option<DeviceNodes>, StepError> {
        let minor = self.minor(device.part.gpu())?;
        Ok(match (device.access, &device.part, &device.instance) {
            (Access::Admin, ..) | (_, Part::Instance(_), None) => None,
            (_, Part::Instance(_), Some(ids)) => Some(DeviceNodes::Mig {
                minor,
                gpu_instance: ids.gpu_instance,
                compute_instance: ids.compute_instance,
            }),
            (_, Part::Whole { .. }, _) => Some(DeviceNodes::Gpu { minor }),
        })
    }

    /// What an administrator may look at: the instances that are live, with
    /// their compute instances; of a MIG device, its own.
    async fn live(&self, part: &Part) -> Vec<(u32, Vec<u32>)> {
        let Ok(queue) = self.gpus.queue(part.gpu()) else { return Vec::new() };
        let instances = queue.instances().await.unwrap_or_default();
        let wanted = |instance: &RawInstance| match part {
            Part::Whole { .. } => true,
            Part::Instance(key) => is(instance, key),
        };
        let nodes = |instance: RawInstance| {
            (instance.id, instance.compute_instances.iter().map(|compute| compute.id).collect())
        };
        instances.into_iter().filter(wanted).map(nodes).collect()
    }
}

/// A CDI file names a device once, though a claim may own it and look at it.
fn once_each(mut devices: Vec<ClaimDevice>) -> Vec<ClaimDevice> {
    let mut seen = BTreeSet::new();
    devices.retain(|device| seen.insert((device.device.clone(), device.share.clone())));
    devices
}
