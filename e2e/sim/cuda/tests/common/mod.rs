//! A simulated node, and programs on it: this process with the library loaded, and child processes.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(unsafe_code, reason = "the library is called through C")]

pub(crate) mod program;

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

use divvy_sim::{Options, Sim};
use libloading::Library;
pub(crate) use program::Program;
use tempfile::TempDir;

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const DEVICE_UNAVAILABLE: u32 = 46;
pub(crate) const NO_DEVICE: u32 = 100;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const NOT_PERMITTED: u32 = 800;
pub(crate) const NOT_SUPPORTED: u32 = 801;

pub(crate) const MIB: u64 = 1 << 20;
/// Device memory of a context, in bytes.
pub(crate) const CONTEXT: u64 = 300 * MIB;

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
        // Only its directory matters here: libcuda is found beside it.
        let nvml = program.with_file_name("libdivvy_sim_nvml.so");
        let cuda = program.with_file_name("libdivvy_sim_cuda.so");
        let mut options = Options::new(if nvml.exists() { nvml } else { cuda }, program);
        adjust(&mut options);
        let sim = divvy_sim::create(dir.path(), gpus, &options).expect("simulated GPUs");
        Self { dir, sim }
    }

    pub(crate) fn library(&self) -> PathBuf {
        self.sim.library("libcuda.so.1")
    }

    /// Loads and initialises the library, and makes the primary context of the first GPU current.
    pub(crate) fn cuda(&self) -> Cuda {
        let cuda = self.loaded();
        assert_eq!(cuda.init(), SUCCESS);
        cuda.make_current(0);
        cuda
    }

    /// Loads the library only.
    pub(crate) fn loaded(&self) -> Cuda {
        Cuda::load(&self.library())
    }

    /// MiB per process that the state reports for a slot, with the process ids.
    pub(crate) fn processes(&self, slot: usize) -> Vec<(u32, u64)> {
        let state = self.sim.read().expect("a state");
        state.gpus[slot].processes.iter().map(|process| (process.pid, process.memory_mib)).collect()
    }

    /// Starts a child process, which executes the commands of the file's [`scenario`].
    pub(crate) fn program(&self) -> Program {
        self.program_with(&[])
    }

    pub(crate) fn program_with(&self, environment: &[(&str, &str)]) -> Program {
        let mut command = Command::new(std::env::current_exe().expect("this test"));
        command.envs(environment.iter().copied());
        Program::start(command, &self.library())
    }
}

/// The test that is also a program. As a program it executes commands on the driver; as a test it
/// starts itself and sends one.
pub(crate) fn scenario(run: impl Fn(&Cuda, &[&str]) -> String) {
    let Some(driver) = program::driver() else {
        assert_eq!(Node::up("L4").program().ask("init"), SUCCESS.to_string());
        return;
    };
    let cuda = Cuda::load(&driver);
    program::answer_each(|words| match words {
        ["init"] => cuda.init().to_string(),
        ["start"] => {
            assert_eq!(cuda.init(), SUCCESS);
            cuda.make_current(0);
            "done".to_owned()
        }
        words => run(&cuda, words),
    });
}

/// A loaded library.
pub(crate) struct Cuda {
    lib: Library,
}

/// Calls a function: `call!(cuda.cuMemFree_v2(address => u64))`.
#[macro_export]
macro_rules! call {
    ($cuda:ident.$name:ident($($argument:expr => $kind:ty),* $(,)?)) => {{
        let function = $cuda.pointer(stringify!($name));
        assert!(!function.is_null(), "no {}", stringify!($name));
        // SAFETY: the signature is the header's.
        let function: extern "C" fn($($kind),*) -> u32 = unsafe { std::mem::transmute(function) };
        function($($argument),*)
    }};
}

/// The value, or the code of the call.
pub(crate) fn answer<T>(code: u32, value: T) -> Result<T, u32> {
    if code == SUCCESS { Ok(value) } else { Err(code) }
}

impl Cuda {
    pub(crate) fn load(path: &Path) -> Self {
        // SAFETY: the library runs no code of its own when it is loaded.
        Self { lib: unsafe { Library::new(path) }.expect("a library") }
    }

