//! The daemon: starts everything, owns every task, stops in reverse order.
//!
//! ```text
//! start  GPUs ─▶ local recovery ─▶ service socket ─▶ registration socket ─▶ publisher ─▶ reconciliation
//! stop   ◀────────────────────────────────────────────────────────────────────────────────────────────
//! ```
//!
//! Nothing before registration needs the API server or the kubelet, so a node
//! comes up whatever else is down. A GPU driver that is missing or late is
//! waited for while an empty pool is published. A task that ends by itself ends
//! the daemon: state is in files, and a fresh start is the best repair.

use crate::agent::Agent;
use crate::args::Args;
use crate::cdi::Cdi;
use crate::claims::Claims;
use crate::classes;
use crate::engine::{Engine, EngineOptions, RecoveryReport};
use crate::events::{Events, Reason, events};
use crate::gpus::{Gpus, GpusOptions};
use crate::health::Health;
use crate::leave::Leave;
use crate::metrics::Metrics;
use crate::nodeconfig::{Holders, Policies};
use crate::paths::HostPaths;
use crate::readiness::{Condition, Readiness};
use crate::reconcile::Reconciler;
use crate::registration::{Registered, Registrar, SocketFile, Sockets, remove_dead_sockets};
use crate::service::Service;
use crate::shares;
use crate::status::statuses;
use crate::top::Top;
use crate::turns::Turns;
use crate::{cri, deviceplugin, leave, watching};
use anyhow::Context;
use clap::Parser;
use divvy_api::PoolName;
use divvy_daemon::args::Listen;
use divvy_daemon::{Stages, client, frugal, http, logging};
use divvy_kubelet::{dra, health, registration};
use divvy_nvml::Limits;
use divvy_slices::{PublishOptions, Published};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;
use tonic::transport::server::Router;

/// A pod has 30 s to stop by default; what is not done by then is found by recovery.
const STOP_WITHIN: Duration = Duration::from_secs(25);

