//! The common frame of every call: it counts, checks the initialisation, applies the injected
//! faults, and stops panics.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::code::{Code, Outcome};
use crate::objects::Process;
use crate::process;
use crate::{call_index, rules};

/// A call that needs `cuInit`.
#[inline]
pub(crate) fn call(at: usize, body: impl FnOnce(&'static Process) -> Outcome) -> u32 {
    let mut body = Some(body);
    initialised(at, &mut |process| body.take().map_or(Err(Code::Unknown), |body| body(process)))
}

/// A call that works before `cuInit`.
#[inline]
pub(crate) fn call_early(at: usize, body: impl FnOnce() -> Outcome) -> u32 {
    let mut body = Some(body);
    framed(at, &mut || body.take().map_or(Err(Code::Unknown), |body| body()))
}

/// A call of a function that is not implemented.
pub(crate) fn call_missing(at: usize) -> u32 {
    framed(at, &mut || Err(Code::NotSupported))
}

// Not generic, so that it exists once for hundreds of functions: an indirect call costs less than
// that much code.
#[inline(never)]
fn initialised(at: usize, body: &mut dyn FnMut(&'static Process) -> Outcome) -> u32 {
    match process::current() {
        Ok(process) => framed(at, &mut || body(process)),
        Err(code) => {
            call_index::count(at);
            code as u32
        }
    }
}

#[inline]
fn framed(at: usize, body: &mut dyn FnMut() -> Outcome) -> u32 {
    call_index::count(at);
    let ruled = || if rules::has_call_rules() { rules::apply(at, body) } else { body().map(|()| 0) };
    match catch_unwind(AssertUnwindSafe(ruled)) {
        Ok(Ok(code)) => code,
        Ok(Err(code)) => code as u32,
        Err(_) => Code::Unknown as u32,
    }
}

/// Entry points: `fn NAME(process; arguments) { body }`, or `early fn NAME(arguments)` for
/// functions that work before `cuInit`. `fn NAME | TWIN(process, own_stream; arguments)` defines
/// two functions with one body, for the legacy and for the per-thread default stream.
macro_rules! entry {
    () => {};
    (
        $(#[$doc:meta])* early fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block
        $($rest:tt)*
    ) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($argument: $kind),*) -> u32 {
            $crate::frame::call_early($crate::call_index::at::$name, || $body)
        }
        $crate::frame::entry! { $($rest)* }
    };
    (
        $(#[$doc:meta])* fn $name:ident($process:ident $(; $($argument:ident: $kind:ty),* $(,)?)?) $body:block
        $($rest:tt)*
    ) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($($argument: $kind),*)?) -> u32 {
            $crate::frame::call($crate::call_index::at::$name, |$process| $body)
        }
        $crate::frame::entry! { $($rest)* }
    };
    (
        $(#[$doc:meta])* fn $name:ident | $twin:ident(
            $process:ident, $own:ident; $($argument:ident: $kind:ty),* $(,)?
        ) $body:block
        $($rest:tt)*
    ) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($argument: $kind),*) -> u32 {
            let $own = false;
            $crate::frame::call($crate::call_index::at::$name, |$process| $body)
        }
        /// The same, for the per-thread default stream.
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $twin($($argument: $kind),*) -> u32 {
            let $own = true;
            $crate::frame::call($crate::call_index::at::$twin, |$process| $body)
        }
        $crate::frame::entry! { $($rest)* }
    };
}
pub(crate) use entry;
