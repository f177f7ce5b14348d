//! A cluster for tests: a fake API server with the chart's objects, the controller as a process,
//! and a TLS client that calls the webhook as the API server does.

use divvy_controller::webhook::{FOREIGN_REQUESTS_PATH, PATH};
use divvy_fakes::apiserver::{FakeApi, FakeApiOptions};
use divvy_slices::kinds::{ANNOTATION, Facts, fingerprint};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::resource::v1::Device;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub(crate) const NAMESPACE: &str = "divvy";
/// Time limit of every wait in a test.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct TestCluster {
    pub(crate) api: FakeApi,
    kubeconfig: PathBuf,
    dir: TempDir,
}

impl TestCluster {
    pub(crate) async fn new() -> Self {
        let api = FakeApi::start(FakeApiOptions::default()).await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = api.kubeconfig_path(dir.path()).unwrap();
        for (kind, name, path) in [
            ("ValidatingWebhookConfiguration", "divvy", PATH),
            ("MutatingWebhookConfiguration", "divvy-foreign-requests", FOREIGN_REQUESTS_PATH),
        ] {
            api.put(json!({
                "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name},
                "webhooks": [{"name": "review.divvy.dev", "sideEffects": "None",
                    "admissionReviewVersions": ["v1"],
                    "clientConfig": {"service": {"namespace": NAMESPACE, "name": "divvy-webhook",
                        "path": path}}}],
            }));
        }
        Self { api, kubeconfig, dir }
    }

    /// A slice of our driver with one MIG instance per profile, as an older node daemon writes it.
    pub(crate) fn slice(&self, name: &str, profiles: &[&str]) {
        self.put_slice(name, profiles, None);
    }

    /// The same with the annotation that names the kinds of its devices.
    pub(crate) fn annotated_slice(&self, name: &str, profiles: &[&str]) {
        self.put_slice(name, profiles, Some(kinds(profiles)));
    }

    fn put_slice(&self, name: &str, profiles: &[&str], kinds: Option<String>) {
        let annotations = kinds.map(|kinds| json!({ANNOTATION: kinds}));
        self.api.put(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
            "metadata": {"name": name, "annotations": annotations},
            "spec": {"driver": "gpu.divvy.dev", "nodeName": "n1", "devices": instances(profiles),
                "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1}},
        }));
    }
    /// A class of another owner.
    pub(crate) fn class(&self, name: &str, resource: Option<&str>) -> Value {
        self.api.put(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name},
            "spec": {"extendedResourceName": resource},
        }))
    }

    /// The chart's classes, and classes of an administrator with similar selectors.
    pub(crate) fn classes_with_selectors(&self) {
        for (name, types) in [
            ("gpu.divvy.dev", "['gpu']"),
            ("mps.divvy.dev", "['mps']"),
            ("shared-gpu", "['mps']"),
            ("timeslice-or-mps", "['timeslice', 'mps']"),
        ] {
            let expression = format!(
                "device.driver == 'gpu.divvy.dev' && device.attributes['gpu.divvy.dev'].type in {types}"
            );
            self.api.put(json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name},
                "spec": {"selectors": [{"cel": {"expression": expression}}]},
            }));
        }
    }

    fn command(&self, sub: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-controller"));
        command.env_clear().args([sub, "--log-level", "info,divvy_controller=debug", "--kubeconfig"]);
        command.arg(&self.kubeconfig);
        command
    }

    /// Starts the controller. It may not be ready yet.
    pub(crate) fn start(&self, flags: &[&str]) -> Controller {
        let mut command = self.command("run");
        command.args(["--http-address", "off", "--webhook-address", "127.0.0.1:0"]).args(flags);
        self.spawn(command)
    }

    /// Starts `divvy-controller decommission`.
    pub(crate) fn decommission(&self, flags: &[&str]) -> Controller {
        let mut command = self.command("decommission");
        command.args(flags);
        self.spawn(command)
    }

    fn spawn(&self, mut command: Command) -> Controller {
        let (log, path) = tempfile::NamedTempFile::new_in(self.dir.path()).unwrap().keep().unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Controller { child, log: path }
    }

    /// Waits until the webhook of this replica answers, with the published CA bundle.
    pub(crate) async fn webhook(&self, controller: &Controller) -> Webhook {
        let bundle = || {
            let configuration = self.api.get::<ValidatingWebhookConfiguration>("", "divvy")?;
            configuration.webhooks?.remove(0).client_config.ca_bundle
        };
        until("the certificate is trusted", || bundle().is_some()).await;
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&bundle().unwrap().0) {
            roots.add(certificate.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider);
        let config = config.with_safe_default_protocol_versions().unwrap();
        let config = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
        until("the webhook listens", || controller.webhook_address().is_some()).await;
        let webhook = Webhook { address: controller.webhook_address().unwrap(), config, path: PATH };
        until_async("the webhook answers", async || webhook.try_send(b"").await.is_ok()).await;
        webhook
    }
}

