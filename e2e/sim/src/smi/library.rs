//! The NVML calls that `nvidia-smi` makes, each with plain values in and out.
//!
//! The library is loaded as any program loads it: first the one of this program's own driver root, then by soname.
#![allow(unsafe_code, reason = "NVML is a C library, loaded at run time")]

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use super::structures::{Attributes, Bar1, Handle, Memory, Pci, Process, text, version};

/// Directories of libraries, from the directory of programs.
const LIB_DIRS: [&str; 2] = ["../lib/x86_64-linux-gnu", "../lib/aarch64-linux-gnu"];
const SONAME: &str = "libnvidia-ml.so.1";
/// A GPU has no more instances or processes than this.
pub(super) const MOST: usize = 64;

/// Why a command did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub(super) enum SmiError {
    #[error(
        "NVIDIA-SMI couldn't find {SONAME} library in your system. Please make sure that the NVIDIA Display Driver is properly installed and present in your system."
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
    /// The exit status: NVML's code, 2 for what was not understood.
    pub(super) fn status(&self) -> u8 {
        match self {
            Self::NoLibrary(_) => 12,
            Self::NoSymbol { .. } => 13,
            Self::Usage(_) => 2,
            Self::Nvml(code) | Self::Failed { code, .. } => u8::try_from(*code).unwrap_or(255),
        }
    }
}

pub(super) type Smi<T> = Result<T, SmiError>;

/// Texts of the codes that commands meet.
pub(super) fn text_of(code: u32) -> String {
    let known = match code {
        2 => "Invalid Argument",
        3 => "Not Supported",
        4 => "Insufficient Permissions",
        6 => "Not Found",
        9 => {
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running."
        }
        15 => "GPU is lost",
        16 => "GPU requires reset",
        19 => "In use by another client",
        23 => "Insufficient Resources",
        _ => return format!("Unknown Error ({code})"),
    };
    known.to_owned()
}

