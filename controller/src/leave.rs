//! `divvy-controller leave`: undoes what Divvy did, before it is uninstalled.
//!
//! ```text
//! taint every device ─▶ no claim is allocated ─▶ nodes give everything back ─▶ controller stops ─▶ what it made goes
//!        └──────────── undone if one of these fails ────────────┘
//! ```
//!
//! The taint is a DeviceTaintRule, so that no new claim comes while the last ones
//! are waited for; servers before 1.37 have none by default, and there the node
//! daemon's own refusal to leave with a claim is what stands. A pod whose claim is
//! prepared needs the driver to end, so nothing is undone under one: it would stay
//! in Terminating for ever.
//!
//! Every step may be done already: a run that was killed is simply run again.

use crate::args::LeaveArgs;
use crate::classes::is_ours;
use anyhow::{Context, Result, bail};
use divvy_api::names::DRIVER;
use divvy_daemon::client;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim};
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt;
use std::time::Duration;
use tokio::time::Instant;

/// How often things are looked at that others change.
const EVERY: Duration = Duration::from_secs(2);
/// Objects in one page of a list.
const PAGE: u32 = 200;
/// The controller has 30 s to stop, and a lease that nobody gives back ends after 15 s.
const CONTROLLER: Duration = Duration::from_secs(60);
const RULE: &str = "divvy-leaving";
/// The flag that makes a node daemon leave.
const LEAVE: &str = "--leave";

/// Does it all, or says what stands in the way.
pub async fn leave(args: &LeaveArgs) -> Result<()> {
    let client = client::client(args.cluster.kubeconfig.as_deref()).await?;
    let leaving = Leaving { client, args };
    let tainted = leaving.taint().await?;
    let done = async {
        leaving.wait_for_claims().await?;
        leaving.nodes().await
    };
    let done = done.await;
    if done.is_ok() {
        leaving.controller().await?;
        leaving.remains().await?;
    }
    if tainted {
        gone::<DeviceTaintRule>(&Api::all(leaving.client.clone()), RULE).await?;
    }
    done?;
    tracing::info!("Divvy has left; it can be uninstalled");
    Ok(())
}

struct Leaving<'a> {
    client: Client,
    args: &'a LeaveArgs,
}

