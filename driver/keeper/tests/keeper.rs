//! The binary, on simulated GPUs, with clients that stand in for CUDA processes.
//!
//! The program of this test is also the control daemon, its server and the clients, so it has no test harness.
#![allow(clippy::unwrap_used)] // A test that cannot go on stops here.

use divvy_api::mps::{Actual, DESIRED, Desired, FORMAT, Phase};
use divvy_sim::control::{Pattern, When};
use divvy_sim::{Code, Options, Sim, State};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    if let Some(code) = divvy_sim::command::multicall() {
        return code;
    }
    if std::env::args().nth(1).as_deref() == Some("client") {
        return divvy_sim::command::main();
    }
    let tests: &[(&str, fn())] = &[
        ("a_daemon_is_started_told_more_and_ended", a_daemon_is_started_told_more_and_ended),
        (
            "users_are_served_at_once_and_strangers_get_the_defaults",
            users_are_served_at_once_and_strangers_get_the_defaults,
        ),
        ("a_daemon_that_dies_is_started_again", a_daemon_that_dies_is_started_again),
        ("a_daemon_that_hangs_is_started_again", a_daemon_that_hangs_is_started_again),
        ("a_fault_is_told_until_its_clients_are_gone", a_fault_is_told_until_its_clients_are_gone),
        ("daemons_and_clients_outlive_their_keeper", daemons_and_clients_outlive_their_keeper),
        ("a_daemon_that_died_unseen_is_started_again", a_daemon_that_died_unseen_is_started_again),
        ("a_wish_that_ended_unseen_is_followed", a_wish_that_ended_unseen_is_followed),
        ("what_is_not_understood_is_left_as_it_is", what_is_not_understood_is_left_as_it_is),
        ("a_mig_device_has_its_own_daemon", a_mig_device_has_its_own_daemon),
        ("what_the_driver_cannot_do_is_told", what_the_driver_cannot_do_is_told),
        ("one_keeper_works_and_another_waits", one_keeper_works_and_another_waits),
        ("many_daemons_take_little_of_the_keeper", many_daemons_take_little_of_the_keeper),
        ("memory_is_shared_with_the_daemons_clients_only", memory_is_shared_with_the_daemons_clients_only),
    ];
    let failed = std::thread::scope(|scope| {
        let running: Vec<_> = tests.iter().map(|(name, test)| (name, scope.spawn(test))).collect();
        let mut failed = 0;
        for (name, test) in running {
            let well = test.join().is_ok();
            println!("test {name} ... {}", if well { "ok" } else { "FAILED" });
            failed += u8::from(!well);
        }
        failed
    });
    ExitCode::from(failed)
}

/// A process that is killed with the value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

/// A node with a run directory, and a keeper on it.
struct World {
    dir: tempfile::TempDir,
    sim: Sim,
    keeper: Option<Running>,
}

/// A client that was let in, and what it said.
struct Client {
    process: Running,
    said: Value,
}

/// The keeper under test: cargo's, or the static one that is shipped.
fn keeper() -> PathBuf {
    std::env::var_os("DIVVY_KEEPER").map_or_else(|| env!("CARGO_BIN_EXE_divvy-keeper").into(), PathBuf::from)
}

#[track_caller]
fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(60), "waited for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn kill(pid: u32) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
}

impl World {
    fn new() -> Self {
        Self::with(|_| ())
    }

    fn with(adjust: impl FnOnce(&mut Options)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = Options::new(divvy_sim::library().unwrap(), std::env::current_exe().unwrap());
        adjust(&mut options);
        let sim = divvy_sim::up(&dir.path().join("node"), "2xH100-SXM5-80GB", &options).unwrap();
        let mut world = Self { dir, sim, keeper: None };
        world.start(&keeper());
        world
    }

    fn start(&mut self, program: &Path) {
        self.keeper = Some(Running(self.command(program).spawn().unwrap()));
    }

