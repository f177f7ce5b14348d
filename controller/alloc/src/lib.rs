//! Offline allocation with the scheduler's semantics: the devices that a claim would get on a node,
//! or why it gets none. Pure, and bounded by a number of attempts.
//!
//! It follows the upstream structured allocator: first fit over pools, slices and devices as
//! published, with backtracking; counters, consumable capacity, taints, constraints, adminAccess
//! and CEL selectors. Where upstream fixed a bug, the fixed behaviour is followed. Features that are
//! off by default are refused (derived attributes) or ignored (compatibility groups, optional node
//! operations).

mod allocate;
mod allocations;
mod capacity;
mod cel;
mod class_selection;
mod constraint;
mod error;
mod explain;
mod node;
mod pool;
mod request;
mod result;
mod search;
mod stack;
mod taint;
mod view;

pub use allocate::allocate;
pub use class_selection::selected;
pub use error::{AllocationError, Obstacle, RequestFailure};
pub use view::ClusterView;
