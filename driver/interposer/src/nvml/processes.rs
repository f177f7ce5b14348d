//! Lists of processes: only the share's, under their container pids and with their charges.
//!
//! Each function fills a list of the caller's, from which other processes are removed. If the
//! library asked for a larger list, the extra space is harmless.

use super::call::{Handle, NvmlReturn, hook, visible_share};
use crate::share::Device;
use core::ffi::{c_uint, c_ulonglong};
use divvy_interposer_core::nvml;

/// An entry of one of the lists.
trait Entry: Copy {
    fn pid(&mut self) -> &mut c_uint;

    /// The memory field, if the entry has one.
    fn memory(&mut self) -> Option<&mut c_ulonglong> {
        None
    }
}

macro_rules! entry {
    ($(#[$meta:meta])* $name:ident { $($field:ident: $kind:ty),* $(,)? } $(memory $memory:ident)?) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Default)]
        #[repr(C)]
        pub(crate) struct $name { $($field: $kind),* }

        impl Entry for $name {
            fn pid(&mut self) -> &mut c_uint {
                &mut self.pid
            }
            $(fn memory(&mut self) -> Option<&mut c_ulonglong> {
                Some(&mut self.$memory)
            })?
        }
    };
}

entry! {
    /// `nvmlProcessInfo_v1_t`.
    Info { pid: c_uint, bytes: c_ulonglong } memory bytes
}
entry! {
    /// `nvmlProcessInfo_v2_t`, which version 3 has too.
    InfoV2 { pid: c_uint, bytes: c_ulonglong, gpu_instance: c_uint, compute_instance: c_uint } memory bytes
}
entry! {
    /// `nvmlProcessDetail_v1_t`.
    Detail {
        pid: c_uint,
        bytes: c_ulonglong,
        gpu_instance: c_uint,
        compute_instance: c_uint,
        protected: c_ulonglong,
    } memory bytes
}
entry! {
    /// `nvmlProcessUtilizationSample_t`.
    Sample { pid: c_uint, time: c_ulonglong, sm: c_uint, memory: c_uint, encoder: c_uint, decoder: c_uint }
}
entry! {
    /// `nvmlProcessUtilizationInfo_v1_t`.
    SampleInfo {
        time: c_ulonglong,
        pid: c_uint,
        sm: c_uint,
        memory: c_uint,
        encoder: c_uint,
        decoder: c_uint,
        jpeg: c_uint,
        flow: c_uint,
    }
}
entry! {
    /// `nvmlEncoderSessionInfo_t`.
    Encoding { session: c_uint, pid: c_uint, rest: [c_uint; 6] }
}
entry! {
    /// `nvmlFBCSessionInfo_t`.
    Capturing { session: c_uint, pid: c_uint, rest: [c_uint; 10] }
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
pub(crate) struct DetailList {
    version: c_uint,
    mode: c_uint,
    count: c_uint,
    list: *mut Detail,
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
pub(crate) struct SampleInfoList {
    version: c_uint,
    count: c_uint,
    since: c_ulonglong,
    list: *mut SampleInfo,
}

const _: () = assert!(size_of::<Encoding>() == 32 && size_of::<Capturing>() == 48);

/// Removes entries of other shares and returns the new length.
fn retain_share<T: Entry>(entries: &mut [T], find: impl Fn(c_uint) -> Option<nvml::Process>) -> usize {
    let mut kept = 0;
    for at in 0..entries.len() {
        let Some(mut entry) = entries.get(at).copied() else { break };
        let Some(process) = find(*entry.pid()) else { continue };
        *entry.pid() = process.pid;
        if let Some(memory) = entry.memory() {
            *memory = process.bytes;
        }
        if let Some(place) = entries.get_mut(kept) {
            *place = entry;
            kept += 1;
        }
    }
    kept
}

/// # Safety
/// If `answer` is success, `count` and `list` are null or were filled in by the library.
unsafe fn restrict<T: Entry>(
    answer: NvmlReturn,
    device: Handle,
    count: *mut c_uint,
    list: *mut T,
) -> NvmlReturn {
    if let Some(share) = visible_share(answer, device)
        && !count.is_null()
        && !list.is_null()
    {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let entries = core::slice::from_raw_parts_mut(list, *count as usize);
            *count = retain_share(entries, |pid| share.process(pid)) as c_uint;
        }
    }
    answer
}

/// Utilisation of the device and its memory by the share's processes, from the newest sample of
/// each process, in percent of the share's limit.
pub(super) fn share_utilisation(share: &Device, samples: &[Sample]) -> [c_uint; 2] {
    let newest =
        |sample: &&Sample| !samples.iter().any(|other| other.pid == sample.pid && other.time > sample.time);
    let own = samples.iter().filter(newest).filter(|sample| share.process(sample.pid).is_some());
    let sums = own.fold([0; 2], |[sm, memory]: [c_uint; 2], sample| {
        [sm.saturating_add(sample.sm), memory.saturating_add(sample.memory)]
    });
    sums.map(|sum| nvml::utilisation(sum, share.compute_percent()))
}

macro_rules! lists {
    ($($(#[$meta:meta])* $name:ident of $kind:ty;)*) => {
        $(hook! {
            $(#[$meta])*
            $name(device: Handle, count: *mut c_uint, list: *mut $kind) |real| {
                // SAFETY: the caller's list, filled in by the library.
                unsafe { restrict(real(device, count, list), device, count, list) }
            }
        })*
    };
}

lists! {
    /// First version.
    nvmlDeviceGetComputeRunningProcesses of Info;
    /// With the MIG instances of each process.
    nvmlDeviceGetComputeRunningProcesses_v2 of InfoV2;
    /// With the MIG instances of each process.
    nvmlDeviceGetComputeRunningProcesses_v3 of InfoV2;
    /// First version.
    nvmlDeviceGetGraphicsRunningProcesses of Info;
    /// With the MIG instances of each process.
    nvmlDeviceGetGraphicsRunningProcesses_v2 of InfoV2;
    /// With the MIG instances of each process.
    nvmlDeviceGetGraphicsRunningProcesses_v3 of InfoV2;
    /// First version.
    nvmlDeviceGetMPSComputeRunningProcesses of Info;
    /// With the MIG instances of each process.
    nvmlDeviceGetMPSComputeRunningProcesses_v2 of InfoV2;
    /// With the MIG instances of each process.
    nvmlDeviceGetMPSComputeRunningProcesses_v3 of InfoV2;
    /// Sessions of the video encoder.
    nvmlDeviceGetEncoderSessions of Encoding;
    /// Sessions of frame buffer capture.
    nvmlDeviceGetFBCSessions of Capturing;
}

hook! {
    /// All kinds of process in one list.
    nvmlDeviceGetRunningProcessDetailList(device: Handle, list: *mut DetailList) |real| {
        let answer = real(device, list);
        // SAFETY: the caller's list, filled in by the library; only for the known version.
        unsafe {
            if list.is_null() || (*list).version != (size_of::<DetailList>() as c_uint | 1 << 24) {
                return answer;
            }
            restrict(answer, device, &raw mut (*list).count, (*list).list)
        }
    }
}

hook! {
    /// Samples by process.
    nvmlDeviceGetProcessUtilization(
        device: Handle, list: *mut Sample, count: *mut c_uint, since: c_ulonglong,
    ) |real| {
        // SAFETY: the caller's list, filled in by the library.
        unsafe { restrict(real(device, list, count, since), device, count, list) }
    }
}

hook! {
    /// Samples by process, with the other engines.
    nvmlDeviceGetProcessesUtilizationInfo(device: Handle, list: *mut SampleInfoList) |real| {
        let answer = real(device, list);
        // SAFETY: the caller's list, filled in by the library; only for the known version.
        unsafe {
            if list.is_null() || (*list).version != (size_of::<SampleInfoList>() as c_uint | 1 << 24) {
                return answer;
            }
            restrict(answer, device, &raw mut (*list).count, (*list).list)
        }
    }
}
