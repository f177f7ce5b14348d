//! `divvy-controller decommission`: reverts what Divvy did, before it is uninstalled.
//!
//! Steps: taint every device; wait until no claim is allocated; decommission the nodes; stop the
//! controller; delete its objects. If a step before the controller stops fails, the earlier
//! steps are reverted. Nothing is reverted under an allocated claim: its pod needs the driver to
//! terminate and would stay in Terminating. Each step may already be done, so an interrupted run
//! can be repeated.

use crate::args::DecommissionArgs;
use crate::classes::is_ours;
use crate::templates::is_managed;
use anyhow::{Context, Result, bail};
use divvy_api::names::DRIVER;
use divvy_daemon::client;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate};
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt;
use std::time::Duration;
use tokio::time::Instant;

/// Poll interval for objects that other components change.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Objects in one page of a list.
const PAGE_SIZE: u32 = 200;
/// The controller has 30 s to stop, and an unreleased lease expires after 15 s by default.
const CONTROLLER_STOP_TIMEOUT: Duration = Duration::from_secs(60);
/// The DeviceTaintRule that keeps new claims away. API servers before 1.37 do not serve this
/// kind by default; there, a node daemon's own error to decommission under a claim protects it.
const TAINT_RULE: &str = "divvy-decommission";
/// The flag that makes a node daemon decommission its node.
const DECOMMISSION_FLAG: &str = "--decommission";

/// Runs all steps.
///
/// # Errors
///
/// Fails if claims are still allocated, if nodes do not finish in time, or if the API server
/// rejects a request. The error names the objects that block the run.
pub async fn decommission(args: &DecommissionArgs) -> Result<()> {
    let client = client::client(args.cluster.kubeconfig.as_deref()).await?;
    let run = Decommission { client, args };
    let tainted = run.taint().await?;
    let done = async {
        run.wait_for_claims().await?;
        run.decommission_nodes().await
    };
    let done = done.await;
    if done.is_ok() {
        run.stop_controller().await?;
        run.delete_objects().await?;
    }
    if tainted {
        delete::<DeviceTaintRule>(&Api::all(run.client.clone()), TAINT_RULE).await?;
    }
    done?;
    tracing::info!("Divvy is decommissioned and can be uninstalled");
    Ok(())
}

struct Decommission<'a> {
    client: Client,
    args: &'a DecommissionArgs,
}

