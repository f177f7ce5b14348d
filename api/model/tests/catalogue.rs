//! Device names of every GPU model in the catalogue.

use divvy_api::DeviceName;
use divvy_catalogue::{GpuModel, all};
use divvy_model::{DeviceId, GpuNumber};
use std::collections::BTreeSet;

/// Every device of a GPU of that model.
fn devices(gpu: GpuNumber, model: &GpuModel) -> Vec<DeviceId> {
    let profiles = model.mig.iter().flat_map(|mig| &mig.profiles);
    let parts = profiles.flat_map(|profile| profile.starts.iter().map(move |start| (profile, *start)));
    let parts = parts.map(|(profile, start)| DeviceId::mig(gpu, &profile.name, profile.id, start));
    std::iter::once(DeviceId::Gpu(gpu)).chain(parts).collect()
}

fn is_dns_label(name: &str) -> bool {
    let inner = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    inner && name.len() <= 63 && !name.starts_with('-') && !name.ends_with('-') && !name.is_empty()
}

#[test]
fn every_device_of_every_model_has_a_unique_name() {
    for model in all() {
        for gpu in [0, 7, 15, u32::MAX].map(GpuNumber) {
            let devices = devices(gpu, model.row());
            for device in &devices {
                let name = device.name();
                assert!(is_dns_label(name.as_str()), "{name}");
                assert_eq!(DeviceId::try_from(&name).as_ref(), Ok(device));
            }
            let names: BTreeSet<DeviceName> = devices.iter().map(DeviceId::name).collect();
            assert_eq!(names.len(), devices.len(), "{}", model.row().key);
        }
    }
}

#[test]
fn names_follow_the_pattern_of_nvidias_driver() {
    let names: Vec<_> = ["H100-SXM5-80GB", "RTX-PRO-6000"]
        .iter()
        .flat_map(|key| devices(GpuNumber(0), divvy_catalogue::find(key).expect(key).row()))
        .map(|device| device.to_string())
        .collect();
    for name in [
        "gpu-0",
        "gpu-0-mig-1g10gb-19-6",
        "gpu-0-mig-1g10gb-me-20-3",
        "gpu-0-mig-7g80gb-0-0",
        "gpu-0-mig-1g24gb-me-67-9",
        "gpu-0-mig-2g48gb-meall-64-6",
    ] {
        assert!(names.iter().any(|have| have == name), "{name} in {names:?}");
    }
}
