//! The state outlives processes, is one for all of them, and the trees follow it.

mod common;

use common::Node;
use divvy_sim::code::Code;
use divvy_sim::state::Placement;
use divvy_sim::store::StoreError;
use divvy_sim::visible::{cap_ci, cap_gi};
use divvy_sim::{Failure, Sim, State};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Set to a root, it makes a test of this file a writer that never ends.
const WRITER: &str = "DIVVY_SIM_TEST_WRITER";

fn mig_on(state: &mut State) -> Result<(), Code> {
    state.set_mig_mode(0, true).map(drop)
}

fn create(state: &mut State, start: u32) -> Result<(u32, u32), Code> {
    let gi = state.create_gi(0, 19, Some(Placement { start, size: 1 }))?;
    Ok((gi.id, state.create_ci(0, gi.id, 0, None)?.id))
}

/// The capability files and nodes are those of the instances, no more and no fewer.
fn check_tree(sim: &Sim) {
    let state = sim.read().expect("a state");
    let names = |path: &str| -> Vec<String> {
        let entries = std::fs::read_dir(sim.root().join(path)).expect("a directory");
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect()
    };
    let mut caps = vec![1, 2];
    for (_, gpu) in state.listed() {
        let mut dirs = names(&format!("proc/driver/nvidia/capabilities/gpu{}/mig", gpu.minor));
        dirs.sort();
        let mut expected: Vec<String> = gpu.instances.iter().map(|gi| format!("gi{}", gi.id)).collect();
        expected.sort();
        assert_eq!(dirs, expected);
        for gi in &gpu.instances {
            caps.push(cap_gi(gpu.minor, gi.id));
            caps.extend(gi.cis.iter().map(|ci| cap_ci(gpu.minor, gi.id, ci.id)));
        }
    }
    let mut nodes: Vec<u32> = names("dev/nvidia-caps")
        .iter()
        .map(|name| name["nvidia-cap".len()..].parse().expect("a minor"))
        .collect();
    nodes.sort_unstable();
    caps.sort_unstable();
    assert_eq!(nodes, caps);
}

#[test]
fn a_change_is_seen_by_every_process_with_its_files() {
    let node = Node::up("H100-SXM5-80GB");
    let other = node.again();
    node.sim.update(mig_on).expect("idle");
    node.sim.update(|state| create(state, 0)).expect("room");
    let state = other.read().expect("a state");
    assert_eq!(state.gpus[0].instances.len(), 1);
    let access = "proc/driver/nvidia/capabilities/gpu0/mig/gi7/access";
    assert!(node.text(access).starts_with("DeviceFileMinor: 66\n"));
    assert!(node.text("proc/driver/nvidia-caps/mig-minors").contains("\ngpu0/gi7/access 66\n"));
    assert!(node.has("dev/nvidia-caps/nvidia-cap66") && node.has("dev/nvidia-caps/nvidia-cap67"));
    other
        .update(|state| {
            state.destroy_ci(0, 7, 0)?;
            state.destroy_gi(0, 7)
        })
        .expect("nobody runs there");
    assert!(!node.has("proc/driver/nvidia/capabilities/gpu0/mig/gi7"));
    check_tree(&node.sim);
}

#[test]
fn a_refusal_changes_nothing() {
    let node = Node::up("H100-SXM5-80GB");
    let before = node.sim.read().expect("a state");
    let result = node.sim.update(|state| {
        state.gpus[0].persistence = true;
        create(state, 0)
    });
    assert!(matches!(result, Err(Failure::Refused(Code::NotSupported))), "{result:?}");
    assert_eq!(*node.again().read().expect("a state"), *before);
}

#[test]
fn no_change_writes_nothing() {
    let node = Node::up("L4");
    let before = node.sim.read().expect("a state").generation;
    node.sim.update(|_| Ok(())).expect("nothing to refuse");
    assert_eq!(node.sim.read().expect("a state").generation, before);
}

#[test]
fn writers_of_several_processes_and_threads_lose_nothing() {
    const WRITES: u64 = 50;
    let node = Node::up("L4");
    let before = node.sim.read().expect("a state").events.last;
    std::thread::scope(|scope| {
        for sim in [node.again(), node.again()] {
            let sim = std::sync::Arc::new(sim);
            for _ in 0..2 {
                let sim = sim.clone();
                scope.spawn(move || {
                    for _ in 0..WRITES {
                        sim.update(|state| state.xid(0, 13, None)).expect("a GPU");
                    }
                });
            }
        }
    });
    assert_eq!(node.sim.read().expect("a state").events.last - before, 4 * WRITES);
}

