//! From a review to a verdict: what the one validator finds, with what it needs to
//! know looked up first.
//!
//! Claims, templates and classes come as `resource.k8s.io/v1`: a webhook
//! configuration with `matchPolicy: Equivalent` makes the API server convert older
//! versions. A pod that names a claim or a template that does not exist yet is
//! let through; prepare checks again.

use super::wire::{self, Request, Verdict};
use crate::known::Known;
use crate::metrics::Metrics;
use divvy_api::check::{self, Class, Finding, Severity, World};
use divvy_api::sharing::Mode;
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceSelector, ResourceClaim, ResourceClaimTemplate};
use kube::Api;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// What pods of this namespace do is never hindered.
const EXEMPT: &str = "kube-system";
/// For all that a pod names together.
const READ: Duration = Duration::from_secs(2);
/// A pod names few claims; one that names hundreds is not worth as many requests.
const MOST_CLAIMS: usize = 64;

/// Why there is no verdict.
#[derive(Debug)]
pub(super) enum NoVerdict {
    /// What came is no review.
    Malformed(String),
    /// Something that is needed could not be read.
    Unreadable(String),
}

/// Reviews objects; a clone is the same.
#[derive(Clone)]
pub struct Reviewer {
    client: kube::Client,
    known: watch::Receiver<Arc<Known>>,
    metrics: Metrics,
}

/// What a review can look things up in.
#[derive(Default)]
struct Looked {
    known: Arc<Known>,
    claims: BTreeMap<String, ResourceClaim>,
    templates: BTreeMap<String, ResourceClaimTemplate>,
    /// Whether selectors may be evaluated, which takes a stack and a while.
    evaluate: bool,
    /// Set when one would have been.
    undecided: Cell<bool>,
}

impl World for Looked {
    fn class(&self, name: &str) -> Option<Class> {
        self.known.class(name).or_else(|| Class::well_known(name))
    }

    fn narrow(&self, modes: BTreeSet<Mode>, selectors: &[DeviceSelector]) -> BTreeSet<Mode> {
        if self.evaluate {
            return self.known.narrow(modes, selectors);
        }
        if modes.len() > 1 && !selectors.is_empty() {
            self.undecided.set(true);
        }
        modes
    }

    fn claim(&self, _: &str, name: &str) -> Option<DeviceClaim> {
        self.claims.get(name)?.spec.as_ref()?.devices.clone()
    }

    fn template(&self, _: &str, name: &str) -> Option<DeviceClaim> {
        self.templates.get(name)?.spec.as_ref()?.spec.as_ref()?.devices.clone()
    }
}

impl Reviewer {
    /// `known` says what the classes are.
    pub fn new(client: kube::Client, known: watch::Receiver<Arc<Known>>, metrics: Metrics) -> Self {
        Self { client, known, metrics }
    }

    /// The answer to a review, as it goes back.
    pub(super) async fn review(&self, body: Vec<u8>) -> Result<Vec<u8>, NoVerdict> {
        let began = Instant::now();
        let count = |kind, result| self.metrics.reviewed(kind, result, began.elapsed());
        let request = wire::read(&body).map_err(|why| {
            count("other", "malformed");
            NoVerdict::Malformed(why)
        })?;
        let kind = kind(&request);
        let verdict = self.verdict(&request, kind).await.inspect_err(|why| {
            count(kind.unwrap_or("other"), "unread");
            tracing::warn!(
                namespace = request.namespace,
                name = request.name,
                ?why,
                "review without a verdict"
            );
        })?;
        count(kind.unwrap_or("other"), if verdict.refusal.is_some() { "refused" } else { "allowed" });
        if let Some(why) = &verdict.refusal {
            tracing::info!(namespace = request.namespace, name = request.name, kind, why, "refused");
        }
        wire::write(&request.uid, &verdict).map_err(|cause| NoVerdict::Malformed(cause.to_string()))
    }

    /// A review was given up.
    pub(super) fn late(&self) {
        self.metrics.reviewed("other", "late", super::ANSWER);
    }

