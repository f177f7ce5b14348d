//! The first steps of every program: initialise, see devices, create a context, allocate; and their
//! effect for others.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use common::*;
use divvy_sim::Code;

/// The commands of the child process.
#[test]
fn scenario_program() {
    common::scenario(|cuda, words| match words {
        ["count"] => format!("{:?}", cuda.count()),
        ["name"] => format!("{:?}", cuda.name(0)),
        ["current"] => {
            cuda.make_current(0);
            "done".to_owned()
        }
        ["alloc", mib] => match cuda.alloc(mib.parse::<u64>().expect("a number") * MIB) {
            Ok(address) => address.to_string(),
            Err(code) => format!("error {code}"),
        },
        ["free", address] => cuda.free(address.parse().expect("a number")).to_string(),
        ["info"] => format!("{:?}", cuda.info()),
        // Runs until it is killed.
        ["churn"] => {
            println!("> begun");
            let mut kept = std::collections::VecDeque::new();
            for size in (1..64).cycle() {
                kept.push_back(cuda.alloc(size * 4096).expect("memory"));
                if kept.len() > 16 {
                    assert_eq!(kept.pop_front().map(|address| cuda.free(address)), Some(SUCCESS));
                }
            }
            String::new()
        }
        other => panic!("unknown command {other:?}"),
    });
}

#[test]
fn calls_before_init_fail() {
    let node = Node::up("2xL4");
    let mut program = node.program();
    assert_eq!(program.ask("count"), format!("Err({NOT_INITIALIZED})"));
    assert_eq!(program.ask("info"), format!("Err({NOT_INITIALIZED})"));
    assert_eq!(program.ask("init"), "0");
    assert_eq!(program.ask("count"), "Ok(2)");
    assert_eq!(program.ask("info"), format!("Err({INVALID_CONTEXT})"));
    assert_eq!(program.ask("alloc 1"), format!("error {INVALID_CONTEXT}"));
}

#[test]
fn memory_is_counted_and_refunded() {
    let node = Node::up("L4");
    let cuda = node.cuda();
    let (before, total) = cuda.info().expect("information");
    assert_eq!(total, (23034 - 472) * MIB);
    assert_eq!(before, total - CONTEXT);
    let one = cuda.alloc(1).expect("memory");
    assert_eq!(cuda.info(), Ok((before - 512, total)));
    let two = cuda.alloc(64 * MIB).expect("memory");
    assert_eq!(cuda.info(), Ok((before - 512 - 64 * MIB, total)));
    assert_eq!(cuda.alloc(before), Err(OUT_OF_MEMORY));
    assert_eq!((cuda.free(two), cuda.free(two)), (SUCCESS, INVALID_VALUE));
    assert_eq!((cuda.free(one + 1), cuda.free(0), cuda.free(one)), (INVALID_VALUE, SUCCESS, SUCCESS));
    assert_eq!(cuda.alloc(before).map(|address| cuda.free(address)), Ok(SUCCESS));
    assert_eq!(cuda.alloc(0), Err(INVALID_VALUE));
    // Releasing the last reference destroys everything in the context.
    cuda.alloc(MIB).expect("memory");
    assert_eq!(node.processes(0), [(std::process::id(), 301)]);
    assert_eq!(cuda.release(0), SUCCESS);
    assert_eq!(node.processes(0), []);
}

#[test]
fn usage_is_visible_and_gone_after_a_kill() {
    let node = Node::up("L4");
    let mut first = node.program();
    let mut second = node.program();
    for program in [&mut first, &mut second] {
        assert_eq!((program.ask("init"), program.ask("current")), ("0".to_owned(), "done".to_owned()));
    }
    first.ask("alloc 1000");
    second.ask("alloc 20000");
    let mut expected = vec![(first.pid(), 1300), (second.pid(), 20300)];
    expected.sort_unstable();
    let mut seen = node.processes(0);
    seen.sort_unstable();
    assert_eq!(seen, expected);
    assert_eq!(first.ask("alloc 1000"), format!("error {OUT_OF_MEMORY}"));
    second.kill();
    assert_ne!(first.ask("alloc 1000"), format!("error {OUT_OF_MEMORY}"));
    assert_eq!(node.processes(0), [(first.pid(), 2300)]);
    // The usage is never written to the state file.
    first.kill();
    node.sim.update(|state| state.set_recovery_action(0, 0)).expect("a change");
    assert_eq!(node.processes(0), []);
}

