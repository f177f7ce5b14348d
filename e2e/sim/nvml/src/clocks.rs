//! Clocks, power, temperature, fans, PCIe links and similar values that monitoring programs read.
//! They are constants of the model and depend only on whether processes run on the GPU.

use divvy_sim::catalogue::Architecture;
use divvy_sim::code::Code;
use divvy_sim::state::Gpu;

use crate::abi::{FbcStats, MarginTemperature, TemperatureV, ViolationTime};
use crate::argument::{Array, Count, MaybeOut, Out, Outcome};
use crate::handle::Device;
use crate::library::{Nvml, entry};

const CLOCK_KINDS: u32 = 4;
const MEMORY_CLOCK: u32 = 2;
const VIDEO_CLOCK: u32 = 3;
const SAMPLING_PERIOD_US: u32 = 167_000;

/// Maximum graphics and memory clocks in MHz.
const fn top_clocks(architecture: Architecture) -> (u32, u32) {
    match architecture {
        Architecture::Turing => (1590, 5001),
        Architecture::Ampere => (1410, 1593),
        Architecture::Ada => (2520, 9001),
        Architecture::Hopper => (1980, 2619),
        Architecture::Blackwell => (1965, 3996),
    }
}

fn busy(gpu: &Gpu) -> bool {
    !gpu.processes.is_empty()
}

fn clock(gpu: &Gpu, kind: u32, most: bool) -> Outcome<u32> {
    let (graphics, memory) = top_clocks(gpu.model().architecture);
    let now = if most || busy(gpu) { graphics } else { 345 };
    match kind {
        MEMORY_CLOCK => Ok(memory),
        VIDEO_CLOCK => Ok(now * 9 / 10),
        kind if kind < CLOCK_KINDS => Ok(now),
        _ => Err(Code::InvalidArgument),
    }
}

pub(crate) fn temperature(gpu: &Gpu) -> u32 {
    if busy(gpu) { 58 } else { 31 }
}

/// Power in mW: a tenth of the board's limit if idle, seven tenths if not.
pub(crate) fn power_mw(gpu: &Gpu) -> u32 {
    gpu.model().power_watts * if busy(gpu) { 700 } else { 100 }
}

/// Energy in mJ since the last boot or reset.
pub(crate) fn energy(nvml: &Nvml, slot: usize) -> Outcome<u64> {
    Ok(nvml.state.gpu(slot)?.energy_mj())
}

fn whole(nvml: &Nvml, device: Device) -> Outcome<&Gpu> {
    Ok(device.whole(nvml.state_with_gpu_processes()?)?.1)
}

