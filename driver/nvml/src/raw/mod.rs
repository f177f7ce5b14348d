//! NVML's C functions as safe functions over owned values. All unsafe code of
//! the crate is here.
//!
//! Why it is sound: each call goes to a symbol of the loaded library with the
//! signature of NVML's header (`nvml-wrapper-sys`); out-parameters are locals
//! or vectors of this module that outlive the call and whose length is passed
//! with them; structs are zeroed plain data, versioned where NVML wants it;
//! handles are opaque values that NVML itself validates on every call, so that
//! a stale one is an error code. NVML is documented as thread-safe.

use crate::code::Code;
use crate::error::OpenError;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper_sys::bindings as sys;
use std::ffi::{CString, c_char, c_uint};
use std::path::Path;

/// The loaded library; dropping it shuts NVML down and unloads it.
pub(crate) struct Library(Nvml);

/// A GPU or MIG device.
#[derive(Clone, Copy)]
pub(crate) struct Device(sys::nvmlDevice_t);
// SAFETY: the pointer is an opaque handle that only NVML looks at, and NVML
// takes handles from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; the value is never written after it was made.
unsafe impl Sync for Device {}

impl Device {
    /// Whether the two handles are the same value.
    pub(crate) fn is(self, other: Self) -> bool {
        self.0 == other.0
    }
}

/// An event set; belongs to the thread that made it.
pub(crate) struct EventSet(sys::nvmlEventSet_t);

/// What `nvmlEventSetWait` heard.
pub(crate) struct Heard {
    pub(crate) device: Device,
    pub(crate) kind: u64,
    pub(crate) data: u64,
    pub(crate) gpu_instance: u32,
    pub(crate) compute_instance: u32,
}

/// The far end of an NVLink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Remote {
    Gpu(String),
    Switch,
    Other,
}

/// A line of one of NVML's lists of processes.
pub(crate) struct ProcessEntry {
    pub(crate) pid: u32,
    /// Absent where the GPU driver does not account by process.
    pub(crate) bytes: Option<u64>,
    /// GPU instance and compute instance.
    pub(crate) instance: Option<(u32, u32)>,
}

type Answer<T> = Result<T, Code>;

/// `NVML_VALUE_NOT_AVAILABLE`.
const UNKNOWN: u64 = u64::MAX;
/// The id of no instance.
const NOBODY: c_uint = c_uint::MAX;
/// A list that grows faster than it is read is given up after as many attempts.
const LISTINGS: u32 = 4;

const _: () = assert!(size_of::<sys::nvmlGpuInstanceProfileInfo_t>() == 48);
const _: () = assert!(size_of::<sys::nvmlGpuInstanceProfileInfo_v2_t>() == 152);
const _: () = assert!(size_of::<sys::nvmlComputeInstanceProfileInfo_t>() == 36);
const _: () = assert!(size_of::<sys::nvmlGpuInstanceInfo_t>() == 24);
const _: () = assert!(size_of::<sys::nvmlComputeInstanceInfo_t>() == 32);
const _: () = assert!(size_of::<sys::nvmlGpuInstancePlacement_t>() == 8);
const _: () = assert!(size_of::<sys::nvmlEventData_t>() == 32);
const _: () = assert!(size_of::<sys::nvmlProcessInfo_t>() == 24);
const _: () = assert!(size_of::<sys::nvmlMemory_t>() == 24);
const _: () = assert!(size_of::<sys::nvmlMemory_v2_t>() == 40);
const _: () = assert!(size_of::<sys::nvmlPciInfo_t>() == 68);
const _: () = assert!(size_of::<sys::nvmlProcessUtilizationSample_t>() == 32);
const _: () = assert!(size_of::<sys::nvmlGpmMetric_t>() == 40);

/// Version word of a versioned struct.
const fn version<T>(number: u32) -> c_uint {
    size_of::<T>() as c_uint | (number << 24)
}

