//! A stateful fake API server with the resources that a DRA driver uses, over real HTTP and TLS.
//!
//! It implements the behaviour that correct clients depend on: one resource version for all
//! objects, watches that resume or return 410, conflicts, generated names, canonical quantities,
//! feature gates, and validation of slices. It has no authorisation, admission or garbage
//! collection. Tests inject failures with [`FakeApi::set_outage`], [`FakeApi::set_gates`],
//! [`FakeApi::fail_next`] and [`FakeApi::forget_history`].

mod discovery;
mod gates;
mod http;
mod kinds;
mod objects;
mod representation;
mod rules;
mod selectors;
mod status;
mod store;
mod table;
mod tls;
mod watch;

pub use gates::Gates;

use kinds::Kind;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use status::Failure;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use store::Store;
use tokio_util::sync::CancellationToken;

/// Options of the fake API server.
#[derive(Clone, Debug)]
pub struct FakeApiOptions {
    /// The address to listen on; port 0 selects a free port.
    pub listen: SocketAddr,
    /// The version that `/version` reports.
    pub version: String,
}

impl Default for FakeApiOptions {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 0)), version: "v1.37.0".to_owned() }
    }
}

/// An outage of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// Connections are closed, and new ones are refused.
    Refuse,
    /// Every request is answered with 503.
    Answer503,
}

/// A logged request to a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`.
    pub verb: &'static str,
    /// The plural name.
    pub resource: &'static str,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub dry_run: bool,
    /// The client asked for the metadata of objects only.
    pub metadata_only: bool,
}

/// A request that must fail.
#[derive(Clone, Debug)]
struct InjectedFailure {
    verb: String,
    resource: String,
    left: usize,
    failure: Failure,
}

/// State that all connections share.
#[derive(Debug)]
pub(crate) struct Server {
    state: Mutex<State>,
    /// The latest resource version. A new value wakes the watches.
    changed: tokio::sync::watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    store: Store,
    gates: Gates,
    outage: Option<Outage>,
    requests: Vec<Request>,
    injected: Vec<InjectedFailure>,
    version: String,
}

/// Exclusive access to the store.
pub(crate) struct Locked<'a>(MutexGuard<'a, State>);

impl std::ops::Deref for Locked<'_> {
    type Target = Store;
    fn deref(&self) -> &Store {
        &self.0.store
    }
}

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self) -> Locked<'_> {
        Locked(self.state())
    }

    fn version(&self) -> String {
        self.state().version.clone()
    }

    fn outage(&self) -> Option<Outage> {
        self.state().outage
    }

    /// Changes the store and wakes the watches.
    fn write<T>(&self, change: impl FnOnce(&mut Store, &Gates) -> T) -> T {
        let mut state = self.state();
        let gates = state.gates;
        let done = change(&mut state.store, &gates);
        let version = state.store.version();
        drop(state);
        self.changed.send_replace(version);
        done
    }

    /// Logs a request. Returns the injected failure, if a test requested one.
    fn record(&self, request: Request) -> Result<(), Failure> {
        let mut state = self.state();
        let injected = state
            .injected
            .iter_mut()
            .find(|o| o.left > 0 && o.verb == request.verb && o.resource == request.resource);
        let failure = injected.map(|injected| {
            injected.left -= 1;
            injected.failure.clone()
        });
        state.requests.push(request);
        failure.map_or(Ok(()), Err)
    }
}

/// The running server. It stops when this is dropped.
#[derive(Debug)]
pub struct FakeApi {
    server: Arc<Server>,
    address: SocketAddr,
    certificate: tls::Certificate,
    stop: CancellationToken,
}

impl FakeApi {
    /// Listens and serves in tasks of the current runtime.
    pub async fn start(options: FakeApiOptions) -> anyhow::Result<Self> {
        let state = State {
            store: Store::default(),
            gates: Gates::default(),
            outage: None,
            requests: Vec::new(),
            injected: Vec::new(),
            version: options.version,
        };
        let server =
            Arc::new(Server { state: Mutex::new(state), changed: tokio::sync::watch::Sender::new(0) });
        let certificate = tls::Certificate::new(options.listen.ip())?;
        let listener = tokio::net::TcpListener::bind(options.listen).await?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        tokio::spawn(tls::serve(server.clone(), listener, certificate.acceptor()?, stop.clone()));
        Ok(Self { server, address, certificate, stop })
    }

