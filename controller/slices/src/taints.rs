//! Taints of published devices that must not be allocated.
//!
//! Each cause has its own key, so an operator sees it in `kubectl describe` and a claim can
//! tolerate exactly one cause. The effect is `NoSchedule`: running pods are not evicted. Only the
//! effects of health states are chosen by the administrator.

use divvy_api::names::DRIVER;
use divvy_api::sharing::Mode;
use divvy_model::closing::MODE_OFF_TAINT;
use divvy_model::health::{HealthState, TaintEffect};
use divvy_model::inventory::{Condition, Gpu, GpuInstance, Inventory, MigMode, Presence};
use divvy_model::{ClosingId, Placement};
use k8s_openapi::api::resource::v1::{self as api, DeviceTaint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// The cause of a taint. Its key is `gpu.divvy.dev/<name>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause<'a> {
    /// The GPU with this number is absent.
    Missing,
    /// The GPU or the instance is in this state, for this cause.
    Health(HealthState, &'a str),
    /// The MIG state of the GPU cannot be read.
    MigUnreadable(&'a str),
    /// State of a released claim is left on the hardware.
    Debt(&'a str),
    /// An operator has taken the GPU.
    HandedOver,
    /// The device needs the other MIG mode, and the driver cannot switch it.
    MigMode(MigMode),
    /// An unmanaged MIG instance occupies the resources.
    Foreign(&'a GpuInstance),
    /// The administrator disabled this mode.
    ModeOff(Mode, ClosingId),
    /// The MPS control daemon of the GPU is unhealthy.
    MpsUnhealthy(&'a str),
    /// A device plugin allocates the node's GPUs as this resource.
    DevicePlugin(&'a str),
    /// The GPU driver is absent; the devices are those that were published before.
    NoDriver,
    /// The device is only for claims with adminAccess.
    Observer,
}

impl Cause<'_> {
    pub(crate) fn taint(&self) -> DeviceTaint {
        let (name, value) = match self {
            Self::Missing => ("gpu-missing", None),
            Self::Health(HealthState::Healthy, cause) => ("gpu-healthy", Some(label(cause))),
            Self::Health(HealthState::Degraded, cause) => ("gpu-degraded", Some(label(cause))),
            Self::Health(HealthState::NeedsReset, cause) => ("gpu-needs-reset", Some(label(cause))),
            Self::Health(HealthState::Stuck, cause) => ("gpu-stuck", Some(label(cause))),
            Self::Health(HealthState::Lost, cause) => ("gpu-lost", Some(label(cause))),
            Self::MigUnreadable(cause) => ("mig-unreadable", Some(label(cause))),
            Self::Debt(undo) => ("not-undone", Some(label(undo))),
            Self::HandedOver => ("handed-over", None),
            Self::MigMode(MigMode::On) => ("mig-mode", Some("on".to_owned())),
            Self::MigMode(MigMode::Off) => ("mig-mode", Some("off".to_owned())),
            Self::Foreign(instance) => {
                ("foreign-instance", Some(format!("{}-{}", instance.profile_id, instance.placement.start)))
            }
            Self::ModeOff(mode, _) => ("mode-off", Some(mode.to_string())),
            Self::MpsUnhealthy(cause) => ("mps-unhealthy", Some(label(cause))),
            Self::DevicePlugin(resource) => ("device-plugin", Some(label(resource))),
            Self::NoDriver => ("no-gpu-driver", None),
            Self::Observer => ("observer", None),
        };
        DeviceTaint {
            key: format!("{DRIVER}/{name}"),
            value,
            effect: "NoSchedule".to_owned(),
            time_added: match self {
                // The time is the ID of the closing, which identifies it after a restart.
                Self::ModeOff(_, id) => closing_time(*id),
                // The API server sets the time. Later writes preserve it.
                _ => None,
            },
        }
    }
}

/// The taints of all devices of a GPU.
pub(crate) fn of_gpu(node: &Inventory, gpu: &Gpu) -> Vec<DeviceTaint> {
    let plugin = node.device_plugin.as_deref().map(Cause::DevicePlugin);
    let absent = match gpu.presence {
        Presence::Present => None,
        Presence::Unread => Some(Cause::NoDriver),
        Presence::Missing => Some(Cause::Missing),
    };
    let mut taints: Vec<DeviceTaint> = Vec::new();
    for cause in absent.into_iter().chain(plugin) {
        add(&mut taints, &cause);
    }
    taints
}

/// Adds the taints of the GPU's conditions that concern a device: a MIG instance at `placement`, or
/// the whole GPU.
pub(crate) fn of_conditions(taints: &mut Vec<DeviceTaint>, gpu: &Gpu, placement: Option<Placement>) {
    for condition in gpu.conditions.iter().filter(|condition| condition.concerns(placement)) {
        let cause = match condition {
            Condition::Health(finding) => Cause::Health(finding.state, &finding.cause),
            Condition::MigUnreadable { cause } => Cause::MigUnreadable(cause),
            Condition::Debt { undo, .. } => Cause::Debt(undo),
            Condition::HandedOver => Cause::HandedOver,
            // Concerns only the MPS device.
            Condition::Mps { .. } => continue,
        };
        let effect = gpu.effect(condition);
        if effect != TaintEffect::None {
            push(taints, DeviceTaint { effect: effect.as_str().to_owned(), ..cause.taint() });
        }
    }
}

fn closing_time(id: ClosingId) -> Option<Time> {
    i64::try_from(id.0).ok().and_then(|seconds| Timestamp::from_second(seconds).ok()).map(Time)
}

/// The closing that a published device shows by its taint.
pub(crate) fn closing_of(device: &api::Device) -> Option<ClosingId> {
    let taint = device.taints.iter().flatten().find(|taint| taint.key == MODE_OFF_TAINT)?;
    let seconds = taint.time_added.as_ref()?.0.as_second();
    u64::try_from(seconds).ok().map(ClosingId)
}

/// Adds the taints of the devices of one mode, which may be closing.
pub(crate) fn of_mode(taints: &mut Vec<DeviceTaint>, gpu: &Gpu, mode: Mode, closing: Option<ClosingId>) {
    if let Some(id) = closing {
        add(taints, &Cause::ModeOff(mode, id));
    }
    for condition in &gpu.conditions {
        if let (Condition::Mps { cause }, Mode::Mps) = (condition, mode) {
            add(taints, &Cause::MpsUnhealthy(cause));
        }
    }
}

/// Adds a taint unless its key is already present.
pub(crate) fn add(taints: &mut Vec<DeviceTaint>, cause: &Cause<'_>) {
    push(taints, cause.taint());
}

fn push(taints: &mut Vec<DeviceTaint>, taint: DeviceTaint) {
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
