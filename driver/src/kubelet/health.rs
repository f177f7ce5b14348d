//! Device health for the kubelet, from the same inventory that is published.
//!
//! Every message has the whole list. It is sent at once, after each change of the inventory, and every
//! ten seconds, because the kubelet treats devices without a report for 30 s as unknown. Health
//! appears in the pod's status; the taint on the device keeps the scheduler away.

use crate::claims::mps_daemons::MpsDaemons;
use divvy_api::{DeviceName, PoolName};
use divvy_kubelet::health::{v1, v1alpha1};
use divvy_model::inventory::{Condition, Gpu, Mig, Presence};
use divvy_model::{DeviceId, HealthState, Inventory, Placement, TaintEffect};
use k8s_openapi::jiff::Timestamp;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};

/// The health service, in both versions; a clone is the same.
#[derive(Clone)]
pub struct Health {
    pub pool: PoolName,
    pub inventory: watch::Receiver<Arc<Inventory>>,
    pub daemons: watch::Receiver<Arc<MpsDaemons>>,
    /// Owns the task of each stream.
    pub tasks: TaskTracker,
    /// Ends all streams.
    pub stop: CancellationToken,
}

const REPEAT_INTERVAL: Duration = Duration::from_secs(10);
/// Validity of a report, so that two of three repetitions may be lost.
const TIMEOUT_SECONDS: i64 = 30;
/// The kubelet truncates longer messages.
const MESSAGE_MAX_BYTES: usize = 1024;

/// The findings about a device of a GPU: a MIG instance at `placement`, or the whole GPU. The flag tells
/// whether the device is unhealthy; a degraded one works, so it is healthy with a message.
fn findings(gpu: &Gpu, placement: Option<Placement>) -> Vec<(bool, String)> {
    let missing = (gpu.presence == Presence::Missing).then(|| (true, "GPU is missing".to_owned()));
    let of_device = gpu.conditions.iter().filter(|condition| condition.concerns(placement));
    let found = of_device.filter_map(|condition| match condition {
        Condition::Health(finding) => Some((finding.state > HealthState::Degraded, condition.to_string())),
        // A failed MPS daemon concerns only the devices of its clients.
        Condition::Mps { .. } => None,
        Condition::MigUnreadable { .. } | Condition::Debt { .. } | Condition::HandedOver => {
            Some((gpu.effect(condition) != TaintEffect::None, condition.to_string()))
        }
    });
    missing.into_iter().chain(found).collect()
}

/// The failure of the MPS control daemon that serves the device, if there is one.
fn daemon_failure(device: &DeviceName, daemons: &MpsDaemons) -> Option<String> {
    let daemon = daemons.values().find(|daemon| daemon.devices.contains(device))?;
    daemon.failure.as_ref().map(|cause| Condition::Mps { cause: cause.clone() }.to_string())
}

/// Every device of the GPU that is published or could be, and the placement of a MIG instance.
fn devices(gpu: &Gpu) -> Vec<(DeviceId, Option<Placement>)> {
    let number = gpu.number;
    let whole = [DeviceId::Gpu, DeviceId::Share, DeviceId::Timeslice, DeviceId::Mps, DeviceId::Observer];
    let mut devices: Vec<_> =
        whole.into_iter().map(|device| device(number)).map(|device| (device, None)).collect();
    if let Mig::Supported { profiles, .. } = &gpu.mig {
        for profile in profiles {
            let instance = |placement: &Placement| {
                (DeviceId::mig(gpu.number, &profile.name, profile.id, placement.start), Some(*placement))
            };
            devices.extend(profile.placements.iter().map(instance));
        }
    }
    devices
}

fn list(
    pool: &PoolName,
    inventory: &Inventory,
    daemons: &MpsDaemons,
    now: Timestamp,
) -> v1::NodeWatchResourcesResponse {
    let mut list = Vec::new();
    for gpu in &inventory.gpus {
        list.extend(devices(gpu).into_iter().map(|(device, placement)| {
            let name = device.name();
            let of_daemon = daemon_failure(&name, daemons).map(|failure| (true, failure));
            let found: Vec<_> = findings(gpu, placement).into_iter().chain(of_daemon).collect();
            let is_unhealthy = found.iter().any(|(is_unhealthy, _)| *is_unhealthy);
            let texts: Vec<String> = found.into_iter().map(|(_, text)| text).collect();
            let mut message = texts.join("; ");
            message.truncate(message.floor_char_boundary(MESSAGE_MAX_BYTES));
            let health = if is_unhealthy { v1::HealthStatus::Unhealthy } else { v1::HealthStatus::Healthy };
            v1::DeviceHealth {
                device: Some(v1::DeviceIdentifier {
                    pool_name: pool.to_string(),
                    device_name: name.to_string(),
                }),
                health: health.into(),
                last_updated_time: now.as_second(),
                health_check_timeout_seconds: TIMEOUT_SECONDS,
                message,
            }
        }));
    }
    v1::NodeWatchResourcesResponse { devices: list }
}

