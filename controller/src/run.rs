//! Starts everything, owns every task, stops in reverse order.

use crate::args::RunArgs;
use crate::certificate::{self, Current, keeper};
use crate::classes::{self, Classes};
use crate::known::{self, Known};
use crate::leader::{self, Election};
use crate::metrics::Metrics;
use crate::seen::{Offer, Seen, Slice};
use crate::webhook::{self, Reviewer};
use anyhow::Context;
use divvy_api::names::DRIVER;
use divvy_daemon::args::Listen;
use divvy_daemon::http::{self, Condition, Readiness};
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

/// A pod has 30 s to stop by default.
const STOP_WITHIN: Duration = Duration::from_secs(25);
/// Slices in one page of a list: a slice of MIG devices has about 100 KB.
const PAGE: u32 = 10;

/// What must be true before reviews are answered with knowledge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// DeviceClasses were listed.
    Classes,
    /// ResourceSlices were listed.
    Slices,
    /// There is a certificate to show.
    Certificate,
}

impl Condition for Part {
    const ALL: &'static [Self] = &[Self::Classes, Self::Slices, Self::Certificate];
    fn name(self) -> &'static str {
        match self {
            Self::Classes => "classes",
            Self::Slices => "slices",
            Self::Certificate => "certificate",
        }
    }
}

/// Whether this replica can do its work.
pub type Ready = Readiness<Part>;

/// Runs until a signal, or until a part ends.
pub async fn run(args: &RunArgs) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("signals")?;
    let mut stages = Stages::default();
    let failed = stages.failed();
    let ended = match start(args, &mut stages).await {
        Err(error) => Err(error),
        Ok(()) => {
            tokio::select! {
                () = failed.cancelled() => Err(anyhow::anyhow!("a part of the controller has ended")),
                _ = terminate.recv() => Ok(()),
                _ = interrupt.recv() => Ok(()),
            }
        }
    };
    tracing::info!("stopping");
    if tokio::time::timeout(STOP_WITHIN, stages.stop()).await.is_err() {
        tracing::warn!("not everything has ended in time");
    }
    ended
}

async fn start(args: &RunArgs, stages: &mut Stages) -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    tracing::info!(version, namespace = args.cluster.namespace, "divvy-controller starts");
    let client = client::client(args.cluster.kubeconfig.as_deref()).await?;
    let (metrics, ready) = (Metrics::default(), Ready::default());
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
    let (offer_now, offer) = watch::channel(None);
    let (api, follow) = (Api::<Slice>::all(client.clone()), ready.clone());
    let config = watcher::Config::default().fields(&format!("spec.driver={DRIVER}")).page_size(PAGE);
    let counted = metrics.clone();
    stages.droppable("ResourceSlice watch", async move {
        follow_slices(watcher(api, config), offer_now, follow, counted).await;
    });
    let (known_now, known) = watch::channel(Arc::new(Known::default()));
    stages.droppable("class knowledge", known::keep(offer.clone(), classes.clone(), known_now));

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
    let (mut told, metric) = (leader.clone(), metrics.clone());
    stages.droppable("leadership", async move {
        loop {
            metric.leads(*told.borrow_and_update());
            if told.changed().await.is_err() {
                std::future::pending().await
            }
        }
    });
    let reporter =
        Reporter { controller: "divvy-controller".to_owned(), instance: Some(args.identity.clone()) };
    let keeper = classes::keeper::Keeper {
        client: client.clone(),
        recorder: Recorder::new(client.clone(), reporter),
        metrics: metrics.clone(),
        offer,
        classes,
        leader: leader.clone(),
        hold_off: args.class_hold_off,
        extended: args.extended_resources,
    };
    stages.droppable("DeviceClasses", keeper.run());

    match args.webhook.webhook_address {
        Listen::Off => ready.set(Part::Certificate, Ok(())),
        Listen::On(address) => {
            let listener = http::bind(address, "--webhook-address").await?;
            let current = Arc::new(Current::default());
            match &args.webhook.certificate_dir {
                Some(dir) => {
                    stages.droppable("certificate", keeper::follow(dir.clone(), current.clone(), ready));
                }
                None => {
                    let keeper = keeper::Keeper {
                        client: client.clone(),
                        namespace: args.cluster.namespace.clone(),
                        secret: args.cluster.certificate_secret.clone(),
                        configuration: args.webhook.webhook_configuration.clone(),
                        host: certificate::host(&args.webhook.webhook_service, &args.cluster.namespace),
                        current: current.clone(),
                        leader,
                        metrics: metrics.clone(),
                        ready,
                    };
                    stages.droppable("certificate", keeper.run());
                }
            }
            let reviewer = Reviewer::new(client, known, metrics);
            stages.task("webhook", |stop| {
                Box::pin(async move { Ok(webhook::serve(listener, current, reviewer, stop).await?) })
            });
        }
    }
    Ok(())
}

/// Classes without what nobody here reads.
async fn follow_classes(
    events: impl Stream<Item = watcher::Result<Event<DeviceClass>>>,
    now: watch::Sender<Option<Arc<Classes>>>,
    ready: Ready,
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
                ready.set(Part::Classes, Ok(()));
            }
            Ok(Event::Apply(class)) => put(&mut classes, class),
            Ok(Event::Delete(class)) => {
                classes.remove(class.metadata.name.as_deref().unwrap_or_default());
            }
            Err(cause) => {
                tracing::debug!(%cause, "watch of DeviceClasses");
                if now.borrow().is_none() {
                    ready.set(Part::Classes, Err(cause.to_string()));
                }
                continue;
            }
        }
        if !listing {
            now.send_replace(Some(Arc::new(classes.clone())));
        }
    }
}

async fn follow_slices(
    events: impl Stream<Item = watcher::Result<Event<Slice>>>,
    now: watch::Sender<Option<Arc<Offer>>>,
    ready: Ready,
    metrics: Metrics,
) {
    let mut events = std::pin::pin!(events.default_backoff());
    let mut seen = Seen::default();
    let (mut listing, mut revision) = (true, None);
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => {
                listing = true;
                seen.relist();
            }
            Ok(Event::InitApply(slice) | Event::Apply(slice)) => seen.apply(slice),
            Ok(Event::InitDone) => {
                listing = false;
                seen.listed();
                ready.set(Part::Slices, Ok(()));
            }
            Ok(Event::Delete(slice)) => seen.delete(&slice),
            Err(cause) => {
                tracing::debug!(%cause, "watch of ResourceSlices");
                if now.borrow().is_none() {
                    ready.set(Part::Slices, Err(cause.to_string()));
                }
                continue;
            }
        }
        if !listing {
            metrics.slices(seen.slices());
            if revision != Some(seen.revision) {
                revision = Some(seen.revision);
                now.send_replace(Some(Arc::new(seen.offer())));
            }
        }
    }
}
