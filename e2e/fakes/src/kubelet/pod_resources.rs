//! The kubelet's pod-resources API, `<root>/pod-resources/kubelet.sock`.
//!
//! It lists one pod for each claim that was prepared and not unprepared since. As on a real kubelet,
//! the claims survive a restart. A pod that is deleted by force leaves the list at once, although its
//! claim is still prepared and its containers may still run.

use divvy_kubelet::dra::v1::{Claim, Device};
use divvy_kubelet::pod_resources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use divvy_kubelet::pod_resources::{
    CdiDevice, ClaimResource, ContainerResources, DynamicResource, ListPodResourcesRequest,
    ListPodResourcesResponse, PodResources,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// How the API answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodResourcesMode {
    /// As Kubernetes 1.34 and newer.
    #[default]
    Claims,
    /// Pods without their claims, as a kubelet without `KubeletPodResourcesDynamicResources`.
    NoClaims,
    /// A call gets no answer while this mode lasts.
    Hang,
    /// There is no socket.
    Absent,
}

/// A claim that the kubelet believes prepared.
struct Listed {
    claim: Claim,
    driver: String,
    devices: Vec<Device>,
}

/// The claims of this kubelet, by namespace and name; a clone has the same ones.
#[derive(Clone)]
pub(super) struct KnownClaims {
    claims: Arc<Mutex<BTreeMap<(String, String), Listed>>>,
    mode: watch::Sender<PodResourcesMode>,
}

impl KnownClaims {
    pub(super) fn new() -> Self {
        Self { claims: Arc::default(), mode: watch::Sender::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, String), Listed>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn prepared(&self, driver: &str, claim: &Claim, devices: &[Device]) {
        let listed = Listed { claim: claim.clone(), driver: driver.to_owned(), devices: devices.to_vec() };
        self.lock().insert(key(claim), listed);
    }

    /// Removes the claim, unless a claim of the same name has followed it.
    pub(super) fn remove(&self, claim: &Claim) {
        let mut claims = self.lock();
        if claims.get(&key(claim)).is_some_and(|listed| listed.claim.uid == claim.uid) {
            claims.remove(&key(claim));
        }
    }

    pub(super) fn set_mode(&self, mode: PodResourcesMode) {
        self.mode.send_replace(mode);
    }

    /// Serves the socket until `stop`, and removes it while the mode is [`PodResourcesMode::Absent`].
    pub(super) async fn serve(self, root: PathBuf, stop: CancellationToken) {
        let dir = root.join("pod-resources");
        let socket = dir.join("kubelet.sock");
        let mut mode = self.mode.subscribe();
        while !stop.is_cancelled() {
            let gone = stop.run_until_cancelled(mode.wait_for(|mode| *mode != PodResourcesMode::Absent));
            if gone.await.is_none() {
                return;
            }
            if let Err(error) = self.serve_once(&dir, &socket, &stop).await {
                tracing::warn!(error, "pod-resources API not served");
                return;
            }
            if stop.is_cancelled() {
                // As a stopped kubelet, it leaves the file; a successor may have replaced it already.
                return;
            }
            let _ = std::fs::remove_file(&socket);
        }
    }

    async fn serve_once(&self, dir: &Path, socket: &Path, stop: &CancellationToken) -> Result<(), String> {
        std::fs::create_dir_all(dir).map_err(|error| error.to_string())?;
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).map_err(|error| error.to_string())?;
        let mut mode = self.mode.subscribe();
        let stop = stop.clone();
        let ended = async move {
            stop.run_until_cancelled(mode.wait_for(|mode| *mode == PodResourcesMode::Absent)).await;
        };
        let router = Server::builder().add_service(PodResourcesListerServer::new(self.clone()));
        let served = router.serve_with_incoming_shutdown(UnixListenerStream::new(listener), ended);
        served.await.map_err(|error| error.to_string())
    }
}

fn key(claim: &Claim) -> (String, String) {
    (claim.namespace.clone(), claim.name.clone())
}

impl Listed {
    fn pod(&self, with_claim: bool) -> PodResources {
        let resource = |device: &Device| ClaimResource {
            cdi_devices: device.cdi_device_ids.iter().map(|id| CdiDevice { name: id.clone() }).collect(),
            driver_name: self.driver.clone(),
            pool_name: device.pool_name.clone(),
            device_name: device.device_name.clone(),
            share_id: device.share_id.clone(),
        };
        let claim = DynamicResource {
            claim_name: self.claim.name.clone(),
            claim_namespace: self.claim.namespace.clone(),
            claim_resources: self.devices.iter().map(resource).collect(),
        };
        let dynamic_resources = if with_claim { vec![claim] } else { Vec::new() };
        PodResources {
            name: format!("pod-of-{}", self.claim.name),
            namespace: self.claim.namespace.clone(),
            containers: vec![ContainerResources { name: "main".to_owned(), dynamic_resources }],
        }
    }
}

#[tonic::async_trait]
impl PodResourcesLister for KnownClaims {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let mut mode = self.mode.subscribe();
        let mode = mode.wait_for(|mode| *mode != PodResourcesMode::Hang).await;
        let with_claims = mode.is_ok_and(|mode| *mode == PodResourcesMode::Claims);
        let pod_resources = self.lock().values().map(|listed| listed.pod(with_claims)).collect();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }
}
