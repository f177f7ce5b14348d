//! Which pages are trusted. A container with untrusted pages gets no memory; without pages the
//! library changes nothing.

mod common;

use common::container::{Container, Node, Share};

/// Entry point of the programs in the containers.
#[test]
fn scenario_program() {
    common::container::guest();
}

/// Checks whether a program in the container can allocate 100 of 23,034 MiB, and which total it
/// sees.
fn check(container: &Container<'_>, allocated: bool, total: &str) {
    let mut program = container.program();
    let answers = [program.ask("start 0"), program.ask("alloc v2 100")];
    assert_eq!(answers[0] == "ok" && answers[1].starts_with("ok "), allocated, "{answers:?}");
    let seen = program.ask("total 0");
    assert!(seen.ends_with(&format!(" {total}")), "{seen}");
}

const DEVICE_TOTAL_MIB: &str = "22562";
const SHARE_TOTAL_MIB: &str = "1000";

fn node() -> (Node, Share) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    (node, share)
}

#[test]
fn without_pages_calls_go_to_the_driver() {
    let (node, _) = node();
    check(&node.container(&[]), true, DEVICE_TOTAL_MIB);
    // The library's directory and a stray file are not pages.
    check(
        &node.container(&[]).with("mkdir -p /run/divvy/lib/real; touch /run/divvy/lib/real/x /run/divvy/x"),
        true,
        DEVICE_TOTAL_MIB,
    );
}

#[test]
fn mounted_read_only_pages_are_trusted() {
    let (node, share) = node();
    check(&node.container(&[share]), true, SHARE_TOTAL_MIB);
}

#[test]
fn unmounted_page_is_not_trusted() {
    let (node, share) = node();
    let copy = format!("mkdir -p /run/divvy/c/s; cp {}/* /run/divvy/c/s/", share.directory.display());
    check(&node.container(&[]).with(&copy), false, DEVICE_TOTAL_MIB);
    // Not even on a read-only filesystem, as in an image.
    check(&node.container(&[]).with(&copy).with("mount -o remount,ro /run"), false, DEVICE_TOTAL_MIB);
}

#[test]
fn symlinked_page_counts_once() {
    let (node, share) = node();
    let again = "ln -s share /run/divvy/claim/again; ln -s claim /run/divvy/other;
        mkdir /run/divvy/claim/third; ln -s ../share/policy /run/divvy/claim/third/policy";
    let container = node.container(&[share]).with(again);
    check(&container, true, SHARE_TOTAL_MIB);
    let mut program = container.program();
    assert_eq!(program.ask("block-syscall openat2"), "ok");
    assert_eq!([program.ask("start 0"), program.ask("total 0")], ["ok", "1000 1000"]);
}

#[test]
fn writable_policy_is_not_trusted() {
    let (node, share) = node();
    let open = "mount -o remount,bind,rw,nosuid,nodev,noexec /run/divvy/claim/share/policy";
    check(&node.container(&[share]).with(open), false, DEVICE_TOTAL_MIB);
}

#[test]
fn invalid_policy_page_is_not_trusted() {
    let (node, share) = node();
    std::fs::write(share.directory.join("policy"), [0; 4096]).expect("a page of zeros");
    check(&node.container(std::slice::from_ref(&share)), false, DEVICE_TOTAL_MIB);
    std::fs::write(share.directory.join("policy"), []).expect("an empty page");
    check(&node.container(&[share]), false, DEVICE_TOTAL_MIB);
}

#[test]
fn policy_without_an_account_denies_allocations() {
    let (node, share) = node();
    check(&node.container(&[share]).with("umount /run/divvy/claim/share/account"), false, DEVICE_TOTAL_MIB);
}

/// An untrusted page adds nothing to a trusted one.
#[test]
fn forged_page_does_not_raise_the_limit() {
    let (node, share) = node();
    let large = node.share("other", "share", node.policy(0, 20000));
    let forged =
        format!("mkdir -p /run/divvy/other/s; cp {}/* /run/divvy/other/s/", large.directory.display());
    check(&node.container(&[share]).with(&forged), true, SHARE_TOTAL_MIB);
}

#[test]
fn environment_does_not_change_the_limit() {
    let (node, share) = node();
    let set =
        "export CUDA_DEVICE_MEMORY_LIMIT=20g CUDA_DISABLE_CONTROL=true DIVVY_LIMIT=0 LD_LIBRARY_PATH=/tmp";
    check(&node.container(&[share]).with(set), true, SHARE_TOTAL_MIB);
}