impl Decommission<'_> {
    /// Keeps new claims away. Returns false if the server does not serve DeviceTaintRules.
    async fn taint(&self) -> Result<bool> {
        let rule: DeviceTaintRule = serde_json::from_value(json!({
            "metadata": {"name": TAINT_RULE, "labels": {"app.kubernetes.io/part-of": "divvy"}},
            "spec": {
                "deviceSelector": {"driver": DRIVER},
                "taint": {"key": "gpu.divvy.dev/decommission", "effect": "NoSchedule"},
            },
        }))?;
        let api: Api<DeviceTaintRule> = Api::all(self.client.clone());
        match api.create(&PostParams::default(), &rule).await {
            Ok(_) => tracing::info!(rule = TAINT_RULE, "all devices are tainted; no new claim is allocated"),
            // From an interrupted run.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {
                tracing::info!(
                    "the API server does not serve DeviceTaintRules; \
                     a claim that is allocated meanwhile blocks the decommissioning of its node"
                );
                return Ok(false);
            }
            Err(cause) => return Err(cause).context("cannot taint the devices"),
        }
        Ok(true)
    }

    async fn wait_for_claims(&self) -> Result<()> {
        let until = Instant::now() + self.args.wait;
        let mut before = usize::MAX;
        loop {
            let claims = self.allocated_claims().await?;
            if claims.is_empty() {
                tracing::info!("no claim is allocated");
                return Ok(());
            }
            if Instant::now() >= until {
                bail!("{}", BlockedByClaims { claims, waited: self.args.wait });
            }
            if claims.len() != before {
                let (count, first) = (claims.len(), &claims[0]);
                tracing::info!(claims = count, %first, "waiting for claims to be released");
                before = claims.len();
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn allocated_claims(&self) -> Result<Vec<AllocatedClaim>> {
        let claims =
            list::<ResourceClaim, _>(&Api::all(self.client.clone()), AllocatedClaim::from_claim).await;
        claims.context("cannot list ResourceClaims")
    }

    /// Makes the node daemons decommission their nodes. Restores the DaemonSet if they fail.
    async fn decommission_nodes(&self) -> Result<()> {
        let name = &self.args.node_daemonset;
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), &self.args.cluster.namespace);
        let Some(before) = api.get_opt(name).await.context("cannot read the DaemonSet of the node daemon")?
        else {
            tracing::info!(daemonset = name, "the DaemonSet does not exist; no node to decommission");
            return Ok(());
        };
        let patch = decommission_patch(&before)?;
        api.patch(name, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .context("cannot patch the DaemonSet to decommission its nodes")?;
        let Err(why) = self.wait_for_rollout(&api).await else {
            tracing::info!(daemonset = name, "all nodes are decommissioned");
            return Ok(());
        };
        let undo = json!({"spec": {
            "template": {"spec": {"containers": to_json(&before)?["spec"]["template"]["spec"]["containers"]}},
            "updateStrategy": to_json(&before)?["spec"]["updateStrategy"],
        }});
        match api.patch(name, &PatchParams::default(), &Patch::Merge(&undo)).await {
            Ok(_) => tracing::info!(daemonset = name, "the DaemonSet is restored"),
            Err(cause) => {
                tracing::error!(
                    daemonset = name,
                    %cause,
                    "cannot restore the DaemonSet; remove its flag --decommission by hand"
                );
            }
        }
        Err(why)
    }

    async fn wait_for_rollout(&self, api: &Api<DaemonSet>) -> Result<()> {
        let name = &self.args.node_daemonset;
        let until = Instant::now() + self.args.timeout;
        let mut before = String::new();
        loop {
            let Some(current) = api.get_opt(name).await? else { return Ok(()) };
            let Err(progress) = is_rolled_out(&current) else { return Ok(()) };
            if Instant::now() >= until {
                let waiting = self.unready_nodes(&current).await.unwrap_or_default();
                bail!(
                    "{progress} after {:?}{waiting}; see the log of the node daemon on these nodes, \
                     or drain them, then run this command again",
                    self.args.timeout
                );
            }
            if progress != before {
                tracing::info!(daemonset = name, progress, "waiting for the nodes");
                before = progress;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The nodes on which the daemon is not ready, as text to append to an error.
    async fn unready_nodes(&self, daemons: &DaemonSet) -> Result<String> {
        let labels = daemons.spec.selector.match_labels.iter().flatten();
        let labels: Vec<String> = labels.map(|(key, value)| format!("{key}={value}")).collect();
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.args.cluster.namespace);
        let pods = api.list(&ListParams::default().labels(&labels.join(","))).await?;
        let ready = |pod: &Pod| {
            let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
        };
        let nodes = pods.items.iter().filter(|pod| !ready(pod));
        let nodes: Vec<&str> = nodes.filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref()).collect();
        Ok(if nodes.is_empty() { String::new() } else { format!(": {}", nodes.join(", ")) })
    }

    /// Stops the controller, which would recreate the objects that are deleted next.
    async fn stop_controller(&self) -> Result<()> {
        let name = &self.args.controller_deployment;
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), &self.args.cluster.namespace);
        let none = json!({"spec": {"replicas": 0}});
        match api.patch(name, &PatchParams::default(), &Patch::Merge(&none)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            Err(cause) => return Err(cause).context("cannot scale the controller to 0"),
        }
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), &self.args.cluster.namespace);
        let until = Instant::now() + CONTROLLER_STOP_TIMEOUT;
        let (mut observed, mut since) = (None, Instant::now());
        while Instant::now() < until {
            // The leader holds the lease and releases it when it has stopped.
            let Some(lease) =
                leases.get_opt(&self.args.cluster.lease).await.context("cannot read the lease")?
            else {
                break;
            };
            let spec = lease.spec.unwrap_or_default();
            if spec.holder_identity.as_deref().unwrap_or_default().is_empty() {
                break;
            }
            let expiry_seconds =
                spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or(0);
            if observed.as_ref() != Some(&spec) {
                (observed, since) = (Some(spec), Instant::now());
            } else if since.elapsed() > Duration::from_secs(expiry_seconds) {
                break;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        tracing::info!(deployment = name, "the controller has stopped");
        Ok(())
    }

    /// Deletes the objects that the controller created.
    async fn delete_objects(&self) -> Result<()> {
        let classes: Api<DeviceClass> = Api::all(self.client.clone());
        let ours = |class: DeviceClass| is_ours(&class).then_some(class.metadata.name).flatten();
        for name in list(&classes, ours).await.context("cannot list DeviceClasses")? {
            delete::<DeviceClass>(&classes, &name).await?;
        }
        let templates: Api<ResourceClaimTemplate> = Api::all(self.client.clone());
        let ours = |template: ResourceClaimTemplate| {
            is_managed(&template).then_some(template.metadata.namespace.zip(template.metadata.name)).flatten()
        };
        for (namespace, name) in list(&templates, ours).await.context("cannot list ResourceClaimTemplates")? {
            let api: Api<ResourceClaimTemplate> = Api::namespaced(self.client.clone(), &namespace);
            delete(&api, &name).await?;
        }
        let namespace = &self.args.cluster.namespace;
        delete::<Secret>(
            &Api::namespaced(self.client.clone(), namespace),
            &self.args.cluster.certificate_secret,
        )
        .await?;
        delete::<Lease>(&Api::namespaced(self.client.clone(), namespace), &self.args.cluster.lease).await
    }
}

