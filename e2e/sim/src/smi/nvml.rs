//! The NVML calls that `nvidia-smi` makes.
//!
//! The library is looked up in this program's own driver root first, then by its soname.
#![allow(unsafe_code, reason = "NVML is a C library, loaded at run time")]

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

/// `nvmlDevice_t`, `nvmlGpuInstance_t` and `nvmlComputeInstance_t`, as opaque numbers.
pub(super) type Handle = usize;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Placement {
    pub(super) start: u32,
    pub(super) size: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub(super) version: u32,
    pub(super) total: u64,
    pub(super) reserved: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Bar1 {
    pub(super) total: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Pci {
    pub(super) _legacy: [c_char; 16],
    pub(super) domain: u32,
    pub(super) bus: u32,
    pub(super) device: u32,
    pub(super) device_id: u32,
    pub(super) subsystem_id: u32,
    pub(super) bus_id: [c_char; 32],
}

/// A GPU-instance profile, version 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GiProfile {
    pub(super) version: u32,
    pub(super) id: u32,
    pub(super) p2p: u32,
    pub(super) slices: u32,
    pub(super) instances: u32,
    pub(super) sm: u32,
    pub(super) ce: u32,
    pub(super) dec: u32,
    pub(super) enc: u32,
    pub(super) jpg: u32,
    pub(super) ofa: u32,
    pub(super) memory_mib: u64,
    pub(super) name: [c_char; 96],
}

/// A compute-instance profile, version 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CiProfile {
    pub(super) version: u32,
    pub(super) id: u32,
    pub(super) slices: u32,
    pub(super) instances: u32,
    pub(super) sm: u32,
    pub(super) ce: u32,
    pub(super) dec: u32,
    pub(super) enc: u32,
    pub(super) jpg: u32,
    pub(super) ofa: u32,
    pub(super) name: [c_char; 96],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GiInfo {
    pub(super) _device: Handle,
    pub(super) id: u32,
    pub(super) profile: u32,
    pub(super) placement: Placement,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CiInfo {
    pub(super) _device: Handle,
    pub(super) _gi: Handle,
    pub(super) id: u32,
    pub(super) profile: u32,
    pub(super) placement: Placement,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Attributes {
    pub(super) sm: u32,
    pub(super) ce: u32,
    pub(super) dec: u32,
    pub(super) enc: u32,
    pub(super) jpg: u32,
    pub(super) ofa: u32,
    pub(super) _slices: [u32; 2],
    pub(super) _memory_mib: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) used: u64,
    pub(super) gi: u32,
    pub(super) ci: u32,
}

impl Pci {
    pub(super) fn bus_id(&self) -> String {
        text(&self.bus_id)
    }
}

impl GiProfile {
    pub(super) fn name(&self) -> String {
        text(&self.name)
    }
}

impl CiProfile {
    pub(super) fn name(&self) -> String {
        text(&self.name)
    }
}

pub(super) fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> =
        array.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The version word of a structure.
pub(super) const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// A GPU that the command applies to.
pub(super) struct Selected {
    pub(super) index: u32,
    pub(super) handle: Handle,
}

/// Library directories, relative to the directory of the program.
const LIB_DIRS: [&str; 2] = ["../lib/x86_64-linux-gnu", "../lib/aarch64-linux-gnu"];
const SONAME: &str = "libnvidia-ml.so.1";
/// Upper limit for the number of instances or processes of a GPU.
pub(super) const MAX_LISTED: usize = 64;

/// The reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum SmiError {
    #[error(
        "NVIDIA-SMI couldn't find {SONAME} library in your system. Please make sure that the NVIDIA Display \
         Driver is properly installed and present in your system."
    )]
    NoLibrary(#[source] libloading::Error),
    #[error("Function {name} not found")]
    NoSymbol { name: &'static str },
    #[error("{}", text_of(*.0))]
    Nvml(u32),
    #[error("{0}")]
    Usage(String),
    #[error("{what}: {}", text_of(*code))]
    Failed { what: String, code: u32 },
}

impl SmiError {
    /// The exit status: NVML's code, or 2 for a usage error.
    pub(super) fn status(&self) -> u8 {
        match self {
            Self::NoLibrary(_) => 12,
            Self::NoSymbol { .. } => 13,
            Self::Usage(_) => 2,
            Self::Nvml(code) | Self::Failed { code, .. } => u8::try_from(*code).unwrap_or(255),
        }
    }
}

/// Makes a write to a closed pipe end the program, as for a C program. Rust programs get an error
/// instead, on which `println!` panics.
pub(super) fn die_of_closed_pipes() {
    // SAFETY: the default action for a signal is valid, and no other thread runs yet.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

pub(super) type Smi<T> = Result<T, SmiError>;

/// The real program's texts for return codes.
pub(super) fn text_of(code: u32) -> String {
    let known = match code {
        2 => "Invalid Argument",
        3 => "Not Supported",
        4 => "Insufficient Permissions",
        6 => "Not Found",
        9 => {
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that \
             the latest NVIDIA driver is installed and running."
        }
        15 => "GPU is lost",
        16 => "GPU requires reset",
        19 => "In use by another client",
        23 => "Insufficient Resources",
        _ => return format!("Unknown Error ({code})"),
    };
    known.to_owned()
}

/// The loaded and initialised library, and its path.
pub(super) struct Nvml {
    library: libloading::Library,
    pub(super) path: PathBuf,
}

impl Nvml {
    pub(super) fn load(program: Option<&Path>) -> Smi<Self> {
        let beside = program
            .and_then(Path::parent)
            .into_iter()
            .flat_map(|dir| LIB_DIRS.map(|lib| dir.join(lib).join(SONAME)))
            .find(|path| path.exists());
        let path = beside.unwrap_or_else(|| PathBuf::from(SONAME));
        // SAFETY: loading libnvidia-ml runs no initialisation code that could cause harm.
        let library = unsafe { libloading::Library::new(&path) }.map_err(SmiError::NoLibrary)?;
        let nvml = Self { library, path };
        let init: unsafe extern "C" fn() -> u32 = nvml.symbol("nvmlInit_v2")?;
        // SAFETY: the function has no arguments.
        check(unsafe { init() })?;
        Ok(nvml)
    }

    /// A function of the library. `F` must be its type in the header.
    pub(super) fn symbol<F: Copy>(&self, name: &'static str) -> Smi<F> {
        // SAFETY: all callers are in this file and name the type in NVML's header.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        symbol.map(|symbol| *symbol).map_err(|_| SmiError::NoSymbol { name })
    }

    /// Calls `name(handle, &mut T)`.
    pub(super) fn get<T: Copy>(&self, name: &'static str, handle: Handle, start: T) -> Smi<T> {
        let call: unsafe extern "C" fn(Handle, *mut T) -> u32 = self.symbol(name)?;
        let mut value = start;
        // SAFETY: `value` has the type that the call fills in.
        check(unsafe { call(handle, &mut value) })?;
        Ok(value)
    }

    /// Calls `name(handle, number, &mut T)`.
    pub(super) fn get_with<T: Copy>(
        &self,
        name: &'static str,
        handle: Handle,
        number: u32,
        start: T,
    ) -> Smi<T> {
        let call: unsafe extern "C" fn(Handle, u32, *mut T) -> u32 = self.symbol(name)?;
        let mut value = start;
        // SAFETY: `value` has the type that the call fills in.
        check(unsafe { call(handle, number, &mut value) })?;
        Ok(value)
    }

    /// Calls `name(handle)` or `name(handle, number)`.
    pub(super) fn set(&self, name: &'static str, handle: Handle, number: u32) -> Smi<()> {
        let call: unsafe extern "C" fn(Handle, u32) -> u32 = self.symbol(name)?;
        // SAFETY: in the C calling convention a function ignores additional arguments.
        check(unsafe { call(handle, number) })
    }

    fn get_text(&self, name: &'static str, handle: Handle) -> Smi<String> {
        let call: unsafe extern "C" fn(Handle, *mut c_char, u32) -> u32 = self.symbol(name)?;
        let mut buffer = [0; 96];
        // SAFETY: the buffer has the length given.
        check(unsafe { call(handle, buffer.as_mut_ptr(), 96) })?;
        Ok(text(&buffer))
    }

    pub(super) fn driver_version(&self) -> Smi<String> {
        let call: unsafe extern "C" fn(*mut c_char, u32) -> u32 =
            self.symbol("nvmlSystemGetDriverVersion")?;
        let mut buffer = [0; 80];
        // SAFETY: the buffer has the length given.
        check(unsafe { call(buffer.as_mut_ptr(), 80) })?;
        Ok(text(&buffer))
    }

    pub(super) fn cuda_version(&self) -> Smi<String> {
        let call: unsafe extern "C" fn(*mut u32) -> u32 = self.symbol("nvmlSystemGetCudaDriverVersion_v2")?;
        let mut number = 0;
        // SAFETY: `number` is writable for the answer.
        check(unsafe { call(&mut number) })?;
        Ok(format!("{}.{}", number / 1000, number % 1000 / 10))
    }

    pub(super) fn process_name(&self, pid: u32) -> Smi<String> {
        let call: unsafe extern "C" fn(u32, *mut c_char, u32) -> u32 =
            self.symbol("nvmlSystemGetProcessName")?;
        let mut buffer = [0; 256];
        // SAFETY: the buffer has the length given.
        check(unsafe { call(pid, buffer.as_mut_ptr(), 256) })?;
        Ok(text(&buffer))
    }

    pub(super) fn count(&self) -> Smi<u32> {
        let call: unsafe extern "C" fn(*mut u32) -> u32 = self.symbol("nvmlDeviceGetCount_v2")?;
        let mut count = 0;
        // SAFETY: `count` is writable for the answer.
        check(unsafe { call(&mut count) })?;
        Ok(count)
    }

    pub(super) fn device(&self, index: u32) -> Smi<Handle> {
        let call: unsafe extern "C" fn(u32, *mut Handle) -> u32 =
            self.symbol("nvmlDeviceGetHandleByIndex_v2")?;
        let mut handle = 0;
        // SAFETY: `handle` is writable for the answer.
        check(unsafe { call(index, &mut handle) })?;
        Ok(handle)
    }

    pub(super) fn uuid(&self, device: Handle) -> Smi<String> {
        self.get_text("nvmlDeviceGetUUID", device)
    }

    pub(super) fn name(&self, device: Handle) -> Smi<String> {
        self.get_text("nvmlDeviceGetName", device)
    }

    pub(super) fn serial(&self, device: Handle) -> Smi<String> {
        self.get_text("nvmlDeviceGetSerial", device)
    }

    pub(super) fn vbios(&self, device: Handle) -> Smi<String> {
        self.get_text("nvmlDeviceGetVbiosVersion", device)
    }

    /// Queries one number.
    pub(super) fn number(&self, name: &'static str, device: Handle) -> Smi<u32> {
        self.get(name, device, 0)
    }

    /// Queries one number, given another.
    pub(super) fn number_of(&self, name: &'static str, device: Handle, of: u32) -> Smi<u32> {
        self.get_with(name, device, of, 0)
    }

    pub(super) fn memory(&self, device: Handle) -> Smi<Memory> {
        let start = Memory { version: version::<Memory>(2), total: 0, reserved: 0, free: 0, used: 0 };
        self.get("nvmlDeviceGetMemoryInfo_v2", device, start)
    }

    pub(super) fn bar1(&self, device: Handle) -> Smi<Bar1> {
        self.get("nvmlDeviceGetBAR1MemoryInfo", device, Bar1 { total: 0, free: 0, used: 0 })
    }

    pub(super) fn pci(&self, device: Handle) -> Smi<Pci> {
        let start = Pci {
            _legacy: [0; 16],
            domain: 0,
            bus: 0,
            device: 0,
            device_id: 0,
            subsystem_id: 0,
            bus_id: [0; 32],
        };
        self.get("nvmlDeviceGetPciInfo_v3", device, start)
    }

    /// GPU and memory utilisation in percent.
    pub(super) fn utilization(&self, device: Handle) -> Smi<[u32; 2]> {
        self.get("nvmlDeviceGetUtilizationRates", device, [0; 2])
    }

    /// Current and pending mode.
    pub(super) fn mig_mode(&self, device: Handle) -> Smi<(u32, u32)> {
        let call: unsafe extern "C" fn(Handle, *mut u32, *mut u32) -> u32 =
            self.symbol("nvmlDeviceGetMigMode")?;
        let (mut current, mut pending) = (0, 0);
        // SAFETY: both numbers are writable for the answer.
        check(unsafe { call(device, &mut current, &mut pending) })?;
        Ok((current, pending))
    }

    /// Sets the mode. Returns the activation status.
    pub(super) fn set_mig_mode(&self, device: Handle, on: bool) -> Smi<u32> {
        self.get_with("nvmlDeviceSetMigMode", device, on.into(), 0)
    }

    pub(super) fn set_compute_mode(&self, device: Handle, mode: u32) -> Smi<()> {
        self.set("nvmlDeviceSetComputeMode", device, mode)
    }

    pub(super) fn set_persistence(&self, device: Handle, on: bool) -> Smi<()> {
        self.set("nvmlDeviceSetPersistenceMode", device, on.into())
    }

    /// Handles of the MIG devices, in NVML's order.
    pub(super) fn mig_devices(&self, device: Handle) -> Smi<Vec<Handle>> {
        let most = self.number("nvmlDeviceGetMaxMigDeviceCount", device)?;
        let find = |index| self.get_with("nvmlDeviceGetMigDeviceHandleByIndex", device, index, 0);
        Ok((0..most).filter_map(|index| find(index).ok()).collect())
    }

    pub(super) fn attributes(&self, device: Handle) -> Smi<Attributes> {
        let start =
            Attributes { sm: 0, ce: 0, dec: 0, enc: 0, jpg: 0, ofa: 0, _slices: [0; 2], _memory_mib: 0 };
        self.get("nvmlDeviceGetAttributes_v2", device, start)
    }

    pub(super) fn processes(&self, name: &'static str, device: Handle) -> Smi<Vec<Process>> {
        let call: unsafe extern "C" fn(Handle, *mut u32, *mut Process) -> u32 = self.symbol(name)?;
        let mut found = [Process { pid: 0, used: 0, gi: 0, ci: 0 }; MAX_LISTED];
        let mut count = MAX_LISTED as u32;
        // SAFETY: the array has room for `count` items.
        check(unsafe { call(device, &mut count, found.as_mut_ptr()) })?;
        Ok(found.into_iter().take(count as usize).collect())
    }

    /// The file that the library was loaded from.
    pub(super) fn file(&self) -> PathBuf {
        let known = |info: &Info| {
            // SAFETY: dladdr returned the name, which lives as long as the library is loaded.
            let name = unsafe { CStr::from_ptr(info.file) };
            PathBuf::from(name.to_string_lossy().into_owned())
        };
        Info::of(&self.library).as_ref().map_or_else(|| self.path.clone(), known)
    }
}

/// `Dl_info`.
#[repr(C)]
struct Info {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

unsafe extern "C" {
    fn dladdr(address: *const c_void, info: *mut Info) -> i32;
}

impl Info {
    fn of(library: &libloading::Library) -> Option<Self> {
        // SAFETY: only the address of the function is used.
        let inside = unsafe { library.get::<unsafe extern "C" fn() -> u32>(b"nvmlInit_v2") }.ok()?;
        let mut info =
            Self { file: ptr::null(), base: ptr::null_mut(), symbol: ptr::null(), address: ptr::null_mut() };
        // SAFETY: the address lies in the library, and `info` is writable for the answer.
        let known = unsafe { dladdr(*inside as *const c_void, &mut info) };
        (known != 0 && !info.file.is_null()).then_some(info)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        if let Ok(shutdown) = self.symbol::<unsafe extern "C" fn() -> u32>("nvmlShutdown") {
            // SAFETY: the function has no arguments.
            unsafe { shutdown() };
        }
    }
}

pub(super) fn check(code: u32) -> Smi<()> {
    if code == 0 { Ok(()) } else { Err(SmiError::Nvml(code)) }
}

/// Calls about GPU and compute instances.
impl Nvml {
    /// The GPU-instance profiles of the GPU, smallest first.
    pub(super) fn gi_profiles(&self, device: Handle) -> Smi<Vec<GiProfile>> {
        let start = GiProfile {
            version: version::<GiProfile>(2),
            id: 0,
            p2p: 0,
            slices: 0,
            instances: 0,
            sm: 0,
            ce: 0,
            dec: 0,
            enc: 0,
            jpg: 0,
            ofa: 0,
            memory_mib: 0,
            name: [0; 96],
        };
        let name = "nvmlDeviceGetGpuInstanceProfileInfoV";
        let mut found = self.indexed(|index| self.get_with(name, device, index, start))?;
        found.sort_by_key(|profile| (profile.slices, profile.memory_mib));
        Ok(found)
    }

    /// The compute-instance profiles of the GPU instance, by index.
    pub(super) fn ci_profiles(&self, gi: Handle) -> Smi<Vec<CiProfile>> {
        let name = "nvmlGpuInstanceGetComputeInstanceProfileInfoV";
        let call: unsafe extern "C" fn(Handle, u32, u32, *mut CiProfile) -> u32 = self.symbol(name)?;
        self.indexed(|index| {
            let mut value = CiProfile {
                version: version::<CiProfile>(2),
                id: 0,
                slices: 0,
                instances: 0,
                sm: 0,
                ce: 0,
                dec: 0,
                enc: 0,
                jpg: 0,
                ofa: 0,
                name: [0; 96],
            };
            // SAFETY: `value` has the type that the call fills in.
            check(unsafe { call(gi, index, 0, &mut value) })?;
            Ok(value)
        })
    }

    /// Enumerates by index until the index is invalid. Skips those that are not supported.
    fn indexed<T>(&self, get: impl Fn(u32) -> Smi<T>) -> Smi<Vec<T>> {
        let mut found = Vec::new();
        for index in 0.. {
            match get(index) {
                Ok(value) => found.push(value),
                Err(SmiError::Nvml(3)) => {}
                Err(SmiError::Nvml(2)) => break,
                Err(other) => return Err(other),
            }
        }
        Ok(found)
    }

    pub(super) fn placements(&self, device: Handle, profile: u32) -> Smi<Vec<Placement>> {
        let name = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
        let call: unsafe extern "C" fn(Handle, u32, *mut Placement, *mut u32) -> u32 = self.symbol(name)?;
        let mut found = [Placement { start: 0, size: 0 }; MAX_LISTED];
        let mut count = MAX_LISTED as u32;
        // SAFETY: the array has room for `count` items.
        check(unsafe { call(device, profile, found.as_mut_ptr(), &mut count) })?;
        Ok(found.into_iter().take(count as usize).collect())
    }

    /// The GPU instances, by id.
    pub(super) fn gis(&self, device: Handle) -> Smi<Vec<(Handle, GiInfo)>> {
        let mut found = Vec::new();
        for profile in self.gi_profiles(device)? {
            for gi in self.listed("nvmlDeviceGetGpuInstances", device, profile.id)? {
                let placement = Placement { start: 0, size: 0 };
                let start = GiInfo { _device: 0, id: 0, profile: 0, placement };
                found.push((gi, self.get("nvmlGpuInstanceGetInfo", gi, start)?));
            }
        }
        found.sort_by_key(|(_, info)| info.id);
        Ok(found)
    }

    /// The compute instances of a GPU instance, by id.
    pub(super) fn cis(&self, gi: Handle) -> Smi<Vec<(Handle, CiInfo)>> {
        let mut found = Vec::new();
        for profile in self.ci_profiles(gi)? {
            for ci in self.listed("nvmlGpuInstanceGetComputeInstances", gi, profile.id)? {
                found.push((ci, self.ci_info(ci)?));
            }
        }
        found.sort_by_key(|(_, info)| info.id);
        Ok(found)
    }

    fn listed(&self, name: &'static str, parent: Handle, profile: u32) -> Smi<Vec<Handle>> {
        let call: unsafe extern "C" fn(Handle, u32, *mut Handle, *mut u32) -> u32 = self.symbol(name)?;
        let mut found = [0; MAX_LISTED];
        let mut count = MAX_LISTED as u32;
        // SAFETY: the array has room for all instances that a profile allows.
        check(unsafe { call(parent, profile, found.as_mut_ptr(), &mut count) })?;
        Ok(found.into_iter().take(count as usize).collect())
    }

    fn ci_info(&self, ci: Handle) -> Smi<CiInfo> {
        let placement = Placement { start: 0, size: 0 };
        let start = CiInfo { _device: 0, _gi: 0, id: 0, profile: 0, placement };
        self.get("nvmlComputeInstanceGetInfo_v2", ci, start)
    }

    pub(super) fn create_gi(
        &self,
        device: Handle,
        profile: u32,
        place: Option<Placement>,
    ) -> Smi<(Handle, GiInfo)> {
        let gi = match place {
            None => self.get_with("nvmlDeviceCreateGpuInstance", device, profile, 0)?,
            Some(place) => {
                let name = "nvmlDeviceCreateGpuInstanceWithPlacement";
                let call: unsafe extern "C" fn(Handle, u32, *const Placement, *mut Handle) -> u32 =
                    self.symbol(name)?;
                let mut gi = 0;
                // SAFETY: the call reads the placement, and `gi` is writable for the answer.
                check(unsafe { call(device, profile, ptr::from_ref(&place), &mut gi) })?;
                gi
            }
        };
        let start = GiInfo { _device: 0, id: 0, profile: 0, placement: Placement { start: 0, size: 0 } };
        Ok((gi, self.get("nvmlGpuInstanceGetInfo", gi, start)?))
    }

    pub(super) fn create_ci(&self, gi: Handle, profile: u32) -> Smi<CiInfo> {
        let ci = self.get_with("nvmlGpuInstanceCreateComputeInstance", gi, profile, 0)?;
        self.ci_info(ci)
    }

    pub(super) fn destroy_gi(&self, gi: Handle) -> Smi<()> {
        self.set("nvmlGpuInstanceDestroy", gi, 0)
    }

    pub(super) fn destroy_ci(&self, ci: Handle) -> Smi<()> {
        self.set("nvmlComputeInstanceDestroy", ci, 0)
    }
}
