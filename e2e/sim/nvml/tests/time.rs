//! NVML reports the GPU time of CUDA processes correctly.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use std::time::{Duration, Instant};

use common::*;
use divvy_sim::GpuProcess;
use divvy_sim::usage::{Kernel, Place, UsageMonitor};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;

const WHOLE: Place = Place { slot: 0, instance: None };
const MS: u64 = 1_000_000;

/// Attaches this process to a partition.
fn gpu_process(node: &Node, place: Place) -> GpuProcess {
    GpuProcess::attach(node.sim.usage().expect("a usage file"), place).expect("a GPU")
}

fn submit(gpu_process: &GpuProcess, length: u64) {
    gpu_process.submit(Kernel { after: 0, length, touches: true, meeting: None });
}

/// Polls until there is a result.
fn until<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "nothing within a minute");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn wrapper(node: &Node) -> Nvml {
    let path = node.library();
    Nvml::builder().lib_path(path.as_os_str()).flags(InitFlags::NO_GPUS).init().expect("nvml-wrapper")
}

#[test]
fn gpu_time_equals_the_submitted_work() {
    let node = Node::up("L4");
    let monitor = UsageMonitor::new(node.sim.usage().expect("a usage file")).expect("a monitor");
    let (one, two) = (gpu_process(&node, WHOLE), gpu_process(&node, WHOLE));
    let begin = divvy_sim::usage::now();
    submit(&one, 30 * MS);
    submit(&two, 20 * MS);
    let had = |rest: u64| {
        until(|| {
            let served = monitor.process_times();
            let at = served.first().map_or(begin, |first| first.at);
            let sum: u64 = served.iter().map(|gpu_process| gpu_process.gpu_ns).sum();
            assert!(sum <= at - begin, "more than the time that has passed");
            (sum == rest).then_some(served)
        })
    };
    let served = had(50 * MS);
    let mut each: Vec<u64> = served.iter().map(|gpu_process| gpu_process.gpu_ns).collect();
    each.sort_unstable();
    assert_eq!(each, [20 * MS, 30 * MS]);
    assert!(
        served.iter().all(|gpu_process| gpu_process.pid == std::process::id() && gpu_process.place == WHOLE)
    );
    // A process in the row of one that has detached starts at 0.
    drop(one);
    let three = gpu_process(&node, WHOLE);
    submit(&three, MS);
    had(21 * MS);
}

#[test]
fn in_order_work_runs_in_submission_order() {
    let node = Node::up("L4");
    let monitor = UsageMonitor::new(node.sim.usage().expect("a usage file")).expect("a monitor");
    let (one, two) = (gpu_process(&node, WHOLE), gpu_process(&node, WHOLE));
    let begin = divvy_sim::usage::now();
    for gpu_process in [&one, &two] {
        gpu_process.run_in_order();
        (0..50).for_each(|_| submit(gpu_process, 4 * MS));
    }
    // Each process runs in one stretch, the second after the first.
    until(|| {
        let served = monitor.process_times();
        let at = served.first().expect("two gpu_processes").at;
        let each: Vec<u64> = served.iter().map(|gpu_process| gpu_process.gpu_ns).collect();
        let [first, second] = each[..] else { panic!("{each:?}") };
        assert!(first + second <= at - begin);
        assert!(second == 0 || first == 200 * MS, "{each:?}");
        let times = monitor.times(WHOLE).expect("a part");
        assert!(times.busy_ns() >= first + second && times.busy_ns() <= times.at - begin);
        (second == 200 * MS).then_some(())
    });
}

#[test]
fn utilization_matches_gpu_time_since_a_sample() {
    let node = Node::up("L4");
    let nvml = wrapper(&node);
    let gpu = nvml.device_by_index(0).expect("a GPU");
    assert!(matches!(gpu.process_utilization_stats(None), Err(NvmlError::NotFound)));
    let idle = gpu.utilization_rates().expect("rates");
    assert_eq!((idle.gpu, idle.memory), (0, 0));
    let busy = gpu_process(&node, WHOLE);
    submit(&busy, 3_600_000 * MS);
    // Waits for a whole period of work.
    until(|| gpu.utilization_rates().is_ok_and(|rates| rates.gpu == 100).then_some(()));
    let sample = gpu.process_utilization_stats(None).expect("a sample").pop().expect("a process");
    assert_eq!((sample.pid, sample.sm_util > 0), (std::process::id(), true));
    let later = until(|| match gpu.process_utilization_stats(sample.timestamp) {
        // No sample period has ended since.
        Err(NvmlError::NotFound) => None,
        found => found.expect("a sample").pop(),
    });
    assert!(later.timestamp > sample.timestamp);
    assert_eq!(later.sm_util, 100);
    let other = gpu_process(&node, WHOLE);
    submit(&other, 3_600_000 * MS);
    // Both GPU processes belong to this process.
    assert_eq!(until(|| gpu.process_utilization_stats(later.timestamp).ok()?.pop()).sm_util, 100);
    drop((busy, other));
    until(|| matches!(gpu.process_utilization_stats(None), Err(NvmlError::NotFound)).then_some(()));
    until(|| gpu.utilization_rates().is_ok_and(|rates| rates.gpu == 0).then_some(()));
}