    async fn verdict(&self, request: &Request<'_>, kind: Option<&'static str>) -> Result<Verdict, NoVerdict> {
        let asked =
            matches!(request.operation.as_str(), "CREATE" | "UPDATE") && request.sub_resource.is_none();
        let (Some(kind), Some(object), true) = (kind, request.object, asked && request.namespace != EXEMPT)
        else {
            return Ok(Verdict::default());
        };
        let mut looked = Looked { known: self.known.borrow().clone(), ..Looked::default() };
        if kind == "Pod" {
            let pod: Pod = serde_json::from_str(object.get())
                .map_err(|cause| NoVerdict::Malformed(format!("the object is not a Pod: {cause}")))?;
            self.look_up(&pod, &request.namespace, &mut looked).await?;
        }
        let malformed = |cause| NoVerdict::Malformed(format!("the object is not a {kind}: {cause}"));
        let verdict = judge(object.get(), &looked).map_err(malformed)?;
        if !looked.undecided.get() {
            return Ok(verdict);
        }
        // Few objects hang on their selectors; those have a thread of their own.
        looked.evaluate = true;
        let text = object.get().to_owned();
        let judged = tokio::task::spawn_blocking(move || judge(&text, &looked)).await;
        judged
            .map_err(|cause| NoVerdict::Unreadable(format!("the check did not end: {cause}")))?
            .map_err(malformed)
    }

    /// The claims and templates that a pod names, as far as they exist.
    async fn look_up(&self, pod: &Pod, namespace: &str, looked: &mut Looked) -> Result<(), NoVerdict> {
        let named = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
        let (mut claims, mut templates) = (BTreeSet::new(), BTreeSet::new());
        for entry in named.take(MOST_CLAIMS) {
            claims.extend(entry.resource_claim_name.clone());
            templates.extend(entry.resource_claim_template_name.clone());
        }
        if claims.is_empty() && templates.is_empty() {
            return Ok(());
        }
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        let claims = claims.into_iter().map(|name| {
            let api = &api;
            async move { Ok::<_, kube::Error>((api.get_opt(&name).await?, name)) }
        });
        let api: Api<ResourceClaimTemplate> = Api::namespaced(self.client.clone(), namespace);
        let templates = templates.into_iter().map(|name| {
            let api = &api;
            async move { Ok::<_, kube::Error>((api.get_opt(&name).await?, name)) }
        });
        let read = async { tokio::try_join!(try_join_all(claims), try_join_all(templates)) };
        let unreadable =
            |why: String| NoVerdict::Unreadable(format!("the pod's claims cannot be read: {why}"));
        let (claims, templates) = tokio::time::timeout(READ, read)
            .await
            .map_err(|_| unreadable("no answer from the API server in time".to_owned()))?
            .map_err(|cause| unreadable(cause.to_string()))?;
        looked.claims = claims.into_iter().filter_map(|(claim, name)| Some((name, claim?))).collect();
        looked.templates =
            templates.into_iter().filter_map(|(template, name)| Some((name, template?))).collect();
        Ok(())
    }
}

