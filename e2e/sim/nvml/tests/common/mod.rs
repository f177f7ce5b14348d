//! A simulated node, and a client of its library: the calls of nvml-wrapper-sys with plain values.
#![allow(dead_code, reason = "each test file uses a part")]

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;
use std::ptr::null_mut;

use divvy_sim::{Options, Sim};
use nvml_wrapper_sys::bindings::*;
use tempfile::TempDir;

pub(crate) type Code = u32;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const UNINITIALIZED: Code = 1;
pub(crate) const INVALID_ARGUMENT: Code = 2;
pub(crate) const NOT_SUPPORTED: Code = 3;
pub(crate) const NO_PERMISSION: Code = 4;
pub(crate) const NOT_FOUND: Code = 6;
pub(crate) const INSUFFICIENT_SIZE: Code = 7;
pub(crate) const DRIVER_NOT_LOADED: Code = 9;
pub(crate) const TIMEOUT: Code = 10;
pub(crate) const GPU_IS_LOST: Code = 15;
pub(crate) const RESET_REQUIRED: Code = 16;
pub(crate) const IN_USE: Code = 19;
pub(crate) const INSUFFICIENT_RESOURCES: Code = 23;
pub(crate) const ARGUMENT_VERSION_MISMATCH: Code = 25;

/// A directory with simulated GPUs.
pub(crate) struct Node {
    pub(crate) dir: TempDir,
    pub(crate) sim: Sim,
}

impl Node {
    pub(crate) fn up(gpus: &str) -> Self {
        Self::with(gpus, |_| ())
    }

    pub(crate) fn with(gpus: &str, adjust: impl FnOnce(&mut Options)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let program = std::env::current_exe().expect("this test");
        let mut options = Options::new(divvy_sim::library().expect("cargo built the library"), program);
        adjust(&mut options);
        let sim = divvy_sim::create(dir.path(), gpus, &options).expect("simulated GPUs");
        Self { dir, sim }
    }

    pub(crate) fn library(&self) -> PathBuf {
        self.sim.library("libnvidia-ml.so.1")
    }

    /// Loads and initialises the library.
    pub(crate) fn client(&self) -> Client {
        let client = self.loaded();
        assert_eq!(client.init(), SUCCESS);
        client
    }

    /// Loads the library.
    pub(crate) fn loaded(&self) -> Client {
        // SAFETY: loading the library runs no initialisation code.
        Client { lib: unsafe { NvmlLib::new(self.library()) }.expect("a library") }
    }
}

/// A loaded library.
pub(crate) struct Client {
    pub(crate) lib: NvmlLib,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Device(pub(crate) nvmlDevice_t);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Gi(pub(crate) nvmlGpuInstance_t);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ci(pub(crate) nvmlComputeInstance_t);

/// Calls a function whose last argument is an output. Returns the output or the code.
macro_rules! get {
    ($self:ident.$name:ident($($argument:expr),*) -> $kind:ty) => {{
        // SAFETY: all outputs are plain C structures, numbers or pointers, for which zero bytes are
        // valid.
        let mut output: $kind = unsafe { std::mem::zeroed() };
        // SAFETY: the signature is the header's, and the output has its type.
        let code = unsafe { $self.lib.$name($($argument,)* &mut output) };
        if code == SUCCESS { Ok(output) } else { Err(code) }
    }};
}

/// Calls a function without an output.
macro_rules! run {
    ($self:ident.$name:ident($($argument:expr),*)) => {{
        // SAFETY: the signature is the header's. All pointers are valid for the call or NULL.
        unsafe { $self.lib.$name($($argument),*) }
    }};
}

impl Client {
    pub(crate) fn init(&self) -> Code {
        run!(self.nvmlInit_v2())
    }

    pub(crate) fn init_with(&self, flags: u32) -> Code {
        run!(self.nvmlInitWithFlags(flags))
    }

    pub(crate) fn shutdown(&self) -> Code {
        run!(self.nvmlShutdown())
    }

    pub(crate) fn count(&self) -> Result<u32, Code> {
        get!(self.nvmlDeviceGetCount_v2() -> u32)
    }

    pub(crate) fn device(&self, index: u32) -> Result<Device, Code> {
        get!(self.nvmlDeviceGetHandleByIndex_v2(index) -> nvmlDevice_t).map(Device)
    }

    pub(crate) fn by_uuid(&self, uuid: &str) -> Result<Device, Code> {
        let uuid = CString::new(uuid).expect("no NUL");
        get!(self.nvmlDeviceGetHandleByUUID(uuid.as_ptr()) -> nvmlDevice_t).map(Device)
    }