    /// The exported function of that name, or NULL.
    pub(crate) fn pointer(&self, name: &str) -> *const c_void {
        // SAFETY: only the address is taken.
        let found = unsafe { self.lib.get::<*const c_void>(name.as_bytes()) };
        found.map_or(std::ptr::null(), |symbol| *symbol)
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).expect("no NUL");
        // SAFETY: the function takes a string and returns a number.
        let calls = unsafe { self.lib.get::<extern "C" fn(*const c_char) -> u64>(b"divvy_sim_cuda_calls") };
        calls.expect("the library counts")(name.as_ptr())
    }

    pub(crate) fn init(&self) -> u32 {
        call!(self.cuInit(0 => u32))
    }

    pub(crate) fn count(&self) -> Result<i32, u32> {
        let mut count = -1;
        answer(call!(self.cuDeviceGetCount(&mut count => &mut i32)), count)
    }

    /// Retains the primary context and makes it the thread's current one.
    pub(crate) fn make_current(&self, device: i32) {
        let context = self.retain(device).expect("a context");
        assert_eq!(self.set_current(context), SUCCESS);
    }

    pub(crate) fn retain(&self, device: i32) -> Result<usize, u32> {
        let mut context = 0;
        answer(call!(self.cuDevicePrimaryCtxRetain(&mut context => &mut usize, device => i32)), context)
    }

    pub(crate) fn release(&self, device: i32) -> u32 {
        call!(self.cuDevicePrimaryCtxRelease_v2(device => i32))
    }

    pub(crate) fn set_current(&self, context: usize) -> u32 {
        call!(self.cuCtxSetCurrent(context => usize))
    }

    pub(crate) fn alloc(&self, bytes: u64) -> Result<u64, u32> {
        let mut address = 0;
        answer(call!(self.cuMemAlloc_v2(&mut address => &mut u64, bytes => u64)), address)
    }

    pub(crate) fn free(&self, address: u64) -> u32 {
        call!(self.cuMemFree_v2(address => u64))
    }

    /// Free and total bytes.
    pub(crate) fn info(&self) -> Result<(u64, u64), u32> {
        let (mut free, mut total) = (0, 0);
        answer(call!(self.cuMemGetInfo_v2(&mut free => &mut u64, &mut total => &mut u64)), (free, total))
    }

    pub(crate) fn uuid(&self, device: i32) -> Result<[u8; 16], u32> {
        let mut uuid = [0; 16];
        answer(call!(self.cuDeviceGetUuid_v2(&mut uuid => &mut [u8; 16], device => i32)), uuid)
    }

    pub(crate) fn name(&self, device: i32) -> Result<String, u32> {
        let mut name = [0_u8; 96];
        let code = call!(self.cuDeviceGetName(name.as_mut_ptr() => *mut u8, 96 => i32, device => i32));
        answer(code, CStr::from_bytes_until_nul(&name).expect("a NUL").to_str().expect("UTF-8").to_owned())
    }

    /// Pointer and status of `cuGetProcAddress`.
    pub(crate) fn proc(&self, name: &str, version: i32, flags: u64) -> Result<(*const c_void, u32), u32> {
        let name = CString::new(name).expect("no NUL");
        let (mut pointer, mut status) = (std::ptr::null(), u32::MAX);
        let code = call!(self.cuGetProcAddress_v2(
            name.as_ptr() => *const c_char,
            &mut pointer => &mut *const c_void,
            version => i32,
            flags => u64,
            &mut status => &mut u32,
        ));
        answer(code, (pointer, status))
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

pub(crate) const DEVICE: Location = Location { kind: 1, id: 0 };

/// Bytes of device memory that this process uses.
pub(crate) fn used(cuda: &Cuda) -> u64 {
    let (free, total) = cuda.info().expect("information");
    total - free
}

/// A program with a context; its usage counts from there.
pub(crate) struct Started {
    pub(crate) cuda: Cuda,
    before: u64,
    // Declared last: the library's file is in its directory.
    pub(crate) node: Node,
}

pub(crate) fn start(gpus: &str) -> Started {
    let node = Node::up(gpus);
    let cuda = node.cuda();
    let before = used(&cuda);
    Started { cuda, before, node }
}

impl Started {
    pub(crate) fn used(&self) -> u64 {
        used(&self.cuda) - self.before
    }
}
