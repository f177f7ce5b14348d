//! Killed anywhere, the driver ends where it would have ended.
//!
//! Each test is one path of a claim's life. The path is walked once without
//! harm: that says where it ends and which NVML calls it makes. Then it is
//! walked again and again, and each time the daemon gets SIGKILL at one point:
//! before or after the effect of one NVML call (the simulator holds the call),
//! or before or after one file-system call that writes below the state or CDI
//! directory or the run directory (a preloaded library does it; the number grows until a walk
//! completes). The daemon is started again, and the kubelet either goes on
//! asking or the claim is given up; the node must then be what it is without
//! the kill: GPU and compute instances with their ids, MIG mode, and every file
//! by name and content. A keeper that obeys at once runs beside it.
#![allow(clippy::unwrap_used)]

#[path = "crash/left.rs"]
mod left;
#[path = "crash/walk.rs"]
mod walk;

mod harness;
#[path = "harness/keeper.rs"]
mod keeper;
#[path = "harness/programs.rs"]
mod programs;

use harness::H100;
use walk::{Act, Path, walk};

const SLICE: Act = Act::Prepare("mig", &["gpu-0-mig-1g10gb-19-2"]);
const OTHER: Act = Act::Prepare("other", &["gpu-0-mig-3g40gb-9-4"]);
const WHOLE: Act = Act::Prepare("whole", &["gpu-0"]);
const TWO: &str = "2xH100-SXM5-80GB";
/// Two modes, two GPUs, two instances.
const MANY: Act = Act::Prepare("many", &["gpu-1", "gpu-0-mig-1g10gb-19-2", "gpu-0-mig-2g20gb-14-4"]);

/// Each of two GPUs shared in its own way.
const SHARED: Act = Act::Prepare("shared", &["gpu-0-timeslice", "gpu-1-mps"]);
const BESIDE: Act = Act::Prepare("beside", &["gpu-0-timeslice", "gpu-1-mps"]);

/// A part of the memory of a GPU, of another twice, and of an instance.
const PARTS: Act = Act::Prepare("parts", &["gpu-1=10Gi", "gpu-0-mig-1g10gb-19-2=4Gi", "gpu-1=5Gi"]);
const NEIGHBOUR: Act = Act::Prepare("neighbour", &["gpu-0-mig-1g10gb-19-2=3Gi", "gpu-1=20Gi"]);

async fn check(gpus: &str, before: &'static [Act], act: Act, after: &'static [Act]) {
    walk(Path { gpus, hold_off: "0s", before, act, after }).await;
}

#[tokio::test]
async fn a_whole_gpu_is_prepared() {
    check(H100, &[], WHOLE, &[Act::Release("whole")]).await;
}

#[tokio::test]
async fn a_whole_gpu_is_released() {
    check(H100, &[WHOLE], Act::Release("whole"), &[]).await;
}

#[tokio::test]
async fn the_first_instance_of_a_gpu_is_prepared() {
    check(H100, &[], SLICE, &[Act::Release("mig")]).await;
}

#[tokio::test]
async fn the_last_instance_of_a_gpu_is_released() {
    check(H100, &[SLICE], Act::Release("mig"), &[]).await;
}

#[tokio::test]
async fn an_instance_beside_another_is_prepared() {
    check(H100, &[OTHER], SLICE, &[Act::Release("mig"), Act::Release("other")]).await;
}

#[tokio::test]
async fn an_instance_beside_another_is_released() {
    check(H100, &[OTHER, SLICE], Act::Release("mig"), &[Act::Release("other")]).await;
}

#[tokio::test]
async fn a_claim_of_several_devices_is_prepared() {
    check(TWO, &[], MANY, &[Act::Release("many")]).await;
}

#[tokio::test]
async fn a_claim_of_several_devices_is_released() {
    check(TWO, &[MANY], Act::Release("many"), &[]).await;
}

#[tokio::test]
async fn what_a_reboot_took_is_made_again() {
    check(TWO, &[MANY], Act::Reboot, &[Act::Release("many")]).await;
}

#[tokio::test]
async fn the_first_shares_of_gpus_are_prepared() {
    check(TWO, &[], SHARED, &[Act::Release("shared")]).await;
}

#[tokio::test]
async fn the_last_shares_of_gpus_are_released() {
    check(TWO, &[SHARED], Act::Release("shared"), &[]).await;
}

#[tokio::test]
async fn shares_beside_others_are_prepared() {
    check(TWO, &[BESIDE], SHARED, &[Act::Release("shared"), Act::Release("beside")]).await;
}

#[tokio::test]
async fn shares_beside_others_are_released() {
    check(TWO, &[BESIDE, SHARED], Act::Release("shared"), &[Act::Release("beside")]).await;
}

#[tokio::test]
async fn what_a_reboot_took_of_shared_gpus_is_set_up_again() {
    check(TWO, &[SHARED], Act::Reboot, &[Act::Release("shared")]).await;
}

#[tokio::test]
async fn the_first_parts_of_memory_are_prepared() {
    check(TWO, &[], PARTS, &[Act::Release("parts")]).await;
}

#[tokio::test]
async fn the_last_parts_of_memory_are_released() {
    check(TWO, &[PARTS], Act::Release("parts"), &[]).await;
}

#[tokio::test]
async fn parts_of_memory_beside_others_are_prepared() {
    check(TWO, &[NEIGHBOUR], PARTS, &[Act::Release("parts"), Act::Release("neighbour")]).await;
}

/// The one that made the instance goes first.
#[tokio::test]
async fn parts_of_memory_beside_others_are_released() {
    check(TWO, &[PARTS, NEIGHBOUR], Act::Release("parts"), &[Act::Release("neighbour")]).await;
}

#[tokio::test]
async fn what_a_reboot_took_of_parts_of_memory_is_made_again() {
    let after = &[Act::Release("parts"), Act::Release("neighbour")];
    check(TWO, &[PARTS, NEIGHBOUR], Act::Reboot, after).await;
}

#[tokio::test]
async fn the_first_start_is_made_good() {
    check(TWO, &[], Act::Install, &[]).await;
}

#[tokio::test]
async fn mig_mode_that_waits_to_be_turned_off_is_turned_off_for_a_whole_gpu() {
    let mig_mode_on = &[SLICE, Act::Release("mig")];
    let after = &[Act::Release("whole"), SLICE, Act::Release("mig")];
    walk(Path { gpus: H100, hold_off: "60m", before: mig_mode_on, act: WHOLE, after }).await;
}
