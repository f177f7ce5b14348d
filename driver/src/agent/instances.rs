//! Of which instance of a GPU a process is, and of which instances the GPU driver knows who had the time.
//!
//! With MIG on, NVML says nothing of the time of processes. On Hopper and later it says how much of its time a GPU instance was at
//! work (GPM), and where one share has all of that instance, this is the share's: there it is measured as it is on a whole GPU.
//! Where several have parts of it, nothing but their own words tells them apart, and whoever lies there would have its
//! neighbours cut for it: what follows from the whole there is told in [`super::joint`].
//!
//! It is of shares if whoever is on the instance runs on its one compute instance; [`super::meter`] sees to it that they are
//! processes of the one share, where there is one.

use super::look::{Device, Use};
use divvy_model::Inventory;
use divvy_model::inventory::{GpuInstance, Mig};
use divvy_nvml::{InstanceTimes, ProcessUse};
use divvy_pages::GpuUuid;
use std::collections::BTreeMap;

/// Nanoseconds a second, by the UUID of the MIG device.
pub(super) type Busy = BTreeMap<GpuUuid, u64>;

/// The same, and at `None` of the whole GPU.
pub(super) type Active = BTreeMap<Option<GpuUuid>, u64>;

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

/// Those of the GPU instances of which shares have all. `shares` are the MIG devices of all shares.
pub(super) fn own(instances: &[GpuInstance], shares: &[GpuUuid], uses: &[ProcessUse]) -> Vec<GpuInstance> {
    let is_own = |instance: &&GpuInstance| {
        let Some((only, mig)) = only(instance) else { return false };
        let mut processes = uses.iter().filter_map(|usage| usage.instance);
        let is_others = |(gi, ci)| gi == instance.id && ci != only;
        shares.contains(&mig) && !processes.any(is_others)
    };
    instances.iter().filter(is_own).cloned().collect()
}

/// The number and UUID of its one compute instance.
fn only(instance: &GpuInstance) -> Option<(u32, GpuUuid)> {
    let [only] = instance.compute_instances.as_slice() else { return None };
    Some((only.id, GpuUuid::parse(&only.uuid)?))
}

/// What the shares of these had together, by their devices.
pub(super) fn busy(own: &[GpuInstance], times: &InstanceTimes) -> Busy {
    let busy = |instance: &GpuInstance| Some((only(instance)?.1, *times.busy.get(&instance.id)?));
    own.iter().filter_map(busy).collect()
}

/// For how much of the time their multiprocessors were active, and at `None` all of the GPU's.
pub(super) fn active(own: &[GpuInstance], times: &InstanceTimes) -> Active {
    let whole = times.active.get(&None).map(|active| (None, *active));
    let active =
        |instance: &GpuInstance| Some((Some(only(instance)?.1), *times.active.get(&Some(instance.id))?));
    own.iter().filter_map(active).chain(whole).collect()
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

    /// Which of the GPU instances 1 and 2 shares have, and 3, of which there are two compute instances; by the numbers of
    /// the shares' devices and by instances on which there are processes.
    fn check(shares: &[u8], processes: &[(u32, u32)], expected: &[u32]) {
        let shares: Vec<_> = shares.iter().map(|number| mig(*number)).collect();
        let on = |instance: &(u32, u32)| ProcessUse { pid: 7, instance: Some(*instance), bytes: None };
        let uses: Vec<_> = processes.iter().map(on).collect();
        let instances = [instance(1, &[0]), instance(2, &[0]), instance(3, &[0, 1])];
        let is: Vec<u32> = own(&instances, &shares, &uses).iter().map(|instance| instance.id).collect();
        assert_eq!(is, expected, "{shares:?} {processes:?}");
    }

    #[test]
    fn shares_have_an_instance_if_nobody_runs_beside_them() {
        check(&[], &[], &[]);
        check(&[10, 20], &[], &[1, 2]);
        check(&[10, 20, 20], &[(1, 0), (2, 0)], &[1, 2]);
        check(&[10], &[(2, 0), (3, 1)], &[1]);
        // On a compute instance that is not known yet.
        check(&[10], &[(1, 0), (1, 1)], &[]);
        check(&[30], &[(3, 0)], &[]);
    }

    #[test]
    fn what_an_instance_had_is_known_by_its_device() {
        let of_active = [(None, 2), (Some(1), 3)].into();
        let times = InstanceTimes { busy: [(1, 5), (3, 7)].into(), active: of_active, until: Instant::now() };
        let all = [instance(1, &[0]), instance(2, &[0])];
        assert_eq!(busy(&all, &times), [(mig(10), 5)].into());
        assert_eq!(active(&all, &times), [(None, 2), (Some(mig(10)), 3)].into());
    }
}