#[test]
fn usage_is_exact_after_kills_at_any_moment() {
    let node = Node::up("L4");
    let cuda = node.cuda();
    for round in 0..20 {
        let mut churners = [node.program(), node.program(), node.program()];
        for program in &mut churners {
            program.ask("init");
            program.ask("current");
            assert_eq!(program.ask("churn"), "begun");
        }
        // A different moment in each round.
        std::thread::sleep(std::time::Duration::from_micros(round * 373 % 2000));
        churners.iter_mut().for_each(Program::kill);
        assert_eq!(node.processes(0), [(std::process::id(), 300)]);
        let (free, total) = cuda.info().expect("information");
        assert_eq!(total - free, CONTEXT, "round {round}");
    }
}

#[test]
fn gpu_with_a_cuda_process_is_in_use() {
    let node = Node::up("H100-SXM5-80GB");
    let mut program = node.program();
    program.ask("init");
    program.ask("current");
    let reset = |force| node.sim.update(|state| state.reset(0, force)).map_err(Code::from);
    assert_eq!(reset(false), Err(Code::InUse));
    assert_eq!(node.sim.update(|state| state.set_mig_mode(0, true)).map_err(Code::from), Ok(Code::InUse));
    // A forced reset: the process loses its memory, and its next call fails.
    assert_eq!(reset(true), Ok(()));
    assert_eq!(node.processes(0), []);
    assert_eq!(program.ask("alloc 1"), format!("error {DEVICE_UNAVAILABLE}"));
}

#[test]
fn process_sees_one_instance_and_its_memory() {
    let node = Node::up("H100-SXM5-80GB");
    node.sim
        .update(|state| {
            state.set_mig_mode(0, true)?;
            let gi = state.create_gi(0, 19, None)?;
            state.create_ci(0, gi.id, 0, None)?;
            let gi = state.create_gi(0, 19, None)?;
            state.create_ci(0, gi.id, 0, None).map(drop)
        })
        .expect("two instances");
    let mut program = node.program();
    assert_eq!((program.ask("init"), program.ask("count")), ("0".to_owned(), "Ok(1)".to_owned()));
    assert_eq!(program.ask("name"), "Ok(\"NVIDIA H100 80GB HBM3 MIG 1g.10gb\")");
    program.ask("current");
    assert_eq!(program.ask("info"), format!("Ok(({}, {}))", 9984 * MIB - CONTEXT, 9984 * MIB));
    assert_eq!(program.ask("alloc 9700"), format!("error {OUT_OF_MEMORY}"));
    let state = node.sim.read().expect("a state");
    let gi = state.gpus[0].instances[0].id;
    assert_eq!(state.gpus[0].processes[0].instance, Some((gi, 0)));
    assert_eq!(state.gpus[0].used_mib(Some(gi)), 300);
}

#[test]
fn environment_selects_devices() {
    let node = Node::up("3xL4");
    let uuid = node.sim.read().expect("a state").gpus[2].uuid.clone();
    let count = |value: &str| {
        let mut program = node.program_with(&[("CUDA_VISIBLE_DEVICES", value)]);
        (program.ask("init"), program.ask("count"))
    };
    let devices = |count: u32| ("0".to_owned(), format!("Ok({count})"));
    assert_eq!(count("1"), devices(1));
    assert_eq!(count(&format!("{uuid},0")), devices(2));
    assert_eq!(count(&format!("{},0", &uuid[..12])), devices(2));
    assert_eq!(count("0,7,1"), devices(1));
    assert_eq!(count("").0, NO_DEVICE.to_string());
}

#[test]
fn child_after_a_fork_is_not_initialised() {
    let node = Node::up("L4");
    let cuda = node.cuda();
    // SAFETY: the child only calls the library and leaves by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            let refused = [cuda.init(), cuda.alloc(1).err().unwrap_or(0), cuda.count().err().unwrap_or(0)];
            // SAFETY: leaves at once.
            unsafe { libc::_exit(i32::from(refused != [NOT_INITIALIZED; 3])) }
        }
        child => {
            let mut status = -1;
            // SAFETY: waits for the child just created.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0);
        }
    }
    assert_eq!(node.processes(0), [(std::process::id(), 300)]);
}
