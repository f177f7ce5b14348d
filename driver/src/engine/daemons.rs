//! The MPS control daemons that prepared claims stand on, as the keeper tells of
//! them: watched for health, never polled.
//!
//! A daemon counts from the moment its claim is Prepared, so one that is only
//! just starting is nobody's trouble. What is wrong with the daemon of a whole
//! GPU becomes a condition of the GPU, which taints the GPU's MPS device alone.

use super::{HeldState, Inner};
use crate::changes::Changes;
use crate::mps::Mps;
use crate::plan::Part;
use crate::sharing::Setup;
use divvy_api::mps::Phase;
use divvy_api::{ClaimRef, DeviceName, GpuUuid};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// All of them, by the part of a GPU that they serve.
pub type Daemons = BTreeMap<Part, Daemon>;

/// One that claims stand on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Daemon {
    pub claims: BTreeSet<ClaimRef>,
    pub devices: BTreeSet<DeviceName>,
    /// Why it does not serve, as `down: ...`; none while it does.
    pub trouble: Option<String>,
    /// Which start of it this is; none where the keeper has not told.
    pub incarnation: Option<u64>,
}

/// The claims whose containers have lost their daemon since `last`: it was
/// started anew, and clients of the one before do not come back by themselves.
pub fn lost<'a>(last: &'a Daemons, now: &'a Daemons) -> impl Iterator<Item = (&'a Part, &'a ClaimRef)> {
    now.iter().flat_map(|(part, daemon)| {
        let before = last
            .get(part)
            .filter(|before| before.incarnation.is_some() && before.incarnation < daemon.incarnation);
        let had = before.map(|before| &before.claims);
        had.into_iter().flat_map(move |had| had.intersection(&daemon.claims)).map(move |claim| (part, claim))
    })
}

impl Inner {
    /// Until the engine ends.
    pub(super) async fn watch_daemons(self: Arc<Self>) {
        let mps = Mps::new(&self.options.paths);
        let made = mps.make().map_err(|error| error.to_string());
        let changes = made.and_then(|()| {
            let watching = Changes::new().and_then(|changes| changes.watch(mps.dir()).map(|()| changes));
            watching.map_err(|cause| format!("{}: {cause}", mps.dir().display()))
        });
        let changes = match changes {
            Ok(changes) => changes,
            Err(cause) => {
                tracing::warn!(cause, "MPS control daemons are not watched");
                return;
            }
        };
        loop {
            for target in mps.targets() {
                // One that has just gone needs no watch.
                let _gone = changes.watch(&mps.dir().join(target));
            }
            self.look_at_daemons(&mps);
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.prepared_or_released.notified() => {}
                changed = changes.next() => if let Err(error) = changed {
                    tracing::warn!(%error, "MPS control daemons are not watched any more");
                    return;
                },
            }
        }
    }

    fn look_at_daemons(&self, mps: &Mps) {
        let mut daemons = Daemons::new();
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
            daemon.trouble = match actual.map(|actual| actual.phase) {
                Some(Phase::Ready) => None,
                Some(phase) => Some(phase.to_string()),
                None => Some("down: divvy-keeper does not tell of it".to_owned()),
            };
        }
        self.daemons.send_if_modified(|known| {
            let changed = **known != daemons;
            if changed {
                self.gpus.set_mps(sick(&daemons));
                *known = Arc::new(daemons);
            }
            changed
        });
    }
}

/// GPUs whose own daemon does not serve.
fn sick(daemons: &Daemons) -> BTreeMap<GpuUuid, String> {
    let sick = |(part, daemon): (&Part, &Daemon)| match part {
        Part::Whole { gpu } => Some((gpu.clone(), daemon.trouble.clone()?)),
        Part::Instance(_) => None,
    };
    daemons.iter().filter_map(sick).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemons(incarnation: Option<u64>, claims: &[&str]) -> Daemons {
        let claim =
            |name: &&str| ClaimRef { namespace: "ns".into(), name: (*name).into(), uid: (*name).into() };
        let daemon = Daemon { claims: claims.iter().map(claim).collect(), incarnation, ..Daemon::default() };
        Daemons::from([(Part::Whole { gpu: "GPU-a".into() }, daemon)])
    }

    #[test]
    fn who_was_there_before_a_new_start_has_lost_the_daemon() {
        let check = |last: Daemons, now: Daemons, expected: &[&str]| {
            let found: Vec<&str> = lost(&last, &now).map(|(_, claim)| claim.name.as_str()).collect();
            assert_eq!(found, expected);
        };
        check(daemons(Some(1), &["a", "b"]), daemons(Some(2), &["a", "c"]), &["a"]);
        check(daemons(Some(1), &["a"]), daemons(Some(1), &["a"]), &[]);
        check(daemons(None, &["a"]), daemons(Some(1), &["a"]), &[]);
        check(daemons(Some(3), &["a"]), daemons(None, &["a"]), &[]);
        check(Daemons::new(), daemons(Some(2), &["a"]), &[]);
        check(daemons(Some(1), &["a"]), Daemons::new(), &[]);
    }
}