impl Leaving<'_> {
    /// Keeps new claims away; false where the server has no such rules.
    async fn taint(&self) -> Result<bool> {
        let rule: DeviceTaintRule = serde_json::from_value(json!({
            "metadata": {"name": RULE, "labels": {"app.kubernetes.io/part-of": "divvy"}},
            "spec": {
                "deviceSelector": {"driver": DRIVER},
                "taint": {"key": "gpu.divvy.dev/leaving", "effect": "NoSchedule"},
            },
        }))?;
        let api: Api<DeviceTaintRule> = Api::all(self.client.clone());
        match api.create(&PostParams::default(), &rule).await {
            Ok(_) => tracing::info!(rule = RULE, "devices are tainted: no new claim is allocated"),
            // Left by a run that was killed.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {
                tracing::info!(
                    "this server has no DeviceTaintRule; claims that come meanwhile stop the nodes from leaving"
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
            let live = self.live_claims().await?;
            if live.is_empty() {
                tracing::info!("no claim is allocated");
                return Ok(());
            }
            if Instant::now() >= until {
                bail!("{}", Refusal { live, waited: self.args.wait });
            }
            if live.len() != before {
                tracing::info!(claims = live.len(), first = %live[0], "waiting for claims to go");
                before = live.len();
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    async fn live_claims(&self) -> Result<Vec<Live>> {
        let claims = list::<ResourceClaim, _>(&Api::all(self.client.clone()), Live::of).await;
        claims.context("cannot list ResourceClaims")
    }

    /// Makes the node daemons give everything back; puts them as they were if they do not.
    async fn nodes(&self) -> Result<()> {
        let name = &self.args.node_daemonset;
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), &self.args.cluster.namespace);
        let Some(before) = api.get_opt(name).await.context("cannot read the DaemonSet of the node daemon")?
        else {
            tracing::info!(daemonset = name, "there is no node daemon");
            return Ok(());
        };
        let patch = leaving(&before)?;
        api.patch(name, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .context("cannot make the nodes leave")?;
        let Err(why) = self.rolled_out(&api).await else {
            tracing::info!(daemonset = name, "all nodes have left");
            return Ok(());
        };
        let undo = json!({"spec": {
            "template": {"spec": {"containers": wire(&before)?["spec"]["template"]["spec"]["containers"]}},
            "updateStrategy": wire(&before)?["spec"]["updateStrategy"],
        }});
        match api.patch(name, &PatchParams::default(), &Patch::Merge(&undo)).await {
            Ok(_) => tracing::info!(daemonset = name, "the node daemons go on as before"),
            Err(cause) => {
                tracing::error!(daemonset = name, %cause, "the node daemons could not be put as they were")
            }
        }
        Err(why)
    }

    async fn rolled_out(&self, api: &Api<DaemonSet>) -> Result<()> {
        let name = &self.args.node_daemonset;
        let until = Instant::now() + self.args.within;
        let mut before = String::new();
        loop {
            let Some(now) = api.get_opt(name).await? else { return Ok(()) };
            let Err(progress) = is_rolled_out(&now) else { return Ok(()) };
            if Instant::now() >= until {
                let waiting = self.not_ready(&now).await.unwrap_or_default();
                bail!(
                    "not every node has left within {:?}: {progress}{waiting}; look at the log of the daemon there, \
                     or drain the node and run this again",
                    self.args.within
                );
            }
            if progress != before {
                tracing::info!(daemonset = name, progress, "waiting for nodes to leave");
                before = progress;
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// On which nodes the daemon is not done.
    async fn not_ready(&self, daemons: &DaemonSet) -> Result<String> {
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
        Ok(if nodes.is_empty() { String::new() } else { format!(" (not done: {})", nodes.join(", ")) })
    }

    /// Stops the controller, which would make again what is removed.
    async fn controller(&self) -> Result<()> {
        let name = &self.args.controller_deployment;
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), &self.args.cluster.namespace);
        let none = json!({"spec": {"replicas": 0}});
        match api.patch(name, &PatchParams::default(), &Patch::Merge(&none)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            Err(cause) => return Err(cause).context("cannot stop the controller"),
        }
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), &self.args.cluster.namespace);
        let until = Instant::now() + CONTROLLER;
        let (mut seen, mut since) = (None, Instant::now());
        while Instant::now() < until {
            // Whoever writes holds the lease, and gives it back when it has stopped.
            let Some(lease) =
                leases.get_opt(&self.args.cluster.lease).await.context("cannot read the lease")?
            else {
                break;
            };
            let spec = lease.spec.unwrap_or_default();
            if spec.holder_identity.as_deref().unwrap_or_default().is_empty() {
                break;
            }
            let silent =
                spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or(0);
            if seen.as_ref() != Some(&spec) {
                (seen, since) = (Some(spec), Instant::now());
            } else if since.elapsed() > Duration::from_secs(silent) {
                break;
            }
            tokio::time::sleep(EVERY).await;
        }
        tracing::info!(deployment = name, "the controller has stopped");
        Ok(())
    }

    /// Removes what the controller made.
    async fn remains(&self) -> Result<()> {
        let classes: Api<DeviceClass> = Api::all(self.client.clone());
        let ours = |class: DeviceClass| is_ours(&class).then_some(class.metadata.name).flatten();
        for name in list(&classes, ours).await.context("cannot list DeviceClasses")? {
            gone::<DeviceClass>(&classes, &name).await?;
        }
        let namespace = &self.args.cluster.namespace;
        gone::<Secret>(
            &Api::namespaced(self.client.clone(), namespace),
            &self.args.cluster.certificate_secret,
        )
        .await?;
        gone::<Lease>(&Api::namespaced(self.client.clone(), namespace), &self.args.cluster.lease).await
    }
}

/// A claim that holds a device of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Live {
    claim: String,
    pods: Vec<String>,
    /// Pools are named after their nodes.
    nodes: Vec<String>,
}

impl Live {
    fn of(claim: ResourceClaim) -> Option<Self> {
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

impl fmt::Display for Live {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "claim {} on node {}", self.claim, self.nodes.join(", "))?;
        match self.pods.as_slice() {
            [] => write!(out, ", used by no pod"),
            [pod] => write!(out, ", used by pod {pod}"),
            pods => write!(out, ", used by pods {}", pods.join(", ")),
        }
    }
}

/// Why nothing was undone.
#[derive(Debug)]
struct Refusal {
    live: Vec<Live>,
    waited: Duration,
}

/// The list is for a person.
const TOLD: usize = 50;

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} claims are allocated to {DRIVER}", self.live.len())?;
        if !self.waited.is_zero() {
            write!(out, " after {:?}", self.waited)?;
        }
        out.write_str("; delete their pods, and the claims that no pod uses, then run this again:")?;
        for live in self.live.iter().take(TOLD) {
            write!(out, "\n  {live}")?;
        }
        match self.live.len().saturating_sub(TOLD) {
            0 => Ok(()),
            more => write!(out, "\n  and {more} more"),
        }
    }
}

