//! Starts every task of the controller and stops them in reverse order.

use crate::args::RunArgs;
use crate::certificate::{self, CertificateManager, ServingCertificate};
use crate::class_index::{self, ClassIndex};
use crate::classes::{ClassReconciler, Classes};
use crate::leader::{self, Election};
use crate::metrics::Metrics;
use crate::readiness::{ControllerReadiness, ReadyCondition};
use crate::removal::RemovalReconciler;
use crate::slice_watch;
use crate::templates::TemplateReconciler;
use crate::webhook::{self, ForeignRequests, Reviewer};
use anyhow::Context;
use divvy_daemon::args::Listen;
use divvy_daemon::http;
use divvy_daemon::{Stages, client};
use futures::{Stream, StreamExt};
use k8s_openapi::api::resource::v1::DeviceClass;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::watcher::{self, Event, watcher};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Below the 30 s that a pod has to stop by default (`terminationGracePeriodSeconds`).
const STOP_TIMEOUT: Duration = Duration::from_secs(25);

/// Runs until SIGTERM or SIGINT, or until a task ends by itself, which is an error.
pub async fn run(args: &RunArgs) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut stages = Stages::default();
    let failed = stages.failed();
    let result = match start(args, &mut stages).await {
        Err(error) => Err(error),
        Ok(()) => {
            tokio::select! {
                () = failed.cancelled() => {
                    Err(anyhow::anyhow!("a task of the controller ended; see the log"))
                }
                _ = terminate.recv() => Ok(()),
                _ = interrupt.recv() => Ok(()),
            }
        }
    };
    tracing::info!("stopping");
    if tokio::time::timeout(STOP_TIMEOUT, stages.stop()).await.is_err() {
        tracing::warn!(timeout = ?STOP_TIMEOUT, "some tasks did not stop in time");
    }
    result
}

