//! The hand that writes what [`super::plan`] says, while this replica leads.

use super::{Classes, Lately, Taken, is_ours, kept, plan};
use crate::metrics::Metrics;
use crate::seen::Offer;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::runtime::events::{Event, EventType, Recorder};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// What it needs.
pub struct Keeper {
    pub client: kube::Client,
    pub recorder: Recorder,
    pub metrics: Metrics,
    /// Absent until the slices were listed once.
    pub offer: watch::Receiver<Option<Arc<Offer>>>,
    /// Absent until the classes were listed once.
    pub classes: watch::Receiver<Option<Arc<Classes>>>,
    pub leader: watch::Receiver<bool>,
    pub hold_off: Duration,
    pub extended: bool,
}

/// After a write that failed, unless something changes before.
const AGAIN: Duration = Duration::from_secs(10);
const WRITE: Duration = Duration::from_secs(10);

impl Keeper {
    /// Runs until a channel closes.
    pub async fn run(mut self) {
        let mut lately = Lately::default();
        let mut said = BTreeSet::new();
        loop {
            let wake = self.round(&mut lately, &mut said).await;
            let wake = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            let changed = tokio::select! {
                changed = self.offer.changed() => changed,
                changed = self.classes.changed() => changed,
                changed = self.leader.changed() => changed,
                () = wake => Ok(()),
            };
            if changed.is_err() {
                return;
            }
        }
    }

    /// Puts right what is not; says when to look again without a change.
    async fn round(&mut self, lately: &mut Lately, said: &mut BTreeSet<Taken>) -> Option<Instant> {
        let offer = self.offer.borrow_and_update().clone()?;
        let classes = self.classes.borrow_and_update().clone()?;
        self.metrics.profiles(offer.profiles.len());
        self.metrics.classes(classes.values().filter(|class| is_ours(class)).count());
        if !*self.leader.borrow_and_update() {
            return None;
        }
        let (keep, next) = lately.keep(&offer.profiles, &kept(&classes), Instant::now(), self.hold_off);
        let plan = plan(&keep, &classes, self.extended);
        self.metrics.names_taken(plan.taken.len());
        for taken in &plan.taken {
            if said.insert(taken.clone()) {
                self.tell(taken, &classes).await;
            }
        }
        said.retain(|taken| plan.taken.contains(taken));
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
        if failed { Some(Instant::now() + AGAIN) } else { next }
    }

    async fn write(&mut self, class: &DeviceClass, new: bool) -> Result<(), ()> {
        let api: Api<DeviceClass> = Api::all(self.client.clone());
        let (name, params) = (name(class), PostParams::default());
        let written = async {
            if new { api.create(&params, class).await } else { api.replace(&name, &params, class).await }
        };
        match settled("write", &name, written).await? {
            None => {}
            Some(now) => {
                let resource = |class: &DeviceClass| {
                    class.spec.as_ref().and_then(|spec| spec.extended_resource_name.clone())
                };
                tracing::info!(class = name, resource = resource(class), new, "DeviceClass written");
                if self.extended && resource(class).is_some() && resource(&now).is_none() {
                    // Servers before 1.36 drop the field; asked again for ever they would drop it for ever.
                    tracing::warn!("the API server does not keep extended resource names; none is set");
                    self.extended = false;
                }
            }
        }
        Ok(())
    }

    async fn delete(&self, class: &DeviceClass) -> Result<(), ()> {
        let api: Api<DeviceClass> = Api::all(self.client.clone());
        let name = name(class);
        // What somebody has changed meanwhile is looked at again.
        let (uid, resource_version) = (class.metadata.uid.clone(), class.metadata.resource_version.clone());
        let only = DeleteParams::default().preconditions(Preconditions { uid, resource_version });
        if settled("delete", &name, api.delete(&name, &only)).await?.is_some() {
            tracing::info!(class = name, "DeviceClass deleted: no node offers its profile any more");
        }
        Ok(())
    }

    /// Says what is not done, where its owner would look.
    async fn tell(&self, taken: &Taken, classes: &Classes) {
        let (about, note) = match taken {
            Taken::Class { class } => (
                class,
                "Divvy would make a DeviceClass of this name for a MIG profile, but this one is not its own; \
                 it is left as it is"
                    .to_owned(),
            ),
            Taken::Resource { resource, ours, other } => (
                other,
                format!(
                    "this DeviceClass has the extended resource name {resource}, so {ours} does not get it"
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
        if let Ok(Err(cause)) = tokio::time::timeout(WRITE, self.recorder.publish(&event, &regarding)).await {
            tracing::debug!(%cause, "event not written");
        }
    }
}

fn name(class: &DeviceClass) -> String {
    class.metadata.name.clone().unwrap_or_default()
}

/// `None` when somebody was quicker: the watch will tell, and the next round looks again.
async fn settled<T>(
    verb: &'static str,
    class: &str,
    done: impl Future<Output = kube::Result<T>>,
) -> Result<Option<T>, ()> {
    match tokio::time::timeout(WRITE, done).await {
        Ok(Ok(object)) => Ok(Some(object)),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(None),
        Ok(Err(cause)) => {
            tracing::warn!(class, verb, %cause, "DeviceClass not written; tried again");
            Err(())
        }
        Err(_) => {
            tracing::warn!(class, verb, "DeviceClass not written in time; tried again");
            Err(())
        }
    }
}
