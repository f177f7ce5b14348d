//! nvml-wrapper, unmodified: enumerating devices, and the life cycle of a MIG instance with its raw
//! calls.
#![allow(unsafe_code, reason = "nvml-wrapper's raw calls")]

mod common;

use std::fmt::Debug;

use common::*;
use divvy_sim::state::{Process, ProcessKind};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::enum_wrappers::device::{Brand, TemperatureSensor, TopologyLevel};
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper::error::NvmlError;

fn wrapper(node: &Node) -> Nvml {
    Nvml::builder()
        .lib_path(node.library().as_os_str())
        .flags(InitFlags::NO_GPUS)
        .init()
        .expect("nvml-wrapper")
}

#[track_caller]
fn check<T: PartialEq + Debug>(got: Result<T, NvmlError>, expected: T) {
    assert_eq!(got.map_err(|error| error.to_string()), Ok(expected));
}

#[test]
fn wrapper_enumerates_a_node() {
    let node = Node::up("2xH100-SXM5-80GB,L4");
    let nvml = wrapper(&node);
    check(nvml.device_count(), 3);
    check(nvml.sys_driver_version(), "580.95.05".to_owned());
    check(nvml.sys_cuda_driver_version(), 13_000);
    let gpu = nvml.device_by_index(0).expect("a GPU");
    check(gpu.name(), "NVIDIA H100 80GB HBM3".to_owned());
    check(gpu.brand(), Brand::Nvidia);
    check(gpu.architecture(), DeviceArchitecture::Hopper);
    let capability = gpu.cuda_compute_capability().expect("a capability");
    assert_eq!((capability.major, capability.minor), (9, 0));
    let memory = gpu.memory_info().expect("memory");
    assert_eq!((memory.total, memory.reserved), (81_559 << 20, 480 << 20));
    assert_eq!(memory.total, memory.free + memory.used + memory.reserved);
    let pci = gpu.pci_info().expect("PCI");
    assert_eq!(pci.pci_device_id, 0x2330_10de);
    check(nvml.device_by_pci_bus_id(pci.bus_id).and_then(|gpu| gpu.index()), 0);
    let uuid = gpu.uuid().expect("a UUID");
    check(nvml.device_by_uuid(uuid).and_then(|gpu| gpu.minor_number()), 0);
    let other = nvml.device_by_index(1).expect("a GPU");
    let near = gpu.topology_common_ancestor(other).expect("a level");
    assert_ne!(near, TopologyLevel::Internal);
    let neighbours = gpu.topology_nearest_gpus(near).expect("neighbours");
    assert_eq!(neighbours.iter().map(|gpu| gpu.index().expect("an index")).collect::<Vec<_>>(), [1]);
    let l4 = nvml.device_by_index(2).expect("a GPU");
    assert!(matches!(l4.mig_mode(), Err(NvmlError::NotSupported)));
    check(l4.architecture(), DeviceArchitecture::Ada);
}

#[test]
fn wrapper_reads_processes_and_health() {
    let node = Node::up("H100-SXM5-80GB");
    let nvml = wrapper(&node);
    let gpu = nvml.device_by_index(0).expect("a GPU");
    assert!(gpu.running_compute_processes().expect("a list").is_empty());
    let process = Process {
        pid: 4242,
        name: "train".to_owned(),
        kind: ProcessKind::Compute,
        instance: None,
        memory_mib: 1024,
    };
    node.sim.update(|state| state.add_process(0, process)).expect("a process");
    let running = gpu.running_compute_processes().expect("a list");
    assert_eq!(running.iter().map(|process| process.pid).collect::<Vec<_>>(), [4242]);
    assert!(gpu.running_graphics_processes().expect("a list").is_empty());
    check(nvml.sys_process_name(4242, 64), "train".to_owned());
    check(gpu.memory_info().map(|memory| memory.used), 1 << 30);
    check(gpu.is_ecc_enabled().map(|ecc| ecc.currently_enabled), true);
    assert!(gpu.temperature(TemperatureSensor::Gpu).is_ok());
    assert!(gpu.power_usage().is_ok_and(|mw| mw < gpu.power_management_limit().expect("a limit")));
    check(gpu.link_wrapper_for(0).is_active(), true);
}

#[test]
fn wrapper_creates_and_destroys_a_mig_instance() {
    let node = Node::up("H100-SXM5-80GB");
    let nvml = wrapper(&node);
    let client = node.loaded();
    let parent = nvml.device_by_index(0).expect("a GPU");
    check(parent.set_mig_mode(true), SUCCESS);
    check(parent.mig_mode().map(|mode| mode.current), 1);
    // SAFETY: the handle is used while `nvml` lives.
    let gpu = Device(unsafe { parent.handle() });
    let profile = client.profile(gpu, 2).expect("3g");
    let gi = client.create_gi(gpu, profile.id, Some((4, 4))).expect("a GPU instance");
    let info = client.gi_info(gi).expect("information");
    assert_eq!((Device(info.device), info.id, info.profileId), (gpu, 2, 9));
    let ci_profile = client.ci_profile(gi, 2, 0).expect("3c");
    let ci = client.create_ci(gi, ci_profile.id).expect("a compute instance");
    let info = client.ci_info(ci).expect("information");
    assert_eq!((Gi(info.gpuInstance), info.id, info.placement.start, info.placement.size), (gi, 0, 0, 3));

    check(parent.mig_device_count(), 7);
    let mig = parent.mig_device_by_index(0).expect("a MIG device");
    let uuid = mig.uuid().expect("a UUID");
    assert_eq!(client.uuid(Device(info.device)).as_ref(), Ok(&uuid));
    assert!(uuid.starts_with("MIG-"), "{uuid}");
    check(mig.name(), "NVIDIA H100 80GB HBM3 MIG 3g.40gb".to_owned());
    let attributes = mig.attributes().expect("attributes");
    assert_eq!((attributes.multiprocessor_count, attributes.memory_size_mb), (60, 40_448));
    check(mig.memory_info().map(|memory| memory.total), 40_448 << 20);
    let gpu_uuid = parent.uuid().expect("a UUID");
    check(mig.mig_parent_device().and_then(|gpu| gpu.uuid()), gpu_uuid.clone());
    check(nvml.device_by_uuid(uuid.as_str()).and_then(|mig| mig.mig_is_mig_device_handle()), true);
    check(nvml.device_by_uuid(format!("MIG-{gpu_uuid}/2/0")).and_then(|mig| mig.uuid()), uuid.clone());

    assert_eq!((client.destroy_ci(ci), client.destroy_gi(gi)), (SUCCESS, SUCCESS));
    assert!(matches!(nvml.device_by_uuid(uuid), Err(NvmlError::NotFound)));
    check(parent.set_mig_mode(false), SUCCESS);
    check(parent.mig_device_count(), 0);
}
