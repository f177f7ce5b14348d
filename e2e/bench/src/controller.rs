//! Costs of the controller: its start and memory in a large cluster, and the duration of an admission
//! review.

use crate::api_server::ApiServer;
use crate::daemon::{EIGHT_GPUS, Plan};
use crate::large_cluster::LargeCluster;
use crate::node::{BenchNode, Dirs};
use crate::program;
use crate::stats::{figure, line, micros, percentile};
use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, ListParams, PostParams};
use serde_json::json;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Nodes of the cluster, with eight H100 each.
const NODES: usize = 1000;
/// Limit for each condition that the controller reaches by itself.
const READY_TIMEOUT: Duration = Duration::from_secs(300);
/// Reviews and empty requests in a round: enough for a 99th percentile.
const REVIEWS_PER_ROUND: usize = 500;

/// A running controller; killed when dropped.
struct Controller {
    child: Child,
    /// Address of the webhook.
    address: SocketAddr,
    /// Address of `/readyz`.
    probes: SocketAddr,
}

/// A free port. Its listener is dropped, and the controller takes the port at once.
fn free_address() -> Result<SocketAddr> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

impl Controller {
    fn start(program: &Path, kubeconfig: &Path, log: &Path, certificate: Option<&Path>) -> Result<Self> {
        let (address, probes) = (free_address()?, free_address()?);
        let certificate = certificate.into_iter().flat_map(|dir| [Path::new("--certificate-dir"), dir]);
        let child = Command::new(program)
            .args(["run", "--http-address", &probes.to_string(), "--webhook-address", &address.to_string()])
            .args(certificate)
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(log)?)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self { child, address, probes })
    }

    /// Whether `/readyz` answers 200.
    async fn is_ready(&self) -> bool {
        let answer = async {
            let mut stream = TcpStream::connect(self.probes).await?;
            stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n").await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            std::io::Result::Ok(answer)
        };
        answer.await.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
    }

    /// A value of `/proc/<pid>/status`, in MiB.
    fn memory_mib(&self, key: &str) -> Result<f64> {
        Ok(program::memory_kib(self.child.id(), key)? / 1024.0)
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls until `done` returns a value.
///
/// # Errors
/// There is none within [`READY_TIMEOUT`]; the error contains the log.
async fn wait_until<T>(what: &str, log: &Path, mut done: impl AsyncFnMut() -> Option<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Some(done) = done().await {
            return Ok(done);
        }
        if began.elapsed() > READY_TIMEOUT {
            bail!("no {what} within {READY_TIMEOUT:?}\n{}", std::fs::read_to_string(log).unwrap_or_default());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The slices of a node with eight GPUs and all modes, as the image publishes them.
async fn node_slices(plan: &Plan) -> Result<Vec<ResourceSlice>> {
    // The daemon installs the libraries of shares and does not run them, so their content is not needed.
    let library = tempfile::tempdir()?;
    std::fs::create_dir(library.path().join("shim"))?;
    for file in ["libdivvy.so", "shim/libcuda.so.1", "shim/libnvidia-ml.so.1"] {
        std::fs::write(library.path().join(file), file)?;
    }
    let dirs = Dirs { memory: &plan.tmpfs, files: &plan.tmpfs, library: Some(library.path()) };
    let node = BenchNode::start(&plan.node, EIGHT_GPUS, &dirs).await?;
    let slices = Api::<ResourceSlice>::all(node.client.clone()).list(&ListParams::default()).await?.items;
    for mode in ["gpu-0", "gpu-0-share", "gpu-0-timeslice", "gpu-0-mps"] {
        let mut devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        ensure!(devices.any(|device| device.name == mode), "the node publishes no {mode}\n{}", node.log());
    }
    Ok(slices)
}

/// The controller's start and memory in a cluster of [`NODES`] nodes.
pub(crate) async fn memory(plan: &Plan) -> Result<()> {
    let controller = plan.controller()?;
    let slices = node_slices(plan).await?;
    let (mut ready, mut resident, mut peak) = (vec![], vec![], vec![]);
    // Figures hardly differ between rounds: three are enough.
    for _ in 0..plan.rounds.min(3) {
        let dir = tempfile::tempdir()?;
        let cluster = LargeCluster::start(dir.path(), &slices, NODES).await?;
        let certificate = rcgen::generate_simple_self_signed(["divvy-webhook.divvy.svc".to_owned()])?;
        std::fs::write(dir.path().join("tls.crt"), certificate.cert.pem())?;
        std::fs::write(dir.path().join("tls.key"), certificate.signing_key.serialize_pem())?;
        let log = dir.path().join("log");
        let began = Instant::now();
        let controller = Controller::start(&controller, &cluster.kubeconfig, &log, Some(dir.path()))?;
        wait_until("ready controller", &log, async || controller.is_ready().await.then_some(())).await?;
        ready.push(began.elapsed().as_secs_f64() * 1000.0);
        tokio::time::sleep(Duration::from_secs(2)).await;
        resident.push(controller.memory_mib("VmRSS")?);
        peak.push(controller.memory_mib("VmHWM")?);
        line("controller_read_mib", cluster.sent_bytes() as f64 / f64::from(1 << 20), "MiB");
        line("controller_slice_reads", cluster.reads() as f64, "reads");
    }
    figure("controller_ready_ms", &ready, "ms");
    figure("rss_controller_mib", &resident, "MiB");
    figure("rss_controller_peak_mib", &peak, "MiB");
    Ok(())
}

/// The 99th percentile of a claim's review, compared with an empty POST on the same connection.
pub(crate) async fn webhook(plan: &Plan) -> Result<()> {
    let program = plan.controller()?;
    let dir = tempfile::tempdir()?;
    let server = ApiServer::start(dir.path())?;
    let config = kube::config::Kubeconfig::read_from(&server.kubeconfig)?;
    let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await?;
    let api: Api<ValidatingWebhookConfiguration> = Api::all(kube::Client::try_from(config)?);
    let configuration = serde_json::from_value(json!({
        "metadata": {"name": "divvy"},
        "webhooks": [{
            "name": "w.divvy.dev", "clientConfig": {},
            "sideEffects": "None", "admissionReviewVersions": ["v1"],
        }],
    }))?;
    api.create(&PostParams::default(), &configuration).await?;
    let log = dir.path().join("log");
    let controller = Controller::start(&program, &server.kubeconfig, &log, None)?;
    let trusted = wait_until("certificate", &log, async || {
        api.get("divvy").await.ok()?.webhooks?.first()?.client_config.ca_bundle.clone()
    });
    let bundle = dir.path().join("trusted");
    std::fs::write(&bundle, trusted.await?.0)?;
    let client = client(controller.address, &bundle)?;
    let review = review().to_string();
    wait_until("answer", &log, async || post(&client, &review).await.ok()).await?;
    let (mut ratios, mut reviews) = (vec![], vec![]);
    for _ in 0..plan.rounds {
        let (mut empty, mut full) = (vec![], vec![]);
        for _ in 0..REVIEWS_PER_ROUND {
            let began = Instant::now();
            // The webhook answers 400 to it.
            let _ = post(&client, "").await;
            empty.push(micros(began.elapsed()));
            let began = Instant::now();
            let answer = post(&client, &review).await?;
            full.push(micros(began.elapsed()));
            anyhow::ensure!(answer.contains(r#""allowed":true"#), "{answer}");
        }
        reviews.push(percentile(&full, 0.99));
        ratios.push(percentile(&full, 0.99) / percentile(&empty, 0.99));
    }
    figure("webhook_review_us_p99", &reviews, "us");
    figure("webhook_ratio", &ratios, "ratio");
    Ok(())
}

/// A client that trusts the CA bundle of the webhook configuration.
fn client(address: SocketAddr, bundle: &Path) -> Result<kube::Client> {
    let mut config = kube::Config::new(format!("https://{address}").parse()?);
    config.root_cert_file = Some(bundle.to_owned());
    config.tls_server_name = Some("divvy-webhook.divvy.svc".to_owned());
    Ok(kube::Client::try_from(config)?)
}

async fn post(client: &kube::Client, body: &str) -> kube::Result<String> {
    let request =
        kube::core::Request::new("/review").create(&PostParams::default(), body.as_bytes().to_vec());
    client.request_text(request.map_err(kube::Error::BuildRequest)?).await
}

/// The review of a typical claim: two requests, selectors and a configuration.
fn review() -> serde_json::Value {
    let request = |name: &str, class: &str| {
        let cel =
            json!({"cel": {"expression": "device.attributes['gpu.divvy.dev'].architecture == 'Hopper'"}});
        json!({"name": name, "exactly": {
            "deviceClassName": class, "selectors": [cel], "allocationMode": "ExactCount", "count": 1,
        }})
    };
    let config = json!({
        "apiVersion": "resource.divvy.dev/v1alpha1", "kind": "GpuConfig",
        "sharing": {"strategy": "MPS", "mpsConfig": {
            "defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi",
        }},
    });
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {
            "name": "training", "namespace": "team", "labels": {"app": "training"},
            "uid": "0d5b1f0e-6c1b-4a51-9a0e-1f9a3c1d2e3f",
        },
        "spec": {"devices": {
            "requests": [request("gpu", "gpu.divvy.dev"), request("slice", "mig.divvy.dev")],
            "config": [{"requests": ["gpu"], "opaque": {"driver": "gpu.divvy.dev", "parameters": config}}],
        }},
    });
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "operation": "CREATE",
            "namespace": "team", "name": "training",
            "kind": {"group": "resource.k8s.io", "version": "v1", "kind": "ResourceClaim"},
            "resource": {"group": "resource.k8s.io", "version": "v1", "resource": "resourceclaims"},
            "userInfo": {
                "username": "system:serviceaccount:team:builder",
                "groups": ["system:serviceaccounts", "system:authenticated"],
            },
            "object": claim, "oldObject": null, "dryRun": false,
        },
    })
}
