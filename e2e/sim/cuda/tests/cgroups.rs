//! Limits that the GPU driver keeps by cgroup: whoever is in there gets no more, whatever it calls, and nobody else notices.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::*;

/// The first driver with such limits, and one before.
const WITH: &str = "615.10.01";
const WITHOUT: &str = "580.95.05";
const NO_LIMIT: u64 = u64::MAX;
const REFUSED: &str = "error 2";

#[test]
fn it_is_a_program_too() {
    common::scenario(|cuda, words| {
        let number = |word: &str| word.parse::<u64>().expect("a number");
        match words {
            ["alloc", mib] => shown(cuda.alloc(number(mib) * MIB)),
            ["free", address] => format!("error {}", cuda.free(number(address))),
            ["pool", mib] => {
                let mut address = 0_u64;
                let size = number(mib) * MIB;
                let code = call!(cuda.cuMemAllocAsync(&mut address => &mut u64, size => u64, 0 => usize));
                shown(answer(code, address))
            }
            ["managed", mib] => {
                let (mut address, size) = (0_u64, number(mib) * MIB);
                let code = call!(cuda.cuMemAllocManaged(&mut address => &mut u64, size => u64, 1 => u32));
                assert_eq!(code, SUCCESS);
                shown(answer(
                    call!(cuda.cuMemPrefetchAsync(address => u64, size => u64, 0 => i32, 0 => usize)),
                    address,
                ))
            }
            // MiB by MiB, as much as there is: how much that was.
            ["fill"] => (0_u64..).take_while(|_| cuda.alloc(MIB).is_ok()).count().to_string(),
            ["info"] => {
                let (free, total) = cuda.info().expect("information");
                format!("{} {}", free / MIB, total / MIB)
            }
            other => panic!("no scenario {other:?}"),
        }
    });
}

fn shown(got: Result<u64, u32>) -> String {
    got.map_or_else(|code| format!("error {code}"), |address| address.to_string())
}

/// A node, and directories that play cgroups.
struct World {
    node: Node,
    tree: PathBuf,
}

impl World {
    fn up(driver: &str) -> Self {
        let node = Node::with("L4", |options| options.driver = driver.to_owned());
        let tree = node.dir.path().join("cgroups");
        Self { node, tree }
    }

    /// The processes of a cgroup.
    fn put(&self, name: &str, programs: &[&Program]) -> PathBuf {
        let cgroup = self.tree.join(name);
        fs::create_dir_all(&cgroup).expect("a directory");
        let pids: String = programs.iter().map(|program| format!("{}\n", program.pid())).collect();
        fs::write(cgroup.join("cgroup.procs"), pids).expect("a file");
        cgroup
    }

    fn limit(&self, cgroup: &Path, mib: Option<u64>) -> bool {
        let (soft, hard) = mib.map_or((0, NO_LIMIT), |mib| (mib * MIB, mib * MIB));
        let path = cgroup.to_str().expect("text");
        self.node.sim.update(|state| state.limit_cgroup(0, path, soft, hard)).is_ok()
    }

    fn started(&self) -> Program {
        let mut program = self.node.program();
        assert_eq!(program.ask("start"), "done");
        program
    }

    fn info(&self, program: &mut Program) -> (u64, u64) {
        let said = program.ask("info");
        let (free, total) = said.split_once(' ').expect("two numbers");
        (free.parse().expect("MiB"), total.parse().expect("MiB"))
    }
}

#[test]
fn each_container_has_its_own_limit_and_the_others_have_theirs() {
    let world = World::up(WITH);
    let (mut one, mut other, mut free) = (world.started(), world.started(), world.started());
    // A context of 300 MiB is the cgroup's too.
    assert!(world.limit(&world.put("pods/one", &[&one]), Some(1000)));
    assert!(world.limit(&world.put("pods/other", &[&other]), Some(2000)));
    let all = world.info(&mut free);
    assert!(all.0 > 5000, "{all:?}");
    assert_eq!((world.info(&mut one), world.info(&mut other)), ((700, 1000), (1700, 2000)));
    assert_eq!(one.ask("alloc 701"), REFUSED);
    assert_eq!(one.ask("fill"), "700");
    assert_eq!((one.ask("pool 1").as_str(), world.info(&mut one).0), (REFUSED, 0));
    assert_ne!(other.ask("pool 1024"), REFUSED);
    assert_eq!(other.ask("alloc 1000"), REFUSED);
    assert_ne!(free.ask("alloc 4000"), REFUSED);
}