/// One MIG instance per profile.
fn instances(profiles: &[&str]) -> Vec<Value> {
    let device = |(at, profile): (usize, &&str)| {
        json!({"name": format!("gpu-0-mig-{at}"), "attributes": {
            "type": {"string": "mig"}, "profile": {"string": profile},
            "productName": {"string": "H100"}}})
    };
    profiles.iter().enumerate().map(device).collect()
}

/// The fingerprint of the kinds of these instances.
fn kinds(profiles: &[&str]) -> String {
    let devices: Vec<Device> = serde_json::from_value(Value::Array(instances(profiles))).unwrap();
    fingerprint(devices.iter().filter_map(Facts::of))
}

/// An AdmissionReview of a creation.
pub(crate) fn review(group: &str, kind: &str, object: Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "operation": "CREATE",
            "namespace": object["metadata"]["namespace"].as_str().unwrap_or("ns"),
            "kind": {"group": group, "version": "v1", "kind": kind}, "object": object,
        },
    })
}

/// Calls a replica as the API server does: over TLS, and trusting only the published CA bundle.
pub(crate) struct Webhook {
    address: SocketAddr,
    config: Arc<rustls::ClientConfig>,
    path: &'static str,
}

impl Webhook {
    /// The webhook for requests of other GPU schedulers, of the same replica.
    pub(crate) fn foreign_requests(self) -> Self {
        Self { path: FOREIGN_REQUESTS_PATH, ..self }
    }

    /// HTTP status and body.
    pub(crate) async fn send(&self, body: &[u8]) -> (u16, String) {
        self.try_send(body).await.unwrap()
    }

    /// HTTP status and decoded answer.
    pub(crate) async fn post(&self, review: &Value) -> (u16, Value) {
        let (code, body) = self.send(review.to_string().as_bytes()).await;
        (code, serde_json::from_str(&body).unwrap_or(Value::Null))
    }

    async fn try_send(&self, body: &[u8]) -> std::io::Result<(u16, String)> {
        let stream = tokio::net::TcpStream::connect(self.address).await?;
        let name = ServerName::try_from("divvy-webhook.divvy.svc").unwrap();
        let connector = tokio_rustls::TlsConnector::from(self.config.clone());
        let mut stream = connector.connect(name, stream).await?;
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: webhook\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.path,
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body).await?;
        let mut answer = String::new();
        // The server may close the connection without a TLS close_notify.
        let _ = stream.read_to_string(&mut answer).await;
        let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
        code.zip(body).ok_or_else(|| std::io::Error::other(answer))
    }
}

/// A running `divvy-controller`. It is killed on drop, and its log is printed if the test failed.
pub(crate) struct Controller {
    child: Child,
    log: PathBuf,
}

impl Controller {
    /// The address that it listens on, from its log.
    fn webhook_address(&self) -> Option<SocketAddr> {
        let log = self.log();
        let line =
            log.lines().find(|line| line.contains("listening") && line.contains("--webhook-address"))?;
        line.split_once("address=127.0.0.1")
            .and_then(|(_, rest)| format!("127.0.0.1{}", rest.split_whitespace().next()?).parse().ok())
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// SIGKILL: no cleanup.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM and returns the exit status.
    pub(crate) async fn stop(mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.exit_status().await
    }

    /// Waits for the process to exit.
    pub(crate) async fn exit_status(&mut self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "divvy-controller does not exit");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of divvy-controller ---\n{}", self.log());
        }
    }
}

/// Waits for a condition.
pub(crate) async fn until(what: &str, done: impl Fn() -> bool) {
    until_async(what, async || done()).await;
}

/// Waits for a condition that takes time to evaluate.
pub(crate) async fn until_async(what: &str, done: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !done().await {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "timeout while waiting until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
