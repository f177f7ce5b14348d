//! Keeps the Secret, the served certificate and the CA bundles of the webhook configurations
//! consistent. Every replica serves the certificate of the Secret. Only the leader writes, and
//! it uses the result of its own writes before the watches deliver them.

use super::tls::{CertificateError, ServingCertificate, StoredCertificate};
use crate::metrics::Metrics;
use crate::readiness::{ControllerReadiness, ReadyCondition};
use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Creates, rotates and publishes the webhook's certificate.
pub struct CertificateManager {
    pub client: kube::Client,
    pub namespace: String,
    pub secret: String,
    /// The ValidatingWebhookConfiguration.
    pub validating: String,
    /// The MutatingWebhookConfiguration, if the controller serves one.
    pub mutating: Option<String>,
    pub host: String,
    pub current: Arc<ServingCertificate>,
    pub leader: watch::Receiver<bool>,
    pub metrics: Metrics,
    pub ready: ControllerReadiness,
}

/// Interval of checks without an event: certificates age, and a watch may miss a change.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// Interval of reading a mounted certificate. The kubelet needs about a minute to update a mount.
const DIR_RELOAD_INTERVAL: Duration = Duration::from_secs(30);
/// Delay after a failed write, unless an event comes first.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Time limit of one write to the API server.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The next action of the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Nothing,
    /// Generate a certificate, add it to the CA bundle, then store it.
    Create,
    /// Update the CA bundles of the webhook configurations.
    Trust,
}

/// The webhooks of a configuration.
trait Webhooks {
    fn client_configs(&mut self) -> impl Iterator<Item = &mut WebhookClientConfig>;
}

impl Webhooks for ValidatingWebhookConfiguration {
    fn client_configs(&mut self) -> impl Iterator<Item = &mut WebhookClientConfig> {
        self.webhooks.iter_mut().flatten().map(|webhook| &mut webhook.client_config)
    }
}

impl Webhooks for MutatingWebhookConfiguration {
    fn client_configs(&mut self) -> impl Iterator<Item = &mut WebhookClientConfig> {
        self.webhooks.iter_mut().flatten().map(|webhook| &mut webhook.client_config)
    }
}

/// `trusts` tells whether all existing configurations contain a CA bundle.
fn next_action(
    held: Option<&StoredCertificate>,
    trusts: impl FnOnce(&[u8]) -> bool,
    host: &str,
    now: Timestamp,
) -> Action {
    match held {
        None => Action::Create,
        Some(held) if held.needs_renewal(host, now) => Action::Create,
        Some(held) if trusts(&held.bundle) => Action::Nothing,
        Some(_) => Action::Trust,
    }
}

/// An absent configuration has nothing to update.
fn trusts<K: Webhooks + Clone>(configuration: Option<&K>, bundle: &[u8]) -> bool {
    let mut configuration = configuration.cloned();
    let mut webhooks = configuration.iter_mut().flat_map(Webhooks::client_configs);
    webhooks.all(|webhook| webhook.ca_bundle.as_ref().is_some_and(|known| known.0 == bundle))
}

