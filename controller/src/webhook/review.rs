//! From an AdmissionReview to a verdict: looks up the referenced objects, then runs the
//! validator of `divvy-api`.
//!
//! Claims, templates and classes arrive as `resource.k8s.io/v1`, because `matchPolicy: Equivalent`
//! makes the API server convert older versions. A pod that names a claim or a template that does
//! not exist yet is allowed; the node plugin checks it again when it prepares the claim.

use super::foreign::ForeignRequests;
use super::wire::{self, Request, Verdict};
use crate::class_index::ClassIndex;
use crate::metrics::Metrics;
use divvy_api::check::published::SelectorProblem;
use divvy_api::check::{self, Class, ClusterView, Finding, KnownGpus, Severity};
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

/// Pods of this namespace are never rejected.
const EXEMPT_NAMESPACE: &str = "kube-system";
/// For all objects that one pod references.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// A pod names few claims; this bounds the API requests of one review.
const CLAIMS_MAX: usize = 64;

/// Below the webhook's `timeoutSeconds` of 5 s.
pub(super) const REVIEW_TIMEOUT: Duration = Duration::from_secs(4);

/// The two questions of a review.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReviewKind {
    /// Whether the object could be prepared.
    Validate,
    /// The patch that replaces requests of other GPU schedulers by claims.
    PortRequests,
}

/// Why there is no verdict.
#[derive(Debug)]
pub(super) enum NoVerdict {
    /// The body is not a valid review.
    Malformed(String),
    /// An object that the review needs could not be read.
    Unreadable(String),
}

/// Reviews objects. Clones share their state.
#[derive(Clone)]
pub struct Reviewer {
    client: kube::Client,
    class_index: watch::Receiver<Arc<ClassIndex>>,
    foreign: Arc<ForeignRequests>,
    metrics: Metrics,
}

/// The objects that a review refers to.
#[derive(Default)]
struct ReferencedObjects {
    class_index: Arc<ClassIndex>,
    claims: BTreeMap<String, ResourceClaim>,
    templates: BTreeMap<String, ResourceClaimTemplate>,
    /// Whether selectors may be evaluated. That blocks and needs a large stack.
    evaluate: bool,
    /// Set if a selector was skipped because `evaluate` is false.
    selector_skipped: Cell<bool>,
}

impl ClusterView for ReferencedObjects {
    fn class(&self, name: &str) -> Option<Class> {
        self.class_index.class(name).or_else(|| Class::well_known(name))
    }

    fn filter_modes(&self, modes: BTreeSet<Mode>, selectors: &[DeviceSelector]) -> BTreeSet<Mode> {
        if self.evaluate {
            return self.class_index.narrow(modes, selectors);
        }
        if modes.len() > 1 && !selectors.is_empty() {
            self.selector_skipped.set(true);
        }
        modes
    }

    fn selector_problems(&self, expression: &str, modes: &BTreeSet<Mode>) -> Vec<SelectorProblem> {
        if self.evaluate {
            return divvy_alloc::check_selector(expression, modes, &self.profiles());
        }
        self.selector_skipped.set(true);
        Vec::new()
    }

    fn profiles(&self) -> BTreeSet<String> {
        self.class_index.profiles()
    }

    fn gpus(&self) -> KnownGpus {
        self.class_index.gpus()
    }

    fn other_driver(&self) -> Severity {
        Severity::Warning
    }

    fn claim(&self, _: &str, name: &str) -> Option<DeviceClaim> {
        self.claims.get(name)?.spec.as_ref()?.devices.clone()
    }

    fn template(&self, _: &str, name: &str) -> Option<DeviceClaim> {
        self.templates.get(name)?.spec.as_ref()?.spec.as_ref()?.devices.clone()
    }
}

impl Reviewer {
    /// `class_index` supplies the modes of DeviceClasses.
    pub fn new(
        client: kube::Client,
        class_index: watch::Receiver<Arc<ClassIndex>>,
        foreign: ForeignRequests,
        metrics: Metrics,
    ) -> Self {
        Self { client, class_index, foreign: Arc::new(foreign), metrics }
    }