    pub(crate) fn minor(&self, device: Device) -> Result<u32, Code> {
        get!(self.nvmlDeviceGetMinorNumber(device.0) -> u32)
    }

    pub(crate) fn uuid(&self, device: Device) -> Result<String, Code> {
        text(|buffer, length| run!(self.nvmlDeviceGetUUID(device.0, buffer, length)))
    }

    pub(crate) fn name(&self, device: Device) -> Result<String, Code> {
        text(|buffer, length| run!(self.nvmlDeviceGetName(device.0, buffer, length)))
    }

    pub(crate) fn mig_mode(&self, device: Device) -> Result<(u32, u32), Code> {
        let mut pending = 0;
        let mut current = 0;
        let code = run!(self.nvmlDeviceGetMigMode(device.0, &mut current, &mut pending));
        if code == SUCCESS { Ok((current, pending)) } else { Err(code) }
    }

    /// Returns the activation status.
    pub(crate) fn set_mig_mode(&self, device: Device, mode: u32) -> Result<Code, Code> {
        get!(self.nvmlDeviceSetMigMode(device.0, mode) -> u32)
    }

    pub(crate) fn max_mig_devices(&self, device: Device) -> Result<u32, Code> {
        get!(self.nvmlDeviceGetMaxMigDeviceCount(device.0) -> u32)
    }

    pub(crate) fn mig_device(&self, device: Device, index: u32) -> Result<Device, Code> {
        get!(self.nvmlDeviceGetMigDeviceHandleByIndex(device.0, index) -> nvmlDevice_t).map(Device)
    }

    pub(crate) fn parent(&self, device: Device) -> Result<Device, Code> {
        get!(self.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device.0) -> nvmlDevice_t).map(Device)
    }

    pub(crate) fn gi_id(&self, device: Device) -> Result<u32, Code> {
        get!(self.nvmlDeviceGetGpuInstanceId(device.0) -> u32)
    }

    pub(crate) fn ci_id(&self, device: Device) -> Result<u32, Code> {
        get!(self.nvmlDeviceGetComputeInstanceId(device.0) -> u32)
    }

    pub(crate) fn profile(&self, device: Device, index: u32) -> Result<nvmlGpuInstanceProfileInfo_t, Code> {
        get!(self.nvmlDeviceGetGpuInstanceProfileInfo(device.0, index) -> nvmlGpuInstanceProfileInfo_t)
    }

    /// Returns the code for a version word.
    pub(crate) fn profile_version(&self, device: Device, index: u32, version: u32) -> Code {
        let mut info = nvmlGpuInstanceProfileInfo_v2_t { version, ..zeroed() };
        run!(self.nvmlDeviceGetGpuInstanceProfileInfoV(device.0, index, &mut info))
    }

    /// Start and size of each placement.
    pub(crate) fn placements(
        &self,
        device: Device,
        profile: u32,
        room: u32,
    ) -> Result<Vec<(u32, u32)>, Code> {
        let mut places = vec![nvmlGpuInstancePlacement_t { start: 0, size: 0 }; room as usize];
        let mut count = room;
        let array = if room == 0 { null_mut() } else { places.as_mut_ptr() };
        let code =
            run!(self.nvmlDeviceGetGpuInstancePossiblePlacements_v2(device.0, profile, array, &mut count));
        if code != SUCCESS {
            return Err(code);
        }
        if room == 0 {
            return Ok(vec![(0, 0); count as usize]);
        }
        Ok(places.iter().take(count as usize).map(|place| (place.start, place.size)).collect())
    }

    pub(crate) fn remaining(&self, device: Device, profile: u32) -> Result<u32, Code> {
        get!(self.nvmlDeviceGetGpuInstanceRemainingCapacity(device.0, profile) -> u32)
    }

    pub(crate) fn create_gi(
        &self,
        device: Device,
        profile: u32,
        place: Option<(u32, u32)>,
    ) -> Result<Gi, Code> {
        let created = match place {
            None => get!(self.nvmlDeviceCreateGpuInstance(device.0, profile) -> nvmlGpuInstance_t),
            Some((start, size)) => {
                let place = nvmlGpuInstancePlacement_t { start, size };
                get!(self.nvmlDeviceCreateGpuInstanceWithPlacement(device.0, profile, &place)
                    -> nvmlGpuInstance_t)
            }
        };
        created.map(Gi)
    }

