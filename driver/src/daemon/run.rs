//! The daemon: starts all tasks in order, and stops them in reverse.
//!
//! GPUs, recovery, service socket, registration socket, publisher, reconciliation. Nothing before
//! registration needs the API server or the kubelet, so a node starts without them. While the GPU
//! driver is missing, an empty pool is published. If a task ends, the daemon exits: the state is in
//! files, and a restart is the best repair.

use crate::cdi::Cdi;
use crate::cdi::runtime;
use crate::claims::claim_mutex::ClaimMutexes;
use crate::claims::class_updates::ClassUpdater;
use crate::claims::engine::{Engine, EngineOptions, RecoveryReport};
use crate::claims::fetch::Claims;
use crate::claims::reconcile::Reconciler;
use crate::claims::records::{HeldState, RecordError};
use crate::cluster::claim_status::claim_status_channel;
use crate::cluster::classes;
use crate::cluster::device_plugin;
use crate::cluster::events::{EventSender, Reason, event_channel};
use crate::cluster::node_config::{HoldsTimeslices, Policies, PolicyOptions};
use crate::cluster::node_object;
use crate::cluster::removals;
use crate::daemon::args::Args;
use crate::daemon::control::Control;
use crate::daemon::decommission;
use crate::daemon::decommission::Decommission;
use crate::daemon::drain::{Drain, Signals};
use crate::daemon::monitors;
use crate::daemon::monitors::{Condition, Readiness};
use crate::gpu::{Gpus, GpusOptions};
use crate::kubelet::health::Health;
use crate::kubelet::pod_resources::PodResources;
use crate::kubelet::registration::{Registrar, RegistrationState, SocketFile, Sockets, remove_dead_sockets};
use crate::kubelet::service::Service;
use crate::metrics::Metrics;
use crate::paths::HostPaths;
use crate::shares;
use crate::shares::agent::Agent;
use crate::shares::report::Top;
use anyhow::Context;
use clap::Parser;
use divvy_api::PoolName;
use divvy_daemon::args::Listen;
use divvy_daemon::{Stages, client, http, logging, malloc};
use divvy_kubelet::{dra, health, registration};
use divvy_nvml::Timeouts;
use divvy_slices::{Held, HeldDevices, PublishOptions, Published, SchedulerOptions};
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

/// A pod has 30 s to stop by default. Work that is not done by then is left to recovery.
const STOP_TIMEOUT: Duration = Duration::from_secs(25);

/// The daemon's `main`.
pub fn main() -> ExitCode {
    let args = Args::parse();
    malloc::reexec_with_settings("divvy-node");
    if let Err(error) = logging::init(&args.observation.log) {
        eprintln!("divvy-node: {error:#}");
        return ExitCode::FAILURE;
    }
    // One thread is enough: hardware calls and file access have their own threads, and each worker
    // thread would cost a stack and an allocator arena.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(cause) => {
            tracing::error!(%cause, "cannot start");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(run(args));
    // Do not wait for a hardware call that never returns.
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
                    () = failed.cancelled() => {
                        Err(anyhow::anyhow!("a task of the daemon has stopped; see the log"))
                    }
                    _ = terminate.recv() => Ok(()),
                    _ = interrupt.recv() => Ok(()),
                }
            }
            Ok(Some(decommission)) => {
                tokio::select! {
                    error = decommission_node(decommission, &mut stages) => Err(error),
                    _ = terminate.recv() => Ok(()),
                    _ = interrupt.recv() => Ok(()),
                }
            }
        },
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    tracing::info!("stopping");
    if tokio::time::timeout(STOP_TIMEOUT, stages.stop()).await.is_err() {
        tracing::warn!("not all tasks stopped in time; the next start recovers");
    }
    ended
}

/// The decommissioning, with the number of stages to keep: `observers` for metrics and health checks,
/// `engine` for everything before the services.
struct DecommissionStages {
    steps: Decommission,
    observers: usize,
    engine: usize,
}

/// Decommissions the node, then stays idle. Returns only if that is not possible, with the reason.
async fn decommission_node(plan: DecommissionStages, stages: &mut Stages) -> anyhow::Error {
    let DecommissionStages { mut steps, observers, engine } = plan;
    let failed = stages.failed();
    tokio::select! {
        () = steps.wait_for_release() => {}
        () = failed.cancelled() => return anyhow::anyhow!("a task of the daemon has stopped; see the log"),
    }
    tracing::info!("no claim is held; decommissioning the node");
    stages.stop_to(engine).await;
    if let Some(held) = steps.held() {
        // A claim was prepared at the last moment. The next start serves it.
        return anyhow::anyhow!("{held}");
    }
    steps.disable_mig().await;
    stages.stop_to(observers).await;
    steps.remove_state().await;
    std::future::pending().await
}

