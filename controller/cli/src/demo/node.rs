//! The demo's node: simulated GPUs, an API server, a kubelet, and processes of the node daemon and
//! the MPS supervisor.
//!
//! All files are below one directory. Everything is stopped in reverse order, and the processes end
//! with this one in any case.

use super::container::NodePaths;
use anyhow::{Context, Result, bail};
use divvy_api::mps;
use divvy_fakes::apiserver::{FakeApi, FakeApiOptions};
use divvy_fakes::kubelet::{FakeKubelet, KubeletOptions};
use divvy_sim::Sim;
use divvy_sim::catalogue::Toggle;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::PostParams;
use rustix::process::{Pid, Signal};
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

/// Variable with the id of the demo's process, in the processes that it starts.
const PARENT: &str = "DIVVY_DEMO_PARENT";

/// The libraries for shares, with their paths in an image.
const LIBRARIES: [(&str, &[u8]); 3] = [
    ("libdivvy.so", include_bytes!(concat!(env!("OUT_DIR"), "/libraries/libdivvy.so"))),
    ("shim/libcuda.so.1", include_bytes!(concat!(env!("OUT_DIR"), "/libraries/shim/libcuda.so.1"))),
    ("shim/libnvidia-ml.so.1", include_bytes!(concat!(env!("OUT_DIR"), "/libraries/shim/libnvidia-ml.so.1"))),
];

/// Sets a time-slice interval other than the default, so that the map shows when it is set and reset.
const CONFIG: &str = "\
apiVersion: resource.divvy.dev/v1alpha1
kind: NodeConfig
rules: [{interval: Long, migShares: true}]
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
    /// Starts GPUs, API server, kubelet and daemon, and waits until the daemon is registered. Without
    /// `libraries` the node has the libraries for shares of this build.
    pub(crate) async fn start(gpus: &str, dir: Option<&Path>, libraries: Option<&Path>) -> Result<Self> {
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

        enable_mig(&sim)?;

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
        let libraries = match libraries {
            Some(directory) => std::path::absolute(directory)?,
            None => install_libraries(&root.join("lib"))?,
        };
        let supervisor = Supervisor::start(&root)?;
        let daemon = Daemon::start(&root, &kubeconfig, &libraries)?;
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

    /// The last reason why the daemon offers no shares.
    pub(crate) fn why_no_shares(&self) -> Option<String> {
        const MARK: &str = "no shares are offered: ";
        let text = std::fs::read_to_string(self.root.join("divvy-node.log")).unwrap_or_default();
        let line = text.lines().rev().find(|line| line.contains(MARK))?;
        line.find(MARK).map(|at| line[at..].to_owned())
    }

    /// Runs a function with the paths that containers need.
    pub(crate) fn with_paths<T>(&self, run: impl FnOnce(NodePaths<'_>) -> T) -> T {
        let (bin, dev) = (self.root.join(BIN), self.sim.dev());
        let libcuda = self.sim.library("libcuda.so.1");
        run(NodePaths { root: &self.root, bin: &bin, dev: &dev, libcuda: &libcuda })
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

/// Turns MIG mode on where it needs a reset, on every second GPU. Divvy never changes it there, so an
/// administrator decides it.
fn enable_mig(sim: &Sim) -> Result<()> {
    sim.update(|state| {
        let needs_reset = |gpu: &divvy_sim::state::Gpu| {
            gpu.model().mig.as_ref().is_some_and(|mig| mig.toggle == Toggle::Reset)
        };
        let slots: Vec<usize> =
            (0..state.gpus.len()).filter(|slot| needs_reset(&state.gpus[*slot])).collect();
        for slot in slots.into_iter().skip(1).step_by(2) {
            state.set_mig_mode(slot, true)?;
            state.reset(slot, false)?;
        }
        Ok(())
    })
    .context("cannot turn MIG mode on")
}

/// Writes the libraries for shares, and returns their directory.
fn install_libraries(directory: &Path) -> Result<PathBuf> {
    for (name, bytes) in LIBRARIES {
        let path = directory.join(name);
        let written = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        written
            .and_then(|()| std::fs::write(&path, bytes))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(directory.to_owned())
}

/// Names of the demo's CUDA programs.
pub(crate) const CUDA_PROGRAMS: [&str; 2] = ["cuda-chat", "cuda-train"];

/// Links the programs of the node to this binary.
fn link_programs(program: &Path, bin: &Path) -> Result<()> {
    std::fs::create_dir_all(bin)?;
    let names = ["divvy-node", "divvy-mps-supervisor", "divvy-hook", "divvy-sim", "divvy-container"];
    for name in names.iter().chain(&CUDA_PROGRAMS) {
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
    let (variable, pid) = parent();
    command.env(variable, pid);
    command.spawn().with_context(|| format!("cannot start {name}"))
}

/// The variable with which a process of the demo knows its parent.
pub(crate) fn parent() -> (&'static str, String) {
    (PARENT, std::process::id().to_string())
}

/// In a process that the demo started: asks the kernel for a signal when the demo's process ends.
pub(crate) fn end_with_demo() {
    let parent = std::env::var(PARENT).ok().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
    if parent.is_some() && parent == rustix::process::getppid() {
        // Without it the process only outlives a demo that is killed.
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    }
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
    fn start(root: &Path, kubeconfig: &Path, libraries: &Path) -> Result<Self> {
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
            .arg("--library-dir")
            .arg(libraries)
            // MIG mode must be disabled before the demo compares the GPUs, not half a minute later.
            .args(["--mig-hold-off", "0s"])
            .arg("--config")
            .arg(&config);
        let child = spawn_logged(&mut command, root, "divvy-node")?;
        Ok(Self { child })
    }

    /// Sends SIGTERM and waits without blocking the API server in this process.
    async fn stop(&mut self) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process")?;
        if self.child.try_wait()?.is_none() {
            rustix::process::kill_process(pid, Signal::TERM).context("cannot signal divvy-node")?;
        }
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