/// NVML's plain C structs: integers, character arrays and opaque handles.
///
/// # Safety
/// All-zero bytes must be a value of the type.
unsafe trait Plain: Sized {
    fn zeroed() -> Self {
        // SAFETY: the implementor promises that zero bytes are a value.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! plain {
    ($($type:ident)*) => {$(
        // SAFETY: a C struct of integers, integer arrays and nullable handles.
        unsafe impl Plain for sys::$type {}
    )*};
}

plain! {
    nvmlGpuInstanceProfileInfo_t nvmlGpuInstanceProfileInfo_v2_t nvmlComputeInstanceProfileInfo_t
    nvmlGpuInstanceInfo_t nvmlComputeInstanceInfo_t nvmlGpuInstancePlacement_t nvmlEventData_t
    nvmlProcessInfo_t nvmlMemory_t nvmlMemory_v2_t nvmlPciInfo_t nvmlDeviceAddressingMode_t
    nvmlGpuFabricInfo_t nvmlProcessUtilizationSample_t nvmlGpmMetricsGet_t
}

fn check(code: sys::nvmlReturn_t) -> Answer<()> {
    if code == sys::nvmlReturn_enum_NVML_SUCCESS { Ok(()) } else { Err(Code::from(code)) }
}

/// Calls one symbol; a missing one answers as NVML does.
macro_rules! nvml {
    ($library:expr, $name:ident ( $($arg:expr),* $(,)? )) => {
        match $library.0.lib().$name.as_ref() {
            // SAFETY: see the head of this module; every call in it passes
            // pointers to live locals with their lengths, and opaque handles.
            Ok(symbol) => check(unsafe { symbol($($arg),*) }),
            Err(_) => Err(Code::FunctionNotFound),
        }
    };
}

// After the macro, which it uses.
mod mig;
pub(crate) use mig::{Ci, CiProfile, Gi, GiInfo};
mod gpm;
pub(crate) use gpm::GpmSample;
mod limits;
pub use limits::CgroupMemory;

/// Text that NVML wrote into a buffer, up to its first NUL.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A path as C wants it.
fn c_path(path: &Path) -> Answer<CString> {
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| Code::InvalidArgument)
}

impl Library {
    /// Loads that file and initialises NVML; no GPU at all is fine.
    pub(crate) fn open(path: &Path) -> Result<Self, OpenError> {
        Nvml::builder()
            .lib_path(path.as_os_str())
            .flags(InitFlags::NO_GPUS)
            .init()
            .map(Self)
            .map_err(|cause| OpenError::Initialise { path: path.to_owned(), cause })
    }

    pub(crate) fn driver_version(&self) -> Answer<String> {
        let mut buffer = [0; 96];
        nvml!(self, nvmlSystemGetDriverVersion(buffer.as_mut_ptr(), buffer.len() as c_uint))?;
        Ok(text(&buffer))
    }

    /// CUDA version of the GPU driver, (major, minor).
    pub(crate) fn cuda_version(&self) -> Answer<(u32, u32)> {
        let mut number = 0;
        nvml!(self, nvmlSystemGetCudaDriverVersion_v2(&mut number))?;
        let number = u32::try_from(number).unwrap_or(0);
        Ok((number / 1000, number % 1000 / 10))
    }

    pub(crate) fn device_count(&self) -> Answer<u32> {
        let mut count = 0;
        nvml!(self, nvmlDeviceGetCount_v2(&mut count))?;
        Ok(count)
    }

    pub(crate) fn device_by_index(&self, index: u32) -> Answer<Device> {
        let mut device = std::ptr::null_mut();
        nvml!(self, nvmlDeviceGetHandleByIndex_v2(index, &mut device))?;
        Ok(Device(device))
    }

    pub(crate) fn device_by_uuid(&self, uuid: &str) -> Answer<Device> {
        let uuid = CString::new(uuid).map_err(|_| Code::InvalidArgument)?;
        let mut device = std::ptr::null_mut();
        nvml!(self, nvmlDeviceGetHandleByUUID(uuid.as_ptr(), &mut device))?;
        Ok(Device(device))
    }

    /// UUID of a GPU or MIG device.
    pub(crate) fn uuid(&self, device: Device) -> Answer<String> {
        let mut buffer = [0; 96];
        nvml!(self, nvmlDeviceGetUUID(device.0, buffer.as_mut_ptr(), buffer.len() as c_uint))?;
        Ok(text(&buffer))
    }

    pub(crate) fn name(&self, device: Device) -> Answer<String> {
        let mut buffer = [0; 96];
        nvml!(self, nvmlDeviceGetName(device.0, buffer.as_mut_ptr(), buffer.len() as c_uint))?;
        Ok(text(&buffer))
    }

    pub(crate) fn brand(&self, device: Device) -> Answer<u32> {
        let mut brand = 0;
        nvml!(self, nvmlDeviceGetBrand(device.0, &mut brand))?;
        Ok(brand)
    }

