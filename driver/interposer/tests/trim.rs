//! Trim requests: pools release unused memory when the node requests it, even in an idle program.
#![allow(unsafe_code, reason = "a page is mapped as the node maps it")]

mod common;

use common::container::{MIB, Node, Share, key};
use divvy_pages::policy::{self, Memory};
use divvy_pages::{Flags, Policy, PolicyPage, account};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Entry point of the programs in the containers.
#[test]
fn scenario_program() {
    common::container::guest();
}

/// Threads of a test program, and how many of them block all signals; then with the trim thread.
const THREADS_WITHOUT_TRIM: &str = "2 0";
const THREADS_WITH_TRIM: &str = "3 1";

fn overcommitted(node: &Node) -> Policy {
    let policy = node.policy(0, 3000);
    let memory = Memory { soft: 1000 * MIB, overcommit: 3000 * MIB, ..policy.memory };
    Policy { memory, flags: policy.flags.with(Flags::UVM), ..policy }
}

/// Requests a trim, as the node does.
fn request_trim(share: &Share) {
    let file = File::options().read(true).write(true).open(share.directory.join("policy")).expect("a page");
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a file that is never truncated, and a system call that wakes its
    // waiters.
    unsafe {
        let at =
            libc::mmap(std::ptr::null_mut(), policy::SIZE, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
        let page = PolicyPage::at(at.cast(), policy::SIZE).expect("a page");
        page.trim().fetch_add(1, Ordering::SeqCst);
        libc::syscall(libc::SYS_futex, page.trim().as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        libc::munmap(at, policy::SIZE);
    }
}

fn wait_until(what: &str, mut seen: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !seen() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Unused pool bytes that the share's processes report.
fn unused_bytes(share: &Share) -> u64 {
    let page = std::fs::read(share.directory.join("account")).expect("an account page");
    account::Snapshot::new(&page)
        .expect("a page of this version")
        .slots()
        .map(|slot| slot.idle_pool_bytes)
        .sum()
}

#[test]
fn idle_program_serves_trim_requests() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", overcommitted(&node));
    let container = node.container(std::slice::from_ref(&share));
    let mut program = container.started();
    // A request before any pool exists.
    request_trim(&share);
    assert_eq!(program.ask("threads"), THREADS_WITHOUT_TRIM);
    let own = key(&program.ask("pool 0"));
    for round in 0..3 {
        let keys = [program.ask("alloc async 300"), program.ask(&format!("alloc pool 300 {own}"))]
            .map(|it| key(&it));
        assert_eq!(program.ask("threads"), THREADS_WITH_TRIM, "one more");
        let [freed, kept] = &keys;
        assert_eq!(program.ask(&format!("free async {freed}")), "0");
        let before = share.used_mib();
        assert!(before >= 600, "{before} MiB");
        request_trim(&share);
        wait_until("pools are not trimmed", || share.used_mib() < 320);
        assert!(share.used_mib() >= 300, "what is in use stays");
        wait_until("unused bytes are not reported", || unused_bytes(&share) < 32 * MIB);
        assert_eq!(program.ask(&format!("free async {kept}")), "0", "round {round}");
        request_trim(&share);
        wait_until("pools are not trimmed", || share.used() == 0);
    }
    assert_eq!(program.ask(&format!("free pool {own}")), "0");
}

#[test]
fn forked_child_starts_its_own_trim_thread() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", overcommitted(&node));
    let mut program = node.container(std::slice::from_ref(&share)).started();
    key(&program.ask("alloc async 100"));
    assert_eq!(program.ask("fork threads"), "1 0");
    assert_eq!(program.ask("threads"), THREADS_WITH_TRIM);
}

#[test]
fn other_shares_trim_at_the_next_call_without_a_thread() {
    let node = Node::up("L4");
    let plain = node.share("claim", "share", node.policy(0, 1000));
    let mut program = node.container(std::slice::from_ref(&plain)).started();
    key(&program.ask("alloc async 100"));
    assert_eq!(program.ask("threads"), THREADS_WITHOUT_TRIM);
    // If a device has several shares, none overcommits.
    let shares = [("one", "a"), ("two", "b")].map(|(claim, id)| node.share(claim, id, overcommitted(&node)));
    let mut program = node.container(&shares).started();
    let used = || shares.iter().map(Share::used_mib).sum::<u64>();
    let own = key(&program.ask("pool 0"));
    let freed = key(&program.ask(&format!("alloc pool 500 {own}")));
    assert_eq!(
        (program.ask(&format!("free async {freed}")), program.ask("threads")),
        ("0".into(), THREADS_WITHOUT_TRIM.into())
    );
    request_trim(&shares[1]);
    key(&program.ask("alloc async 32"));
    assert_eq!(used(), 32, "the other pool is trimmed");
}
