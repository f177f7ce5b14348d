//! The objects that scenarios put into the cluster, in the form in which a user
//! would write them.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Where a pod's claim comes from.
#[derive(Clone, Copy)]
pub(crate) enum Claim<'a> {
    /// A ResourceClaimTemplate: a claim of the pod's own.
    Template(&'a str),
    /// A ResourceClaim that others may use too.
    Shared(&'a str),
}

/// A pod that prints what it sees of GPUs and stays.
pub(crate) struct Worker<'a> {
    pub(crate) name: &'a str,
    claims: Vec<Claim<'a>>,
    limits: BTreeMap<&'a str, String>,
    user: Option<i64>,
    config: Option<&'a str>,
    work: &'a str,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(name: &'a str) -> Self {
        Self { name, claims: Vec::new(), limits: BTreeMap::new(), user: None, config: None, work: STAYS }
    }

    pub(crate) fn claim(mut self, claim: Claim<'a>) -> Self {
        self.claims.push(claim);
        self
    }

    /// An extended resource, as for a device plugin.
    pub(crate) fn limit(mut self, resource: &'a str, count: u32) -> Self {
        self.limits.insert(resource, count.to_string());
        self
    }

    pub(crate) fn user(mut self, uid: i64) -> Self {
        self.user = Some(uid);
        self
    }

    /// A ConfigMap, without which the kubelet has none of the pod's claims prepared.
    pub(crate) fn config(mut self, name: &'a str) -> Self {
        self.config = Some(name);
        self
    }

    /// A shell command that stays instead of `sleep`; when it ends, so does the container.
    pub(crate) fn work(mut self, command: &'a str) -> Self {
        self.work = command;
        self
    }

    pub(crate) fn json(&self) -> Value {
        let claim = |(n, claim): (usize, &Claim<'_>)| match claim {
            Claim::Template(name) => json!({"name": format!("c{n}"), "resourceClaimTemplateName": name}),
            Claim::Shared(name) => json!({"name": format!("c{n}"), "resourceClaimName": name}),
        };
        let used: Vec<_> = (0..self.claims.len()).map(|n| json!({"name": format!("c{n}")})).collect();
        let mut container = suites(self.work);
        container.extend([
            ("name".to_owned(), json!("main")),
            ("resources".to_owned(), json!({"claims": used, "limits": self.limits})),
        ]);
        let mut pod = json!({
            "metadata": {"name": self.name},
            "spec": {
                "terminationGracePeriodSeconds": 2,
                "resourceClaims": self.claims.iter().enumerate().map(claim).collect::<Vec<_>>(),
                "containers": [container],
            },
        });
        if let Some(uid) = self.user {
            pod["spec"]["securityContext"] = json!({"runAsUser": uid});
        }
        if let Some(name) = self.config {
            pod["spec"]["volumes"] = json!([{"name": "config", "configMap": {"name": name}}]);
            pod["spec"]["containers"][0]["volumeMounts"] =
                json!([{"name": "config", "mountPath": "/etc/config"}]);
        }
        pod
    }
}

/// What of a container is the suite's own: it prints what it sees of GPUs, then
/// works, and ends with its work.
pub(crate) fn suites(work: &str) -> Map<String, Value> {
    let script = format!("trap 'exit 0' TERM; nvidia-smi -L; echo '{SEEN}'; {work} & wait $!");
    Map::from_iter([
        ("image".to_owned(), json!(IMAGE)),
        ("imagePullPolicy".to_owned(), json!("Never")),
        ("command".to_owned(), json!(["sh", "-c", script])),
    ])
}

/// The image of e2e/cluster/image.
const IMAGE: &str = "localhost/glibc:1";
/// The line after the output of `nvidia-smi -L`.
pub(crate) const SEEN: &str = "-- seen";
/// Work that takes nothing.
pub(crate) const STAYS: &str = "sleep 2147483647";

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

/// What a request takes of a device that several claims hold.
pub(crate) fn taking(mut request: Value, capacity: &[(&str, &str)]) -> Value {
    let amounts: BTreeMap<_, _> = capacity.iter().copied().collect();
    request["exactly"]["capacity"] = json!({"requests": amounts});
    request
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
pub(crate) const SHARE: &str = "share.divvy.dev";
pub(crate) const TIMESLICE: &str = "timeslice.divvy.dev";
pub(crate) const MPS: &str = "mps.divvy.dev";
