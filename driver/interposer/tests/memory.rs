//! The memory limit for every allocating function, on the simulated driver. Allocations succeed up
//! to the limit; above it they return CUDA_ERROR_OUT_OF_MEMORY and leave outputs untouched. Every
//! free refunds.

mod common;

use common::container::{Node, key};
use common::program::Program;
use std::io::Read;
use std::process::Stdio;

/// Entry point of the programs in the containers.
#[test]
fn scenario_program() {
    common::container::guest();
}

/// A GPU with one share of 1,000 MiB and a program in its container.
fn shared(test: impl FnOnce(&mut Program, &dyn Fn() -> u64)) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let container = node.container(std::slice::from_ref(&share));
    test(&mut container.started(), &|| share.used_mib());
}

/// Checks one way to allocate: the whole limit is granted, one MiB more is refused, and each way to
/// free refunds it.
fn check(allocate: &str, frees: &[&str]) {
    shared(|program, used| {
        let error = program.ask(&format!("alloc {allocate} 1001"));
        assert_eq!(error, "error 2", "{allocate}: more than the limit");
        for free in frees {
            let made = key(&program.ask(&format!("alloc {allocate} 1000")));
            assert_eq!(used(), 1000, "{allocate}");
            assert_eq!(program.ask(&format!("alloc {allocate} 1")), "error 2", "{allocate}: one more");
            assert_eq!(program.ask(&format!("free {free} {made}")), "0", "{allocate}, {free}");
            assert_eq!(used(), 0, "{allocate}, {free}");
        }
    });
}

#[test]
fn linear_memory_is_limited() {
    check("v2", &["v2", "async", "async-ptsz"]);
}

#[test]
fn pitched_memory_is_limited() {
    check("pitch", &["v2", "async"]);
}

#[test]
fn managed_memory_is_limited() {
    check("managed", &["v2"]);
}

#[test]
fn memory_through_get_proc_address_is_limited() {
    check("proc", &["v2"]);
}

#[test]
fn memory_through_dlmopen_is_limited() {
    check("dlmopen", &["v2"]);
}

#[test]
fn physical_memory_is_limited() {
    check("create", &["release"]);
}

#[test]
fn arrays_are_limited() {
    check("array", &["array"]);
    check("array3d", &["array"]);
    check("mipmap", &["mipmap"]);
}

#[test]
fn cuda_2_variants_are_limited() {
    shared(|program, used| {
        for way in ["v1", "pitch-v1", "array-v1", "array3d-v1"] {
            assert_eq!(program.ask(&format!("alloc {way} 1001")), "error 2", "{way}");
        }
        assert_eq!(used(), 0);
    });
}

/// Pinned host memory does not belong to the device.
#[test]
fn pinned_memory_is_not_charged() {
    shared(|program, used| {
        key(&program.ask("alloc v2 1000"));
        let pinned = key(&program.ask("alloc host 64"));
        assert_eq!(used(), 1000);
        assert_eq!(program.ask(&format!("free host {pinned}")), "0");
    });
}

#[test]
fn program_sees_the_share_as_the_device() {
    shared(|program, _| {
        assert_eq!(program.ask("info"), "1000 1000");
        assert_eq!(program.ask("total 0"), "1000 1000");
        let made = key(&program.ask("alloc v2 300"));
        assert_eq!(program.ask("info"), "700 1000");
        assert_eq!(program.ask("info v1"), "700 1000");
        program.ask(&format!("free v2 {made}"));
        assert_eq!(program.ask("info"), "1000 1000");
    });
}

/// A handle's memory exists while a reference or a mapping does.
#[test]
fn mapped_memory_outlives_its_handle() {
    shared(|program, used| {
        let handle = key(&program.ask("alloc create 600"));
        let address = key(&program.ask("reserve 1200"));
        assert_eq!(program.ask(&format!("map {address} 600 {handle}")), "0");
        assert_eq!(program.ask(&format!("free release {handle}")), "0");
        assert_eq!(used(), 600, "released, and mapped");
        assert_eq!(program.ask("alloc create 600"), "error 2");
        let again = key(&program.ask(&format!("retain {address}")));
        assert_eq!(program.ask(&format!("unmap {address} 600")), "0");
        assert_eq!(used(), 600, "unmapped, and retained");
        assert_eq!(program.ask(&format!("free release {again}")), "0");
        assert_eq!(used(), 0);
    });
}