#[test]
fn sample_that_names_one_process_has_the_total_time() {
    let node = Node::up("L4");
    let monitor = UsageMonitor::new(node.sim.usage().expect("a usage file")).expect("a monitor");
    let nvml = wrapper(&node);
    let gpu = nvml.device_by_index(0).expect("a GPU");
    let begin = divvy_sim::usage::now();
    let busy = gpu_process(&node, WHOLE);
    submit(&busy, 3_600_000 * MS);
    let named = |since: u64| monitor.named_processes(WHOLE, since).unwrap_or_default();
    let one = until(|| named(begin).pop());
    assert_eq!((one.pid, one.busy > 0), (std::process::id(), true));
    // NVML reports whole numbers.
    let later = until(|| gpu.process_utilization_stats(None).ok()?.pop().filter(|sample| sample.sm_util > 0));
    assert_eq!(later.pid, std::process::id());
    let [first, second] = [named(begin), named(begin)];
    assert_eq!(
        first.first().map(|one| one.pid),
        second.first().map(|one| one.pid),
        "the same query has the same answer"
    );
    drop(busy);
}

#[test]
fn change_between_processes_is_busy_time_of_no_multiprocessor() {
    let node = Node::with("H100-SXM5-80GB", |options| options.host.switch_us = Some(2000));
    let nvml = wrapper(&node);
    let gpu = nvml.device_by_index(0).expect("a GPU");
    let both = [gpu_process(&node, WHOLE), gpu_process(&node, WHOLE)];
    both.iter().for_each(|one| submit(one, 3_600_000 * MS));
    let first = gpu.gpm_sample().expect("a sample");
    std::thread::sleep(Duration::from_millis(50));
    let wanted = [GpmMetricId::GraphicsUtil, GpmMetricId::SmUtil];
    let metrics = gpm_metrics_get(&nvml, &first, &gpu.gpm_sample().expect("a sample"), &wanted);
    let metrics: Vec<f64> =
        metrics.expect("metrics").into_iter().map(|metric| metric.expect("a value").value).collect();
    assert_eq!(metrics[0], 100.0);
    assert!(metrics[1] < 90.0, "{metrics:?}");
}

#[test]
fn instances_have_only_gpm_samples() {
    let node = Node::up("H100-SXM5-80GB");
    let nvml = wrapper(&node);
    let client = node.client();
    let parent = nvml.device_by_index(0).expect("a GPU");
    assert_eq!(parent.set_mig_mode(true).ok(), Some(SUCCESS));
    // SAFETY: the handle is used while `nvml` lives.
    let gpu = Device(unsafe { parent.handle() });
    let made = |place| {
        let profile = client.profile(gpu, 2).expect("3g").id;
        let gi = client.create_gi(gpu, profile, Some((place, 4))).expect("a GPU instance");
        let profile = client.ci_profile(gi, 2, 0).expect("3c").id;
        client.create_ci(gi, profile).expect("a compute instance");
        client.gi_info(gi).expect("information").id
    };
    let (works, idles) = (made(0), made(4));
    let busy = gpu_process(&node, Place { slot: 0, instance: Some((works, 0)) });
    submit(&busy, 3_600_000 * MS);
    let share = |gi: u32| {
        let sample = || parent.gpm_mig_sample(gi).expect("a sample");
        let first = sample();
        std::thread::sleep(Duration::from_millis(50));
        let metrics = gpm_metrics_get(&nvml, &first, &sample(), &[GpmMetricId::SmUtil]).expect("metrics");
        metrics.into_iter().next().expect("one").expect("a value").value
    };
    assert_eq!((share(works), share(idles)), (100.0, 0.0));
    assert!(matches!(parent.process_utilization_stats(None), Err(NvmlError::NotSupported)));
    assert!(matches!(parent.utilization_rates(), Err(NvmlError::NotSupported)));
}