type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Health {
    fn follow(&self) -> impl Stream<Item = v1::NodeWatchResourcesResponse> + use<> {
        let (sender, receiver) = mpsc::channel(1);
        let Self { pool, mut inventory, mut daemons, stop, .. } = self.clone();
        let messages = async move {
            // Ends when the kubelet closes the stream or the inventory ends.
            loop {
                let gpus = inventory.borrow_and_update().clone();
                let mps = daemons.borrow_and_update().clone();
                if sender.send(list(&pool, &gpus, &mps, Timestamp::now())).await.is_err() {
                    return;
                }
                tokio::select! {
                    () = tokio::time::sleep(REPEAT_INTERVAL) => {}
                    () = sender.closed() => return,
                    changed = inventory.changed() => if changed.is_err() { return },
                    changed = daemons.changed() => if changed.is_err() { return },
                }
            }
        };
        self.tasks.spawn(async move { stop.run_until_cancelled(messages).await });
        ReceiverStream::new(receiver)
    }
}

#[tonic::async_trait]
impl v1::dra_resource_health_server::DraResourceHealth for Health {
    type NodeWatchResourcesStream = Messages<v1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<v1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        Ok(Response::new(Box::pin(self.follow().map(Ok))))
    }
}

#[tonic::async_trait]
impl v1alpha1::dra_resource_health_server::DraResourceHealth for Health {
    type NodeWatchResourcesStream = Messages<v1alpha1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<v1alpha1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        Ok(Response::new(Box::pin(self.follow().map(older).map(Ok))))
    }
}

