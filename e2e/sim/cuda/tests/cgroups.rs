//! Memory limits that the GPU driver enforces per cgroup: processes in the cgroup get no more by
//! any call, and other processes are not affected.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::*;

/// The first driver version with such limits, and an earlier one.
const DRIVER_WITH_LIMITS: &str = "615.10.01";
const DRIVER_WITHOUT_LIMITS: &str = "580.95.05";
const NO_LIMIT: u64 = u64::MAX;
const REFUSED: &str = "error 2";

#[test]
fn scenario_program() {
    common::scenario(|cuda, words| {
        let number = |word: &str| word.parse::<u64>().expect("a number");
        match words {
            ["alloc", mib] => describe(cuda.alloc(number(mib) * MIB)),
            ["free", address] => format!("error {}", cuda.free(number(address))),
            ["pool", mib] => {
                let mut address = 0_u64;
                let size = number(mib) * MIB;
                let code = call!(cuda.cuMemAllocAsync(&mut address => &mut u64, size => u64, 0 => usize));
                describe(answer(code, address))
            }
            ["managed", mib] => {
                let (mut address, size) = (0_u64, number(mib) * MIB);
                let code = call!(cuda.cuMemAllocManaged(&mut address => &mut u64, size => u64, 1 => u32));
                assert_eq!(code, SUCCESS);
                describe(answer(
                    call!(cuda.cuMemPrefetchAsync(address => u64, size => u64, 0 => i32, 0 => usize)),
                    address,
                ))
            }
            // Allocates MiB by MiB until it is refused, and returns the count.
            ["fill"] => (0_u64..).take_while(|_| cuda.alloc(MIB).is_ok()).count().to_string(),
            ["info"] => {
                let (free, total) = cuda.info().expect("information");
                format!("{} {}", free / MIB, total / MIB)
            }
            other => panic!("unknown command {other:?}"),
        }
    });
}

fn describe(got: Result<u64, u32>) -> String {
    got.map_or_else(|code| format!("error {code}"), |address| address.to_string())
}

/// A node, and directories that stand for cgroups.
struct TestNode {
    sim_node: Node,
    cgroups: PathBuf,
}

impl TestNode {
    fn up(driver: &str) -> Self {
        let sim_node = Node::with("L4", |options| options.driver = driver.to_owned());
        let cgroups = sim_node.dir.path().join("cgroups");
        Self { sim_node, cgroups }
    }

    /// Writes a cgroup with these processes.
    fn write_cgroup(&self, name: &str, programs: &[&Program]) -> PathBuf {
        let cgroup = self.cgroups.join(name);
        fs::create_dir_all(&cgroup).expect("a directory");
        let pids: String = programs.iter().map(|program| format!("{}\n", program.pid())).collect();
        fs::write(cgroup.join("cgroup.procs"), pids).expect("a file");
        cgroup
    }

    fn set_limit(&self, cgroup: &Path, mib: Option<u64>) -> bool {
        let (soft, hard) = mib.map_or((0, NO_LIMIT), |mib| (mib * MIB, mib * MIB));
        let path = cgroup.to_str().expect("text");
        self.sim_node.sim.update(|state| state.limit_cgroup(0, path, soft, hard)).is_ok()
    }

    fn start_program(&self) -> Program {
        let mut program = self.sim_node.program();
        assert_eq!(program.ask("start"), "done");
        program
    }

    fn info(&self, program: &mut Program) -> (u64, u64) {
        let answer = program.ask("info");
        let (free, total) = answer.split_once(' ').expect("two numbers");
        (free.parse().expect("MiB"), total.parse().expect("MiB"))
    }
}

#[test]
fn cgroup_limits_are_independent() {
    let node = TestNode::up(DRIVER_WITH_LIMITS);
    let (mut one, mut other, mut free) = (node.start_program(), node.start_program(), node.start_program());
    // A context of 300 MiB counts towards the limit.
    assert!(node.set_limit(&node.write_cgroup("pods/one", &[&one]), Some(1000)));
    assert!(node.set_limit(&node.write_cgroup("pods/other", &[&other]), Some(2000)));
    let all = node.info(&mut free);
    assert!(all.0 > 5000, "{all:?}");
    assert_eq!((node.info(&mut one), node.info(&mut other)), ((700, 1000), (1700, 2000)));
    assert_eq!(one.ask("alloc 701"), REFUSED);
    assert_eq!(one.ask("fill"), "700");
    assert_eq!((one.ask("pool 1").as_str(), node.info(&mut one).0), (REFUSED, 0));
    assert_ne!(other.ask("pool 1024"), REFUSED);
    assert_eq!(other.ask("alloc 1000"), REFUSED);
    assert_ne!(free.ask("alloc 4000"), REFUSED);
}

#[test]
fn limit_can_be_raised_lowered_and_removed() {
    let node = TestNode::up(DRIVER_WITH_LIMITS);
    let mut program = node.start_program();
    let cgroup = node.write_cgroup("one", &[&program]);
    assert!(node.set_limit(&cgroup, Some(1000)));
    let held = program.ask("alloc 600");
    assert_eq!(program.ask("alloc 600"), REFUSED);
    assert!(node.set_limit(&cgroup, Some(2000)));
    let more = program.ask("alloc 600");
    assert_ne!(more, REFUSED);
    // The process keeps its memory, but gets no more until it is below the new limit.
    assert!(node.set_limit(&cgroup, Some(1200)));
    assert_eq!((program.ask("alloc 1").as_str(), node.info(&mut program)), (REFUSED, (0, 1200)));
    assert_eq!(program.ask(&format!("free {more}")), "error 0");
    assert_eq!((program.ask("alloc 301").as_str(), node.info(&mut program)), (REFUSED, (300, 1200)));
    assert_ne!(program.ask("alloc 300"), REFUSED);
    assert!(node.set_limit(&cgroup, None));
    assert_ne!(program.ask("alloc 4000"), REFUSED);
    assert_eq!(program.ask(&format!("free {held}")), "error 0");
    // The limit ends with its cgroup.
    assert!(node.set_limit(&cgroup, Some(300)));
    assert_eq!(program.ask("alloc 1"), REFUSED);
    fs::remove_dir_all(&cgroup).expect("removed");
    assert_ne!(program.ask("alloc 1"), REFUSED);
}

