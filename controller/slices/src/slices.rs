//! Pool to slices: what stands in which ResourceSlice, and in which order.
//!
//! Counter sets and devices never share a slice. First the counter sets, eight
//! to a slice; then one slice per GPU with its instances, so that a change of
//! one GPU is a change of one slice; then the whole GPUs and behind all of them
//! those for several claims, the last GPU first (why is told in the essay on
//! order). A pool without devices is one empty slice: the driver is here, and has
//! nothing.

use crate::compare;
use crate::pool::{Pool, Support};
use crate::taints::{self, Cause};
use crate::validate::{COUNTER_SETS, DEVICES_WITH_COUNTERS};
use crate::wire::Content;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::collections::{BTreeMap, HashSet};

/// The contents of the slices of a pool, in the order of their names.
pub fn slices(pool: Pool) -> Vec<Content> {
    let (mut counters, mut instances) = (Vec::new(), Vec::new());
    let (mut whole, mut shared) = (Vec::new(), Vec::new());
    for gpu in pool.gpus {
        counters.extend(gpu.counters);
        instances.extend(chunks(gpu.instances, DEVICES_WITH_COUNTERS));
        whole.push(gpu.whole);
        shared.push(gpu.shared);
    }
    let of_whole_gpus = [whole, shared].into_iter().flat_map(|devices| devices.into_iter().rev()).flatten();
    let whole = chunks(of_whole_gpus.collect(), DEVICES_WITH_COUNTERS);
    let counters = chunks(counters, COUNTER_SETS);
    let mut contents: Vec<Content> =
        counters.into_iter().map(|counters| Content { counters, ..Content::default() }).collect();
    let devices = instances.into_iter().chain(whole);
    contents.extend(devices.map(|devices| Content { devices, ..Content::default() }));
    if contents.is_empty() {
        contents.push(Content::default());
    }
    contents
}

/// What is published stays while there is no GPU driver to ask, but for a taint
/// on every device: claims may hold them, and a device that is not published
/// costs nothing, so that a second claim could get the same GPU.
pub fn without_driver<'a>(
    published: impl IntoIterator<Item = &'a ResourceSlice>,
    support: Support,
) -> Vec<Content> {
    // A pool caught between two generations: the newer word on a name counts.
    let mut newest_first: Vec<&ResourceSlice> = published.into_iter().collect();
    newest_first.sort_by_key(|slice| std::cmp::Reverse(slice.spec.pool.generation));
    let (mut sets, mut devices) = (HashSet::new(), HashSet::new());
    let mut by_name: BTreeMap<Option<&str>, Content> = BTreeMap::new();
    for slice in newest_first {
        let mut content = compare::content(&slice.spec);
        content.counters.retain(|set| sets.insert(set.name.clone()));
        content.devices.retain(|device| devices.insert(device.name.clone()));
        if content != Content::default() {
            by_name.insert(slice.metadata.name.as_deref(), content);
        }
    }
    let mut contents: Vec<Content> = by_name.into_values().collect();
    for device in contents.iter_mut().flat_map(|content| &mut content.devices).filter(|_| support.taints) {
        taints::add(device.taints.get_or_insert_default(), &Cause::NoDriver);
    }
    if contents.is_empty() {
        contents.push(Content::default());
    }
    contents
}

fn chunks<T>(mut items: Vec<T>, most: usize) -> Vec<Vec<T>> {
    let mut chunks = Vec::new();
    while items.len() > most {
        let rest = items.split_off(most);
        chunks.push(std::mem::replace(&mut items, rest));
    }
    chunks.extend(Some(items).filter(|items| !items.is_empty()));
    chunks
}
