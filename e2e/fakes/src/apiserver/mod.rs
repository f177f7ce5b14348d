//! A stateful fake API server: real HTTP over TLS, in this process or as one
//! of its own, with the resources that a DRA driver touches.
//!
//! It keeps the promises that a client's correctness hangs on: one resource
//! version for all, watches that resume or say 410, conflicts by version and
//! by precondition, names that are generated, quantities rewritten in their
//! canonical form, fields dropped when their gate is off, slices refused with
//! 422. It has no authorisation, no admission and no garbage collection.
//!
//! A test misbehaves it on purpose: [`FakeApi::set_outage`],
//! [`FakeApi::set_gates`], [`FakeApi::fail_next`], [`FakeApi::forget_history`].

mod discovery;
mod gates;
mod http;
mod kinds;
mod objects;
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

/// How to start.
#[derive(Clone, Debug)]
pub struct FakeApiOptions {
    /// Port 0 takes a free one.
    pub listen: SocketAddr,
    /// What `/version` says.
    pub version: String,
}

impl Default for FakeApiOptions {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 0)), version: "v1.37.0".to_owned() }
    }
}

/// A server that does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// Connections are cut and new ones refused.
    Refuse,
    /// Every request is answered with 503.
    Answer503,
}

/// One request to a resource, as the log keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`.
    pub verb: &'static str,
    /// Plural.
    pub resource: &'static str,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub dry_run: bool,
}

/// A request that is to fail.
#[derive(Clone, Debug)]
struct Ordered {
    verb: String,
    resource: String,
    left: usize,
    failure: Failure,
}

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Server {
    state: Mutex<State>,
    /// Latest resource version, or a nudge to look again.
    changed: tokio::sync::watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    store: Store,
    gates: Gates,
    outage: Option<Outage>,
    requests: Vec<Request>,
    ordered: Vec<Ordered>,
    version: String,
}

/// The store, while nobody else changes it.
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

    /// Logs a request, and fails it if a test ordered so.
    fn record(&self, request: Request) -> Result<(), Failure> {
        let mut state = self.state();
        let ordered = state
            .ordered
            .iter_mut()
            .find(|o| o.left > 0 && o.verb == request.verb && o.resource == request.resource);
        let failure = ordered.map(|ordered| {
            ordered.left -= 1;
            ordered.failure.clone()
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
            ordered: Vec::new(),
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

    /// Writes a kubeconfig and the certificate it points to; gives the kubeconfig's path.
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

    /// A client of the server that judges a test: the real one of the kubeconfig that `DIVVY_TEST_KUBECONFIG` names, or a
    /// fake one, which is to be kept.
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

    /// A client without a socket below it: with it, tokio's paused clock runs
    /// ahead while everybody waits, so an hour of outage takes no time.
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

    /// Stores an object as it is, replacing one of that name, past every rule.
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

    /// An object; the namespace of a cluster-scoped one is empty.
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

    /// Removes an object, finalizers or not.
    pub fn delete<K: k8s_openapi::Resource>(&self, namespace: &str, name: &str) -> bool {
        let Some(kind) = Kind::of::<K>() else { return false };
        self.server.write(|store, _| store.remove(&store::key(kind, namespace, name))).is_some()
    }

    /// Removes every object of a kind, as a kubelet does with its node's slices.
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

    /// Turns features off and on.
    pub fn set_gates(&self, gates: Gates) {
        self.server.state().gates = gates;
    }

    /// What `/version` says from now on.
    pub fn set_version(&self, version: &str) {
        self.server.state().version = version.to_owned();
    }

    /// Takes the server away, or brings it back.
    pub fn set_outage(&self, outage: Option<Outage>) {
        self.server.state().outage = outage;
        self.server.changed.send_modify(|_| {});
    }

    /// [`Outage::Refuse`] or none.
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
        self.server.state().ordered.push(Ordered {
            verb: verb.to_owned(),
            resource: resource.to_owned(),
            left: count,
            failure: Failure::new(code, reason, "failed on request of a test"),
        });
    }

    /// Forgets what happened: watches that want to resume get 410.
    pub fn forget_history(&self) {
        self.server.state().store.compact();
        self.server.changed.send_modify(|_| {});
    }

    /// All requests to resources so far.
    pub fn requests(&self) -> Vec<Request> {
        self.server.state().requests.clone()
    }

    /// How many requests of a verb on a resource there were, dry runs apart.
    pub fn count(&self, verb: &str, resource: &str) -> usize {
        let state = self.server.state();
        state.requests.iter().filter(|r| r.verb == verb && r.resource == resource && !r.dry_run).count()
    }

    /// Starts the log anew.
    pub fn clear_requests(&self) {
        self.server.state().requests.clear();
    }
}

impl Drop for FakeApi {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
