//! Commands with `--node`: kubectl runs `divvy` in the pod of that node's daemon, whose image contains
//! this program.

use super::TopArguments;
use anyhow::{Context, Result, bail, ensure};
use std::io::{self, IsTerminal};
use std::process::{Command, ExitCode, Stdio};

/// Selector of the node daemons' pods: labels of the chart that do not depend on the release name.
const POD_SELECTOR: &str = "app.kubernetes.io/part-of=divvy,app.kubernetes.io/component=node";
const NO_KUBECTL: &str = "cannot start kubectl; --node needs it on the PATH";

/// Runs `divvy top` on the node.
pub(super) fn run(node: &str, arguments: &TopArguments) -> Result<ExitCode> {
    let mut words = vec!["top".to_owned(), "--run-dir".to_owned(), arguments.run_dir.display().to_string()];
    words.extend(arguments.once.then(|| "--once".to_owned()));
    words.extend(arguments.json().then(|| "--json".to_owned()));
    words.extend(arguments.totals.then(|| "--totals".to_owned()));
    divvy(node, &words)
}

/// Runs `divvy` with these arguments on the node.
pub(crate) fn divvy(node: &str, words: &[String]) -> Result<ExitCode> {
    let pod = Command::new("kubectl")
        .args(["get", "pods", "--all-namespaces", "--selector", POD_SELECTOR])
        .args(["--field-selector", &format!("spec.nodeName={node},status.phase=Running")])
        .args(["--output", "jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{\"\\n\"}{end}"])
        .stderr(Stdio::inherit())
        .output()
        .context(NO_KUBECTL)?;
    ensure!(pod.status.success(), "kubectl cannot list the pods of node {node}; see its error above");
    let list = String::from_utf8_lossy(&pod.stdout).into_owned();
    let Some((namespace, name)) = list.lines().find_map(|line| line.split_once(' ')) else {
        bail!(
            "no pod of divvy-node runs on node {node}; \
             `kubectl get pods --all-namespaces --output wide --selector {POD_SELECTOR}` \
             lists the nodes with one"
        );
    };
    let mut exec = Command::new("kubectl");
    exec.args(["exec", "--namespace", namespace, name]);
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        exec.args(["--stdin", "--tty"]);
    }
    exec.args(["--", "divvy"]).args(words);
    let status = exec.status().context(NO_KUBECTL)?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
