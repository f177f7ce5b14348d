//! Processes beside the node daemon: the MPS supervisor, its control daemons and servers, and clients that
//! stand in for CUDA programs.

use crate::harness::TestNode;
use crate::programs::program;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::timeout;

/// Time limit for a process to get a CUDA context.
const CONTEXT_TIMEOUT: Duration = Duration::from_secs(20);

/// The `divvy-mps-supervisor` process, which can be restarted. Drop kills all MPS processes of the node.
pub(crate) struct Supervisor {
    child: Option<Child>,
    run_dir: PathBuf,
}

impl Supervisor {
    pub(crate) fn new(node: &TestNode) -> Self {
        let mut supervisor = Self { child: None, run_dir: node.run_dir() };
        supervisor.start(node);
        supervisor
    }

    pub(crate) fn start(&mut self, node: &TestNode) {
        let log = fs::OpenOptions::new().create(true).append(true).open(node.path("supervisor-log")).unwrap();
        let mut command = Command::new(program("divvy-mps-supervisor"));
        command.env_clear().arg("--run-dir").arg(node.run_dir()).arg("--driver-root").arg(node.sim.root());
        command.args(["--check-interval", "1", "--answer-timeout", "5"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).process_group(0);
        self.child = Some(command.spawn().unwrap());
    }

    /// Kills the supervisor with SIGKILL. Its control daemons keep running.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Kills all MPS processes, as when the machine goes down.
    pub(crate) fn kill_all(&mut self) {
        self.kill();
        mps_processes(&self.run_dir).iter().for_each(|process| process.kill());
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.kill_all();
    }
}

/// A running MPS control daemon or server.
pub(crate) struct MpsProcess {
    pid: u32,
    pub(crate) is_server: bool,
    /// The name of its directory, which identifies the GPU or MIG instance.
    pub(crate) target: String,
}

impl MpsProcess {
    pub(crate) fn kill(&self) {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).unwrap();
        // The process may have exited already.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// The MPS processes with a pipe directory below a run directory, sorted by target and PID.
pub(crate) fn mps_processes(run_dir: &Path) -> Vec<MpsProcess> {
    let prefix = [b"CUDA_MPS_PIPE_DIRECTORY=", run_dir.join("mps/").as_os_str().as_bytes()].concat();
    let process = |pid: u32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let name = arguments.split(|byte| *byte == 0).next()?.rsplit(|byte| *byte == b'/').next()?;
        let is_server = name == b"nvidia-cuda-mps-server";
        // A control client has no -f.
        let is_daemon =
            name == b"nvidia-cuda-mps-control" && arguments.windows(3).any(|part| part == b"\0-f");
        (is_server || is_daemon).then_some(())?;
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let pipe =
            environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(prefix.as_slice()))?;
        let target = String::from_utf8_lossy(pipe.split(|byte| *byte == b'/').next()?).into_owned();
        Some(MpsProcess { pid, is_server, target })
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut found: Vec<_> =
        pids.filter_map(|entry| process(entry.file_name().to_str()?.parse().ok()?)).collect();
    found.sort_by(|one, two| (&one.target, one.pid).cmp(&(&two.target, two.pid)));
    found
}

/// The parts of a container's environment that give a process access to a device.
pub(crate) struct DeviceAccess {
    /// UUID of the GPU or MIG instance in the container.
    pub(crate) device: String,
    /// The container edits of the CDI device, if MPS shares it.
    pub(crate) mps: Option<Value>,
}

/// A process with a CUDA context. It is killed on drop.
pub(crate) struct Client {
    child: tokio::process::Child,
}

impl Client {
    /// Starts a process and waits until it has a context. The error is its output.
    pub(crate) async fn start(node: &TestNode, access: &DeviceAccess) -> Result<Self, String> {
        let mut command = Command::new(program("divvy-sim"));
        command.env_clear().env("DIVVY_SIM", node.sim.root()).args(["client", "--memory", "64", "--pipe"]);
        match &access.mps {
            // A pipe directory without a daemon.
            None => command.arg(node.path("no-pipe")),
            Some(edits) => {
                let env = edits["env"].as_array().into_iter().flatten().filter_map(Value::as_str);
                command.envs(env.filter_map(|entry| entry.split_once('=')));
                let mut mounts = edits["mounts"].as_array().into_iter().flatten();
                let pipe = mounts.find(|mount| mount["containerPath"] == "/tmp/nvidia-mps");
                command.arg(pipe.and_then(|mount| mount["hostPath"].as_str()).ok_or("no pipe is mounted")?)
            }
        };
        command.args(["--device", &access.device]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        match timeout(CONTEXT_TIMEOUT, lines.next_line()).await {
            Ok(Ok(Some(line))) => {
                let client = Self { child };
                // Like libcuda, the client runs without MPS if there is no daemon.
                if line.contains(r#""mps":true"#) == access.mps.is_some() {
                    return Ok(client);
                }
                client.end().await;
                Err(format!("the process got a context of the wrong kind: {line}"))
            }
            Ok(_) => {
                let output = child.wait_with_output().await;
                Err(output.map_or_else(
                    |error| error.to_string(),
                    |output| String::from_utf8_lossy(&output.stderr).into_owned(),
                ))
            }
            Err(_) => Err(format!("the process got no context within {CONTEXT_TIMEOUT:?}")),
        }
    }

    pub(crate) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Kills the process, as at the end of its container.
    pub(crate) async fn end(mut self) {
        let _ = self.child.kill().await;
    }
}
