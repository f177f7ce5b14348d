//! How a kubelet takes a driver on, seen by the driver: on the fake kubelet, or
//! with `DIVVY_TEST_KUBELET_ROOT=DIR` on a real one. What passes on the fake and
//! fails there is a bug of the fake.
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

/// A real kubelet looks once a second, and waits longer after a failure.
const PATIENCE: Duration = Duration::from_secs(60);
/// Long enough for several looks.
const SILENCE: Duration = Duration::from_secs(4);

/// What the kubelet said.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Asked,
    Registered,
    Refused,
}

/// A driver that only registers.
struct Toy {
    info: PluginInfo,
    heard: mpsc::UnboundedSender<Heard>,
}

#[tonic::async_trait]
impl Registration for Toy {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let _ = self.heard.send(Heard::Asked);
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        status: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let registered = status.into_inner().plugin_registered;
        let _ = self.heard.send(if registered { Heard::Registered } else { Heard::Refused });
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// A kubelet's root, and a driver's name that no other test has.
struct World {
    root: PathBuf,
    driver: String,
    _fake: Option<(FakeKubelet, tempfile::TempDir)>,
    sockets: Vec<PathBuf>,
}

impl World {
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

    /// Listens on `<driver><suffix>`; what the kubelet says comes through the channel.
    fn driver(&mut self, suffix: &str, version: &str) -> mpsc::UnboundedReceiver<Heard> {
        let (heard, hears) = mpsc::unbounded_channel();
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
        let server = || RegistrationServer::new(Toy { info: info.clone(), heard: heard.clone() });
        // Something must answer on the service socket; no DRA call comes in these tests.
        tokio::spawn(Server::builder().add_service(server()).serve_with_incoming(service));
        let socket = self.root.join("plugins_registry").join(format!("{}{suffix}", self.driver));
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        tokio::spawn(Server::builder().add_service(server()).serve_with_incoming(listener));
        self.sockets.push(socket);
        hears
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for socket in &self.sockets {
            let _ = std::fs::remove_file(socket);
        }
        let _ = std::fs::remove_dir_all(self.root.join("plugins").join(&self.driver));
    }
}

/// The next thing that is not the same question again.
async fn verdict(hears: &mut mpsc::UnboundedReceiver<Heard>) -> Heard {
    loop {
        match tokio::time::timeout(PATIENCE, hears.recv()).await.unwrap().unwrap() {
            Heard::Asked => {}
            verdict => return verdict,
        }
    }
}

#[tokio::test]
async fn a_driver_is_asked_who_it_is_and_told_that_it_is_registered() {
    let mut world = World::new("asked");
    let mut hears = world.driver("@reg.sock", "v1.DRAPlugin");
    assert_eq!(tokio::time::timeout(PATIENCE, hears.recv()).await.unwrap(), Some(Heard::Asked));
    assert_eq!(verdict(&mut hears).await, Heard::Registered);
}

#[tokio::test]
async fn a_socket_that_is_made_anew_is_registered_anew() {
    let mut world = World::new("anew");
    assert_eq!(verdict(&mut world.driver("@reg.sock", "v1.DRAPlugin")).await, Heard::Registered);
    assert_eq!(verdict(&mut world.driver("@reg.sock", "v1.DRAPlugin")).await, Heard::Registered);
}

#[tokio::test]
async fn a_driver_of_an_unknown_version_is_told_that_it_is_refused() {
    let mut world = World::new("unknown");
    assert_eq!(verdict(&mut world.driver("@reg.sock", "v9.DRAPlugin")).await, Heard::Refused);
}

/// Should this test ever fail, the `@` in the driver's socket name has become needless.
#[tokio::test]
async fn a_socket_name_without_an_at_sign_is_never_heard() {
    let mut world = World::new("unheard");
    let mut hears = world.driver("-reg.sock", "v1.DRAPlugin");
    assert!(tokio::time::timeout(SILENCE, hears.recv()).await.is_err());
}
