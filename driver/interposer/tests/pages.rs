//! Which pages are believed. A container whose pages cannot be believed gets no memory; one without pages is no share,
//! and the library is not there for it.

mod common;

use common::container::{Container, Node, Share};

/// The programs in the containers.
#[test]
fn it_is_a_program_too() {
    common::container::guest();
}

/// What a program in a container of that kind gets of 23,034 MiB: 100 MiB, and a view of the whole or of a share.
fn check(container: &Container<'_>, allocated: bool, total: &str) {
    let mut program = container.program();
    let answers = [program.ask("start 0"), program.ask("alloc v2 100")];
    assert_eq!(answers[0] == "ok" && answers[1].starts_with("ok "), allocated, "{answers:?}");
    let seen = program.ask("total 0");
    assert!(seen.ends_with(&format!(" {total}")), "{seen}");
}

const WHOLE: &str = "22562";
const SHARE: &str = "1000";

fn node() -> (Node, Share) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    (node, share)
}

#[test]
fn without_pages_every_call_is_the_drivers() {
    let (node, _) = node();
    check(&node.container(&[]), true, WHOLE);
    // A library's directory and a stray file are no pages.
    check(
        &node.container(&[]).with("mkdir -p /run/divvy/lib/real; touch /run/divvy/lib/real/x /run/divvy/x"),
        true,
        WHOLE,
    );
}

#[test]
fn pages_that_are_mounted_one_by_one_and_read_only_are_believed() {
    let (node, share) = node();
    check(&node.container(&[share]), true, SHARE);
}

#[test]
fn a_page_that_lies_there_is_not_believed() {
    let (node, share) = node();
    let copy = format!("mkdir -p /run/divvy/c/s; cp {}/* /run/divvy/c/s/", share.directory.display());
    check(&node.container(&[]).with(&copy), false, WHOLE);
    // Nor where all around it is read-only, as an image's own files may be.
    check(&node.container(&[]).with(&copy).with("mount -o remount,ro /run"), false, WHOLE);
}

#[test]
fn a_page_that_a_link_leads_to_again_counts_once_on_an_old_kernel_too() {
    let (node, share) = node();
    let again = "ln -s share /run/divvy/claim/again; ln -s claim /run/divvy/other;
        mkdir /run/divvy/claim/third; ln -s ../share/policy /run/divvy/claim/third/policy";
    let container = node.container(&[share]).with(again);
    check(&container, true, SHARE);
    let mut program = container.program();
    assert_eq!(program.ask("without openat2"), "ok");
    assert_eq!([program.ask("start 0"), program.ask("total 0")], ["ok", &format!("{SHARE} {SHARE}")]);
}

#[test]
fn a_page_that_can_be_written_is_not_believed() {
    let (node, share) = node();
    let open = "mount -o remount,bind,rw,nosuid,nodev,noexec /run/divvy/claim/share/policy";
    check(&node.container(&[share]).with(open), false, WHOLE);
}

#[test]
fn a_page_without_a_policy_is_not_believed() {
    let (node, share) = node();
    std::fs::write(share.directory.join("policy"), [0; 4096]).expect("a page of zeros");
    check(&node.container(std::slice::from_ref(&share)), false, WHOLE);
    std::fs::write(share.directory.join("policy"), []).expect("an empty page");
    check(&node.container(&[share]), false, WHOLE);
}

#[test]
fn a_policy_without_an_account_is_not_believed() {
    let (node, share) = node();
    check(&node.container(&[share]).with("umount /run/divvy/claim/share/account"), false, WHOLE);
}

/// Beside a page that is believed, one that is not adds nothing.
#[test]
fn a_forged_page_does_not_raise_a_limit() {
    let (node, share) = node();
    let large = node.share("other", "share", node.policy(0, 20000));
    let forged =
        format!("mkdir -p /run/divvy/other/s; cp {}/* /run/divvy/other/s/", large.directory.display());
    check(&node.container(&[share]).with(&forged), true, SHARE);
}

#[test]
fn nothing_in_the_environment_changes_a_limit() {
    let (node, share) = node();
    let set =
        "export CUDA_DEVICE_MEMORY_LIMIT=20g CUDA_DISABLE_CONTROL=true DIVVY_LIMIT=0 LD_LIBRARY_PATH=/tmp";
    check(&node.container(&[share]).with(set), true, SHARE);
}
