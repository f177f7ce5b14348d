//! A process that uses a GPU by way of MPS, as one in a container of the claim
//! would: it is told what the container is told and reaches the control daemon
//! by the pipe directory that the container gets.

use super::view::MpsView;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

/// How long it may take to be let in.
const CONNECT: Duration = Duration::from_secs(20);

/// A client that was let in. It ends with the value.
pub(crate) struct Client(Child);

impl Client {
    /// Starts `program`, divvy-sim; returns when it is let in, with what it got.
    pub(crate) async fn start(program: &Path, name: &str, view: &MpsView) -> Result<(Self, String)> {
        let mut command = Command::new(program);
        command.args(["client", "--name", name, "--pipe"]).arg(&view.pipe);
        // In a container the pipe directory has another name, and the GPU is the only one.
        command.envs(view.env.iter().cloned()).env_remove("CUDA_VISIBLE_DEVICES");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("cannot start a client")?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("no output of the client")?;
        let read =
            tokio::time::timeout(CONNECT, BufReader::new(stdout).read_line(&mut line)).await.with_context(
                || format!("the MPS control daemon did not let its client in within {CONNECT:?}"),
            )??;
        if read == 0 {
            let mut cause = String::new();
            if let Some(mut stderr) = child.stderr.take() {
                stderr.read_to_string(&mut cause).await?;
            }
            bail!("its client was not let in: {}", cause.trim());
        }
        let said: Value = serde_json::from_str(&line).context("a client that cannot be understood")?;
        if said["mps"] != true {
            bail!("its client runs without MPS");
        }
        let number = |key: &str| said[key].as_f64().unwrap_or_default();
        let told = format!(
            "process {} is a client of MPS server {}: {} % of the threads, at most {} MiB",
            said["pid"],
            said["server"],
            number("threadPercentage"),
            number("memoryLimitMib")
        );
        Ok((Self(child), told))
    }

    /// Ends it and waits for its end.
    pub(crate) async fn end(mut self) -> Result<()> {
        Ok(self.0.kill().await?)
    }
}
