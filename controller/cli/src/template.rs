//! `divvy template`: the ResourceSlices of a node that does not exist yet.
//!
//! Autoscalers simulate nodes and need the devices that a new node will have. The figures come from
//! the catalogue of GPU models, and the devices from the code that the node daemon publishes with.

use crate::documents;
use crate::explain::label;
use anyhow::{Context, Result, bail};
use divvy_catalogue::{Model, node, parse_list};
use divvy_model::inventory::MigMode;
use divvy_model::{GpuPolicy, NodeConfig};
use divvy_slices::scheduler_bugs::unsafe_counters;
use divvy_slices::{KubernetesVersion, SchedulerOptions, Slice, Support, slices_of_new_node};
use serde_json::json;
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Facts of the GPU model are exact. UUIDs, PCI addresses and versions are placeholders, because they
differ from node to node.

Example: would these claims fit on a new node?
  divvy template --gpus 8xH100-SXM5-80GB > node.yaml
  divvy allocate --node template node.yaml deviceclasses.yaml claims.yaml";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct TemplateArguments {
    /// GPUs of the node, such as 8xH100-SXM5-80GB; an unknown model is answered with the known ones
    #[arg(long, value_parser = models)]
    gpus: Gpus,
    /// Name of the node
    #[arg(long, default_value = "template", value_name = "NAME", value_parser = node_name)]
    node: String,
    /// The node configuration that the node will have; `-` is standard input
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Labels that the node will have, for the rules of --config
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = label)]
    node_labels: Vec<(String, String)>,
    /// The node daemon's --shares
    #[arg(long, value_name = "true|false", default_value_t = true, action = clap::ArgAction::Set)]
    shares: bool,
    /// MIG mode of A100 and A30 is on, where Divvy does not change it
    #[arg(long)]
    mig_enabled: bool,
    /// Version of the GPU driver, for claims that select by it [default: 1.0]
    #[arg(long, value_name = "VERSION", value_parser = driver_version)]
    driver_version: Option<String>,
    /// CUDA version of the GPU driver, for claims that select by it; also decides how many clients MPS
    /// has [default: 1.0]
    #[arg(long, value_name = "VERSION", value_parser = cuda_version)]
    cuda_version: Option<(u32, u32)>,
    /// Kubernetes version of the scheduler; with known bugs, a node publishes less [default: no bugs]
    #[arg(long, value_name = "VERSION")]
    scheduler_version: Option<KubernetesVersion>,
    /// Format of the slices; JSON is a List
    #[arg(short, long, value_enum, default_value = "yaml")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Yaml,
    Json,
}

/// One model for each GPU. A type of its own, because clap takes a `Vec` for a repeated flag.
#[derive(Clone)]
struct Gpus(Vec<Model>);

fn models(list: &str) -> Result<Gpus, divvy_catalogue::ListError> {
    parse_list(list).map(Gpus)
}

fn node_name(name: &str) -> Result<String, String> {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    let bounded = name.starts_with(|c: char| c != '-' && c != '.') && !name.ends_with(['-', '.']);
    match bounded && name.len() <= 253 && name.chars().all(legal) {
        true => Ok(name.to_owned()),
        false => Err("a node has a name of lower-case letters, digits, '-' and '.'".to_owned()),
    }
}

fn driver_version(text: &str) -> Result<String, String> {
    let number = |part: &str| part.parse::<u32>().is_ok();
    let parts: Vec<&str> = text.split('.').collect();
    match (2..=3).contains(&parts.len()) && parts.into_iter().all(number) {
        true => Ok(text.to_owned()),
        false => Err("expected a version such as 580.95.05".to_owned()),
    }
}

fn cuda_version(text: &str) -> Result<(u32, u32), String> {
    let (major, minor) = text.split_once('.').unwrap_or((text, "0"));
    match (major.parse(), minor.parse()) {
        (Ok(major @ 1..), Ok(minor)) => Ok((major, minor)),
        _ => Err("expected a version such as 13.0".to_owned()),
    }
}