/// Not a test of its own: what the killed child does.
#[test]
fn writer() {
    let Ok(root) = std::env::var(WRITER) else { return };
    let sim = Sim::open(root).expect("a simulator");
    for start in (0..7).cycle() {
        sim.update(|state| create(state, start)).expect("room");
        sim.update(|state| {
            let id = state.gpus[0].instances[0].id;
            state.destroy_ci(0, id, 0)?;
            state.destroy_gi(0, id)
        })
        .expect("nobody runs there");
    }
}

#[test]
fn a_writer_killed_at_any_moment_leaves_a_state_and_its_files() {
    let node = Node::up("H100-SXM5-80GB");
    node.sim.update(mig_on).expect("idle");
    let mut last = 0;
    for round in 0..12 {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "writer"])
            .env(WRITER, node.sim.root())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a child");
        // Killed in the midst of its work: once it has begun, after another while each time.
        while node.sim.read().expect("a state").generation <= last {
            assert!(child.try_wait().expect("a child").is_none(), "the writer ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(617 * round));
        child.kill().expect("alive");
        assert_eq!(child.wait().expect("a child").signal(), Some(9));
        let sim = node.again();
        check_tree(&sim);
        // The next writer starts from an empty GPU.
        sim.update(|state| state.reset(0, true)).expect("a GPU");
        check_tree(&sim);
        last = sim.read().expect("a state").generation;
    }
}

#[test]
fn trees_left_ahead_of_the_state_are_rendered_again() {
    let node = Node::up("H100-SXM5-80GB");
    node.sim.update(mig_on).expect("idle");
    let stray = node.sim.root().join("proc/driver/nvidia/capabilities/gpu0/mig/gi7");
    std::fs::create_dir_all(stray.join("ci0")).expect("writable");
    std::fs::write(stray.join("access"), "").expect("writable");
    std::fs::remove_file(node.sim.root().join("proc/devices")).expect("there");
    let half = node.sim.dir().join("state.json.new");
    std::fs::write(&half, "{\"format\":").expect("writable");
    let sim = node.again();
    assert!(!stray.exists() && node.has("proc/devices") && !half.exists());
    check_tree(&sim);
}

#[test]
fn a_container_sees_the_state_and_what_its_nodes_show() {
    let node = Node::up("2xH100-SXM5-80GB");
    node.sim.update(mig_on).expect("idle");
    let (gi, ci) = node.sim.update(|state| create(state, 0)).expect("room");
    node.sim.update(|state| create(state, 1)).expect("room");
    let dev = node.dir.path().join("dev");
    std::fs::create_dir_all(dev.join("nvidia-caps")).expect("writable");
    for name in ["nvidiactl", "nvidia0", "nvidia-caps/nvidia-cap66", "nvidia-caps/nvidia-cap67"] {
        std::fs::write(dev.join(name), "").expect("writable");
    }
    let state = node.sim.read().expect("a state");
    let gpu = &state.gpus[0];
    let inside = divvy_sim::visible::Visible::read(&dev);
    assert!(inside.ctl && inside.gi(gpu, gi) && inside.ci(gpu, gi, ci));
    assert!(!inside.gi(gpu, 8) && !inside.config());
    assert_eq!(inside.slots(&state), [0]);
    let host = node.sim.visible();
    assert!(host.gi(gpu, 8) && host.config());
    assert_eq!(host.slots(&state), [0, 1]);
}

#[test]
fn what_is_no_state_is_refused_with_its_path() {
    let check = |text: Option<&str>, expected: fn(&StoreError) -> bool, code: Code| {
        let node = Node::up("L4");
        let path = node.sim.dir().join("state.json");
        match text {
            Some(text) => std::fs::write(&path, text).expect("writable"),
            None => std::fs::remove_file(&path).expect("there"),
        }
        let error = Sim::open(node.sim.root()).expect_err("no state");
        assert!(expected(&error), "{error:?}");
        assert_eq!(Code::from(error), code);
    };
    check(None, |error| matches!(error, StoreError::Absent { .. }), Code::DriverNotLoaded);
    check(Some("{"), |error| matches!(error, StoreError::Damaged { .. }), Code::Unknown);
    check(Some(""), |error| matches!(error, StoreError::Damaged { .. }), Code::Unknown);
}

#[test]
fn a_root_is_found_from_any_file_in_it() {
    let node = Node::up("L4");
    let found = Sim::from_library_path(&node.sim.library("libnvidia-ml.so.1")).expect("a simulator");
    assert_eq!(found.root(), node.sim.root());
}
