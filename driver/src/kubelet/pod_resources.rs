//! Client of the kubelet's pod-resources API: the claims of the containers on this node.
//!
//! Each call opens its own connection, because calls are minutes apart and the kubelet may restart
//! in between. The kubelet reports claims by default from 1.34 on (gate
//! `KubeletPodResourcesDynamicResources`), always from 1.36 on.

use crate::claims::uses::{KubeletView, Listed, ListedClaim, ViewError};
use crate::paths::HostPaths;
use divvy_api::names::DRIVER;
use divvy_kubelet::pod_resources::pod_resources_lister_client::PodResourcesListerClient;
use divvy_kubelet::pod_resources::{DynamicResource, ListPodResourcesRequest, ListPodResourcesResponse};
use futures::FutureExt;
use futures::future::BoxFuture;
use std::path::PathBuf;
use std::time::Duration;
use tonic::transport::Endpoint;

/// Maximum size of an answer. Go clients of this API use the same limit; gRPC's default is 4 MiB.
const ANSWER_MAX_BYTES: usize = 16 << 20;

/// The pod-resources API of this node's kubelet.
#[derive(Clone, Debug)]
pub struct PodResources {
    socket: PathBuf,
    /// Deadline of a call, with the connection.
    within: Duration,
}

impl PodResources {
    /// The API below the kubelet's root directory. Nothing is opened yet.
    pub fn new(paths: &HostPaths, within: Duration) -> Self {
        Self { socket: paths.pod_resources_dir().join("kubelet.sock"), within }
    }

    async fn call(&self) -> Result<ListPodResourcesResponse, Box<dyn std::error::Error + Send + Sync>> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.socket.display()))?;
        let client = PodResourcesListerClient::new(endpoint.connect().await?);
        let mut client = client.max_decoding_message_size(ANSWER_MAX_BYTES);
        Ok(client.list(ListPodResourcesRequest {}).await?.into_inner())
    }
}

impl KubeletView for PodResources {
    fn list(&self) -> BoxFuture<'_, Result<Listed, ViewError>> {
        let call = async {
            match tokio::time::timeout(self.within, self.call()).await {
                Ok(Ok(answer)) => Ok(listed(answer)),
                Ok(Err(cause)) => Err(ViewError::Call { socket: self.socket.clone(), cause }),
                Err(_) => Err(ViewError::Deadline { socket: self.socket.clone(), within: self.within }),
            }
        };
        call.boxed()
    }
}

/// The parts of an answer that matter.
fn listed(answer: ListPodResourcesResponse) -> Listed {
    let mut listed = Listed::default();
    for pod in answer.pod_resources {
        let claims = pod.containers.into_iter().flat_map(|container| container.dynamic_resources);
        for claim in claims {
            listed.reports_claims = true;
            listed.claims.extend(ours(claim));
        }
        listed.pods.insert((pod.namespace, pod.name));
    }
    listed
}

/// The claim, unless all its devices belong to other drivers.
fn ours(claim: DynamicResource) -> Option<ListedClaim> {
    let is_prepared = !claim.claim_resources.is_empty();
    let devices = claim.claim_resources.into_iter().filter(|device| device.driver_name == DRIVER);
    let mut cdi_ids: Vec<String> =
        devices.flat_map(|device| device.cdi_devices).map(|device| device.name).collect();
    // The kubelet repeats the ids of earlier devices for each device of a claim.
    cdi_ids.sort();
    cdi_ids.dedup();
    let is_ours = !is_prepared || !cdi_ids.is_empty();
    is_ours.then_some(ListedClaim { namespace: claim.claim_namespace, name: claim.claim_name, cdi_ids })
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_kubelet::pod_resources as api;

    fn device(driver: &str, ids: &[&str]) -> api::ClaimResource {
        let cdi_devices = ids.iter().map(|id| api::CdiDevice { name: (*id).to_owned() }).collect();
        api::ClaimResource { cdi_devices, driver_name: driver.to_owned(), ..Default::default() }
    }

    fn check(devices: Vec<api::ClaimResource>, expected: Option<&[&str]>) {
        let claim = DynamicResource {
            claim_name: "c".to_owned(),
            claim_namespace: "ns".to_owned(),
            claim_resources: devices,
        };
        let container = api::ContainerResources { name: String::new(), dynamic_resources: vec![claim] };
        let pod = api::PodResources {
            name: "p".to_owned(),
            namespace: "ns".to_owned(),
            containers: vec![container],
        };
        let found = listed(ListPodResourcesResponse { pod_resources: vec![pod] });
        assert!(found.reports_claims && found.pods.contains(&("ns".to_owned(), "p".to_owned())));
        let ids = found.claims.first().map(|claim| claim.cdi_ids.iter().map(String::as_str).collect());
        assert_eq!(ids, expected.map(<[&str]>::to_vec));
    }

    #[test]
    fn claims_with_devices_of_this_driver_are_listed() {
        check(vec![device(DRIVER, &["a"]), device(DRIVER, &["a", "b"])], Some(&["a", "b"]));
        check(vec![device("other.example.com", &["x"]), device(DRIVER, &["a"])], Some(&["a"]));
        check(vec![device("other.example.com", &["x"])], None);
        check(Vec::new(), Some(&[]));
    }

    #[test]
    fn pods_without_claims_report_none() {
        let pod = api::PodResources { containers: vec![Default::default()], ..Default::default() };
        assert!(!listed(ListPodResourcesResponse { pod_resources: vec![pod] }).reports_claims);
    }
}
