//! Figures of the controller: its memory in front of a large cluster, and what a
//! review costs over an empty request.

use crate::api::Server;
use crate::figures::Plan;
use crate::fleet::Fleet;
use crate::stats::{figure, line, micros, percentile};
use crate::world::Dirs;
use anyhow::{Context, Result, bail};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, ListParams, PostParams};
use serde_json::json;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Nodes with eight H100 each.
const NODES: usize = 1000;
const READY: Duration = Duration::from_secs(300);
/// Reviews and empty requests of one round; a 99th percentile needs some.
const REVIEWS: usize = 500;

/// A controller that is killed when dropped.
struct Controller {
    child: Child,
    address: SocketAddr,
}

impl Controller {
    fn start(program: &Path, kubeconfig: &Path, log: &Path) -> Result<Self> {
        // Free now, and taken again at once.
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let child = Command::new(program)
            .args(["run", "--http-address", "off", "--webhook-address", &address.to_string()])
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(log)?)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self { child, address })
    }

    /// A line of `/proc/<pid>/status`, in MiB.
    fn memory_mib(&self, key: &str) -> Result<f64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = text.lines().find(|line| line.starts_with(key)).with_context(|| format!("no {key}"))?;
        let kib: f64 = line.split_whitespace().nth(1).context("no number")?.parse()?;
        Ok(kib / 1024.0)
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for what the controller does by itself.
async fn until<T>(what: &str, log: &Path, mut done: impl AsyncFnMut() -> Option<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Some(done) = done().await {
            return Ok(done);
        }
        if began.elapsed() > READY {
            bail!("no {what} within {READY:?}\n{}", std::fs::read_to_string(log).unwrap_or_default());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Memory after the slices of a thousand nodes were read.
pub(crate) async fn memory(plan: &Plan) -> Result<()> {
    let program = plan.controller()?;
    let slices: Vec<String> = {
        let world = crate::world::World::start(
            &plan.node,
            "8xH100-SXM5-80GB",
            &Dirs { memory: &plan.tmpfs, files: &plan.tmpfs },
        )
        .await?;
        let slices: Api<ResourceSlice> = Api::all(world.client.clone());
        let slices = slices.list(&ListParams::default()).await?.items;
        slices.iter().map(serde_json::to_string).collect::<Result<_, _>>()?
    };
    let (mut resident, mut peak) = (vec![], vec![]);
    // Each round reads a quarter of a gigabyte; memory hardly differs between them.
    for _ in 0..plan.rounds.min(3) {
        let dir = tempfile::tempdir()?;
        let fleet = Fleet::start(dir.path(), slices.clone(), NODES).await?;
        let log = dir.path().join("log");
        let controller = Controller::start(&program, &fleet.kubeconfig, &log)?;
        let bytes = until("watch of slices", &log, async || fleet.listed()).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        resident.push(controller.memory_mib("VmRSS")?);
        peak.push(controller.memory_mib("VmHWM")?);
        line("controller_slices_mib", bytes as f64 / f64::from(1 << 20), "MiB");
    }
    figure("rss_controller_mib", &resident, "MiB");
    figure("rss_controller_peak_mib", &peak, "MiB");
    Ok(())
}

/// The 99th percentile of a claim's review over that of an empty POST, on one connection.
pub(crate) async fn webhook(plan: &Plan) -> Result<()> {
    let program = plan.controller()?;
    let dir = tempfile::tempdir()?;
    let server = Server::start(dir.path())?;
    let config = kube::config::Kubeconfig::read_from(&server.kubeconfig)?;
    let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await?;
    let api: Api<ValidatingWebhookConfiguration> = Api::all(kube::Client::try_from(config)?);
    let configuration = serde_json::from_value(json!({
        "metadata": {"name": "divvy"},
        "webhooks": [{"name": "w.divvy.dev", "clientConfig": {}, "sideEffects": "None", "admissionReviewVersions": ["v1"]}],
    }))?;
    api.create(&PostParams::default(), &configuration).await?;
    let log = dir.path().join("log");
    let controller = Controller::start(&program, &server.kubeconfig, &log)?;
    let trusted = until("certificate", &log, async || {
        api.get("divvy").await.ok()?.webhooks?.first()?.client_config.ca_bundle.clone()
    });
    let bundle = dir.path().join("trusted");
    std::fs::write(&bundle, trusted.await?.0)?;
    let client = client(controller.address, &bundle)?;
    let review = review().to_string();
    until("answer", &log, async || post(&client, &review).await.ok()).await?;
    let (mut ratios, mut reviews) = (vec![], vec![]);
    for _ in 0..plan.rounds {
        let (mut empty, mut full) = (vec![], vec![]);
        for _ in 0..REVIEWS {
            let began = Instant::now();
            // Refused with 400, after the same way.
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

/// A client that trusts what the API server was told to trust.
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

/// A claim as people write it: two requests, selectors, a configuration.
fn review() -> serde_json::Value {
    let request = |name: &str, class: &str| {
        let cel =
            json!({"cel": {"expression": "device.attributes['gpu.divvy.dev'].architecture == 'Hopper'"}});
        json!({"name": name, "exactly": {"deviceClassName": class, "selectors": [cel], "allocationMode": "ExactCount", "count": 1}})
    };
    let config = json!({
        "apiVersion": "resource.divvy.dev/v1alpha1", "kind": "GpuConfig",
        "sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"}},
    });
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "training", "namespace": "team", "labels": {"app": "training"}, "uid": "0d5b1f0e-6c1b-4a51-9a0e-1f9a3c1d2e3f"},
        "spec": {"devices": {
            "requests": [request("gpu", "gpu.divvy.dev"), request("slice", "mig.divvy.dev")],
            "config": [{"requests": ["gpu"], "opaque": {"driver": "gpu.divvy.dev", "parameters": config}}],
        }},
    });
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "operation": "CREATE", "namespace": "team", "name": "training",
            "kind": {"group": "resource.k8s.io", "version": "v1", "kind": "ResourceClaim"},
            "resource": {"group": "resource.k8s.io", "version": "v1", "resource": "resourceclaims"},
            "userInfo": {"username": "system:serviceaccount:team:builder", "groups": ["system:serviceaccounts", "system:authenticated"]},
            "object": claim, "oldObject": null, "dryRun": false,
        },
    })
}