/// A claim that is allocated to our devices.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AllocatedClaim {
    claim: String,
    pods: Vec<String>,
    /// Node names, from the pools, which are named after their nodes.
    nodes: Vec<String>,
}

impl AllocatedClaim {
    fn from_claim(claim: ResourceClaim) -> Option<Self> {
        let status = claim.status?;
        let results = status.allocation?.devices?.results.unwrap_or_default();
        let mut nodes: Vec<String> =
            results.into_iter().filter(|result| result.driver == DRIVER).map(|result| result.pool).collect();
        nodes.sort();
        nodes.dedup();
        let users = status.reserved_for.into_iter().flatten();
        (!nodes.is_empty()).then(|| Self {
            claim: format!(
                "{}/{}",
                claim.metadata.namespace.unwrap_or_default(),
                claim.metadata.name.unwrap_or_default()
            ),
            pods: users.map(|user| user.name).collect(),
            nodes,
        })
    }
}

impl fmt::Display for AllocatedClaim {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "claim {} on node {}", self.claim, self.nodes.join(", "))?;
        match self.pods.as_slice() {
            [] => write!(out, ", used by no pod"),
            [pod] => write!(out, ", used by pod {pod}"),
            pods => write!(out, ", used by pods {}", pods.join(", ")),
        }
    }
}

/// The claims that block the run.
#[derive(Debug)]
struct BlockedByClaims {
    claims: Vec<AllocatedClaim>,
    waited: Duration,
}

/// Limits the error to a readable length.
const LISTED_CLAIMS_MAX: usize = 50;

impl fmt::Display for BlockedByClaims {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} claims are allocated to {DRIVER}", self.claims.len())?;
        if !self.waited.is_zero() {
            write!(out, " after {:?}", self.waited)?;
        }
        out.write_str("; delete their pods, and the claims that no pod uses, then run this again:")?;
        for claims in self.claims.iter().take(LISTED_CLAIMS_MAX) {
            write!(out, "\n  {claims}")?;
        }
        match self.claims.len().saturating_sub(LISTED_CLAIMS_MAX) {
            0 => Ok(()),
            more => write!(out, "\n  and {more} more"),
        }
    }
}

fn to_json<T: serde::Serialize>(object: &T) -> Result<Value> {
    Ok(serde_json::to_value(object)?)
}

/// The patch that makes the node daemons decommission. All nodes start at once, and never with
/// two daemons on a node: the old one would publish devices that the new one withdraws.
fn decommission_patch(daemons: &DaemonSet) -> Result<Value> {
    let mut containers = to_json(daemons)?["spec"]["template"]["spec"]["containers"].take();
    let first = containers.get_mut(0).context("the node daemon's DaemonSet has no container")?;
    let mut args = first["args"].as_array().cloned().unwrap_or_default();
    if !args.iter().any(|arg| arg == DECOMMISSION_FLAG) {
        args.push(json!(DECOMMISSION_FLAG));
    }
    first["args"] = json!(args);
    Ok(json!({"spec": {
        "updateStrategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxUnavailable": "100%", "maxSurge": 0},
        },
        "template": {"spec": {"containers": containers}},
    }}))
}

