//! Hooks of the video engines: `libnvidia-encode.so.1` and `libnvcuvid.so.1`.
//!
//! Sessions are counted when opened and closed. Above the share's quota, an open returns the error
//! that the libraries use when they have no more. Encoders are opened through a table that
//! `NvEncodeAPICreateInstance` fills in, so three of its addresses are replaced. The layouts are
//! those of `nvEncodeAPI.h` (Video Codec SDK 9.0 to 13.0), which only ever appended fields. With
//! shims, sessions are not counted, because these two libraries are then the driver's own.

use crate::cuda::call::{Call, CuResult, OUT_OF_MEMORY, SUCCESS, by, hook};
use crate::cuda::driver::{self, Handle, Ordinal};
use crate::share::{self, DeviceAccess};
use core::ffi::{c_uint, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};
use divvy_interposer_core::codec::Engine;
use divvy_interposer_core::handle_devices::{self, HandleDevice};

/// `NV_ENC_ERR_OUT_OF_MEMORY`, returned for a session above the quota.
const QUOTA_REACHED: CuResult = 10;
/// `NV_ENC_ERR_INVALID_PTR`. Unreachable: a program gets the hook's address only after the
/// library's own function is known.
const INVALID_POINTER: CuResult = 6;
/// `NV_ENC_DEVICE_TYPE_CUDA`: the device is a context.
const DEVICE_TYPE_CUDA: c_uint = 1;

/// `NV_ENCODE_API_FUNCTION_LIST`: the version and the first 36 functions.
#[repr(C)]
pub(crate) struct Functions {
    version: u32,
    reserved: u32,
    all: [usize; 36],
}

/// The first fields of `NV_ENC_OPEN_ENCODE_SESSION_EX_PARAMS`.
#[repr(C)]
struct Parameters {
    version: u32,
    kind: c_uint,
    device: Handle,
}

const OPEN_INDEX: usize = 0;
const DESTROY_INDEX: usize = 27;
const OPEN_EX_INDEX: usize = 29;

/// The library's own functions, set when it has filled in a table.
static REAL_OPEN: AtomicUsize = AtomicUsize::new(0);
static REAL_OPEN_EX: AtomicUsize = AtomicUsize::new(0);
static REAL_DESTROY: AtomicUsize = AtomicUsize::new(0);

/// Counted sessions. A session that does not fit stays counted until the process exits.
static SESSIONS: [HandleDevice; 256] = [const { HandleDevice::none() }; 256];

/// Opens a session with `call`, which writes its handle to `out`.
///
/// # Safety
/// `out` is null, which the library refuses, or readable after a successful call.
#[inline(never)]
unsafe fn open(
    engine: Engine,
    device: Option<Ordinal>,
    out: *const Handle,
    refusal: CuResult,
    call: Call<'_>,
) -> CuResult {
    let (Some(device), false) = (device, out.is_null()) else { return call.call() };
    let share = match share::for_ordinal(device) {
        DeviceAccess::Unmanaged => return call.call(),
        DeviceAccess::Denied => return refusal,
        DeviceAccess::Share(share) => share,
    };
    if share.open_session(engine).is_err() {
        return refusal;
    }
    let answer = call.call();
    match answer {
        // SAFETY: guaranteed by the caller.
        SUCCESS => handle_devices::insert(&SESSIONS, unsafe { out.read() } as u64, device),
        _ => share.close_session(engine),
    }
    answer
}

fn close(engine: Engine, session: Handle, answer: CuResult) -> CuResult {
    if answer == SUCCESS
        && let Some(device) = handle_devices::remove(&SESSIONS, session as u64)
        && let DeviceAccess::Share(share) = share::for_ordinal(device)
    {
        share.close_session(engine);
    }
    answer
}

fn device_of(kind: c_uint, device: Handle) -> Option<Ordinal> {
    // Devices of graphics APIs are not CUDA devices: the thread's current context is used, if any.
    if kind == DEVICE_TYPE_CUDA { driver::device_of_context(device) } else { driver::current_device() }
}

hook! {
    /// Since SDK 5.
    NvEncodeAPICreateInstance(list: *mut Functions) |real| {
        let answer = real(list);
        // SAFETY: the library has just filled it in.
        if let (SUCCESS, Some(functions)) = (answer, unsafe { list.as_mut() }) {
            let ours: [(usize, &AtomicUsize, usize); 3] = [
                (OPEN_INDEX, &REAL_OPEN, open_session as *const () as usize),
                (OPEN_EX_INDEX, &REAL_OPEN_EX, open_session_ex as *const () as usize),
                (DESTROY_INDEX, &REAL_DESTROY, destroy_encoder as *const () as usize),
            ];
            for (at, known, hook) in ours {
                if let Some(function) = functions.all.get_mut(at).filter(|function| **function != 0) {
                    known.store(*function, Ordering::Release);
                    *function = hook;
                }
            }
        }
        answer
    }
}

unsafe extern "C" fn open_session(device: Handle, kind: c_uint, out: *mut Handle) -> CuResult {
    let real = match REAL_OPEN.load(Ordering::Acquire) {
        0 => return INVALID_POINTER,
        // SAFETY: the library's function at this index of its table, with this signature.
        address => unsafe {
            core::mem::transmute::<usize, unsafe extern "C" fn(Handle, c_uint, *mut Handle) -> CuResult>(
                address,
            )
        },
    };
    // SAFETY: the program's own arguments.
    unsafe {
        open(Engine::Encoder, device_of(kind, device), out, QUOTA_REACHED, by(&|| real(device, kind, out)))
    }
}

unsafe extern "C" fn open_session_ex(parameters: *const Parameters, out: *mut Handle) -> CuResult {
    let real = match REAL_OPEN_EX.load(Ordering::Acquire) {
        0 => return INVALID_POINTER,
        // SAFETY: as above.
        address => unsafe {
            core::mem::transmute::<usize, unsafe extern "C" fn(*const Parameters, *mut Handle) -> CuResult>(
                address,
            )
        },
    };
    // SAFETY: null, or the program's parameters.
    let device = unsafe { parameters.as_ref() }.and_then(|asked| device_of(asked.kind, asked.device));
    // SAFETY: the program's own arguments.
    unsafe { open(Engine::Encoder, device, out, QUOTA_REACHED, by(&|| real(parameters, out))) }
}

unsafe extern "C" fn destroy_encoder(session: Handle) -> CuResult {
    let real = match REAL_DESTROY.load(Ordering::Acquire) {
        0 => return INVALID_POINTER,
        // SAFETY: as above.
        address => unsafe {
            core::mem::transmute::<usize, unsafe extern "C" fn(Handle) -> CuResult>(address)
        },
    };
    // SAFETY: the program's own argument.
    close(Engine::Encoder, session, unsafe { real(session) })
}

hook! {
    /// From `cuviddec.h`: uses the device of the thread's current context.
    cuvidCreateDecoder(out: *mut Handle, information: *mut c_void) |real| {
        // SAFETY: the program's own arguments.
        unsafe {
            let call = || real(out, information);
            open(Engine::Decoder, driver::current_device(), out, OUT_OF_MEMORY, by(&call))
        }
    }
}

hook! {
    /// Closes a session.
    cuvidDestroyDecoder(session: Handle) |real| {
        close(Engine::Decoder, session, real(session))
    }
}
