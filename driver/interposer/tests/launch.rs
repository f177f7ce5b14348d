//! Compute time over every function that launches, against the simulated driver: what is launched is charged to the
//! share, what is captured is not, and nothing is charged where nothing is limited.

mod common;

use common::container::{Node, Share};
use common::program::Program;
use divvy_pages::policy::Compute;

const KERNELS: [&str; 9] = [
    "cuLaunchKernel",
    "cuLaunchKernel_ptsz",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuLaunchCooperativeKernel",
    "cuLaunchCooperativeKernel_ptsz",
    "cuLaunch",
    "cuLaunchGrid",
    "cuLaunchGridAsync",
];

const WAITS: [&str; 12] = [
    "cuCtxSynchronize",
    "cuCtxSynchronize_v2",
    "cuStreamSynchronize",
    "cuStreamSynchronize_ptsz",
    "cuStreamQuery",
    "cuStreamQuery_ptsz",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuMemcpyDtoH_v2",
    "cuMemcpyDtoH_v2_ptds",
    "cuMemcpy",
    "cuMemcpy_ptds",
];

/// The programs in the containers.
#[test]
fn it_is_a_program_too() {
    common::container::guest();
}

/// A program in a container with such a share.
fn within(compute: Compute, test: impl FnOnce(&mut Program, &Share)) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", divvy_pages::Policy { compute, ..node.policy(0, 1000) });
    let container = node.container(std::slice::from_ref(&share));
    test(&mut container.started(), &share);
}

fn half() -> Compute {
    Compute { cores: 50, ..Compute::default() }
}

#[test]
fn whatever_launches_is_charged() {
    within(half(), |program, share| {
        for way in KERNELS {
            let before = share.charged_ms();
            assert_eq!(program.ask(&format!("kernels {way} kernel_5ms 8")), "ok", "{way}");
            assert_eq!(program.ask("synchronize"), "0");
            // Who launches next pays for what was found of the last ones.
            assert_eq!(program.ask(&format!("kernels {way} kernel_5ms 1")), "ok", "{way}");
            let charged = share.charged_ms() - before;
            assert!(charged >= 35, "{way}: {charged} ms");
        }
    });
}

#[test]
fn what_a_program_has_waited_for_is_paid_or_owed_when_the_wait_is_over() {
    within(half(), |program, share| {
        for way in WAITS {
            assert_eq!(program.ask("kernels cuLaunchKernel kernel_5ms 1"), "ok");
            assert_eq!(program.ask("sleep 30"), "ok");
            assert!(share.has_unmeasured(), "{way}: before");
            let is_over = (0..100).any(|_| program.ask(&format!("wait {way}")) == "0");
            assert!(is_over && !share.has_unmeasured(), "{way}");
        }
    });
}

#[test]
fn a_share_of_memory_alone_launches_as_if_there_were_none() {
    within(Compute::default(), |program, share| {
        for way in KERNELS {
            assert_eq!(program.ask(&format!("kernels {way} kernel_1us 100")), "ok", "{way}");
        }
        assert_eq!(share.charged_ms(), 0);
    });
}

#[test]
fn a_capture_is_neither_charged_nor_touched_and_its_graph_is_charged_when_it_runs() {
    within(half(), |program, share| {
        for way in ["cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"] {
            // Known, so that some of its launches would be measured.
            assert_eq!(program.ask(&format!("kernels {way} kernel_10us 200")), "ok");
            assert_eq!(program.ask("synchronize"), "0");
            let before = share.charged_ms();
            let said = program.ask(&format!("capture {way} kernel_100us 500"));
            let (graph, nodes) = said.split_once(' ').unwrap_or_default();
            assert_eq!(nodes, "500", "{said}");
            assert_eq!(share.charged_ms(), before, "50 ms were captured and none ran");
            for launch in ["cuGraphLaunch", "cuGraphLaunch_ptsz"] {
                assert_eq!(program.ask(&format!("graphs {launch} {graph} 2")), "ok");
                assert_eq!(program.ask("synchronize"), "0");
            }
            assert_eq!(program.ask(&format!("graphs cuGraphLaunch {graph} 1")), "ok");
            let charged = share.charged_ms() - before;
            assert!(charged >= 150, "{way}: {charged} ms");
        }
    });
}

#[test]
fn a_launch_that_fails_says_what_the_driver_says() {
    within(half(), |program, _| {
        let wrong = program.ask("graphs cuLaunchKernel 0 3");
        assert_eq!(wrong, "400 400 400", "CUDA_ERROR_INVALID_HANDLE");
    });
}