    fn command(&self, program: &Path) -> Command {
        let log = File::options().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        let mut command = Command::new(program);
        command.arg("--run-dir").arg(self.dir.path().join("run")).arg("--driver-root").arg(self.sim.root());
        command.args(["--check-every", "1", "--answer-within", "2"]).stderr(log);
        command
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    fn uuid(&self, slot: usize) -> String {
        self.sim.read().unwrap().gpus[slot].uuid.clone()
    }

    fn target(&self, name: &str) -> PathBuf {
        self.dir.path().join("run/mps").join(name)
    }

    fn want(&self, name: &str, desired: &Desired) {
        self.write(name, &serde_json::to_vec(desired).unwrap());
    }

    fn write(&self, name: &str, text: &[u8]) {
        let dir = self.target(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("desired.part"), text).unwrap();
        fs::rename(dir.join("desired.part"), dir.join(DESIRED)).unwrap();
    }

    fn actual(&self, name: &str) -> Option<Actual> {
        serde_json::from_slice(&fs::read(self.target(name).join("actual.json")).ok()?).ok()
    }

    /// Wants it and waits until it is in force.
    #[track_caller]
    fn ready(&self, name: &str, desired: &Desired) -> Actual {
        self.want(name, desired);
        let is =
            || self.actual(name).filter(|actual| actual.phase == Phase::Ready && actual.desired == *desired);
        wait(&format!("{name} ready, log:\n{}", self.log()), || is().is_some());
        is().unwrap()
    }

    /// Wants it no more and waits until it is gone.
    #[track_caller]
    fn gone(&self, name: &str) {
        fs::remove_file(self.target(name).join(DESIRED)).unwrap();
        wait(&format!("{name} gone, log:\n{}", self.log()), || !self.target(name).exists());
    }

    #[track_caller]
    fn down(&self, name: &str) -> String {
        let cause = || match self.actual(name)?.phase {
            Phase::Down { cause } => Some(cause),
            _ => None,
        };
        wait("a daemon that is down", || cause().is_some());
        cause().unwrap()
    }

    fn client_command(&self, name: &str, args: &[&str]) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("client").args(args).arg("--pipe").arg(self.target(name).join("pipe"));
        command.env_remove("CUDA_VISIBLE_DEVICES").stdout(Stdio::piped());
        command
    }

