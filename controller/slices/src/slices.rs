//! Distributes a pool over ResourceSlices.

use crate::compare;
use crate::pool::{Pool, Support};
use crate::taints::{self, Cause};
use crate::validate::{COUNTER_SETS_MAX, DEVICES_WITH_COUNTERS_MAX};
use crate::wire::Content;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::collections::{BTreeMap, HashSet};

/// The contents of the slices of a pool, in the order of their names.
///
/// Counter sets and devices cannot share a slice. Counter sets come first, eight to a slice. Whole
/// GPUs and GPUs for shares follow, alternately. Then each GPU has a slice with its instances, so that
/// most changes of a GPU change one slice. GPUs for time-slices, for MPS and for observers are last. An
/// empty pool is one empty slice.
///
/// The scheduler takes the first device that fits, and evaluates the selectors of a claim on every
/// device before it that is free. So the kinds that are few and wanted often come first, and on a free
/// node a share needs two evaluations (with all whole GPUs before it, nine; `e2e/oracle/cost`). Whole
/// GPUs are taken from the last one on and divided GPUs from the first one on, so they meet as late as
/// possible. The cost: a taint on a GPU changes up to three slices, and thus the generation of the pool.
pub fn slices(pool: Pool) -> Vec<Content> {
    let (mut counters, mut instances) = (Vec::new(), Vec::new());
    let [mut whole, mut share, mut timeslice, mut mps, mut observer] = [const { Vec::new() }; 5];
    for gpu in pool.gpus {
        counters.extend(gpu.counters);
        instances.extend(chunks(gpu.instances, DEVICES_WITH_COUNTERS_MAX));
        whole.splice(0..0, gpu.whole);
        share.extend(gpu.share);
        timeslice.extend(gpu.timeslice);
        mps.extend(gpu.mps);
        observer.extend(gpu.observer);
    }
    timeslice.append(&mut mps);
    timeslice.append(&mut observer);
    let [first, last] =
        [alternate(whole, share), timeslice].map(|devices| chunks(devices, DEVICES_WITH_COUNTERS_MAX));
    let counters = chunks(counters, COUNTER_SETS_MAX);
    let mut contents: Vec<Content> =
        counters.into_iter().map(|counters| Content { counters, ..Content::default() }).collect();
    let devices = first.into_iter().chain(instances).chain(last);
    contents.extend(devices.map(|devices| Content { devices, ..Content::default() }));
    if contents.is_empty() {
        contents.push(Content::default());
    }
    contents
}

/// The published contents with a taint on every device, for a node whose GPU driver is gone.
/// Claims may still hold the devices: an unpublished device does not consume counters, so its GPU
/// could be allocated twice.
pub fn without_driver<'a>(
    published: impl IntoIterator<Item = &'a ResourceSlice>,
    support: Support,
) -> Vec<Content> {
    let mut contents = as_published(published);
    for device in contents.iter_mut().flat_map(|content| &mut content.devices).filter(|_| support.taints) {
        taints::add(device.taints.get_or_insert_default(), &Cause::NoDriver);
    }
    contents
}

/// The published contents as they are.
pub(crate) fn as_published<'a>(published: impl IntoIterator<Item = &'a ResourceSlice>) -> Vec<Content> {
    // The pool may be between two generations; the newer definition of a name wins.
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
    if contents.is_empty() {
        contents.push(Content::default());
    }
    contents
}

/// One of each list in turn, then what remains of the longer list.
fn alternate<T>(one: Vec<T>, other: Vec<T>) -> Vec<T> {
    let mut all = Vec::with_capacity(one.len() + other.len());
    let (mut one, mut other) = (one.into_iter(), other.into_iter());
    loop {
        let before = all.len();
        all.extend(one.next());
        all.extend(other.next());
        if all.len() == before {
            return all;
        }
    }
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
