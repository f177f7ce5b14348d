//! Taints of published devices that must not be allocated.
//!
//! Each cause has its own key, so an operator sees it in `kubectl describe` and a claim can
//! tolerate exactly one cause. The effect is `NoSchedule`: running pods are not evicted.

use divvy_api::names::DRIVER;
use divvy_api::sharing::Mode;
use divvy_model::inventory::{Condition, Gpu, GpuInstance, Inventory, MigMode, Presence};
use k8s_openapi::api::resource::v1::DeviceTaint;

/// The cause of a taint. Its key is `gpu.divvy.dev/<name>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause<'a> {
    /// The GPU with this number is absent.
    Missing,
    Lost,
    /// A hardware call on the GPU does not return.
    Stuck(&'a str),
    /// The device needs the other MIG mode, and the driver cannot switch it.
    MigMode(MigMode),
    /// An unmanaged MIG instance occupies the resources.
    Foreign(&'a GpuInstance),
    /// The administrator disabled this mode.
    ModeOff(Mode),
    /// The MPS control daemon of the GPU is unhealthy.
    MpsUnhealthy(&'a str),
    /// A device plugin allocates the node's GPUs as this resource.
    DevicePlugin(&'a str),
    /// The GPU driver is absent; the devices are those that were published before.
    NoDriver,
}

impl Cause<'_> {
    pub(crate) fn taint(&self) -> DeviceTaint {
        let (name, value) = match self {
            Self::Missing => ("gpu-missing", None),
            Self::Lost => ("gpu-lost", None),
            Self::Stuck(call) => ("gpu-stuck", Some(label(call))),
            Self::MigMode(MigMode::On) => ("mig-mode", Some("on".to_owned())),
            Self::MigMode(MigMode::Off) => ("mig-mode", Some("off".to_owned())),
            Self::Foreign(instance) => {
                ("foreign-instance", Some(format!("{}-{}", instance.profile_id, instance.placement.start)))
            }
            Self::ModeOff(mode) => ("mode-off", Some(mode.to_string())),
            Self::MpsUnhealthy(cause) => ("mps-unhealthy", Some(label(cause))),
            Self::DevicePlugin(resource) => ("device-plugin", Some(label(resource))),
            Self::NoDriver => ("no-gpu-driver", None),
        };
        DeviceTaint {
            key: format!("{DRIVER}/{name}"),
            value,
            effect: "NoSchedule".to_owned(),
            // The API server sets the time. Later writes preserve it.
            time_added: None,
        }
    }
}

/// The taints of all devices of a GPU.
pub(crate) fn of_gpu(node: &Inventory, gpu: &Gpu) -> Vec<DeviceTaint> {
    let plugin = node.device_plugin.as_deref().map(Cause::DevicePlugin);
    let missing = (gpu.presence == Presence::Missing).then_some(Cause::Missing);
    let conditions = gpu.conditions.iter().filter_map(|condition| match condition {
        Condition::Lost => Some(Cause::Lost),
        Condition::Stuck { call } => Some(Cause::Stuck(call)),
        // Affects only the MPS device.
        Condition::Mps { .. } => None,
    });
    let mut taints: Vec<DeviceTaint> = Vec::new();
    for cause in missing.into_iter().chain(conditions).chain(plugin) {
        add(&mut taints, &cause);
    }
    taints
}

/// Adds the taints of the devices of one mode.
pub(crate) fn of_mode(taints: &mut Vec<DeviceTaint>, gpu: &Gpu, mode: Mode) {
    if !gpu.policy.modes.contains(&mode) {
        add(taints, &Cause::ModeOff(mode));
    }
    for condition in &gpu.conditions {
        if let (Condition::Mps { cause }, Mode::Mps) = (condition, mode) {
            add(taints, &Cause::MpsUnhealthy(cause));
        }
    }
}

/// Adds a taint unless its key is already present.
pub(crate) fn add(taints: &mut Vec<DeviceTaint>, cause: &Cause<'_>) {
    let taint = cause.taint();
    if taints.iter().all(|have| have.key != taint.key) {
        taints.push(taint);
    }
}

/// Converts text to a label value: invalid characters become `_`, at most 63 characters.
fn label(text: &str) -> String {
    let legal = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '_' };
    let text: String = text.chars().map(legal).take(63).collect();
    text.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}