/// `Ok` if every node runs the current revision. The error describes the progress.
fn is_rolled_out(daemons: &DaemonSet) -> Result<(), String> {
    let status = daemons.status.clone().unwrap_or_default();
    if status.observed_generation < daemons.metadata.generation {
        return Err("the DaemonSet controller has not started the rollout".to_owned());
    }
    let wanted = status.desired_number_scheduled;
    let (updated, ready) = (status.updated_number_scheduled.unwrap_or(0), status.number_ready);
    if updated >= wanted && ready >= wanted {
        Ok(())
    } else {
        Err(format!("{} of {wanted} nodes are not decommissioned", wanted - updated.min(ready)))
    }
}

/// Lists all objects in pages and keeps what `keep` returns.
async fn list<K, T>(api: &Api<K>, keep: impl Fn(K) -> Option<T>) -> kube::Result<Vec<T>>
where
    K: Clone + DeserializeOwned + fmt::Debug,
{
    let mut params = ListParams::default().limit(PAGE_SIZE);
    let mut kept = Vec::new();
    loop {
        let page = api.list(&params).await?;
        kept.extend(page.items.into_iter().filter_map(&keep));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(kept),
        }
    }
}

/// Deletes an object. It may be absent already.
async fn delete<K: Clone + DeserializeOwned + fmt::Debug>(api: &Api<K>, name: &str) -> Result<()> {
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => tracing::info!(name, "deleted"),
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(cause) => return Err(cause).with_context(|| format!("cannot delete {name}")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(status: Value) -> Option<AllocatedClaim> {
        AllocatedClaim::from_claim(
            serde_json::from_value(
                json!({"metadata": {"namespace": "ns", "name": "c"}, "spec": {}, "status": status}),
            )
            .unwrap(),
        )
    }

    #[test]
    fn only_claims_on_our_devices_block_the_run() {
        let allocated = |driver: &str| {
            json!({
                "allocation": {"devices": {"results": [{"request": "r", "driver": driver, "pool": "n1",
                    "device": "gpu-0"}]}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}],
            })
        };
        assert_eq!(claim(json!({})), None);
        assert_eq!(claim(json!({"allocation": {}})), None);
        assert_eq!(claim(allocated("gpu.nvidia.com")), None);
        let claims = claim(allocated(DRIVER)).unwrap();
        assert_eq!(claims.to_string(), "claim ns/c on node n1, used by pod p");
        let error = BlockedByClaims { claims: vec![claims; 52], waited: Duration::ZERO }.to_string();
        assert!(error.starts_with("52 claims are allocated to gpu.divvy.dev; delete their pods"));
        assert!(error.ends_with("and 2 more"));
    }

    fn daemons(args: Value, status: Value) -> DaemonSet {
        serde_json::from_value(json!({
            "metadata": {"name": "d", "generation": 2},
            "spec": {"selector": {}, "template": {"spec": {"containers": [{"name": "node", "args": args}]}}},
            "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn decommission_flag_is_added_once() {
        for args in [json!(null), json!(["--decommission"])] {
            let patch = decommission_patch(&daemons(args, json!(null))).unwrap();
            assert_eq!(patch["spec"]["template"]["spec"]["containers"][0]["args"], json!(["--decommission"]));
        }
        let patch = decommission_patch(&daemons(json!(["--x"]), json!(null))).unwrap();
        assert_eq!(
            patch["spec"]["template"]["spec"]["containers"][0]["args"],
            json!(["--x", "--decommission"])
        );
        assert_eq!(patch["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"], json!(0));
    }

    #[test]
    fn rollout_is_complete_when_all_nodes_are_updated_and_ready() {
        let check = |generation: i64, updated: i32, ready: i32, expected: Result<(), &str>| {
            let status = json!({
                "observedGeneration": generation, "desiredNumberScheduled": 2, "currentNumberScheduled": 2,
                "numberMisscheduled": 0, "updatedNumberScheduled": updated, "numberReady": ready,
            });
            assert_eq!(is_rolled_out(&daemons(json!([]), status)), expected.map_err(str::to_owned));
        };
        check(1, 2, 2, Err("the DaemonSet controller has not started the rollout"));
        check(2, 1, 2, Err("1 of 2 nodes are not decommissioned"));
        check(2, 2, 0, Err("2 of 2 nodes are not decommissioned"));
        check(2, 2, 2, Ok(()));
    }
}
