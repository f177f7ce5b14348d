//! The managed DeviceClasses: planning and reconciliation.

pub mod plan;
pub mod reconciler;

pub use plan::{Classes, MANAGED_BY, is_ours};
pub use reconciler::ClassReconciler;