#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    #[error("cannot write {what}: {cause}")]
    Api { what: &'static str, cause: kube::Error },
    #[error("cannot write {what}: the API server did not answer in time")]
    Deadline { what: &'static str },
}

/// `None` until it was read, `Some(None)` if the object is absent.
type Cached<T> = Option<Option<T>>;

/// The webhook configurations.
#[derive(Default)]
struct Configurations {
    validating: Cached<ValidatingWebhookConfiguration>,
    mutating: Cached<MutatingWebhookConfiguration>,
}

impl Configurations {
    fn are_known(&self) -> bool {
        self.validating.is_some() && self.mutating.is_some()
    }

    fn trust(&self, bundle: &[u8]) -> bool {
        trusts(self.validating.iter().flatten().next(), bundle)
            && trusts(self.mutating.iter().flatten().next(), bundle)
    }
}

impl CertificateManager {
    /// Runs until the leader channel closes.
    pub async fn run(mut self) {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut secrets = watcher::watch_object(secrets, &self.secret).default_backoff().boxed();
        let api: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        let mut validating = watcher::watch_object(api, &self.validating).default_backoff().boxed();
        let mut mutating = match &self.mutating {
            Some(name) => {
                let api: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
                watcher::watch_object(api, name).default_backoff().boxed()
            }
            None => futures::stream::pending().boxed(),
        };
        let mut secret = None;
        let mut configurations =
            Configurations { mutating: self.mutating.is_none().then_some(None), ..Configurations::default() };
        let mut wait = CHECK_INTERVAL;
        loop {
            tokio::select! {
                event = secrets.next() => match event {
                    Some(Ok(now)) => {
                        self.serve(now.as_ref());
                        secret = Some(now);
                    }
                    Some(Err(cause)) => {
                        tracing::debug!(%cause, "watch of the certificate's Secret failed");
                    }
                    None => return,
                },
                event = validating.next() => match event {
                    Some(Ok(now)) => configurations.validating = Some(now),
                    Some(Err(cause)) => {
                        tracing::debug!(%cause, "watch of the validating webhook configuration failed");
                    }
                    None => return,
                },
                event = mutating.next() => match event {
                    Some(Ok(now)) => configurations.mutating = Some(now),
                    Some(Err(cause)) => {
                        tracing::debug!(%cause, "watch of the mutating webhook configuration failed");
                    }
                    None => return,
                },
                changed = self.leader.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
            wait = CHECK_INTERVAL;
            let Some(stored) = &secret else { continue };
            if !configurations.are_known() || !*self.leader.borrow() {
                continue;
            }
            let held = stored.as_ref().and_then(StoredCertificate::from_secret);
            let trusts = |bundle: &[u8]| configurations.trust(bundle);
            let done = match (next_action(held.as_ref(), trusts, &self.host, Timestamp::now()), held) {
                (Action::Nothing, _) | (Action::Trust, None) => Ok(()),
                (Action::Create, before) => {
                    self.create(before.as_ref(), &mut secret, &mut configurations).await
                }
                (Action::Trust, Some(held)) => self.trust(&mut configurations, &held.bundle).await,
            };
            if let Err(cause) = done {
                tracing::warn!("{cause}; retrying in {RETRY_DELAY:?}");
                wait = RETRY_DELAY;
            }
        }
    }

    /// Serves the certificate of the Secret.
    fn serve(&self, secret: Option<&Secret>) {
        let state = match secret.and_then(StoredCertificate::from_secret) {
            None => Err(format!("Secret {} has no certificate yet", self.secret)),
            Some(held) => {
                self.metrics.certificate_expires(held.expires.as_second());
                self.current.set(&held.certificate, &held.key).map_err(|cause| cause.to_string())
            }
        };
        self.ready.set(ReadyCondition::Certificate, state);
    }

    async fn create(
        &self,
        before: Option<&StoredCertificate>,
        secret: &mut Cached<Secret>,
        configurations: &mut Configurations,
    ) -> Result<(), WriteError> {
        let held = StoredCertificate::generate(&self.host, Timestamp::now(), before)?;
        self.trust(configurations, &held.bundle).await?;
        if !configurations.are_known() {
            return Ok(());
        }
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = PostParams::default();
        let stored = secret.clone().flatten();
        *secret = written("the certificate's Secret", async {
            match stored {
                None => {
                    api.create(&params, &held.write_to(StoredCertificate::empty_secret(&self.secret))).await
                }
                Some(secret) => api.replace(&self.secret, &params, &held.write_to(secret)).await,
            }
        })
        .await?;
        if secret.is_some() {
            tracing::info!(host = held.host, expires = %held.expires, "certificate created");
        }
        Ok(())
    }

    async fn trust(&self, configurations: &mut Configurations, bundle: &[u8]) -> Result<(), WriteError> {
        let Configurations { validating, mutating } = configurations;
        let client = || self.client.clone();
        trust_in(Api::all(client()), "the validating webhook configuration", validating, bundle).await?;
        trust_in(Api::all(client()), "the mutating webhook configuration", mutating, bundle).await
    }
}

/// Sets the CA bundle of a configuration that exists and lacks it.
async fn trust_in<K>(
    api: Api<K>,
    what: &'static str,
    cached: &mut Cached<K>,
    bundle: &[u8],
) -> Result<(), WriteError>
where
    K: Webhooks + kube::Resource + Clone + Serialize + DeserializeOwned + Debug,
{
    let Some(Some(mut configuration)) = cached.clone() else { return Ok(()) };
    if trusts(Some(&configuration), bundle) {
        return Ok(());
    }
    for webhook in configuration.client_configs() {
        webhook.ca_bundle = Some(ByteString(bundle.to_vec()));
    }
    let name = configuration.meta().name.clone().unwrap_or_default();
    *cached = written(what, api.replace(&name, &PostParams::default(), &configuration)).await?;
    if cached.is_some() {
        tracing::info!(configuration = name, "CA bundle of {what} updated");
    }
    Ok(())
}

/// The object after a write. The result is used at once: if one watch delivered its event before
/// the other, a certificate that was just created would seem to be missing. After a conflict the
/// state is unknown until the watch delivers the other writer's object.
async fn written<T>(
    what: &'static str,
    done: impl Future<Output = kube::Result<T>>,
) -> Result<Cached<T>, WriteError> {
    match tokio::time::timeout(WRITE_TIMEOUT, done).await {
        Ok(Ok(object)) => Ok(Some(Some(object))),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => Ok(None),
        Ok(Err(cause)) => Err(WriteError::Api { what, cause }),
        Err(_) => Err(WriteError::Deadline { what }),
    }
}

/// Serves the certificate of a mounted directory and reloads it periodically.
pub async fn follow_dir(dir: PathBuf, current: Arc<ServingCertificate>, ready: ControllerReadiness) {
    loop {
        ready.set(ReadyCondition::Certificate, current.load(&dir).map_err(|cause| cause.to_string()));
        tokio::time::sleep(DIR_RELOAD_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::SignedDuration;
    use serde_json::json;

    #[test]
    fn missing_certificate_is_created_before_trust_is_updated() {
        let start = Timestamp::now();
        let held = StoredCertificate::generate("h", start, None).unwrap();
        let webhooks = |bundle: Option<&[u8]>| {
            let bundle = bundle.map(|bundle| ByteString(bundle.to_vec()));
            let webhook = json!({"name": "w", "clientConfig": {"caBundle": bundle}, "sideEffects": "None",
                "admissionReviewVersions": []});
            json!({"metadata": {}, "webhooks": [webhook]})
        };
        let configuration = |bundle: Option<&[u8]>| serde_json::from_value(webhooks(bundle)).unwrap();
        let mutating = |bundle: Option<&[u8]>| serde_json::from_value(webhooks(bundle)).unwrap();
        let (untrusting, other): (ValidatingWebhookConfiguration, _) =
            (configuration(None), configuration(Some(b"x")));
        let trusting = configuration(Some(&held.bundle));
        let late = start + SignedDuration::from_hours(24 * 70);
        let check = |held: Option<&StoredCertificate>, validating, mutating, now, expected| {
            let configurations = Configurations { validating: Some(validating), mutating: Some(mutating) };
            let trusts = |bundle: &[u8]| configurations.trust(bundle);
            assert_eq!(next_action(held, trusts, "h", now), expected);
        };
        check(None, Some(untrusting.clone()), None, start, Action::Create);
        check(None, None, None, start, Action::Create);
        check(Some(&held), None, None, start, Action::Nothing);
        check(Some(&held), Some(untrusting), None, start, Action::Trust);
        check(Some(&held), Some(other), None, start, Action::Trust);
        check(Some(&held), Some(trusting.clone()), None, start, Action::Nothing);
        check(Some(&held), Some(trusting.clone()), Some(mutating(None)), start, Action::Trust);
        check(
            Some(&held),
            Some(trusting.clone()),
            Some(mutating(Some(&held.bundle))),
            start,
            Action::Nothing,
        );
        check(Some(&held), Some(trusting), None, late, Action::Create);
    }
}
