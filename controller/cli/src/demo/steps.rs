//! The steps of the demo: publish the devices; then for each scene or file allocate, prepare, draw,
//! release and compare.
//!
//! A claim that cannot be served, or is served although it must be refused, counts as an error, and
//! the demo continues. In any case all held claims are released, and the GPUs are compared with
//! their initial state.

use super::node::DemoNode;
use super::report::Report;
use super::session::Session;
use super::stop::Stop;
use super::tour::Scene;
use super::workloads::{self, Workloads};
use super::{DemoArguments, serve, share_scene};
use anyhow::{Context, Result, anyhow};
use divvy_model::DeviceId;
use divvy_sim::control::{Pattern, When};
use k8s_openapi::api::resource::v1::DeviceClass;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::Instant;

/// Runs the demo.
pub(crate) async fn run(
    arguments: &DemoArguments,
    files: Vec<Workloads>,
    report: &Report,
    stop: &Stop,
) -> Result<()> {
    let gpus = arguments.gpus();
    report.heading(&format!("A node with {gpus}"));
    let began = Instant::now();
    let libraries = arguments.library_dir.as_deref();
    let mut node = tokio::select! {
        node = DemoNode::start(gpus, arguments.dir.as_deref(), libraries) => node?,
        () = stop.stopped() => return Err(anyhow!("interrupted")),
    };
    let text = "GPUs, API server and kubelet simulated, divvy-node registered";
    let event = json!({"event": "started", "directory": node.root, "kubeconfig": node.kubeconfig});
    report.done(text, began.elapsed(), event);
    let outcome = tokio::select! {
        outcome = scenes(arguments, files, &node, report, stop) => outcome,
        () = stop.aborted() => Err(anyhow!("interrupted")),
    };
    if outcome.is_ok() {
        report.heading("Final state");
        report.drawing(&super::map::draw(node.sim.root(), &[], report.colours())?);
    }
    if let Err(error) = node.stop_daemon().await {
        report.failed("divvy-node", &format!("{error:#}\n{}", node.daemon_log()));
    }
    outcome?;
    report.summary();
    Ok(())
}

async fn scenes(
    arguments: &DemoArguments,
    files: Vec<Workloads>,
    node: &DemoNode,
    report: &Report,
    stop: &Stop,
) -> Result<()> {
    for fault in &arguments.fault {
        let (call, code) =
            fault.split_once('=').ok_or_else(|| anyhow!("--fault {fault}: expected CALL=CODE"))?;
        let code = code.parse().map_err(|_| anyhow!("--fault {fault}: unknown code {code}"))?;
        node.sim.update(|state| {
            state.add_fault(Pattern::new(call), None, When::Before, code);
            Ok(())
        })?;
        report.detail(&format!("{call} will return {code:?}"));
    }
    report.heading("Publish: all devices that the GPUs can provide");
    let began = Instant::now();
    let mut session = Session::start(node, report).await?;
    let lists = || session.slices.iter().filter_map(|slice| slice.spec.devices.as_ref());
    let devices = lists().map(Vec::len).sum::<usize>();
    let json = session.slices.iter().filter_map(|slice| serde_json::to_vec(slice).ok());
    let bytes: usize = json.map(|json| json.len()).sum();
    let text = format!("{devices} devices in {} ResourceSlices, {bytes} bytes", session.slices.len());
    report.done(&text, began.elapsed(), json!({"event": "published", "devices": devices}));
    let own = files.iter().flat_map(|file| file.classes.clone());
    let classes = classes(&session)?.into_iter().chain(own).collect::<Vec<_>>();
    session.create_classes(classes.into_iter()).await?;

    let is_tour = files.is_empty();
    let last = if is_tour { Scene::ALL.len() } else { files.len() } - 1;
    let sets: Vec<(Option<Scene>, Result<Workloads, String>)> = match is_tour {
        true => Scene::ALL
            .into_iter()
            .map(|scene| Ok((Some(scene), scene.claims(&session.slices)?)))
            .collect::<Result<_>>()?,
        false => files.into_iter().map(|file| (None, Ok(file))).collect(),
    };
    for (index, (scene, set)) in sets.into_iter().enumerate() {
        let set = match set {
            Ok(set) => set,
            Err(why) => {
                report.heading("MIG");
                report.note(&why);
                continue;
            }
        };
        report.heading(&set.title);
        serve_set(&mut session, &set).await?;
        if scene == Some(Scene::Shares)
            && let Err(error) = share_scene::run(&session).await
        {
            report.failed("shares", &format!("{error:#}"));
        }
        session.show()?;
        if arguments.keep && index == last {
            stop.wait_for_stop();
            serve::run(&mut session, stop).await?;
        } else if arguments.step {
            wait_for_enter(report).await?;
        }
        session.release_all().await?;
    }
    Ok(())
}

/// Serves the pods and claims of a file together.
async fn serve_set(session: &mut Session<'_>, set: &Workloads) -> Result<()> {
    if !set.skipped.is_empty() {
        session.report.note(&format!("not needed here: {}", set.skipped.join(", ")));
    }
    let units = match set.units(&session.classes) {
        Ok(units) => units,
        Err(error) => {
            session.report.failed(&set.title, &error.to_string());
            return Ok(());
        }
    };
    if units.is_empty() {
        session.report.failed(&set.title, "it has no pods, claims or templates");
    }
    for claim in &set.claims {
        session.create_claim(claim).await?;
    }
    session.create_templates(&set.templates).await?;
    for unit in units {
        session.serve_and_report(unit).await;
    }
    Ok(())
}

/// Waits for a line on standard input, or its end.
async fn wait_for_enter(report: &Report) -> Result<()> {
    report.detail("Enter continues");
    let line = || std::io::stdin().read_line(&mut String::new());
    tokio::task::spawn_blocking(line).await?.context("standard input")?;
    Ok(())
}

/// The classes of `manifests/` and one per MIG profile, with the names of extended resources that the
/// chart and the controller give them.
fn classes(session: &Session<'_>) -> Result<Vec<DeviceClass>> {
    let shipped = workloads::parse(
        include_str!("../../../../manifests/deviceclasses.yaml"),
        "manifests/deviceclasses.yaml",
    )?;
    let mut classes = shipped.classes;
    for class in &mut classes {
        let resource = match class.metadata.name.as_deref() {
            Some("gpu.divvy.dev") => "nvidia.com/gpu",
            Some("timeslice.divvy.dev") => "nvidia.com/gpu.shared",
            _ => continue,
        };
        class.spec.get_or_insert_default().extended_resource_name = Some(resource.to_owned());
    }
    let devices = session.slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let is_mig =
        |name: &str| DeviceId::try_from(&name.into()).is_ok_and(|id| matches!(id, DeviceId::Mig { .. }));
    let profiles: BTreeSet<String> = devices
        .filter(|device| is_mig(&device.name))
        .filter_map(|device| device.attributes.as_ref()?.get("profile")?.string.clone())
        .collect();
    for profile in profiles {
        // A plus sign is not allowed in names.
        let name = profile.replace('+', ".");
        let expression = format!(
            "device.driver == 'gpu.divvy.dev' && device.attributes['gpu.divvy.dev'].type == 'mig' && \
             device.attributes['gpu.divvy.dev'].profile == '{profile}'"
        );
        classes.push(serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": format!("mig-{name}.divvy.dev")},
            "spec": {
                "selectors": [{"cel": {"expression": expression}}],
                "extendedResourceName": format!("nvidia.com/mig-{name}"),
            },
        }))?);
    }
    Ok(classes)
}
