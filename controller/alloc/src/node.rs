//! Whether a slice or a device is available to a node.

use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};

/// Evaluates the three ways to select nodes, of which exactly one is set.
pub(crate) fn targets(
    node: &Node,
    name: Option<&str>,
    all: Option<bool>,
    selector: Option<&NodeSelector>,
) -> bool {
    match (name.filter(|name| !name.is_empty()), selector) {
        (Some(name), _) => node.metadata.name.as_deref() == Some(name),
        (None, Some(selector)) => selector.node_selector_terms.iter().any(|term| matches_term(node, term)),
        (None, None) => all == Some(true),
    }
}

/// Whether all requirements of a term hold. A term without requirements matches nothing.
fn matches_term(node: &Node, term: &NodeSelectorTerm) -> bool {
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let labels = term.match_expressions.as_deref().unwrap_or_default();
    let field = |key: &str| if key == "metadata.name" { node.metadata.name.as_deref() } else { None };
    let label =
        |key: &str| node.metadata.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
    (!fields.is_empty() || !labels.is_empty())
        && fields.iter().all(|requirement| holds(requirement, field(&requirement.key)))
        && labels.iter().all(|requirement| holds(requirement, label(&requirement.key)))
}

fn holds(requirement: &NodeSelectorRequirement, found: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let is_in = |found: &str| values.iter().any(|value| value == found);
    let numbers = || Some((found?.parse::<i64>().ok()?, values.first()?.parse::<i64>().ok()?));
    match requirement.operator.as_str() {
        "In" => found.is_some_and(is_in),
        "NotIn" => !found.is_some_and(is_in),
        "Exists" => found.is_some(),
        "DoesNotExist" => found.is_none(),
        "Gt" => numbers().is_some_and(|(found, bound)| found > bound),
        "Lt" => numbers().is_some_and(|(found, bound)| found < bound),
        _ => false,
    }
}
