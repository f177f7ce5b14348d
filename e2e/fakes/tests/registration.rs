//! The registration of a driver, from the driver's view. The tests run on the fake kubelet, or with
//! `DIVVY_TEST_KUBELET_ROOT=DIR` on a real one. A test that passes only on the fake reveals a bug
//! of the fake.
#![allow(clippy::unwrap_used)]

use divvy_fakes::kubelet::{FakeKubelet, KubeletOptions};
use divvy_kubelet::registration::registration_server::{Registration, RegistrationServer};
use divvy_kubelet::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use std::path::PathBuf;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// A real kubelet scans once a second, and backs off after a failure.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Long enough for several scans.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(4);

/// A call of the kubelet.
#[derive(Debug, PartialEq, Eq)]
enum KubeletCall {
    GetInfo,
    Registered,
    Rejected,
}

/// A driver that only implements the registration.
struct TestDriver {
    info: PluginInfo,
    calls: mpsc::UnboundedSender<KubeletCall>,
}

#[tonic::async_trait]
impl Registration for TestDriver {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let _ = self.calls.send(KubeletCall::GetInfo);
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        status: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let registered = status.into_inner().plugin_registered;
        let _ = self.calls.send(if registered { KubeletCall::Registered } else { KubeletCall::Rejected });
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// A kubelet's root directory, and a driver name that is unique to the test.
struct TestKubelet {
    root: PathBuf,
    driver: String,
    _fake: Option<(FakeKubelet, tempfile::TempDir)>,
    sockets: Vec<PathBuf>,
}

impl TestKubelet {
    fn new(test: &str) -> Self {
        let (root, fake) = match std::env::var_os("DIVVY_TEST_KUBELET_ROOT") {
            Some(root) => (PathBuf::from(root), None),
            None => {
                let dir = tempfile::tempdir().unwrap();
                let kubelet = FakeKubelet::start(dir.path(), KubeletOptions::default()).unwrap();
                (dir.path().to_owned(), Some((kubelet, dir)))
            }
        };
        Self { root, driver: format!("{test}.example.com"), _fake: fake, sockets: Vec::new() }
    }

    /// Listens on `<driver><suffix>`. The channel receives the kubelet's calls.
    fn driver(&mut self, suffix: &str, version: &str) -> mpsc::UnboundedReceiver<KubeletCall> {
        let (calls, received) = mpsc::unbounded_channel();
        let plugin = self.root.join("plugins").join(&self.driver);
        std::fs::create_dir_all(&plugin).unwrap();
        let endpoint = plugin.join("dra.sock");
        let _ = std::fs::remove_file(&endpoint);
        let service = UnixListenerStream::new(UnixListener::bind(&endpoint).unwrap());
        let info = PluginInfo {
            r#type: divvy_kubelet::PLUGIN_TYPE.to_owned(),
            name: self.driver.clone(),
            endpoint: endpoint.to_string_lossy().into_owned(),
            supported_versions: vec![version.to_owned()],
        };
        let server = || RegistrationServer::new(TestDriver { info: info.clone(), calls: calls.clone() });
        // The service socket must accept connections, but these tests make no DRA calls.
        tokio::spawn(Server::builder().add_service(server()).serve_with_incoming(service));
        let socket = self.root.join("plugins_registry").join(format!("{}{suffix}", self.driver));
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        tokio::spawn(Server::builder().add_service(server()).serve_with_incoming(listener));
        self.sockets.push(socket);
        received
    }
}

impl Drop for TestKubelet {
    fn drop(&mut self) {
        for socket in &self.sockets {
            let _ = std::fs::remove_file(socket);
        }
        let _ = std::fs::remove_dir_all(self.root.join("plugins").join(&self.driver));
    }
}

/// The next call that is not GetInfo.
async fn result(received: &mut mpsc::UnboundedReceiver<KubeletCall>) -> KubeletCall {
    loop {
        match tokio::time::timeout(TIMEOUT, received.recv()).await.unwrap().unwrap() {
            KubeletCall::GetInfo => {}
            call => return call,
        }
    }
}

#[tokio::test]
async fn driver_gets_get_info_and_then_the_registration() {
    let mut kubelet = TestKubelet::new("asked");
    let mut received = kubelet.driver("@reg.sock", "v1.DRAPlugin");
    assert_eq!(tokio::time::timeout(TIMEOUT, received.recv()).await.unwrap(), Some(KubeletCall::GetInfo));
    assert_eq!(result(&mut received).await, KubeletCall::Registered);
}

#[tokio::test]
async fn recreated_socket_is_registered_again() {
    let mut kubelet = TestKubelet::new("anew");
    assert_eq!(result(&mut kubelet.driver("@reg.sock", "v1.DRAPlugin")).await, KubeletCall::Registered);
    assert_eq!(result(&mut kubelet.driver("@reg.sock", "v1.DRAPlugin")).await, KubeletCall::Registered);
}

#[tokio::test]
async fn driver_of_an_unknown_version_is_rejected() {
    let mut kubelet = TestKubelet::new("unknown");
    assert_eq!(result(&mut kubelet.driver("@reg.sock", "v9.DRAPlugin")).await, KubeletCall::Rejected);
}

/// If this test fails, the `@` in the driver's socket name is no longer needed.
#[tokio::test]
async fn socket_name_without_an_at_sign_gets_no_call() {
    let mut kubelet = TestKubelet::new("unheard");
    let mut received = kubelet.driver("-reg.sock", "v1.DRAPlugin");
    assert!(tokio::time::timeout(SILENCE_TIMEOUT, received.recv()).await.is_err());
}
