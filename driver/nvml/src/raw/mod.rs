//! Safe functions over NVML's C functions, with owned values. All unsafe code of the crate is here.
//!
//! Soundness: each call uses a symbol of the loaded library with its signature in nvml.h
//! (`nvml-wrapper-sys`). Out-parameters are locals or vectors of this module that outlive the call,
//! passed with their length. Structs are zeroed plain data with the version that NVML expects.
//! Handles are opaque, and NVML validates them on each call: a stale one returns an error. NVML is
//! documented as thread-safe.

use crate::code::Code;
use crate::error::OpenError;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper_sys::bindings as sys;
use std::ffi::{CString, c_char, c_uint};
use std::path::Path;

/// The loaded library. Dropping it shuts NVML down and unloads it.
///
/// Calls use the symbol table of `nvml-wrapper` directly, because its wrappers lose placements, return
/// codes above 22 and the MIG ids of events. A missing symbol returns [`Code::FunctionNotFound`], so an
/// older library still loads.
pub(crate) struct Library(Nvml);

/// A GPU or MIG device.
#[derive(Clone, Copy)]
pub(crate) struct Device(sys::nvmlDevice_t);
// SAFETY: an opaque handle that only NVML dereferences, and NVML accepts handles from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; the value never changes.
unsafe impl Sync for Device {}

impl Device {
    /// Whether both handles are equal.
    pub(crate) fn is(self, other: Self) -> bool {
        self.0 == other.0
    }
}

/// An event set; it belongs to the thread that created it.
pub(crate) struct EventSet(sys::nvmlEventSet_t);

/// An event from `nvmlEventSetWait`.
pub(crate) struct EventData {
    pub(crate) device: Device,
    pub(crate) kind: u64,
    pub(crate) data: u64,
    pub(crate) gpu_instance: u32,
    pub(crate) compute_instance: u32,
}

/// The remote end of an NVLink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Remote {
    Gpu(String),
    Switch,
    Other,
}

/// An entry of NVML's process lists.
pub(crate) struct ProcessEntry {
    pub(crate) pid: u32,
    /// `None` if the GPU driver does not account memory by process.
    pub(crate) bytes: Option<u64>,
    /// GPU instance id and compute instance id.
    pub(crate) instance: Option<(u32, u32)>,
}

type Answer<T> = Result<T, Code>;

/// `NVML_VALUE_NOT_AVAILABLE`.
const MEMORY_UNKNOWN: u64 = u64::MAX;
/// The id that stands for "no instance".
const NO_INSTANCE: c_uint = c_uint::MAX;
/// Attempts to read a list that grows while it is read.
const MAX_LIST_ATTEMPTS: u32 = 4;

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
const _: () = assert!(size_of::<sys::nvmlFieldValue_t>() == 40);

/// The version field of a versioned struct.
const fn version<T>(number: u32) -> c_uint {
    size_of::<T>() as c_uint | (number << 24)
}

/// Plain C structs of NVML: integers, character arrays and opaque handles.
///
/// # Safety
/// All-zero bytes must be a valid value of the type.
unsafe trait Plain: Sized {
    fn zeroed() -> Self {
        // SAFETY: the implementor promises that zero bytes are a valid value.
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
    nvmlGpuFabricInfo_t nvmlProcessUtilizationSample_t nvmlGpmMetricsGet_t nvmlFieldValue_t
}

fn check(code: sys::nvmlReturn_t) -> Answer<()> {
    if code == sys::nvmlReturn_enum_NVML_SUCCESS { Ok(()) } else { Err(Code::from(code)) }
}

/// Calls one symbol. A missing symbol returns `FunctionNotFound`, as NVML itself would.
macro_rules! nvml {
    ($library:expr, $name:ident ( $($arg:expr),* $(,)? )) => {
        match $library.0.lib().$name.as_ref() {
            // SAFETY: see the module comment; every call here passes pointers to live locals with
            // their lengths, and opaque handles.
            Ok(symbol) => check(unsafe { symbol($($arg),*) }),
            Err(_) => Err(Code::FunctionNotFound),
        }
    };
}

// These modules use the macro above.
mod mig;
pub(crate) use mig::{Ci, CiProfile, Gi, GiInfo};
mod gpm;
pub(crate) use gpm::TimedSample;
mod health;
mod limits;
pub use limits::CgroupMemory;

/// The text in a buffer of NVML, up to its first NUL.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A path as a C string.
fn c_path(path: &Path) -> Answer<CString> {
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| Code::InvalidArgument)
}