    /// `https://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Writes a kubeconfig and the certificate it refers to. Returns the path of the kubeconfig.
    pub fn kubeconfig_path(&self, dir: &Path) -> anyhow::Result<PathBuf> {
        let ca = dir.join("fake-api-ca.pem");
        std::fs::write(&ca, self.certificate.pem())?;
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: fake\n\
             clusters:\n- name: fake\n  cluster: {{server: \"{}\", certificate-authority: \"{}\"}}\n\
             users:\n- name: fake\n  user: {{token: fake}}\n\
             contexts:\n- name: fake\n  context: {{cluster: fake, user: fake}}\n",
            self.url(),
            ca.display(),
        );
        let path = dir.join("kubeconfig");
        std::fs::write(&path, text)?;
        Ok(path)
    }

    /// A client of the real server, if `DIVVY_TEST_KUBECONFIG` names a kubeconfig, or else of a
    /// fake server, which the caller must keep alive.
    pub async fn or_real() -> anyhow::Result<(kube::Client, Option<Self>)> {
        let Some(path) = std::env::var_os("DIVVY_TEST_KUBECONFIG") else {
            let fake = Self::start(FakeApiOptions::default()).await?;
            return Ok((fake.client()?, Some(fake)));
        };
        let kubeconfig = kube::config::Kubeconfig::read_from(path)?;
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await?;
        Ok((kube::Client::try_from(config)?, None))
    }

    /// A client over TLS.
    pub fn client(&self) -> anyhow::Result<kube::Client> {
        let mut config = kube::Config::new(self.url().parse()?);
        config.root_cert = Some(vec![self.certificate.der()]);
        Ok(kube::Client::try_from(config)?)
    }

    /// A client without a socket. With tokio's paused clock, waiting then takes no real time, so
    /// that an hour of outage can be simulated.
    pub fn client_in_process(&self) -> kube::Client {
        let (server, router) = (self.server.clone(), http::router(self.server.clone()));
        let service = tower::service_fn(move |request: axum::http::Request<kube::client::Body>| {
            let (server, router) = (server.clone(), router.clone());
            async move {
                if server.outage() == Some(Outage::Refuse) {
                    return Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
                }
                tower::ServiceExt::oneshot(router, request).await.map_err(|never| match never {})
            }
        });
        kube::Client::new(service, "default")
    }

    /// Stores an object without any validation; it replaces an object of the same name.
    pub fn put(&self, object: impl Serialize) -> Value {
        let mut object = serde_json::to_value(object).unwrap_or_default();
        let Some(kind) = Kind::of_object(&object) else { return Value::Null };
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let key = store::key(kind, &text("namespace"), &text("name"));
        if text("uid").is_empty() {
            object["metadata"]["uid"] = uuid::Uuid::new_v4().to_string().into();
            object["metadata"]["creationTimestamp"] = objects::now().into();
        }
        (*self.server.write(|store, _| store.put(key, object))).clone()
    }

    /// Reads an object. The namespace of cluster-scoped objects is empty.
    pub fn get<K: k8s_openapi::Resource + DeserializeOwned>(&self, namespace: &str, name: &str) -> Option<K> {
        let object = self.server.store().get(&store::key(Kind::of::<K>()?, namespace, name)).cloned()?;
        serde_json::from_value((*object).clone()).ok()
    }

    /// All objects of a kind.
    pub fn list<K: k8s_openapi::Resource + DeserializeOwned>(&self) -> Vec<K> {
        let Some(kind) = Kind::of::<K>() else { return Vec::new() };
        let objects: Vec<_> = self.server.store().list(kind).cloned().collect();
        objects.iter().filter_map(|object| serde_json::from_value((**object).clone()).ok()).collect()
    }

    /// Removes an object, even if it has finalizers.
    pub fn delete<K: k8s_openapi::Resource>(&self, namespace: &str, name: &str) -> bool {
        let Some(kind) = Kind::of::<K>() else { return false };
        self.server.write(|store, _| store.remove(&store::key(kind, namespace, name))).is_some()
    }

    /// Removes every object of a kind, as a kubelet does with the slices of its node.
    pub fn delete_all<K: k8s_openapi::Resource>(&self) {
        let Some(kind) = Kind::of::<K>() else { return };
        self.server.write(|store, _| {
            let keys: Vec<_> = store
                .list(kind)
                .map(|object| {
                    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
                    store::key(kind, text("namespace"), text("name"))
                })
                .collect();
            for key in keys {
                store.remove(&key);
            }
        });
    }

    /// Sets the feature gates.
    pub fn set_gates(&self, gates: Gates) {
        self.server.state().gates = gates;
    }

    /// Sets the version that `/version` reports.
    pub fn set_version(&self, version: &str) {
        self.server.state().version = version.to_owned();
    }

    /// Starts or ends an outage.
    pub fn set_outage(&self, outage: Option<Outage>) {
        self.server.state().outage = outage;
        self.server.changed.send_modify(|_| {});
    }

    /// Starts or ends [`Outage::Refuse`].
    pub fn set_unavailable(&self, unavailable: bool) {
        self.set_outage(unavailable.then_some(Outage::Refuse));
    }

    /// Fails the next `count` requests of a verb on a resource with an HTTP code.
    pub fn fail_next(&self, verb: &str, resource: &str, count: usize, code: u16) {
        let reason = match code {
            409 => "Conflict",
            422 => "Invalid",
            429 => "TooManyRequests",
            403 => "Forbidden",
            _ => "InternalError",
        };
        self.server.state().injected.push(InjectedFailure {
            verb: verb.to_owned(),
            resource: resource.to_owned(),
            left: count,
            failure: Failure::new(code, reason, "failure injected by a test"),
        });
    }

    /// Discards the event history: watches that try to resume get 410.
    pub fn forget_history(&self) {
        self.server.state().store.compact();
        self.server.changed.send_modify(|_| {});
    }

    /// All requests to resources so far.
    pub fn requests(&self) -> Vec<Request> {
        self.server.state().requests.clone()
    }

    /// The number of requests of a verb on a resource, without dry runs.
    pub fn count(&self, verb: &str, resource: &str) -> usize {
        let state = self.server.state();
        state.requests.iter().filter(|r| r.verb == verb && r.resource == resource && !r.dry_run).count()
    }

    /// Clears the request log.
    pub fn clear_requests(&self) {
        self.server.state().requests.clear();
    }
}

impl Drop for FakeApi {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
