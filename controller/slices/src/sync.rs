//! What is desired and what is there, to what is to be done. Pure.
//!
//! The pool on the server is a set of slices with one generation; the scheduler
//! believes only the highest, and only when it is complete. So:
//!
//! - slices are named by their index, `00003-...`; the first slice of the
//!   newest generation with an index is kept, every other is obsolete;
//! - one slice that changes is changed in place, in its generation: the pool is
//!   complete before and after;
//! - anything more (a slice to create, or two to change) is a new generation,
//!   and every slice that stays is rewritten with it: a scheduler sees the old
//!   pool, then no pool, then the new one, never a mixture;
//! - the order is delete, update, create: the pool is complete with the last call.

use crate::compare;
use crate::wire::{Content, Slice};
use k8s_openapi::api::resource::v1::{ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use std::collections::BTreeMap;

/// Whose slices they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub driver: String,
    /// Name of the Node and of the pool.
    pub node: String,
    /// UID of the Node object, which owns the slices.
    pub node_uid: String,
}

/// What should be on the server.
#[derive(Clone, Debug)]
pub struct Desired<'a> {
    pub owner: &'a Owner,
    /// In the order of their names. Given away: the calls carry it, nothing is copied.
    pub contents: Vec<Content>,
    /// Generations up to this one were used before, whatever is there now.
    pub used_generation: i64,
}

/// One call.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// With UID and version as preconditions.
    Delete(Box<ResourceSlice>),
    /// With the version that was read.
    Update {
        index: usize,
        slice: Box<Slice>,
    },
    Create {
        index: usize,
        slice: Box<Slice>,
    },
}

/// The calls that lead from what is there to what is desired, in their order.
pub fn plan<'a>(desired: Desired<'_>, there: impl IntoIterator<Item = &'a ResourceSlice>) -> Vec<Action> {
    let (owner, used_generation) = (desired.owner, desired.used_generation);
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
    let differs = |(index, have): &(&usize, &&ResourceSlice)| {
        !same_spec(&have.spec, owner, &pool, &desired.contents[**index])
    };
    let changed: Vec<usize> = kept.iter().filter(differs).map(|(index, _)| *index).collect();
    let in_place = kept.len() == count && changed.len() <= 1;
    if !in_place {
        pool.generation = newest.max(used_generation) + 1;
    }

    let (mut updates, mut creations) = (Vec::new(), Vec::new());
    for (index, content) in desired.contents.into_iter().enumerate() {
        let have = kept.get(&index);
        if in_place && !changed.contains(&index) && have.is_some_and(|have| owned(have, owner)) {
            continue;
        }
        let generated = || ObjectMeta {
            generate_name: Some(format!("{}-{}-{}-", encode_index(index, count), owner.driver, owner.node)),
            ..ObjectMeta::default()
        };
        let mut metadata = have.map_or_else(generated, |have| have.metadata.clone());
        metadata.owner_references = Some(vec![owner_reference(owner)]);
        let (driver, node, pool) = (owner.driver.clone(), owner.node.clone(), pool.clone());
        let slice = Box::new(Slice { metadata, driver, node, pool, content });
        match have {
            Some(_) => updates.push(Action::Update { index, slice }),
            None => creations.push(Action::Create { index, slice }),
        }
    }
    actions.into_iter().chain(updates).chain(creations).collect()
}

/// Whether a slice says what it should, generation included.
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

/// Digits of an index in names: five, or as many as the last index needs.
fn index_width(count: usize) -> usize {
    format!("{:x}", count.saturating_sub(1)).len().max(5)
}

fn encode_index(index: usize, count: usize) -> String {
    format!("{index:0width$x}", width = index_width(count))
}

/// The index in a name, if it has one of the right width and below `count`.
fn decode_index(name: &str, count: usize) -> Option<usize> {
    let (digits, _) = name.split_once('-')?;
    let plain = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if digits.len() != index_width(count) || !digits.bytes().all(plain) {
        return None;
    }
    usize::from_str_radix(digits, 16).ok().filter(|index| *index < count)
}