/// Queries of a whole GPU that return one value.
macro_rules! answers {
    ($($(#[$doc:meta])* $name:ident: $kind:ty = |$gpu:ident| $value:expr;)*) => {
        entry! {$(
            $(#[$doc])*
            fn $name(nvml, device: Device, answer: Out<$kind>) {
                let $gpu = whole(nvml, device)?;
                answer.set($value);
                Ok(())
            }
        )*}
    };
}

answers! {
    nvmlDeviceGetPowerUsage: u32 = |gpu| power_mw(gpu);
    nvmlDeviceGetPowerManagementLimit: u32 = |gpu| gpu.model().power_watts * 1000;
    nvmlDeviceGetPowerManagementDefaultLimit: u32 = |gpu| gpu.model().power_watts * 1000;
    nvmlDeviceGetEnforcedPowerLimit: u32 = |gpu| gpu.model().power_watts * 1000;
    nvmlDeviceGetPowerManagementMode: u32 = |_gpu| 1;
    nvmlDeviceGetPerformanceState: u32 = |_gpu| 0;
    nvmlDeviceGetPowerState: u32 = |_gpu| 0;
    nvmlDeviceGetPowerSource: u32 = |_gpu| 0;
    nvmlDeviceGetCurrPcieLinkGeneration: u32 = |gpu| gpu.model().pcie_generation;
    nvmlDeviceGetMaxPcieLinkGeneration: u32 = |gpu| gpu.model().pcie_generation;
    nvmlDeviceGetGpuMaxPcieLinkGeneration: u32 = |gpu| gpu.model().pcie_generation;
    nvmlDeviceGetCurrPcieLinkWidth: u32 = |_gpu| 16;
    nvmlDeviceGetMaxPcieLinkWidth: u32 = |_gpu| 16;
    /// MB/s of one lane: 2000 in generation 1, twice as much in each later one. NVML counts
    /// generations from 1.
    nvmlDeviceGetPcieSpeed: u32 = |gpu| 2000 << gpu.model().pcie_generation.saturating_sub(1).min(8);
    nvmlDeviceGetPcieLinkMaxSpeed: u32 = |gpu| gpu.model().pcie_generation;
    nvmlDeviceGetPcieReplayCounter: u32 = |_gpu| 0;
    nvmlDeviceGetIrqNum: u32 = |gpu| gpu.irq();
    /// Bit 0 is the reason "GPU idle".
    nvmlDeviceGetCurrentClocksThrottleReasons: u64 = |gpu| u64::from(!busy(gpu));
    nvmlDeviceGetCurrentClocksEventReasons: u64 = |gpu| u64::from(!busy(gpu));
    nvmlDeviceGetSupportedClocksThrottleReasons: u64 = |_gpu| 0x1ff;
    nvmlDeviceGetSupportedClocksEventReasons: u64 = |_gpu| 0x1ff;
    nvmlDeviceGetAccountingMode: u32 = |_gpu| 0;
    nvmlDeviceGetAccountingBufferSize: u32 = |_gpu| 4000;
    nvmlDeviceGetMemoryBusWidth: u32 = |gpu| if gpu.model().mig.is_some() { 5120 } else { 384 };
    nvmlDeviceGetAdaptiveClockInfoStatus: u32 = |_gpu| 0;
    /// The boards in the catalogue have no fans of their own.
    nvmlDeviceGetNumFans: u32 = |_gpu| 0;
    nvmlDeviceGetFBCStats: FbcStats = |_gpu| FbcStats { sessions: 0, average_fps: 0, average_latency: 0 };
}

entry! {
    fn nvmlDeviceGetTotalEnergyConsumption(nvml, device: Device, mj: Out<u64>) {
        let (slot, _) = device.whole(&nvml.state)?;
        mj.set(energy(nvml, slot)?);
        Ok(())
    }

    fn nvmlDeviceGetPowerManagementLimitConstraints(nvml, device: Device, least: Out<u32>, most: Out<u32>) {
        let watts = whole(nvml, device)?.model().power_watts;
        least.set(watts * 500);
        most.set(watts * 1000);
        Ok(())
    }

    fn nvmlDeviceGetClockInfo(nvml, device: Device, kind: u32, mhz: Out<u32>) {
        mhz.set(clock(device.target(nvml.state_with_gpu_processes()?)?.gpu, kind, false)?);
        Ok(())
    }

    fn nvmlDeviceGetMaxClockInfo(nvml, device: Device, kind: u32, mhz: Out<u32>) {
        mhz.set(clock(device.target(&nvml.state)?.gpu, kind, true)?);
        Ok(())
    }

    /// Current clock, application clock, default application clock and customer boost clock.
    fn nvmlDeviceGetClock(nvml, device: Device, kind: u32, which: u32, mhz: Out<u32>) {
        if which > 3 {
            return Err(Code::InvalidArgument);
        }
        mhz.set(clock(whole(nvml, device)?, kind, which > 0)?);
        Ok(())
    }

    fn nvmlDeviceGetApplicationsClock(nvml, device: Device, kind: u32, mhz: Out<u32>) {
        mhz.set(clock(whole(nvml, device)?, kind, true)?);
        Ok(())
    }

    fn nvmlDeviceGetDefaultApplicationsClock(nvml, device: Device, kind: u32, mhz: Out<u32>) {
        mhz.set(clock(whole(nvml, device)?, kind, true)?);
        Ok(())
    }

    fn nvmlDeviceGetMaxCustomerBoostClock(nvml, device: Device, kind: u32, mhz: Out<u32>) {
        mhz.set(clock(whole(nvml, device)?, kind, true)?);
        Ok(())
    }

    fn nvmlDeviceGetSupportedMemoryClocks(nvml, device: Device, count: Count, clocks: Array<u32>) {
        let (_, memory) = top_clocks(whole(nvml, device)?.model().architecture);
        count.list(&clocks, vec![memory])
    }

    fn nvmlDeviceGetSupportedGraphicsClocks(
        nvml,
        device: Device,
        memory: u32,
        count: Count,
        clocks: Array<u32>,
    ) {
        let (graphics, known) = top_clocks(whole(nvml, device)?.model().architecture);
        if memory != known {
            return Err(Code::NotFound);
        }
        count.list(&clocks, (0..8).map(|step| graphics - 15 * step).collect())
    }

    fn nvmlDeviceGetAutoBoostedClocksEnabled(
        nvml, device: Device, _enabled: Out<u32>, _default: Out<u32>,
    ) {
        whole(nvml, device)?;
        Err(Code::NotSupported)
    }

    fn nvmlDeviceGetTemperature(nvml, device: Device, sensor: u32, degrees: Out<u32>) {
        let gpu = device.target(nvml.state_with_gpu_processes()?)?.gpu;
        if sensor > 0 {
            return Err(Code::InvalidArgument);
        }
        degrees.set(temperature(gpu));
        Ok(())
    }

    fn nvmlDeviceGetTemperatureV(nvml, device: Device, reading: Out<TemperatureV>) {
        reading.expect_version()?;
        let gpu = device.target(nvml.state_with_gpu_processes()?)?.gpu;
        let asked = reading.get();
        if asked.sensor > 0 {
            return Err(Code::InvalidArgument);
        }
        reading.set(TemperatureV { temperature: temperature(gpu) as i32, ..asked });
        Ok(())
    }

    fn nvmlDeviceGetMarginTemperature(nvml, device: Device, margin: Out<MarginTemperature>) {
        margin.expect_version()?;
        let gpu = whole(nvml, device)?;
        margin.set(MarginTemperature { version: margin.version(), margin: 87 - temperature(gpu) as i32 });
        Ok(())
    }

    /// Shutdown, slowdown, maximum memory and maximum GPU temperature. Acoustic thresholds are only
    /// for cards with fans.
    fn nvmlDeviceGetTemperatureThreshold(nvml, device: Device, threshold: u32, degrees: Out<u32>) {
        whole(nvml, device)?;
        degrees.set(match threshold {
            0 => 92,
            1 => 89,
            2 => 95,
            3 => 87,
            4..=7 => return Err(Code::NotSupported),
            _ => return Err(Code::InvalidArgument),
        });
        Ok(())
    }

    fn nvmlDeviceGetFanSpeed(nvml, device: Device, _speed: Out<u32>) {
        whole(nvml, device)?;
        Err(Code::NotSupported)
    }

    fn nvmlDeviceGetFanSpeed_v2(nvml, device: Device, _fan: u32, _speed: Out<u32>) {
        whole(nvml, device)?;
        Err(Code::NotSupported)
    }

    fn nvmlDeviceGetPcieThroughput(nvml, device: Device, counter: u32, kib_per_second: Out<u32>) {
        let gpu = whole(nvml, device)?;
        if counter > 1 {
            return Err(Code::InvalidArgument);
        }
        kib_per_second.set(if busy(gpu) { 1_000_000 } else { 0 });
        Ok(())
    }

    fn nvmlDeviceGetEncoderUtilization(nvml, device: Device, percent: Out<u32>, period: Out<u32>) {
        engine(nvml, device, &percent, &period)
    }

    fn nvmlDeviceGetDecoderUtilization(nvml, device: Device, percent: Out<u32>, period: Out<u32>) {
        engine(nvml, device, &percent, &period)
    }

    fn nvmlDeviceGetJpgUtilization(nvml, device: Device, percent: Out<u32>, period: Out<u32>) {
        engine(nvml, device, &percent, &period)
    }

    fn nvmlDeviceGetOfaUtilization(nvml, device: Device, percent: Out<u32>, period: Out<u32>) {
        engine(nvml, device, &percent, &period)
    }

    fn nvmlDeviceGetEncoderStats(nvml, device: Device, sessions: Out<u32>, fps: Out<u32>, latency: Out<u32>) {
        whole(nvml, device)?;
        sessions.set(0);
        fps.set(0);
        latency.set(0);
        Ok(())
    }

    fn nvmlDeviceGetEncoderCapacity(nvml, device: Device, kind: u32, percent: Out<u32>) {
        let gpu = whole(nvml, device)?;
        match (kind, gpu.model().encoders) {
            (3.., _) => Err(Code::InvalidArgument),
            (_, 0) => Err(Code::NotSupported),
            _ => {
                percent.set(100);
                Ok(())
            }
        }
    }

    fn nvmlDeviceGetEncoderSessions(nvml, device: Device, count: Count, _sessions: Array<u8>) {
        whole(nvml, device)?;
        count.set(0);
        Ok(())
    }

    fn nvmlDeviceGetFBCSessions(nvml, device: Device, count: Count, _sessions: Array<u8>) {
        whole(nvml, device)?;
        count.set(0);
        Ok(())
    }

    fn nvmlDeviceGetAccountingPids(nvml, device: Device, count: Count, _pids: Array<u32>) {
        whole(nvml, device)?;
        count.set(0);
        Ok(())
    }

    fn nvmlDeviceGetViolationStatus(nvml, device: Device, policy: u32, time: Out<ViolationTime>) {
        whole(nvml, device)?;
        if !matches!(policy, 0..=5 | 10 | 11) {
            return Err(Code::InvalidArgument);
        }
        time.set(ViolationTime { reference: 0, violation: 0 });
        Ok(())
    }

    /// Setting application clocks and resetting GPU clocks are restricted to root.
    fn nvmlDeviceGetAPIRestriction(nvml, device: Device, kind: u32, restricted: Out<u32>) {
        whole(nvml, device)?;
        if kind > 1 {
            return Err(Code::InvalidArgument);
        }
        restricted.set(1);
        Ok(())
    }

    /// The simulator keeps no such samples.
    fn nvmlDeviceGetSamples(
        nvml, device: Device, kind: u32, _since: u64, _value_type: MaybeOut<u32>, _count: Count,
        _samples: Array<u8>,
    ) {
        whole(nvml, device)?;
        Err(if kind > 9 { Code::InvalidArgument } else { Code::NotFound })
    }
}

fn engine(nvml: &Nvml, device: Device, percent: &Out<u32>, period: &Out<u32>) -> Outcome {
    if whole(nvml, device)?.mig.current {
        return Err(Code::NotSupported);
    }
    percent.set(0);
    period.set(SAMPLING_PERIOD_US);
    Ok(())
}
