//! The binary, on simulated GPUs, with clients that stand in for CUDA processes.
//!
//! The program of this test is also the control daemon, its server and the clients, so it has no test harness.
#![allow(clippy::unwrap_used)] // A test that cannot go on stops here.

mod world;

use divvy_api::mps::{DESIRED, Desired, Phase};
use divvy_sim::Code;
use divvy_sim::control::{Pattern, When};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;
use world::*;

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
        ("a_daemon_that_cannot_be_asked_stays", a_daemon_that_cannot_be_asked_stays),
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
    assert!(world.log().contains("has not answered within 10 s; killed"), "{}", world.log());
    // One that hangs is ended all the same.
    world.rule(|state| state.add_hold(Pattern::new("mps-control"), None, When::Before));
    world.gone(&gpu);
}

fn a_daemon_that_cannot_be_asked_stays() {
    let world = World::new();
    let gpu = world.uuid(0);
    let first = world.ready(&gpu, &limited(&gpu, 25, 1024));
    let mut client = world.client(&gpu, &[]);
    // As while the GPU driver's files are replaced.
    let program = world.sim.root().join("usr/bin/nvidia-cuda-mps-control");
    let away = program.with_extension("away");
    fs::rename(&program, &away).unwrap();
    wait("a check that fails", || world.log().contains("not known whether it is well"));
    world.want(&gpu, &limited(&gpu, 50, 1024));
    assert!(world.down(&gpu).contains("cannot be started"));
    fs::rename(&away, &program).unwrap();
    let again = world.ready(&gpu, &limited(&gpu, 50, 1024));
    assert_eq!((again.incarnation, again.process), (1, first.process));
    assert!(client.process.lives());
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
