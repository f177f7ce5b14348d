//! Builds the claim's `status.allocation` as the scheduler writes it.

use crate::pool::{Candidate, Pools};
use crate::request::{Alternative, ParsedClaim};
use crate::search::Pick;
use crate::view::ClusterView;
use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceAllocationResult, DeviceRequestAllocationResult,
    ResourceClaim,
};
use std::collections::BTreeMap;

/// The allocation result. Share IDs are left blank.
pub(crate) fn write<'a>(
    cluster: &ClusterView<'_>,
    claim: &ResourceClaim,
    parsed: &ParsedClaim<'a>,
    pools: &Pools<'a>,
    picks: &[Pick],
) -> AllocationResult {
    let of = |pick: &Pick| {
        let slot = pick.slot;
        (&parsed.requests[slot.request].alternatives[slot.alternative], &pools.devices[pick.device])
    };
    let results = picks
        .iter()
        .map(|pick| {
            let (request, device) = of(pick);
            result(request, device, pick)
        })
        .collect();
    let mut chosen: BTreeMap<usize, &Alternative<'a>> = BTreeMap::new();
    for pick in picks {
        chosen.insert(pick.slot.request, of(pick).0);
    }
    let chosen: Vec<_> = chosen.into_values().collect();
    let config = configs(claim, &chosen);
    AllocationResult {
        devices: Some(DeviceAllocationResult {
            results: Some(results),
            config: Some(config).filter(|config| !config.is_empty()),
        }),
        node_selector: node_selector(cluster.node, picks.iter().map(|pick| of(pick).1)),
        ..Default::default()
    }
}

fn result(request: &Alternative<'_>, device: &Candidate<'_>, pick: &Pick) -> DeviceRequestAllocationResult {
    let names = || device.capacity.values().map(|capacity| capacity.name.to_owned());
    let consumed = pick.share.as_ref().filter(|share| !share.is_empty());
    let consumed = consumed.map(|share| names().zip(share.iter().map(|sum| (*sum).into())).collect());
    DeviceRequestAllocationResult {
        request: request.name.clone(),
        driver: device.key.driver.to_owned(),
        pool: device.key.pool.to_owned(),
        device: device.key.device.to_owned(),
        admin_access: request.admin.then_some(true),
        tolerations: Some(request.tolerations.to_vec()).filter(|tolerations| !tolerations.is_empty()),
        share_id: pick.share.as_ref().map(|_| String::new()),
        consumed_capacity: consumed,
        binding_conditions: device.wire.binding_conditions.clone(),
        binding_failure_conditions: device.wire.binding_failure_conditions.clone(),
        ..Default::default()
    }
}

/// The configurations of each class once, then those of the claim for the chosen requests. A
/// configuration for all requests names none.
fn configs(claim: &ResourceClaim, chosen: &[&Alternative<'_>]) -> Vec<DeviceAllocationConfiguration> {
    let mut configs = Vec::new();
    let mut classes: Vec<&str> = Vec::new();
    for request in chosen {
        let class = request.class.metadata.name.as_deref().unwrap_or_default();
        if classes.contains(&class) {
            continue;
        }
        classes.push(class);
        let same = chosen.iter().filter(|other| other.class.metadata.name == request.class.metadata.name);
        let requests: Vec<_> = same.map(|other| other.name.clone()).collect();
        for config in request.class.spec.iter().flat_map(|spec| spec.config.iter().flatten()) {
            let (source, requests) = ("FromClass".to_owned(), Some(requests.clone()));
            configs.push(DeviceAllocationConfiguration { source, requests, opaque: config.opaque.clone() });
        }
    }
    let names = |requests: &[String], request: &Alternative<'_>| {
        requests.iter().any(|name| *name == request.name || *name == request.base)
    };
    let of_claim = claim.spec.iter().flat_map(|spec| spec.devices.iter());
    for config in of_claim.flat_map(|devices| devices.config.iter().flatten()) {
        let requests = config.requests.clone().unwrap_or_default();
        if requests.is_empty() || chosen.iter().any(|request| names(&requests, request)) {
            let source = "FromClaim".to_owned();
            configs.push(DeviceAllocationConfiguration {
                source,
                requests: Some(requests),
                opaque: config.opaque.clone(),
            });
        }
    }
    for config in &mut configs {
        config.requests =
            config.requests.take().filter(|requests| !chosen.iter().all(|request| names(requests, request)));
        config.requests = config.requests.take().filter(|requests| !requests.is_empty());
    }
    configs
}

/// The nodes of the pod: this node if any device is local to it, otherwise the devices' selectors.
fn node_selector<'b>(node: &Node, devices: impl Iterator<Item = &'b Candidate<'b>>) -> Option<NodeSelector> {
    let mut term = NodeSelectorTerm::default();
    for device in devices {
        let (name, selector) = match device.slice.spec.per_device_node_selection {
            Some(true) => (&device.wire.node_name, &device.wire.node_selector),
            _ => (&device.slice.spec.node_name, &device.slice.spec.node_selector),
        };
        if name.is_some() || device.wire.binds_to_node == Some(true) {
            let here = NodeSelectorRequirement {
                key: "metadata.name".to_owned(),
                operator: "In".to_owned(),
                values: node.metadata.name.clone().map(|name| vec![name]),
            };
            let term = NodeSelectorTerm { match_fields: Some(vec![here]), match_expressions: None };
            return Some(NodeSelector { node_selector_terms: vec![term] });
        }
        for wanted in selector.iter().flat_map(|selector| selector.node_selector_terms.iter().take(1)) {
            extend(&mut term.match_fields, &wanted.match_fields);
            extend(&mut term.match_expressions, &wanted.match_expressions);
        }
    }
    let some = term.match_fields.is_some() || term.match_expressions.is_some();
    some.then(|| NodeSelector { node_selector_terms: vec![term] })
}

fn extend(into: &mut Option<Vec<NodeSelectorRequirement>>, from: &Option<Vec<NodeSelectorRequirement>>) {
    for requirement in from.iter().flatten() {
        let have = into.get_or_insert_default();
        if !have.contains(requirement) {
            have.push(requirement.clone());
        }
    }
}
