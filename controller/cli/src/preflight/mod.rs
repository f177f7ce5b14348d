//! `divvy preflight`: whether a cluster can run Divvy, before it is installed.
//!
//! [`facts`] reads the cluster and changes nothing. [`checks`] decides, and [`values`] writes the
//! values of the chart; both are pure.

mod checks;
mod facts;
mod values;

use anyhow::{Context, Result};
use checks::{Check, Outcome};
use serde_json::json;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Reads the cluster of the current kubeconfig context, and changes nothing in it.

Exit code: 0 if no check failed, 1 if one failed, 2 if the cluster cannot be read.

  kubectl divvy preflight
  kubectl divvy preflight --values values.yaml
  helm install divvy manifests/chart --namespace divvy --create-namespace --values values.yaml";

/// The exit code if the cluster cannot be read.
const UNREAD: u8 = 2;

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct PreflightArguments {
    /// Namespace that Divvy will be installed in
    #[arg(long, short, value_name = "NAME", default_value = "divvy")]
    namespace: String,
    /// Root of the GPU driver on the nodes [default: derived from the cluster]
    #[arg(long, value_name = "DIR")]
    driver_root: Option<String>,
    /// Format of the checks
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
    /// Write a values file for the chart that fits the cluster; `-` is standard output
    #[arg(long, value_name = "FILE")]
    values: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

/// Reads the cluster and prints one line for each check.
pub(crate) fn run(arguments: &PreflightArguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let facts = match runtime.block_on(facts::read(&arguments.namespace)) {
        Ok(facts) => facts,
        Err(error) => {
            eprintln!("divvy: {error}");
            return Ok(ExitCode::from(UNREAD));
        }
    };
    let checks = checks::all(&facts, arguments.driver_root.as_deref());
    let driver_root = checks::driver_root(&facts, arguments.driver_root.as_deref());
    let mut values_on_stdout = false;
    if let Some(file) = &arguments.values {
        let text = values::values(&facts, &driver_root);
        values_on_stdout = file.as_os_str() == "-";
        if values_on_stdout {
            print(&text)?;
        } else {
            std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    let text = match arguments.output {
        Output::Json => serde_json::to_string_pretty(&json!({"checks": checks}))? + "\n",
        Output::Text => table(&checks, is_coloured()),
    };
    // The values are for a pipe, so the checks go beside it.
    if values_on_stdout {
        eprint!("{text}")
    } else {
        print(&text)?
    }
    let failed = checks.iter().any(|check| check.outcome == Outcome::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A closed pipe is not an error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write the checks"),
        _ => Ok(()),
    }
}

fn is_coloured() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// One line for each check, its remedy below it, and a summary.
fn table(checks: &[Check], coloured: bool) -> String {
    let mut text = String::new();
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or_default();
    for Check { name, outcome, found, remedy } in checks {
        let (word, colour) = match outcome {
            Outcome::Pass => ("pass", "32"),
            Outcome::Warn => ("warn", "33"),
            Outcome::Fail => ("FAIL", "31"),
        };
        let word = if coloured { format!("\x1b[{colour}m{word}\x1b[0m") } else { word.to_owned() };
        text += &format!("{word}  {name:<width$}  {found}\n");
        for line in remedy.iter().flat_map(|remedy| remedy.lines()) {
            text += &format!("      {:<width$}  {line}\n", "");
        }
    }
    let count = |outcome| checks.iter().filter(|check| check.outcome == outcome).count();
    let (passed, warned, failed) = (count(Outcome::Pass), count(Outcome::Warn), count(Outcome::Fail));
    text + &format!("{passed} passed, {warned} warnings, {failed} failed\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_remedy_stands_below_its_check() {
        let check = |name, outcome, found: &str, remedy: Option<&str>| Check {
            name,
            outcome,
            found: found.to_owned(),
            remedy: remedy.map(str::to_owned),
        };
        let checks = [
            check("Kubernetes", Outcome::Pass, "v1.37.0", None),
            check("CDI", Outcome::Fail, "off", Some("turn it on")),
        ];
        let expected = "\
pass  Kubernetes  v1.37.0
FAIL  CDI         off
                  turn it on
1 passed, 0 warnings, 1 failed
";
        assert_eq!(table(&checks, false), expected);
    }
}
