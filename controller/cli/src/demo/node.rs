//! The demo's node: simulated GPUs, an API server, a kubelet, and processes of the node daemon and
//! the MPS supervisor.
//!
//! All files are below one directory. Everything is stopped in reverse order.

use anyhow::{Context, Result, bail};
use divvy_api::mps;
use divvy_fakes::apiserver::{FakeApi, FakeApiOptions};
use divvy_fakes::kubelet::{FakeKubelet, KubeletOptions};
use divvy_sim::Sim;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::PostParams;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the node and of its pool.
const NODE_NAME: &str = "demo";

/// Limit for the start and for the stop of each part.
const START_STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Directory of the programs, which are links to this binary.
const BIN: &str = "bin";

/// Sets a time-slice interval other than the default, so that the map shows when it is set and reset.
const CONFIG: &str = "\
apiVersion: resource.divvy.dev/v1alpha1
kind: NodeConfig
rules: [{interval: Long}]
";

/// A running node.
pub(crate) struct DemoNode {
    pub(crate) sim: Sim,
    /// Serves until it is dropped.
    _api: FakeApi,
    pub(crate) kubelet: FakeKubelet,
    pub(crate) client: kube::Client,
    pub(crate) node: Node,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) cdi_dir: PathBuf,
    /// Directory of all files.
    pub(crate) root: PathBuf,
    daemon: Daemon,
    /// Declared after the daemon, so that it is stopped after it.
    _supervisor: Supervisor,
    /// Declared last, so that it is removed last.
    _dir: Option<tempfile::TempDir>,
}

impl DemoNode {
    /// Starts GPUs, API server, kubelet and daemon, and waits until the daemon is registered.
    pub(crate) async fn start(gpus: &str, dir: Option<&Path>) -> Result<Self> {
        // A short path: the path of a Unix socket has at most 108 bytes.
        let temporary = match dir {
            Some(_) => None,
            None => Some(
                tempfile::Builder::new()
                    .prefix("divvy-")
                    .tempdir()
                    .context("cannot create a temporary directory")?,
            ),
        };
        let root = match (dir, &temporary) {
            (Some(dir), _) => std::path::absolute(dir)?,
            (None, Some(temporary)) => temporary.path().to_owned(),
            (None, None) => bail!("the demo has no directory"),
        };
        let program = std::env::current_exe().context("cannot find this program's file")?;

        let driver_root = root.join("gpu");
        let sim = divvy_sim::create(
            &driver_root,
            gpus,
            &divvy_sim::Options::new(divvy_sim::library()?, program.clone()),
        )?;

        let api = FakeApi::start(FakeApiOptions::default()).await?;
        let kubeconfig = api.kubeconfig_path(&root)?;
        let client = api.client()?;
        let node: Node = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE_NAME},
        }))?;
        let node = Api::all(client.clone()).create(&PostParams::default(), &node).await?;

        let kubelet = FakeKubelet::start(&root.join("kubelet"), KubeletOptions::default())?;
        let cdi_dir = root.join("cdi");
        std::fs::create_dir_all(&cdi_dir)?;
        link_programs(&program, &root.join(BIN))?;
        let supervisor = Supervisor::start(&root)?;
        let daemon = Daemon::start(&root, &kubeconfig)?;
        let started = Self {
            sim,
            _api: api,
            kubelet,
            client,
            node,
            kubeconfig,
            cdi_dir,
            root,
            daemon,
            _supervisor: supervisor,
            _dir: temporary,
        };
        if let Err(error) =
            started.kubelet.wait_registered(divvy_api::names::DRIVER, 1, START_STOP_TIMEOUT).await
        {
            bail!("the driver did not register: {error}\n{}", started.daemon_log());
        }
        Ok(started)
    }

    /// The last lines of the daemon's log.
    pub(crate) fn daemon_log(&self) -> String {
        let text = std::fs::read_to_string(self.root.join("divvy-node.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Path of the program with this name.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.root.join(BIN).join(name)
    }

    /// Stops the daemon with SIGTERM.
    ///
    /// # Errors
    /// The daemon fails or does not exit in time.
    pub(crate) async fn stop_daemon(&mut self) -> Result<()> {
        self.daemon.stop().await
    }
}

/// Links the programs of the node to this binary.
fn link_programs(program: &Path, bin: &Path) -> Result<()> {
    std::fs::create_dir_all(bin)?;
    for name in ["divvy-node", "divvy-mps-supervisor", "divvy-hook", "divvy-sim"] {
        let link = bin.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(program, &link)
                .with_context(|| format!("cannot link {}", link.display()))?;
        }
    }
    Ok(())
}