    /// Reviews an AdmissionReview and returns the encoded answer.
    pub(super) async fn review(&self, review: ReviewKind, body: Vec<u8>) -> Result<Vec<u8>, NoVerdict> {
        let began = Instant::now();
        let count = |kind, result| self.metrics.reviewed(kind, result, began.elapsed());
        let request = wire::read(&body).map_err(|why| {
            count("other", "malformed");
            NoVerdict::Malformed(why)
        })?;
        let kind = kind(&request);
        let verdict = match review {
            ReviewKind::Validate => self.verdict(&request, kind).await,
            ReviewKind::PortRequests => self.ported(&request, kind),
        };
        let verdict = verdict.inspect_err(|why| {
            count(kind.unwrap_or("other"), "unread");
            tracing::warn!(
                namespace = request.namespace,
                name = request.name,
                ?why,
                "no verdict for an admission review"
            );
        })?;
        count(kind.unwrap_or("other"), if verdict.refusal.is_some() { "refused" } else { "allowed" });
        if let Some(why) = &verdict.refusal {
            tracing::info!(namespace = request.namespace, name = request.name, kind, why, "object rejected");
        }
        wire::write(&request.uid, &verdict).map_err(|cause| NoVerdict::Malformed(cause.to_string()))
    }

    /// Counts a review that exceeded its time limit.
    pub(super) fn timed_out(&self) {
        self.metrics.reviewed("other", "late", REVIEW_TIMEOUT);
    }

    /// The patch of a pod with foreign requests, or why they cannot be served.
    fn ported(&self, request: &Request<'_>, kind: Option<&'static str>) -> Result<Verdict, NoVerdict> {
        let applies = request.operation == "CREATE"
            && request.sub_resource.is_none()
            && request.namespace != EXEMPT_NAMESPACE;
        let (Some("Pod"), Some(object), true) = (kind, request.object, applies) else {
            return Ok(Verdict::default());
        };
        self.foreign
            .review(object.get())
            .map_err(|cause| NoVerdict::Malformed(format!("the object is not a Pod: {cause}")))
    }

    async fn verdict(&self, request: &Request<'_>, kind: Option<&'static str>) -> Result<Verdict, NoVerdict> {
        let applies =
            matches!(request.operation.as_str(), "CREATE" | "UPDATE") && request.sub_resource.is_none();
        let (Some(kind), Some(object), true) =
            (kind, request.object, applies && request.namespace != EXEMPT_NAMESPACE)
        else {
            return Ok(Verdict::default());
        };
        let mut referenced = ReferencedObjects {
            class_index: self.class_index.borrow().clone(),
            ..ReferencedObjects::default()
        };
        if kind == "Pod" {
            let pod: Pod = serde_json::from_str(object.get())
                .map_err(|cause| NoVerdict::Malformed(format!("the object is not a Pod: {cause}")))?;
            self.look_up(&pod, &request.namespace, &mut referenced).await?;
        }
        let malformed = |cause| NoVerdict::Malformed(format!("the object is not a {kind}: {cause}"));
        let verdict = validate(object.get(), &referenced).map_err(malformed)?;
        if !referenced.selector_skipped.get() {
            return Ok(verdict);
        }
        // Selectors matter for few objects, so their evaluation runs on a blocking thread.
        referenced.evaluate = true;
        let text = object.get().to_owned();
        let validated = tokio::task::spawn_blocking(move || validate(&text, &referenced)).await;
        validated
            .map_err(|cause| NoVerdict::Unreadable(format!("the check did not finish: {cause}")))?
            .map_err(malformed)
    }

