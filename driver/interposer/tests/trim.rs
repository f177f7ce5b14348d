//! What pools keep for nothing is given back when the node asks for it, also by a program that calls nothing.
#![allow(unsafe_code, reason = "a page is mapped as the node maps it")]

mod common;

use common::container::{MIB, Node, Share, key};
use divvy_pages::policy::{self, Memory};
use divvy_pages::{Flags, Policy, PolicyPage, account};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The programs in the containers.
#[test]
fn it_is_a_program_too() {
    common::container::guest();
}

/// Threads of a program that is a test, and how many of them hear no signal; and with the library's.
const FEW: &str = "2 0";
const MORE: &str = "3 1";

fn over_committed(node: &Node) -> Policy {
    let policy = node.policy(0, 3000);
    let memory = Memory { soft: 1000 * MIB, overcommit: 3000 * MIB, ..policy.memory };
    Policy { memory, flags: policy.flags.with(Flags::UVM), ..policy }
}

/// The node asks the share's processes to give back what they keep for nothing.
fn wish(share: &Share) {
    let file = File::options().read(true).write(true).open(share.directory.join("policy")).expect("a page");
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a file that nobody cuts short, and a system call that wakes those who wait on a word of it.
    unsafe {
        let at =
            libc::mmap(std::ptr::null_mut(), policy::SIZE, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
        let page = PolicyPage::at(at.cast(), policy::SIZE).expect("a page");
        page.trim().fetch_add(1, Ordering::SeqCst);
        libc::syscall(libc::SYS_futex, page.trim().as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        libc::munmap(at, policy::SIZE);
    }
}

fn until(what: &str, mut seen: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !seen() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that the share's processes say their pools keep for nothing.
fn idle(share: &Share) -> u64 {
    let page = std::fs::read(share.directory.join("account")).expect("an account page");
    account::Snapshot::new(&page).expect("a page of this version").slots().map(|slot| slot.idle).sum()
}

#[test]
fn a_program_that_calls_nothing_gives_back_what_its_pools_keep() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", over_committed(&node));
    let container = node.container(std::slice::from_ref(&share));
    let mut program = container.started();
    // Asked before there was anything to give.
    wish(&share);
    assert_eq!(program.ask("threads"), FEW);
    let own = key(&program.ask("pool 0"));
    for round in 0..3 {
        let keys = [program.ask("alloc async 300"), program.ask(&format!("alloc pool 300 {own}"))]
            .map(|it| key(&it));
        assert_eq!(program.ask("threads"), MORE, "one more");
        let [freed, kept] = &keys;
        assert_eq!(program.ask(&format!("free async {freed}")), "0");
        let before = share.used_mib();
        assert!(before >= 600, "{before} MiB");
        wish(&share);
        until("nothing is given back", || share.used_mib() < 320);
        assert!(share.used_mib() >= 300, "what is in use stays");
        until("the node is not told", || idle(&share) < 32 * MIB);
        assert_eq!(program.ask(&format!("free async {kept}")), "0", "round {round}");
        wish(&share);
        until("nothing is given back", || share.used() == 0);
    }
    assert_eq!(program.ask(&format!("free pool {own}")), "0");
}

#[test]
fn a_child_has_the_thread_once_it_allocates_itself() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", over_committed(&node));
    let mut program = node.container(std::slice::from_ref(&share)).started();
    key(&program.ask("alloc async 100"));
    assert_eq!(program.ask("fork threads"), "1 0");
    assert_eq!(program.ask("threads"), MORE);
}

#[test]
fn other_shares_have_no_thread_and_do_it_with_the_next_call() {
    let node = Node::up("L4");
    let plain = node.share("claim", "share", node.policy(0, 1000));
    let mut program = node.container(std::slice::from_ref(&plain)).started();
    key(&program.ask("alloc async 100"));
    assert_eq!(program.ask("threads"), FEW);
    // Of several shares of a device none is over-committed.
    let shares = [("one", "a"), ("two", "b")].map(|(claim, id)| node.share(claim, id, over_committed(&node)));
    let mut program = node.container(&shares).started();
    let used = || shares.iter().map(Share::used_mib).sum::<u64>();
    let own = key(&program.ask("pool 0"));
    let freed = key(&program.ask(&format!("alloc pool 500 {own}")));
    assert_eq!(
        (program.ask(&format!("free async {freed}")), program.ask("threads")),
        ("0".into(), FEW.into())
    );
    wish(&shares[1]);
    key(&program.ask("alloc async 32"));
    assert_eq!(used(), 32, "what the other pool kept is given back");
}