/// The daemon's `main`.
pub fn main() -> ExitCode {
    let args = Args::parse();
    frugal::begin_again("divvy-node");
    if let Err(error) = logging::begin(&args.watching.log) {
        eprintln!("divvy-node: {error:#}");
        return ExitCode::FAILURE;
    }
    // One thread is enough: hardware and files have threads of their own, and
    // each worker thread would cost its stack and its allocator arena.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(cause) => {
            tracing::error!(%cause, "cannot start");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(run(args));
    // A hardware call that never returns must not keep the process.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("signals")?;
    let mut stages = Stages::default();
    let failed = stages.failed();
    let ended = tokio::select! {
        started = start(&args, &mut stages) => match started {
            Err(error) => Err(error),
            Ok(None) => {
                tokio::select! {
                    () = failed.cancelled() => Err(anyhow::anyhow!("a part of the daemon has ended")),
                    _ = terminate.recv() => Ok(()),
                    _ = interrupt.recv() => Ok(()),
                }
            }
            Ok(Some(leaving)) => {
                tokio::select! {
                    error = leave(leaving, &mut stages) => Err(error),
                    _ = terminate.recv() => Ok(()),
                    _ = interrupt.recv() => Ok(()),
                }
            }
        },
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    tracing::info!("stopping");
    if tokio::time::timeout(STOP_WITHIN, stages.stop()).await.is_err() {
        tracing::warn!("not everything has ended in time; the next start recovers");
    }
    ended
}

/// A daemon that is to leave, and how far the start had come before everything
/// that is not for observers alone, and before everything that serves.
struct Leaving {
    leave: Leave,
    observers: usize,
    engine: usize,
}

/// Leaves the node, and is idle then; what it answers is why that cannot be.
async fn leave(leaving: Leaving, stages: &mut Stages) -> anyhow::Error {
    let Leaving { mut leave, observers, engine } = leaving;
    let failed = stages.failed();
    tokio::select! {
        () = leave.released() => {}
        () = failed.cancelled() => return anyhow::anyhow!("a part of the daemon has ended"),
    }
    tracing::info!("no claim is held; leaving the node");
    stages.stop_to(engine).await;
    if let Some(held) = leave.held() {
        // One that came at the last moment. The next start serves it.
        return anyhow::anyhow!("{held}");
    }
    leave.hardware().await;
    stages.stop_to(observers).await;
    leave.traces().await;
    std::future::pending().await
}

/// Starts everything; of a daemon that is to leave, what that takes.
async fn start(args: &Args, stages: &mut Stages) -> anyhow::Result<Option<Leaving>> {
    let paths = args.host.paths();
    let pool = PoolName::from(args.cluster.node_name.as_str());
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node = %pool, ?paths, "divvy-node starts");
    for config in &args.host.runtime_config {
        if let Some(off) = cri::check(config, &paths.seen(config), &paths.cdi_dir) {
            tracing::warn!("{off}");
        }
    }
    let sockets = Sockets::choose(&paths, args.cluster.pod_uid.as_ref())?;
    for dir in [paths.plugin_dir(), paths.registry_dir()] {
        make_dir(&dir)?;
    }
    remove_dead_sockets(&sockets);

    let client = client::client(args.cluster.kubeconfig.as_deref()).await?;
    let metrics = Metrics::default();
    let (readiness, left) = (Readiness::default(), leave::Readiness::default());
    if let Listen::On(address) = args.watching.http_address {
        let listener = http::bind(address, "--http-address").await?;
        let (metrics, readiness) = (metrics.clone(), readiness.clone());
        let (leaves, left) = (args.cluster.leave, left.clone());
        let render: http::Render = Arc::new(move |ready| metrics.render(ready));
        stages.task("http", move |stop| {
            Box::pin(async move {
                match leaves {
                    false => http::serve(listener, render, readiness, stop).await?,
                    true => http::serve(listener, render, left, stop).await?,
                }
                Ok(())
            })
        });
    }
    let observers = stages.started();
    let (events, scribe) = events(client.clone(), &args.cluster.node_name, metrics.clone());
    stages.droppable("events", async {
        scribe.run().await;
        // Nobody is left to say anything: the daemon is ending.
        std::future::pending().await
    });

    let (statuses, writer) = statuses(client.clone(), events.clone(), metrics.clone());
    stages.droppable("claim status", async {
        writer.run().await;
        std::future::pending().await
    });

    let gpus = Gpus::start(GpusOptions { limits: limits(args), ..GpusOptions::new(&paths) }).await;
    let ended = gpus.clone();
    stages.then(async move { ended.shutdown().await });
    let inventory = gpus.inventory();
    let library_dir = args.host.library_dir().context("--library-dir")?;
    let cdi = Cdi::new(&paths, args.host.hook().context("--hook")?, &library_dir);
    let has_library = has_library(args, &cdi, &events);
    let watch =
        watching::Gpus { inventory: inventory.clone(), readiness: readiness.clone(), events: events.clone() };
    stages.droppable("GPU watch", watch.run());
    let watch = watching::Cdi {
        cdi: cdi.clone(),
        inventory: inventory.clone(),
        readiness: readiness.clone(),
        events: events.clone(),
    };
    if !args.cluster.leave {
        // It would put files there that are to go.
        stages.droppable("CDI watch", watch.run());
    }
    stages.droppable("drain", drain_on_signal(gpus.clone())?);

    // Recovery goes by it.
    let mut policies = Policies::new(args, &gpus, has_library);
    policies.apply(&Holders::Anyone).await;
    let options = engine_options(args, &paths, &pool);
    let (engine, report) = Engine::start(options, gpus.clone(), cdi).await?;
    let ended = engine.clone();
    stages.then(async move { ended.shutdown().await });
    tell(&report, &events);
    let watch = watching::MpsDaemons { daemons: engine.daemons(), events: events.clone() };
    stages.droppable("MPS watch", watch.run());
    let (agent, reports) = Agent::new(gpus.clone(), &paths, args.gpus.end_processes.clone());
    let watch = watching::Shares {
        reports,
        pages: shares::Shares::new(&paths),
        top: Top::new(&paths),
        engine: engine.clone(),
        statuses: statuses.clone(),
        events: events.clone(),
        metrics: metrics.clone(),
    };
    stages.droppable("share watch", watch.run());
    stages.droppable("share audit", agent.run());
    metrics.watch(engine.clone(), inventory.clone());
    readiness.set(Condition::Recovered, Ok(()));
    let leaving = args.cluster.leave.then(|| Leaving {
        leave: Leave::new(&engine, &client, &paths, &args.cluster.node_name, left),
        observers,
        engine: stages.started(),
    });
    if leaving.as_ref().is_some_and(|leaving| leaving.leave.held().is_none()) {
        return Ok(leaving);
    }
    policies.read_labels(&client).await;
    policies.apply(&Holders::Engine(engine.clone())).await;
    let follow = policies.follow(engine.clone(), client.clone(), events.clone(), metrics.clone());
    stages.droppable("node configuration", follow);
    let node = args.cluster.node_name.clone();
    let follow = deviceplugin::follow(client.clone(), node, gpus, events.clone());
    stages.droppable("device plugin watch", follow);

    let calls = TaskTracker::new();
    let under_way = calls.clone();
    stages.then(async move {
        under_way.close();
        under_way.wait().await;
    });
    let (classes_now, classes) = watch::channel(Default::default());
    stages.droppable("DeviceClass watch", classes::follow(client.clone(), classes_now));
    let claims = Claims::new(client.clone(), classes.clone(), args.limits.read_within);
    let turns = Turns::default();
    let follower =
        classes::Follower { classes, engine: engine.clone(), claims: claims.clone(), turns: turns.clone() };
    stages.droppable("share settings", follower.run());
    let service = Service {
        engine: engine.clone(),
        claims: claims.clone(),
        turns: turns.clone(),
        events: events.clone(),
        metrics: metrics.clone(),
        statuses,
        tasks: calls.clone(),
        answer_within: args.limits.answer_within,
    };
    let (file, listener) = SocketFile::listen(&sockets.service)?;
    stages.task("service", |stop| {
        let health = Health {
            pool: pool.clone(),
            inventory: inventory.clone(),
            daemons: engine.daemons(),
            tasks: calls,
            stop: stop.clone(),
        };
        let router = Server::builder()
            .add_service(dra::v1::dra_plugin_server::DraPluginServer::new(service.clone()))
            .add_service(dra::v1beta1::dra_plugin_server::DraPluginServer::new(service))
            .add_service(health::v1::dra_resource_health_server::DraResourceHealthServer::new(health.clone()))
            .add_service(health::v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(health));
        Box::pin(serve(router, file, listener, stop))
    });

    let (status, registered) = watch::channel(Registered::NotYet);
    let watch = watching::Registration { registered: registered.clone(), readiness: readiness.clone() };
    stages.droppable("registration watch", watch.run());
    let (file, listener) = SocketFile::listen(&sockets.registration)?;
    let registrar = Registrar::new(&sockets.service, status);
    stages.task("registration", |stop| {
        let registrar = registration::registration_server::RegistrationServer::new(registrar);
        Box::pin(serve(Server::builder().add_service(registrar), file, listener, stop))
    });

    let (state, published) = watch::channel(Published::default());
    let watch =
        watching::Publishing { published, readiness, events: events.clone(), metrics: metrics.clone() };
    stages.droppable("publisher watch", watch.run());
    // Making a pool takes megabytes, and the server's answers to it as many.
    stages.droppable("memory", frugal::give_back_after(state.subscribe()));
    let options = PublishOptions::new(args.cluster.node_name.as_str());
    let (publisher, known) = (client.clone(), known(registered.clone()));
    stages.task("publisher", |stop| {
        Box::pin(async move {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = known => {}
            }
            divvy_slices::run(publisher, options, inventory, state, stop.cancelled_owned()).await;
            Ok(())
        })
    });

    let reconciler = Reconciler {
        engine,
        claims,
        client,
        node: args.cluster.node_name.clone(),
        pool,
        turns,
        events,
        metrics,
        read_within: args.limits.read_within,
    };
    stages.droppable("reconciliation", after(registered, reconciler));
    Ok(leaving)
}

