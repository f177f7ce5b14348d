//! State of the MPS control daemons that prepared claims use, as divvy-mps-supervisor writes it.
//!
//! Changes arrive through inotify; there is no polling. A daemon counts from the moment its claim is
//! Prepared, so a daemon that is only starting raises no alarm. A failed daemon of a whole GPU
//! becomes a condition of the GPU, which taints only the GPU's MPS device.

use crate::claims::engine::Inner;
use crate::claims::records::HeldState;
use crate::gpu::mps::Mps;
use crate::gpu::part::Part;
use crate::gpu::sharing::Setup;
use crate::inotify::DirWatcher;
use divvy_api::mps::Phase;
use divvy_api::{ClaimRef, DeviceName, GpuUuid};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The daemons of all prepared claims, by the part of a GPU that they serve.
pub type MpsDaemons = BTreeMap<Part, MpsDaemon>;

/// One MPS control daemon and its users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsDaemon {
    pub claims: BTreeSet<ClaimRef>,
    pub devices: BTreeSet<DeviceName>,
    /// Why the daemon does not serve, as `down: ...`; `None` while it serves.
    pub failure: Option<String>,
    /// Number of this start of the daemon; `None` while the supervisor has not written its state.
    pub incarnation: Option<u64>,
}

/// Claims with containers that lost their daemon since `last`: the daemon was restarted, and clients
/// of the earlier one do not reconnect by themselves.
pub fn lost_daemons<'a>(
    last: &'a MpsDaemons,
    now: &'a MpsDaemons,
) -> impl Iterator<Item = (&'a Part, &'a ClaimRef)> {
    now.iter().flat_map(|(part, daemon)| {
        let before = last
            .get(part)
            .filter(|before| before.incarnation.is_some() && before.incarnation < daemon.incarnation);
        let had = before.map(|before| &before.claims);
        had.into_iter().flat_map(move |had| had.intersection(&daemon.claims)).map(move |claim| (part, claim))
    })
}

impl Inner {
    /// Follows the state files of the daemons until the engine stops.
    pub(crate) async fn watch_mps_daemons(self: Arc<Self>) {
        let mps = Mps::new(&self.options.paths);
        let made = mps.make().map_err(|error| error.to_string());
        let changes = made.and_then(|()| {
            let watching = DirWatcher::new().and_then(|changes| changes.watch(mps.dir()).map(|()| changes));
            watching.map_err(|cause| format!("{}: {cause}", mps.dir().display()))
        });
        let changes = match changes {
            Ok(changes) => changes,
            Err(cause) => {
                tracing::warn!(cause, "cannot watch MPS control daemons; their failures are not reported");
                return;
            }
        };
        loop {
            for target in mps.targets() {
                // The directory of a daemon that just stopped needs no watch.
                let _gone = changes.watch(&mps.dir().join(target));
            }
            self.update_mps_daemons(&mps);
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.prepared_or_released.notified() => {}
                changed = changes.next() => if let Err(error) = changed {
                    tracing::warn!(
                        %error,
                        "watch of MPS control daemons failed; their failures are not reported any more"
                    );
                    return;
                },
            }
        }
    }

    fn update_mps_daemons(&self, mps: &Mps) {
        let mut daemons = MpsDaemons::new();
        for gpu in &self.inventory().gpus {
            for record in self.records.on(&gpu.uuid) {
                let clients = record.devices.iter().filter(|device| {
                    record.state == HeldState::Prepared
                        && device.part.gpu() == &gpu.uuid
                        && matches!(device.access.setup(), Some(Setup::Mps(_)))
                });
                for device in clients {
                    let daemon = daemons.entry(device.part.clone()).or_default();
                    daemon.claims.insert(record.claim.clone());
                    daemon.devices.insert(device.device.clone());
                }
            }
        }
        for (part, daemon) in &mut daemons {
            let actual = mps.actual(part);
            daemon.incarnation = actual.as_ref().map(|actual| actual.incarnation);
            daemon.failure = match actual.map(|actual| actual.phase) {
                Some(Phase::Ready) => None,
                Some(phase) => Some(phase.to_string()),
                None => Some("down: divvy-mps-supervisor has not reported its state".to_owned()),
            };
        }
        self.mps_daemons.send_if_modified(|known| {
            let changed = **known != daemons;
            if changed {
                self.gpus.set_mps(failed_gpus(&daemons));
                *known = Arc::new(daemons);
            }
            changed
        });
    }
}

/// GPUs with a failed daemon of their own, and the cause.
fn failed_gpus(daemons: &MpsDaemons) -> BTreeMap<GpuUuid, String> {
    let failed_gpus = |(part, daemon): (&Part, &MpsDaemon)| match part {
        Part::Whole { gpu } => Some((gpu.clone(), daemon.failure.clone()?)),
        Part::Instance(_) => None,
    };
    daemons.iter().filter_map(failed_gpus).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemons(incarnation: Option<u64>, claims: &[&str]) -> MpsDaemons {
        let claim =
            |name: &&str| ClaimRef { namespace: "ns".into(), name: (*name).into(), uid: (*name).into() };
        let daemon =
            MpsDaemon { claims: claims.iter().map(claim).collect(), incarnation, ..MpsDaemon::default() };
        MpsDaemons::from([(Part::Whole { gpu: "GPU-a".into() }, daemon)])
    }

    #[test]
    fn restarted_daemon_is_lost_to_its_earlier_claims() {
        let check = |last: MpsDaemons, now: MpsDaemons, expected: &[&str]| {
            let found: Vec<&str> = lost_daemons(&last, &now).map(|(_, claim)| claim.name.as_str()).collect();
            assert_eq!(found, expected);
        };
        check(daemons(Some(1), &["a", "b"]), daemons(Some(2), &["a", "c"]), &["a"]);
        check(daemons(Some(1), &["a"]), daemons(Some(1), &["a"]), &[]);
        check(daemons(None, &["a"]), daemons(Some(1), &["a"]), &[]);
        check(daemons(Some(3), &["a"]), daemons(None, &["a"]), &[]);
        check(MpsDaemons::new(), daemons(Some(2), &["a"]), &[]);
        check(daemons(Some(1), &["a"]), MpsDaemons::new(), &[]);
    }
}