fn wire<T: serde::Serialize>(object: &T) -> Result<Value> {
    Ok(serde_json::to_value(object)?)
}

/// The patch that makes the daemons leave, all at once and never two on a node:
/// the old one would publish what the new one takes back.
fn leaving(daemons: &DaemonSet) -> Result<Value> {
    let mut containers = wire(daemons)?["spec"]["template"]["spec"]["containers"].take();
    let first = containers.get_mut(0).context("the node daemon's DaemonSet has no container")?;
    let mut args = first["args"].as_array().cloned().unwrap_or_default();
    if !args.iter().any(|arg| arg == LEAVE) {
        args.push(json!(LEAVE));
    }
    first["args"] = json!(args);
    Ok(json!({"spec": {
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%", "maxSurge": 0}},
        "template": {"spec": {"containers": containers}},
    }}))
}

/// Whether every node runs what the DaemonSet says now; the error is how far it is.
fn is_rolled_out(daemons: &DaemonSet) -> Result<(), String> {
    let status = daemons.status.clone().unwrap_or_default();
    if status.observed_generation < daemons.metadata.generation {
        return Err("not begun".to_owned());
    }
    let wanted = status.desired_number_scheduled;
    let (updated, ready) = (status.updated_number_scheduled.unwrap_or(0), status.number_ready);
    if updated >= wanted && ready >= wanted {
        Ok(())
    } else {
        Err(format!("{} of {wanted}", updated.min(ready)))
    }
}

/// What there is, in pages, reduced at once.
async fn list<K, T>(api: &Api<K>, keep: impl Fn(K) -> Option<T>) -> kube::Result<Vec<T>>
where
    K: Clone + DeserializeOwned + fmt::Debug,
{
    let mut params = ListParams::default().limit(PAGE);
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

/// Deletes an object that may be gone.
async fn gone<K: Clone + DeserializeOwned + fmt::Debug>(api: &Api<K>, name: &str) -> Result<()> {
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

    fn claim(status: Value) -> Option<Live> {
        Live::of(
            serde_json::from_value(
                json!({"metadata": {"namespace": "ns", "name": "c"}, "spec": {}, "status": status}),
            )
            .unwrap(),
        )
    }

    #[test]
    fn only_claims_that_hold_our_devices_are_in_the_way() {
        let allocated = |driver: &str| {
            json!({
                "allocation": {"devices": {"results": [{"request": "r", "driver": driver, "pool": "n1", "device": "gpu-0"}]}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}],
            })
        };
        assert_eq!(claim(json!({})), None);
        assert_eq!(claim(json!({"allocation": {}})), None);
        assert_eq!(claim(allocated("gpu.nvidia.com")), None);
        let live = claim(allocated(DRIVER)).unwrap();
        assert_eq!(live.to_string(), "claim ns/c on node n1, used by pod p");
        let refusal = Refusal { live: vec![live; 52], waited: Duration::ZERO }.to_string();
        assert!(refusal.starts_with("52 claims are allocated to gpu.divvy.dev; delete their pods"));
        assert!(refusal.ends_with("and 2 more"));
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
    fn daemons_are_told_to_leave_once() {
        for args in [json!(null), json!(["--leave"])] {
            let patch = leaving(&daemons(args, json!(null))).unwrap();
            assert_eq!(patch["spec"]["template"]["spec"]["containers"][0]["args"], json!(["--leave"]));
        }
        let patch = leaving(&daemons(json!(["--x"]), json!(null))).unwrap();
        assert_eq!(patch["spec"]["template"]["spec"]["containers"][0]["args"], json!(["--x", "--leave"]));
        assert_eq!(patch["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"], json!(0));
    }

    #[test]
    fn a_rollout_is_over_when_every_node_is_updated_and_ready() {
        let check = |generation: i64, updated: i32, ready: i32, expected: Result<(), &str>| {
            let status = json!({
                "observedGeneration": generation, "desiredNumberScheduled": 2, "currentNumberScheduled": 2,
                "numberMisscheduled": 0, "updatedNumberScheduled": updated, "numberReady": ready,
            });
            assert_eq!(is_rolled_out(&daemons(json!([]), status)), expected.map_err(str::to_owned));
        };
        check(1, 2, 2, Err("not begun"));
        check(2, 1, 2, Err("1 of 2"));
        check(2, 2, 1, Err("1 of 2"));
        check(2, 2, 2, Ok(()));
    }
}
