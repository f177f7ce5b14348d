//! `divvy node`: the health of a node's GPUs, and what an operator does about it.
//!
//! It talks to the daemon over the control socket. For another node, kubectl runs it in the pod of
//! that node's daemon, whose image contains this program.

use crate::top::remote;
use anyhow::{Context, Result, ensure};
use divvy_api::control::{Answer, GpuHealth, LINE_MAX_BYTES, Request, SOCKET};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const HEALTH_HELP: &str = "\
Examples:
  divvy node health
  divvy node health --node node-1 -o json";
const RELEASE_HELP: &str = "\
Examples:
  divvy node release gpu-3 --node node-1
  divvy node release gpu-3 --node node-1 --take-back";
const FORGET_HELP: &str = "\
Example:
  divvy node forget gpu-3 --node node-1";

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Output {
    Text,
    Json,
}

/// See the command's help.
#[derive(clap::Subcommand)]
pub(crate) enum NodeCommand {
    /// Show the state of each GPU, its causes and its claims
    #[command(after_help = HEALTH_HELP)]
    Health {
        /// Print one JSON object per line and GPU
        #[arg(long, hide = true)]
        json: bool,
        /// Format of the output; JSON has one object per line and GPU
        #[arg(short, long, value_enum, default_value = "text", conflicts_with = "json")]
        output: Output,
        #[command(flatten)]
        at: At,
    },
    /// Let go of a GPU so that it can be reset or replaced, and take it back
    ///
    /// The GPU takes no new claims in between. Delete the pods that use it first: `divvy node health`
    /// lists their claims.
    #[command(after_help = RELEASE_HELP)]
    Release {
        /// Number or UUID: gpu-3, 3 or GPU-...
        gpu: String,
        /// Use the GPU again
        #[arg(long)]
        take_back: bool,
        #[command(flatten)]
        at: At,
    },
    /// Forget a missing GPU at once: its number and its devices
    #[command(after_help = FORGET_HELP)]
    Forget {
        /// Number or UUID: gpu-3, 3 or GPU-...
        gpu: String,
        #[command(flatten)]
        at: At,
    },
}

/// The node.
#[derive(clap::Args)]
pub(crate) struct At {
    /// This node of the cluster instead of this machine: kubectl runs the command in the pod of its
    /// daemon
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// The node daemon's --run-dir
    #[arg(long, value_name = "DIR", default_value = "/run/divvy")]
    run_dir: PathBuf,
}

/// Longer than the daemon takes for any request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(40);

/// Sends the request and prints the answer.
pub(crate) fn run(command: &NodeCommand) -> Result<ExitCode> {
    let (request, at, words) = match command {
        NodeCommand::Health { json, output, at } => {
            let json = (*json || *output == Output::Json).then(|| "--json".to_owned());
            (Request::Health, at, ["health".to_owned()].into_iter().chain(json).collect::<Vec<_>>())
        }
        NodeCommand::Release { gpu, take_back: false, at } => {
            (Request::Release { gpu: gpu.clone() }, at, vec!["release".to_owned(), gpu.clone()])
        }
        NodeCommand::Release { gpu, take_back: true, at } => {
            let words = vec!["release".to_owned(), gpu.clone(), "--take-back".to_owned()];
            (Request::TakeBack { gpu: gpu.clone() }, at, words)
        }
        NodeCommand::Forget { gpu, at } => {
            (Request::Forget { gpu: gpu.clone() }, at, vec!["forget".to_owned(), gpu.clone()])
        }
    };
    if let Some(node) = &at.node {
        let run_dir = ["--run-dir".to_owned(), at.run_dir.display().to_string()];
        let words = ["node".to_owned()].into_iter().chain(words).chain(run_dir).collect::<Vec<_>>();
        return remote::divvy(node, &words);
    }
    let mut out = io::stdout().lock();
    match ask(&at.run_dir, &request)? {
        Answer::Health(gpus)
            if matches!(
                command,
                NodeCommand::Health { json: true, .. } | NodeCommand::Health { output: Output::Json, .. }
            ) =>
        {
            for gpu in gpus {
                writeln!(out, "{}", serde_json::to_string(&gpu)?)?;
            }
        }
        Answer::Health(gpus) => out.write_all(table(&gpus).as_bytes())?,
        Answer::Done(text) => writeln!(out, "{text}")?,
        Answer::Refused(error) => {
            eprintln!("divvy: {error}");
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn ask(run_dir: &Path, request: &Request) -> Result<Answer> {
    let path = run_dir.join(SOCKET);
    let failed =
        || format!("divvy-node does not answer on {}; is it running here, and are you root?", path.display());
    let mut stream = UnixStream::connect(&path).with_context(failed)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).with_context(failed)?;
    let mut line = serde_json::to_string(request)?;
    line.push('\n');
    stream.write_all(line.as_bytes()).with_context(failed)?;
    let mut answer = String::new();
    BufReader::new(stream.take(LINE_MAX_BYTES)).read_line(&mut answer).with_context(failed)?;
    ensure!(!answer.is_empty(), failed());
    serde_json::from_str(&answer).context("divvy-node has another version than this divvy")
}

/// One line for each GPU, and one for each condition.
fn table(gpus: &[GpuHealth]) -> String {
    let mut text = format!("{:<8}{:<12}{:<10}{:<24}CLAIMS\n", "GPU", "STATE", "PRESENCE", "PRODUCT");
    for gpu in gpus {
        let claims = match gpu.claims.is_empty() {
            true => "-".to_owned(),
            false => gpu.claims.join(", "),
        };
        let name = format!("gpu-{}", gpu.number);
        text += &format!("{name:<8}{:<12}{:<10}{:<24}{claims}\n", gpu.state, gpu.presence, gpu.product);
        for condition in &gpu.conditions {
            text += &format!("        {condition}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_shows_states_causes_and_claims() {
        let gpu = |number: u32, state: &str, conditions: &[&str], claims: &[&str]| GpuHealth {
            number,
            uuid: format!("GPU-{number}").into(),
            product: "NVIDIA L4".to_owned(),
            presence: "present".to_owned(),
            state: state.to_owned(),
            conditions: conditions.iter().map(ToString::to_string).collect(),
            claims: claims.iter().map(ToString::to_string).collect(),
        };
        let all = [gpu(0, "healthy", &[], &["a/b", "c/d"]), gpu(1, "lost", &["GPU is lost: XID 79"], &[])];
        let expected = "\
GPU     STATE       PRESENCE  PRODUCT                 CLAIMS
gpu-0   healthy     present   NVIDIA L4               a/b, c/d
gpu-1   lost        present   NVIDIA L4               -
        GPU is lost: XID 79
";
        assert_eq!(table(&all), expected);
    }
}
