//! Overcommitting shares: which memory is managed, which is not, and that a program does not
//! notice.

mod common;

use common::container::{MIB, Node, Share, key};
use common::program::Program;
use divvy_pages::policy::Memory;
use divvy_pages::{Flags, Policy, account};

/// Entry point of the programs in the containers.
#[test]
fn scenario_program() {
    common::container::guest();
}

const QUOTA_MIB: u64 = 1000;
const LIMIT_MIB: u64 = 3000;
const DEVICE_ATTRIBUTES: &str = "2 0 error 1 | 0 2 0 0";
const MANAGED_ATTRIBUTES: &str = "2 1 itself | 0 2 1 itself";

fn policy(node: &Node, quota: u64, all: u64) -> Policy {
    let policy = node.policy(0, all);
    let memory = Memory { soft: quota * MIB, overcommit: all * MIB, ..policy.memory };
    Policy { memory, flags: policy.flags.with(Flags::UVM), ..policy }
}

/// MiB that the share's processes report as managed.
fn managed(share: &Share) -> u64 {
    let page = std::fs::read(share.directory.join("account")).expect("an account page");
    let page = account::Snapshot::new(&page).expect("a page of this version");
    page.slots().map(|slot| slot.managed).sum::<u64>() / MIB
}

/// A program of a share with a 1,000 MiB physical quota and a 3,000 MiB limit.
fn shared(test: impl FnOnce(&mut Program, &Share)) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", policy(&node, QUOTA_MIB, LIMIT_MIB));
    let container = node.container(std::slice::from_ref(&share));
    test(&mut container.started(), &share);
}

#[test]
fn memory_above_the_quota_is_managed_and_hidden() {
    shared(|program, share| {
        assert_eq!((program.ask("info"), program.ask("total 0")), ("3000 3000".into(), "3000 3000".into()));
        let first = key(&program.ask("alloc v2 900"));
        assert_eq!((share.used_mib(), managed(share)), (900, 0));
        for (way, free) in [("v2", "v2"), ("pitch", "async"), ("v2", "async-ptsz"), ("proc", "v2")] {
            let second = key(&program.ask(&format!("alloc {way} 2100")));
            assert_eq!((share.used_mib(), managed(share)), (3000, 2100), "{way}");
            assert_eq!(program.ask("info"), "0 3000");
            for more in ["v2", "pitch", "managed", "array", "create", "async"] {
                assert_eq!(program.ask(&format!("alloc {more} 101")), "error 2", "{more}");
            }
            assert_eq!(program.ask("alloc v2 1"), "error 2", "{way}: in all no more");
            assert_eq!(program.ask(&format!("attributes {first}")), DEVICE_ATTRIBUTES);
            assert_eq!(program.ask(&format!("attributes {second}")), DEVICE_ATTRIBUTES, "{way}");
            let within = second.parse::<u64>().expect("an address") + 5 * MIB;
            assert_eq!(program.ask(&format!("attributes {within}")), DEVICE_ATTRIBUTES, "{way}");
            assert_eq!(program.ask(&format!("export {second}")), "error 1", "{way}");
            assert_eq!(program.ask(&format!("free {free} {second}")), "0", "{way}, {free}");
            assert_eq!((share.used_mib(), managed(share)), (900, 0), "{way}, {free}");
            assert_eq!(program.ask(&format!("free {free} {second}")), "1", "{way}, {free}: again");
        }
    });
}

#[test]
fn unmanaged_allocations_keep_to_the_quota() {
    shared(|program, share| {
        for (way, free) in [("create", "release"), ("array", "array"), ("async", "v2"), ("mipmap", "mipmap")]
        {
            assert_eq!(program.ask(&format!("alloc {way} 1001")), "error 2", "{way}");
            let made = key(&program.ask(&format!("alloc {way} 960")));
            assert_eq!(program.ask(&format!("free {free} {made}")), "0", "{way}");
            program.ask("synchronize");
        }
        // Managed memory does not use the physical quota.
        let large = key(&program.ask("alloc v2 1500"));
        assert_eq!((share.used_mib(), managed(share)), (1500, 1500));
        let made = key(&program.ask("alloc create 1000"));
        assert_eq!(program.ask("alloc create 2"), "error 2");
        let small = key(&program.ask("alloc v2 1"));
        assert_eq!((share.used_mib(), managed(share)), (2501, 1501), "rather than none");
        for (free, key) in [("v2", large), ("release", made), ("async", small)] {
            assert_eq!(program.ask(&format!("free {free} {key}")), "0");
        }
        assert_eq!((share.used_mib(), managed(share)), (0, 0));
    });
}

#[test]
fn explicit_managed_memory_is_reported_as_managed() {
    shared(|program, share| {
        let own = key(&program.ask("alloc managed 2000"));
        assert_eq!(program.ask(&format!("attributes {own}")), MANAGED_ATTRIBUTES);
        let other = key(&program.ask("alloc v2 1000"));
        assert_eq!((share.used_mib(), managed(share)), (3000, 2000));
        assert_eq!(program.ask("alloc managed 1"), "error 2");
        for key in [own, other] {
            assert_eq!(program.ask(&format!("free v2 {key}")), "0");
        }
    });
}

#[test]
fn full_device_falls_back_to_managed_memory() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", policy(&node, 20_000, 30_000));
    let other = node.container(&[]);
    let mut other = other.started();
    key(&other.ask("alloc v2 15000"));
    let container = node.container(std::slice::from_ref(&share));
    let mut program = container.started();
    let made = key(&program.ask("alloc v2 10000"));
    assert_eq!((share.used_mib(), managed(&share)), (10_000, 10_000));
    assert_eq!(program.ask(&format!("attributes {made}")), DEVICE_ATTRIBUTES);
    assert_eq!(program.ask("kernels cuLaunchKernel work_1us 1"), "ok");
    assert_eq!(program.ask("alloc create 10000"), "error 2", "the driver's own");
    assert_eq!(share.used_mib(), 10_000);
}

#[test]
fn destroyed_context_refunds_managed_memory() {
    shared(|program, share| {
        let context = key(&program.ask("context v2 0"));
        let made = key(&program.ask("alloc v2 2000"));
        assert_eq!(managed(share), 2000);
        assert_eq!(program.ask(&format!("free context {context}")), "0");
        assert_eq!((share.used_mib(), managed(share)), (0, 0));
        assert_eq!(program.ask("start 0"), "ok");
        let again = key(&program.ask("alloc managed 2000"));
        assert_eq!(program.ask(&format!("attributes {again}")), MANAGED_ATTRIBUTES, "{made} is forgotten");
    });
}

#[test]
fn several_shares_of_a_device_do_not_overcommit() {
    let node = Node::up("L4");
    let shares = [("one", "a"), ("two", "b")]
        .map(|(claim, id)| node.share(claim, id, policy(&node, QUOTA_MIB, LIMIT_MIB)));
    let mut program = node.container(&shares).started();
    assert_eq!(program.ask("info"), "2000 2000");
    let made = key(&program.ask("alloc v2 1500"));
    assert_eq!(program.ask(&format!("attributes {made}")), DEVICE_ATTRIBUTES);
    assert_eq!((program.ask("alloc v2 501"), managed(&shares[0])), ("error 2".into(), 0));
}
