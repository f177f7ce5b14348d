//! The facts of a cluster, as far as the checks need them. Lists that the user may not read are
//! `None`; only the version and the nodes are required.

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Namespace, Node, PodSpec, ResourceQuota};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::ListParams;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::Duration;

/// Time limit of one request, or of one page of a list.
const READ_TIMEOUT: Duration = Duration::from_secs(15);
/// Objects in one page of a list.
const PAGE_SIZE: u32 = 250;
/// The DRA drivers that own GPUs of NVIDIA.
const DRIVERS: [&str; 3] = ["gpu.divvy.dev", "gpu.nvidia.com", "hami-core-gpu.project-hami.io"];

/// Why the cluster cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum FactsError {
    #[error("cannot use the kubeconfig: {0}; set KUBECONFIG, or try the context with kubectl get nodes")]
    Client(kube::Error),
    #[error("cannot read {what}: {cause}; try kubectl auth can-i list {what}")]
    Read { what: &'static str, cause: kube::Error },
    #[error("cannot read {what}: the API server did not answer within {READ_TIMEOUT:?}")]
    Deadline { what: &'static str },
}

/// What was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Facts {
    /// `gitVersion` of the API server.
    pub(super) version: String,
    /// The served groups with their versions, such as `resource.k8s.io/v1`.
    pub(super) apis: BTreeSet<String>,
    /// Feature gates of the API server whose name begins with `DRA`.
    pub(super) features: Option<BTreeMap<String, bool>>,
    pub(super) nodes: Vec<NodeFacts>,
    pub(super) workloads: Option<Vec<Workload>>,
    /// Drivers of GPUs with ResourceSlices, among [`DRIVERS`].
    pub(super) drivers: Option<BTreeSet<String>>,
    pub(super) namespace: String,
    /// Labels of the namespace; `None` if it does not exist.
    pub(super) namespace_labels: Option<BTreeMap<String, String>>,
    /// Names of ResourceQuotas in the namespace.
    pub(super) quotas: Vec<String>,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct NodeFacts {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    /// Such as `containerd://2.1.4`.
    pub(super) runtime: String,
    pub(super) architecture: String,
    /// Extended resources of GPUs that a device plugin offers.
    pub(super) gpus: BTreeMap<String, String>,
}

/// A DaemonSet or a Deployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Workload {
    /// `NAMESPACE/NAME`.
    pub(super) name: String,
    pub(super) images: Vec<String>,
}

/// Reads the cluster of the current context.
pub(super) async fn read(namespace: &str) -> Result<Facts, FactsError> {
    let client = kube::Client::try_default().await.map_err(FactsError::Client)?;
    let version = answered("version", client.apiserver_version()).await?.git_version;
    let groups = answered("API groups", client.list_api_groups()).await?.groups;
    let apis = groups.into_iter().flat_map(|group| group.versions).map(|one| one.group_version).collect();
    let nodes: Vec<Node> = list("nodes", &Api::all(client.clone())).await?;
    let daemon_sets: Option<Vec<DaemonSet>> = optional(list("daemonsets", &Api::all(client.clone())).await);
    let deployments: Option<Vec<Deployment>> = optional(list("deployments", &Api::all(client.clone())).await);
    let drivers = optional(drivers(&client).await);
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let found = answered("namespaces", namespaces.get_opt(namespace)).await?;
    let quotas: Api<ResourceQuota> = Api::namespaced(client.clone(), namespace);
    let quotas = optional(list("resourcequotas", &quotas).await).unwrap_or_default();
    let quotas = quotas.into_iter().filter_map(|quota| quota.metadata.name).collect();
    let daemon_sets = daemon_sets.map(|all| {
        let one =
            |set: DaemonSet| workload(set.metadata.namespace, set.metadata.name, set.spec.template.spec);
        all.into_iter().map(one).collect::<Vec<_>>()
    });
    let deployments = deployments.map(|all| {
        let one =
            |set: Deployment| workload(set.metadata.namespace, set.metadata.name, set.spec.template.spec);
        all.into_iter().map(one).collect::<Vec<_>>()
    });
    let workloads = match (daemon_sets, deployments) {
        (None, None) => None,
        (one, other) => Some(one.into_iter().chain(other).flatten().collect()),
    };
    Ok(Facts {
        version,
        apis,
        features: features(&client).await,
        nodes: nodes.into_iter().map(node).collect(),
        workloads,
        drivers,
        namespace: namespace.to_owned(),
        namespace_labels: found.map(|namespace| namespace.metadata.labels.unwrap_or_default()),
        quotas,
    })
}