/// A share of 1,024 MiB (pools grow by 32 MiB).
fn pooled(test: impl FnOnce(&mut Program, &dyn Fn() -> u64)) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1024));
    let container = node.container(std::slice::from_ref(&share));
    test(&mut container.started(), &|| share.used_mib());
}

#[test]
fn stream_ordered_memory_is_limited() {
    pooled(|program, used| {
        for (allocate, free) in
            [("async", "async"), ("async-ptsz", "async-ptsz"), ("async", "v2"), ("async-ptsz", "v2")]
        {
            assert_eq!(program.ask(&format!("alloc {allocate} 1025")), "error 2", "{allocate}");
            let made = key(&program.ask(&format!("alloc {allocate} 1024")));
            assert_eq!(used(), 1024, "{allocate}");
            assert_eq!(program.ask(&format!("alloc {allocate} 1")), "error 2", "{allocate}: one more");
            assert_eq!(program.ask("alloc v2 1"), "error 2", "{allocate}: one more");
            assert_eq!(program.ask(&format!("free {free} {made}")), "0", "{allocate}, {free}");
        }
    });
}

#[test]
fn memory_of_an_explicit_pool_is_limited() {
    pooled(|program, used| {
        for allocate in ["pool", "pool-ptsz"] {
            let pool = key(&program.ask("pool 0"));
            assert_eq!(program.ask(&format!("alloc {allocate} 1025 {pool}")), "error 2");
            let made = key(&program.ask(&format!("alloc {allocate} 1024 {pool}")));
            assert_eq!(used(), 1024);
            assert_eq!(program.ask(&format!("alloc {allocate} 1 {pool}")), "error 2");
            assert_eq!(program.ask(&format!("free async {made}")), "0");
            assert_eq!(program.ask("synchronize"), "0");
            assert_eq!(program.ask(&format!("trim {pool}")), "0");
            assert_eq!(used(), 0, "trimmed");
            let made = key(&program.ask(&format!("alloc {allocate} 100 {pool}")));
            assert_eq!(program.ask(&format!("free async {made}")), "0");
            assert!(used() >= 100, "kept: {}", used());
            assert_eq!(program.ask(&format!("free pool {pool}")), "0");
            assert_eq!(used(), 0, "destroyed");
        }
    });
}

/// The driver keeps memory that was allocated from a pool after the pool is destroyed.
#[test]
fn memory_outlives_its_destroyed_pool() {
    pooled(|program, used| {
        let pool = key(&program.ask("pool 0"));
        key(&program.ask(&format!("alloc pool 600 {pool}")));
        assert_eq!(program.ask(&format!("free pool {pool}")), "0");
        assert_eq!(used(), 600);
        assert_eq!(program.ask("alloc v2 425"), "error 2");
        let pool = key(&program.ask("pool 0"));
        assert_eq!(program.ask(&format!("alloc pool 425 {pool}")), "error 2");
        key(&program.ask(&format!("alloc pool 416 {pool}")));
        assert_eq!(used(), 1016);
    });
}

/// A pool keeps freed memory, which must not cause a refusal.
#[test]
fn pools_are_trimmed_before_a_refusal() {
    pooled(|program, used| {
        let made = key(&program.ask("alloc async 1024"));
        assert_eq!(program.ask(&format!("free async {made}")), "0");
        assert_eq!(program.ask("synchronize"), "0");
        let made = key(&program.ask("alloc v2 1024"));
        assert_eq!(used(), 1024);
        assert_eq!(program.ask("alloc async 1"), "error 2");
        assert_eq!(program.ask(&format!("free v2 {made}")), "0");
        key(&program.ask("alloc async 1024"));
    });
}

/// A share whose contexts are charged 300 MiB each.
fn with_contexts(test: impl FnOnce(&mut Program, &dyn Fn() -> u64)) {
    let node = Node::up("L4");
    let mut policy = node.policy(0, 1000);
    policy.memory.context = 300 << 20;
    let share = node.share("claim", "share", policy);
    let container = node.container(std::slice::from_ref(&share));
    test(&mut container.program(), &|| share.used_mib());
}

