//! Of which instance of a GPU a process is, and of which instances the GPU driver knows who had the time.
//!
//! With MIG on, NVML says nothing of the time of processes. On Hopper and later it says how much of its time a GPU instance was at
//! work (GPM), and where one share has all of that instance, this is the share's: there it is measured as it is on a whole GPU.
//! Where several have parts of it, nothing but their own words tells them apart, and whoever lies there would have its
//! neighbours cut for it: these are paced by their libraries alone.
//!
//! One share has all of it if it is the only one on the instance, and whoever is there runs on its compute instance;
//! [`super::meter`] sees to it that they are its own processes, too.

use super::look::{Device, Use};
use divvy_model::Inventory;
use divvy_model::inventory::{GpuInstance, Mig};
use divvy_nvml::{InstanceTimes, ProcessUse};
use divvy_pages::GpuUuid;
use std::collections::BTreeMap;

/// Nanoseconds a second, by the UUID of the MIG device.
pub(super) type Busy = BTreeMap<GpuUuid, u64>;

/// The GPU instances of a GPU.
pub(super) fn of(gpu: GpuUuid, inventory: &Inventory) -> &[GpuInstance] {
    let known = inventory.gpus.iter().find(|known| GpuUuid::parse(known.uuid.as_str()) == Some(gpu));
    match known.map(|known| &known.mig) {
        Some(Mig::Supported { instances, .. }) => instances,
        _ => &[],
    }
}

/// The device of a process; none for an instance that is not known yet.
pub(super) fn place(gpu: GpuUuid, inventory: &Inventory, usage: &ProcessUse) -> Option<Use> {
    let ProcessUse { pid, instance, bytes } = *usage;
    let Some((gi, ci)) = instance else { return Some(Use { pid, device: Device { gpu, mig: None }, bytes }) };
    let instance = of(gpu, inventory).iter().find(|instance| instance.id == gi)?;
    let compute = instance.compute_instances.iter().find(|compute| compute.id == ci)?;
    Some(Use { pid, device: Device { gpu, mig: Some(GpuUuid::parse(&compute.uuid)?) }, bytes })
}

/// Those of the GPU instances of which one share has all. `shares` are the MIG devices of all shares, one each.
pub(super) fn sole(instances: &[GpuInstance], shares: &[GpuUuid], uses: &[ProcessUse]) -> Vec<GpuInstance> {
    let is_sole = |instance: &&GpuInstance| {
        let Some((only, mig)) = only(instance) else { return false };
        let mut processes = uses.iter().filter_map(|usage| usage.instance);
        let is_others = |(gi, ci)| gi == instance.id && ci != only;
        shares.iter().filter(|share| **share == mig).count() == 1 && !processes.any(is_others)
    };
    instances.iter().filter(is_sole).cloned().collect()
}

/// The number and UUID of its one compute instance.
fn only(instance: &GpuInstance) -> Option<(u32, GpuUuid)> {
    let [only] = instance.compute_instances.as_slice() else { return None };
    Some((only.id, GpuUuid::parse(&only.uuid)?))
}

/// What the shares of these had, by their devices.
pub(super) fn busy(sole: &[GpuInstance], times: &InstanceTimes) -> Busy {
    let busy = |instance: &GpuInstance| Some((only(instance)?.1, *times.busy.get(&instance.id)?));
    sole.iter().filter_map(busy).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_model::inventory::{ComputeInstance, Origin};
    use divvy_model::placement::Placement;
    use std::time::Instant;

    fn mig(number: u8) -> GpuUuid {
        GpuUuid([number; 16])
    }

    /// A GPU instance with these compute instances, whose UUIDs are of its number and theirs.
    fn instance(id: u8, computes: &[u8]) -> GpuInstance {
        let compute = |ci: &u8| ComputeInstance {
            id: (*ci).into(),
            profile_id: 2,
            uuid: format!("MIG-{}", mig(10 * id + ci)),
        };
        GpuInstance {
            id: id.into(),
            profile_id: 9,
            placement: Placement { start: 0, size: 4 },
            compute_instances: computes.iter().map(compute).collect(),
            origin: Origin::Ours,
        }
    }

    /// Which of the GPU instances 1 and 2 one share has, and 3, of which there are two compute instances; by the numbers of
    /// the shares' devices and by instances on which there are processes.
    fn check(shares: &[u8], processes: &[(u32, u32)], expected: &[u32]) {
        let shares: Vec<_> = shares.iter().map(|number| mig(*number)).collect();
        let on = |instance: &(u32, u32)| ProcessUse { pid: 7, instance: Some(*instance), bytes: None };
        let uses: Vec<_> = processes.iter().map(on).collect();
        let instances = [instance(1, &[0]), instance(2, &[0]), instance(3, &[0, 1])];
        let is: Vec<u32> = sole(&instances, &shares, &uses).iter().map(|instance| instance.id).collect();
        assert_eq!(is, expected, "{shares:?} {processes:?}");
    }

    #[test]
    fn one_share_has_an_instance_if_there_is_no_other_and_nobody_runs_beside_it() {
        check(&[], &[], &[]);
        check(&[10, 20], &[], &[1, 2]);
        check(&[10, 20, 20], &[(1, 0), (2, 0)], &[1]);
        check(&[10], &[(2, 0), (3, 1)], &[1]);
        // On a compute instance that is not known yet.
        check(&[10], &[(1, 0), (1, 1)], &[]);
        check(&[30], &[(3, 0)], &[]);
    }

    #[test]
    fn what_an_instance_had_is_known_by_its_device() {
        let times = InstanceTimes { busy: [(1, 5), (3, 7)].into(), until: Instant::now() };
        let all = [instance(1, &[0]), instance(2, &[0])];
        assert_eq!(busy(&all, &times), [(mig(10), 5)].into());
    }
}
