//! ResourceClaimTemplates of pods with requests of another GPU scheduler.
//!
//! The webhook names a template by a hash of the request, and writes the request into an annotation
//! of the pod. The leader creates the template in the pod's namespace, and deletes it after the
//! hold-off when no pod names it any more.

mod plan;
mod reconciler;
mod record;

pub use plan::{Holder, Plan, TemplateKey, plan};
pub use reconciler::TemplateReconciler;
pub use record::{PORTED_LABEL, REQUESTS_ANNOTATION, Record, is_managed, template_name};