fn older(list: v1::NodeWatchResourcesResponse) -> v1alpha1::NodeWatchResourcesResponse {
    let one = |health: v1::DeviceHealth| v1alpha1::DeviceHealth {
        device: health.device.map(|device| v1alpha1::DeviceIdentifier {
            pool_name: device.pool_name,
            device_name: device.device_name,
        }),
        health: health.health,
        last_updated_time: health.last_updated_time,
        health_check_timeout_seconds: health.health_check_timeout_seconds,
        message: health.message,
    };
    v1alpha1::NodeWatchResourcesResponse { devices: list.devices.into_iter().map(one).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::mps_daemons::MpsDaemon;
    use crate::gpu::part::Part;
    use divvy_model::Finding;
    use divvy_model::inventory::{MigMode, MigProfile, MigToggle};
    use divvy_model::numbers::GpuNumber;

    fn gpu(number: u32, presence: Presence, conditions: Vec<Condition>) -> Gpu {
        let profile = MigProfile {
            id: 19,
            index: 0,
            name: "1g.10gb".to_owned(),
            memory_mib: 9728,
            multiprocessors: 16,
            copy_engines: 1,
            decoders: 1,
            encoders: 0,
            jpeg_engines: 1,
            ofa_engines: 0,
            max_instances: 7,
            placements: vec![Placement { start: 0, size: 1 }, Placement { start: 1, size: 1 }],
        };
        Gpu {
            number: GpuNumber(number),
            uuid: format!("GPU-{number}").into(),
            minor: number,
            product: String::new(),
            brand: String::new(),
            architecture: String::new(),
            compute_capability: (9, 0),
            memory_bytes: 0,
            addressing_mode: None,
            pci_bus_id: String::new(),
            pcie_root: None,
            numa_node: None,
            nvlink_group: None,
            nvlink_peers: 0,
            mig: Mig::Supported {
                mode: MigMode::Off,
                toggle: MigToggle::Live,
                profiles: vec![profile],
                instances: Vec::new(),
            },
            presence,
            conditions,
            policy: Default::default(),
        }
    }

    fn check(gpu: Gpu, expected: &[(&str, v1::HealthStatus, &str)]) {
        check_with(gpu, &MpsDaemons::new(), expected);
    }

    fn check_with(gpu: Gpu, daemons: &MpsDaemons, expected: &[(&str, v1::HealthStatus, &str)]) {
        let inventory = Inventory { gpus: vec![gpu], ..Inventory::default() };
        let list = list(&"node".into(), &inventory, daemons, Timestamp::UNIX_EPOCH);
        let found: Vec<_> = list
            .devices
            .iter()
            .map(|it| (it.device.as_ref().unwrap().device_name.as_str(), it.health(), it.message.as_str()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn every_device_of_a_gpu_shares_its_health() {
        use v1::HealthStatus::{Healthy, Unhealthy};
        let names = [
            "gpu-0",
            "gpu-0-share",
            "gpu-0-timeslice",
            "gpu-0-mps",
            "gpu-0-observer",
            "gpu-0-mig-1g10gb-19-0",
            "gpu-0-mig-1g10gb-19-1",
        ];
        check(gpu(0, Presence::Present, vec![]), &names.map(|name| (name, Healthy, "")));
        check(gpu(0, Presence::Missing, vec![]), &names.map(|name| (name, Unhealthy, "GPU is missing")));
        let lost =
            gpu(0, Presence::Present, vec![Condition::Health(Finding::of_gpu(HealthState::Lost, "c"))]);
        check(lost, &names.map(|name| (name, Unhealthy, "GPU is lost: c")));
    }

    #[test]
    fn instance_finding_concerns_only_overlapping_devices() {
        use v1::HealthStatus::{Healthy, Unhealthy};
        let instance = Some(Placement { start: 1, size: 1 });
        let finding = Finding { instance, ..Finding::of_gpu(HealthState::NeedsReset, "c") };
        let text = "GPU instance at 1 is needs-reset: c";
        check(
            gpu(0, Presence::Present, vec![Condition::Health(finding)]),
            &[
                ("gpu-0", Unhealthy, text),
                ("gpu-0-share", Unhealthy, text),
                ("gpu-0-timeslice", Unhealthy, text),
                ("gpu-0-mps", Unhealthy, text),
                ("gpu-0-observer", Unhealthy, text),
                ("gpu-0-mig-1g10gb-19-0", Healthy, ""),
                ("gpu-0-mig-1g10gb-19-1", Unhealthy, text),
            ],
        );
    }

    #[test]
    fn degraded_gpu_is_healthy_with_a_message() {
        let degraded = Condition::Health(Finding::of_gpu(HealthState::Degraded, "c"));
        let inventory =
            Inventory { gpus: vec![gpu(0, Presence::Present, vec![degraded])], ..Inventory::default() };
        for device in list(&"node".into(), &inventory, &MpsDaemons::new(), Timestamp::UNIX_EPOCH).devices {
            assert_eq!(
                (device.health(), device.message.as_str()),
                (v1::HealthStatus::Healthy, "GPU is degraded: c")
            );
        }
    }

    #[test]
    fn failed_mps_daemon_concerns_only_devices_of_its_clients() {
        let daemon = MpsDaemon {
            devices: ["gpu-0-mig-1g10gb-19-1".into()].into(),
            failure: Some("down: no answer".into()),
            ..MpsDaemon::default()
        };
        let daemons = MpsDaemons::from([(Part::Whole { gpu: "GPU-0".into() }, daemon)]);
        let failed = gpu(0, Presence::Present, vec![Condition::Mps { cause: "fault".into() }]);
        check_with(
            failed,
            &daemons,
            &[
                ("gpu-0", v1::HealthStatus::Healthy, ""),
                ("gpu-0-share", v1::HealthStatus::Healthy, ""),
                ("gpu-0-timeslice", v1::HealthStatus::Healthy, ""),
                ("gpu-0-mps", v1::HealthStatus::Healthy, ""),
                ("gpu-0-observer", v1::HealthStatus::Healthy, ""),
                ("gpu-0-mig-1g10gb-19-0", v1::HealthStatus::Healthy, ""),
                (
                    "gpu-0-mig-1g10gb-19-1",
                    v1::HealthStatus::Unhealthy,
                    "MPS control daemon is down: no answer",
                ),
            ],
        );
    }

    #[tokio::test(start_paused = true)]
    async fn list_is_sent_at_once_on_change_and_every_ten_seconds() {
        let (sender, inventory) = watch::channel(Arc::default());
        let stop = CancellationToken::new();
        let (_held, daemons) = watch::channel(Arc::default());
        let tasks = TaskTracker::new();
        let health = Health { pool: "n".into(), inventory, daemons, tasks, stop: stop.clone() };
        let mut messages = Box::pin(health.follow());
        assert_eq!(messages.next().await.unwrap().devices.len(), 0);
        let gpus = vec![gpu(0, Presence::Present, vec![])];
        sender.send_replace(Arc::new(Inventory { gpus, ..Inventory::default() }));
        let begun = tokio::time::Instant::now();
        assert_eq!(messages.next().await.unwrap().devices.len(), 7);
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert_eq!(messages.next().await.unwrap().devices.len(), 7);
        assert_eq!(begun.elapsed(), REPEAT_INTERVAL);
        stop.cancel();
        assert!(messages.next().await.is_none());
    }
}
