//! Checks of pods with their claims: which devices a container can use.
//!
//! A CUDA process finds its MPS control daemon by one environment variable and one directory, and
//! shares /dev/shm with it. So a container can use one daemon, and its own volumes must not cover
//! these paths. A claim does not know its containers, so prepare cannot check this. A pod with
//! extended resources has no claims at admission; the scheduler creates them later, and no class
//! for them uses MPS.

use super::claim::{self, DeviceRequest};
use super::mounts::{self, normalize};
use super::types::{ClusterView, Finding};
use crate::mps::CONTAINER_PIPE;
use crate::sharing::Mode;
use k8s_openapi::api::core::v1::{Container, Pod, PodResourceClaim, PodSpec};
use k8s_openapi::api::resource::v1::DeviceClaim;
use std::collections::{BTreeMap, BTreeSet};

/// Checks how the pod's containers use its claims.
pub(super) fn check(pod: &Pod, view: &dyn ClusterView) -> Vec<Finding> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let found = spec.resource_claims.iter().flatten().filter_map(|named| {
        let devices = devices(named, namespace, view)?;
        Some((named.name.as_str(), devices))
    });
    let claims: BTreeMap<&str, DeviceClaim> = found.collect();
    let containers = containers(spec);
    let mut findings: Vec<_> = containers
        .iter()
        .flat_map(|(path, container)| of_container(container, path, &claims, view))
        .collect();
    // An unknown claim may turn out to have a share.
    let may_share = |named: &&PodResourceClaim| {
        claims.get(named.name.as_str()).is_none_or(|devices| claim::has_share(devices, view))
    };
    findings.extend(containers.iter().flat_map(|(path, container)| shares_by_class(container, path, view)));
    let shares = spec.resource_claims.iter().flatten().filter(may_share).map(|named| named.name.as_str());
    findings.extend(mounts::check(spec, &containers, &shares.collect()));
    findings
}

/// The prefix of the extended resource of a DeviceClass, in the limits of a container.
const CLASS_RESOURCE_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

/// Extended resources of classes that require a share size, which they cannot set.
fn shares_by_class(container: &Container, path: &str, view: &dyn ClusterView) -> Vec<Finding> {
    let limits = container.resources.iter().flat_map(|resources| resources.limits.iter().flatten());
    let part = |name: &&String| {
        name.strip_prefix(CLASS_RESOURCE_PREFIX)
            .and_then(|class| view.class(class))
            .is_some_and(|class| class.needs_share)
    };
    let message = |name: &String| {
        let message = format!(
            "{name} cannot set a share size, but its DeviceClass is for part of a GPU; use a ResourceClaim"
        );
        Finding::error(format!("{path}.resources.limits[{name}]"), message)
    };
    limits.map(|(name, _)| name).filter(part).map(message).collect()
}

fn devices(named: &PodResourceClaim, namespace: &str, view: &dyn ClusterView) -> Option<DeviceClaim> {
    match (&named.resource_claim_name, &named.resource_claim_template_name) {
        (Some(name), _) => view.claim(namespace, name),
        (None, Some(name)) => view.template(namespace, name),
        (None, None) => None,
    }
}

fn containers(spec: &PodSpec) -> Vec<(String, &Container)> {
    let listed = |list: &'static str| move |(index, one)| (format!("spec.{list}[{index}]"), one);
    let init = spec.init_containers.iter().flatten().enumerate().map(listed("initContainers"));
    init.chain(spec.containers.iter().enumerate().map(listed("containers"))).collect()
}

fn of_container(
    container: &Container,
    path: &str,
    claims: &BTreeMap<&str, DeviceClaim>,
    view: &dyn ClusterView,
) -> Vec<Finding> {
    let mut used: BTreeMap<&str, BTreeSet<Option<&str>>> = BTreeMap::new();
    for named in container.resources.iter().flat_map(|resources| resources.claims.iter().flatten()) {
        used.entry(&named.name).or_default().insert(named.request.as_deref().filter(|name| !name.is_empty()));
    }
    // Name, MPS requests (alternatives count as their base request), and whether their devices are
    // on one GPU.
    let of_claim = |(name, devices): (&&str, &DeviceClaim)| {
        let requests = used.get(name)?;
        let reached =
            |request: &DeviceRequest<'_>| requests.contains(&None) || requests.contains(&Some(request.base));
        let requested = claim::requested(devices, "", view);
        let mps: Vec<_> =
            requested.iter().filter(|request| reached(request) && claim::is_mps(devices, request)).collect();
        let requests: BTreeSet<_> = mps.iter().map(|request| request.base.to_owned()).collect();
        let shared = mps.iter().all(|request| request.modes == [Mode::Mps].into());
        let one_gpu = shared && claim::on_one_gpu(devices, &mps);
        (!requests.is_empty()).then(|| ((*name).to_owned(), requests, one_gpu))
    };
    let clients: Vec<_> = claims.iter().filter_map(of_claim).collect();
    let mut findings = Vec::new();
    let at = format!("{path}.resources.claims");
    let container_name = &container.name;
    match clients.as_slice() {
        [] => return findings,
        [(claim, requests, one_gpu)] => {
            if requests.len() > 1 && !one_gpu {
                let requests = requests.iter().cloned().collect::<Vec<_>>().join(" and ");
                findings.push(Finding::error(
                    at,
                    format!(
                        "container {container_name} uses the MPS requests {requests} of claim {claim}, but \
                         a container can use only one MPS control daemon; add the constraint matchAttribute \
                         gpu.divvy.dev/uuid to the claim, or use each request in its own container"
                    ),
                ));
            }
        }
        several => {
            let names = several.iter().map(|(claim, ..)| claim.clone()).collect::<Vec<_>>().join(" and ");
            findings.push(Finding::error(
                at,
                format!(
                    "container {container_name} uses MPS requests of the claims {names}, but a container \
                     can use only one MPS control daemon; use each claim in its own container"
                ),
            ));
        }
    }
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let place = normalize(&mount.mount_path);
        if ["/dev/shm", CONTAINER_PIPE].contains(&place.as_str()) {
            findings.push(Finding::error(
                format!("{path}.volumeMounts[{index}].mountPath"),
                format!(
                    "container {container_name} uses MPS and mounts a volume at {place}, which MPS clients \
                     and their control daemon need; remove the volume"
                ),
            ));
        }
    }
    findings
}
