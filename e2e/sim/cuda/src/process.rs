//! The state of this process after `cuInit`: the devices that it sees.
//!
//! A child after a fork inherits the state but must not use it: CUDA returns NOT_INITIALIZED there.
//! A page that the kernel clears in children detects that, for one load per call.

use std::env;
use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use divvy_sim::{ModuleUser, Sim};

use crate::code::{Code, Outcome};
use crate::objects::{Device, Memory, Process};
use crate::physical_store::Physical;
use crate::rules;

static PROCESS: OnceLock<Process> = OnceLock::new();
/// Keeps the kernel module loaded.
static MODULE: OnceLock<ModuleUser> = OnceLock::new();
static INITIALISING: Mutex<()> = Mutex::new(());
/// One byte: 1 in the process that called `cuInit`, 0 in its children.
static MARK: AtomicPtr<AtomicU8> = AtomicPtr::new(std::ptr::null_mut());

/// The process, once it is initialised.
#[inline]
pub(crate) fn current() -> Outcome<&'static Process> {
    let mark = MARK.load(Ordering::Acquire);
    // SAFETY: not NULL, so it is the page of `mark_this_process`, which is never unmapped.
    if mark.is_null() || unsafe { &*mark }.load(Ordering::Relaxed) == 0 {
        return Err(Code::NotInitialized);
    }
    PROCESS.get().ok_or(Code::NotInitialized)
}

/// `cuInit`.
pub(crate) fn init() -> Outcome {
    if current().is_ok() {
        return Ok(());
    }
    // A child must not wait for the lock: the thread that held it does not exist there.
    if !MARK.load(Ordering::Acquire).is_null() {
        return Err(Code::NotInitialized);
    }
    let _alone = INITIALISING.lock().unwrap_or_else(PoisonError::into_inner);
    if current().is_ok() {
        return Ok(());
    }
    rules::read()?;
    let sim = sim()?;
    let module = sim.use_module().map_err(|_| Code::NoDevice)?;
    let state = sim.read().map_err(|_| Code::OperatingSystem)?;
    let visible = sim.visible_devices();
    if !state.modules.nvidia || !visible.has_ctl {
        return Err(Code::NoDevice);
    }
    let wanted = env::var("CUDA_VISIBLE_DEVICES").ok();
    let devices = Device::all(&state, &visible, wanted.as_deref());
    if devices.is_empty() {
        return Err(Code::NoDevice);
    }
    let process = Process { sim, devices, memory: Memory::default(), physical: Physical::default() };
    if PROCESS.set(process).is_err() || MODULE.set(module).is_err() {
        return Err(Code::Unknown);
    }
    mark_this_process()
}

/// The CUDA version of the driver: 13000 is 13.0.
pub(crate) fn driver_version() -> Outcome<u32> {
    let (major, minor) = sim()?.read().map_err(|_| Code::OperatingSystem)?.cuda;
    Ok(1000 * major + 10 * minor)
}

/// The simulator of this library, opened once.
fn sim() -> Outcome<&'static Sim> {
    static SIM: OnceLock<Option<Sim>> = OnceLock::new();
    SIM.get_or_init(|| Sim::from_library_path(&own_file()?).ok()).as_ref().ok_or(Code::NoDevice)
}

fn mark_this_process() -> Outcome {
    let (length, protection) = (4096, libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new page, at an address that the kernel selects.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(Code::OutOfMemory);
    }
    // SAFETY: the page was just mapped, whole and private.
    let wiped = unsafe { libc::madvise(page, length, libc::MADV_WIPEONFORK) };
    if wiped != 0 {
        return Err(Code::OperatingSystem);
    }
    let mark: *mut AtomicU8 = page.cast();
    // SAFETY: the page is mapped, writable and never unmapped.
    unsafe { &*mark }.store(1, Ordering::Relaxed);
    MARK.store(mark, Ordering::Release);
    Ok(())
}

/// The file that contains this code: the library, or a program with the library linked in.
fn own_file() -> Option<PathBuf> {
    // SAFETY: all-zero bytes are a Dl_info.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let inside: *const c_void = (own_file as *const ()).cast();
    // SAFETY: the address is of this function, and `info` is valid for the answer.
    let known = unsafe { libc::dladdr(inside, &mut info) };
    if known == 0 || info.dli_fname.is_null() {
        return env::current_exe().ok();
    }
    // SAFETY: dladdr succeeded, so the name is a string that lives as long as this code is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = PathBuf::from(OsStr::from_bytes(name.to_bytes()));
    // For a program, the loader only knows the name that it was called by, which may not be a path.
    path.canonicalize().or_else(|_| env::current_exe()).ok()
}
