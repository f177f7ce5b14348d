//! Plans the writes from the existing slices to the desired ones. Pure.
//!
//! The scheduler uses only the highest generation of a pool, and only if it is complete. Slices
//! are named by index (`00003-...`); other slices are deleted. A change of one slice keeps the
//! generation. Any other change rewrites all slices with a new generation, so a scheduler never
//! sees a mixture. Changes of metadata keep the generation too. Deletes come first, then updates, then
//! creates, which complete the pool.

use crate::compare;
use crate::kinds;
use crate::pool::{PoolOptions, Support, pool};
use crate::slices::slices;
use crate::wire::{Content, Slice};
use divvy_api::names::DRIVER;
use divvy_model::Inventory;
use divvy_model::closing::MODES_OFF;
use k8s_openapi::api::resource::v1::{ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use std::collections::BTreeMap;

/// The owner of the slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub driver: String,
    /// Name of the Node and of the pool.
    pub node: String,
    /// UID of the Node object, which owns the slices.
    pub node_uid: String,
}

/// The desired state of the server.
#[derive(Clone, Debug)]
pub struct Desired<'a> {
    pub owner: &'a Owner,
    /// Contents in the order of the slice names. Owned, so the writes need no copies.
    pub contents: Vec<Content>,
    /// Value of the annotation [`MODES_OFF`] of the first slice.
    pub modes_off: Option<String>,
    /// The highest generation that was ever used, even if its slices are gone.
    pub used_generation: i64,
    /// Whether slices get the annotation of their kinds. False on a server that drops it.
    pub annotate: bool,
}

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// With UID and resource version as preconditions.
    Delete(Box<ResourceSlice>),
    /// With the resource version that was read.
    Update {
        index: usize,
        slice: Box<Slice>,
    },
    Create {
        index: usize,
        slice: Box<Slice>,
    },
}

/// Plans the writes in the order of execution.
pub fn plan<'a>(desired: Desired<'_>, there: impl IntoIterator<Item = &'a ResourceSlice>) -> Vec<Action> {
    let (owner, used_generation, annotate) = (desired.owner, desired.used_generation, desired.annotate);
    let mut there: Vec<&ResourceSlice> = there.into_iter().collect();
    there.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let ours = |slice: &&&ResourceSlice| slice.spec.pool.name == owner.node;
    let newest = there.iter().filter(ours).map(|slice| slice.spec.pool.generation).max().unwrap_or(0);

    let count = desired.contents.len();
    let mut kept: BTreeMap<usize, &ResourceSlice> = BTreeMap::new();
    let mut actions = Vec::new();
    for slice in &there {
        let current = slice.spec.pool.name == owner.node && slice.spec.pool.generation == newest;
        let index = slice.metadata.name.as_deref().and_then(|name| decode_index(name, count));
        match index {
            Some(index) if current && !kept.contains_key(&index) => drop(kept.insert(index, *slice)),
            _ => actions.push(Action::Delete(Box::new((*slice).clone()))),
        }
    }

    let mut pool = ResourcePool {
        name: owner.node.clone(),
        generation: newest,
        resource_slice_count: i64::try_from(count).unwrap_or(i64::MAX),
    };
    let annotation = |index: usize| desired.modes_off.as_deref().filter(|_| index == 0);
    let differs = |(index, have): &(&usize, &&ResourceSlice)| {
        !same_spec(&have.spec, owner, &pool, &desired.contents[**index])
            || modes_off(&have.metadata) != annotation(**index)
    };
    let changed: Vec<usize> = kept.iter().filter(differs).map(|(index, _)| *index).collect();
    let in_place = kept.len() == count && changed.len() <= 1;
    if !in_place {
        pool.generation = newest.max(used_generation) + 1;
    }

    let (mut updates, mut creations) = (Vec::new(), Vec::new());
    for (index, content) in desired.contents.into_iter().enumerate() {
        let have = kept.get(&index);
        let kinds = annotate.then(|| kinds::of_content(&content));
        let annotated =
            |have: &ResourceSlice| kinds.is_none() || kinds::annotation(&have.metadata) == kinds.as_deref();
        if in_place
            && !changed.contains(&index)
            && have.is_some_and(|have| owned(have, owner) && annotated(have))
        {
            continue;
        }
        let generated = || ObjectMeta {
            generate_name: Some(format!("{}-{}-{}-", encode_index(index, count), owner.driver, owner.node)),
            ..ObjectMeta::default()
        };
        let mut metadata = have.map_or_else(generated, |have| have.metadata.clone());
        metadata.owner_references = Some(vec![owner_reference(owner)]);
        let annotations = metadata.annotations.get_or_insert_default();
        annotate_with(annotations, kinds::ANNOTATION, kinds);
        annotate_with(annotations, MODES_OFF, desired.modes_off.clone().filter(|_| index == 0));
        metadata.annotations = metadata.annotations.take().filter(|annotations| !annotations.is_empty());
        let (driver, node, pool) = (owner.driver.clone(), owner.node.clone(), pool.clone());
        let slice = Box::new(Slice { metadata, driver, node, pool, content });
        match have {
            Some(_) => updates.push(Action::Update { index, slice }),
            None => creations.push(Action::Create { index, slice }),
        }
    }
    actions.into_iter().chain(updates).chain(creations).collect()
}