#[test]
fn contexts_are_limited() {
    with_contexts(|program, used| {
        assert_eq!(program.ask("init"), "0");
        for way in ["v1", "v2", "v3", "v4", "gl", "gl-v1", "vdpau", "vdpau-v1"] {
            let made = [(); 3].map(|()| key(&program.ask(&format!("context {way} 0"))));
            assert_eq!(used(), 900, "{way}");
            assert_eq!(program.ask(&format!("context {way} 0")), "error 2", "{way}");
            assert_eq!(program.ask("context primary 0"), "error 2", "{way}");
            for (context, free) in made.iter().zip(["context", "context-v1", "context"]) {
                assert_eq!(program.ask(&format!("free {free} {context}")), "0", "{way}, {free}");
            }
            assert_eq!(used(), 0, "{way}");
        }
    });
}

#[test]
fn context_reset_refunds_its_memory() {
    with_contexts(|program, used| {
        assert_eq!(program.ask("start 0"), "ok");
        key(&program.ask("context primary 0"));
        assert_eq!(used(), 300, "a primary context is one, however often it is retained");
        for end in ["reset", "reset-v1"] {
            key(&program.ask("alloc v2 600"));
            key(&program.ask("alloc array 100"));
            assert_eq!(used(), 1000);
            assert_eq!(program.ask(&format!("free {end} 0")), "0");
            assert!(used() <= 300, "{end}: {}", used());
            assert_eq!(program.ask("start 0"), "ok", "{end}");
            assert_eq!(used(), 300, "{end}");
        }
    });
}

/// A green context is a reference to the primary context, and creates it if needed.
#[test]
fn green_contexts_are_charged_as_the_primary_context() {
    with_contexts(|program, used| {
        assert_eq!(program.ask("init"), "0");
        let made = [(); 2].map(|()| key(&program.ask("context green 0")));
        assert_eq!(used(), 300, "of both");
        key(&program.ask("context primary 0"));
        assert_eq!(used(), 300, "and of others");
        let more = [(); 2].map(|()| key(&program.ask("context v2 0")));
        assert_eq!(used(), 900);
        for (green, left) in made.iter().zip([900, 900]) {
            assert_eq!((program.ask(&format!("free green {green}")), used()), ("0".into(), left));
        }
        assert_eq!((program.ask("free primary 0"), used()), ("0".into(), 600), "the last use");
        key(&program.ask("context v2 0"));
        assert_eq!((program.ask("context green 0"), used()), ("error 2".into(), 900), "one more");
        assert_eq!(program.ask(&format!("free context {}", more[0])), "0");
        let green = key(&program.ask("context green 0"));
        assert_eq!((program.ask(&format!("free green {green}")), used()), ("0".into(), 600), "its only use");
    });
}

#[test]
fn primary_context_ends_with_its_last_release() {
    with_contexts(|program, used| {
        assert_eq!(program.ask("start 0"), "ok");
        key(&program.ask("context primary 0"));
        key(&program.ask("alloc v2 100"));
        assert_eq!(program.ask("free primary 0"), "0");
        assert_eq!(used(), 400, "one use is left");
        assert_eq!(program.ask("free primary-v1 0"), "0");
        assert_eq!(used(), 0);
    });
}

/// The limit covers all processes of a share. IPC memory is charged to its owner.
#[test]
fn processes_share_the_limit_and_pay_for_what_they_allocated() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let container = node.container(std::slice::from_ref(&share));
    let (mut one, mut two) = (container.started(), container.started());
    let made = key(&one.ask("alloc v2 600"));
    assert_eq!(two.ask("alloc v2 600"), "error 2");
    assert_eq!(two.ask("info"), "400 1000");
    let name = one.ask(&format!("export {made}"));
    let opened = key(&two.ask(&format!("import {name}")));
    assert_eq!(share.used_mib(), 600);
    key(&two.ask("alloc v2 400"));
    assert_eq!(two.ask(&format!("free import {opened}")), "0");
    assert_eq!(share.used_mib(), 1000);
}

#[test]
fn memory_of_a_killed_process_is_refunded() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let container = node.container(std::slice::from_ref(&share));
    let (mut one, mut two) = (container.started(), container.started());
    key(&one.ask("alloc v2 900"));
    one.kill();
    key(&two.ask("alloc v2 1000"));
    assert_eq!(share.used_mib(), 1000);
}

