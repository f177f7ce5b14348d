//! The objects that scenarios put into the cluster, in the form in which a user
//! would write them.

use serde_json::{Value, json};

/// Where a pod's claim comes from.
#[derive(Clone, Copy)]
pub(crate) enum Claim<'a> {
    /// A ResourceClaimTemplate: a claim of the pod's own.
    Template(&'a str),
    /// A ResourceClaim that others may use too.
    Shared(&'a str),
}

/// A pod that prints what it sees of GPUs and stays.
pub(crate) fn pod(name: &str, claim: Claim<'_>) -> Value {
    let source = match claim {
        Claim::Template(name) => json!({"name": "gpus", "resourceClaimTemplateName": name}),
        Claim::Shared(name) => json!({"name": "gpus", "resourceClaimName": name}),
    };
    let script = "trap 'exit 0' TERM; nvidia-smi -L; echo end; sleep 2147483647 & wait";
    json!({
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 2,
            "resourceClaims": [source],
            "containers": [{
                "name": "main",
                "image": "localhost/glibc:1",
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", script],
                "resources": {"claims": [{"name": "gpus"}]},
            }],
        },
    })
}

/// A request for one device of a class that satisfies a CEL expression.
pub(crate) fn request(name: &str, class: &str, cel: &str) -> Value {
    json!({"name": name, "exactly": device(class, cel)})
}

/// A request to look at a device that others may hold.
pub(crate) fn admin_request(name: &str, class: &str, cel: &str) -> Value {
    let mut device = device(class, cel);
    device["adminAccess"] = json!(true);
    json!({"name": name, "exactly": device})
}

/// A request for the first of several that can be had.
pub(crate) fn first_available(name: &str, choices: &[(&str, &str, &str)]) -> Value {
    let choices: Vec<Value> = choices
        .iter()
        .map(|(name, class, cel)| {
            let mut choice = device(class, cel);
            choice["name"] = json!(name);
            choice
        })
        .collect();
    json!({"name": name, "firstAvailable": choices})
}

fn device(class: &str, cel: &str) -> Value {
    json!({"deviceClassName": class, "selectors": [{"cel": {"expression": cel}}]})
}

/// What a claim or a template asks for.
pub(crate) fn devices(requests: &[Value]) -> Value {
    json!({"devices": {"requests": requests}})
}

/// A MIG instance of a profile.
pub(crate) fn profile(name: &str) -> String {
    format!("device.attributes['gpu.divvy.dev'].profile == '{name}'")
}

/// A MIG instance of a profile on one GPU.
pub(crate) fn profile_on(name: &str, gpu: &str) -> String {
    format!("{} && device.attributes['gpu.divvy.dev'].parentUUID == '{gpu}'", profile(name))
}

/// One GPU.
pub(crate) fn uuid(gpu: &str) -> String {
    format!("device.attributes['gpu.divvy.dev'].uuid == '{gpu}'")
}

pub(crate) const GPU: &str = "gpu.divvy.dev";
pub(crate) const MIG: &str = "mig.divvy.dev";
