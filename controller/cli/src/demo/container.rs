//! The containers of a claim: its CDI file, read as a container runtime does, and commands that run
//! programs as in such a container.

use super::cuda;
use super::enter::{Container, Mount};
use anyhow::{Context, Result, bail};
use divvy_api::mps::CONTAINER_PIPE;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

/// Longest variable that is shown without `--verbose`.
const VARIABLE_MAX_CHARS: usize = 60;
/// Path of the library for shares in a container.
const LIBRARY: &str = "/run/divvy/lib/libdivvy.so";

/// A claim's CDI file.
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

/// The paths of a node that its containers need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodePaths<'a> {
    /// Directory of all files of the node.
    pub(crate) root: &'a Path,
    /// Directory of the links to this program.
    pub(crate) bin: &'a Path,
    /// The simulated driver's `/dev`.
    pub(crate) dev: &'a Path,
    /// The simulated driver's CUDA library.
    pub(crate) libcuda: &'a Path,
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

    /// The device nodes, and the variables that are short.
    pub(crate) fn summary(&self) -> String {
        let mut lines = Vec::new();
        for edits in self.devices() {
            lines.push(nodes(edits).join("  "));
            let variables = list(&edits["env"]).filter_map(Value::as_str);
            let is_short = |text: &&str| text.chars().count() <= VARIABLE_MAX_CHARS && !text.contains("GPU-");
            lines.extend(variables.filter(is_short).map(str::to_owned));
        }
        lines.retain(|line| !line.is_empty());
        lines.dedup();
        lines.join("\n")
    }

    /// Describes device nodes, variables and mounts. Paths below `root` are relative to it.
    pub(crate) fn describe(&self, root: &Path) -> String {
        let short = |path: &str| {
            let path = Path::new(path);
            path.strip_prefix(root).unwrap_or(path).display().to_string()
        };
        let mut lines = Vec::new();
        for edits in self.devices() {
            lines.push(nodes(edits).join("  "));
            lines.extend(list(&edits["env"]).filter_map(Value::as_str).map(str::to_owned));
            for mount in list(&edits["mounts"]) {
                let (host, container) = (mount["hostPath"].as_str(), mount["containerPath"].as_str());
                let (host, container) = (short(host.unwrap_or_default()), container.unwrap_or_default());
                lines.push(format!("{container} is {host}"));
            }
        }
        let common = &self.document["containerEdits"];
        let count = |part: &str| list(&common[part]).count();
        let (nodes, mounts, hooks) = (count("deviceNodes"), count("mounts"), count("hooks"));
        lines.push(format!("with {nodes} common nodes, {mounts} mounts, {hooks} hooks in {}", self.file));
        lines.join("\n")
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

    /// A command that executes a program with the devices, variables, pages and library of the claim.
    /// Instead of `/etc/ld.so.preload`, which is a file of this machine, a variable loads the library.
    pub(crate) fn command(&self, node: NodePaths<'_>, program: &Path) -> Result<Command> {
        let all = || std::iter::once(&self.document["containerEdits"]).chain(self.devices());
        let mount = |mount: &Value| {
            let options: Vec<&str> = list(&mount["options"]).filter_map(Value::as_str).collect();
            Some(Mount {
                host: mount["hostPath"].as_str()?.into(),
                container: mount["containerPath"].as_str()?.into(),
                read_only: options.contains(&"ro"),
            })
        };
        let mounts = all().flat_map(|edits| list(&edits["mounts"])).filter_map(mount);
        // The driver's libraries are found below its own root.
        let mounts: Vec<Mount> = mounts.filter(|mount| mount.container.starts_with("/run/divvy")).collect();
        let node_path = |node: String| Path::new(&node).strip_prefix("/dev").ok().map(Path::to_owned);
        let has_library = mounts.iter().any(|mount| mount.container == Path::new(LIBRARY));
        let container = Container {
            node: node.root.to_owned(),
            dev: node.dev.to_owned(),
            devices: all().flat_map(nodes).filter_map(node_path).collect(),
            mounts,
        };
        let mut command = Command::new(node.bin.join("divvy-container"));
        command.arg(serde_json::to_string(&container)?).arg(program);
        let variables = all().flat_map(|edits| list(&edits["env"])).filter_map(Value::as_str);
        command.envs(variables.filter_map(|text| text.split_once('=')));
        command.env(cuda::LIBRARY, node.libcuda);
        command.envs([super::node::parent()]);
        if has_library {
            command.env("LD_PRELOAD", LIBRARY);
        }
        Ok(command)
    }
}

fn nodes(edits: &Value) -> Vec<String> {
    list(&edits["deviceNodes"]).filter_map(|node| node["path"].as_str()).map(str::to_owned).collect()
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
        command.envs([super::node::parent()]);
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
            "process {} is an MPS client: {} % of the threads, at most {} MiB",
            client["pid"],
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