async fn start(args: &RunArgs, stages: &mut Stages) -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    tracing::info!(version, namespace = args.cluster.namespace, "divvy-controller is starting");
    let client = client::client(args.cluster.kubeconfig.as_deref()).await?;
    let (metrics, ready) = (Metrics::default(), ControllerReadiness::default());
    if let Listen::On(address) = args.http_address {
        let listener = http::bind(address, "--http-address").await?;
        let (metrics, ready) = (metrics.clone(), ready.clone());
        let render: http::Render = Arc::new(move |ready| metrics.render(ready));
        stages.task("http", |stop| {
            Box::pin(async move { Ok(http::serve(listener, render, ready, stop).await?) })
        });
    }

    let (classes_now, classes) = watch::channel(None);
    let (api, follow) = (Api::<DeviceClass>::all(client.clone()), ready.clone());
    stages.droppable("DeviceClass watch", async move {
        follow_classes(watcher(api, watcher::Config::default()), classes_now, follow).await;
    });
    let (devices_now, devices) = watch::channel(None);
    let (off_now, off) = watch::channel(None);
    let summaries = slice_watch::Summaries { devices: devices_now, off: off_now };
    stages.droppable(
        "ResourceSlice watch",
        slice_watch::run(client.clone(), summaries, ready.clone(), metrics.clone()),
    );
    let (index_now, index) = watch::channel(Arc::new(ClassIndex::default()));
    stages.droppable("class index", class_index::run(devices.clone(), classes.clone(), index_now));

    let (leads, leader) = watch::channel(false);
    let identity = format!("{}_{:x}", args.identity, Timestamp::now().as_nanosecond());
    let election = Election {
        namespace: args.cluster.namespace.clone(),
        lease: args.cluster.lease.clone(),
        identity,
        duration: args.lease_duration,
    };
    let candidate = client.clone();
    stages.task("leader election", |stop| {
        Box::pin(async move {
            leader::run(candidate, election, leads, stop).await;
            Ok(())
        })
    });
    let (mut leadership, metric) = (leader.clone(), metrics.clone());
    stages.droppable("leadership", async move {
        loop {
            metric.leads(*leadership.borrow_and_update());
            if leadership.changed().await.is_err() {
                std::future::pending().await
            }
        }
    });
    let reporter =
        Reporter { controller: "divvy-controller".to_owned(), instance: Some(args.identity.clone()) };
    let recorder = Recorder::new(client.clone(), reporter);
    let task = RemovalReconciler {
        client: client.clone(),
        recorder: recorder.clone(),
        metrics: metrics.clone(),
        off,
        leader: leader.clone(),
        delay: args.removal_delay,
    };
    stages.droppable("removal of devices", task.run());
    let task = ClassReconciler {
        client: client.clone(),
        recorder,
        metrics: metrics.clone(),
        devices,
        classes,
        leader: leader.clone(),
        hold_off: args.class_hold_off,
        extended: args.extended_resources,
    };
    stages.droppable("DeviceClasses", task.run());

    if args.foreign.foreign_requests {
        let task = TemplateReconciler {
            client: client.clone(),
            metrics: metrics.clone(),
            leader: leader.clone(),
            hold_off: args.foreign.template_hold_off,
        };
        stages.droppable("ResourceClaimTemplates", task.run());
    }

    match args.webhook.webhook_address {
        Listen::Off => ready.set(ReadyCondition::Certificate, Ok(())),
        Listen::On(address) => {
            let listener = http::bind(address, "--webhook-address").await?;
            let current = Arc::new(ServingCertificate::default());
            match &args.webhook.certificate_dir {
                Some(dir) => {
                    stages.droppable(
                        "certificate",
                        certificate::follow_dir(dir.clone(), current.clone(), ready),
                    );
                }
                None => {
                    let task = CertificateManager {
                        client: client.clone(),
                        namespace: args.cluster.namespace.clone(),
                        secret: args.cluster.certificate_secret.clone(),
                        validating: args.webhook.webhook_configuration.clone(),
                        mutating: (args.foreign.foreign_requests)
                            .then(|| args.foreign.foreign_webhook_configuration.clone()),
                        host: certificate::host(&args.webhook.webhook_service, &args.cluster.namespace),
                        current: current.clone(),
                        leader,
                        metrics: metrics.clone(),
                        ready,
                    };
                    stages.droppable("certificate", task.run());
                }
            }
            let foreign = ForeignRequests::new(&args.foreign)?;
            let reviewer = Reviewer::new(client, index, foreign, metrics);
            stages.task("webhook", |stop| {
                Box::pin(async move { Ok(webhook::serve(listener, current, reviewer, stop).await?) })
            });
        }
    }
    Ok(())
}

/// Publishes the DeviceClasses, without fields that the controller does not read.
async fn follow_classes(
    events: impl Stream<Item = watcher::Result<Event<DeviceClass>>>,
    now: watch::Sender<Option<Arc<Classes>>>,
    ready: ControllerReadiness,
) {
    let mut events = std::pin::pin!(events.default_backoff());
    let (mut classes, mut listed) = (Classes::new(), Classes::new());
    let mut listing = true;
    while let Some(event) = events.next().await {
        let put = |classes: &mut Classes, mut class: DeviceClass| {
            class.metadata.managed_fields = None;
            class.metadata.annotations = None;
            classes.insert(class.metadata.name.clone().unwrap_or_default(), Arc::new(class));
        };
        match event {
            Ok(Event::Init) => {
                listing = true;
                listed.clear();
            }
            Ok(Event::InitApply(class)) => put(&mut listed, class),
            Ok(Event::InitDone) => {
                listing = false;
                classes = std::mem::take(&mut listed);
                ready.set(ReadyCondition::Classes, Ok(()));
            }
            Ok(Event::Apply(class)) => put(&mut classes, class),
            Ok(Event::Delete(class)) => {
                classes.remove(class.metadata.name.as_deref().unwrap_or_default());
            }
            Err(cause) => {
                tracing::debug!(%cause, "watch of DeviceClasses failed; it is retried");
                if now.borrow().is_none() {
                    ready.set(ReadyCondition::Classes, Err(cause.to_string()));
                }
                continue;
            }
        }
        if !listing {
            now.send_replace(Some(Arc::new(classes.clone())));
        }
    }
}