/// The first slices of a node without claims, for programs that simulate nodes. They have names,
/// and no owner, because there is no Node object.
pub fn slices_of_new_node(node: &str, inventory: &Inventory, support: Support) -> Vec<Slice> {
    let contents = slices(pool(inventory, &PoolOptions { support, ..PoolOptions::default() }));
    let count = contents.len();
    let pool = ResourcePool {
        name: node.to_owned(),
        generation: 1,
        resource_slice_count: i64::try_from(count).unwrap_or(i64::MAX),
    };
    let slice = |(index, content)| Slice {
        metadata: ObjectMeta {
            name: Some(format!("{}-{DRIVER}-{node}", encode_index(index, count))),
            ..ObjectMeta::default()
        },
        driver: DRIVER.to_owned(),
        node: node.to_owned(),
        pool: pool.clone(),
        content,
    };
    contents.into_iter().enumerate().map(slice).collect()
}

/// Whether a slice equals the desired content, generation included.
fn same_spec(have: &ResourceSliceSpec, owner: &Owner, pool: &ResourcePool, want: &Content) -> bool {
    have.pool == *pool
        && have.node_name.as_ref() == Some(&owner.node)
        && have.node_selector.is_none()
        && have.all_nodes.is_none()
        && have.per_device_node_selection.is_none()
        && have.partition_type_attribute.is_none()
        && have.skip_node_operations.is_none()
        && compare::same(&compare::content(have), want)
}

/// Sets an annotation, or removes it.
fn annotate_with(annotations: &mut BTreeMap<String, String>, name: &str, value: Option<String>) {
    match value {
        Some(value) => drop(annotations.insert(name.to_owned(), value)),
        None => drop(annotations.remove(name)),
    }
}

/// The value of the annotation [`MODES_OFF`].
pub(crate) fn modes_off(metadata: &ObjectMeta) -> Option<&str> {
    metadata.annotations.as_ref()?.get(MODES_OFF).map(String::as_str)
}

fn owned(slice: &ResourceSlice, owner: &Owner) -> bool {
    slice.metadata.owner_references.as_deref() == Some(&[owner_reference(owner)])
}

fn owner_reference(owner: &Owner) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: owner.node.clone(),
        uid: owner.node_uid.clone(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

/// Number of hexadecimal digits of an index in slice names: at least five.
fn index_width(count: usize) -> usize {
    format!("{:x}", count.saturating_sub(1)).len().max(5)
}

fn encode_index(index: usize, count: usize) -> String {
    format!("{index:0width$x}", width = index_width(count))
}

/// Parses the index of a slice name. `None` if its width is wrong or it is not below `count`.
fn decode_index(name: &str, count: usize) -> Option<usize> {
    let (digits, _) = name.split_once('-')?;
    let plain = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if digits.len() != index_width(count) || !digits.bytes().all(plain) {
        return None;
    }
    usize::from_str_radix(digits, 16).ok().filter(|index| *index < count)
}
