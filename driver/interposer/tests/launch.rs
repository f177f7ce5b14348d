//! Compute time for every launch function, on the simulated driver: launches are charged to the
//! share, captured launches are not, and nothing is charged without a limit.

mod common;

use common::container::{Node, Share};
use common::program::Program;
use divvy_pages::policy::Compute;

const LAUNCH_FUNCTIONS: [&str; 9] = [
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

const WAIT_FUNCTIONS: [&str; 12] = [
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

/// Entry point of the programs in the containers.
#[test]
fn scenario_program() {
    common::container::guest();
}

/// Runs `test` with a program in a container with such a share.
fn with_program(compute: Compute, test: impl FnOnce(&mut Program, &Share)) {
    let node = Node::up("L4");
    let share = node.share("claim", "share", divvy_pages::Policy { compute, ..node.policy(0, 1000) });
    let container = node.container(std::slice::from_ref(&share));
    test(&mut container.started(), &share);
}

fn half_device() -> Compute {
    Compute { cores: 50, ..Compute::default() }
}

#[test]
fn every_launch_function_is_charged() {
    with_program(half_device(), |program, share| {
        for way in LAUNCH_FUNCTIONS {
            let before = share.charged_ms();
            assert_eq!(program.ask(&format!("kernels {way} kernel_5ms 8")), "ok", "{way}");
            assert_eq!(program.ask("synchronize"), "0");
            // The next launch pays for the measurements of the previous ones.
            assert_eq!(program.ask(&format!("kernels {way} kernel_5ms 1")), "ok", "{way}");
            let charged = share.charged_ms() - before;
            assert!(charged >= 35, "{way}: {charged} ms");
        }
    });
}

#[test]
fn launches_are_settled_when_a_wait_returns() {
    with_program(half_device(), |program, share| {
        for way in WAIT_FUNCTIONS {
            assert_eq!(program.ask("kernels cuLaunchKernel kernel_5ms 1"), "ok");
            assert_eq!(program.ask("sleep 30"), "ok");
            assert!(share.has_unmeasured(), "{way}: before");
            let is_over = (0..100).any(|_| program.ask(&format!("wait {way}")) == "0");
            assert!(is_over && !share.has_unmeasured(), "{way}");
        }
    });
}

#[test]
fn share_without_compute_limit_is_not_charged() {
    with_program(Compute::default(), |program, share| {
        for way in LAUNCH_FUNCTIONS {
            assert_eq!(program.ask(&format!("kernels {way} kernel_1us 100")), "ok", "{way}");
        }
        assert_eq!(share.charged_ms(), 0);
    });
}

#[test]
fn captured_launches_are_charged_when_the_graph_runs() {
    with_program(half_device(), |program, share| {
        for way in ["cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"] {
            // A known kernel, so that some launches would be measured.
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
fn failed_launch_returns_the_driver_error() {
    with_program(half_device(), |program, _| {
        let wrong = program.ask("graphs cuLaunchKernel 0 3");
        assert_eq!(wrong, "400 400 400", "CUDA_ERROR_INVALID_HANDLE");
    });
}
