//! The state survives processes, is shared by all of them, and the trees agree with it.

mod common;

use common::Node;
use divvy_sim::code::Code;
use divvy_sim::state::Placement;
use divvy_sim::store::StoreError;
use divvy_sim::visible_devices::{cap_ci, cap_gi};
use divvy_sim::{Sim, SimError, State};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Duration;

/// If this variable is set to a root, a test of this file writes to its state forever.
const WRITER: &str = "DIVVY_SIM_TEST_WRITER";

fn mig_on(state: &mut State) -> Result<(), Code> {
    state.set_mig_mode(0, true).map(drop)
}

fn create(state: &mut State, start: u32) -> Result<(u32, u32), Code> {
    let gi = state.create_gi(0, 19, Some(Placement { start, size: 1 }))?;
    Ok((gi.id, state.create_ci(0, gi.id, 0, None)?.id))
}

/// Checks that capability files and nodes exist for the instances and for nothing else.
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
fn state_of_an_older_build_is_read() {
    let node = Node::create("L4");
    let path = node.sim.dir().join("state.json");
    let text = std::fs::read_to_string(&path).expect("a state");
    let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let mut remove = |place: &str, name: &str| {
        let object = json.pointer_mut(place).and_then(|place| place.as_object_mut()).expect("an object");
        assert!(object.remove(name).is_some(), "{place}/{name}");
    };
    for name in ["kernel_log", "module_loads", "unmounted", "migrates"] {
        remove("", name);
    }
    for name in ["node_delay_ms", "mig_mode_errors"] {
        remove("/host", name);
    }
    remove("/gpus/0", "energy");
    std::fs::write(&path, json.to_string()).expect("writable");
    let sim = node.reopen();
    sim.update(|state| state.xid(0, 79, None)).expect("a GPU");
    assert_eq!(sim.read().expect("a state").module_loads, 0);
}

#[test]
fn change_and_its_files_are_visible_to_all_processes() {
    let node = Node::create("H100-SXM5-80GB");
    let other = node.reopen();
    node.sim.update(mig_on).expect("idle");
    node.sim.update(|state| create(state, 0)).expect("free slices");
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
        .expect("an idle instance");
    assert!(!node.has("proc/driver/nvidia/capabilities/gpu0/mig/gi7"));
    check_tree(&node.sim);
}

#[test]
fn refused_change_writes_nothing() {
    let node = Node::create("H100-SXM5-80GB");
    let before = node.sim.read().expect("a state");
    let result = node.sim.update(|state| {
        state.gpus[0].persistence = true;
        create(state, 0)
    });
    assert!(matches!(result, Err(SimError::Refused(Code::NotSupported))), "{result:?}");
    assert_eq!(*node.reopen().read().expect("a state"), *before);
}

#[test]
fn update_without_change_writes_nothing() {
    let node = Node::create("L4");
    let before = node.sim.read().expect("a state").generation;
    node.sim.update(|_| Ok(())).expect("nothing to refuse");
    assert_eq!(node.sim.read().expect("a state").generation, before);
}

#[test]
fn concurrent_writers_lose_no_change() {
    const WRITES: u64 = 50;
    let node = Node::create("L4");
    let before = node.sim.read().expect("a state").events.last;
    std::thread::scope(|scope| {
        for sim in [node.reopen(), node.reopen()] {
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

/// Not a test: the program of the child that is killed.
#[test]
fn writer() {
    let Ok(root) = std::env::var(WRITER) else { return };
    let sim = Sim::open(root).expect("a simulator");
    for start in (0..7).cycle() {
        sim.update(|state| create(state, start)).expect("free slices");
        sim.update(|state| {
            let id = state.gpus[0].instances[0].id;
            state.destroy_ci(0, id, 0)?;
            state.destroy_gi(0, id)
        })
        .expect("an idle instance");
    }
}

#[test]
fn killed_writer_leaves_a_consistent_state() {
    let node = Node::create("H100-SXM5-80GB");
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
        // Killed during its work: after it has started, and at a different time in each round.
        while node.sim.read().expect("a state").generation <= last {
            assert!(child.try_wait().expect("a child").is_none(), "the writer ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(617 * round));
        child.kill().expect("alive");
        assert_eq!(child.wait().expect("a child").signal(), Some(9));
        let sim = node.reopen();
        check_tree(&sim);
        // The next writer starts from an empty GPU.
        sim.update(|state| state.reset(0, true)).expect("a GPU");
        check_tree(&sim);
        last = sim.read().expect("a state").generation;
    }
}

#[test]
fn outdated_trees_are_rendered_again() {
    let node = Node::create("H100-SXM5-80GB");
    node.sim.update(mig_on).expect("idle");
    let stray = node.sim.root().join("proc/driver/nvidia/capabilities/gpu0/mig/gi7");
    std::fs::create_dir_all(stray.join("ci0")).expect("writable");
    std::fs::write(stray.join("access"), "").expect("writable");
    std::fs::remove_file(node.sim.root().join("proc/devices")).expect("there");
    let half = node.sim.dir().join("state.json.new");
    std::fs::write(&half, "{\"format\":").expect("writable");
    let sim = node.reopen();
    assert!(!stray.exists() && node.has("proc/devices") && !half.exists());
    check_tree(&sim);
}

#[test]
fn container_sees_its_own_devices_only() {
    let node = Node::create("2xH100-SXM5-80GB");
    node.sim.update(mig_on).expect("idle");
    let (gi, ci) = node.sim.update(|state| create(state, 0)).expect("free slices");
    node.sim.update(|state| create(state, 1)).expect("free slices");
    let dev = node.dir.path().join("dev");
    std::fs::create_dir_all(dev.join("nvidia-caps")).expect("writable");
    for name in ["nvidiactl", "nvidia0", "nvidia-caps/nvidia-cap66", "nvidia-caps/nvidia-cap67"] {
        std::fs::write(dev.join(name), "").expect("writable");
    }
    let state = node.sim.read().expect("a state");
    let gpu = &state.gpus[0];
    let inside = divvy_sim::visible_devices::VisibleDevices::read(&dev);
    assert!(inside.has_ctl && inside.has_gi(gpu, gi) && inside.has_ci(gpu, gi, ci));
    assert!(!inside.has_gi(gpu, 8) && !inside.can_configure_mig());
    assert_eq!(inside.slots(&state), [0]);
    let host = node.sim.visible_devices();
    assert!(host.has_gi(gpu, 8) && host.can_configure_mig());
    assert_eq!(host.slots(&state), [0, 1]);
}

#[test]
fn damaged_state_is_refused_with_its_path() {
    let check = |text: Option<&str>, expected: fn(&StoreError) -> bool, code: Code| {
        let node = Node::create("L4");
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
fn root_is_found_from_any_file_in_it() {
    let node = Node::create("L4");
    let found = Sim::from_library_path(&node.sim.library("libnvidia-ml.so.1")).expect("a simulator");
    assert_eq!(found.root(), node.sim.root());
}