/// SIGUSR1 closes NVML, so that the GPU driver can be unloaded; SIGUSR2 opens it
/// again. In between every call that needs a GPU says that the driver is away.
fn drain_on_signal(gpus: Gpus) -> anyhow::Result<impl Future<Output = ()>> {
    let mut drain = signal(SignalKind::user_defined1()).context("signals")?;
    let mut resume = signal(SignalKind::user_defined2()).context("signals")?;
    Ok(async move {
        loop {
            tokio::select! {
                _ = drain.recv() => {
                    gpus.drain().await;
                    tracing::info!("NVML closed on request; SIGUSR2 opens it again");
                }
                _ = resume.recv() => {
                    gpus.resume();
                    tracing::info!("NVML opened again on request");
                }
            }
        }
    })
}

/// How long publishing waits for a kubelet, which may be down.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);

/// Until the kubelet calls this instance. What is published may have a claim prepared at once, and before that it is the
/// instance that this one replaces which is asked: an older one, that may not know what is new in the claim.
async fn known(mut registered: watch::Receiver<Registered>) {
    let yes = registered.wait_for(|now| *now == Registered::Yes);
    if tokio::time::timeout(KNOWN_WITHIN, yes).await.is_err() {
        tracing::info!("no kubelet has registered this instance yet; publishing all the same");
    }
}

