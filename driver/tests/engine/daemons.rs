//! The whole chain of MPS: engine, the real keeper, the simulator's control
//! daemon and servers, and clients that do what a CUDA process does.

use super::programs::program;
use super::world::{H100, World, until};
use divvy_api::mps::{DESIRED, DIRECTORY};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that is killed with the value.
struct Running(Child);

impl Running {
    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The keeper. Daemons outlive it, so at the end it is told to end them.
struct Keeper {
    mps: PathBuf,
    process: Option<Running>,
    command: Box<dyn Fn() -> Command>,
}

impl Keeper {
    fn start(world: &World) -> Self {
        let (run, root) = (world.paths.run_dir.clone(), world.sim.root().to_owned());
        let keeper = program("divvy-keeper");
        let command = move || {
            let mut command = Command::new(&keeper);
            command.arg("--run-dir").arg(&run).arg("--driver-root").arg(&root);
            command.args(["--check-every", "1", "--answer-within", "5"]).stderr(Stdio::null());
            command
        };
        let mut keeper =
            Self { mps: world.paths.run_dir.join(DIRECTORY), process: None, command: Box::new(command) };
        keeper.restart();
        keeper
    }

    /// SIGKILL, and another.
    fn restart(&mut self) {
        self.process = None;
        self.process = Some(Running((self.command)().spawn().unwrap()));
    }
}

impl Drop for Keeper {
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

/// A process in a container of the claim, with or without the variables of its CDI file.
fn client(world: &World, claim: &str, uid: &str, with_environment: bool) -> (Running, Value) {
    let file: Value = serde_json::from_slice(&std::fs::read(world.cdi_file(claim)).unwrap()).unwrap();
    let edits = &file["devices"][0]["containerEdits"];
    let mut mounts = edits["mounts"].as_array().unwrap().iter();
    let pipe = mounts.find(|mount| mount["containerPath"] == "/tmp/nvidia-mps").unwrap();
    let pipe = pipe["hostPath"].as_str().unwrap();
    let mut command = Command::new(program("divvy-sim"));
    command.arg("--root").arg(world.sim.root()).args(["client", "--uid", uid, "--pipe", pipe]);
    // What it complains of at its end is what the test brought about.
    command.env_remove("CUDA_VISIBLE_DEVICES").stdout(Stdio::piped()).stderr(Stdio::null());
    for variable in edits["env"].as_array().unwrap().iter().filter(|_| with_environment) {
        let (name, value) = variable.as_str().unwrap().split_once('=').unwrap();
        command.env(name, value);
    }
    let mut process = Running(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (process, serde_json::from_str(&line).expect("a client that is let in"))
}

/// Its server goes, and so does it.
#[track_caller]
fn ends(process: &mut Running) {
    let begun = Instant::now();
    while process.lives() {
        assert!(begun.elapsed() < Duration::from_secs(30), "a client outlives its server");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[track_caller]
fn expect_limits(said: &Value, threads: f64, memory_mib: u64) {
    assert_eq!(
        (said["threadPercentage"].as_f64(), said["memoryLimitMib"].as_u64()),
        (Some(threads), Some(memory_mib))
    );
}

#[tokio::test]
async fn clients_live_through_upgrades_and_have_their_claims_limits() {
    let world = World::up(H100);
    let mut keeper = Keeper::start(&world);
    let node = world.start().await;
    node.prepare("a", "share:gpu-0-mps/25/10Gi").await.unwrap();
    node.prepare("b", "share:gpu-0-mps/50/20Gi").await.unwrap();
    // Different users at once, each within the limits of its claim.
    let (mut one, said) = client(&world, "a", "1000", true);
    expect_limits(&said, 25.0, 10 << 10);
    let (mut two, said) = client(&world, "b", "2000", true);
    expect_limits(&said, 50.0, 20 << 10);
    // One that says nothing has the largest claim's.
    let (stranger, said) = client(&world, "a", "1000", false);
    expect_limits(&said, 50.0, 20 << 10);
    drop(stranger);

    // The driver is upgraded, the keeper is killed: the daemon is the same.
    let incarnation = |node: &super::world::Node| {
        node.engine.daemons().borrow().values().next().and_then(|daemon| daemon.incarnation)
    };
    until("the daemon is known", || incarnation(&node) == Some(1)).await;
    node.stop().await;
    keeper.restart();
    let node = world.start().await;
    assert!(node.report.restored.is_empty() && node.report.unsettled.is_empty(), "{:?}", node.report);
    node.prepare("c", "share:gpu-0-mps/10/1Gi").await.unwrap();
    let (_third, said) = client(&world, "c", "3000", true);
    expect_limits(&said, 10.0, 1 << 10);
    until("the daemon is known", || incarnation(&node) == Some(1)).await;
    assert!(one.lives() && two.lives());

    for claim in ["a", "b", "c"] {
        node.unprepare(claim).await.unwrap();
    }
    ends(&mut one);
    ends(&mut two);
    assert_eq!(World::files(&world.paths.run_dir.join(DIRECTORY)), [""; 0]);
    let state = world.sim.read().unwrap();
    assert_eq!(state.gpus[0].compute_mode, 0);
}

#[tokio::test]
async fn a_daemon_that_dies_is_replaced_and_missed_by_its_claims() {
    let world = World::up(H100);
    let _keeper = Keeper::start(&world);
    let node = world.start().await;
    node.prepare("a", "share:gpu-0-mps").await.unwrap();
    let (mut lost, _) = client(&world, "a", "1000", true);
    let daemons = node.engine.daemons();
    let incarnation = || daemons.borrow().values().next().and_then(|daemon| daemon.incarnation);
    until("the daemon is known", || incarnation() == Some(1)).await;
    let target = std::fs::read_dir(world.paths.run_dir.join(DIRECTORY)).unwrap().next().unwrap().unwrap();
    let actual: Value =
        serde_json::from_slice(&std::fs::read(target.path().join("actual.json")).unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(actual["process"]["pid"].as_i64().unwrap() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    until("another start is told", || incarnation() == Some(2)).await;
    until("it is well", || daemons.borrow().values().all(|daemon| daemon.trouble.is_none())).await;
    ends(&mut lost);
    let (_again, said) = client(&world, "a", "1000", true);
    assert_eq!(said["threadPercentage"].as_f64(), Some(25.0));
    node.unprepare("a").await.unwrap();
    assert_eq!(World::files(&world.paths.run_dir.join(DIRECTORY)), [""; 0]);
}

#[tokio::test]
async fn an_instance_has_a_daemon_of_its_own() {
    let world = World::up(H100);
    let _keeper = Keeper::start(&world);
    let node = world.start().await;
    super::sharing::prepare_mps_slice(&node, "a").await;
    let (_client, said) = client(&world, "a", "1000", true);
    expect_limits(&said, 50.0, 4 << 10);
    node.unprepare("a").await.unwrap();
    world.expect_hardware(&["mig"]);
    assert_eq!(World::files(&world.paths.run_dir.join(DIRECTORY)), [""; 0]);
}
