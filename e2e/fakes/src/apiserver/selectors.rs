//! Field and label selectors: `a=b`, `a==b`, `a!=b`, and for labels also `a`, `!a`, `a in (x,y)`,
//! `a notin (x,y)`.
//!
//! A selector on a field that the resource does not index is rejected with 400, as by the real server.

use super::kinds::Kind;
use super::status::Failure;
use serde_json::Value;

/// The selectors of a list or a watch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection {
    pub(crate) namespace: Option<String>,
    requirements: Vec<Requirement>,
}

#[derive(Clone, Debug)]
struct Requirement {
    source: Source,
    wanted: bool,
    values: Option<Vec<String>>,
}

#[derive(Clone, Debug)]
enum Source {
    /// A JSON pointer.
    Field(String),
    Label(String),
}

impl Selection {
    pub(crate) fn parse(
        kind: &Kind,
        namespace: Option<String>,
        fields: &str,
        labels: &str,
    ) -> Result<Self, Failure> {
        let mut requirements = Vec::new();
        for term in fields.split(',').filter(|term| !term.is_empty()) {
            let (path, wanted, value) = equation(term)
                .ok_or_else(|| Failure::bad_request(format!("invalid field selector {term:?}")))?;
            let known = path == "metadata.name" || (kind.namespaced && path == "metadata.namespace");
            if !known && !kind.fields.contains(&path) {
                return Err(Failure::bad_request(format!("field label not supported: {path}")));
            }
            let pointer = format!("/{}", path.replace('.', "/"));
            requirements.push(Requirement {
                source: Source::Field(pointer),
                wanted,
                values: Some(vec![value.to_owned()]),
            });
        }
        for term in split_labels(labels) {
            requirements.push(label(term.trim()));
        }
        Ok(Self { namespace, requirements })
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let namespace = object["metadata"]["namespace"].as_str();
        if self.namespace.is_some() && self.namespace.as_deref() != namespace {
            return false;
        }
        self.requirements.iter().all(|requirement| requirement.matches(object))
    }
}

impl Requirement {
    fn matches(&self, object: &Value) -> bool {
        let found = match &self.source {
            // A missing field counts as the empty string.
            Source::Field(pointer) => Some(match object.pointer(pointer) {
                Some(Value::String(text)) => text.clone(),
                Some(Value::Null) | None => String::new(),
                Some(other) => other.to_string(),
            }),
            Source::Label(key) => object["metadata"]["labels"][key].as_str().map(str::to_owned),
        };
        let holds = match (&self.values, &found) {
            (None, found) => found.is_some(),
            (Some(values), Some(found)) => values.contains(found),
            (Some(_), None) => false,
        };
        holds == self.wanted
    }
}

fn equation(term: &str) -> Option<(&str, bool, &str)> {
    if let Some((path, value)) = term.split_once("!=") {
        return Some((path.trim(), false, value.trim()));
    }
    let (path, value) = term.split_once("==").or_else(|| term.split_once('='))?;
    Some((path.trim(), true, value.trim()))
}

/// Splits at commas outside parentheses.
fn split_labels(labels: &str) -> Vec<&str> {
    let mut depth = 0;
    labels
        .split(|c| {
            match c {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            c == ',' && depth == 0
        })
        .filter(|term| !term.trim().is_empty())
        .collect()
}

fn label(term: &str) -> Requirement {
    let set = |key: &str, wanted, list: &str| Requirement {
        source: Source::Label(key.trim().to_owned()),
        wanted,
        values: Some(list.trim_matches(['(', ')', ' ']).split(',').map(|v| v.trim().to_owned()).collect()),
    };
    if let Some((key, list)) = term.split_once(" notin ") {
        return set(key, false, list);
    }
    if let Some((key, list)) = term.split_once(" in ") {
        return set(key, true, list);
    }
    if let Some((key, wanted, value)) = equation(term) {
        return set(key, wanted, value);
    }
    let (key, wanted) = term.strip_prefix('!').map_or((term, true), |key| (key, false));
    Requirement { source: Source::Label(key.to_owned()), wanted, values: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(plural: &str, fields: &str, labels: &str, expected: bool) {
        let kind = Kind::find("resource.k8s.io", "v1", plural).unwrap();
        let object = json!({
            "metadata": {"name": "a", "labels": {"tier": "gold"}},
            "spec": {"driver": "gpu.divvy.dev", "nodeName": "n1"},
        });
        let selection = Selection::parse(kind, None, fields, labels).unwrap();
        assert_eq!(selection.matches(&object), expected, "fields {fields:?} labels {labels:?}");
    }

    #[test]
    fn selectors_match_as_on_a_real_server() {
        check("resourceslices", "", "", true);
        check("resourceslices", "spec.driver=gpu.divvy.dev,spec.nodeName=n1", "", true);
        check("resourceslices", "spec.nodeName=n2", "", false);
        check("resourceslices", "spec.nodeName!=n2", "", true);
        check("resourceslices", "spec.pool.name=", "", true);
        check("resourceslices", "metadata.name==a", "tier=gold", true);
        check("resourceslices", "", "tier in (silver, gold),!old", true);
        check("resourceslices", "", "tier notin (silver,gold)", false);
        check("resourceslices", "", "old", false);
    }

    #[test]
    fn selector_on_unindexed_field_is_rejected() {
        let kind = Kind::find("resource.k8s.io", "v1", "resourceslices").unwrap();
        let refused = Selection::parse(kind, None, "spec.allNodes=true", "").unwrap_err();
        assert_eq!(refused.code, 400);
    }
}