/// The loaded library, initialised; where it was found.
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
        // SAFETY: libnvidia-ml runs no code of its own that could harm when it is loaded.
        let library = unsafe { libloading::Library::new(&path) }.map_err(SmiError::NoLibrary)?;
        let nvml = Self { library, path };
        let init: unsafe extern "C" fn() -> u32 = nvml.symbol("nvmlInit_v2")?;
        // SAFETY: it has no arguments.
        done(unsafe { init() })?;
        Ok(nvml)
    }

    /// A function of the library. `F` must be its type in the header.
    pub(super) fn symbol<F: Copy>(&self, name: &'static str) -> Smi<F> {
        // SAFETY: callers, all in this file, name the type that the header has.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        symbol.map(|symbol| *symbol).map_err(|_| SmiError::NoSymbol { name })
    }

    /// Calls `name(handle, &mut T)`.
    pub(super) fn about<T: Copy>(&self, name: &'static str, handle: Handle, start: T) -> Smi<T> {
        let call: unsafe extern "C" fn(Handle, *mut T) -> u32 = self.symbol(name)?;
        let mut value = start;
        // SAFETY: the output is a place of the type that the call fills.
        done(unsafe { call(handle, &mut value) })?;
        Ok(value)
    }

    /// Calls `name(handle, number, &mut T)`.
    pub(super) fn about_number<T: Copy>(
        &self,
        name: &'static str,
        handle: Handle,
        number: u32,
        start: T,
    ) -> Smi<T> {
        let call: unsafe extern "C" fn(Handle, u32, *mut T) -> u32 = self.symbol(name)?;
        let mut value = start;
        // SAFETY: the output is a place of the type that the call fills.
        done(unsafe { call(handle, number, &mut value) })?;
        Ok(value)
    }

    /// Calls `name(handle)` or `name(handle, number)`.
    pub(super) fn act(&self, name: &'static str, handle: Handle, number: u32) -> Smi<()> {
        let call: unsafe extern "C" fn(Handle, u32) -> u32 = self.symbol(name)?;
        // SAFETY: an argument more than a function has is ignored by the C calling convention.
        done(unsafe { call(handle, number) })
    }

    fn words(&self, name: &'static str, handle: Handle) -> Smi<String> {
        let call: unsafe extern "C" fn(Handle, *mut c_char, u32) -> u32 = self.symbol(name)?;
        let mut buffer = [0; 96];
        // SAFETY: the buffer has the length given.
        done(unsafe { call(handle, buffer.as_mut_ptr(), 96) })?;
        Ok(text(&buffer))
    }

    pub(super) fn driver_version(&self) -> Smi<String> {
        let call: unsafe extern "C" fn(*mut c_char, u32) -> u32 =
            self.symbol("nvmlSystemGetDriverVersion")?;
        let mut buffer = [0; 80];
        // SAFETY: the buffer has the length given.
        done(unsafe { call(buffer.as_mut_ptr(), 80) })?;
        Ok(text(&buffer))
    }

    pub(super) fn cuda_version(&self) -> Smi<String> {
        let call: unsafe extern "C" fn(*mut u32) -> u32 = self.symbol("nvmlSystemGetCudaDriverVersion_v2")?;
        let mut number = 0;
        // SAFETY: the output is a place for a number.
        done(unsafe { call(&mut number) })?;
        Ok(format!("{}.{}", number / 1000, number % 1000 / 10))
    }

    pub(super) fn process_name(&self, pid: u32) -> Smi<String> {
        let call: unsafe extern "C" fn(u32, *mut c_char, u32) -> u32 =
            self.symbol("nvmlSystemGetProcessName")?;
        let mut buffer = [0; 256];
        // SAFETY: the buffer has the length given.
        done(unsafe { call(pid, buffer.as_mut_ptr(), 256) })?;
        Ok(text(&buffer))
    }

    pub(super) fn count(&self) -> Smi<u32> {
        let call: unsafe extern "C" fn(*mut u32) -> u32 = self.symbol("nvmlDeviceGetCount_v2")?;
        let mut count = 0;
        // SAFETY: the output is a place for a number.
        done(unsafe { call(&mut count) })?;
        Ok(count)
    }

    pub(super) fn device(&self, index: u32) -> Smi<Handle> {
        let call: unsafe extern "C" fn(u32, *mut Handle) -> u32 =
            self.symbol("nvmlDeviceGetHandleByIndex_v2")?;
        let mut handle = 0;
        // SAFETY: the output is a place for a handle.
        done(unsafe { call(index, &mut handle) })?;
        Ok(handle)
    }

    pub(super) fn uuid(&self, device: Handle) -> Smi<String> {
        self.words("nvmlDeviceGetUUID", device)
    }

    pub(super) fn name(&self, device: Handle) -> Smi<String> {
        self.words("nvmlDeviceGetName", device)
    }

    pub(super) fn serial(&self, device: Handle) -> Smi<String> {
        self.words("nvmlDeviceGetSerial", device)
    }

    pub(super) fn vbios(&self, device: Handle) -> Smi<String> {
        self.words("nvmlDeviceGetVbiosVersion", device)
    }

    /// A query of one number.
    pub(super) fn number(&self, name: &'static str, device: Handle) -> Smi<u32> {
        self.about(name, device, 0)
    }

    /// A query of one number, by another.
    pub(super) fn number_of(&self, name: &'static str, device: Handle, of: u32) -> Smi<u32> {
        self.about_number(name, device, of, 0)
    }

    pub(super) fn memory(&self, device: Handle) -> Smi<Memory> {
        let start = Memory { version: version::<Memory>(2), total: 0, reserved: 0, free: 0, used: 0 };
        self.about("nvmlDeviceGetMemoryInfo_v2", device, start)
    }

    pub(super) fn bar1(&self, device: Handle) -> Smi<Bar1> {
        self.about("nvmlDeviceGetBAR1MemoryInfo", device, Bar1 { total: 0, free: 0, used: 0 })
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
        self.about("nvmlDeviceGetPciInfo_v3", device, start)
    }

    /// Graphics, then memory utilisation.
    pub(super) fn utilization(&self, device: Handle) -> Smi<[u32; 2]> {
        self.about("nvmlDeviceGetUtilizationRates", device, [0; 2])
    }

    /// Current and pending.
    pub(super) fn mig_mode(&self, device: Handle) -> Smi<(u32, u32)> {
        let call: unsafe extern "C" fn(Handle, *mut u32, *mut u32) -> u32 =
            self.symbol("nvmlDeviceGetMigMode")?;
        let (mut current, mut pending) = (0, 0);
        // SAFETY: the outputs are places for numbers.
        done(unsafe { call(device, &mut current, &mut pending) })?;
        Ok((current, pending))
    }

    /// The activation status.
    pub(super) fn set_mig_mode(&self, device: Handle, on: bool) -> Smi<u32> {
        self.about_number("nvmlDeviceSetMigMode", device, on.into(), 0)
    }

    pub(super) fn set_compute_mode(&self, device: Handle, mode: u32) -> Smi<()> {
        self.act("nvmlDeviceSetComputeMode", device, mode)
    }

    pub(super) fn set_persistence(&self, device: Handle, on: bool) -> Smi<()> {
        self.act("nvmlDeviceSetPersistenceMode", device, on.into())
    }

    /// The MIG devices, in order.
    pub(super) fn mig_devices(&self, device: Handle) -> Smi<Vec<Handle>> {
        let most = self.number("nvmlDeviceGetMaxMigDeviceCount", device)?;
        let find = |index| self.about_number("nvmlDeviceGetMigDeviceHandleByIndex", device, index, 0);
        Ok((0..most).filter_map(|index| find(index).ok()).collect())
    }

    pub(super) fn attributes(&self, device: Handle) -> Smi<Attributes> {
        let start =
            Attributes { sm: 0, ce: 0, dec: 0, enc: 0, jpg: 0, ofa: 0, _slices: [0; 2], _memory_mib: 0 };
        self.about("nvmlDeviceGetAttributes_v2", device, start)
    }

    pub(super) fn processes(&self, name: &'static str, device: Handle) -> Smi<Vec<Process>> {
        let call: unsafe extern "C" fn(Handle, *mut u32, *mut Process) -> u32 = self.symbol(name)?;
        let mut found = [Process { pid: 0, used: 0, gi: 0, ci: 0 }; MOST];
        let mut count = MOST as u32;
        // SAFETY: the array has room for as many as the count says.
        done(unsafe { call(device, &mut count, found.as_mut_ptr()) })?;
        Ok(found.into_iter().take(count as usize).collect())
    }

    /// The file that the library was loaded from.
    pub(super) fn file(&self) -> PathBuf {
        let known = |info: &Info| {
            // SAFETY: the name was given by dladdr and lives as long as the library is loaded.
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
        // SAFETY: only the address is taken, the function is not called.
        let inside = unsafe { library.get::<unsafe extern "C" fn() -> u32>(b"nvmlInit_v2") }.ok()?;
        let mut info =
            Self { file: ptr::null(), base: ptr::null_mut(), symbol: ptr::null(), address: ptr::null_mut() };
        // SAFETY: the address lies in the library; `info` is a place for the answer.
        let known = unsafe { dladdr(*inside as *const c_void, &mut info) };
        (known != 0 && !info.file.is_null()).then_some(info)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        if let Ok(shutdown) = self.symbol::<unsafe extern "C" fn() -> u32>("nvmlShutdown") {
            // SAFETY: it has no arguments.
            unsafe { shutdown() };
        }
    }
}

pub(super) fn done(code: u32) -> Smi<()> {
    if code == 0 { Ok(()) } else { Err(SmiError::Nvml(code)) }
}
