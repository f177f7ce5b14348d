//! The values of the chart that fit a cluster: only those that differ from the defaults. Pure.

use super::checks::{CLOUD_LABELS, NODE_LABELS, is_openshift};
use super::facts::Facts;
use serde_json::{Value, json};

/// A values file, with the reason above each value.
pub(super) fn values(facts: &Facts, driver_root: &str) -> String {
    let mut text = format!("# Values of the Divvy chart for a cluster of Kubernetes {}.\n", facts.version);
    let mut add = |why: &str, name: &str, value: Value| {
        text += &format!("# {why}\n{name}: {value}\n");
    };
    if driver_root != "/" {
        add("The root of the GPU driver on the nodes.", "nvidiaDriverRoot", driver_root.into());
    }
    let keys: Vec<&str> = CLOUD_LABELS
        .into_iter()
        .filter(|key| facts.nodes.iter().any(|node| node.labels.contains_key(*key)))
        .collect();
    if !keys.is_empty() {
        let term = |expression: Value| json!({"matchExpressions": [expression]});
        let known = NODE_LABELS
            .iter()
            .map(|(key, value)| term(json!({"key": key, "operator": "In", "values": [value]})));
        let cloud = keys.iter().map(|key| term(json!({"key": key, "operator": "Exists"})));
        let terms: Vec<Value> = known.chain(cloud).collect();
        let required = json!({"nodeSelectorTerms": terms});
        let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}});
        add(
            "The labels of GPU nodes, with those of the cloud provider.",
            "kubeletPlugin",
            json!({"affinity": affinity}),
        );
    }
    if is_openshift(facts) {
        let value = json!({"securityContextConstraints": true});
        add("The pods on GPU nodes are privileged.", "openshift", value);
    }
    if facts.apis.iter().any(|api| api.starts_with("monitoring.coreos.com/")) {
        add("The Prometheus operator is installed.", "podMonitor", json!({"enabled": true}));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::facts::NodeFacts;

    #[test]
    fn values_hold_only_what_differs_from_the_defaults() {
        let check = |facts: &Facts, root: &str, expected: &[&str]| {
            let values: Option<Value> = serde_norway::from_str(&values(facts, root)).unwrap();
            let values = values.unwrap_or_else(|| json!({}));
            let names: Vec<&str> = values.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(names, expected);
            values
        };
        let mut facts = Facts::default();
        check(&facts, "/", &[]);
        check(&facts, "/run/nvidia/driver", &["nvidiaDriverRoot"]);
        let labels = [("cloud.google.com/gke-accelerator".to_owned(), "nvidia-l4".to_owned())];
        facts.nodes = vec![NodeFacts { labels: labels.into(), ..NodeFacts::default() }];
        facts.apis = ["security.openshift.io/v1", "monitoring.coreos.com/v1"].map(str::to_owned).into();
        let values = check(&facts, "/", &["kubeletPlugin", "openshift", "podMonitor"]);
        let text = values.to_string();
        assert!(text.contains("gke-accelerator") && text.contains("pci-0302_10de"), "{text}");
    }
}
