//! MPS end to end: the claim engine, the real supervisor, the simulator's control daemon and servers, and
//! clients that behave as CUDA processes do.

use super::programs::program;
use super::test_node::{H100, TestNode, until};
use divvy_api::mps::{DESIRED, DIRECTORY};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that is killed on drop.
struct ChildProcess(Child);

impl ChildProcess {
    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The supervisor. Its daemons outlive it, so drop removes their desired states and waits until they stop.
struct Supervisor {
    mps: PathBuf,
    process: Option<ChildProcess>,
    command: Box<dyn Fn() -> Command>,
}

impl Supervisor {
    fn start(node: &TestNode) -> Self {
        let (run, root) = (node.paths.run_dir.clone(), node.sim.root().to_owned());
        let supervisor = program("divvy-mps-supervisor");
        let command = move || {
            let mut command = Command::new(&supervisor);
            command.arg("--run-dir").arg(&run).arg("--driver-root").arg(&root);
            command.args(["--check-interval", "1", "--answer-timeout", "5"]).stderr(Stdio::null());
            command
        };
        let mut supervisor =
            Self { mps: node.paths.run_dir.join(DIRECTORY), process: None, command: Box::new(command) };
        supervisor.restart();
        supervisor
    }

    /// Kills the supervisor with SIGKILL and starts another.
    fn restart(&mut self) {
        self.process = None;
        self.process = Some(ChildProcess((self.command)().spawn().unwrap()));
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        for entry in std::fs::read_dir(&self.mps).into_iter().flatten().flatten() {
            let _ = std::fs::remove_file(entry.path().join(DESIRED));
            let begun = Instant::now();
            while entry.path().exists() && begun.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Starts a process as in a container of the claim, with or without the environment of its CDI file. Returns
/// the process and its first line of output.
fn client(node: &TestNode, claim: &str, uid: &str, with_environment: bool) -> (ChildProcess, Value) {
    let file: Value = serde_json::from_slice(&std::fs::read(node.cdi_file(claim)).unwrap()).unwrap();
    let edits = &file["devices"][0]["containerEdits"];
    let mut mounts = edits["mounts"].as_array().unwrap().iter();
    let pipe = mounts.find(|mount| mount["containerPath"] == "/tmp/nvidia-mps").unwrap();
    let pipe = pipe["hostPath"].as_str().unwrap();
    let mut command = Command::new(program("divvy-sim"));
    command.arg("--root").arg(node.sim.root()).args(["client", "--uid", uid, "--pipe", pipe]);
    // Its errors at the end are caused by the test on purpose.
    command.env_remove("CUDA_VISIBLE_DEVICES").stdout(Stdio::piped()).stderr(Stdio::null());
    for variable in edits["env"].as_array().unwrap().iter().filter(|_| with_environment) {
        let (name, value) = variable.as_str().unwrap().split_once('=').unwrap();
        command.env(name, value);
    }
    let mut process = ChildProcess(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (process, serde_json::from_str(&line).expect("the client gets a context"))
}

/// Waits until the client exits because its server has stopped.
#[track_caller]
fn wait_exit(process: &mut ChildProcess) {
    let begun = Instant::now();
    while process.lives() {
        assert!(begun.elapsed() < Duration::from_secs(30), "the client outlives its server");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[track_caller]
fn expect_limits(reply: &Value, threads: f64, memory_mib: u64) {
    assert_eq!(
        (reply["threadPercentage"].as_f64(), reply["memoryLimitMib"].as_u64()),
        (Some(threads), Some(memory_mib))
    );
}

#[tokio::test]
async fn mps_clients_survive_upgrades_with_their_claim_limits() {
    let node = TestNode::new(H100);
    let mut supervisor = Supervisor::start(&node);
    let driver = node.start_driver().await;
    driver.prepare("a", "share:gpu-0-mps/25/10Gi").await.unwrap();
    driver.prepare("b", "share:gpu-0-mps/50/20Gi").await.unwrap();
    // Clients of different users at the same time, each with the limits of its claim.
    let (mut one, reply) = client(&node, "a", "1000", true);
    expect_limits(&reply, 25.0, 10 << 10);
    let (mut two, reply) = client(&node, "b", "2000", true);
    expect_limits(&reply, 50.0, 20 << 10);
    // A client without the environment gets the limits of the largest claim.
    let (unlimited, reply) = client(&node, "a", "1000", false);
    expect_limits(&reply, 50.0, 20 << 10);
    drop(unlimited);

    // The daemon survives an upgrade of the driver and a kill of the supervisor.
    let incarnation = |driver: &super::test_node::Driver| {
        driver.engine.mps_daemons().borrow().values().next().and_then(|daemon| daemon.incarnation)
    };
    until("the daemon is reported", || incarnation(&driver) == Some(1)).await;
    driver.stop().await;
    supervisor.restart();
    let driver = node.start_driver().await;
    assert!(driver.report.restored.is_empty() && driver.report.failed.is_empty(), "{:?}", driver.report);
    driver.prepare("c", "share:gpu-0-mps/10/1Gi").await.unwrap();
    let (_third, reply) = client(&node, "c", "3000", true);
    expect_limits(&reply, 10.0, 1 << 10);
    until("the daemon is reported", || incarnation(&driver) == Some(1)).await;
    assert!(one.lives() && two.lives());

    for claim in ["a", "b", "c"] {
        driver.unprepare(claim).await.unwrap();
    }
    wait_exit(&mut one);
    wait_exit(&mut two);
    assert_eq!(TestNode::files(&node.paths.run_dir.join(DIRECTORY)), [""; 0]);
    let state = node.sim.read().unwrap();
    assert_eq!(state.gpus[0].compute_mode, 0);
}

#[tokio::test]
async fn dead_mps_daemon_is_replaced_and_reported() {
    let node = TestNode::new(H100);
    let _supervisor = Supervisor::start(&node);
    let driver = node.start_driver().await;
    driver.prepare("a", "share:gpu-0-mps").await.unwrap();
    let (mut lost, _) = client(&node, "a", "1000", true);
    let daemons = driver.engine.mps_daemons();
    let incarnation = || daemons.borrow().values().next().and_then(|daemon| daemon.incarnation);
    until("the daemon is reported", || incarnation() == Some(1)).await;
    let target = std::fs::read_dir(node.paths.run_dir.join(DIRECTORY)).unwrap().next().unwrap().unwrap();
    let actual: Value =
        serde_json::from_slice(&std::fs::read(target.path().join("actual.json")).unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(actual["process"]["pid"].as_i64().unwrap() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    until("the restart is reported", || incarnation() == Some(2)).await;
    until("the daemon is healthy", || daemons.borrow().values().all(|daemon| daemon.failure.is_none())).await;
    wait_exit(&mut lost);
    let (_new_client, reply) = client(&node, "a", "1000", true);
    assert_eq!(reply["threadPercentage"].as_f64(), Some(25.0));
    driver.unprepare("a").await.unwrap();
    assert_eq!(TestNode::files(&node.paths.run_dir.join(DIRECTORY)), [""; 0]);
}

#[tokio::test]
async fn mig_instance_has_its_own_mps_daemon() {
    let node = TestNode::new(H100);
    let _supervisor = Supervisor::start(&node);
    let driver = node.start_driver().await;
    super::timeslice_mps::prepare_mps_slice(&driver, "a").await;
    let (_client, reply) = client(&node, "a", "1000", true);
    expect_limits(&reply, 50.0, 4 << 10);
    driver.unprepare("a").await.unwrap();
    node.expect_hardware(&["mig"]);
    assert_eq!(TestNode::files(&node.paths.run_dir.join(DIRECTORY)), [""; 0]);
}
