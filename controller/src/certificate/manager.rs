//! Keeps the Secret, the served certificate and the CA bundle of the webhook configuration
//! consistent. Every replica serves the certificate of the Secret. Only the leader writes, and
//! it uses the result of its own writes before the watches deliver them.

use super::tls::{CertificateError, ServingCertificate, StoredCertificate};
use crate::metrics::Metrics;
use crate::readiness::{ControllerReadiness, ReadyCondition};
use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Creates, rotates and publishes the webhook's certificate.
pub struct CertificateManager {
    pub client: kube::Client,
    pub namespace: String,
    pub secret: String,
    pub configuration: String,
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
    /// Update the CA bundle of the webhook configuration.
    Trust,
}

fn next_action(
    held: Option<&StoredCertificate>,
    configuration: Option<&ValidatingWebhookConfiguration>,
    host: &str,
    now: Timestamp,
) -> Action {
    match held {
        None => Action::Create,
        Some(held) if held.needs_renewal(host, now) => Action::Create,
        Some(held) => match configuration {
            Some(configuration) if !trusts(configuration, &held.bundle) => Action::Trust,
            _ => Action::Nothing,
        },
    }
}

fn trusts(configuration: &ValidatingWebhookConfiguration, bundle: &[u8]) -> bool {
    let mut webhooks = configuration.webhooks.iter().flatten();
    webhooks.all(|webhook| webhook.client_config.ca_bundle.as_ref().is_some_and(|known| known.0 == bundle))
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

impl CertificateManager {
    /// Runs until the leader channel closes.
    pub async fn run(mut self) {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut secrets = watcher::watch_object(secrets, &self.secret).default_backoff().boxed();
        let configurations: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        let mut configurations =
            watcher::watch_object(configurations, &self.configuration).default_backoff().boxed();
        let (mut secret, mut configuration) = (None, None);
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
                event = configurations.next() => match event {
                    Some(Ok(now)) => configuration = Some(now),
                    Some(Err(cause)) => {
                        tracing::debug!(%cause, "watch of the webhook configuration failed");
                    }
                    None => return,
                },
                changed = self.leader.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
            wait = CHECK_INTERVAL;
            let (Some(stored), Some(trusting)) = (&secret, &configuration) else { continue };
            if !*self.leader.borrow() {
                continue;
            }
            let held = stored.as_ref().and_then(StoredCertificate::from_secret);
            let done =
                match (next_action(held.as_ref(), trusting.as_ref(), &self.host, Timestamp::now()), held) {
                    (Action::Nothing, _) | (Action::Trust, None) => Ok(()),
                    (Action::Create, before) => {
                        self.create(before.as_ref(), &mut secret, &mut configuration).await
                    }
                    (Action::Trust, Some(held)) => self.trust(&mut configuration, &held.bundle).await,
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
        configuration: &mut Cached<ValidatingWebhookConfiguration>,
    ) -> Result<(), WriteError> {
        let held = StoredCertificate::generate(&self.host, Timestamp::now(), before)?;
        self.trust(configuration, &held.bundle).await?;
        if configuration.is_none() {
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

    async fn trust(
        &self,
        cached: &mut Cached<ValidatingWebhookConfiguration>,
        bundle: &[u8],
    ) -> Result<(), WriteError> {
        let Some(Some(mut configuration)) = cached.clone() else { return Ok(()) };
        for webhook in configuration.webhooks.iter_mut().flatten() {
            webhook.client_config.ca_bundle = Some(ByteString(bundle.to_vec()));
        }
        let api: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        let params = PostParams::default();
        let done = api.replace(&self.configuration, &params, &configuration);
        *cached = written("the webhook configuration", done).await?;
        if cached.is_some() {
            tracing::info!(
                configuration = self.configuration,
                "CA bundle of the webhook configuration updated"
            );
        }
        Ok(())
    }
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
        let configuration = |bundle: Option<&[u8]>| {
            let bundle = bundle.map(|bundle| ByteString(bundle.to_vec()));
            let webhook = json!({"name": "w", "clientConfig": {"caBundle": bundle}, "sideEffects": "None",
                "admissionReviewVersions": []});
            serde_json::from_value(json!({"metadata": {}, "webhooks": [webhook]})).unwrap()
        };
        let (untrusting, other, trusting) =
            (configuration(None), configuration(Some(b"x")), configuration(Some(&held.bundle)));
        let late = start + SignedDuration::from_hours(24 * 70);
        for (held, configuration, now, expected) in [
            (None, Some(&untrusting), start, Action::Create),
            (None, None, start, Action::Create),
            (Some(&held), None, start, Action::Nothing),
            (Some(&held), Some(&untrusting), start, Action::Trust),
            (Some(&held), Some(&other), start, Action::Trust),
            (Some(&held), Some(&trusting), start, Action::Nothing),
            (Some(&held), Some(&trusting), late, Action::Create),
        ] {
            assert_eq!(next_action(held, configuration, "h", now), expected);
        }
    }
}
