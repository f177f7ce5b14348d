//! Managed memory of two processes on one GPU: page faults and evictions.

mod common;

use common::Node;
use divvy_sim::GpuProcess;
use divvy_sim::usage::{Kernel, MANAGED_PAGE_BYTES, Place};
use proptest::prelude::*;

/// Number of pages that fit on an L4.
const L4_PAGES: u64 = (23034 - 472) / 2;
/// Length of a kernel without misses, and the time that a miss adds: a page fault, and the transfer
/// of a page over a bus of 12 GB/s.
const KERNEL_NS: u64 = 1000;
const MISS_NS: f64 = 20_000.0 + (2 << 20) as f64 / 12.0;

fn gpu_process(node: &Node) -> GpuProcess {
    let usage = node.sim.usage().expect("a usage file");
    GpuProcess::attach(usage, Place { slot: 0, instance: None }).expect("a GPU")
}

fn run(gpu_process: &GpuProcess, touches: bool) -> u64 {
    let (begin, end) = gpu_process.submit(Kernel { after: 0, length: KERNEL_NS, touches, meeting: None });
    end - begin
}

/// Number of pages that a kernel has to fetch.
fn misses(gpu_process: &GpuProcess) -> u64 {
    ((run(gpu_process, true) - KERNEL_NS) as f64 / MISS_NS).round() as u64
}

/// Number of free pages.
fn free(gpu_process: &GpuProcess) -> u64 {
    gpu_process.memory_info().0 / MANAGED_PAGE_BYTES
}

#[test]
fn kernel_pays_for_missing_pages() {
    let node = Node::create("L4");
    let one = gpu_process(&node);
    assert_eq!((free(&one), run(&one, true)), (L4_PAGES, KERNEL_NS));
    one.add_managed(10 * MANAGED_PAGE_BYTES - 1);
    assert_eq!((free(&one), run(&one, false)), (L4_PAGES, KERNEL_NS), "a copy touches no managed memory");
    assert_eq!(run(&one, true), KERNEL_NS + (10.0 * MISS_NS) as u64);
    assert_eq!((free(&one), run(&one, true)), (L4_PAGES - 10, KERNEL_NS));
    one.remove_managed(10 * MANAGED_PAGE_BYTES - 1);
    assert_eq!((free(&one), run(&one, true)), (L4_PAGES, KERNEL_NS));
}

#[test]
fn working_sets_that_do_not_fit_evict_each_other() {
    let node = Node::create("L4");
    let both = [gpu_process(&node), gpu_process(&node)];
    let set = L4_PAGES * 6 / 10;
    both.iter().for_each(|gpu_process| gpu_process.add_managed(set * MANAGED_PAGE_BYTES));
    assert_eq!(both.each_ref().map(misses), [set; 2]);
    for gpu_process in both.iter().cycle().take(6) {
        assert_eq!(misses(gpu_process), 2 * set - L4_PAGES, "the other process evicted these pages");
        assert_eq!(misses(gpu_process), 0);
    }
}

#[test]
fn allocated_memory_evicts_managed_pages() {
    let node = Node::create("L4");
    let (one, other) = (gpu_process(&node), gpu_process(&node));
    one.add_managed(L4_PAGES * MANAGED_PAGE_BYTES);
    assert_eq!((misses(&one), free(&one)), (L4_PAGES, 0));
    assert!(other.charge(100 * MANAGED_PAGE_BYTES));
    assert_eq!((free(&one), misses(&one), misses(&one)), (0, 100, 100), "not all pages fit");
    assert!(!other.charge(L4_PAGES * MANAGED_PAGE_BYTES));
    other.refund(100 * MANAGED_PAGE_BYTES);
    assert_eq!([misses(&one), misses(&one)], [100, 0]);
}

#[test]
fn memory_is_free_after_its_process_detached() {
    let node = Node::create("L4");
    let one = gpu_process(&node);
    let other = gpu_process(&node);
    other.add_managed(50 * MANAGED_PAGE_BYTES);
    assert_eq!((misses(&other), free(&one)), (50, L4_PAGES - 50));
    drop(other);
    assert_eq!(free(&one), L4_PAGES);
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Manage(u64),
    Unmanage(u64),
    Run,
    Charge(u64),
    Refund(u64),
    Bring(u64),
    PutOut(u64),
}

fn act() -> impl Strategy<Value = (usize, Act)> {
    let size = || 0..L4_PAGES * 2 / 3;
    let act = prop_oneof![
        size().prop_map(Act::Manage),
        size().prop_map(Act::Unmanage),
        Just(Act::Run),
        size().prop_map(Act::Charge),
        size().prop_map(Act::Refund),
        size().prop_map(Act::Bring),
        size().prop_map(Act::PutOut),
    ];
    (0..2_usize, act)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn resident_pages_fit_and_misses_are_bounded(
        acts in proptest::collection::vec(act(), 1..60),
    ) {
        let node = Node::create("L4");
        let both = [gpu_process(&node), gpu_process(&node)];
        let (mut manages, mut used) = ([0_u64; 2], [0_u64; 2]);
        for (index, act) in acts {
            let gpu_process = &both[index];
            match act {
                Act::Manage(size) => {
                    gpu_process.add_managed(size * MANAGED_PAGE_BYTES);
                    manages[index] += size;
                }
                Act::Unmanage(size) => {
                    let size = size.min(manages[index]);
                    gpu_process.remove_managed(size * MANAGED_PAGE_BYTES);
                    manages[index] -= size;
                }
                Act::Run => {
                    prop_assert!(misses(gpu_process) <= manages[index]);
                    let room = L4_PAGES - used[0] - used[1];
                    let misses = misses(gpu_process);
                    prop_assert_eq!(misses, manages[index].saturating_sub(room), "the rest is resident");
                }
                Act::Charge(size) => {
                    let fits = used[0] + used[1] + size <= L4_PAGES;
                    prop_assert_eq!(gpu_process.charge(size * MANAGED_PAGE_BYTES), fits);
                    used[index] += if fits { size } else { 0 };
                }
                Act::Refund(size) => {
                    let size = size.min(used[index]);
                    gpu_process.refund(size * MANAGED_PAGE_BYTES);
                    used[index] -= size;
                }
                Act::Bring(size) => drop(gpu_process.prefetch(size * MANAGED_PAGE_BYTES)),
                Act::PutOut(size) => drop(gpu_process.offload(size * MANAGED_PAGE_BYTES)),
            }
            let processes = node.sim.usage().expect("a usage file").processes();
            let there = processes.iter().map(|found| found.bytes).sum::<u64>();
            prop_assert_eq!(there / MANAGED_PAGE_BYTES + free(gpu_process), L4_PAGES);
            prop_assert!(there / MANAGED_PAGE_BYTES <= L4_PAGES);
        }
    }
}