/// Starts all tasks. With `--decommission` it returns the decommissioning.
async fn start(args: &Args, stages: &mut Stages) -> anyhow::Result<Option<DecommissionStages>> {
    let signals = Signals::install()?;
    let paths = args.host.paths();
    let pool = PoolName::from(args.cluster.node_name.as_str());
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node = %pool, ?paths, "divvy-node starts");
    for config in &args.host.runtime_config {
        if let Some(off) = runtime::check(config, &paths.local_path(config), &paths.cdi_dir) {
            tracing::warn!("{off}");
        }
    }
    let sockets = Sockets::choose(&paths, args.cluster.pod_uid.as_ref())?;
    for dir in [paths.plugin_dir(), paths.registry_dir()] {
        create_dir(&dir)?;
    }
    remove_dead_sockets(&sockets);

    let client = client::client(args.cluster.kubeconfig.as_deref()).await?;
    let metrics = Metrics::default();
    let (readiness, decommission_readiness) = (Readiness::default(), decommission::Readiness::default());
    if let Listen::On(address) = args.observation.http_address {
        let listener = http::bind(address, "--http-address").await?;
        let (metrics, readiness) = (metrics.clone(), readiness.clone());
        let (is_decommission, decommission_readiness) =
            (args.cluster.decommission, decommission_readiness.clone());
        let render: http::Render = Arc::new(move |ready| metrics.render(ready));
        stages.task("http", move |stop| {
            Box::pin(async move {
                match is_decommission {
                    false => http::serve(listener, render, readiness, stop).await?,
                    true => http::serve(listener, render, decommission_readiness, stop).await?,
                }
                Ok(())
            })
        });
    }
    let observers = stages.started();
    let (events, writer) = event_channel(client.clone(), &args.cluster.node_name, metrics.clone());
    stages.droppable("events", async {
        writer.run().await;
        // All senders are gone, so the daemon is stopping.
        std::future::pending().await
    });

    let (statuses, writer) = claim_status_channel(client.clone(), events.clone(), metrics.clone());
    stages.droppable("claim status", async {
        writer.run().await;
        std::future::pending().await
    });

    let gpus = Gpus::start(GpusOptions {
        timeouts: nvml_timeouts(args),
        forget_after: args.gpus.forget_gpu_after,
        ..GpusOptions::new(&paths)
    })
    .await;
    let ended = gpus.clone();
    stages.then(async move { ended.shutdown().await });
    let inventory = gpus.inventory();
    let library_dir = args.host.library_dir().context("--library-dir")?;
    let cdi = Cdi::new(&paths, args.host.hook().context("--hook")?, &library_dir);
    let no_library = cdi.library().err().map(|error| divvy_api::text::error_chain(&error));
    let (drained, now_drained) = watch::channel(None);
    let watch = monitors::GpuMonitor {
        inventory: inventory.clone(),
        drained: now_drained.clone(),
        shortage: gpus.shortage(),
        readiness: readiness.clone(),
        events: events.clone(),
    };
    stages.droppable("GPU watch", watch.run());
    let watch = monitors::XidMonitor { events: gpus.events(), metrics: metrics.clone() };
    stages.droppable("XID watch", watch.run());
    let watch = monitors::CdiMonitor {
        cdi: cdi.clone(),
        inventory: inventory.clone(),
        drained: now_drained,
        readiness: readiness.clone(),
        events: events.clone(),
    };
    if !args.cluster.decommission {
        // Not while decommissioning, since it would write files that decommissioning removes.
        stages.droppable("CDI watch", watch.run());
    }
    // Recovery needs the policy.
    let options = PolicyOptions {
        file: args.gpus.config.clone(),
        node: args.cluster.node_name.clone(),
        exclusive_ownership: args.gpus.exclusive_ownership,
        shares: args.gpus.shares,
        has_library: no_library.is_none(),
    };
    let mut policies = Policies::new(options, &gpus);
    let watch = monitors::ShareOfferMonitor {
        without: policies.without_shares(),
        cause: no_library.unwrap_or_default(),
        inventory: inventory.clone(),
        readiness: readiness.clone(),
        events: events.clone(),
        metrics: metrics.clone(),
    };
    if !args.cluster.decommission {
        stages.droppable("share offer watch", watch.run());
    }
    let watch = monitors::NodeConfigMonitor { refused: policies.refused(), readiness: readiness.clone() };
    stages.droppable("node configuration monitor", watch.run());
    policies.apply(None).await;
    let options = engine_options(args, &paths, &pool);
    let (engine, report) = Engine::start(options, gpus.clone(), cdi).await?;
    let ended = engine.clone();
    stages.then(async move { ended.shutdown().await });
    report_recovery(&report, &events);
    let control = Control { gpus: gpus.clone(), engine: engine.clone() };
    let run_dir = paths.run_dir.clone();
    stages.task("control socket", move |stop| Box::pin(async move { control.run(&run_dir, stop).await }));
    let (fields, node_fields) = watch::channel(Arc::default());
    let follow = node_object::follow(client.clone(), args.cluster.node_name.clone(), fields);
    stages.droppable("Node watch", follow);
    let drain = Drain {
        signals,
        node: node_fields.clone(),
        gpus: gpus.clone(),
        engine: engine.clone(),
        events: events.clone(),
        state: drained,
    };
    stages.droppable("drain", drain.run());
    let watch = monitors::MpsMonitor { daemons: engine.mps_daemons(), events: events.clone() };
    stages.droppable("MPS watch", watch.run());
    let watch = monitors::ClaimHealthMonitor {
        inventory: inventory.clone(),
        engine: engine.clone(),
        statuses: statuses.clone(),
        events: events.clone(),
        client: client.clone(),
    };
    stages.droppable("claim health watch", watch.run());
    let (agent, reports) =
        Agent::new(gpus.clone(), &paths, args.gpus.kill_processes.clone(), args.gpus.gpu_time_law);
    let watch = monitors::ShareMonitor {
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
    let source = engine.clone();
    metrics.watch(move || source.gauges(), inventory.clone());
    readiness.set(Condition::Recovered, Ok(()));
    let decommission = args.cluster.decommission.then(|| DecommissionStages {
        steps: Decommission::new(&engine, &client, &paths, &args.cluster.node_name, decommission_readiness),
        observers,
        engine: stages.started(),
    });
    if decommission.as_ref().is_some_and(|plan| plan.steps.held().is_none()) {
        return Ok(decommission);
    }
    policies.read_labels(&client).await;
    let holders = engine.clone();
    let holders: HoldsTimeslices = Arc::new(move |gpu| holders.holds_timeslice(gpu));
    policies.apply(Some(&holders)).await;
    let follow = policies.follow(holders, client.clone(), events.clone(), metrics.clone());
    stages.droppable("node configuration", follow);
    let follow = removals::follow(node_fields.clone(), gpus.clone());
    stages.droppable("removals watch", follow);
    let follow = device_plugin::follow(node_fields, gpus, events.clone());
    stages.droppable("device plugin watch", follow);

    let calls = TaskTracker::new();
    let under_way = calls.clone();
    stages.then(async move {
        under_way.close();
        under_way.wait().await;
    });
    let (classes_now, classes) = watch::channel(Default::default());
    stages.droppable("DeviceClass watch", classes::follow(client.clone(), classes_now));
    let claims = Claims::new(client.clone(), classes.clone(), args.timeouts.read_timeout);
    let claim_mutexes = ClaimMutexes::default();
    let follower = ClassUpdater {
        classes,
        engine: engine.clone(),
        claims: claims.clone(),
        claim_mutexes: claim_mutexes.clone(),
    };
    stages.droppable("share settings", follower.run());
    let service = Service {
        engine: engine.clone(),
        claims: claims.clone(),
        claim_mutexes: claim_mutexes.clone(),
        events: events.clone(),
        metrics: metrics.clone(),
        statuses,
        tasks: calls.clone(),
        answer_timeout: args.timeouts.answer_timeout,
    };
    let (file, listener) = SocketFile::listen(&sockets.service)?;
    stages.task("service", |stop| {
        let health = Health {
            pool: pool.clone(),
            inventory: inventory.clone(),
            daemons: engine.mps_daemons(),
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

    let (status, registered) = watch::channel(RegistrationState::Pending);
    let watch =
        monitors::RegistrationMonitor { registered: registered.clone(), readiness: readiness.clone() };
    stages.droppable("registration watch", watch.run());
    let (file, listener) = SocketFile::listen(&sockets.registration)?;
    let registrar = Registrar::new(&sockets.service, status);
    stages.task("registration", |stop| {
        let registrar = registration::registration_server::RegistrationServer::new(registrar);
        Box::pin(serve(Server::builder().add_service(registrar), file, listener, stop))
    });

    let (state, published) = watch::channel(Published::default());
    let watch =
        monitors::PublishMonitor { published, readiness, events: events.clone(), metrics: metrics.clone() };
    stages.droppable("publisher watch", watch.run());
    // Building a pool and parsing the server's answers take megabytes.
    stages.droppable("memory", malloc::trim_after_changes(state.subscribe()));
    let holder = engine.clone();
    let options = PublishOptions {
        scheduler: SchedulerOptions {
            version: args.cluster.scheduler_version,
            ignored_bugs: args.cluster.ignore_scheduler_bug.iter().copied().collect(),
        },
        held: HeldDevices::new(move || held_devices(&holder)),
        mode_file: Some(paths.state_dir.join(MODE_FILE)),
        ..PublishOptions::new(args.cluster.node_name.as_str())
    };
    let (publisher, registration) = (client.clone(), wait_for_registration(registered.clone()));
    stages.task("publisher", |stop| {
        Box::pin(async move {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = registration => {}
            }
            divvy_slices::run(publisher, options, inventory, state, stop.cancelled_owned()).await;
            Ok(())
        })
    });

    let reconciler = Reconciler {
        engine,
        claims,
        kubelet: Arc::new(PodResources::new(&paths, args.timeouts.read_timeout)),
        process_root: paths.process_root.clone(),
        pool,
        claim_mutexes,
        events,
        metrics,
    };
    stages.droppable("reconciliation", reconcile_after_registration(registered, reconciler));
    Ok(decommission)
}

/// File of the state directory with the states of modes that are off.
const MODE_FILE: &str = "modes.json";
/// Time that publishing waits for the kubelet, which may be down.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until the kubelet has registered this instance. A published device may lead to a prepare at
/// once, and until then the kubelet calls the previous instance, which may be older and not know
/// a new feature of the claim.
async fn wait_for_registration(mut registered: watch::Receiver<RegistrationState>) {
    let yes = registered.wait_for(|now| *now == RegistrationState::Registered);
    if tokio::time::timeout(REGISTRATION_TIMEOUT, yes).await.is_err() {
        tracing::info!("the kubelet has not registered this instance yet; publishing anyway");
    }
}

async fn reconcile_after_registration(
    mut registered: watch::Receiver<RegistrationState>,
    reconciler: Reconciler,
) {
    // If the sender is gone, the daemon is stopping.
    if registered.wait_for(|now| *now == RegistrationState::Registered).await.is_ok() {
        reconciler.run().await;
    } else {
        std::future::pending().await
    }
}

/// Serves one socket. Its file is removed before the last call has finished.
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

fn create_dir(dir: &Path) -> anyhow::Result<()> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o750).create(dir);
    made.with_context(|| format!("cannot create {}; is --kubelet-root right?", dir.display()))
}