/// A list that not every user may read. The error is printed, and the check says that it is missing.
fn optional<T>(list: Result<T, FactsError>) -> Option<T> {
    list.inspect_err(|error| eprintln!("divvy: {error}")).ok()
}

/// One slice of a driver is enough, because the slices of many nodes are large.
async fn drivers(client: &kube::Client) -> Result<BTreeSet<String>, FactsError> {
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let mut found = BTreeSet::new();
    for driver in DRIVERS {
        let one = ListParams::default().fields(&format!("spec.driver={driver}")).limit(1);
        if !answered("resourceslices", slices.list(&one)).await?.items.is_empty() {
            found.insert(driver.to_owned());
        }
    }
    Ok(found)
}

/// The gates of the API server, from its metrics. Only administrators may read them.
async fn features(client: &kube::Client) -> Option<BTreeMap<String, bool>> {
    let request = kube::core::Request::new("/metrics").list(&ListParams::default()).ok()?;
    let text = answered("metrics", client.request_text(request)).await.ok()?;
    let gate = |line: &str| {
        let labels = line.strip_prefix("kubernetes_feature_enabled{")?;
        let name = labels.split_once("name=\"")?.1.split_once('"')?.0;
        let value = line.rsplit_once(' ')?.1;
        name.starts_with("DRA").then(|| (name.to_owned(), value == "1"))
    };
    let gates: BTreeMap<String, bool> = text.lines().filter_map(gate).collect();
    (!gates.is_empty()).then_some(gates)
}

fn node(node: Node) -> NodeFacts {
    let status = node.status.unwrap_or_default();
    let info = status.node_info.unwrap_or_default();
    let amounts = status.allocatable.unwrap_or_default().into_iter();
    let gpus = amounts.filter(|(name, amount)| name.starts_with("nvidia.com/") && amount.0 != "0");
    NodeFacts {
        name: node.metadata.name.unwrap_or_default(),
        labels: node.metadata.labels.unwrap_or_default(),
        runtime: info.container_runtime_version,
        architecture: info.architecture,
        gpus: gpus.map(|(name, amount)| (name, amount.0)).collect(),
    }
}

fn workload(namespace: Option<String>, name: Option<String>, spec: Option<PodSpec>) -> Workload {
    let containers = spec.map(|spec| spec.containers).unwrap_or_default();
    Workload {
        name: format!("{}/{}", namespace.unwrap_or_default(), name.unwrap_or_default()),
        images: containers.into_iter().filter_map(|container| container.image).collect(),
    }
}

async fn answered<T>(
    what: &'static str,
    read: impl Future<Output = kube::Result<T>>,
) -> Result<T, FactsError> {
    match tokio::time::timeout(READ_TIMEOUT, read).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(cause)) => Err(FactsError::Read { what, cause }),
        Err(_) => Err(FactsError::Deadline { what }),
    }
}

/// All objects, in pages.
async fn list<K>(what: &'static str, api: &Api<K>) -> Result<Vec<K>, FactsError>
where
    K: Clone + DeserializeOwned + Debug,
{
    let mut params = ListParams::default().limit(PAGE_SIZE);
    let mut all = Vec::new();
    loop {
        let page = answered(what, api.list(&params)).await?;
        all.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(all),
        }
    }
}
