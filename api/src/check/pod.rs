//! Pods together with their claims: what a container can reach.
//!
//! A CUDA process finds its MPS control daemon through one environment variable
//! and one directory, and talks to it through /dev/shm. So a container has one
//! daemon at most, and nothing of its own may lie over what it is given. A claim
//! does not know its containers, so prepare cannot see this.
//!
//! A pod of extended resources has no claims when it is admitted: the scheduler
//! makes its claim later, and no class of theirs stands for MPS.

use super::claim::{self, Ask};
use super::mounts::{self, plain};
use super::{Finding, World};
use crate::mps::CONTAINER_PIPE;
use crate::sharing::Mode;
use k8s_openapi::api::core::v1::{Container, Pod, PodResourceClaim, PodSpec};
use k8s_openapi::api::resource::v1::DeviceClaim;
use std::collections::{BTreeMap, BTreeSet};

/// Checks how the pod's containers use its claims.
pub(super) fn check(pod: &Pod, world: &dyn World) -> Vec<Finding> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let found = spec.resource_claims.iter().flatten().filter_map(|named| {
        let devices = devices(named, namespace, world)?;
        Some((named.name.as_str(), devices))
    });
    let claims: BTreeMap<&str, DeviceClaim> = found.collect();
    let containers = containers(spec);
    let mut findings: Vec<_> = containers
        .iter()
        .flat_map(|(path, container)| of_container(container, path, &claims, world))
        .collect();
    // A claim that is not known yet may turn out to be for a share.
    let may_share = |named: &&PodResourceClaim| {
        claims.get(named.name.as_str()).is_none_or(|devices| claim::has_share(devices, world))
    };
    findings.extend(containers.iter().flat_map(|(path, container)| unnamed_part(container, path, world)));
    let shares = spec.resource_claims.iter().flatten().filter(may_share).map(|named| named.name.as_str());
    findings.extend(mounts::check(spec, &containers, &shares.collect()));
    findings
}

/// What every DeviceClass can be asked for by, in a container's limits.
const BY_CLASS: &str = "deviceclass.resource.kubernetes.io/";

/// An extended resource names no part of anything.
fn unnamed_part(container: &Container, path: &str, world: &dyn World) -> Vec<Finding> {
    let limits = container.resources.iter().flat_map(|resources| resources.limits.iter().flatten());
    let part = |name: &&String| {
        name.strip_prefix(BY_CLASS).and_then(|class| world.class(class)).is_some_and(|class| class.part)
    };
    let message = |name: &String| {
        let message = format!(
            "{name} names no part, and its DeviceClass is for a part of a GPU; ask for it in a ResourceClaim"
        );
        Finding::error(format!("{path}.resources.limits[{name}]"), message)
    };
    limits.map(|(name, _)| name).filter(part).map(message).collect()
}

fn devices(named: &PodResourceClaim, namespace: &str, world: &dyn World) -> Option<DeviceClaim> {
    match (&named.resource_claim_name, &named.resource_claim_template_name) {
        (Some(name), _) => world.claim(namespace, name),
        (None, Some(name)) => world.template(namespace, name),
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
    world: &dyn World,
) -> Vec<Finding> {
    let mut used: BTreeMap<&str, BTreeSet<Option<&str>>> = BTreeMap::new();
    for named in container.resources.iter().flat_map(|resources| resources.claims.iter().flatten()) {
        used.entry(&named.name).or_default().insert(named.request.as_deref().filter(|name| !name.is_empty()));
    }
    // Its name, its requests (alternatives count as the request they stand for)
    // and whether their devices are on one GPU.
    let of_claim = |(name, devices): (&&str, &DeviceClaim)| {
        let requests = used.get(name)?;
        let reached = |ask: &Ask<'_>| requests.contains(&None) || requests.contains(&Some(ask.base));
        let asks = claim::asks(devices, "", world);
        let mps: Vec<_> = asks.iter().filter(|ask| reached(ask) && claim::is_mps(devices, ask)).collect();
        let requests: BTreeSet<_> = mps.iter().map(|ask| ask.base.to_owned()).collect();
        let shared = mps.iter().all(|ask| ask.modes == [Mode::Mps].into());
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
                        "container {container_name} uses the MPS requests {requests} of claim {claim}, and a container reaches one MPS control daemon only; add the constraint matchAttribute gpu.divvy.dev/uuid to the claim, or give each request a container of its own"
                    ),
                ));
            }
        }
        several => {
            let names = several.iter().map(|(claim, ..)| claim.clone()).collect::<Vec<_>>().join(" and ");
            findings.push(Finding::error(
                at,
                format!(
                    "container {container_name} uses MPS requests of the claims {names}, and a container reaches one MPS control daemon only; give each claim a container of its own"
                ),
            ));
        }
    }
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let place = plain(&mount.mount_path);
        if ["/dev/shm", CONTAINER_PIPE].contains(&place.as_str()) {
            findings.push(Finding::error(
                format!("{path}.volumeMounts[{index}].mountPath"),
                format!(
                    "container {container_name} uses MPS and mounts a volume at {place}, where clients and MPS control daemon meet; remove the volume"
                ),
            ));
        }
    }
    findings
}
