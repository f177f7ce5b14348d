//! Offline allocation with the scheduler's semantics: the devices that the claims of a pod would
//! get on a node, or why they get none. Pure, and bounded by a number of steps.
//!
//! It follows the upstream structured allocator of a [`Release`] with its default features: first
//! fit over pools, slices and devices as published, with backtracking. Features that are off by
//! default are refused (derived attributes, constraints on lists) or, as upstream does, skipped with
//! their pool (compatibility groups).

mod allocate;
mod allocations;
mod capacity;
mod cel;
mod class_selection;
mod constraint;
mod error;
mod explain;
mod names;
mod node;
mod pool;
mod release;
mod request;
mod result;
mod search;
mod selectors;
mod stack;
mod taint;
mod view;

pub use allocate::{allocate, allocate_pod};
pub use cel::types::check_selector;
pub use class_selection::selected;
pub use error::{AllocationError, Obstacle, RequestFailure};
pub use release::Release;
pub use view::ClusterView;
