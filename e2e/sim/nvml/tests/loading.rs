//! Loading the library twice, from two simulators, in threads, and in a child after a fork.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::*;

#[test]
fn file_loaded_twice_is_one_library() {
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
fn process_can_load_the_libraries_of_two_simulators() {
    let (first, second) = (Node::up("L4"), Node::up("2xH100-SXM5-80GB"));
    let (left, right) = (first.client(), second.client());
    assert_eq!((left.count(), right.count()), (Ok(1), Ok(2)));
    assert_eq!(left.name(left.device(0).expect("a GPU")).as_deref(), Ok("NVIDIA L4"));
    assert_eq!(right.name(right.device(1).expect("a GPU")).as_deref(), Ok("NVIDIA H100 80GB HBM3"));
}

#[test]
fn library_can_be_loaded_again_after_unloading() {
    let node = Node::up("L4");
    for _ in 0..3 {
        let client = node.client();
        assert_eq!(client.count(), Ok(1));
        assert_eq!(client.shutdown(), SUCCESS);
    }
}

/// Repeatedly creates and destroys an instance in one slice of the GPU.
fn churn(client: &Client, gpu: Device, start: u32) {
    for _ in 0..20 {
        let (gi, ci) = client.instance(gpu, 19, 0, (start, 1));
        let info = client.ci_info(ci).expect("information");
        assert_eq!(client.gi_id(Device(info.device)), Ok(7 + start));
        assert_eq!((client.destroy_ci(ci), client.destroy_gi(gi)), (SUCCESS, SUCCESS));
    }
}

#[test]
fn threads_share_the_library() {
    let node = Node::up("2xH100-SXM5-80GB");
    let client = node.client();
    for index in 0..2 {
        assert_eq!(client.set_mig_mode(client.device(index).expect("a GPU"), 1), Ok(SUCCESS));
    }
    std::thread::scope(|scope| {
        for thread in 0..6 {
            // Each thread has its own client. Handles are values and valid in all of them.
            let client = node.loaded();
            scope.spawn(move || churn(&client, client.device(thread % 2).expect("a GPU"), thread));
        }
    });
    assert_eq!(
        node.sim.read().expect("a state").gpus.iter().map(|gpu| gpu.instances.len()).sum::<usize>(),
        0
    );
}

/// Runs `body` in a child process. Returns its result.
fn in_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `body` and exits with `_exit`; it does not wait for the parent's other
    // threads.
    match unsafe { libc::fork() } {
        0 => {
            let succeeded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
            // SAFETY: exits immediately.
            unsafe { libc::_exit(i32::from(!succeeded)) }
        }
        child => {
            let mut status = 0;
            // SAFETY: `child` is a child of this process, and `status` is writable for its state.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            status == 0
        }
    }
}

#[test]
fn forked_child_can_call_while_parent_threads_call() {
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

/// Ends the other thread, so that the test fails instead of hanging.
fn panic_after(done: &AtomicBool) -> bool {
    done.store(true, Ordering::Relaxed);
    false
}

#[test]
fn instances_outlive_the_process_that_created_them() {
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