    /// Fetches the claims and templates that a pod names, as far as they exist.
    async fn look_up(
        &self,
        pod: &Pod,
        namespace: &str,
        referenced: &mut ReferencedObjects,
    ) -> Result<(), NoVerdict> {
        let named = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
        let (mut claims, mut templates) = (BTreeSet::new(), BTreeSet::new());
        for entry in named.take(CLAIMS_MAX) {
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
        let unreadable = |why: String| NoVerdict::Unreadable(format!("cannot read the pod's claims: {why}"));
        let (claims, templates) = tokio::time::timeout(READ_TIMEOUT, read)
            .await
            .map_err(|_| unreadable("the API server did not answer in time".to_owned()))?
            .map_err(|cause| unreadable(cause.to_string()))?;
        referenced.claims = claims.into_iter().filter_map(|(claim, name)| Some((name, claim?))).collect();
        referenced.templates =
            templates.into_iter().filter_map(|(template, name)| Some((name, template?))).collect();
        Ok(())
    }
}

/// The kind of the object, if it is validated.
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

/// Validates an object and the claims that a pod names. Those claims need a check here, because
/// claims of classes with other names do not reach the webhook themselves. Pure.
fn validate(object: &str, referenced: &ReferencedObjects) -> Result<Verdict, serde_json::Error> {
    let mut verdict = Verdict::default();
    let mut refusals = Vec::new();
    let mut add = |about: &str, findings: Vec<Finding>| {
        for Finding { severity, path, message, .. } in findings {
            let text = format!("{about}{path}: {message}");
            match severity {
                Severity::Error => refusals.push(text),
                Severity::Warning => verdict.warnings.push(text),
            }
        }
    };
    add("", check::object(object.as_bytes(), referenced)?);
    for (name, claim) in &referenced.claims {
        add(&format!("ResourceClaim {name}: "), check::claim(claim, referenced));
    }
    for (name, template) in &referenced.templates {
        add(&format!("ResourceClaimTemplate {name}: "), check::template(template, referenced));
    }
    verdict.refusal = (!refusals.is_empty()).then(|| refusals.join("; "));
    Ok(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn referenced() -> ReferencedObjects {
        let claim = |class: &str, config: Value| {
            json!({"devices": {
                "requests": [{"name": "gpu", "exactly": {"deviceClassName": class}}],
                "config": [{"opaque": {"driver": "gpu.divvy.dev", "parameters": config}}],
            }})
        };
        let claim = json!({"metadata": {}, "spec": claim("shared-gpu", json!({"kind": "?"}))});
        ReferencedObjects {
            claims: [("bad".to_owned(), serde_json::from_value(claim).unwrap())].into(),
            ..ReferencedObjects::default()
        }
    }

    #[test]
    fn pod_is_rejected_for_an_invalid_claim() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {
            "containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimName": "bad"}]}});
        let refusal = validate(&pod.to_string(), &referenced()).unwrap().refusal.unwrap();
        assert!(refusal.starts_with("ResourceClaim bad: spec.devices.config[0]"), "{refusal}");
    }

    #[test]
    fn review_says_the_same_as_divvy_check() {
        let claim = |class: &str, more: Value| {
            let mut exactly = json!({"deviceClassName": class});
            exactly.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
                "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}})
        };
        let share = |amounts: Value| claim("share.divvy.dev", json!({"capacity": {"requests": amounts}}));
        let profile = "device.attributes['gpu.divvy.dev'].profil == '1g.10gb'";
        let limits = json!({"nvidia.com/gpu": "500m"});
        for object in [
            claim("shares.divvy.dev", json!({"capacity": {"requests": {"memory": "1Gi"}}})),
            claim("mig.divvy.dev", json!({"selectors": [{"cel": {"expression": profile}}]})),
            share(json!({"memory": "10GB"})),
            share(json!({"gpumem": 3000})),
            share(json!({"cores": 30})),
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [
                {"name": "main", "resources": {"limits": limits, "claims": [{"name": "gpu"}]}}]}}),
        ] {
            let view = ReferencedObjects { evaluate: true, ..ReferencedObjects::default() };
            let verdict = validate(&object.to_string(), &view).unwrap();
            let said = [verdict.refusal.unwrap_or_default(), verdict.warnings.join("; ")].concat();
            let found = check::manifest(&object, &view).unwrap();
            assert!(!found.is_empty(), "{object:#}");
            for finding in found {
                assert!(said.contains(&finding.message), "{said}: {finding}");
            }
        }
    }

    #[test]
    fn duplicate_json_key_is_detected() {
        let object = r#"{"apiVersion":"resource.k8s.io/v1","kind":"DeviceClass","metadata":{"name":"c"},
            "spec":{"config":[{"opaque":{"driver":"gpu.divvy.dev","parameters":{
                "apiVersion":"resource.divvy.dev/v1alpha1","kind":"GpuConfig","kind":"GpuConfig"}}}]}}"#;
        let body = format!(
            r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview",
            "request":{{"uid":"u","operation":"CREATE",
            "kind":{{"group":"resource.k8s.io","version":"v1","kind":"DeviceClass"}},"object":{object}}}}}"#
        );
        let request = wire::read(body.as_bytes()).unwrap();
        let refusal =
            validate(request.object.unwrap().get(), &ReferencedObjects::default()).unwrap().refusal.unwrap();
        assert!(refusal.contains("kind is given twice"), "{refusal}");
    }

    /// JSON built at random from the keys and values of real objects.
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
        fn no_input_panics(text in "\\PC{0,80}", object in anything(), kind in 0..4_usize) {
            let _ = wire::read(text.as_bytes());
            let (api, kind) = [("v1", "Pod"), ("resource.k8s.io/v1", "ResourceClaim"),
                ("resource.k8s.io/v1", "ResourceClaimTemplate"), ("resource.k8s.io/v1", "DeviceClass")][kind];
            let mut object = object;
            if let Some(fields) = object.as_object_mut() {
                fields.insert("apiVersion".to_owned(), api.into());
                fields.insert("kind".to_owned(), kind.into());
            }
            let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                "request": object}).to_string();
            let _ = wire::read(review.as_bytes());
            let _ = validate(&object.to_string(), &referenced());
        }
    }
}
