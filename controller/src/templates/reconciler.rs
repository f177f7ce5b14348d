//! Creates and deletes templates while this replica is the leader.

use super::plan::{Holder, TemplateKey, plan};
use super::record::{MANAGED_BY, PORTED_LABEL, REQUESTS_ANNOTATION, Record, summary, template};
use crate::metrics::Metrics;
use divvy_api::foreign::Ported;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::api::{Api, DeleteParams, PartialObjectMeta, Patch, PatchParams, Preconditions};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Delay after a failed write, unless an event comes first.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Interval of passes without an event, in case another client deleted a template.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// Time limit of one write to the API server.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// The owner of the fields of a template, for server-side apply.
const FIELD_MANAGER: &str = "divvy-controller";

/// Keeps the templates of ported pods.
pub struct TemplateReconciler {
    pub client: kube::Client,
    pub metrics: Metrics,
    pub leader: watch::Receiver<bool>,
    /// How long a template stays after its last pod.
    pub hold_off: Duration,
}

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error("cannot {verb} ResourceClaimTemplate {namespace}/{name}: {cause}")]
    Api { verb: &'static str, namespace: String, name: String, cause: kube::Error },
    #[error("cannot {verb} ResourceClaimTemplate {namespace}/{name}: no answer within {WRITE_TIMEOUT:?}")]
    Deadline { verb: &'static str, namespace: String, name: String },
}

/// Objects of a watch by namespace and name, reduced to a value of type `T`.
struct Watched<T> {
    objects: BTreeMap<TemplateKey, T>,
    listed: BTreeMap<TemplateKey, T>,
    /// Whether all objects were listed once.
    is_complete: bool,
}

impl<T> Default for Watched<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), listed: BTreeMap::new(), is_complete: false }
    }
}

impl<T> Watched<T> {
    fn apply<K>(
        &mut self,
        event: Event<PartialObjectMeta<K>>,
        reduce: impl Fn(&PartialObjectMeta<K>) -> Option<T>,
    ) {
        let key = |object: &PartialObjectMeta<K>| {
            let metadata = &object.metadata;
            (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
        };
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(object) => {
                self.listed.extend(reduce(&object).map(|value| (key(&object), value)));
            }
            Event::InitDone => {
                self.objects = std::mem::take(&mut self.listed);
                self.is_complete = true;
            }
            Event::Apply(object) => match reduce(&object) {
                Some(value) => drop(self.objects.insert(key(&object), value)),
                None => drop(self.objects.remove(&key(&object))),
            },
            Event::Delete(object) => drop(self.objects.remove(&key(&object))),
        }
    }
}

/// Preconditions of a deletion.
#[derive(Clone, Debug)]
struct Version {
    uid: Option<String>,
    resource_version: Option<String>,
}