/// The kinds that are checked.
fn kind(request: &Request<'_>) -> Option<&'static str> {
    let kind = &request.kind;
    match (kind.group.as_str(), kind.version.as_str(), kind.kind.as_str()) {
        ("", "v1", "Pod") => Some("Pod"),
        ("resource.k8s.io", "v1", "ResourceClaim") => Some("ResourceClaim"),
        ("resource.k8s.io", "v1", "ResourceClaimTemplate") => Some("ResourceClaimTemplate"),
        ("resource.k8s.io", "v1", "DeviceClass") => Some("DeviceClass"),
        _ => None,
    }
}

/// Pure: what is found in an object, and in the claims that a pod names. Claims
/// of classes with other names than ours do not come by themselves.
fn judge(object: &str, looked: &Looked) -> Result<Verdict, serde_json::Error> {
    let mut verdict = Verdict::default();
    let mut refusals = Vec::new();
    let mut tell = |about: &str, findings: Vec<Finding>| {
        for Finding { severity, path, message } in findings {
            let text = format!("{about}{path}: {message}");
            match severity {
                Severity::Error => refusals.push(text),
                Severity::Warning => verdict.warnings.push(text),
            }
        }
    };
    tell("", check::object(object.as_bytes(), looked)?);
    for (name, claim) in &looked.claims {
        tell(&format!("ResourceClaim {name}: "), check::claim(claim, looked));
    }
    for (name, template) in &looked.templates {
        tell(&format!("ResourceClaimTemplate {name}: "), check::template(template, looked));
    }
    verdict.refusal = (!refusals.is_empty()).then(|| refusals.join("; "));
    Ok(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn looked() -> Looked {
        let claim = |class: &str, config: Value| {
            json!({"devices": {
                "requests": [{"name": "gpu", "exactly": {"deviceClassName": class}}],
                "config": [{"opaque": {"driver": "gpu.divvy.dev", "parameters": config}}],
            }})
        };
        let claim = json!({"metadata": {}, "spec": claim("shared-gpu", json!({"kind": "?"}))});
        Looked {
            claims: [("bad".to_owned(), serde_json::from_value(claim).unwrap())].into(),
            ..Looked::default()
        }
    }

    #[test]
    fn a_pod_is_refused_for_what_is_wrong_with_its_claim() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {
            "containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimName": "bad"}]}});
        let refusal = judge(&pod.to_string(), &looked()).unwrap().refusal.unwrap();
        assert!(refusal.starts_with("ResourceClaim bad: spec.devices.config[0]"), "{refusal}");
    }

    #[test]
    fn a_key_that_is_given_twice_is_seen() {
        let object = r#"{"apiVersion":"resource.k8s.io/v1","kind":"DeviceClass","metadata":{"name":"c"},"spec":{"config":[{"opaque":
            {"driver":"gpu.divvy.dev","parameters":{"apiVersion":"resource.divvy.dev/v1alpha1","kind":"GpuConfig","kind":"GpuConfig"}}}]}}"#;
        let body = format!(
            r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{{"uid":"u","operation":"CREATE",
            "kind":{{"group":"resource.k8s.io","version":"v1","kind":"DeviceClass"}},"object":{object}}}}}"#
        );
        let request = wire::read(body.as_bytes()).unwrap();
        let refusal = judge(request.object.unwrap().get(), &Looked::default()).unwrap().refusal.unwrap();
        assert!(refusal.contains("kind is given twice"), "{refusal}");
    }

    /// JSON of the words that objects are made of, in any order.
    fn anything() -> impl Strategy<Value = Value> {
        let word = prop::sample::select(vec![
            "apiVersion",
            "kind",
            "v1",
            "Pod",
            "ResourceClaim",
            "DeviceClass",
            "resource.k8s.io/v1",
            "spec",
            "devices",
            "requests",
            "exactly",
            "deviceClassName",
            "mps.divvy.dev",
            "config",
            "opaque",
            "driver",
            "gpu.divvy.dev",
            "parameters",
            "containers",
            "resources",
            "claims",
            "resourceClaims",
            "name",
            "capacity",
            "volumes",
            "-1",
        ]);
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::from),
            word.clone().prop_map(Value::from),
        ];
        leaf.prop_recursive(6, 64, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((word.clone(), inner), 0..6).prop_map(|fields| {
                    Value::Object(fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn nothing_that_is_sent_is_fatal(text in "\\PC{0,80}", object in anything(), kind in 0..4_usize) {
            let _ = wire::read(text.as_bytes());
            let (api, kind) = [("v1", "Pod"), ("resource.k8s.io/v1", "ResourceClaim"),
                ("resource.k8s.io/v1", "ResourceClaimTemplate"), ("resource.k8s.io/v1", "DeviceClass")][kind];
            let mut object = object;
            if let Some(fields) = object.as_object_mut() {
                fields.insert("apiVersion".to_owned(), api.into());
                fields.insert("kind".to_owned(), kind.into());
            }
            let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": object}).to_string();
            let _ = wire::read(review.as_bytes());
            let _ = judge(&object.to_string(), &looked());
        }
    }
}
