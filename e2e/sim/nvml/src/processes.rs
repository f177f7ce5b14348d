//! Processes on a GPU or MIG device, and their utilisation.

use std::time::{SystemTime, UNIX_EPOCH};

use divvy_sim::code::Code;
use divvy_sim::state::{Process, ProcessKind};
use divvy_sim::usage::{NamedProcess, Place, now};

use crate::abi::{
    ProcessDetail, ProcessDetailList, ProcessInfo, ProcessInfoV1, ProcessUtilization, ProcessUtilizationInfo,
    ProcessesUtilizationInfo, Utilization,
};
use crate::argument::{Array, Count, Out, Outcome};
use crate::handle::{Device, Target};
use crate::library::{Nvml, entry};

const MIB: u64 = 1 << 20;
/// NVML's value for processes without an instance.
const NO_INSTANCE: u32 = u32::MAX;
/// Utilisation in percent of a GPU with processes that were added by hand.
const MANUAL_PROCESS_PERCENT: u32 = 60;

/// A time that is at most this much before a sample's counts as the sample's.
const SLACK_US: u64 = 1000;

/// The processes that the caller may see through that handle. Seeing all instances requires the
/// right to monitor.
fn processes(nvml: &Nvml, device: Device, kind: Option<ProcessKind>) -> Outcome<Vec<Process>> {
    // The hardware would not report dead processes. A caller that may not write the state still
    // sees them.
    drop(nvml.shared.sim.remove_dead_processes());
    let state = nvml.shared.sim.read_stored()?;
    let Target { gpu, mig, slot } = device.target(&state)?;
    if mig.is_none() && gpu.mig.current && !nvml.may_monitor() {
        return Err(Code::NoPermission);
    }
    let here = mig.map(|(gi, ci)| (gi.id, ci.id));
    let seen = |process: &Process| {
        kind.is_none_or(|kind| process.kind == kind) && (here.is_none() || process.instance == here)
    };
    let all = nvml.shared.sim.with_gpu_processes(slot, gpu.processes.clone());
    Ok(all.into_iter().filter(seen).collect())
}

/// The processes that were added by hand. They use no GPU time, so fixed figures are reported for
/// them.
pub(crate) fn manual_processes(nvml: &Nvml, slot: usize) -> Outcome<Vec<Process>> {
    let state = nvml.shared.sim.read_stored()?;
    Ok(state.gpus.get(slot).map(|gpu| gpu.processes.clone()).unwrap_or_default())
}

pub(crate) const fn whole(slot: usize) -> Place {
    Place { slot, instance: None }
}

/// Rounds to whole percent, like the driver.
fn to_percent(part: u64, whole: u64) -> u32 {
    let rounded = (part * 100 + whole / 2) / whole.max(1);
    rounded.min(100) as u32
}

/// Entries for the processes with GPU time since a system time in us; 0 for as far back as samples
/// are kept.
fn utilization(nvml: &Nvml, device: Device, since: u64) -> Outcome<Vec<ProcessUtilization>> {
    let (slot, gpu) = device.whole(&nvml.state)?;
    if gpu.mig.current {
        return Err(Code::NotSupported);
    }
    // Samples use the monotonic clock.
    let now_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros() as u64);
    let boot_us = now_us.saturating_sub(now() / 1000);
    let entry = |pid, timestamp, sm| ProcessUtilization {
        pid,
        timestamp,
        sm,
        memory: sm / 2,
        encoder: 0,
        decoder: 0,
    };
    let manual = manual_processes(nvml, slot)?;
    let share = MANUAL_PROCESS_PERCENT / (manual.len() as u32).max(1);
    let mut entries: Vec<_> = manual.iter().map(|process| entry(process.pid, now_us, share)).collect();
    // The difference between the clocks varies by microseconds.
    let since = (since + SLACK_US).saturating_sub(boot_us) * 1000;
    if !nvml.state.host.divides_samples {
        let named =
            nvml.shared.usage_monitor().and_then(|monitor| monitor.named_processes(whole(slot), since));
        let entry = |named: NamedProcess| {
            entry(named.pid, boot_us + named.at / 1000, to_percent(named.busy, named.span))
        };
        entries.extend(named.into_iter().flatten().map(entry));
    } else if let Some(sampled) =
        nvml.shared.usage_monitor().and_then(|monitor| monitor.utilization(whole(slot), since))
    {
        let at = boot_us + sampled.at / 1000;
        entries.extend(
            sampled.processes.iter().map(|(pid, had)| entry(*pid, at, to_percent(*had, sampled.span))),
        );
    }
    Ok(entries)
}

fn first_version(process: Process) -> ProcessInfoV1 {
    ProcessInfoV1 { pid: process.pid, used_memory: process.memory_mib * MIB }
}

