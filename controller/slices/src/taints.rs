//! Why a device is published and yet not to be handed out.
//!
//! One key per cause, so that an operator reads it in `kubectl describe` and a
//! claim of his can tolerate exactly it. All are `NoSchedule`: what runs goes on.

use divvy_api::names::DRIVER;
use divvy_api::sharing::Mode;
use divvy_model::inventory::{Condition, Gpu, GpuInstance, Inventory, MigMode, Presence};
use k8s_openapi::api::resource::v1::DeviceTaint;

/// The cause of a taint; its key is `gpu.divvy.dev/<name>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause<'a> {
    /// The GPU of that number is not there.
    Missing,
    Lost,
    /// A hardware call on it has not come back.
    Stuck(&'a str),
    /// MIG mode is what the device cannot live with, and is not ours to change.
    MigMode(MigMode),
    /// An instance that somebody else made is in the way.
    Foreign(&'a GpuInstance),
    /// The administrator does not want the GPU used so.
    ModeOff(Mode),
    /// The MPS control daemon of the GPU is not well.
    MpsUnhealthy(&'a str),
    /// A device plugin hands the node's GPUs out under this resource.
    DevicePlugin(&'a str),
    /// There is no GPU driver, and these devices are what was published before.
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
            // The server writes the time; we keep it from then on.
            time_added: None,
        }
    }
}

/// What is wrong with a GPU as a whole.
pub(crate) fn of_gpu(node: &Inventory, gpu: &Gpu) -> Vec<DeviceTaint> {
    let plugin = node.device_plugin.as_deref().map(Cause::DevicePlugin);
    let missing = (gpu.presence == Presence::Missing).then_some(Cause::Missing);
    let conditions = gpu.conditions.iter().filter_map(|condition| match condition {
        Condition::Lost => Some(Cause::Lost),
        Condition::Stuck { call } => Some(Cause::Stuck(call)),
        // Concerns one device of it.
        Condition::Mps { .. } => None,
    });
    let mut taints: Vec<DeviceTaint> = Vec::new();
    for cause in missing.into_iter().chain(conditions).chain(plugin) {
        add(&mut taints, &cause);
    }
    taints
}

/// Adds what concerns the devices of one mode alone.
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

/// Adds a taint unless its key is there.
pub(crate) fn add(taints: &mut Vec<DeviceTaint>, cause: &Cause<'_>) {
    let taint = cause.taint();
    if taints.iter().all(|have| have.key != taint.key) {
        taints.push(taint);
    }
}

/// As a label value: what it may not hold becomes `_`, at most 63 characters.
fn label(text: &str) -> String {
    let legal = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '_' };
    let text: String = text.chars().map(legal).take(63).collect();
    text.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}
