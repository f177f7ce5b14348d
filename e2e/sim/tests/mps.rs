//! MPS programs: which clients may connect, their limits, and the effect on state, logs and errors.

mod common;

use common::Node;
use divvy_sim::Code;
use divvy_sim::control::{Pattern, When};
use divvy_sim::state::ProcessKind;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A pipe directory with a daemon, for GPU 0 or one of its MIG devices.
struct Mps<'n> {
    node: &'n Node,
    device: String,
    pipe: PathBuf,
    daemon: Option<Running>,
}

/// A connected client and the line that it printed.
struct Client {
    process: Running,
    output: Value,
}

impl Client {
    fn value_of(&self, key: &str) -> String {
        self.output[key].to_string()
    }
}

impl Drop for Mps<'_> {
    fn drop(&mut self) {
        // Servers keep running after their daemon was killed.
        let state = self.node.sim.read().expect("a state");
        let servers =
            state.gpus.iter().flat_map(|gpu| &gpu.processes).filter(|p| p.name.contains("mps-server"));
        for server in servers {
            let pid =
                i32::try_from(server.pid).ok().and_then(rustix::process::Pid::from_raw).expect("a process");
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

impl<'n> Mps<'n> {
    fn start(node: &'n Node, device: String, options: &[&str]) -> Self {
        let pipe = node.dir.path().join("pipe");
        std::fs::create_dir_all(&pipe).expect("writable");
        let mut mps = Self { node, device, pipe, daemon: None };
        let daemon = mps.program().arg("-f").args(options).spawn().expect("a daemon");
        mps.daemon = Some(Running(daemon));
        wait("the daemon", || mps.try_command("get_server_list").0);
        mps
    }

    fn on_gpu_0(node: &'n Node, options: &[&str]) -> Self {
        let uuid = node.sim.read().expect("a state").gpus[0].uuid.clone();
        Self::start(node, uuid, options)
    }

    fn program(&self) -> Command {
        let mut command = Command::new(self.node.sim.root().join("usr/bin/nvidia-cuda-mps-control"));
        command.env("CUDA_VISIBLE_DEVICES", &self.device);
        command.env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe).env("CUDA_MPS_LOG_DIRECTORY", &self.pipe);
        command
    }

    /// Whether the control client succeeded, and its output.
    fn try_command(&self, commands: &str) -> (bool, String) {
        let mut client =
            self.program().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a client");
        // Without a daemon, the client exits before it reads the commands.
        drop(client.stdin.take().expect("a pipe").write_all(format!("{commands}\n").as_bytes()));
        let output = client.wait_with_output().expect("an end");
        (output.status.success(), String::from_utf8(output.stdout).expect("text").trim_end().to_owned())
    }

    #[track_caller]
    fn command(&self, commands: &str) -> String {
        let (good, text) = self.try_command(commands);
        assert!(good, "{commands}: {text}");
        text
    }

    fn client_command(&self, args: &[&str]) -> Command {
        let mut command = client_of(self.node, args);
        command.arg("--pipe").arg(&self.pipe);
        command
    }

    #[track_caller]
    fn client(&self, args: &[&str]) -> Client {
        connected(self.client_command(args))
    }

    #[track_caller]
    fn refused(&self, args: &[&str], expected: &str) {
        refused(self.client_command(args), expected);
    }
}

fn client_of(node: &Node, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-sim"));
    command.env("DIVVY_SIM", node.sim.root()).arg("client").args(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[track_caller]
fn connected(mut command: Command) -> Client {
    let mut process = Running(command.spawn().expect("a client"));
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("text");
    let output = serde_json::from_str(&line);
    let output = output.unwrap_or_else(|_| panic!("not connected: {}", error_of(&mut process)));
    Client { process, output }
}

#[track_caller]
fn refused(mut command: Command, expected: &str) {
    let mut process = Running(command.spawn().expect("a client"));
    let error = error_of(&mut process);
    assert!(error.contains(expected), "{error}");
}

/// The error that the process prints before it exits.
fn error_of(process: &mut Running) -> String {
    let mut text = String::new();
    process.0.stderr.take().expect("a pipe").read_to_string(&mut text).expect("text");
    text
}

#[track_caller]
fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(30), "waited for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kinds and MiB of the living processes on GPU 0.
fn processes(node: &Node) -> Vec<(ProcessKind, u64)> {
    node.sim.remove_dead_processes().expect("a state");
    let state = node.sim.read().expect("a state");
    state.gpus[0].processes.iter().map(|process| (process.kind, process.memory_mib)).collect()
}

#[test]
fn client_entry_is_removed_however_it_dies() {
    let node = Node::create("H100-SXM5-80GB");
    let mps = Mps::on_gpu_0(&node, &[]);
    assert_eq!((mps.command("get_server_list"), processes(&node)), (String::new(), vec![]));
    let client = mps.client(&["--memory", "700"]);
    let server = mps.command("get_server_list");
    assert_eq!(client.value_of("server"), server);
    assert_eq!(mps.command(&format!("get_server_status {server}")), "ACTIVE");
    assert_eq!(mps.command(&format!("get_client_list {server}")), client.value_of("pid"));
    assert!(mps.command("ps").contains("python3"));
    assert_eq!(processes(&node), [(ProcessKind::Compute, 30), (ProcessKind::Mps, 700)]);
    drop(client);
    wait("the client's end", || processes(&node).len() == 1);
    // After a server was killed, its memory and its clients' are free.
    let client = mps.client(&[]);
    let pid = server.parse().ok().and_then(rustix::process::Pid::from_raw).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("a process");
    wait("the server's end", || processes(&node).is_empty());
    wait("another server", || mps.command("get_server_list").is_empty());
    drop(client);
    drop(mps.client(&[]));
}

#[test]
fn client_may_only_lower_the_server_limits() {
    let node = Node::create("H100-SXM5-80GB");
    let mps = Mps::on_gpu_0(&node, &[]);
    assert_eq!(mps.command("get_default_active_thread_percentage"), "100.0");
    assert_eq!(
        mps.command("set_default_active_thread_percentage 25\nset_default_device_pinned_mem_limit 0 2047M"),
        "25.0"
    );
    assert_eq!(mps.command("get_default_device_pinned_mem_limit 0"), "1G");
    let has = |client: &Client, threads: f64, memory: u64| {
        assert_eq!(client.output["threadPercentage"].as_f64(), Some(threads));
        assert_eq!(client.output["memoryLimitMib"].as_u64(), Some(memory));
    };
    let first = mps.client(&[]);
    has(&first, 25.0, 2047);
    mps.refused(&["--memory", "2048"], "CUDA_ERROR_OUT_OF_MEMORY");
    for (threads, memory, expected) in [("10", "0=1G", (10.0, 1024)), ("90", "0=4G", (25.0, 2047))] {
        let mut command = mps.client_command(&[]);
        command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", threads);
        command.env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory);
        has(&connected(command), expected.0, expected.1);
    }
    // Defaults apply to the next server; a running server is set by its process id.
    let server = mps.command("get_server_list");
    mps.command("set_default_active_thread_percentage 50");
    has(&mps.client(&[]), 25.0, 2047);
    mps.command(&format!(
        "set_active_thread_percentage {server} 50\n\
         set_device_pinned_mem_limit {server} 0 3G"
    ));
    has(&mps.client(&[]), 50.0, 3072);
    assert!(mps.command("set_default_active_thread_percentage 0").contains("Invalid arguments"));
    assert!(mps.command("set_default_device_pinned_mem_limit 0 many").contains("Invalid arguments"));
    assert!(mps.command("fly").contains("Unknown command"));
}

#[test]
fn users_take_turns_without_multi_user_mode() {
    let node = Node::create("H100-SXM5-80GB");
    {
        let mps = Mps::on_gpu_0(&node, &[]);
        let alice = mps.client(&["--uid", "1000"]);
        let bob = Running(mps.client_command(&["--uid", "2000"]).spawn().expect("a client"));
        let again = mps.command("get_server_list");
        assert_eq!(alice.value_of("server"), again, "Bob waits");
        drop(alice);
        wait("Bob's server", || {
            let server = mps.command("get_server_list");
            !server.is_empty()
                && server != again
                && mps.command(&format!("get_client_list {server}")) == bob.0.id().to_string()
        });
    }
    let mps = Mps::on_gpu_0(&node, &["-M"]);
    let both = [mps.client(&["--uid", "1000"]), mps.client(&["--uid", "2000"])];
    assert_eq!(both[0].output["server"], both[1].output["server"]);
}

#[test]
fn old_driver_has_no_multi_user_mode() {
    let node = Node::create_with("H100-SXM5-80GB", |options| options.driver = "535.54.03".to_owned());
    let pipe = node.dir.path().join("pipe");
    let mut command = Command::new(node.sim.root().join("usr/bin/nvidia-cuda-mps-control"));
    let output = command.args(["-f", "-M"]).env("CUDA_MPS_PIPE_DIRECTORY", &pipe).output().expect("an end");
    assert!(
        !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("Unknown option: -M")
    );
}

#[test]
fn fatal_error_faults_the_server_until_clients_leave() {
    let node = Node::create("H100-SXM5-80GB");
    let mps = Mps::on_gpu_0(&node, &[]);
    let clients = [mps.client(&["--stubborn"]), mps.client(&["--stubborn"])];
    let server = mps.command("get_server_list");
    let status = || mps.command(&format!("get_server_status {server}"));
    let rule = |change: &dyn Fn(&mut divvy_sim::State)| {
        let changed = node.sim.update(|state| {
            change(state);
            Ok(())
        });
        changed.expect("rules are accepted");
    };
    rule(&|state| state.add_fault(Pattern::new("mps-server"), Some(1), When::Before, Code::Unknown));
    wait("FAULT", || status() == "FAULT");
    mps.refused(&[], "CUDA_ERROR_MPS_SERVER_NOT_READY");
    let [first, second] = clients;
    drop(first);
    wait("one client", || mps.command(&format!("get_client_list {server}")) == second.value_of("pid"));
    assert_eq!(status(), "FAULT");
    drop(second);
    wait("ACTIVE", || status() == "ACTIVE");
    let client = mps.client(&[]);
    mps.command(&format!("terminate_client {server} {}", client.output["pid"]));
    let mut process = client.process;
    assert!(error_of(&mut process).contains("CUDA_ERROR_MPS_CLIENT_TERMINATED"));
    // Rules make the server and the daemon exit.
    let client = mps.client(&[]);
    rule(&|state| state.add_fault(Pattern::new("mps-server"), Some(1), When::Before, Code::GpuIsLost));
    let mut process = client.process;
    assert!(error_of(&mut process).contains("CUDA_ERROR_MPS_RPC_FAILURE"));
    rule(&|state| state.add_fault(Pattern::new("mps-control"), Some(1), When::Before, Code::Unknown));
    assert!(!mps.try_command("get_server_list").0);
    let answer = mps.try_command("get_server_list");
    assert_eq!(answer, (false, "Cannot find MPS control daemon process".to_owned()));
}

#[test]
fn quit_waits_for_clients_without_a_timeout() {
    let node = Node::create("H100-SXM5-80GB");
    let mut mps = Mps::on_gpu_0(&node, &[]);
    assert!(!mps.program().arg("-d").status().expect("an end").success(), "a pipe directory has one daemon");
    let client = mps.client(&[]);
    let server = mps.command("get_server_list");
    let mut waiting = mps.program().stdin(Stdio::piped()).spawn().expect("a client");
    waiting.stdin.take().expect("a pipe").write_all(b"quit\n").expect("a reader");
    drop(client);
    assert!(waiting.wait().expect("an end").success());
    assert!(mps.daemon.take().is_some_and(|mut daemon| daemon.0.wait().is_ok_and(|status| status.success())));
    assert!(mps.program().arg("-d").status().expect("an end").success());
    let client = mps.client(&[]);
    assert_ne!(mps.command("get_server_list"), server);
    mps.command("quit -t 0");
    let mut process = client.process;
    assert!(error_of(&mut process).contains("CUDA_ERROR_MPS_RPC_FAILURE"));
    assert!(processes(&node).is_empty());
}

#[test]
fn exclusive_gpu_accepts_only_the_server() {
    let node = Node::create("H100-SXM5-80GB");
    let set = |mode| {
        let changed = node.sim.update(|state| {
            state.gpus[0].compute_mode = mode;
            Ok(())
        });
        changed.expect("no rule forbids it");
    };
    set(3);
    let mps = Mps::on_gpu_0(&node, &[]);
    let clients = [mps.client(&[]), mps.client(&[])];
    let elsewhere = |args: &[&str]| {
        let mut command = client_of(&node, args);
        command.env("CUDA_MPS_PIPE_DIRECTORY", node.dir.path().join("none"));
        command
    };
    refused(elsewhere(&[]), "CUDA_ERROR_DEVICE_UNAVAILABLE");
    drop((clients, mps));
    wait("an empty GPU", || processes(&node).is_empty());
    let first = connected(elsewhere(&["--memory", "100"]));
    assert_eq!(first.output["mps"], false);
    refused(elsewhere(&[]), "CUDA_ERROR_DEVICE_UNAVAILABLE");
    set(0);
    let second = connected(elsewhere(&[]));
    refused(elsewhere(&["--memory", "90000"]), "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(processes(&node).len(), 2);
    drop((first, second));
    wait("an empty GPU", || processes(&node).is_empty());
    set(2);
    refused(elsewhere(&[]), "CUDA_ERROR_DEVICE_UNAVAILABLE");
}

#[test]
fn mig_device_has_its_own_daemon_and_client_limit() {
    let node = Node::create("H100-SXM5-80GB");
    let ci = node
        .sim
        .update(|state| {
            state.set_mig_mode(0, true)?;
            let gi = state.create_gi(0, 19, None)?;
            state.create_ci(0, gi.id, 0, None)
        })
        .expect("free slices");
    let mps = Mps::start(&node, ci.uuid, &["-M"]);
    // 48 clients on seven slices means 6 on one.
    let clients: Vec<Client> = (0..6).map(|_| mps.client(&["--memory", "10"])).collect();
    mps.refused(&["--memory", "10"], "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED: 6 clients");
    let state = node.sim.read().expect("a state");
    assert!(state.gpus[0].processes.iter().all(|process| process.instance.is_some()));
    assert_eq!(clients.len(), 6);
}

#[test]
fn hold_makes_the_daemon_hang() {
    let node = Node::create("H100-SXM5-80GB");
    let mps = Mps::on_gpu_0(&node, &[]);
    let hold = |state: &mut divvy_sim::State| {
        state.add_hold(Pattern::new("mps-control"), None, When::Before);
        Ok(())
    };
    node.sim.update(hold).expect("a rule");
    let mut client = mps.client_command(&["--for", "0"]).spawn().expect("a client");
    wait("a blocked call", || {
        node.sim.read().expect("a state").control.held.iter().any(divvy_sim::control::is_alive)
    });
    assert!(client.try_wait().expect("a process").is_none());
    let release = |state: &mut divvy_sim::State| {
        state.release(None);
        Ok(())
    };
    node.sim.update(release).expect("a rule");
    assert!(client.wait().expect("an end").success());
}