fn current_version(process: Process) -> ProcessInfo {
    let (gpu_instance_id, compute_instance_id) = process.instance.unwrap_or((NO_INSTANCE, NO_INSTANCE));
    ProcessInfo {
        pid: process.pid,
        used_memory: process.memory_mib * MIB,
        gpu_instance_id,
        compute_instance_id,
    }
}

/// The three process lists, each with its first version and two names for the current one.
macro_rules! lists {
    ($($kind:ident: $first:ident $second:ident $third:ident;)*) => {
        entry! {$(
            fn $first(nvml, device: Device, count: Count, array: Array<ProcessInfoV1>) {
                let found = processes(nvml, device, Some(ProcessKind::$kind))?;
                count.list(&array, found.into_iter().map(first_version).collect())
            }

            fn $second(nvml, device: Device, count: Count, array: Array<ProcessInfo>) {
                let found = processes(nvml, device, Some(ProcessKind::$kind))?;
                count.list(&array, found.into_iter().map(current_version).collect())
            }

            fn $third(nvml, device: Device, count: Count, array: Array<ProcessInfo>) {
                let found = processes(nvml, device, Some(ProcessKind::$kind))?;
                count.list(&array, found.into_iter().map(current_version).collect())
            }
        )*}
    };
}

lists! {
    Compute: nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetComputeRunningProcesses_v2
        nvmlDeviceGetComputeRunningProcesses_v3;
    Graphics: nvmlDeviceGetGraphicsRunningProcesses nvmlDeviceGetGraphicsRunningProcesses_v2
        nvmlDeviceGetGraphicsRunningProcesses_v3;
    Mps: nvmlDeviceGetMPSComputeRunningProcesses nvmlDeviceGetMPSComputeRunningProcesses_v2
        nvmlDeviceGetMPSComputeRunningProcesses_v3;
}

entry! {
    fn nvmlDeviceGetRunningProcessDetailList(nvml, device: Device, list: Out<ProcessDetailList>) {
        list.expect_version()?;
        let given = list.get();
        let kind = match given.mode {
            0 => ProcessKind::Compute,
            1 => ProcessKind::Graphics,
            2 => ProcessKind::Mps,
            _ => return Err(Code::InvalidArgument),
        };
        let found = processes(nvml, device, Some(kind))?;
        list.set(ProcessDetailList { entries: found.len() as u32, ..given });
        if found.len() > given.entries as usize || (given.array.is_null() && !found.is_empty()) {
            return Err(Code::InsufficientSize);
        }
        Array::from(given.array).fill(found.into_iter().map(|process| {
            let info = current_version(process);
            let ProcessInfo { pid, used_memory, gpu_instance_id, compute_instance_id } = info;
            ProcessDetail { pid, used_memory, gpu_instance_id, compute_instance_id, used_protected_memory: 0 }
        }));
        Ok(())
    }

    /// Not for instances, because the counters are those of the GPU. One entry for each process
    /// with GPU time since then, as far back as the driver keeps samples.
    fn nvmlDeviceGetProcessUtilization(
        nvml, device: Device, array: Array<ProcessUtilization>, count: Count, since: u64,
    ) {
        let found = utilization(nvml, device, since)?;
        if found.is_empty() {
            count.set(0);
            return Err(Code::NotFound);
        }
        count.list(&array, found)
    }

    /// The same with more engines, which the simulator does not use.
    fn nvmlDeviceGetProcessesUtilizationInfo(nvml, device: Device, list: Out<ProcessesUtilizationInfo>) {
        list.expect_version()?;
        let given = list.get();
        let found = utilization(nvml, device, given.since)?;
        list.set(ProcessesUtilizationInfo { entries: found.len() as u32, ..given });
        if found.is_empty() {
            return Err(Code::NotFound);
        }
        if found.len() > given.entries as usize || given.array.is_null() {
            return Err(Code::InsufficientSize);
        }
        Array::from(given.array).fill(found.into_iter().map(|found| {
            let ProcessUtilization { pid, timestamp, sm, memory, encoder, decoder } = found;
            ProcessUtilizationInfo { timestamp, pid, sm, memory, encoder, decoder, jpeg: 0, flow: 0 }
        }));
        Ok(())
    }

    /// Over the last sample period.
    fn nvmlDeviceGetUtilizationRates(nvml, device: Device, rates: Out<Utilization>) {
        let (slot, gpu) = device.whole(&nvml.state)?;
        if gpu.mig.current {
            return Err(Code::NotSupported);
        }
        let manual = if manual_processes(nvml, slot)?.is_empty() { 0 } else { MANUAL_PROCESS_PERCENT };
        let sampled = nvml.shared.usage_monitor().and_then(|monitor| monitor.last_utilization(whole(slot)));
        let busy = sampled.map_or(0, |sampled| to_percent(sampled.busy, sampled.span)).max(manual);
        rates.set(Utilization { gpu: busy, memory: busy / 2 });
        Ok(())
    }
}