async fn after(mut registered: watch::Receiver<Registered>, reconciler: Reconciler) {
    // Without the sender the daemon is ending.
    if registered.wait_for(|now| *now == Registered::Yes).await.is_ok() {
        reconciler.run().await;
    } else {
        std::future::pending().await
    }
}

/// Serves one socket; its file goes before the last call has ended.
async fn serve(
    router: Router,
    file: SocketFile,
    listener: UnixListener,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let stopped = async move {
        stop.cancelled_owned().await;
        drop(file);
    };
    Ok(router.serve_with_incoming_shutdown(UnixListenerStream::new(listener), stopped).await?)
}

fn make_dir(dir: &Path) -> anyhow::Result<()> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(dir);
    made.with_context(|| format!("cannot make {}; is --kubelet-root right?", dir.display()))
}

fn limits(args: &Args) -> Limits {
    Limits {
        query: args.limits.nvml_query_within,
        mig_mode: args.limits.nvml_mode_within,
        create: args.limits.nvml_create_within,
        destroy: args.limits.nvml_destroy_within,
    }
}

fn engine_options(args: &Args, paths: &HostPaths, pool: &PoolName) -> EngineOptions {
    EngineOptions {
        paths: paths.clone(),
        pool: pool.clone(),
        mig_hold_off: args.gpus.mig_hold_off,
        answer_within: args.limits.answer_within,
    }
}

/// Whether there can be shares. Without the library the scheduler is not offered any:
/// what only a prepare refuses would leave pods waiting for ever.
fn has_library(args: &Args, cdi: &Cdi, events: &Events) -> bool {
    let Err(error) = cdi.library() else { return true };
    if args.gpus.shares && !args.cluster.leave {
        let why = format!("no shares are offered: {}", crate::service::chain(&error));
        tracing::error!("{why}");
        events.node(Reason::NotReady, &why);
    }
    false
}

/// What recovery found, to those who can do something about it.
fn tell(report: &RecoveryReport, events: &Events) {
    for (file, why) in &report.quarantined {
        events.node(Reason::RecordQuarantined, &format!("record set aside as {}: {why}", file.display()));
    }
    for (claim, why) in &report.unsettled {
        events.claim(claim, Reason::ClaimNotRecovered, why);
    }
    if !report.unexplained.is_empty() {
        let instances = report.unexplained.join(", ");
        events.node(
            Reason::UnexplainedInstances,
            &format!("GPU instances that no claim explains: {instances}"),
        );
    }
}
