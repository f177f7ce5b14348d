//! The same on another node: kubectl runs it in the pod of that node's daemon, whose image has this program.

use super::TopArguments;
use anyhow::{Context, Result, bail, ensure};
use std::io::{self, IsTerminal};
use std::process::{Command, ExitCode, Stdio};

/// The pods of node daemons; the chart's labels, whatever the release is called.
const PODS: &str = "app.kubernetes.io/part-of=divvy,app.kubernetes.io/component=node";

pub(super) fn run(node: &str, arguments: &TopArguments) -> Result<ExitCode> {
    let pod = Command::new("kubectl")
        .args(["get", "pods", "--all-namespaces", "--selector", PODS])
        .args(["--field-selector", &format!("spec.nodeName={node},status.phase=Running")])
        .args(["--output", "jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{\"\\n\"}{end}"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start kubectl")?;
    ensure!(pod.status.success(), "kubectl cannot list pods");
    let list = String::from_utf8_lossy(&pod.stdout).into_owned();
    let Some((namespace, name)) = list.lines().find_map(|line| line.split_once(' ')) else {
        bail!("no pod of divvy-node runs on node {node}");
    };
    let mut there = Command::new("kubectl");
    there.args(["exec", "--namespace", namespace, name]);
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        there.args(["--stdin", "--tty"]);
    }
    there.args(["--", "divvy", "top"]);
    there.args(arguments.once.then_some("--once")).args(arguments.json.then_some("--json"));
    let ended = there.status().context("cannot start kubectl")?;
    Ok(if ended.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