/// Prints the slices, and a warning for each model with figures that no card has printed.
pub(crate) fn run(arguments: &TemplateArguments) -> Result<ExitCode> {
    let config = match &arguments.config {
        Some(file) => {
            let text = documents::text(file)?;
            Some(NodeConfig::parse(&text).with_context(|| file.display().to_string())?)
        }
        None => None,
    };
    let slices = template(arguments, config.as_ref());
    let text = match arguments.output {
        Output::Yaml => yaml(&slices)?,
        Output::Json => {
            let list = json!({"apiVersion": "v1", "kind": "List", "items": slices});
            serde_json::to_string_pretty(&list)? + "\n"
        }
    };
    for warning in warnings(&arguments.gpus.0) {
        eprintln!("divvy: {warning}");
    }
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => bail!("cannot write the slices: {error}"),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn template(arguments: &TemplateArguments, config: Option<&NodeConfig>) -> Vec<Slice> {
    let stored = if arguments.mig_enabled { MigMode::On } else { MigMode::Off };
    let mut inventory = node::inventory(&arguments.gpus.0, stored);
    if let Some(version) = &arguments.driver_version {
        inventory.driver_version.clone_from(version);
    }
    if let Some(version) = arguments.cuda_version {
        inventory.cuda_version = version;
    }
    let defaults = GpuPolicy { shares: arguments.shares, ..GpuPolicy::default() };
    let labels = arguments.node_labels.iter().cloned().collect();
    for gpu in &mut inventory.gpus {
        gpu.policy = match config {
            Some(config) => config.explain(&defaults, Some(&labels), (&*gpu).into()).policy,
            None => defaults.clone(),
        };
    }
    slices_of_new_node(&arguments.node, &inventory, support(arguments.scheduler_version))
}

/// The features that a node uses with a scheduler of that version.
fn support(scheduler: Option<KubernetesVersion>) -> Support {
    let all = Support::default();
    let options = SchedulerOptions { version: scheduler, ..SchedulerOptions::default() };
    Support { counters: unsafe_counters(&options, "", all).is_none(), ..all }
}

fn yaml(slices: &[Slice]) -> Result<String> {
    let mut text = String::new();
    for slice in slices {
        write!(text, "---\n{}", serde_norway::to_string(slice)?)?;
    }
    Ok(text)
}

fn warnings(gpus: &[Model]) -> Vec<String> {
    let mut models: Vec<Model> = Vec::new();
    gpus.iter().for_each(|model| {
        if !models.contains(model) {
            models.push(*model);
        }
    });
    let rows = models.into_iter().map(Model::row);
    let derived = rows.filter(|row| {
        let profiles = row.mig.iter().flat_map(|mig| &mig.profiles);
        !row.verified || profiles.into_iter().any(|profile| !profile.verified)
    });
    derived
        .map(|row| format!("warning: some figures of {} are from documents, not from a card", row.key))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args, FromArgMatches};

    fn arguments(flags: &[&str]) -> Result<TemplateArguments, clap::Error> {
        let command = TemplateArguments::augment_args(clap::Command::new("template").no_binary_name(true));
        TemplateArguments::from_arg_matches(&command.try_get_matches_from(flags)?)
    }

    fn devices(flags: &[&str]) -> Vec<String> {
        let slices = template(&arguments(flags).expect("flags"), None);
        slices
            .iter()
            .flat_map(|slice| slice.content.devices.iter().map(|device| device.name.clone()))
            .collect()
    }

    #[test]
    fn scheduler_with_known_bugs_gets_whole_gpus_only() {
        assert_eq!(
            devices(&["--gpus", "2xH200", "--scheduler-version", "1.36.1"]),
            ["gpu-1", "gpu-0", "gpu-0-observer", "gpu-1-observer"]
        );
        assert!(devices(&["--gpus", "H200", "--scheduler-version", "1.37.0"]).len() > 20);
        assert_eq!(
            devices(&["--gpus", "T4"]),
            ["gpu-0", "gpu-0-share", "gpu-0-timeslice", "gpu-0-mps", "gpu-0-observer"]
        );
    }

    #[test]
    fn unknown_models_are_answered_with_the_known_ones() {
        let error = arguments(&["--gpus", "2xK80"]).err().expect("no model").to_string();
        assert!(error.contains("no GPU model \"K80\"") && error.contains("RTX-PRO-6000"), "{error}");
    }

    #[test]
    fn invalid_names_and_versions_are_refused() {
        for (flag, value) in [
            ("--node", "Node"),
            ("--node", ".a"),
            ("--node", "a-"),
            ("--driver-version", "580"),
            ("--driver-version", "580.x"),
            ("--cuda-version", "0.1"),
            ("--cuda-version", "13.0.1"),
            ("--scheduler-version", "new"),
        ] {
            assert!(arguments(&["--gpus", "T4", flag, value]).is_err(), "{flag} {value}");
        }
    }

    #[test]
    fn derived_figures_cause_one_warning_per_model() {
        let of = |list: &str| warnings(&parse_list(list).expect(list)).len();
        assert_eq!((of("8xH100-SXM5-80GB,T4"), of("2xB300,2xL4")), (0, 2));
    }
}