/// Starts a program with its log in `root`. It has its own process group, so that Ctrl-C does not reach it.
fn spawn_logged(command: &mut Command, root: &Path, name: &str) -> Result<Child> {
    let log = std::fs::File::create(root.join(format!("{name}.log")))?;
    command.process_group(0).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().with_context(|| format!("cannot start {name}"))
}

/// The process of the MPS supervisor. MPS control daemons would outlive it, so dropping it stops them first.
struct Supervisor {
    child: Child,
    targets: PathBuf,
}

impl Supervisor {
    fn start(root: &Path) -> Result<Self> {
        let run = root.join("run");
        let mut command = Command::new(root.join(BIN).join("divvy-mps-supervisor"));
        command.arg("--run-dir").arg(&run).arg("--driver-root").arg(root.join("gpu"));
        let child = spawn_logged(&mut command, root, "divvy-mps-supervisor")?;
        Ok(Self { child, targets: run.join(mps::DIRECTORY) })
    }

    /// Directories of the running MPS control daemons.
    fn directories(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.targets).into_iter().flatten().filter_map(Result::ok);
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Errors cannot be reported while dropping.
        for directory in self.directories() {
            let _ = std::fs::remove_file(directory.join(mps::DESIRED));
        }
        let began = Instant::now();
        while !self.directories().is_empty() && began.elapsed() < START_STOP_TIMEOUT {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process of the node daemon. Killed when dropped without being stopped.
struct Daemon {
    child: Child,
}

impl Daemon {
    fn start(root: &Path, kubeconfig: &Path) -> Result<Self> {
        let (bin, gpu, config) = (root.join(BIN), root.join("gpu"), root.join("config.yaml"));
        std::fs::write(&config, CONFIG)?;
        let mut command = Command::new(bin.join("divvy-node"));
        command
            .args(["--node-name", NODE_NAME, "--http-address", "127.0.0.1:0", "--log-format", "text"])
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .arg("--kubelet-root")
            .arg(root.join("kubelet"))
            .arg("--cdi-dir")
            .arg(root.join("cdi"))
            .arg("--run-dir")
            .arg(root.join("run"))
            .arg("--driver-root")
            .arg(&gpu)
            .arg("--dev-root")
            .arg(&gpu)
            .arg("--proc-root")
            .arg(gpu.join("proc"))
            .arg("--sys-root")
            .arg(gpu.join("sys"))
            .arg("--hook")
            .arg(bin.join("divvy-hook"))
            // MIG mode must be disabled before the demo compares the GPUs, not half a minute later.
            .args(["--mig-hold-off", "0s"])
            .arg("--config")
            .arg(&config);
        let child = spawn_logged(&mut command, root, "divvy-node")?;
        Ok(Self { child })
    }

    /// Sends SIGTERM and waits without blocking the API server in this process.
    async fn stop(&mut self) -> Result<()> {
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status().context("cannot signal divvy-node")?;
        let deadline = std::time::Instant::now() + START_STOP_TIMEOUT;
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("divvy-node exited with {status}"),
                None if std::time::Instant::now() > deadline => {
                    bail!("divvy-node did not stop within {START_STOP_TIMEOUT:?}")
                }
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // An error means that the process has exited already.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
