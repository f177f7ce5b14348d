//! The fake kubelet with a test plugin: it must reject what the real kubelet rejects.
#![allow(clippy::unwrap_used)]

use divvy_fakes::kubelet::{
    CallError, FakeKubelet, KubeletOptions, PodResourcesMode, Versions, encode_authority, get_info,
};
use divvy_kubelet::dra::v1;
use divvy_kubelet::dra::v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use divvy_kubelet::pod_resources::ListPodResourcesRequest;
use divvy_kubelet::pod_resources::pod_resources_lister_client::PodResourcesListerClient;
use divvy_kubelet::registration::registration_server::{Registration, RegistrationServer};
use divvy_kubelet::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

const DRIVER: &str = "toy.example.com";
const TIMEOUT: Duration = Duration::from_secs(10);

struct TestPlugin {
    endpoint: PathBuf,
    versions: Vec<String>,
    /// The UIDs in the answer to a prepare, whatever was requested.
    answers: Vec<String>,
}

#[tonic::async_trait]
impl Registration for TestPlugin {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: divvy_kubelet::PLUGIN_TYPE.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: self.versions.clone(),
        }))
    }

    async fn notify_registration_status(
        &self,
        _: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl DraPlugin for TestPlugin {
    async fn node_prepare_resources(
        &self,
        _: Request<v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
        let one = |uid: &String| (uid.clone(), v1::NodePrepareResourceResponse::default());
        let claims = self.answers.iter().map(one).collect();
        Ok(Response::new(v1::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        _: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        std::future::pending().await
    }
}

/// Starts a plugin whose registration socket has that name.
fn start_plugin(root: &Path, name: &str, versions: &[&str], answers: &[&str]) -> PathBuf {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let endpoint = root.join("dra.sock");
    let registry = root.join("plugins_registry");
    std::fs::create_dir_all(&registry).unwrap();
    let make =
        || TestPlugin { endpoint: endpoint.clone(), versions: owned(versions), answers: owned(answers) };
    let service = UnixListenerStream::new(UnixListener::bind(&endpoint).unwrap());
    tokio::spawn(Server::builder().add_service(DraPluginServer::new(make())).serve_with_incoming(service));
    let socket = registry.join(name);
    let registration = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let server = Server::builder().add_service(RegistrationServer::new(make()));
    tokio::spawn(server.serve_with_incoming(registration));
    socket
}

fn claim(uid: &str) -> v1::Claim {
    v1::Claim { namespace: "default".to_owned(), uid: uid.to_owned(), name: uid.to_owned() }
}

#[test]
fn authority_is_encoded_as_grpc_go_does() {
    let encoded = encode_authority("/var/lib/kubelet/plugins_registry/a.b@reg.sock");
    assert_eq!(encoded, "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fa.b@reg.sock");
}

#[tokio::test]
async fn socket_name_with_an_at_sign_is_registered() {
    let root = tempfile::tempdir().unwrap();
    let socket = start_plugin(root.path(), "toy@reg.sock", &["v1.DRAPlugin"], &[]);
    assert_eq!(get_info(&socket).await.unwrap().name, DRIVER);
}

/// If this test fails, the `@` in the driver's socket name is no longer needed.
#[tokio::test]
async fn socket_name_without_an_at_sign_is_rejected() {
    let root = tempfile::tempdir().unwrap();
    let socket = start_plugin(root.path(), "toy-reg.sock", &["v1.DRAPlugin"], &[]);
    let error = get_info(&socket).await.unwrap_err();
    assert_eq!(error, "GetInfo: stream terminated by RST_STREAM with error code 1");
}

async fn check_prepare(requested: &[&str], answered: &[&str], expected: Result<usize, CallError>) {
    let root = tempfile::tempdir().unwrap();
    start_plugin(root.path(), "toy@reg.sock", &["v1.DRAPlugin"], answered);
    let kubelet = FakeKubelet::start(root.path(), KubeletOptions::default()).unwrap();
    kubelet.wait_registered(DRIVER, 1, TIMEOUT).await.unwrap();
    let claims: Vec<_> = requested.iter().map(|uid| claim(uid)).collect();
    assert_eq!(kubelet.prepare(DRIVER, &claims).await.map(|outcomes| outcomes.len()), expected);
}

#[tokio::test]
async fn answer_must_have_exactly_the_requested_uids() {
    check_prepare(&["a", "b"], &["a", "b"], Ok(2)).await;
    check_prepare(&["a", "b"], &["a"], Err(CallError::Skipped(1))).await;
    check_prepare(&["a"], &["a", "x"], Err(CallError::Unknown("x".to_owned()))).await;
}

#[tokio::test]
async fn hanging_call_ends_at_its_timeout() {
    let root = tempfile::tempdir().unwrap();
    start_plugin(root.path(), "toy@reg.sock", &["v1.DRAPlugin"], &[]);
    let call_timeout = Duration::from_millis(50);
    let options = KubeletOptions { call_timeout, ..KubeletOptions::default() };
    let kubelet = FakeKubelet::start(root.path(), options).unwrap();
    kubelet.wait_registered(DRIVER, 1, TIMEOUT).await.unwrap();
    let error = kubelet.unprepare(DRIVER, &[claim("a")]).await.unwrap_err();
    assert_eq!(error, CallError::Deadline(call_timeout));
}

#[tokio::test]
async fn plugin_without_a_supported_version_is_rejected() {
    let root = tempfile::tempdir().unwrap();
    start_plugin(root.path(), "toy@reg.sock", &["v1.DRAPlugin"], &[]);
    let options = KubeletOptions { versions: Versions::OnlyV1beta1, ..KubeletOptions::default() };
    let kubelet = FakeKubelet::start(root.path(), options).unwrap();
    while kubelet.registration_errors().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(kubelet.registration_errors()[0], r#"none of ["v1.DRAPlugin"] is supported"#);
    assert!(kubelet.plugins(DRIVER).is_empty());
}

/// The claims that the pod-resources API lists; an error if it does not answer in time.
async fn listed(root: &Path) -> Result<Vec<String>, String> {
    let socket = format!("unix://{}/pod-resources/kubelet.sock", root.display());
    let list = async {
        let mut client =
            PodResourcesListerClient::connect(socket).await.map_err(|error| error.to_string())?;
        client.list(ListPodResourcesRequest {}).await.map_err(|status| status.to_string())
    };
    let answer =
        tokio::time::timeout(Duration::from_millis(300), list).await.map_err(|late| late.to_string())?;
    let containers = answer?.into_inner().pod_resources.into_iter().flat_map(|pod| pod.containers);
    Ok(containers.flat_map(|container| container.dynamic_resources).map(|claim| claim.claim_name).collect())
}

#[tokio::test]
async fn prepared_claims_are_listed_until_unprepared() {
    let root = tempfile::tempdir().unwrap();
    start_plugin(root.path(), "toy@reg.sock", &["v1.DRAPlugin"], &["a"]);
    let mut kubelet = FakeKubelet::start(root.path(), KubeletOptions::default()).unwrap();
    kubelet.wait_registered(DRIVER, 1, TIMEOUT).await.unwrap();
    assert_eq!(listed(root.path()).await, Ok(vec![]));
    kubelet.prepare(DRIVER, &[claim("a")]).await.unwrap();
    assert_eq!(listed(root.path()).await, Ok(vec!["a".to_owned()]));
    kubelet.restart();
    for mode in [PodResourcesMode::Hang, PodResourcesMode::Absent] {
        kubelet.set_pod_resources(mode);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(listed(root.path()).await.is_err(), "{mode:?}");
    }
    kubelet.set_pod_resources(PodResourcesMode::NoClaims);
    while listed(root.path()).await != Ok(vec![]) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    kubelet.set_pod_resources(PodResourcesMode::Claims);
    assert_eq!(listed(root.path()).await, Ok(vec!["a".to_owned()]));
    kubelet.delete_pod_by_force(&claim("a"));
    assert_eq!(listed(root.path()).await, Ok(vec![]));
}
