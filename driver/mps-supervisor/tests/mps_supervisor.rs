//! Tests of the supervisor binary on simulated GPUs, with simulated CUDA clients.
//!
//! This test program also acts as the control daemon, its server and the clients, so it has no test
//! harness.
#![allow(clippy::unwrap_used)] // A test may panic.

mod test_node;

use divvy_api::mps::{DESIRED, Desired, Phase};
use divvy_sim::Code;
use divvy_sim::control::{Pattern, When};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;
use test_node::*;

fn main() -> ExitCode {
    if let Some(code) = divvy_sim::command::multicall() {
        return code;
    }
    if std::env::args().nth(1).as_deref() == Some("client") {
        return divvy_sim::command::main();
    }
    macro_rules! tests {
        ($($name:ident),* $(,)?) => { [$((stringify!($name), $name as fn())),*] };
    }
    let tests = tests![
        daemon_is_started_reconfigured_and_stopped,
        multi_user_daemon_serves_all_users_at_once,
        dead_daemon_is_restarted,
        hanging_daemon_is_restarted,
        daemon_survives_a_missing_control_program,
        fault_is_reported_until_its_clients_exit,
        daemons_and_clients_outlive_the_supervisor,
        daemon_that_died_without_supervisor_is_restarted,
        daemon_undesired_without_supervisor_is_stopped,
        invalid_desired_file_is_ignored,
        each_mig_device_has_its_own_daemon,
        unsupported_mode_and_missing_driver_are_reported,
        second_supervisor_waits_for_the_first,
        supervisor_of_many_daemons_stays_below_5_mib,
        shm_is_private_to_the_daemon_and_its_clients,
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

fn daemon_is_started_reconfigured_and_stopped() {
    let node = TestNode::new();
    let gpu = node.uuid(0);
    let first = node.ready(&gpu, &limited(&gpu, 25, 1024));
    assert_eq!((first.incarnation, first.multi_user), (1, true));
    let mut old = node.client(&gpu, &[]);
    assert_eq!(old.limits(), (Some(25.0), Some(1024)));
    // The running server gets the new limits without a restart.
    let more = node.ready(&gpu, &limited(&gpu, 50, 3000));
    assert_eq!((more.incarnation, more.process), (1, first.process));
    assert_eq!(node.client(&gpu, &[]).limits(), (Some(50.0), Some(3000)));
    // The limits are removed.
    node.ready(&gpu, &desired(&gpu));
    assert_eq!(node.client(&gpu, &["--memory", "40000"]).limits().0, Some(100.0));
    assert!(old.process.is_running());
    let other = node.uuid(1);
    node.ready(&other, &desired(&other));
    assert_eq!(node.client(&other, &["--memory", "70000"]).limits(), (Some(100.0), None));
    node.remove(&gpu);
    assert!(node.processes(0).is_empty());
    assert_eq!(node.actual(&other).unwrap().phase, Phase::Ready);
    // A new target counts its starts from 1 again.
    assert_eq!(node.ready(&gpu, &desired(&gpu)).incarnation, 1);
}

fn multi_user_daemon_serves_all_users_at_once() {
    let node = TestNode::new();
    let gpu = node.uuid(0);
    node.ready(&gpu, &Desired { multi_user: Some(true), ..limited(&gpu, 30, 2048) });
    let clients = ["0", "1000", "2000"].map(|uid| node.client(&gpu, &["--uid", uid]));
    assert!(clients.iter().all(|client| client.limits() == (Some(30.0), Some(2048))));
    assert!(clients.iter().all(|client| client.output["server"] == clients[0].output["server"]));
    drop(clients);
    // Another user mode needs a restart.
    let single = node.ready(&gpu, &Desired { multi_user: Some(false), ..limited(&gpu, 30, 2048) });
    assert_eq!((single.incarnation, single.multi_user), (2, false));
}

fn dead_daemon_is_restarted() {
    let node = TestNode::new();
    let gpu = node.uuid(0);
    let first = node.ready(&gpu, &limited(&gpu, 25, 1024));
    let mut client = node.client(&gpu, &[]);
    kill(first.process.unwrap().pid);
    let again = || node.actual(&gpu).filter(|actual| actual.incarnation == 2 && actual.phase == Phase::Ready);
    wait("another daemon", || again().is_some());
    // The server is killed too, and with it the client.
    wait("the client's end", || !client.process.is_running());
    assert_eq!(node.client(&gpu, &[]).limits(), (Some(25.0), Some(1024)));
    assert!(node.log().contains("the control daemon exited; containers that used it must restart"));
}

fn hanging_daemon_is_restarted() {
    let node = TestNode::new();
    let gpu = node.uuid(0);
    node.ready(&gpu, &desired(&gpu));
    node.rule(|state| state.add_hold(Pattern::new("mps-control"), Some(1), When::Before));
    let again = || node.actual(&gpu).filter(|actual| actual.incarnation == 2 && actual.phase == Phase::Ready);
    wait("another daemon", || again().is_some());
    assert!(node.log().contains("did not answer within 10 s; killed"), "{}", node.log());
    // A hanging daemon can be stopped too.
    node.rule(|state| state.add_hold(Pattern::new("mps-control"), None, When::Before));
    node.remove(&gpu);
}

fn daemon_survives_a_missing_control_program() {
    let node = TestNode::new();
    let gpu = node.uuid(0);
    let first = node.ready(&gpu, &limited(&gpu, 25, 1024));
    let mut client = node.client(&gpu, &[]);
    // This happens while the GPU driver is upgraded.
    let program = node.sim.root().join("usr/bin/nvidia-cuda-mps-control");
    let away = program.with_extension("away");
    fs::rename(&program, &away).unwrap();
    wait("a check that fails", || node.log().contains("health check failed to run"));
    node.want(&gpu, &limited(&gpu, 50, 1024));
    assert!(node.down(&gpu).contains("cannot be started"));
    fs::rename(&away, &program).unwrap();
    let again = node.ready(&gpu, &limited(&gpu, 50, 1024));
    assert_eq!((again.incarnation, again.process), (1, first.process));
    assert!(client.process.is_running());
}

fn fault_is_reported_until_its_clients_exit() {
    let node = TestNode::new();
    let gpu = node.uuid(0);
    node.ready(&gpu, &desired(&gpu));
    let clients = ["a", "b"].map(|name| node.client(&gpu, &["--stubborn", "--name", name]));
    node.rule(|state| state.add_fault(Pattern::new("mps-server"), Some(1), When::Before, Code::Unknown));
    let phase = || node.actual(&gpu).map(|actual| actual.phase);
    wait(
        "a fault",
        || matches!(phase(), Some(Phase::Fault { cause }) if cause.contains("2 clients are lost")),
    );
    drop(clients);
    wait("a daemon that is well", || phase() == Some(Phase::Ready));
    assert_eq!(node.actual(&gpu).unwrap().incarnation, 1);
    drop(node.client(&gpu, &[]));
}

fn daemons_and_clients_outlive_the_supervisor() {
    let mut node = TestNode::new();
    let gpu = node.uuid(0);
    let before = node.ready(&gpu, &limited(&gpu, 25, 1024));
    let mut client = node.client(&gpu, &[]);
    // The supervisor is killed.
    node.supervisor = None;
    assert!(client.process.is_running());
    node.start(&supervisor());
    wait("the next supervisor", || node.log().contains("adopted the running daemon"));
    // Another binary replaces it, after SIGTERM.
    let upgraded = node.dir.path().join("divvy-mps-supervisor");
    fs::copy(supervisor(), &upgraded).unwrap();
    let mut old = node.supervisor.take().unwrap();
    let pid = Pid::from_raw(i32::try_from(old.0.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    wait("the old supervisor's end", || !old.is_running());
    node.start(&upgraded);
    let after = node.ready(&gpu, &limited(&gpu, 50, 2048));
    assert_eq!((after.incarnation, after.process), (before.incarnation, before.process));
    assert!(client.process.is_running());
    assert_eq!(node.client(&gpu, &[]).limits(), (Some(50.0), Some(2048)));
    node.remove(&gpu);
    wait("the client's end", || !client.process.is_running());
    // Without a valid state file, a daemon is found by its environment.
    node.ready(&gpu, &desired(&gpu));
    let first = node.actual(&gpu).unwrap();
    node.supervisor = None;
    fs::write(node.target(&gpu).join("actual.json"), "damaged").unwrap();
    node.start(&supervisor());
    wait("a record", || node.actual(&gpu).is_some_and(|actual| actual.phase == Phase::Ready));
    assert_eq!(node.actual(&gpu).unwrap().process, first.process);
}

fn daemon_that_died_without_supervisor_is_restarted() {
    let mut node = TestNode::new();
    let gpu = node.uuid(0);
    let first = node.ready(&gpu, &desired(&gpu));
    let mut client = node.client(&gpu, &[]);
    node.supervisor = None;
    kill(first.process.unwrap().pid);
    node.start(&supervisor());
    let again = || node.actual(&gpu).filter(|actual| actual.incarnation == 2 && actual.phase == Phase::Ready);
    wait("another daemon", || again().is_some());
    wait("the client's end", || !client.process.is_running());
}

fn daemon_undesired_without_supervisor_is_stopped() {
    let mut node = TestNode::new();
    let gpu = node.uuid(0);
    node.ready(&gpu, &desired(&gpu));
    drop(node.client(&gpu, &[]));
    node.supervisor = None;
    fs::remove_file(node.target(&gpu).join(DESIRED)).unwrap();
    node.start(&supervisor());
    wait("an end", || !node.target(&gpu).exists());
    assert!(node.processes(0).is_empty());
}

fn invalid_desired_file_is_ignored() {
    let node = TestNode::new();
    let (gpu, other) = (node.uuid(0), node.uuid(1));
    let first = node.ready(&gpu, &desired(&gpu));
    let mut client = node.client(&gpu, &[]);
    for text in [&b"{"[..], br#"{"format":9}"#, br#"{"format":1,"device":"GPU-1\nquit"}"#] {
        node.write(&gpu, text);
        node.write("nonsense", text);
        wait("a complaint", || node.log().matches("keeps its settings").count() >= 2);
    }
    fs::write(node.target("file"), "not a directory").unwrap();
    fs::create_dir(node.target("foreign")).unwrap();
    fs::write(node.target("foreign").join("data"), "foreign").unwrap();
    node.ready(&other, &desired(&other));
    assert!(client.process.is_running());
    assert_eq!(node.actual(&gpu), Some(first.clone()));
    assert_eq!(node.actual("nonsense"), None);
    assert_eq!(node.ready(&gpu, &limited(&gpu, 10, 100)).process, first.process);
    wait("a complaint about the foreign directory", || {
        node.log().contains("foreign: cannot remove the directory")
    });
    assert_eq!(fs::read(node.target("foreign").join("data")).unwrap(), b"foreign");
}

fn each_mig_device_has_its_own_daemon() {
    let node = TestNode::new();
    let made = node.sim.update(|state| {
        state.set_mig_mode(0, true)?;
        [0, 1]
            .into_iter()
            .map(|_| state.create_gi(0, 19, None).and_then(|gi| state.create_ci(0, gi.id, 0, None)))
            .collect()
    });
    let cis: Vec<divvy_sim::state::Ci> = made.unwrap();
    let names = [0, 1].map(|start| format!("{}-19-{start}", node.uuid(0)));
    for (name, ci) in names.iter().zip(&cis) {
        node.ready(name, &limited(&ci.uuid, 50, 2000));
    }
    let clients: Vec<Client> = names.iter().map(|name| node.client(name, &[])).collect();
    for (client, ci) in clients.iter().zip(&cis) {
        assert_eq!(client.output["device"], ci.uuid.as_str());
        assert_eq!(client.limits(), (Some(50.0), Some(2000)));
    }
    node.remove(&names[0]);
    assert_eq!(node.actual(&names[1]).unwrap().phase, Phase::Ready);
    assert_eq!(node.processes(0).len(), 2);
}

fn unsupported_mode_and_missing_driver_are_reported() {
    let node = TestNode::with(|options| options.driver = "535.54.03".to_owned());
    let (gpu, other) = (node.uuid(0), node.uuid(1));
    node.want(&gpu, &Desired { multi_user: Some(true), ..desired(&gpu) });
    let cause = node.down(&gpu);
    assert!(cause.contains("multi-user mode") && cause.contains("too old"), "{cause}");
    assert!(!node.ready(&other, &desired(&other)).multi_user, "single-user mode");
    // A new desired state is tried at once.
    assert!(!node.ready(&gpu, &desired(&gpu)).multi_user);
    node.remove(&gpu);
    let program = node.sim.root().join("usr/bin/nvidia-cuda-mps-control");
    fs::rename(&program, program.with_extension("away")).unwrap();
    node.want(&gpu, &desired(&gpu));
    assert!(node.down(&gpu).contains("is the GPU driver installed there?"));
    fs::rename(program.with_extension("away"), &program).unwrap();
    node.ready(&gpu, &limited(&gpu, 10, 100));
}

fn second_supervisor_waits_for_the_first() {
    let mut node = TestNode::new();
    let gpu = node.uuid(0);
    let first = node.ready(&gpu, &desired(&gpu));
    let second = Running(node.command(&supervisor()).spawn().unwrap());
    wait("the second supervisor", || node.log().contains("another supervisor holds the lock"));
    assert!(!node.log().contains("adopted the running daemon"));
    node.supervisor = Some(second);
    wait("the second supervisor's turn", || node.log().contains("adopted the running daemon"));
    assert_eq!(node.ready(&gpu, &limited(&gpu, 10, 100)).process, first.process);
}

fn supervisor_of_many_daemons_stays_below_5_mib() {
    let node = TestNode::new();
    let made = node.sim.update(|state| {
        let all = |slot| (0..7).map(move |_| slot);
        [0, 1].into_iter().try_for_each(|slot| state.set_mig_mode(slot, true).map(drop))?;
        let one = |slot| state.create_gi(slot, 19, None).and_then(|gi| state.create_ci(slot, gi.id, 0, None));
        [0, 1].into_iter().flat_map(all).map(one).collect()
    });
    let cis: Vec<divvy_sim::state::Ci> = made.unwrap();
    for ci in &cis {
        node.ready(&ci.uuid, &limited(&ci.uuid, 50, 2000));
    }
    let pid = node.supervisor.as_ref().unwrap().0.id();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let rss =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    let mib = rss.map(|kib: f64| kib / 1024.0).unwrap();
    println!("rss_mps_supervisor_mib {mib:.1} with {} daemons", cis.len());
    assert!(mib <= 5.0, "{mib} MiB");
}

fn shm_is_private_to_the_daemon_and_its_clients() {
    let node = TestNode::new();
    let gpu = node.uuid(0);
    let actual = node.ready(&gpu, &desired(&gpu));
    for (name, mode) in [("pipe", 0o1777), ("shm", 0o1777), ("log", 0o755)] {
        let found = fs::metadata(node.target(&gpu).join(name)).unwrap().permissions().mode();
        assert_eq!(found & 0o7777, mode, "{name}");
    }
    let shm = fs::metadata(node.target(&gpu).join("shm")).unwrap();
    let seen = fs::metadata(format!("/proc/{}/root/dev/shm", actual.process.unwrap().pid)).unwrap();
    let same = std::os::unix::fs::MetadataExt::ino(&shm) == std::os::unix::fs::MetadataExt::ino(&seen);
    assert_eq!(same, rustix::process::geteuid().is_root(), "only root can mount");
}
