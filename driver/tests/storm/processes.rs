//! The processes beside the node daemon: the keeper of MPS control daemons, what
//! it keeps, and processes that stand in for CUDA programs.

use crate::harness::World;
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

/// How long a process may take until it has a context.
const LET_IN_WITHIN: Duration = Duration::from_secs(20);

/// The place of `divvy-keeper`. Dropped, it takes all MPS processes of the world with it.
pub(crate) struct Keeper {
    child: Option<Child>,
    run_dir: PathBuf,
}

impl Keeper {
    pub(crate) fn new(world: &World) -> Self {
        let mut keeper = Self { child: None, run_dir: world.run_dir() };
        keeper.start(world);
        keeper
    }

    pub(crate) fn start(&mut self, world: &World) {
        let log = fs::OpenOptions::new().create(true).append(true).open(world.path("keeper-log")).unwrap();
        let mut command = Command::new(program("divvy-keeper"));
        command.env_clear().arg("--run-dir").arg(world.run_dir()).arg("--driver-root").arg(world.sim.root());
        command.args(["--check-every", "1", "--answer-within", "5"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).process_group(0);
        self.child = Some(command.spawn().unwrap());
    }

    /// SIGKILL: what it keeps runs on.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// The end of all MPS processes, as when the machine goes down.
    pub(crate) fn kill_all(&mut self) {
        self.kill();
        mps_processes(&self.run_dir).iter().for_each(|process| process.kill());
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.kill_all();
    }
}

/// A control daemon or a server.
pub(crate) struct MpsProcess {
    pid: u32,
    pub(crate) is_server: bool,
    /// What it serves, by the name of its directory.
    pub(crate) target: String,
}

impl MpsProcess {
    pub(crate) fn kill(&self) {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).unwrap();
        // It may have ended.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Those with a pipe directory below a run directory, in a fixed order.
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

/// What a process is given of a device.
pub(crate) struct Given {
    /// The device that its container sees, by UUID.
    pub(crate) device: String,
    /// The edits of its CDI device, if that is shared by MPS.
    pub(crate) mps: Option<Value>,
}

/// A process with a context, until it is dropped.
pub(crate) struct Client {
    child: tokio::process::Child,
}

impl Client {
    /// Starts one and waits until it is let in; what it says if it is not.
    pub(crate) async fn start(world: &World, given: &Given) -> Result<Self, String> {
        let mut command = Command::new(program("divvy-sim"));
        command.env_clear().env("DIVVY_SIM", world.sim.root()).args(["client", "--memory", "64", "--pipe"]);
        match &given.mps {
            // No daemon is there.
            None => command.arg(world.path("no-pipe")),
            Some(edits) => {
                let env = edits["env"].as_array().into_iter().flatten().filter_map(Value::as_str);
                command.envs(env.filter_map(|entry| entry.split_once('=')));
                let mut mounts = edits["mounts"].as_array().into_iter().flatten();
                let pipe = mounts.find(|mount| mount["containerPath"] == "/tmp/nvidia-mps");
                command.arg(pipe.and_then(|mount| mount["hostPath"].as_str()).ok_or("no pipe is mounted")?)
            }
        };
        command.args(["--device", &given.device]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        match timeout(LET_IN_WITHIN, lines.next_line()).await {
            Ok(Ok(Some(said))) => {
                let client = Self { child };
                // As libcuda, it goes without a daemon where none is there.
                if said.contains(r#""mps":true"#) == given.mps.is_some() {
                    return Ok(client);
                }
                client.end().await;
                Err(format!("it got a context of the wrong kind: {said}"))
            }
            Ok(_) => {
                let output = child.wait_with_output().await;
                Err(output.map_or_else(
                    |error| error.to_string(),
                    |output| String::from_utf8_lossy(&output.stderr).into_owned(),
                ))
            }
            Err(_) => Err(format!("not let in within {LET_IN_WITHIN:?}")),
        }
    }

    pub(crate) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Its end, as that of its container.
    pub(crate) async fn end(mut self) {
        let _ = self.child.kill().await;
    }
}
