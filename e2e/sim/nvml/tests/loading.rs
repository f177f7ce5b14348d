//! Loading: twice, two simulators at once, from threads, in a child after a fork.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::*;

#[test]
fn one_file_loaded_twice_is_one_library() {
    let node = Node::up("L4");
    let (first, second) = (node.client(), node.loaded());
    assert_eq!(second.count(), Ok(1));
    assert_eq!(second.init(), SUCCESS);
    assert_eq!(first.shutdown(), SUCCESS);
    assert_eq!(first.count(), Ok(1));
    assert_eq!(second.shutdown(), SUCCESS);
    assert_eq!(first.count(), Err(UNINITIALIZED));
}

#[test]
fn two_simulators_in_one_process_are_two_nodes() {
    let (first, second) = (Node::up("L4"), Node::up("2xH100-SXM5-80GB"));
    let (left, right) = (first.client(), second.client());
    assert_eq!((left.count(), right.count()), (Ok(1), Ok(2)));
    assert_eq!(left.name(left.device(0).expect("a GPU")).as_deref(), Ok("NVIDIA L4"));
    assert_eq!(right.name(right.device(1).expect("a GPU")).as_deref(), Ok("NVIDIA H100 80GB HBM3"));
}

#[test]
fn a_library_loaded_again_after_it_was_closed_works() {
    let node = Node::up("L4");
    for _ in 0..3 {
        let client = node.client();
        assert_eq!(client.count(), Ok(1));
        assert_eq!(client.shutdown(), SUCCESS);
    }
}

/// Creates and destroys an instance of its own slice of the GPU, again and again.
fn churn(client: &Client, gpu: Device, start: u32) {
    for _ in 0..20 {
        let (gi, ci) = client.instance(gpu, 19, 0, (start, 1));
        let info = client.ci_info(ci).expect("information");
        assert_eq!(client.gi_id(Device(info.device)), Ok(7 + start));
        assert_eq!((client.destroy_ci(ci), client.destroy_gi(gi)), (SUCCESS, SUCCESS));
    }
}

#[test]
fn threads_share_it() {
    let node = Node::up("2xH100-SXM5-80GB");
    let client = node.client();
    for index in 0..2 {
        assert_eq!(client.set_mig_mode(client.device(index).expect("a GPU"), 1), Ok(SUCCESS));
    }
    std::thread::scope(|scope| {
        for thread in 0..6 {
            // Each thread has a client of its own: handles are values, valid in all.
            let client = node.loaded();
            scope.spawn(move || churn(&client, client.device(thread % 2).expect("a GPU"), thread));
        }
    });
    assert_eq!(
        node.sim.read().expect("a state").gpus.iter().map(|gpu| gpu.instances.len()).sum::<usize>(),
        0
    );
}

/// Runs `body` in a child process; whether it said yes.
fn in_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `body` and leaves by `_exit`; nothing of the parent's other threads is waited for.
    match unsafe { libc::fork() } {
        0 => {
            let well = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
            // SAFETY: leaves at once.
            unsafe { libc::_exit(i32::from(!well)) }
        }
        child => {
            let mut status = 0;
            // SAFETY: `child` is a child of this process and `status` a place for its state.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            status == 0
        }
    }
}

#[test]
fn a_child_goes_on_with_it_while_threads_of_its_parent_call() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    assert_eq!(client.set_mig_mode(gpu, 1), Ok(SUCCESS));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = node.loaded();
        let done = &done;
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                churn(&busy, busy.device(0).expect("a GPU"), 0);
            }
        });
        for _ in 0..20 {
            let made = in_child(|| {
                let (gi, ci) = client.instance(gpu, 19, 0, (1, 1));
                client.count() == Ok(1)
                    && client.destroy_ci(ci) == SUCCESS
                    && client.destroy_gi(gi) == SUCCESS
            });
            assert!(made || panic_after(done));
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// Lets the other thread end, so that the test fails and does not hang.
fn panic_after(done: &AtomicBool) -> bool {
    done.store(true, Ordering::Relaxed);
    false
}

#[test]
fn what_one_process_makes_another_sees_and_it_outlives_its_maker() {
    let node = Node::up("H100-SXM5-80GB");
    assert!(in_child(|| {
        let client = node.client();
        let gpu = client.device(0).expect("a GPU");
        client.set_mig_mode(gpu, 1) == Ok(SUCCESS) && client.create_gi(gpu, 9, Some((4, 4))).is_ok()
    }));
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    let gi = client.gi(gpu, 2).expect("the instance");
    let info = client.gi_info(gi).expect("information");
    assert_eq!((info.profileId, info.placement.start, info.placement.size), (9, 4, 4));
}