    #[track_caller]
    fn client(&self, name: &str, args: &[&str]) -> Client {
        let mut process = Running(self.client_command(name, args).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said = serde_json::from_str(&line).expect("a client that is let in");
        Client { process, said }
    }

    fn rule(&self, change: impl FnOnce(&mut State)) {
        let changed = self.sim.update(|state| {
            change(state);
            Ok(())
        });
        changed.unwrap();
    }

    /// Numbers of the processes on a GPU.
    fn processes(&self, slot: usize) -> Vec<u32> {
        self.sim.bury().unwrap();
        self.sim.read().unwrap().gpus[slot].processes.iter().map(|process| process.pid).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.rule(|state| state.release(None));
        if self.keeper.is_none() {
            self.start(&keeper());
        }
        // A daemon outlives its keeper: it is ended by one, and the directory must not go before it.
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
    fn limits(&self) -> (Option<f64>, Option<u64>) {
        (self.said["threadPercentage"].as_f64(), self.said["memoryLimitMib"].as_u64())
    }
}

fn desired(device: &str) -> Desired {
    let device = device.to_owned();
    Desired { format: FORMAT, device, thread_percentage: None, memory_mib: None, multi_user: None }
}

fn limited(device: &str, threads: u32, memory: u64) -> Desired {
    Desired { thread_percentage: Some(threads), memory_mib: Some(memory), ..desired(device) }
}

fn a_daemon_is_started_told_more_and_ended() {
    let world = World::new();
    let gpu = world.uuid(0);
    let first = world.ready(&gpu, &limited(&gpu, 25, 1024));
    assert_eq!((first.incarnation, first.multi_user), (1, true));
    let mut old = world.client(&gpu, &[]);
    assert_eq!(old.limits(), (Some(25.0), Some(1024)));
    // Told the server that runs, not by another.
    let more = world.ready(&gpu, &limited(&gpu, 50, 3000));
    assert_eq!((more.incarnation, more.process), (1, first.process));
    assert_eq!(world.client(&gpu, &[]).limits(), (Some(50.0), Some(3000)));
    // And all of it.
    world.ready(&gpu, &desired(&gpu));
    assert_eq!(world.client(&gpu, &["--memory", "40000"]).limits().0, Some(100.0));
    assert!(old.process.lives());
    let other = world.uuid(1);
    world.ready(&other, &desired(&other));
    assert_eq!(world.client(&other, &["--memory", "70000"]).limits(), (Some(100.0), None));
    world.gone(&gpu);
    assert!(world.processes(0).is_empty());
    assert_eq!(world.actual(&other).unwrap().phase, Phase::Ready);
    // The same once more, from the beginning.
    assert_eq!(world.ready(&gpu, &desired(&gpu)).incarnation, 1);
}

fn users_are_served_at_once_and_strangers_get_the_defaults() {
    let world = World::new();
    let gpu = world.uuid(0);
    world.ready(&gpu, &Desired { multi_user: Some(true), ..limited(&gpu, 30, 2048) });
    let clients = ["0", "1000", "2000"].map(|uid| world.client(&gpu, &["--uid", uid]));
    assert!(clients.iter().all(|client| client.limits() == (Some(30.0), Some(2048))));
    assert!(clients.iter().all(|client| client.said["server"] == clients[0].said["server"]));
    drop(clients);
    // Another mode takes another daemon.
    let single = world.ready(&gpu, &Desired { multi_user: Some(false), ..limited(&gpu, 30, 2048) });
    assert_eq!((single.incarnation, single.multi_user), (2, false));
}

fn a_daemon_that_dies_is_started_again() {
    let world = World::new();
    let gpu = world.uuid(0);
    let first = world.ready(&gpu, &limited(&gpu, 25, 1024));
    let mut client = world.client(&gpu, &[]);
    kill(first.process.unwrap().pid);
    let again =
        || world.actual(&gpu).filter(|actual| actual.incarnation == 2 && actual.phase == Phase::Ready);
    wait("another daemon", || again().is_some());
    // Its server went with it, and so the client.
    wait("the client's end", || !client.process.lives());
    assert_eq!(world.client(&gpu, &[]).limits(), (Some(25.0), Some(1024)));
    assert!(world.log().contains("the control daemon ended; containers that used it must restart"));
}

fn a_daemon_that_hangs_is_started_again() {
    let world = World::new();
    let gpu = world.uuid(0);
    world.ready(&gpu, &desired(&gpu));
    world.rule(|state| state.add_hold(Pattern::new("mps-control"), Some(1), When::Before));
    let again =
        || world.actual(&gpu).filter(|actual| actual.incarnation == 2 && actual.phase == Phase::Ready);
    wait("another daemon", || again().is_some());
    assert!(world.log().contains("has not answered within 2 s; killed"), "{}", world.log());
    // One that hangs is ended all the same.
    world.rule(|state| state.add_hold(Pattern::new("mps-control"), None, When::Before));
    world.gone(&gpu);
}

fn a_fault_is_told_until_its_clients_are_gone() {
    let world = World::new();
    let gpu = world.uuid(0);
    world.ready(&gpu, &desired(&gpu));
    let clients = ["a", "b"].map(|name| world.client(&gpu, &["--stubborn", "--name", name]));
    world.rule(|state| state.add_fault(Pattern::new("mps-server"), Some(1), When::Before, Code::Unknown));
    let phase = || world.actual(&gpu).map(|actual| actual.phase);
    wait(
        "a fault",
        || matches!(phase(), Some(Phase::Fault { cause }) if cause.contains("2 clients are lost")),
    );
    drop(clients);
    wait("a daemon that is well", || phase() == Some(Phase::Ready));
    assert_eq!(world.actual(&gpu).unwrap().incarnation, 1);
    drop(world.client(&gpu, &[]));
}

fn daemons_and_clients_outlive_their_keeper() {
    let mut world = World::new();
    let gpu = world.uuid(0);
    let before = world.ready(&gpu, &limited(&gpu, 25, 1024));
    let mut client = world.client(&gpu, &[]);
    // Killed.
    world.keeper = None;
    assert!(client.process.lives());
    world.start(&keeper());
    wait("the next keeper", || world.log().contains("takes over the daemon that runs"));
    // Replaced by another binary, without a kill.
    let upgraded = world.dir.path().join("divvy-keeper");
    fs::copy(keeper(), &upgraded).unwrap();
    let mut old = world.keeper.take().unwrap();
    let pid = Pid::from_raw(i32::try_from(old.0.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    wait("the old keeper's end", || !old.lives());
    world.start(&upgraded);
    let after = world.ready(&gpu, &limited(&gpu, 50, 2048));
    assert_eq!((after.incarnation, after.process), (before.incarnation, before.process));
    assert!(client.process.lives());
    assert_eq!(world.client(&gpu, &[]).limits(), (Some(50.0), Some(2048)));
    world.gone(&gpu);
    wait("the client's end", || !client.process.lives());
    // One without a record is known by its environment.
    world.ready(&gpu, &desired(&gpu));
    let first = world.actual(&gpu).unwrap();
    world.keeper = None;
    fs::write(world.target(&gpu).join("actual.json"), "damaged").unwrap();
    world.start(&keeper());
    wait("a record", || world.actual(&gpu).is_some_and(|actual| actual.phase == Phase::Ready));
    assert_eq!(world.actual(&gpu).unwrap().process, first.process);
}

fn a_daemon_that_died_unseen_is_started_again() {
    let mut world = World::new();
    let gpu = world.uuid(0);
    let first = world.ready(&gpu, &desired(&gpu));
    let mut client = world.client(&gpu, &[]);
    world.keeper = None;
    kill(first.process.unwrap().pid);
    world.start(&keeper());
    let again =
        || world.actual(&gpu).filter(|actual| actual.incarnation == 2 && actual.phase == Phase::Ready);
    wait("another daemon", || again().is_some());
    wait("the client's end", || !client.process.lives());
}

fn a_wish_that_ended_unseen_is_followed() {
    let mut world = World::new();
    let gpu = world.uuid(0);
    world.ready(&gpu, &desired(&gpu));
    drop(world.client(&gpu, &[]));
    world.keeper = None;
    fs::remove_file(world.target(&gpu).join(DESIRED)).unwrap();
    world.start(&keeper());
    wait("an end", || !world.target(&gpu).exists());
    assert!(world.processes(0).is_empty());
}

fn what_is_not_understood_is_left_as_it_is() {
    let world = World::new();
    let (gpu, other) = (world.uuid(0), world.uuid(1));
    let first = world.ready(&gpu, &desired(&gpu));
    let mut client = world.client(&gpu, &[]);
    for text in [&b"{"[..], br#"{"format":9}"#, br#"{"format":1,"device":"GPU-1\nquit"}"#] {
        world.write(&gpu, text);
        world.write("nonsense", text);
        wait("a complaint", || world.log().matches("left as it is").count() >= 2);
    }
    fs::write(world.target("file"), "not a directory").unwrap();
    fs::create_dir(world.target("foreign")).unwrap();
    fs::write(world.target("foreign").join("data"), "somebody's").unwrap();
    world.ready(&other, &desired(&other));
    assert!(client.process.lives());
    assert_eq!(world.actual(&gpu), Some(first.clone()));
    assert_eq!(world.actual("nonsense"), None);
    assert_eq!(world.ready(&gpu, &limited(&gpu, 10, 100)).process, first.process);
    wait("a complaint about the foreign directory", || world.log().contains("foreign: its directory stays"));
    assert_eq!(fs::read(world.target("foreign").join("data")).unwrap(), b"somebody's");
}

fn a_mig_device_has_its_own_daemon() {
    let world = World::new();
    let made = world.sim.update(|state| {
        state.set_mig_mode(0, true)?;
        [0, 1]
            .into_iter()
            .map(|_| state.create_gi(0, 19, None).and_then(|gi| state.create_ci(0, gi.id, 0, None)))
            .collect()
    });
    let cis: Vec<divvy_sim::state::Ci> = made.unwrap();
    let names = [0, 1].map(|start| format!("{}-19-{start}", world.uuid(0)));
    for (name, ci) in names.iter().zip(&cis) {
        world.ready(name, &limited(&ci.uuid, 50, 2000));
    }
    let clients: Vec<Client> = names.iter().map(|name| world.client(name, &[])).collect();
    for (client, ci) in clients.iter().zip(&cis) {
        assert_eq!(client.said["device"], ci.uuid.as_str());
        assert_eq!(client.limits(), (Some(50.0), Some(2000)));
    }
    world.gone(&names[0]);
    assert_eq!(world.actual(&names[1]).unwrap().phase, Phase::Ready);
    assert_eq!(world.processes(0).len(), 2);
}

fn what_the_driver_cannot_do_is_told() {
    let world = World::with(|options| options.driver = "535.54.03".to_owned());
    let (gpu, other) = (world.uuid(0), world.uuid(1));
    world.want(&gpu, &Desired { multi_user: Some(true), ..desired(&gpu) });
    let cause = world.down(&gpu);
    assert!(cause.contains("multi-user mode") && cause.contains("too old"), "{cause}");
    assert!(!world.ready(&other, &desired(&other)).multi_user, "the mode that it has");
    // Tried again when something else is wanted.
    assert!(!world.ready(&gpu, &desired(&gpu)).multi_user);
    world.gone(&gpu);
    let program = world.sim.root().join("usr/bin/nvidia-cuda-mps-control");
    fs::rename(&program, program.with_extension("away")).unwrap();
    world.want(&gpu, &desired(&gpu));
    assert!(world.down(&gpu).contains("is the GPU driver installed there?"));
    fs::rename(program.with_extension("away"), &program).unwrap();
    world.ready(&gpu, &limited(&gpu, 10, 100));
}

fn one_keeper_works_and_another_waits() {
    let mut world = World::new();
    let gpu = world.uuid(0);
    let first = world.ready(&gpu, &desired(&gpu));
    let second = Running(world.command(&keeper()).spawn().unwrap());
    wait("the second keeper", || world.log().contains("another keeper runs here"));
    assert!(!world.log().contains("takes over"));
    world.keeper = Some(second);
    wait("the second keeper's turn", || world.log().contains("takes over the daemon that runs"));
    assert_eq!(world.ready(&gpu, &limited(&gpu, 10, 100)).process, first.process);
}

fn many_daemons_take_little_of_the_keeper() {
    let world = World::new();
    let made = world.sim.update(|state| {
        let all = |slot| (0..7).map(move |_| slot);
        [0, 1].into_iter().try_for_each(|slot| state.set_mig_mode(slot, true).map(drop))?;
        let one = |slot| state.create_gi(slot, 19, None).and_then(|gi| state.create_ci(slot, gi.id, 0, None));
        [0, 1].into_iter().flat_map(all).map(one).collect()
    });
    let cis: Vec<divvy_sim::state::Ci> = made.unwrap();
    for ci in &cis {
        world.ready(&ci.uuid, &limited(&ci.uuid, 50, 2000));
    }
    let pid = world.keeper.as_ref().unwrap().0.id();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let rss =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    let mib = rss.map(|kib: f64| kib / 1024.0).unwrap();
    println!("rss_keeper_mib {mib:.1} with {} daemons", cis.len());
    assert!(mib <= 5.0, "{mib} MiB");
}

fn memory_is_shared_with_the_daemons_clients_only() {
    let world = World::new();
    let gpu = world.uuid(0);
    let actual = world.ready(&gpu, &desired(&gpu));
    for (name, mode) in [("pipe", 0o1777), ("shm", 0o1777), ("log", 0o755)] {
        let found = fs::metadata(world.target(&gpu).join(name)).unwrap().permissions().mode();
        assert_eq!(found & 0o7777, mode, "{name}");
    }
    let shm = fs::metadata(world.target(&gpu).join("shm")).unwrap();
    let seen = fs::metadata(format!("/proc/{}/root/dev/shm", actual.process.unwrap().pid)).unwrap();
    let same = std::os::unix::fs::MetadataExt::ino(&shm) == std::os::unix::fs::MetadataExt::ino(&seen);
    assert_eq!(same, rustix::process::geteuid().is_root(), "only root can mount");
}
