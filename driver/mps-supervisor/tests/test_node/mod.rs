//! A simulated node with a running supervisor, and clients of its MPS daemons.

use divvy_api::mps::{Actual, DESIRED, Desired, FORMAT, Phase};
use divvy_sim::{Options, Sim, State};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A child process that is killed on drop.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    pub(crate) fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

/// A simulated node with a run directory and a supervisor.
pub(crate) struct TestNode {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) sim: Sim,
    pub(crate) supervisor: Option<Running>,
}

/// A connected client and the JSON line that it printed.
pub(crate) struct Client {
    pub(crate) process: Running,
    pub(crate) output: Value,
}

/// The supervisor under test: the binary built by cargo, or the static one that is shipped.
pub(crate) fn supervisor() -> PathBuf {
    let built = || env!("CARGO_BIN_EXE_divvy-mps-supervisor").into();
    std::env::var_os("DIVVY_MPS_SUPERVISOR").map_or_else(built, PathBuf::from)
}

#[track_caller]
pub(crate) fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(60), "waited for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn kill(pid: u32) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
}

impl TestNode {
    pub(crate) fn new() -> Self {
        Self::with(|_| ())
    }

    pub(crate) fn with(adjust: impl FnOnce(&mut Options)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = Options::new(divvy_sim::library().unwrap(), std::env::current_exe().unwrap());
        adjust(&mut options);
        let sim = divvy_sim::create(&dir.path().join("node"), "2xH100-SXM5-80GB", &options).unwrap();
        let mut node = Self { dir, sim, supervisor: None };
        node.start(&supervisor());
        node
    }

    pub(crate) fn start(&mut self, program: &Path) {
        self.supervisor = Some(Running(self.command(program).spawn().unwrap()));
    }

    pub(crate) fn command(&self, program: &Path) -> Command {
        let log = File::options().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        let mut command = Command::new(program);
        command.arg("--run-dir").arg(self.dir.path().join("run")).arg("--driver-root").arg(self.sim.root());
        command.args(["--check-interval", "1", "--answer-timeout", "10"]).stderr(log);
        command
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    pub(crate) fn uuid(&self, slot: usize) -> String {
        self.sim.read().unwrap().gpus[slot].uuid.clone()
    }

    pub(crate) fn target(&self, name: &str) -> PathBuf {
        self.dir.path().join("run/mps").join(name)
    }

    pub(crate) fn want(&self, name: &str, desired: &Desired) {
        self.write(name, &serde_json::to_vec(desired).unwrap());
    }

    pub(crate) fn write(&self, name: &str, text: &[u8]) {
        let dir = self.target(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("desired.part"), text).unwrap();
        fs::rename(dir.join("desired.part"), dir.join(DESIRED)).unwrap();
    }

    pub(crate) fn actual(&self, name: &str) -> Option<Actual> {
        serde_json::from_slice(&fs::read(self.target(name).join("actual.json")).ok()?).ok()
    }

    /// Writes the desired state and waits until the daemon is ready with it.
    #[track_caller]
    pub(crate) fn ready(&self, name: &str, desired: &Desired) -> Actual {
        self.want(name, desired);
        let is =
            || self.actual(name).filter(|actual| actual.phase == Phase::Ready && actual.desired == *desired);
        wait(&format!("{name} ready, log:\n{}", self.log()), || is().is_some());
        is().unwrap()
    }

    /// Removes the desired state and waits until the target is removed.
    #[track_caller]
    pub(crate) fn remove(&self, name: &str) {
        fs::remove_file(self.target(name).join(DESIRED)).unwrap();
        wait(&format!("{name} gone, log:\n{}", self.log()), || !self.target(name).exists());
    }

    #[track_caller]
    pub(crate) fn down(&self, name: &str) -> String {
        let cause = || match self.actual(name)?.phase {
            Phase::Down { cause } => Some(cause),
            _ => None,
        };
        wait("a daemon that is down", || cause().is_some());
        cause().unwrap()
    }

    pub(crate) fn client_command(&self, name: &str, args: &[&str]) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("client").args(args).arg("--pipe").arg(self.target(name).join("pipe"));
        command.env_remove("CUDA_VISIBLE_DEVICES").stdout(Stdio::piped());
        command
    }

    #[track_caller]
    pub(crate) fn client(&self, name: &str, args: &[&str]) -> Client {
        let mut process = Running(self.client_command(name, args).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let output = serde_json::from_str(&line).expect("a connected client");
        Client { process, output }
    }

    pub(crate) fn rule(&self, change: impl FnOnce(&mut State)) {
        let changed = self.sim.update(|state| {
            change(state);
            Ok(())
        });
        changed.unwrap();
    }

    /// PIDs of the processes on a GPU.
    pub(crate) fn processes(&self, slot: usize) -> Vec<u32> {
        self.sim.remove_dead_processes().unwrap();
        self.sim.read().unwrap().gpus[slot].processes.iter().map(|process| process.pid).collect()
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        self.rule(|state| state.release(None));
        if self.supervisor.is_none() {
            self.start(&supervisor());
        }
        // Daemons outlive the supervisor, so it must stop them before the directory is deleted.
        for entry in fs::read_dir(self.dir.path().join("run/mps")).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path().join(DESIRED));
            let begin = Instant::now();
            while entry.path().join("pipe").exists() && begin.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

impl Client {
    pub(crate) fn limits(&self) -> (Option<f64>, Option<u64>) {
        (self.output["threadPercentage"].as_f64(), self.output["memoryLimitMib"].as_u64())
    }
}

pub(crate) fn desired(device: &str) -> Desired {
    let device = device.to_owned();
    Desired { format: FORMAT, device, thread_percentage: None, memory_mib: None, multi_user: None }
}

pub(crate) fn limited(device: &str, threads: u32, memory: u64) -> Desired {
    Desired { thread_percentage: Some(threads), memory_mib: Some(memory), ..desired(device) }
}