    pub(crate) fn gis(&self, device: Device, profile: u32) -> Result<Vec<Gi>, Code> {
        let mut found = [null_mut(); 16];
        let mut count = 0;
        let code = run!(self.nvmlDeviceGetGpuInstances(device.0, profile, found.as_mut_ptr(), &mut count));
        if code != SUCCESS {
            return Err(code);
        }
        Ok(found.iter().take(count as usize).map(|handle| Gi(*handle)).collect())
    }

    pub(crate) fn gi(&self, device: Device, id: u32) -> Result<Gi, Code> {
        get!(self.nvmlDeviceGetGpuInstanceById(device.0, id) -> nvmlGpuInstance_t).map(Gi)
    }

    pub(crate) fn gi_info(&self, gi: Gi) -> Result<nvmlGpuInstanceInfo_t, Code> {
        get!(self.nvmlGpuInstanceGetInfo(gi.0) -> nvmlGpuInstanceInfo_t)
    }

    pub(crate) fn destroy_gi(&self, gi: Gi) -> Code {
        run!(self.nvmlGpuInstanceDestroy(gi.0))
    }

    pub(crate) fn ci_profile(
        &self,
        gi: Gi,
        index: u32,
        engines: u32,
    ) -> Result<nvmlComputeInstanceProfileInfo_t, Code> {
        get!(self.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi.0, index, engines)
            -> nvmlComputeInstanceProfileInfo_t)
    }

    pub(crate) fn ci_remaining(&self, gi: Gi, profile: u32) -> Result<u32, Code> {
        get!(self.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(gi.0, profile) -> u32)
    }

    pub(crate) fn create_ci(&self, gi: Gi, profile: u32) -> Result<Ci, Code> {
        get!(self.nvmlGpuInstanceCreateComputeInstance(gi.0, profile) -> nvmlComputeInstance_t).map(Ci)
    }

    pub(crate) fn create_ci_at(&self, gi: Gi, profile: u32, (start, size): (u32, u32)) -> Result<Ci, Code> {
        let place = nvmlComputeInstancePlacement_t { start, size };
        get!(self.nvmlGpuInstanceCreateComputeInstanceWithPlacement(gi.0, profile, &place)
            -> nvmlComputeInstance_t)
        .map(Ci)
    }

    pub(crate) fn ci(&self, gi: Gi, id: u32) -> Result<Ci, Code> {
        get!(self.nvmlGpuInstanceGetComputeInstanceById(gi.0, id) -> nvmlComputeInstance_t).map(Ci)
    }

    pub(crate) fn ci_info(&self, ci: Ci) -> Result<nvmlComputeInstanceInfo_t, Code> {
        get!(self.nvmlComputeInstanceGetInfo_v2(ci.0) -> nvmlComputeInstanceInfo_t)
    }

    pub(crate) fn destroy_ci(&self, ci: Ci) -> Code {
        run!(self.nvmlComputeInstanceDestroy(ci.0))
    }

    /// Creates a GPU instance with a compute instance that has all its slices.
    pub(crate) fn instance(
        &self,
        device: Device,
        profile: u32,
        ci_profile: u32,
        place: (u32, u32),
    ) -> (Gi, Ci) {
        let gi = self.create_gi(device, profile, Some(place)).expect("a GPU instance");
        let ci = self.create_ci(gi, ci_profile).expect("a compute instance");
        (gi, ci)
    }

    pub(crate) fn event_set(&self) -> nvmlEventSet_t {
        get!(self.nvmlEventSetCreate() -> nvmlEventSet_t).expect("an event set")
    }

    pub(crate) fn register(&self, device: Device, kinds: u64, set: nvmlEventSet_t) -> Code {
        run!(self.nvmlDeviceRegisterEvents(device.0, kinds, set))
    }

    pub(crate) fn wait(&self, set: nvmlEventSet_t, timeout_ms: u32) -> Result<nvmlEventData_t, Code> {
        let mut data: nvmlEventData_t = zeroed();
        let code = run!(self.nvmlEventSetWait_v2(set, &mut data, timeout_ms));
        if code == SUCCESS { Ok(data) } else { Err(code) }
    }
}

/// All-zero bytes, as C programs initialise structures.
pub(crate) fn zeroed<T: Copy>() -> T {
    // SAFETY: only used with plain C structures of the bindings.
    unsafe { std::mem::zeroed() }
}

fn text(call: impl FnOnce(*mut c_char, u32) -> Code) -> Result<String, Code> {
    let mut buffer = [0; 96];
    let code = call(buffer.as_mut_ptr(), 96);
    if code != SUCCESS {
        return Err(code);
    }
    // SAFETY: the call succeeded, so the buffer has a string that ends in NUL.
    Ok(unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_str().expect("UTF-8").to_owned())
}