#[test]
fn a_limit_is_raised_lowered_below_use_and_removed() {
    let world = World::up(WITH);
    let mut program = world.started();
    let cgroup = world.put("one", &[&program]);
    assert!(world.limit(&cgroup, Some(1000)));
    let held = program.ask("alloc 600");
    assert_eq!(program.ask("alloc 600"), REFUSED);
    assert!(world.limit(&cgroup, Some(2000)));
    let more = program.ask("alloc 600");
    assert_ne!(more, REFUSED);
    // What it has it keeps; it gets nothing until it is below.
    assert!(world.limit(&cgroup, Some(1200)));
    assert_eq!((program.ask("alloc 1").as_str(), world.info(&mut program)), (REFUSED, (0, 1200)));
    assert_eq!(program.ask(&format!("free {more}")), "error 0");
    assert_eq!((program.ask("alloc 301").as_str(), world.info(&mut program)), (REFUSED, (300, 1200)));
    assert_ne!(program.ask("alloc 300"), REFUSED);
    assert!(world.limit(&cgroup, None));
    assert_ne!(program.ask("alloc 4000"), REFUSED);
    assert_eq!(program.ask(&format!("free {held}")), "error 0");
    // With its cgroup it ends as well.
    assert!(world.limit(&cgroup, Some(300)));
    assert_eq!(program.ask("alloc 1"), REFUSED);
    fs::remove_dir_all(&cgroup).expect("removed");
    assert_ne!(program.ask("alloc 1"), REFUSED);
}

#[test]
fn a_cgroup_has_what_all_below_it_have() {
    let world = World::up(WITH);
    let (mut one, mut other) = (world.started(), world.started());
    let pod = world.put("pod", &[]);
    world.put("pod/one", &[&one]);
    world.put("pod/other", &[&other]);
    assert!(world.limit(&pod, Some(2000)));
    let total = world.info(&mut one).1;
    assert!(total > 2000, "the limit of a cgroup above is not what there is: {total}");
    assert_eq!(world.info(&mut one).0, 1400);
    assert_ne!(one.ask("alloc 1000"), REFUSED);
    assert_eq!(other.ask("alloc 401"), REFUSED);
    assert_ne!(other.ask("alloc 400"), REFUSED);
    // What somebody had who died is free, and what somebody has who moves goes with him.
    one.kill();
    assert_ne!(other.ask("alloc 900"), REFUSED);
    let mut third = world.started();
    world.put("pod/one", &[&third]);
    assert_eq!(third.ask("alloc 101"), REFUSED);
    world.put("pod/other", &[]);
    assert_ne!(other.ask("alloc 1"), REFUSED);
    assert_ne!(third.ask("alloc 1700"), REFUSED);
}

#[test]
fn of_two_who_want_the_last_byte_one_gets_it() {
    let world = World::up(WITH);
    let mut racers = [world.started(), world.started()];
    let [one, other] = &racers;
    assert!(world.limit(&world.put("one", &[one, other]), Some(600 + 100)));
    for _ in 0..200 {
        racers.iter_mut().for_each(|racer| racer.tell("alloc 60"));
        let said: Vec<String> = racers.iter_mut().map(Program::answer).collect();
        let got: Vec<usize> = (0..2).filter(|at| said[*at] != REFUSED).collect();
        assert_eq!(got.len(), 1, "{said:?}");
        assert_eq!(racers[got[0]].ask(&format!("free {}", said[got[0]])), "error 0");
    }
}

#[test]
fn managed_memory_is_not_counted() {
    let world = World::up(WITH);
    let mut program = world.started();
    assert!(world.limit(&world.put("one", &[&program]), Some(1000)));
    assert_ne!(program.ask("managed 3000"), REFUSED);
    assert_eq!(world.info(&mut program), (700, 1000));
    assert_eq!(world.node.processes(0), [(program.pid(), 3300)]);
    assert_eq!(program.ask("alloc 701"), REFUSED);
}

#[test]
fn an_older_driver_has_none() {
    let world = World::up(WITHOUT);
    let mut program = world.started();
    assert!(!world.limit(&world.put("one", &[&program]), Some(1000)));
    assert_ne!(program.ask("alloc 4000"), REFUSED);
}

/// A cgroup of the kernel's, where root and cgroup v2 are.
struct Cgroup(PathBuf);

impl Cgroup {
    fn make() -> Option<Self> {
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
        // Its process may be dying still.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// The kernel tells a process its cgroup by a handle on itself.
fn kernel_says_cgroups() -> bool {
    let release = rustix::system::uname();
    let release = release.release().to_str().expect("text");
    let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(13))
}

/// Only where root runs it, on a kernel that can: elsewhere the directories above must do.
#[test]
fn neither_namespaces_nor_a_missing_proc_hide_a_process_from_it() {
    if !kernel_says_cgroups() || !rustix::process::geteuid().is_root() {
        return;
    }
    let Some(cgroup) = Cgroup::make() else { return };
    let world = World::up(WITH);
    assert!(world.limit(&cgroup.0, Some(1000)));
    let test = std::env::current_exe().expect("this test");
    let script = r#"echo $$ > "$0/cgroup.procs" && exec unshare --cgroup --mount --pid --fork --kill-child \
        sh -c 'mount -t tmpfs none /proc && exec "$0" "$@"' "$@""#;
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(&cgroup.0).arg(test);
    let mut program = Program::start(command, &world.node.library());
    assert_eq!(program.ask("start"), "done");
    assert_eq!(world.info(&mut program), (700, 1000));
    assert_eq!(program.ask("alloc 701"), REFUSED);
    assert_eq!(program.ask("fill"), "700");
    drop(program);
}
