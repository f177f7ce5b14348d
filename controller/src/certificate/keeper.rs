//! Keeps the Secret, the certificate that is shown, and what the API server
//! trusts in step. Every replica shows what the Secret holds; the leader writes,
//! and knows what it wrote before the watches tell.

use super::{CertificateError, Current, Held};
use crate::metrics::Metrics;
use crate::run::{Part, Ready};
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

/// Where the certificate is and who is told of it.
pub struct Keeper {
    pub client: kube::Client,
    pub namespace: String,
    pub secret: String,
    pub configuration: String,
    pub host: String,
    pub current: Arc<Current>,
    pub leader: watch::Receiver<bool>,
    pub metrics: Metrics,
    pub ready: Ready,
}

/// Looked at without a change: a certificate ages, and a watch may have lied.
const EVERY: Duration = Duration::from_secs(600);
const AGAIN: Duration = Duration::from_secs(5);
const WRITE: Duration = Duration::from_secs(10);

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    /// Make a new one, trust it, store it.
    Make,
    /// Tell the API server what to trust.
    Trust,
}

fn step(
    held: Option<&Held>,
    configuration: Option<&ValidatingWebhookConfiguration>,
    host: &str,
    now: Timestamp,
) -> Step {
    match held {
        None => Step::Make,
        Some(held) if held.is_due(host, now) => Step::Make,
        Some(held) => match configuration {
            Some(configuration) if !trusts(configuration, &held.bundle) => Step::Trust,
            _ => Step::Nothing,
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
    #[error("{what} cannot be written: {cause}")]
    Api { what: &'static str, cause: kube::Error },
    #[error("{what} was not written in time")]
    Deadline { what: &'static str },
}

/// Unknown, absent or there.
type Known<T> = Option<Option<T>>;

impl Keeper {
    /// Runs until the leader channel closes.
    pub async fn run(mut self) {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut secrets = watcher::watch_object(secrets, &self.secret).default_backoff().boxed();
        let configurations: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        let mut configurations =
            watcher::watch_object(configurations, &self.configuration).default_backoff().boxed();
        let (mut secret, mut configuration) = (None, None);
        let mut wait = EVERY;
        loop {
            tokio::select! {
                event = secrets.next() => match event {
                    Some(Ok(now)) => {
                        self.show(now.as_ref());
                        secret = Some(now);
                    }
                    Some(Err(cause)) => tracing::debug!(%cause, "watch of the certificate's Secret"),
                    None => return,
                },
                event = configurations.next() => match event {
                    Some(Ok(now)) => configuration = Some(now),
                    Some(Err(cause)) => tracing::debug!(%cause, "watch of the webhook configuration"),
                    None => return,
                },
                changed = self.leader.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
            wait = EVERY;
            let (Some(stored), Some(trusting)) = (&secret, &configuration) else { continue };
            if !*self.leader.borrow() {
                continue;
            }
            let held = stored.as_ref().and_then(Held::of);
            let done = match (step(held.as_ref(), trusting.as_ref(), &self.host, Timestamp::now()), held) {
                (Step::Nothing, _) | (Step::Trust, None) => Ok(()),
                (Step::Make, before) => self.make(before.as_ref(), &mut secret, &mut configuration).await,
                (Step::Trust, Some(held)) => self.trust(&mut configuration, &held.bundle).await,
            };
            if let Err(cause) = done {
                tracing::warn!("{cause}; tried again");
                wait = AGAIN;
            }
        }
    }

    /// Shows what the Secret holds now.
    fn show(&self, secret: Option<&Secret>) {
        let state = match secret.and_then(Held::of) {
            None => Err(format!("Secret {} holds no certificate yet", self.secret)),
            Some(held) => {
                self.metrics.certificate_expires(held.expires.as_second());
                self.current.set(&held.certificate, &held.key).map_err(|cause| cause.to_string())
            }
        };
        self.ready.set(Part::Certificate, state);
    }

    async fn make(
        &self,
        before: Option<&Held>,
        secret: &mut Known<Secret>,
        configuration: &mut Known<ValidatingWebhookConfiguration>,
    ) -> Result<(), WriteError> {
        let held = Held::make(&self.host, Timestamp::now(), before)?;
        self.trust(configuration, &held.bundle).await?;
        if configuration.is_none() {
            return Ok(());
        }
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = PostParams::default();
        let stored = secret.clone().flatten();
        *secret = written("the certificate's Secret", async {
            match stored {
                None => api.create(&params, &held.put(Held::secret(&self.secret))).await,
                Some(secret) => api.replace(&self.secret, &params, &held.put(secret)).await,
            }
        })
        .await?;
        if secret.is_some() {
            tracing::info!(host = held.host, expires = %held.expires, "certificate made");
        }
        Ok(())
    }

    async fn trust(
        &self,
        known: &mut Known<ValidatingWebhookConfiguration>,
        bundle: &[u8],
    ) -> Result<(), WriteError> {
        let Some(Some(mut configuration)) = known.clone() else { return Ok(()) };
        for webhook in configuration.webhooks.iter_mut().flatten() {
            webhook.client_config.ca_bundle = Some(ByteString(bundle.to_vec()));
        }
        let api: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        let params = PostParams::default();
        let done = api.replace(&self.configuration, &params, &configuration);
        *known = written("the webhook configuration", done).await?;
        if known.is_some() {
            tracing::info!(
                configuration = self.configuration,
                "the API server trusts the webhook's certificate"
            );
        }
        Ok(())
    }
}

/// The object as it is now. What was written is known at once: a watch that tells of one
/// write before the other would otherwise find a certificate missing that was just made. After
/// a conflict nothing is known until the watch tells what the other one wrote.
async fn written<T>(
    what: &'static str,
    done: impl Future<Output = kube::Result<T>>,
) -> Result<Known<T>, WriteError> {
    match tokio::time::timeout(WRITE, done).await {
        Ok(Ok(object)) => Ok(Some(Some(object))),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => Ok(None),
        Ok(Err(cause)) => Err(WriteError::Api { what, cause }),
        Err(_) => Err(WriteError::Deadline { what }),
    }
}

/// Shows what a mounted directory holds, as it changes.
pub async fn follow(dir: PathBuf, current: Arc<Current>, ready: Ready) {
    loop {
        ready.set(Part::Certificate, current.read(&dir).map_err(|cause| cause.to_string()));
        // The kubelet itself takes about a minute to bring a Secret to its mount.
        tokio::time::sleep(Duration::from_secs(30)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::SignedDuration;
    use serde_json::json;

    #[test]
    fn the_secret_comes_first_and_the_trust_follows_it() {
        let start = Timestamp::now();
        let held = Held::make("h", start, None).unwrap();
        let configuration = |bundle: Option<&[u8]>| {
            let bundle = bundle.map(|bundle| ByteString(bundle.to_vec()));
            let webhook = json!({"name": "w", "clientConfig": {"caBundle": bundle}, "sideEffects": "None", "admissionReviewVersions": []});
            serde_json::from_value(json!({"metadata": {}, "webhooks": [webhook]})).unwrap()
        };
        let (blind, other, knows) =
            (configuration(None), configuration(Some(b"x")), configuration(Some(&held.bundle)));
        let late = start + SignedDuration::from_hours(24 * 70);
        for (held, configuration, now, expected) in [
            (None, Some(&blind), start, Step::Make),
            (None, None, start, Step::Make),
            (Some(&held), None, start, Step::Nothing),
            (Some(&held), Some(&blind), start, Step::Trust),
            (Some(&held), Some(&other), start, Step::Trust),
            (Some(&held), Some(&knows), start, Step::Nothing),
            (Some(&held), Some(&knows), late, Step::Make),
        ] {
            assert_eq!(step(held, configuration, "h", now), expected);
        }
    }
}
