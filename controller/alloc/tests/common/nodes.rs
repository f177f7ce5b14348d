//! Clusters of one node with the published slices of its GPUs, and typical claims for the classes
//! of the chart.
#![allow(dead_code, reason = "each test uses only a part")]

use crate::common::{Cluster, NODE, claim, class, pool_of, select, slice, with};
use divvy_api::sharing::Mode;
use divvy_model::{ClosingId, Inventory};
use divvy_slices::{Pool, PoolOptions, pool, pool_without_counters, slices};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The slices of the node, and a class for each type of device. Modes that are off are closing.
pub(crate) fn published(node: &Inventory) -> Cluster {
    cluster(pool(node, &closing(node)))
}

fn closing(node: &Inventory) -> PoolOptions {
    let all = node.gpus.iter().flat_map(|gpu| Mode::ALL.map(|mode| ((gpu.number, mode), ClosingId(1))));
    PoolOptions { closings: all.collect(), ..PoolOptions::default() }
}

/// The same without counters, while these devices are held.
pub(crate) fn published_without_counters(node: &Inventory, held: &BTreeSet<String>) -> Cluster {
    cluster(pool_without_counters(node, &closing(node), held))
}

fn cluster(pool: Pool) -> Cluster {
    let contents = slices(pool);
    let count = contents.len() as i64;
    let wire: Vec<_> = contents
        .into_iter()
        .enumerate()
        .map(|(index, content)| {
            let some = |list: Value| if list == json!([]) { Value::Null } else { list };
            let spec = json!({
                "pool": pool_of(count, 1, NODE),
                "sharedCounters": some(json!(content.counters)),
                "devices": some(json!(content.devices)),
            });
            slice(&format!("slice-{index:03}"), NODE, spec)
        })
        .collect();
    let types = [
        ("gpu.divvy.dev", "gpu"),
        (SHARE, "share"),
        ("mig.divvy.dev", "mig"),
        (TIMESLICE, "timeslice"),
        (MPS, "mps"),
        ("observer.divvy.dev", "observer"),
    ];
    types.into_iter().fold(Cluster::new(&wire, &[]), |cluster, (name, kind)| {
        let own = "device.driver == 'gpu.divvy.dev'";
        cluster
            .class(class(name, &[&format!("{own} && device.attributes['gpu.divvy.dev'].type == '{kind}'")]))
    })
}

pub(crate) const SHARE: &str = "share.divvy.dev";
pub(crate) const TIMESLICE: &str = "timeslice.divvy.dev";
pub(crate) const MPS: &str = "mps.divvy.dev";

pub(crate) fn gpus_wanted(count: i64) -> Value {
    json!({"name": "r", "exactly": {"deviceClassName": "gpu.divvy.dev", "count": count}})
}

pub(crate) fn mig_wanted(profile: &str) -> Value {
    let selector = select(&format!("device.attributes['gpu.divvy.dev'].profile == '{profile}'"));
    json!({"name": "r", "exactly": with(selector, json!({"deviceClassName": "mig.divvy.dev"}))})
}

/// A request for a device of a class, with these capacities.
pub(crate) fn share_wanted(class: &str, capacities: &[(&str, &str)]) -> Value {
    let request = json!({"name": "r", "exactly": {"deviceClassName": class}});
    if capacities.is_empty() { request } else { of(request, capacities) }
}

/// Adds capacities to a request.
pub(crate) fn of(mut request: Value, capacities: &[(&str, &str)]) -> Value {
    let requests: serde_json::Map<_, _> =
        capacities.iter().map(|(name, amount)| ((*name).to_owned(), json!(amount))).collect();
    request["exactly"]["capacity"] = json!({"requests": requests});
    request
}

/// Renames a request.
pub(crate) fn named(name: &str, request: Value) -> Value {
    with(request, json!({"name": name}))
}

pub(crate) fn wanting(request: Value) -> Value {
    claim(json!({"requests": [request]}))
}