#[test]
fn limit_covers_child_cgroups() {
    let node = TestNode::up(DRIVER_WITH_LIMITS);
    let (mut one, mut other) = (node.start_program(), node.start_program());
    let pod = node.write_cgroup("pod", &[]);
    node.write_cgroup("pod/one", &[&one]);
    node.write_cgroup("pod/other", &[&other]);
    assert!(node.set_limit(&pod, Some(2000)));
    let total = node.info(&mut one).1;
    assert!(total > 2000, "the limit of a parent cgroup must not change the total: {total}");
    assert_eq!(node.info(&mut one).0, 1400);
    assert_ne!(one.ask("alloc 1000"), REFUSED);
    assert_eq!(other.ask("alloc 401"), REFUSED);
    assert_ne!(other.ask("alloc 400"), REFUSED);
    // Memory of a killed process is free again, and memory of a moved process moves with it.
    one.kill();
    assert_ne!(other.ask("alloc 900"), REFUSED);
    let mut third = node.start_program();
    node.write_cgroup("pod/one", &[&third]);
    assert_eq!(third.ask("alloc 101"), REFUSED);
    node.write_cgroup("pod/other", &[]);
    assert_ne!(other.ask("alloc 1"), REFUSED);
    assert_ne!(third.ask("alloc 1700"), REFUSED);
}

#[test]
fn race_for_the_last_memory_has_one_winner() {
    let node = TestNode::up(DRIVER_WITH_LIMITS);
    let mut racers = [node.start_program(), node.start_program()];
    let [one, other] = &racers;
    assert!(node.set_limit(&node.write_cgroup("one", &[one, other]), Some(600 + 100)));
    for _ in 0..200 {
        racers.iter_mut().for_each(|racer| racer.tell("alloc 60"));
        let answers: Vec<String> = racers.iter_mut().map(Program::answer).collect();
        let got: Vec<usize> = (0..2).filter(|at| answers[*at] != REFUSED).collect();
        assert_eq!(got.len(), 1, "{answers:?}");
        assert_eq!(racers[got[0]].ask(&format!("free {}", answers[got[0]])), "error 0");
    }
}

#[test]
fn managed_memory_is_not_counted() {
    let node = TestNode::up(DRIVER_WITH_LIMITS);
    let mut program = node.start_program();
    assert!(node.set_limit(&node.write_cgroup("one", &[&program]), Some(1000)));
    assert_ne!(program.ask("managed 3000"), REFUSED);
    assert_eq!(node.info(&mut program), (700, 1000));
    assert_eq!(node.sim_node.processes(0), [(program.pid(), 3300)]);
    assert_eq!(program.ask("alloc 701"), REFUSED);
}

#[test]
fn older_driver_has_no_limits() {
    let node = TestNode::up(DRIVER_WITHOUT_LIMITS);
    let mut program = node.start_program();
    assert!(!node.set_limit(&node.write_cgroup("one", &[&program]), Some(1000)));
    assert_ne!(program.ask("alloc 4000"), REFUSED);
}

/// A real cgroup of the kernel, where the test runs as root with cgroup v2.
struct Cgroup(PathBuf);

impl Cgroup {
    fn create() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
        let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let root = fields
            .filter(|fields| fields.get(2) == Some(&"cgroup2"))
            .find_map(|fields| fields.get(1).copied());
        let cgroup = Path::new(root?).join(format!("divvy-sim-{}", std::process::id()));
        fs::create_dir(&cgroup).ok().map(|()| Self(cgroup))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its process may not have exited yet.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// Whether the kernel reports the cgroup of a process by its pidfd.
fn kernel_reports_cgroups() -> bool {
    let release = rustix::system::uname();
    let release = release.release().to_str().expect("text");
    let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(13))
}

/// Runs only as root on such a kernel; the other tests use directories instead.
#[test]
fn namespaces_and_missing_proc_do_not_hide_a_process() {
    if !kernel_reports_cgroups() || !rustix::process::geteuid().is_root() {
        return;
    }
    let Some(cgroup) = Cgroup::create() else { return };
    let node = TestNode::up(DRIVER_WITH_LIMITS);
    assert!(node.set_limit(&cgroup.0, Some(1000)));
    let test = std::env::current_exe().expect("this test");
    let script = r#"echo $$ > "$0/cgroup.procs" && exec unshare --cgroup --mount --pid --fork --kill-child \
        sh -c 'mount -t tmpfs none /proc && exec "$0" "$@"' "$@""#;
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(&cgroup.0).arg(test);
    let mut program = Program::start(command, &node.sim_node.library());
    assert_eq!(program.ask("start"), "done");
    assert_eq!(node.info(&mut program), (700, 1000));
    assert_eq!(program.ask("alloc 701"), REFUSED);
    assert_eq!(program.ask("fill"), "700");
    drop(program);
}
