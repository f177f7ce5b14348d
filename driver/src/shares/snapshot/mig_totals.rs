//! Locates processes on MIG instances and reads the busy time of instances that shares have exclusively.
//!
//! With MIG enabled, NVML reports no time per process. Hopper and later report the busy time of a
//! GPU instance (GPM). If one share has the whole instance, this is the share's time. If several
//! shares have parts of it, only their own reports tell them apart;
//! [`crate::shares::scheduler::device_totals`] handles that case. An instance counts as exclusive
//! if all processes on it run on its single compute instance.

use super::{Device, MigBusyNs, ProcessMemory, SmActiveNs};
use divvy_model::Inventory;
use divvy_model::inventory::{GpuInstance, Mig};
use divvy_nvml::{InstanceUtilization, ProcessUse};
use divvy_pages::GpuUuid;

/// The GPU instances of a GPU.
pub(crate) fn instances(gpu: GpuUuid, inventory: &Inventory) -> &[GpuInstance] {
    let known = inventory.gpus.iter().find(|known| GpuUuid::parse(known.uuid.as_str()) == Some(gpu));
    match known.map(|known| &known.mig) {
        Some(Mig::Supported { instances, .. }) => instances,
        _ => &[],
    }
}

/// The device of a process; `None` if the inventory does not have its instance yet.
pub(crate) fn locate(gpu: GpuUuid, inventory: &Inventory, usage: &ProcessUse) -> Option<ProcessMemory> {
    let ProcessUse { pid, instance, bytes } = *usage;
    let on = |mig: Option<GpuUuid>| ProcessMemory { pid, device: Device { gpu, mig }, bytes };
    let Some((gi, ci)) = instance else { return Some(on(None)) };
    let instance = instances(gpu, inventory).iter().find(|instance| instance.id == gi)?;
    let compute = instance.compute_instances.iter().find(|compute| compute.id == ci)?;
    Some(on(Some(GpuUuid::parse(&compute.uuid)?)))
}

/// The GPU instances that shares have exclusively. `shares` are the MIG devices of all shares.
pub(crate) fn exclusive(
    instances: &[GpuInstance],
    shares: &[GpuUuid],
    uses: &[ProcessUse],
) -> Vec<GpuInstance> {
    let is_exclusive = |instance: &&GpuInstance| {
        let Some((only, mig)) = only_compute_instance(instance) else { return false };
        let mut processes = uses.iter().filter_map(|usage| usage.instance);
        let is_elsewhere = |(gi, ci)| gi == instance.id && ci != only;
        shares.contains(&mig) && !processes.any(is_elsewhere)
    };
    instances.iter().filter(is_exclusive).cloned().collect()
}

/// Number and UUID of the only compute instance.
fn only_compute_instance(instance: &GpuInstance) -> Option<(u32, GpuUuid)> {
    let [only] = instance.compute_instances.as_slice() else { return None };
    Some((only.id, GpuUuid::parse(&only.uuid)?))
}

/// The busy time of each exclusive instance.
pub(crate) fn busy_ns(exclusive: &[GpuInstance], counters: &InstanceUtilization) -> MigBusyNs {
    let busy = |instance: &GpuInstance| {
        Some((only_compute_instance(instance)?.1, *counters.busy.get(&instance.id)?))
    };
    exclusive.iter().filter_map(busy).collect()
}

/// The time in which multiprocessors were active: of each exclusive instance, and of the whole GPU at `None`.
pub(crate) fn active_ns(exclusive: &[GpuInstance], counters: &InstanceUtilization) -> SmActiveNs {
    let whole = counters.active.get(&None).map(|active| (None, *active));
    let active = |instance: &GpuInstance| {
        Some((Some(only_compute_instance(instance)?.1), *counters.active.get(&Some(instance.id))?))
    };
    exclusive.iter().filter_map(active).chain(whole).collect()
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

    /// A GPU instance with these compute instances. The UUIDs are made of both ids.
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

    /// Checks which GPU instances are exclusive. Instances 1 and 2 have one compute instance,
    /// instance 3 has two. `shares` are the numbers of the shares' devices, `processes` the instances
    /// on which processes run.
    fn check(shares: &[u8], processes: &[(u32, u32)], expected: &[u32]) {
        let shares: Vec<_> = shares.iter().map(|number| mig(*number)).collect();
        let on = |instance: &(u32, u32)| ProcessUse { pid: 7, instance: Some(*instance), bytes: None };
        let uses: Vec<_> = processes.iter().map(on).collect();
        let instances = [instance(1, &[0]), instance(2, &[0]), instance(3, &[0, 1])];
        let is: Vec<u32> = exclusive(&instances, &shares, &uses).iter().map(|instance| instance.id).collect();
        assert_eq!(is, expected, "{shares:?} {processes:?}");
    }

    #[test]
    fn instance_is_exclusive_without_other_processes() {
        check(&[], &[], &[]);
        check(&[10, 20], &[], &[1, 2]);
        check(&[10, 20, 20], &[(1, 0), (2, 0)], &[1, 2]);
        check(&[10], &[(2, 0), (3, 1)], &[1]);
        // A process on a compute instance that the inventory does not have yet.
        check(&[10], &[(1, 0), (1, 1)], &[]);
        check(&[30], &[(3, 0)], &[]);
    }

    #[test]
    fn totals_are_keyed_by_mig_device() {
        let of_active = [(None, 2), (Some(1), 3)].into();
        let times =
            InstanceUtilization { busy: [(1, 5), (3, 7)].into(), active: of_active, until: Instant::now() };
        let all = [instance(1, &[0]), instance(2, &[0])];
        assert_eq!(busy_ns(&all, &times), [(mig(10), 5)].into());
        assert_eq!(active_ns(&all, &times), [(None, 2), (Some(mig(10)), 3)].into());
    }
}
