//! The demo's node: simulated GPUs, an API server, a kubelet, and the node
//! daemon and the keeper as processes of their own. Everything lives below one
//! directory and is taken down in reverse order.

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

/// The node's name, hence the pool's.
const NODE: &str = "demo";

/// How long each part of the boot may take.
const BOOT: Duration = Duration::from_secs(30);

/// Directory of the programs, all of them this one.
const BIN: &str = "bin";

/// A time-slice that is not the default, so that the map shows that it is set and undone.
const CONFIG: &str = "\
apiVersion: resource.divvy.dev/v1alpha1
kind: NodeConfig
rules: [{interval: Long}]
";

/// A running node.
pub(crate) struct World {
    pub(crate) sim: Sim,
    /// Serves for as long as it is held.
    _api: FakeApi,
    pub(crate) kubelet: FakeKubelet,
    pub(crate) client: kube::Client,
    pub(crate) node: Node,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) cdi_dir: PathBuf,
    /// The directory of it all.
    pub(crate) root: PathBuf,
    daemon: Daemon,
    /// Ends after the node daemon.
    _keeper: Keeper,
    /// Removed with everything in it, last.
    _dir: Option<tempfile::TempDir>,
}

impl World {
    /// Boots GPUs, API server, kubelet and daemon; returns when the daemon is registered.
    pub(crate) async fn boot(gpus: &str, dir: Option<&Path>) -> Result<Self> {
        // A short path: Unix sockets take 108 bytes.
        let temporary = match dir {
            Some(_) => None,
            None => {
                Some(tempfile::Builder::new().prefix("divvy-").tempdir().context("no temporary directory")?)
            }
        };
        let root = match (dir, &temporary) {
            (Some(dir), _) => std::path::absolute(dir)?,
            (None, Some(temporary)) => temporary.path().to_owned(),
            (None, None) => bail!("no directory for the demo"),
        };
        let me = std::env::current_exe().context("cannot find this program's file")?;

        let driver_root = root.join("gpu");
        let sim =
            divvy_sim::up(&driver_root, gpus, &divvy_sim::Options::new(divvy_sim::library()?, me.clone()))?;

        let api = FakeApi::start(FakeApiOptions::default()).await?;
        let kubeconfig = api.kubeconfig_path(&root)?;
        let client = api.client()?;
        let node: Node = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
        }))?;
        let node = Api::all(client.clone()).create(&PostParams::default(), &node).await?;

        let kubelet = FakeKubelet::start(&root.join("kubelet"), KubeletOptions::default())?;
        let cdi_dir = root.join("cdi");
        std::fs::create_dir_all(&cdi_dir)?;
        link(&me, &root.join(BIN))?;
        let keeper = Keeper::start(&root)?;
        let daemon = Daemon::start(&root, &kubeconfig)?;
        let world = Self {
            sim,
            _api: api,
            kubelet,
            client,
            node,
            kubeconfig,
            cdi_dir,
            root,
            daemon,
            _keeper: keeper,
            _dir: temporary,
        };
        if let Err(error) = world.kubelet.wait_registered(divvy_api::names::DRIVER, 1, BOOT).await {
            bail!("the driver did not register: {error}\n{}", world.daemon_log());
        }
        Ok(world)
    }

    /// The end of what the daemon logged.
    pub(crate) fn daemon_log(&self) -> String {
        let text = std::fs::read_to_string(self.root.join("divvy-node.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// The program of that name.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.root.join(BIN).join(name)
    }

    /// Stops the daemon as a service manager would; an error if it does not go in order.
    pub(crate) async fn stop_daemon(&mut self) -> Result<()> {
        self.daemon.stop().await
    }
}

/// Puts the programs of the node into a directory.
fn link(me: &Path, bin: &Path) -> Result<()> {
    std::fs::create_dir_all(bin)?;
    for name in ["divvy-node", "divvy-keeper", "divvy-hook", "divvy-sim"] {
        let link = bin.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(me, &link)
                .with_context(|| format!("cannot link {}", link.display()))?;
        }
    }
    Ok(())
}

/// Processes that Ctrl-C does not reach: the demo ends them.
trait Own {
    /// Starts it, with its log below `root`.
    fn own(&mut self, root: &Path, name: &str) -> Result<Child>;
}

impl Own for Command {
    fn own(&mut self, root: &Path, name: &str) -> Result<Child> {
        let log = std::fs::File::create(root.join(format!("{name}.log")))?;
        self.process_group(0).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.spawn().with_context(|| format!("cannot start {name}"))
    }
}

/// The keeper's process. It outlives the node daemon, and the MPS control daemons
/// would outlive it: they are ended when it is dropped.
struct Keeper {
    child: Child,
    targets: PathBuf,
}

impl Keeper {
    fn start(root: &Path) -> Result<Self> {
        let run = root.join("run");
        let child = Command::new(root.join(BIN).join("divvy-keeper"))
            .arg("--run-dir")
            .arg(&run)
            .arg("--driver-root")
            .arg(root.join("gpu"))
            .own(root, "divvy-keeper")?;
        Ok(Self { child, targets: run.join(mps::DIRECTORY) })
    }

    fn directories(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.targets).into_iter().flatten().filter_map(Result::ok);
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // What cannot be removed or does not end cannot be told any more.
        for directory in self.directories() {
            let _ = std::fs::remove_file(directory.join(mps::DESIRED));
        }
        let began = Instant::now();
        while !self.directories().is_empty() && began.elapsed() < BOOT {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The node daemon's process. Killed when dropped without being stopped.
struct Daemon {
    child: Child,
}

impl Daemon {
    fn start(root: &Path, kubeconfig: &Path) -> Result<Self> {
        let (bin, gpu, config) = (root.join(BIN), root.join("gpu"), root.join("config.yaml"));
        std::fs::write(&config, CONFIG)?;
        let child = Command::new(bin.join("divvy-node"))
            .args(["--node-name", NODE, "--http-address", "127.0.0.1:0", "--log-format", "text"])
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
            // The demo's GPUs are to be whole when it ends, not half a minute later.
            .args(["--mig-hold-off", "0s"])
            .arg("--config")
            .arg(&config)
            .own(root, "divvy-node")?;
        Ok(Self { child })
    }

    /// Asks it to go and waits; the API server in this process answers it meanwhile.
    async fn stop(&mut self) -> Result<()> {
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status().context("cannot signal divvy-node")?;
        let deadline = std::time::Instant::now() + BOOT;
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("divvy-node ended with {status}"),
                None if std::time::Instant::now() > deadline => {
                    bail!("divvy-node did not stop within {BOOT:?}")
                }
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // Nothing is left to tell if this fails: the process is gone already.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
