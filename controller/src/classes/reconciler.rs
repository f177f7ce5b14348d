//! Applies the plan of DeviceClasses while this replica is the leader.

use super::plan::{Classes, NameConflict, ProfileHoldOff, is_ours, plan, profiles_with_class};
use crate::device_index::DeviceSummary;
use crate::metrics::Metrics;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::runtime::events::{Event, EventType, Recorder};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Creates, updates and deletes the managed DeviceClasses.
pub struct ClassReconciler {
    pub client: kube::Client,
    pub recorder: Recorder,
    pub metrics: Metrics,
    /// `None` until the slices were listed once.
    pub devices: watch::Receiver<Option<Arc<DeviceSummary>>>,
    /// `None` until the classes were listed once.
    pub classes: watch::Receiver<Option<Arc<Classes>>>,
    pub leader: watch::Receiver<bool>,
    pub hold_off: Duration,
    pub extended: bool,
}

/// Delay after a failed write, unless an event comes first.
const RETRY_DELAY: Duration = Duration::from_secs(10);
/// Time limit of one write to the API server.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

impl ClassReconciler {
    /// Runs until a channel closes.
    pub async fn run(mut self) {
        let mut held = ProfileHoldOff::default();
        let mut reported = BTreeSet::new();
        loop {
            let wake = self.reconcile(&mut held, &mut reported).await;
            let wake = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            let changed = tokio::select! {
                changed = self.devices.changed() => changed,
                changed = self.classes.changed() => changed,
                changed = self.leader.changed() => changed,
                () = wake => Ok(()),
            };
            if changed.is_err() {
                return;
            }
        }
    }

    /// Makes one pass. Returns when the next one is due without an event.
    async fn reconcile(
        &mut self,
        held: &mut ProfileHoldOff,
        reported: &mut BTreeSet<NameConflict>,
    ) -> Option<Instant> {
        let devices = self.devices.borrow_and_update().clone()?;
        let classes = self.classes.borrow_and_update().clone()?;
        self.metrics.profiles(devices.profiles.len());
        self.metrics.classes(classes.values().filter(|class| is_ours(class)).count());
        if !*self.leader.borrow_and_update() {
            return None;
        }
        let (keep, next) =
            held.keep(&devices.profiles, &profiles_with_class(&classes), Instant::now(), self.hold_off);
        let plan = plan(&keep, &classes, self.extended);
        self.metrics.names_taken(plan.conflicts.len());
        for conflict in &plan.conflicts {
            if reported.insert(conflict.clone()) {
                self.report_conflict(conflict, &classes).await;
            }
        }
        reported.retain(|conflict| plan.conflicts.contains(conflict));
        let mut failed = false;
        for class in &plan.create {
            failed |= self.write(class, true).await.is_err();
        }
        for class in &plan.replace {
            failed |= self.write(class, false).await.is_err();
        }
        for class in &plan.delete {
            failed |= self.delete(class).await.is_err();
        }
        if failed { Some(Instant::now() + RETRY_DELAY) } else { next }
    }

    async fn write(&mut self, class: &DeviceClass, new: bool) -> Result<(), ()> {
        let api: Api<DeviceClass> = Api::all(self.client.clone());
        let (name, params) = (name(class), PostParams::default());
        let written = async {
            if new { api.create(&params, class).await } else { api.replace(&name, &params, class).await }
        };
        match ignore_conflict("write", &name, written).await? {
            None => {}
            Some(now) => {
                let resource = |class: &DeviceClass| {
                    class.spec.as_ref().and_then(|spec| spec.extended_resource_name.clone())
                };
                tracing::info!(class = name, resource = resource(class), new, "DeviceClass written");
                if self.extended && resource(class).is_some() && resource(&now).is_none() {
                    // API servers before 1.36 drop the field, so every pass would write it again.
                    tracing::warn!(
                        "the API server does not store extended resource names; \
                         they are disabled until restart"
                    );
                    self.extended = false;
                }
            }
        }
        Ok(())
    }

    async fn delete(&self, class: &DeviceClass) -> Result<(), ()> {
        let api: Api<DeviceClass> = Api::all(self.client.clone());
        let name = name(class);
        // Preconditions: a class that was changed since it was read is planned again.
        let (uid, resource_version) = (class.metadata.uid.clone(), class.metadata.resource_version.clone());
        let only = DeleteParams::default().preconditions(Preconditions { uid, resource_version });
        if ignore_conflict("delete", &name, api.delete(&name, &only)).await?.is_some() {
            tracing::info!(class = name, "DeviceClass deleted: no node offers its MIG profile any more");
        }
        Ok(())
    }

    /// Reports a conflict in the log and as an event on the conflicting class.
    async fn report_conflict(&self, conflict: &NameConflict, classes: &Classes) {
        let (about, note) = match conflict {
            NameConflict::Class { class } => (
                class,
                "Divvy manages a DeviceClass of this name for a MIG profile, but this class has another \
                 owner; Divvy does not change it. Rename or delete it to get the managed class"
                    .to_owned(),
            ),
            NameConflict::Resource { resource, ours, other } => (
                other,
                format!(
                    "this DeviceClass already has the extended resource name {resource}, \
                     so {ours} does not get it"
                ),
            ),
        };
        tracing::warn!(class = about, "{note}");
        let Some(class) = classes.get(about) else { return };
        let regarding = ObjectReference {
            api_version: Some("resource.k8s.io/v1".to_owned()),
            kind: Some("DeviceClass".to_owned()),
            name: Some(about.clone()),
            uid: class.metadata.uid.clone(),
            ..ObjectReference::default()
        };
        let event = Event {
            type_: EventType::Warning,
            reason: "NameTaken".to_owned(),
            note: Some(note),
            action: "KeepClasses".to_owned(),
            secondary: None,
        };
        if let Ok(Err(cause)) =
            tokio::time::timeout(WRITE_TIMEOUT, self.recorder.publish(&event, &regarding)).await
        {
            tracing::debug!(%cause, "cannot write the event");
        }
    }
}

fn name(class: &DeviceClass) -> String {
    class.metadata.name.clone().unwrap_or_default()
}

/// Returns `None` after a conflict or if the class is gone: the watch triggers another pass.
async fn ignore_conflict<T>(
    verb: &'static str,
    class: &str,
    done: impl Future<Output = kube::Result<T>>,
) -> Result<Option<T>, ()> {
    match tokio::time::timeout(WRITE_TIMEOUT, done).await {
        Ok(Ok(object)) => Ok(Some(object)),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(None),
        Ok(Err(cause)) => {
            tracing::warn!(class, verb, %cause, "cannot write the DeviceClass; it is retried");
            Err(())
        }
        Err(_) => {
            tracing::warn!(class, verb, "cannot write the DeviceClass: no answer in time; it is retried");
            Err(())
        }
    }
}