    pub(crate) fn architecture(&self, device: Device) -> Answer<u32> {
        let mut architecture = 0;
        nvml!(self, nvmlDeviceGetArchitecture(device.0, &mut architecture))?;
        Ok(architecture)
    }

    pub(crate) fn compute_capability(&self, device: Device) -> Answer<(u32, u32)> {
        let (mut major, mut minor) = (0, 0);
        nvml!(self, nvmlDeviceGetCudaComputeCapability(device.0, &mut major, &mut minor))?;
        Ok((u32::try_from(major).unwrap_or(0), u32::try_from(minor).unwrap_or(0)))
    }

    /// Total bytes; the second version of the call counts reserved memory too, as nvidia-smi does.
    pub(crate) fn memory_total(&self, device: Device) -> Answer<u64> {
        let mut memory = sys::nvmlMemory_v2_t::zeroed();
        memory.version = version::<sys::nvmlMemory_v2_t>(2);
        match nvml!(self, nvmlDeviceGetMemoryInfo_v2(device.0, &mut memory)) {
            Ok(()) => Ok(memory.total),
            Err(Code::FunctionNotFound | Code::ArgumentVersionMismatch) => {
                let mut memory = sys::nvmlMemory_t::zeroed();
                nvml!(self, nvmlDeviceGetMemoryInfo(device.0, &mut memory))?;
                Ok(memory.total)
            }
            Err(code) => Err(code),
        }
    }

    pub(crate) fn minor(&self, device: Device) -> Answer<u32> {
        let mut minor = 0;
        nvml!(self, nvmlDeviceGetMinorNumber(device.0, &mut minor))?;
        Ok(minor)
    }

    /// Bus id as NVML writes it, `00000000:1A:00.0`.
    pub(crate) fn bus_id(&self, device: Device) -> Answer<String> {
        let mut pci = sys::nvmlPciInfo_t::zeroed();
        nvml!(self, nvmlDeviceGetPciInfo_v3(device.0, &mut pci))?;
        Ok(text(&pci.busId))
    }

    pub(crate) fn addressing_mode(&self, device: Device) -> Answer<u32> {
        let mut mode = sys::nvmlDeviceAddressingMode_t::zeroed();
        mode.version = version::<sys::nvmlDeviceAddressingMode_t>(1);
        nvml!(self, nvmlDeviceGetAddressingMode(device.0, &mut mode))?;
        Ok(mode.value)
    }

    pub(crate) fn compute_mode(&self, device: Device) -> Answer<u32> {
        let mut mode = 0;
        nvml!(self, nvmlDeviceGetComputeMode(device.0, &mut mode))?;
        Ok(mode)
    }

    pub(crate) fn set_compute_mode(&self, device: Device, mode: u32) -> Answer<()> {
        nvml!(self, nvmlDeviceSetComputeMode(device.0, mode))
    }

    pub(crate) fn link_is_active(&self, device: Device, link: u32) -> Answer<bool> {
        let mut active = 0;
        nvml!(self, nvmlDeviceGetNvLinkState(device.0, link, &mut active))?;
        Ok(active == sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED)
    }

    pub(crate) fn link_remote(&self, device: Device, link: u32) -> Answer<Remote> {
        let mut kind = 0;
        match nvml!(self, nvmlDeviceGetNvLinkRemoteDeviceType(device.0, link, &mut kind)) {
            Ok(()) | Err(Code::FunctionNotFound | Code::NotSupported) => {}
            Err(code) => return Err(code),
        }
        match kind {
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => Ok(Remote::Switch),
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => {
                let mut pci = sys::nvmlPciInfo_t::zeroed();
                nvml!(self, nvmlDeviceGetNvLinkRemotePciInfo_v2(device.0, link, &mut pci))?;
                Ok(Remote::Gpu(text(&pci.busId)))
            }
            _ => Ok(Remote::Other),
        }
    }

    /// Cluster and clique of an NVSwitch fabric the GPU has joined.
    pub(crate) fn fabric(&self, device: Device) -> Answer<([u8; 16], u32)> {
        let mut info = sys::nvmlGpuFabricInfo_t::zeroed();
        nvml!(self, nvmlDeviceGetGpuFabricInfo(device.0, &mut info))?;
        Ok((info.clusterUuid, info.cliqueId))
    }

