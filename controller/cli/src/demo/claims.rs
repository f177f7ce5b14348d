//! The demo's input: a YAML file as one would `kubectl apply` it, reduced to
//! DeviceClasses and ResourceClaims.
//!
//! A template becomes one claim, as it does for each pod; a pod instantiates
//! the templates it names. Anything else is an error that says which document.
//! A claim that is there to be refused says so by an annotation.

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Annotation of a claim for which there must be no device, with the value [`REFUSED`].
const EXPECT: &str = "demo.divvy.dev/expect";
const REFUSED: &str = "refused";
/// Stands for the UUID of the GPU whose modes are toured, which is known only when it is there.
const TOURED: &str = "GPU-OF-THE-TOUR";

/// What to allocate, in the order written.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// What the claims are together.
    pub(crate) title: String,
    pub(crate) classes: Vec<DeviceClass>,
    pub(crate) claims: Vec<ResourceClaim>,
}

/// Reads a multi-document YAML text; `origin` names it in errors.
pub(crate) fn parse(text: &str, origin: &str) -> Result<Wanted> {
    let mut wanted = Wanted { title: origin.to_owned(), ..Wanted::default() };
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
            Some("DeviceClass") => wanted.classes.push(typed(value).with_context(at)?),
            Some("ResourceClaim") => wanted.claims.push(typed(value).with_context(at)?),
            Some("ResourceClaimTemplate") => {
                let template: ResourceClaimTemplate = typed(value).with_context(at)?;
                let name = template
                    .metadata
                    .name
                    .clone()
                    .ok_or_else(|| anyhow!("{}: a template without a name", at()))?;
                templates.insert(name, template);
            }
            Some("Pod") => pods.push(typed::<Pod>(value).with_context(at)?),
            Some(other) => bail!(
                "{}: kind {other} is not for the demo; it takes DeviceClass, ResourceClaim, ResourceClaimTemplate and Pod",
                at()
            ),
            None => bail!("{}: no kind", at()),
        }
    }
    for pod in pods {
        let pod_name = pod.metadata.name.clone().unwrap_or_default();
        for claim in pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()) {
            let Some(name) = &claim.resource_claim_template_name else { continue };
            let template = templates.get(name).ok_or_else(|| {
                anyhow!("pod {pod_name} names the template {name}, which {origin} does not have")
            })?;
            used.insert(name.clone());
            wanted.claims.push(instance(template, &format!("{pod_name}-{}", claim.name)));
        }
    }
    let unnamed = templates.iter().filter(|(name, _)| !used.contains(*name));
    wanted.claims.extend(unnamed.map(|(name, template)| instance(template, name)));
    for claim in &mut wanted.claims {
        if claim.metadata.name.is_none() {
            bail!("{origin}: a ResourceClaim without a name");
        }
        claim.metadata.namespace.get_or_insert_with(|| "default".into());
        claim.status = None;
    }
    Ok(wanted)
}

/// Whether there must be no device for the claim.
pub(crate) fn is_to_be_refused(claim: &ResourceClaim) -> bool {
    let said = claim.metadata.annotations.as_ref().and_then(|all| all.get(EXPECT));
    said.is_some_and(|said| said == REFUSED)
}

/// The claim with the UUID of the GPU that is toured.
pub(crate) fn of_gpu(claim: &ResourceClaim, uuid: &str) -> Result<ResourceClaim> {
    Ok(serde_json::from_str(&serde_json::to_string(claim)?.replace(TOURED, uuid))?)
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
        let wanted = parse(text, "test").expect("parses");
        wanted.claims.iter().filter_map(|claim| claim.metadata.name.clone()).collect()
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
    fn a_pod_instantiates_the_templates_it_names() {
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
    fn a_claim_of_the_tour_is_for_one_gpu() {
        let selector = "device.attributes['gpu.divvy.dev'].uuid == 'GPU-OF-THE-TOUR'";
        let claim = format!(
            "{{kind: ResourceClaim, metadata: {{name: c, annotations: {{demo.divvy.dev/expect: refused}}}},
              spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: d,
              selectors: [{{cel: {{expression: \"{selector}\"}}}}]}}}}]}}}}}}"
        );
        let wanted = parse(&claim, "test").expect("parses");
        let claim = of_gpu(&wanted.claims[0], "GPU-1").expect("a claim");
        let text = serde_json::to_string(&claim).expect("JSON");
        assert!(text.contains("uuid == 'GPU-1'") && is_to_be_refused(&claim), "{text}");
        assert!(!is_to_be_refused(&ResourceClaim::default()));
    }

    #[test]
    fn an_unknown_kind_is_refused_by_name_and_place() {
        let error = parse("kind: Deployment", "claims.yaml").expect_err("refused");
        assert!(error.to_string().contains("claims.yaml, document 1: kind Deployment"), "{error}");
    }
}