fn nvml_timeouts(args: &Args) -> Timeouts {
    Timeouts {
        query: args.timeouts.nvml_query_timeout,
        mig_mode: args.timeouts.nvml_mode_timeout,
        create: args.timeouts.nvml_create_timeout,
        destroy: args.timeouts.nvml_destroy_timeout,
    }
}

fn engine_options(args: &Args, paths: &HostPaths, pool: &PoolName) -> EngineOptions {
    EngineOptions {
        paths: paths.clone(),
        pool: pool.clone(),
        mig_hold_off: args.gpus.mig_hold_off,
        answer_timeout: args.timeouts.answer_timeout,
    }
}

/// The devices of all claims of this node. Without counters, those with shares and those of claims that
/// are being prepared or released stay published; the other held devices exist, so they are published
/// anyway. `None` if they are not known.
fn held_devices(engine: &Engine) -> Option<Held> {
    let devices = || {
        let held = engine.held()?;
        let moving = held.iter().filter(|held| held.state != HeldState::Prepared);
        let moving = moving.flat_map(|held| held.devices.clone());
        let shares = engine.held_parts()?.into_iter().filter(|held| held.share_id.is_some());
        let unguarded = shares.map(|held| held.device).chain(moving).map(|device| device.to_string());
        let unguarded = unguarded.collect();
        let all = held.iter().flat_map(|held| &held.devices).map(|device| device.to_string()).collect();
        Ok(Held { all, unguarded })
    };
    let warn = |error: &RecordError| {
        let error = error as &dyn std::error::Error;
        tracing::warn!(error, "the held devices are not known; the published devices stay");
    };
    devices().inspect_err(warn).ok()
}

/// Reports the results of recovery by events.
fn report_recovery(report: &RecoveryReport, events: &EventSender) {
    for (file, why) in &report.quarantined {
        events.node(Reason::RecordQuarantined, &format!("record quarantined as {}: {why}", file.display()));
    }
    for (claim, why) in &report.failed {
        events.claim(claim, Reason::ClaimNotRecovered, why);
    }
    if !report.unmanaged.is_empty() {
        let instances = report.unmanaged.join(", ");
        events.node(
            Reason::UnmanagedMigInstances,
            &format!("GPU instances that Divvy did not create and that no claim uses: {instances}"),
        );
    }
}
