//! `divvy run`: a pod with a claim, from flags.
//!
//! It prints the claim template and the pod, or applies them with kubectl. Both are checked first,
//! with the rules of `divvy check`.

use crate::check::problems;
use crate::documents;
use anyhow::{Context, Result, bail};
use divvy_api::check::Severity;
use divvy_api::foreign::Ported;
use divvy_api::{Quantity, quantity::QuantityError};
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, ExitCode, Stdio};

const AFTER_HELP: &str = "\
Examples:
  divvy run --memory 10Gi --cores 30 -- nvidia/cuda:13.0.0-base-ubuntu24.04 nvidia-smi
  divvy run --mode whole -- pytorch/pytorch python train.py
  divvy run --mode mig --profile 1g.10gb --name small -- IMAGE | kubectl apply -f -
  divvy run --memory 4Gi --apply -- IMAGE COMMAND";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RunArguments {
    /// Memory of the share, such as 10Gi
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<Quantity>,
    /// Guaranteed percent of the GPU's compute time
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
    cores: Option<u32>,
    /// How the GPU is divided; by default a share, or the whole GPU without --memory and --cores
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// MIG profile, such as 1g.10gb
    #[arg(long, value_name = "PROFILE")]
    profile: Option<String>,
    /// Number of GPUs, or of MIG instances
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=32))]
    count: u32,
    /// A DeviceClass of your own
    #[arg(long, value_name = "NAME")]
    class: Option<String>,
    /// Name of the pod; by default that of the image
    #[arg(long)]
    name: Option<String>,
    /// Namespace of the pod and the claim template
    #[arg(long, short)]
    namespace: Option<String>,
    /// Apply the objects with kubectl instead of printing them
    #[arg(long, conflicts_with = "output")]
    apply: bool,
    /// Format of the objects; JSON is a List
    #[arg(short, long, value_enum, default_value = "yaml")]
    output: Output,
    /// The image and its command
    #[arg(last = true, required = true, value_name = "IMAGE COMMAND")]
    image: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    Share,
    Whole,
    Mig,
    Timeslice,
    Mps,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Yaml,
    Json,
}

fn memory(text: &str) -> Result<Quantity, String> {
    match divvy_api::check::quantity_problem("memory", text) {
        Some(problem) => Err(problem),
        None => text.parse().map_err(|cause: QuantityError| cause.to_string()),
    }
}

