//! The hooked functions of the video engines: `libnvidia-encode.so.1` and `libnvcuvid.so.1`.
//!
//! Sessions are counted when they are opened and closed, and refused above the share's quota with what the libraries say when they
//! have no more; nothing else of them is looked at. Encoders are opened by a table of functions that the library fills in
//! (`NvEncodeAPICreateInstance`), so three addresses of that table are put in the place of the library's. Layout
//! of the table and of the parameters: `nvEncodeAPI.h` of the Video Codec SDK (9.0 to 13.0), which only ever added at the end.
//!
//! In shares that are injected as shims sessions are not counted: there these two libraries are the driver's own.

use crate::cuda::driver::{self, Handle, Ordinal};
use crate::cuda::{Answer, Call, OUT_OF_MEMORY, SUCCESS, by, hook};
use crate::share::{self, Standing};
use core::ffi::{c_uint, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};
use divvy_interposer_core::codec::Engine;
use divvy_interposer_core::handles::{self, Known};

/// `NV_ENC_ERR_OUT_OF_MEMORY`, which is what opening one session too many is answered with.
const NO_MORE_ENCODERS: Answer = 10;
/// `NV_ENC_ERR_INVALID_PTR`: not reached, as nobody has our address before the library's own is known.
const NO_FUNCTION: Answer = 6;
/// `NV_ENC_DEVICE_TYPE_CUDA`: the device is a context.
const OF_CUDA: c_uint = 1;

/// `NV_ENCODE_API_FUNCTION_LIST`: 36 functions and more behind its version.
#[repr(C)]
pub(crate) struct Functions {
    version: u32,
    reserved: u32,
    all: [usize; 36],
}

/// `NV_ENC_OPEN_ENCODE_SESSION_EX_PARAMS`, as far as it is looked at.
#[repr(C)]
struct Parameters {
    version: u32,
    kind: c_uint,
    device: Handle,
}

const OPEN: usize = 0;
const DESTROY: usize = 27;
const OPEN_EX: usize = 29;

/// The library's own, once it has filled in a table.
static REAL_OPEN: AtomicUsize = AtomicUsize::new(0);
static REAL_OPEN_EX: AtomicUsize = AtomicUsize::new(0);
static REAL_DESTROY: AtomicUsize = AtomicUsize::new(0);

/// Sessions that were counted. One that finds no room counts until the process ends.
static SESSIONS: [Known; 256] = [const { Known::none() }; 256];

/// Opens a session by `call`, which writes its handle to `out`.
///
/// # Safety
/// `out` is null, which the library refuses, or can be read after a call that succeeds.
#[inline(never)]
unsafe fn open(
    engine: Engine,
    device: Option<Ordinal>,
    out: *const Handle,
    refusal: Answer,
    call: Call<'_>,
) -> Answer {
    let (Some(device), false) = (device, out.is_null()) else { return call.call() };
    let share = match share::of_cuda(device) {
        Standing::Free => return call.call(),
        Standing::Closed => return refusal,
        Standing::Share(share) => share,
    };
    if share.open_session(engine).is_err() {
        return refusal;
    }
    let answer = call.call();
    match answer {
        // SAFETY: as the caller says.
        SUCCESS => handles::remember(&SESSIONS, unsafe { out.read() } as u64, device),
        _ => share.close_session(engine),
    }
    answer
}

fn closed(engine: Engine, session: Handle, answer: Answer) -> Answer {
    if answer == SUCCESS
        && let Some(device) = handles::forget(&SESSIONS, session as u64)
        && let Standing::Share(share) = share::of_cuda(device)
    {
        share.close_session(engine);
    }
    answer
}

fn device_of(kind: c_uint, device: Handle) -> Option<Ordinal> {
    // Graphics' own devices are none of CUDA's: the thread's context has to do, if there is one.
    if kind == OF_CUDA { driver::device_of_context(device) } else { driver::current_device() }
}

hook! {
    /// Since SDK 5.
    NvEncodeAPICreateInstance(list: *mut Functions) |real| {
        let answer = real(list);
        // SAFETY: the library has just filled it in.
        if let (SUCCESS, Some(functions)) = (answer, unsafe { list.as_mut() }) {
            let ours: [(usize, &AtomicUsize, usize); 3] = [
                (OPEN, &REAL_OPEN, open_session as *const () as usize),
                (OPEN_EX, &REAL_OPEN_EX, open_session_ex as *const () as usize),
                (DESTROY, &REAL_DESTROY, destroy_encoder as *const () as usize),
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

unsafe extern "C" fn open_session(device: Handle, kind: c_uint, out: *mut Handle) -> Answer {
    let real = match REAL_OPEN.load(Ordering::Acquire) {
        0 => return NO_FUNCTION,
        // SAFETY: the library's function of that place of its table, whose signature this is.
        address => unsafe {
            core::mem::transmute::<usize, unsafe extern "C" fn(Handle, c_uint, *mut Handle) -> Answer>(
                address,
            )
        },
    };
    // SAFETY: the program's own arguments.
    unsafe {
        open(Engine::Encoder, device_of(kind, device), out, NO_MORE_ENCODERS, by(&|| real(device, kind, out)))
    }
}

unsafe extern "C" fn open_session_ex(parameters: *const Parameters, out: *mut Handle) -> Answer {
    let real = match REAL_OPEN_EX.load(Ordering::Acquire) {
        0 => return NO_FUNCTION,
        // SAFETY: as above.
        address => unsafe {
            core::mem::transmute::<usize, unsafe extern "C" fn(*const Parameters, *mut Handle) -> Answer>(
                address,
            )
        },
    };
    // SAFETY: null, or the program's parameters.
    let device = unsafe { parameters.as_ref() }.and_then(|asked| device_of(asked.kind, asked.device));
    // SAFETY: the program's own arguments.
    unsafe { open(Engine::Encoder, device, out, NO_MORE_ENCODERS, by(&|| real(parameters, out))) }
}

unsafe extern "C" fn destroy_encoder(session: Handle) -> Answer {
    let real = match REAL_DESTROY.load(Ordering::Acquire) {
        0 => return NO_FUNCTION,
        // SAFETY: as above.
        address => unsafe { core::mem::transmute::<usize, unsafe extern "C" fn(Handle) -> Answer>(address) },
    };
    // SAFETY: the program's own argument.
    closed(Engine::Encoder, session, unsafe { real(session) })
}

hook! {
    /// `cuviddec.h`: on the device of the thread's context.
    cuvidCreateDecoder(out: *mut Handle, information: *mut c_void) |real| {
        // SAFETY: the program's own arguments.
        unsafe { open(Engine::Decoder, driver::current_device(), out, OUT_OF_MEMORY, by(&|| real(out, information))) }
    }
}

hook! {
    /// The end of a session.
    cuvidDestroyDecoder(session: Handle) |real| {
        closed(Engine::Decoder, session, real(session))
    }
}