    /// Entries of the lists of all kinds; a process can be in several.
    pub(crate) fn processes(&self, device: Device) -> Answer<Vec<ProcessEntry>> {
        let mut all = Vec::new();
        for kind in 0..3 {
            let list = |count: &mut c_uint, into: *mut sys::nvmlProcessInfo_t| match kind {
                0 => nvml!(self, nvmlDeviceGetComputeRunningProcesses_v3(device.0, count, into)),
                1 => nvml!(self, nvmlDeviceGetGraphicsRunningProcesses_v3(device.0, count, into)),
                _ => nvml!(self, nvmlDeviceGetMPSComputeRunningProcesses_v3(device.0, count, into)),
            };
            let found = match whole_list(list) {
                // The GPU has no such list.
                Err(Code::NotSupported | Code::FunctionNotFound) => continue,
                found => found?,
            };
            all.extend(found.iter().map(|process| {
                ProcessEntry {
                    pid: process.pid,
                    bytes: (process.usedGpuMemory != UNKNOWN).then_some(process.usedGpuMemory),
                    instance: (process.gpuInstanceId != NOBODY)
                        .then_some((process.gpuInstanceId, process.computeInstanceId)),
                }
            }));
        }
        Ok(all)
    }
}

impl Library {
    /// Process, per cent of the multiprocessors' time and time of the sample, for each process that had some since
    /// `since_us`; times in microseconds of the system clock.
    pub(crate) fn utilization(&self, device: Device, since_us: u64) -> Answer<Vec<(u32, u32, u64)>> {
        let list = |count: &mut c_uint, into: *mut sys::nvmlProcessUtilizationSample_t| {
            nvml!(self, nvmlDeviceGetProcessUtilization(device.0, into, count, since_us))
        };
        match whole_list(list) {
            // Nobody had any.
            Err(Code::NotFound) => Ok(Vec::new()),
            found => Ok(found?.iter().map(|sample| (sample.pid, sample.smUtil, sample.timeStamp)).collect()),
        }
    }
}

/// A list of processes, however it grows while it is asked for.
fn whole_list<T: Plain>(list: impl Fn(&mut c_uint, *mut T) -> Answer<()>) -> Answer<Vec<T>> {
    let mut count = 0;
    match list(&mut count, std::ptr::null_mut()) {
        Ok(()) | Err(Code::InsufficientSize) => {}
        Err(code) => return Err(code),
    }
    for _ in 0..LISTINGS {
        if count == 0 {
            return Ok(Vec::new());
        }
        // Head-room for processes that start between the two calls.
        let mut found: Vec<_> = (0..count + 16).map(|_| T::zeroed()).collect();
        count = found.len() as c_uint;
        match list(&mut count, found.as_mut_ptr()) {
            Ok(()) => {
                found.truncate(count as usize);
                return Ok(found);
            }
            Err(Code::InsufficientSize) => {}
            Err(code) => return Err(code),
        }
    }
    Err(Code::InsufficientSize)
}

/// Events.
impl Library {
    pub(crate) fn create_event_set(&self) -> Answer<EventSet> {
        let mut set = std::ptr::null_mut();
        nvml!(self, nvmlEventSetCreate(&mut set))?;
        Ok(EventSet(set))
    }

    pub(crate) fn supported_events(&self, device: Device) -> Answer<u64> {
        let mut kinds = 0;
        nvml!(self, nvmlDeviceGetSupportedEventTypes(device.0, &mut kinds))?;
        Ok(kinds)
    }

    pub(crate) fn register_events(&self, device: Device, kinds: u64, set: &EventSet) -> Answer<()> {
        nvml!(self, nvmlDeviceRegisterEvents(device.0, kinds, set.0))
    }

    pub(crate) fn wait(&self, set: &EventSet, timeout_ms: u32) -> Answer<Heard> {
        let mut data = sys::nvmlEventData_t::zeroed();
        nvml!(self, nvmlEventSetWait_v2(set.0, &mut data, timeout_ms))?;
        Ok(Heard {
            device: Device(data.device),
            kind: data.eventType,
            data: data.eventData,
            gpu_instance: data.gpuInstanceId,
            compute_instance: data.computeInstanceId,
        })
    }

    pub(crate) fn free_event_set(&self, set: EventSet) {
        // A set that cannot be freed goes with the library.
        let _freed: Answer<()> = nvml!(self, nvmlEventSetFree(set.0));
    }
}
