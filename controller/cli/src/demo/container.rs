//! The container of a claim: its CDI file, and an MPS client as it would run in it.

use anyhow::{Context, Result, bail};
use divvy_api::mps::CONTAINER_PIPE;
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

/// A claim's CDI file, read as a container runtime does.
pub(crate) struct CdiFile {
    file: String,
    document: Value,
}

/// The environment variables and the pipe directory of an MPS client.
pub(crate) struct MpsAccess {
    pub(crate) env: Vec<(String, String)>,
    /// The pipe directory on the host.
    pub(crate) pipe: PathBuf,
}

impl CdiFile {
    /// Reads the CDI file of the claim with this UID.
    pub(crate) fn read(cdi_dir: &Path, uid: &str) -> Result<Self> {
        let mut entries = std::fs::read_dir(cdi_dir)?.filter_map(Result::ok).map(|entry| entry.path());
        let path =
            entries.find(|path| path.to_string_lossy().contains(uid)).context("the claim has no CDI file")?;
        let document = serde_json::from_slice(&std::fs::read(&path)?)
            .with_context(|| format!("{} is not JSON", path.display()))?;
        Ok(Self { file: path.file_name().unwrap_or_default().display().to_string(), document })
    }

    fn devices(&self) -> impl Iterator<Item = &Value> {
        list(&self.document["devices"]).map(|device| &device["containerEdits"])
    }

    /// Describes device nodes, variables and mounts. Paths below `root` are relative to it.
    pub(crate) fn describe(&self, root: &Path) -> String {
        let short = |path: &str| {
            let path = Path::new(path);
            path.strip_prefix(root).unwrap_or(path).display().to_string()
        };
        let mut text = String::new();
        for edits in self.devices() {
            let nodes: Vec<&str> =
                list(&edits["deviceNodes"]).filter_map(|node| node["path"].as_str()).collect();
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}", nodes.join("  "));
            for variable in list(&edits["env"]).filter_map(Value::as_str) {
                let _ = writeln!(text, "{variable}");
            }
            for mount in list(&edits["mounts"]) {
                let (host, container) = (mount["hostPath"].as_str(), mount["containerPath"].as_str());
                let _ = writeln!(
                    text,
                    "{} is {}",
                    container.unwrap_or_default(),
                    short(host.unwrap_or_default())
                );
            }
        }
        let common = &self.document["containerEdits"];
        let count = |part: &str| list(&common[part]).count();
        let _ = write!(
            text,
            "with {} common nodes, {} mounts, {} hook in {}",
            count("deviceNodes"),
            count("mounts"),
            count("hooks"),
            self.file
        );
        text
    }

    /// The MPS access of the first device with MPS.
    pub(crate) fn mps(&self) -> Option<MpsAccess> {
        self.devices().find_map(|edits| {
            let pipe = list(&edits["mounts"]).find(|mount| mount["containerPath"] == CONTAINER_PIPE)?;
            let env = list(&edits["env"]).filter_map(Value::as_str).filter_map(|text| text.split_once('='));
            Some(MpsAccess {
                env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
                pipe: pipe["hostPath"].as_str()?.into(),
            })
        })
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Limit for the connection to the MPS server, which may have to start first.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// A connected MPS client with the environment of a container of the claim. It is killed when dropped.
pub(crate) struct MpsClient(Child);

impl MpsClient {
    /// Starts `program`, which is divvy-sim, and waits until it is connected. Returns a description
    /// of its limits, too.
    pub(crate) async fn start(program: &Path, name: &str, access: &MpsAccess) -> Result<(Self, String)> {
        let mut command = Command::new(program);
        command.args(["client", "--name", name, "--pipe"]).arg(&access.pipe);
        // In a container the pipe directory has another path, and its only GPU needs no selection.
        command.envs(access.env.iter().cloned()).env_remove("CUDA_VISIBLE_DEVICES");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("cannot start an MPS client")?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("the MPS client has no output")?;
        let read = tokio::time::timeout(CONNECT_TIMEOUT, BufReader::new(stdout).read_line(&mut line))
            .await
            .with_context(|| format!("its MPS client did not connect within {CONNECT_TIMEOUT:?}"))??;
        if read == 0 {
            let mut cause = String::new();
            if let Some(mut stderr) = child.stderr.take() {
                stderr.read_to_string(&mut cause).await?;
            }
            bail!("its MPS client was refused: {}", cause.trim());
        }
        let client: Value = serde_json::from_str(&line).context("its MPS client printed no JSON")?;
        if client["mps"] != true {
            bail!("its client runs without MPS");
        }
        let number = |key: &str| client[key].as_f64().unwrap_or_default();
        let limits = format!(
            "process {} is a client of MPS server {}: {} % of the threads, at most {} MiB",
            client["pid"],
            client["server"],
            number("threadPercentage"),
            number("memoryLimitMib")
        );
        Ok((Self(child), limits))
    }

    /// Kills the client and waits for its exit.
    pub(crate) async fn kill(mut self) -> Result<()> {
        Ok(self.0.kill().await?)
    }
}
