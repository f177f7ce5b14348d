//! `--keep`: the scheduler and the kubelet of the node, until the demo is stopped.
//!
//! Pods run without containers: the claims of a pod are allocated and prepared when it appears, and
//! released when it is deleted. A pod whose claims find no device waits, with the reason in its
//! status.

use super::session::Session;
use super::stop::Stop;
use super::workloads::{self, Known, Unit};
use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::Api;
use kube::api::ListParams;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Interval of looking at pods.
const INTERVAL: Duration = Duration::from_millis(200);
/// Interval of attempts for a waiting pod.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Waiting pods by UID: why, and the last attempt.
type Waiting = BTreeMap<String, (String, Instant)>;

/// Serves pods until the demo is stopped.
pub(crate) async fn run(session: &mut Session<'_>, stop: &Stop) -> Result<()> {
    session.report.heading("Running until Ctrl-C");
    session.report.detail(&format!(
        "export KUBECONFIG={}\n\
         kubectl get resourceslices,deviceclasses,resourceclaims,pods\n\
         kubectl apply -f FILE\n\
         Pods that you create get their devices, and lose them when you delete them.\n\
         Ctrl-C releases everything",
        session.node.kubeconfig.display()
    ));
    let mut waiting = Waiting::new();
    loop {
        tokio::select! {
            () = stop.stopped() => return Ok(()),
            served = serve(session, &mut waiting) => served?,
        }
        tokio::select! {
            () = stop.stopped() => return Ok(()),
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

/// Looks at all pods once.
async fn serve(session: &mut Session<'_>, waiting: &mut Waiting) -> Result<()> {
    let client = session.node.client.clone();
    let all = ListParams::default();
    let pods = Api::<Pod>::all(client.clone()).list(&all).await?.items;
    let claims = Api::<ResourceClaim>::all(client.clone()).list(&all).await?.items;
    let is_over = |pod: &&Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        pod.metadata.deletion_timestamp.is_some() || matches!(phase, Some("Succeeded" | "Failed"))
    };
    let running: BTreeSet<String> =
        pods.iter().filter(|pod| !is_over(pod)).filter_map(|pod| pod.metadata.uid.clone()).collect();
    release_unused(session, &running, &claims).await;
    waiting.retain(|pod, _| running.contains(pod));
    let held: BTreeSet<String> = session.held.iter().flat_map(|held| held.pods.clone()).collect();
    let is_new = |pod: &&Pod| {
        let uid = pod.metadata.uid.as_ref();
        let waits = |uid| waiting.get(uid).is_some_and(|(_, at)| at.elapsed() < RETRY_INTERVAL);
        let is_running = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
        !is_over(pod) && !is_running && uid.is_some_and(|uid| !held.contains(uid) && !waits(uid))
    };
    let new: Vec<&Pod> = pods.iter().filter(is_new).collect();
    if new.is_empty() {
        return Ok(());
    }
    let templates = Api::<ResourceClaimTemplate>::all(client.clone()).list(&all).await?.items;
    session.classes = Api::<DeviceClass>::all(client).list(&all).await?.items;
    session.slices = super::session::published(session.node).await?;
    for pod in new {
        let known = Known { classes: &session.classes, templates: &templates, claims: &claims };
        let (uid, name) =
            (pod.metadata.uid.clone().unwrap_or_default(), pod.metadata.name.clone().unwrap_or_default());
        let failure = match workloads::claims_of(pod, known) {
            Ok(claims) => {
                let unit = Unit { pod: Some(pod.clone()), claims, must_be_refused: false };
                session.serve(unit).await.err().map(|error| error.reason)
            }
            Err(error) => Some(error.to_string()),
        };
        match failure {
            None => {
                waiting.remove(&uid);
                session.show()?;
            }
            Some(reason) => {
                let is_known = waiting.get(&uid).is_some_and(|(known, _)| *known == reason);
                if !is_known {
                    session.report.refused(&format!("pod {name}"), &reason);
                    session.set_phase(pod, "Pending", Some(&reason)).await?;
                }
                // Claims that were allocated and cannot be used are free again.
                while let Some(at) = session.held.iter().position(|held| held.pods.contains(&uid)) {
                    session.held[at].pods.remove(&uid);
                    if session.held[at].pods.is_empty() {
                        session.release(at).await?;
                    }
                }
                waiting.insert(uid, (reason, Instant::now()));
            }
        }
    }
    Ok(())
}

/// Releases claims whose pods have gone, and those that were deleted.
async fn release_unused(session: &mut Session<'_>, running: &BTreeSet<String>, claims: &[ResourceClaim]) {
    let mut at = 0;
    let mut is_changed = false;
    while at < session.held.len() {
        let held = &mut session.held[at];
        let had_pods = !held.pods.is_empty();
        held.pods.retain(|pod| running.contains(pod));
        let exists = claims.iter().any(|claim| claim.metadata.uid == held.claim.metadata.uid);
        if exists && !(had_pods && held.pods.is_empty()) {
            at += 1;
            continue;
        }
        is_changed = true;
        match session.release(at).await {
            Ok(name) => session.report.done(
                &format!("{name}: released"),
                Duration::ZERO,
                serde_json::json!({"event": "released", "claims": [name]}),
            ),
            Err(error) => session.report.failed("release", &format!("{error:#}")),
        }
    }
    if is_changed && let Err(error) = session.show() {
        session.report.failed("map", &format!("{error:#}"));
    }
}
