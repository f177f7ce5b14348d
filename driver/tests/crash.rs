//! Crash consistency: the driver reaches the same state whether or not it is killed on the way.
//!
//! Each test is one scenario of a claim's life. An undisturbed run records the node states and the NVML
//! calls. Then the scenario runs once for each kill point. Kill points are before and after each NVML call,
//! and each file-system call that writes below the state, CDI or run directory (a preloaded library counts
//! them). After a restart, GPUs and files must equal those of the undisturbed run.
#![allow(clippy::unwrap_used)]

#[path = "crash/crash_points.rs"]
mod crash_points;
#[path = "crash/node_state.rs"]
mod node_state;

mod harness;
#[path = "harness/programs.rs"]
mod programs;
#[path = "harness/supervisor.rs"]
mod supervisor;

use crash_points::{Scenario, Step, kill_at_every_point};
use harness::H100;

const SLICE: Step = Step::Prepare("mig", &["gpu-0-mig-1g10gb-19-2"]);
const OTHER: Step = Step::Prepare("other", &["gpu-0-mig-3g40gb-9-4"]);
const WHOLE: Step = Step::Prepare("whole", &["gpu-0"]);
const TWO_H100: &str = "2xH100-SXM5-80GB";
/// A whole GPU, and two instances of another.
const MULTI_DEVICE: Step =
    Step::Prepare("many", &["gpu-1", "gpu-0-mig-1g10gb-19-2", "gpu-0-mig-2g20gb-14-4"]);

/// A time slice of one GPU and an MPS share of another.
const TIMESLICE_AND_MPS: Step = Step::Prepare("shared", &["gpu-0-timeslice", "gpu-1-mps"]);
/// A second claim on the same two GPUs.
const SECOND_TIMESLICE_AND_MPS: Step = Step::Prepare("second", &["gpu-0-timeslice", "gpu-1-mps"]);

/// Two memory shares of a GPU and one of an instance of another.
const MEMORY_SHARES: Step =
    Step::Prepare("parts", &["gpu-1-share=10Gi", "gpu-0-mig-1g10gb-19-2=4Gi", "gpu-1-share=5Gi"]);
// Earlier versions allocated shares on the device of the whole GPU.
const NEIGHBOUR: Step = Step::Prepare("neighbour", &["gpu-0-mig-1g10gb-19-2=3Gi", "gpu-1=20Gi"]);

async fn check(gpus: &str, before: &'static [Step], step: Step, after: &'static [Step]) {
    kill_at_every_point(Scenario { gpus, hold_off: "0s", before, step, after }).await;
}

#[tokio::test]
async fn whole_gpu_is_prepared() {
    check(H100, &[], WHOLE, &[Step::Release("whole")]).await;
}

#[tokio::test]
async fn whole_gpu_is_released() {
    check(H100, &[WHOLE], Step::Release("whole"), &[]).await;
}

#[tokio::test]
async fn first_mig_instance_is_prepared() {
    check(H100, &[], SLICE, &[Step::Release("mig")]).await;
}

#[tokio::test]
async fn last_mig_instance_is_released() {
    check(H100, &[SLICE], Step::Release("mig"), &[]).await;
}

#[tokio::test]
async fn mig_instance_beside_another_is_prepared() {
    check(H100, &[OTHER], SLICE, &[Step::Release("mig"), Step::Release("other")]).await;
}

#[tokio::test]
async fn mig_instance_beside_another_is_released() {
    check(H100, &[OTHER, SLICE], Step::Release("mig"), &[Step::Release("other")]).await;
}

#[tokio::test]
async fn multi_device_claim_is_prepared() {
    check(TWO_H100, &[], MULTI_DEVICE, &[Step::Release("many")]).await;
}

#[tokio::test]
async fn multi_device_claim_is_released() {
    check(TWO_H100, &[MULTI_DEVICE], Step::Release("many"), &[]).await;
}

#[tokio::test]
async fn reboot_with_mig_instances_is_recovered() {
    check(TWO_H100, &[MULTI_DEVICE], Step::Reboot, &[Step::Release("many")]).await;
}

#[tokio::test]
async fn first_timeslice_and_mps_claim_is_prepared() {
    check(TWO_H100, &[], TIMESLICE_AND_MPS, &[Step::Release("shared")]).await;
}

#[tokio::test]
async fn last_timeslice_and_mps_claim_is_released() {
    check(TWO_H100, &[TIMESLICE_AND_MPS], Step::Release("shared"), &[]).await;
}

#[tokio::test]
async fn second_timeslice_and_mps_claim_is_prepared() {
    check(
        TWO_H100,
        &[SECOND_TIMESLICE_AND_MPS],
        TIMESLICE_AND_MPS,
        &[Step::Release("shared"), Step::Release("second")],
    )
    .await;
}

#[tokio::test]
async fn second_timeslice_and_mps_claim_is_released() {
    check(
        TWO_H100,
        &[SECOND_TIMESLICE_AND_MPS, TIMESLICE_AND_MPS],
        Step::Release("shared"),
        &[Step::Release("second")],
    )
    .await;
}

#[tokio::test]
async fn reboot_with_timeslice_and_mps_is_recovered() {
    check(TWO_H100, &[TIMESLICE_AND_MPS], Step::Reboot, &[Step::Release("shared")]).await;
}

#[tokio::test]
async fn first_memory_shares_are_prepared() {
    check(TWO_H100, &[], MEMORY_SHARES, &[Step::Release("parts")]).await;
}

#[tokio::test]
async fn last_memory_shares_are_released() {
    check(TWO_H100, &[MEMORY_SHARES], Step::Release("parts"), &[]).await;
}

#[tokio::test]
async fn memory_shares_beside_others_are_prepared() {
    check(TWO_H100, &[NEIGHBOUR], MEMORY_SHARES, &[Step::Release("parts"), Step::Release("neighbour")]).await;
}

/// The claim that created the instance is released first.
#[tokio::test]
async fn memory_shares_beside_others_are_released() {
    check(TWO_H100, &[MEMORY_SHARES, NEIGHBOUR], Step::Release("parts"), &[Step::Release("neighbour")]).await;
}

#[tokio::test]
async fn reboot_with_memory_shares_is_recovered() {
    let after = &[Step::Release("parts"), Step::Release("neighbour")];
    check(TWO_H100, &[MEMORY_SHARES, NEIGHBOUR], Step::Reboot, after).await;
}

#[tokio::test]
async fn first_start_on_a_new_node_is_recovered() {
    check(TWO_H100, &[], Step::Install, &[]).await;
}

#[tokio::test]
async fn idle_mig_mode_is_disabled_for_a_whole_gpu_claim() {
    let mig_mode_on = &[SLICE, Step::Release("mig")];
    let after = &[Step::Release("whole"), SLICE, Step::Release("mig")];
    kill_at_every_point(Scenario { gpus: H100, hold_off: "60m", before: mig_mode_on, step: WHOLE, after })
        .await;
}
