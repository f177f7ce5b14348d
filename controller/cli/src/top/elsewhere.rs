//! The same on another node: kubectl runs it in the pod of that node's daemon, whose image has this program.

use super::TopArguments;
use anyhow::{Context, Result, bail, ensure};
use std::io::{self, IsTerminal};
use std::process::{Command, ExitCode, Stdio};

/// The pods of node daemons; the chart's labels, whatever the release is called.
const PODS: &str = "app.kubernetes.io/part-of=divvy,app.kubernetes.io/component=node";
const NO_KUBECTL: &str = "kubectl cannot be started, which --node needs on the PATH";

pub(super) fn run(node: &str, arguments: &TopArguments) -> Result<ExitCode> {
    let pod = Command::new("kubectl")
        .args(["get", "pods", "--all-namespaces", "--selector", PODS])
        .args(["--field-selector", &format!("spec.nodeName={node},status.phase=Running")])
        .args(["--output", "jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{\"\\n\"}{end}"])
        .stderr(Stdio::inherit())
        .output()
        .context(NO_KUBECTL)?;
    ensure!(pod.status.success(), "kubectl cannot list the pods of node {node}; what it says is above");
    let list = String::from_utf8_lossy(&pod.stdout).into_owned();
    let Some((namespace, name)) = list.lines().find_map(|line| line.split_once(' ')) else {
        bail!(
            "no pod of divvy-node runs on a node {node}; `kubectl get pods --all-namespaces --output wide --selector {PODS}` tells where they run"
        );
    };
    let mut there = Command::new("kubectl");
    there.args(["exec", "--namespace", namespace, name]);
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        there.args(["--stdin", "--tty"]);
    }
    there.args(["--", "divvy", "top", "--run-dir"]).arg(&arguments.run_dir);
    there.args(arguments.once.then_some("--once")).args(arguments.json.then_some("--json"));
    let ended = there.status().context(NO_KUBECTL)?;
    Ok(if ended.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