/// Prints or applies the objects.
pub(crate) fn run(arguments: &RunArguments) -> Result<ExitCode> {
    let objects = objects(arguments)?;
    let mut failed = false;
    for finding in objects.iter().flat_map(|object| problems(object, &objects)) {
        eprintln!("divvy: {}: {}", finding.severity, finding.message);
        failed |= finding.severity == Severity::Error;
    }
    if failed {
        return Ok(ExitCode::FAILURE);
    }
    let yaml = documents::yaml(&objects)?;
    if arguments.apply {
        return apply(&yaml);
    }
    match arguments.output {
        Output::Yaml => print!("{yaml}"),
        Output::Json => {
            let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
            println!("{}", serde_json::to_string_pretty(&list)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn apply(yaml: &str) -> Result<ExitCode> {
    let mut kubectl = Command::new("kubectl")
        .args(["apply", "--filename", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot start kubectl; --apply needs it on the PATH")?;
    if let Some(mut input) = kubectl.stdin.take() {
        input.write_all(yaml.as_bytes()).context("kubectl does not read the objects")?;
    }
    let status = kubectl.wait().context("kubectl does not end")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The claim template and the pod.
fn objects(arguments: &RunArguments) -> Result<Vec<Value>> {
    let RunArguments { memory, cores, profile, count, class, name, namespace, image, .. } = arguments;
    let [image, command @ ..] = image.as_slice() else { bail!("name an image after --") };
    let mode = match (arguments.mode, memory.is_some() || cores.is_some(), profile.is_some()) {
        (Some(mode), ..) => mode,
        (None, _, true) => Mode::Mig,
        (None, true, false) => Mode::Share,
        (None, false, false) => Mode::Whole,
    };
    let of_mode = match mode {
        Mode::Share => "share.divvy.dev",
        Mode::Whole => "gpu.divvy.dev",
        Mode::Mig => "mig.divvy.dev",
        Mode::Timeslice => "timeslice.divvy.dev",
        Mode::Mps => "mps.divvy.dev",
    };
    if profile.is_some() && mode != Mode::Mig {
        bail!("--profile is for --mode mig; remove one of them");
    }
    let ported = Ported {
        class: class.clone().unwrap_or_else(|| of_mode.to_owned()),
        count: *count,
        memory: *memory,
        cores: *cores,
        profile: profile.clone(),
    };
    let name = name.clone().unwrap_or_else(|| name_of_image(image));
    let mut template = json!(ported.template(&format!("{name}-gpu")));
    let mut container = json!({
        "name": "main", "image": image, "resources": {"claims": [{"name": "gpu"}]},
    });
    if !command.is_empty() {
        container["command"] = json!(command);
    }
    let claim = json!({"name": "gpu", "resourceClaimTemplateName": format!("{name}-gpu")});
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container], "resourceClaims": [claim]},
    });
    if let Some(namespace) = namespace {
        template["metadata"]["namespace"] = json!(namespace);
        pod["metadata"]["namespace"] = json!(namespace);
    }
    Ok(vec![template, pod])
}

/// The last part of an image's name without its tag, as a valid object name.
fn name_of_image(image: &str) -> String {
    let last = image.rsplit('/').next().unwrap_or(image);
    let bare = last.split([':', '@']).next().unwrap_or(last).to_ascii_lowercase();
    let plain: String =
        bare.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(50).collect();
    let name = plain.trim_matches('-');
    if name.is_empty() { "gpu-pod".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args, FromArgMatches};

    /// The class, the capacities and the findings.
    fn check(flags: &str, class: &str, amounts: &Value, findings: usize) {
        let command = RunArguments::augment_args(clap::Command::new("run").no_binary_name(true));
        let matches = command.try_get_matches_from(flags.split_whitespace()).expect(flags);
        let arguments = RunArguments::from_arg_matches(&matches).expect(flags);
        let objects = objects(&arguments).expect(flags);
        let request = &objects[0]["spec"]["spec"]["devices"]["requests"][0]["exactly"];
        assert_eq!(request["deviceClassName"], class, "{flags}");
        assert_eq!(request["capacity"]["requests"], *amounts, "{flags}");
        let found: Vec<_> = objects.iter().flat_map(|object| problems(object, &objects)).collect();
        assert_eq!(found.len(), findings, "{flags}: {found:?}");
    }

    #[test]
    fn flags_become_a_pod_with_its_claim() {
        let share = json!({"memory": "10Gi", "cores": "30"});
        check("--memory 10Gi --cores 30 -- cuda nvidia-smi -L", "share.divvy.dev", &share, 0);
        check("-- a.example/b/cuda:1", "gpu.divvy.dev", &Value::Null, 0);
        check("--profile 1g.10gb -- cuda", "mig.divvy.dev", &Value::Null, 0);
        check("--mode timeslice -- cuda", "timeslice.divvy.dev", &Value::Null, 0);
        check("--mode mps --memory 4Gi -- cuda", "mps.divvy.dev", &json!({"memory": "4Gi"}), 0);
        check("--cores 30 -- cuda", "share.divvy.dev", &json!({"cores": "30"}), 1);
        check("--mode whole --cores 30 -- cuda", "gpu.divvy.dev", &json!({"cores": "30"}), 1);
        check(
            "--class shares.divvy.dev --memory 1Gi -- cuda",
            "shares.divvy.dev",
            &json!({"memory": "1Gi"}),
            1,
        );
    }

    #[test]
    fn wrong_units_are_explained() {
        assert_eq!(
            memory("10GB").expect_err("GB"),
            "memory is \"10GB\", which is not a quantity; write 10G or 10Gi"
        );
        assert!(memory("10Gi").is_ok());
    }

    #[test]
    fn pod_is_named_after_its_image() {
        for (image, name) in
            [("nvidia/cuda:13.0", "cuda"), ("r.example:5000/My_App@sha256:1", "my-app"), ("...", "gpu-pod")]
        {
            assert_eq!(name_of_image(image), name);
        }
    }
}