/// A child has its own slot, with only its own allocations.
#[test]
fn forked_child_is_charged_separately() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let container = node.container(std::slice::from_ref(&share));
    let mut program = container.program();
    let answer = program.ask("fork start 0 , alloc v2 600 , alloc v2 600 , info");
    let answers: Vec<&str> = answer.split(", ").collect();
    assert_eq!((answers[0], answers[2], answers[3]), ("ok", "error 2", "400 1000"));
    assert_eq!(program.ask("start 0"), "ok");
    key(&program.ask("alloc v2 1000"));
    assert_eq!(share.used_mib(), 1000, "the child's is gone with it");
    // CUDA does not work in a child of a process that has initialised it.
    program.ask("fork alloc v2 1");
    assert_eq!(share.used_mib(), 1000, "and the parent's is not the child's to give back");
}

/// Shares of one GPU in one container add up; shares of other GPUs are separate.
#[test]
fn shares_add_up_by_gpu() {
    let node = Node::up("3xL4");
    let shares = [
        node.share("one", "a", node.policy(0, 400)),
        node.share("one", "b", node.policy(0, 600)),
        node.share("two", "c", node.policy(1, 500)),
    ];
    let container = node.container(&shares);
    let mut program = container.started();
    let large = key(&program.ask("alloc v2 1000"));
    assert_eq!((shares[0].used_mib(), shares[1].used_mib(), shares[2].used_mib()), (400, 600, 0));
    assert_eq!(program.ask("alloc v2 1"), "error 2");
    assert_eq!(program.ask(&format!("free v2 {large}")), "0");
    assert_eq!((shares[0].used_mib(), shares[1].used_mib()), (0, 0));
    assert_eq!((program.ask("total 0"), program.ask("total 1")), ("1000 1000".into(), "500 500".into()));
    assert_eq!(program.ask("start 1"), "ok");
    assert_eq!((program.ask("alloc v2 501"), program.ask("info")), ("error 2".into(), "500 500".into()));
    // No page names the third GPU, so the container has all of it.
    assert_eq!(program.ask("start 2"), "ok");
    key(&program.ask("alloc v2 2000"));
    let whole = program.ask("total 2");
    assert!(whole.ends_with(" 22562"), "{whole}");
}

/// The other injection mode: the library replaces the driver's, which it needs.
#[test]
fn shims_hold_the_limit_without_preloading() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let container = node.container(std::slice::from_ref(&share)).with_shims();
    let mut program = container.started();
    for allocate in ["v2", "proc"] {
        assert_eq!(program.ask(&format!("alloc {allocate} 1001")), "error 2", "{allocate}");
        let made = key(&program.ask(&format!("alloc {allocate} 1000")));
        assert_eq!((share.used_mib(), program.ask("info")), (1000, "0 1000".to_owned()));
        assert_eq!(program.ask(&format!("free v2 {made}")), "0");
    }
}

/// Exceeds the limit twice in a program with this stderr. The program goes on afterwards.
fn exceed(stderr: Stdio, prepare: impl FnOnce(&mut Program)) -> Program {
    let node = Node::up("L4");
    let container = node.container(&[node.share("claim", "share", node.policy(0, 1000))]);
    let mut command = container.command(&std::env::current_exe().expect("this test"));
    command.stderr(stderr);
    let mut program = Program::start(command, &container.driver());
    prepare(&mut program);
    assert_eq!(program.ask("start 0"), "ok");
    key(&program.ask("alloc v2 600"));
    assert_eq!(program.ask("alloc v2 600"), "error 2");
    assert_eq!(program.ask("alloc async 600"), "error 2");
    key(&program.ask("alloc v2 400"));
    program.kill();
    program
}

#[test]
fn first_refusal_prints_one_line_on_stderr() {
    let mut program = exceed(Stdio::piped(), |_| ());
    let mut printed = String::new();
    let mut stderr = program.child.stderr.take().expect("piped");
    stderr.read_to_string(&mut printed).expect("text");
    assert_eq!(
        printed,
        "divvy: allocation of 600.0 MiB refused: 600.0 MiB of 1000.0 MiB used by 1 process; free memory, or \
         raise `memory` in the claim\n"
    );
}

#[test]
fn message_is_dropped_for_files_and_closed_pipes() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    exceed(file.reopen().expect("the file").into(), |_| ());
    assert_eq!(std::fs::read(file.path()).expect("the file"), b"");
    // SIGPIPE would end the program.
    exceed(Stdio::piped(), |program| drop(program.child.stderr.take()));
}
