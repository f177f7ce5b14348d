//! The demo's input: a YAML file for `kubectl apply`, reduced to DeviceClasses and ResourceClaims.
//!
//! A pod instantiates the templates that it refers to; any other template becomes one claim. Other
//! kinds are errors. An annotation marks claims that must be refused.

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Annotation of a claim that must be refused, with the value [`REFUSED`].
const EXPECT: &str = "demo.divvy.dev/expect";
const REFUSED: &str = "refused";
/// Placeholder for the UUID of the GPU of the tour, which is random.
const TOUR_GPU: &str = "TOUR-GPU-UUID";

/// Claims that are held at the same time, in the order of the file.
#[derive(Debug, Default)]
pub(crate) struct ClaimSet {
    /// Title for the report.
    pub(crate) title: String,
    pub(crate) classes: Vec<DeviceClass>,
    pub(crate) claims: Vec<ResourceClaim>,
}

/// Parses a text of several YAML documents. `origin` is the title, and names the text in errors.
pub(crate) fn parse(text: &str, origin: &str) -> Result<ClaimSet> {
    let mut set = ClaimSet { title: origin.to_owned(), ..ClaimSet::default() };
    let mut templates = BTreeMap::new();
    let mut used = BTreeSet::new();
    let mut pods = Vec::new();
    for (index, document) in serde_norway::Deserializer::from_str(text).enumerate() {
        let at = || format!("{origin}, document {}", index + 1);
        let value = Value::deserialize(document).with_context(at)?;
        if value.is_null() {
            continue;
        }
        match value["kind"].as_str() {
            Some("DeviceClass") => set.classes.push(typed(value).with_context(at)?),
            Some("ResourceClaim") => set.claims.push(typed(value).with_context(at)?),
            Some("ResourceClaimTemplate") => {
                let template: ResourceClaimTemplate = typed(value).with_context(at)?;
                let name = template
                    .metadata
                    .name
                    .clone()
                    .ok_or_else(|| anyhow!("{}: the template has no name", at()))?;
                templates.insert(name, template);
            }
            Some("Pod") => pods.push(typed::<Pod>(value).with_context(at)?),
            Some(other) => bail!(
                "{}: the demo does not support kind {other}, only DeviceClass, ResourceClaim, \
                 ResourceClaimTemplate and Pod",
                at()
            ),
            None => bail!("{}: the document has no kind", at()),
        }
    }
    for pod in pods {
        let pod_name = pod.metadata.name.clone().unwrap_or_default();
        for claim in pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()) {
            let Some(name) = &claim.resource_claim_template_name else { continue };
            let template = templates.get(name).ok_or_else(|| {
                anyhow!("pod {pod_name} refers to the template {name}, which is not in {origin}")
            })?;
            used.insert(name.clone());
            set.claims.push(instance(template, &format!("{pod_name}-{}", claim.name)));
        }
    }
    let unused = templates.iter().filter(|(name, _)| !used.contains(*name));
    set.claims.extend(unused.map(|(name, template)| instance(template, name)));
    for claim in &mut set.claims {
        if claim.metadata.name.is_none() {
            bail!("{origin}: a ResourceClaim has no name");
        }
        claim.metadata.namespace.get_or_insert_with(|| "default".into());
        claim.status = None;
    }
    Ok(set)
}

/// Whether the claim must be refused.
pub(crate) fn must_be_refused(claim: &ResourceClaim) -> bool {
    let expected = claim.metadata.annotations.as_ref().and_then(|all| all.get(EXPECT));
    expected.is_some_and(|expected| expected == REFUSED)
}

/// The claim with this UUID in place of the placeholder.
pub(crate) fn with_gpu_uuid(claim: &ResourceClaim, uuid: &str) -> Result<ResourceClaim> {
    Ok(serde_json::from_str(&serde_json::to_string(claim)?.replace(TOUR_GPU, uuid))?)
}

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> Result<T> {
    Ok(serde_json::from_value(value)?)
}

fn instance(template: &ResourceClaimTemplate, name: &str) -> ResourceClaim {
    let mut claim =
        ResourceClaim { spec: template.spec.clone().and_then(|spec| spec.spec), ..ResourceClaim::default() };
    claim.metadata.name = Some(name.to_owned());
    claim.metadata.namespace = template.metadata.namespace.clone();
    claim
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        let set = parse(text, "test").expect("parses");
        set.claims.iter().filter_map(|claim| claim.metadata.name.clone()).collect()
    }

    const TEMPLATE: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: slice}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: mig.divvy.dev}}]}}}
";

    #[test]
    fn a_template_alone_becomes_one_claim() {
        assert_eq!(names(TEMPLATE), ["slice"]);
    }

    #[test]
    fn a_pod_instantiates_its_templates() {
        let pod = "
kind: Pod
metadata: {name: trainer}
spec:
  containers: []
  resourceClaims: [{name: a, resourceClaimTemplateName: slice}, {name: b, resourceClaimTemplateName: slice}]
";
        assert_eq!(names(&format!("{TEMPLATE}---{pod}")), ["trainer-a", "trainer-b"]);
    }

    #[test]
    fn the_placeholder_becomes_the_gpu_uuid() {
        let selector = "device.attributes['gpu.divvy.dev'].uuid == 'TOUR-GPU-UUID'";
        let claim = format!(
            "{{kind: ResourceClaim, metadata: {{name: c, annotations: {{demo.divvy.dev/expect: refused}}}},
              spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: d,
              selectors: [{{cel: {{expression: \"{selector}\"}}}}]}}}}]}}}}}}"
        );
        let set = parse(&claim, "test").expect("parses");
        let claim = with_gpu_uuid(&set.claims[0], "GPU-1").expect("a claim");
        let text = serde_json::to_string(&claim).expect("JSON");
        assert!(text.contains("uuid == 'GPU-1'") && must_be_refused(&claim), "{text}");
        assert!(!must_be_refused(&ResourceClaim::default()));
    }

    #[test]
    fn an_unsupported_kind_is_named_with_its_position() {
        let error = parse("kind: Deployment", "claims.yaml").expect_err("refused");
        assert!(
            error.to_string().contains("claims.yaml, document 1: the demo does not support kind Deployment"),
            "{error}"
        );
    }
}
