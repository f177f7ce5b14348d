//! The objects that scenarios create in the cluster, in the form in which a user writes them.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The source of a pod's claim.
#[derive(Clone, Copy)]
pub(crate) enum Claim<'a> {
    /// A ResourceClaimTemplate: the pod gets its own claim.
    Template(&'a str),
    /// A ResourceClaim that several pods may use.
    Shared(&'a str),
}

/// A pod that lists its visible GPUs and keeps running.
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
        Self { name, claims: Vec::new(), limits: BTreeMap::new(), user: None, config: None, work: IDLE }
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

    /// Mounts a ConfigMap. Until it exists, the kubelet does not prepare the pod's claims.
    pub(crate) fn config(mut self, name: &'a str) -> Self {
        self.config = Some(name);
        self
    }

    /// A shell command to run instead of `sleep`. The container ends with it.
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
        let mut container = test_container(self.work);
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

/// The container fields that the suite sets: the container lists its visible GPUs, then runs `work`
/// and ends with it.
pub(crate) fn test_container(work: &str) -> Map<String, Value> {
    let script = format!("trap 'exit 0' TERM; nvidia-smi -L; echo '{END_OF_LISTING}'; {work} & wait $!");
    Map::from_iter([
        ("image".to_owned(), json!(IMAGE)),
        ("imagePullPolicy".to_owned(), json!("Never")),
        ("command".to_owned(), json!(["sh", "-c", script])),
    ])
}

/// The image that e2e/cluster/image builds.
pub(crate) const IMAGE: &str = "localhost/glibc:1";
/// The line that a container prints after `nvidia-smi -L`.
pub(crate) const END_OF_LISTING: &str = "-- seen";
/// A command that does nothing.
pub(crate) const IDLE: &str = "sleep 2147483647";

/// A request for one device of a class that satisfies a CEL expression.
pub(crate) fn request(name: &str, class: &str, cel: &str) -> Value {
    json!({"name": name, "exactly": device(class, cel)})
}

/// A request with admin access to a device that other claims may hold.
pub(crate) fn admin_request(name: &str, class: &str, cel: &str) -> Value {
    let mut device = device(class, cel);
    device["adminAccess"] = json!(true);
    json!({"name": name, "exactly": device})
}

/// A request to observe all GPUs that satisfy a CEL expression.
pub(crate) fn observer_request(name: &str, cel: &str) -> Value {
    json!({"name": name, "exactly": {
        "deviceClassName": "observer.divvy.dev",
        "allocationMode": "All",
        "adminAccess": true,
        "selectors": [{"cel": {"expression": cel}}],
        "tolerations": [{"key": "gpu.divvy.dev/observer", "operator": "Exists"}],
    }})
}

/// A request for the first available of several choices.
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

/// The spec of a claim or a template.
pub(crate) fn devices(requests: &[Value]) -> Value {
    json!({"devices": {"requests": requests}})
}

/// Adds the capacity that a request takes of a shared device.
pub(crate) fn with_capacity(mut request: Value, capacity: &[(&str, &str)]) -> Value {
    let amounts: BTreeMap<_, _> = capacity.iter().copied().collect();
    request["exactly"]["capacity"] = json!({"requests": amounts});
    request
}

/// A CEL expression for a MIG instance of a profile.
pub(crate) fn profile(name: &str) -> String {
    format!("device.attributes['gpu.divvy.dev'].profile == '{name}'")
}

/// A CEL expression for a MIG instance of a profile on one GPU.
pub(crate) fn profile_on(name: &str, gpu: &str) -> String {
    format!("{} && device.attributes['gpu.divvy.dev'].parentUUID == '{gpu}'", profile(name))
}

/// A CEL expression for one GPU.
pub(crate) fn uuid(gpu: &str) -> String {
    format!("device.attributes['gpu.divvy.dev'].uuid == '{gpu}'")
}

pub(crate) const GPU: &str = "gpu.divvy.dev";
pub(crate) const MIG: &str = "mig.divvy.dev";
pub(crate) const SHARE: &str = "share.divvy.dev";
pub(crate) const TIMESLICE: &str = "timeslice.divvy.dev";
pub(crate) const MPS: &str = "mps.divvy.dev";