impl TemplateReconciler {
    /// Runs until the leader channel closes.
    pub async fn run(mut self) {
        // A pod that has finished leaves the watch, so its template is released.
        let running = watcher::Config::default()
            .labels(PORTED_LABEL)
            .fields("status.phase!=Succeeded,status.phase!=Failed");
        let pods = watcher(Api::<PartialObjectMeta<Pod>>::all(self.client.clone()), running);
        let mut pods = std::pin::pin!(pods.default_backoff());
        let ours = watcher::Config::default().labels(&format!("{}={}", MANAGED_BY.0, MANAGED_BY.1));
        let api: Api<PartialObjectMeta<ResourceClaimTemplate>> = Api::all(self.client.clone());
        let mut templates = std::pin::pin!(watcher(api, ours).default_backoff());
        let mut records: Watched<Record> = Watched::default();
        let mut existing: Watched<Version> = Watched::default();
        let mut holder = Holder::default();
        let mut wait = CHECK_INTERVAL;
        loop {
            tokio::select! {
                event = pods.next() => match event {
                    Some(Ok(event)) => records.apply(event, |pod| {
                        Record::parse(pod.metadata.annotations.as_ref()?.get(REQUESTS_ANNOTATION)?)
                    }),
                    Some(Err(cause)) => {
                        tracing::debug!(%cause, "watch of pods with ported requests failed; it is retried");
                    }
                    None => return,
                },
                event = templates.next() => match event {
                    Some(Ok(event)) => existing.apply(event, |template| {
                        let (uid, resource_version) =
                            (template.metadata.uid.clone(), template.metadata.resource_version.clone());
                        Some(Version { uid, resource_version })
                    }),
                    Some(Err(cause)) => {
                        tracing::debug!(%cause, "watch of ResourceClaimTemplates failed; it is retried");
                    }
                    None => return,
                },
                changed = self.leader.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
            wait = CHECK_INTERVAL;
            if !records.is_complete || !existing.is_complete || !*self.leader.borrow() {
                continue;
            }
            let now = Instant::now();
            let pods = records.objects.iter().map(|((namespace, _), record)| (namespace.as_str(), record));
            let keys: BTreeSet<TemplateKey> = existing.objects.keys().cloned().collect();
            let plan = plan(pods, &keys, &mut holder, now, self.hold_off);
            if let Some(next) = plan.next {
                wait = wait.min(next - now);
            }
            for (key, request) in &plan.create {
                match self.create(key, request).await {
                    // Known at once, so that the next event does not write it again.
                    Ok(version) => drop(existing.objects.insert(key.clone(), version)),
                    Err(cause) => {
                        tracing::warn!("{cause}; it is retried");
                        wait = wait.min(RETRY_DELAY);
                    }
                }
            }
            for key in &plan.delete {
                let Some(version) = existing.objects.get(key).cloned() else { continue };
                match self.delete(key, &version).await {
                    Ok(()) => drop(existing.objects.remove(key)),
                    Err(cause) => {
                        tracing::warn!("{cause}; it is retried");
                        wait = wait.min(RETRY_DELAY);
                    }
                }
            }
            self.metrics.templates(existing.objects.len());
        }
    }

    async fn create(&self, key: &TemplateKey, request: &Ported) -> Result<Version, WriteError> {
        let (namespace, name) = key;
        let api: Api<ResourceClaimTemplate> = Api::namespaced(self.client.clone(), namespace);
        let template = template(name, request);
        let params = PatchParams::apply(FIELD_MANAGER);
        let stored = answered("create", key, api.patch(name, &params, &Patch::Apply(&template))).await?;
        let request = summary(request);
        tracing::info!(namespace, template = name, request, "ResourceClaimTemplate created for a pod");
        Ok(Version { uid: stored.metadata.uid, resource_version: stored.metadata.resource_version })
    }

    async fn delete(&self, key: &TemplateKey, version: &Version) -> Result<(), WriteError> {
        let (namespace, name) = key;
        let api: Api<ResourceClaimTemplate> = Api::namespaced(self.client.clone(), namespace);
        // Preconditions: a template whose label was removed since is kept.
        let Version { uid, resource_version } = version.clone();
        let only = DeleteParams::default().preconditions(Preconditions { uid, resource_version });
        match answered("delete", key, api.delete(name, &only)).await {
            Ok(_) => {
                tracing::info!(namespace, template = name, "ResourceClaimTemplate deleted: no pod uses it")
            }
            // Gone or changed; the watch delivers the new state.
            Err(WriteError::Api { cause: kube::Error::Api(status), .. })
                if matches!(status.code, 404 | 409) => {}
            Err(cause) => return Err(cause),
        }
        Ok(())
    }
}

async fn answered<T>(
    verb: &'static str,
    (namespace, name): &TemplateKey,
    done: impl Future<Output = kube::Result<T>>,
) -> Result<T, WriteError> {
    let (namespace, name) = (namespace.clone(), name.clone());
    match tokio::time::timeout(WRITE_TIMEOUT, done).await {
        Ok(Ok(object)) => Ok(object),
        Ok(Err(cause)) => Err(WriteError::Api { verb, namespace, name, cause }),
        Err(_) => Err(WriteError::Deadline { verb, namespace, name }),
    }
}