impl Library {
    /// Loads the library and initialises NVML. A node without GPUs is no error.
    /// `attach`: NVML attaches to all GPUs at once, and not only to those that are used.
    pub(crate) fn open(path: &Path, attach: bool) -> Result<Self, OpenError> {
        let flags = if attach { InitFlags::NO_GPUS } else { InitFlags::NO_GPUS | InitFlags::NO_ATTACH };
        Nvml::builder()
            .lib_path(path.as_os_str())
            .flags(flags)
            .init()
            .map(Self)
            .map_err(|cause| OpenError::Initialise { path: path.to_owned(), cause })
    }

    pub(crate) fn driver_version(&self) -> Answer<String> {
        let mut buffer = [0; 96];
        nvml!(self, nvmlSystemGetDriverVersion(buffer.as_mut_ptr(), buffer.len() as c_uint))?;
        Ok(text(&buffer))
    }

    /// The CUDA version of the GPU driver: major, minor.
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

    /// Total bytes. Version 2 of the call includes reserved memory, as nvidia-smi does.
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

    /// The bus id in NVML's form, `00000000:1A:00.0`.
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

    /// Cluster UUID and clique id of the NVSwitch fabric that the GPU has joined.
    pub(crate) fn fabric(&self, device: Device) -> Answer<([u8; 16], u32)> {
        let mut info = sys::nvmlGpuFabricInfo_t::zeroed();
        nvml!(self, nvmlDeviceGetGpuFabricInfo(device.0, &mut info))?;
        Ok((info.clusterUuid, info.cliqueId))
    }

    /// The entries of all three process lists. A process may be in several lists.
    pub(crate) fn processes(&self, device: Device) -> Answer<Vec<ProcessEntry>> {
        let mut all = Vec::new();
        for kind in 0..3 {
            let list = |count: &mut c_uint, into: *mut sys::nvmlProcessInfo_t| match kind {
                0 => nvml!(self, nvmlDeviceGetComputeRunningProcesses_v3(device.0, count, into)),
                1 => nvml!(self, nvmlDeviceGetGraphicsRunningProcesses_v3(device.0, count, into)),
                _ => nvml!(self, nvmlDeviceGetMPSComputeRunningProcesses_v3(device.0, count, into)),
            };
            let found = match whole_list(list) {
                // The GPU does not have this list.
                Err(Code::NotSupported | Code::FunctionNotFound) => continue,
                found => found?,
            };
            all.extend(found.iter().map(|process| {
                ProcessEntry {
                    pid: process.pid,
                    bytes: (process.usedGpuMemory != MEMORY_UNKNOWN).then_some(process.usedGpuMemory),
                    instance: (process.gpuInstanceId != NO_INSTANCE)
                        .then_some((process.gpuInstanceId, process.computeInstanceId)),
                }
            }));
        }
        Ok(all)
    }
}

impl Library {
    /// PID, percent of the SM time and sample time of each process with utilization since
    /// `since_us`. Times are in microseconds since the Unix epoch.
    pub(crate) fn utilization(&self, device: Device, since_us: u64) -> Answer<Vec<(u32, u32, u64)>> {
        let list = |count: &mut c_uint, into: *mut sys::nvmlProcessUtilizationSample_t| {
            nvml!(self, nvmlDeviceGetProcessUtilization(device.0, into, count, since_us))
        };
        match whole_list(list) {
            // No process has utilization.
            Err(Code::NotFound) => Ok(Vec::new()),
            found => Ok(found?.iter().map(|sample| (sample.pid, sample.smUtil, sample.timeStamp)).collect()),
        }
    }
}

/// Reads a whole list of processes, which may grow between two calls.
fn whole_list<T: Plain>(list: impl Fn(&mut c_uint, *mut T) -> Answer<()>) -> Answer<Vec<T>> {
    let mut count = 0;
    match list(&mut count, std::ptr::null_mut()) {
        Ok(()) | Err(Code::InsufficientSize) => {}
        Err(code) => return Err(code),
    }
    for _ in 0..MAX_LIST_ATTEMPTS {
        if count == 0 {
            return Ok(Vec::new());
        }
        // Room for processes that start between the two calls.
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

    pub(crate) fn wait(&self, set: &EventSet, timeout_ms: u32) -> Answer<EventData> {
        let mut data = sys::nvmlEventData_t::zeroed();
        nvml!(self, nvmlEventSetWait_v2(set.0, &mut data, timeout_ms))?;
        Ok(EventData {
            device: Device(data.device),
            kind: data.eventType,
            data: data.eventData,
            gpu_instance: data.gpuInstanceId,
            compute_instance: data.computeInstanceId,
        })
    }

    pub(crate) fn free_event_set(&self, set: EventSet) {
        // A set that cannot be freed is freed with the library.
        let _freed: Answer<()> = nvml!(self, nvmlEventSetFree(set.0));
    }
}
