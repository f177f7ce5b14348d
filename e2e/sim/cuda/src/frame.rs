//! The frame of every call: counted, initialised, and nothing unwinds out of it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::code::Code;
use crate::process::{self, Process};
use crate::{rules, symbols};

pub(crate) type Outcome<T = ()> = Result<T, Code>;

/// A call that needs `cuInit`.
#[inline]
pub(crate) fn call(at: usize, body: impl FnOnce(&'static Process) -> Outcome) -> u32 {
    let mut body = Some(body);
    initialised(at, &mut |process| body.take().map_or(Err(Code::Unknown), |body| body(process)))
}

/// A call that works before it.
#[inline]
pub(crate) fn call_early(at: usize, body: impl FnOnce() -> Outcome) -> u32 {
    let mut body = Some(body);
    framed(at, &mut || body.take().map_or(Err(Code::Unknown), |body| body()))
}

/// A call of a function that is not there.
pub(crate) fn call_missing(at: usize) -> u32 {
    framed(at, &mut || Err(Code::NotSupported))
}

// One of each for the hundreds of functions: an indirect call costs less than so much code.
#[inline(never)]
fn initialised(at: usize, body: &mut dyn FnMut(&'static Process) -> Outcome) -> u32 {
    match process::current() {
        Ok(process) => framed(at, &mut || body(process)),
        Err(code) => {
            symbols::count(at);
            code as u32
        }
    }
}

#[inline]
fn framed(at: usize, body: &mut dyn FnMut() -> Outcome) -> u32 {
    symbols::count(at);
    let ruled = || if rules::any() { rules::around(at, body) } else { body().map(|()| 0) };
    match catch_unwind(AssertUnwindSafe(ruled)) {
        Ok(Ok(code)) => code,
        Ok(Err(code)) => code as u32,
        Err(_) => Code::Unknown as u32,
    }
}

/// Entry points: `fn NAME(process; arguments) { body }`, or `fn NAME | TWIN(process, own_stream; arguments)` for two
/// functions with one body that differ in whose default stream they mean, or `early fn NAME(arguments)`.
macro_rules! entry {
    () => {};
    ($(#[$doc:meta])* early fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($argument: $kind),*) -> u32 {
            $crate::frame::call_early($crate::symbols::at::$name, || $body)
        }
        $crate::frame::entry! { $($rest)* }
    };
    ($(#[$doc:meta])* fn $name:ident($process:ident $(; $($argument:ident: $kind:ty),* $(,)?)?) $body:block $($rest:tt)*) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($($argument: $kind),*)?) -> u32 {
            $crate::frame::call($crate::symbols::at::$name, |$process| $body)
        }
        $crate::frame::entry! { $($rest)* }
    };
    ($(#[$doc:meta])* fn $name:ident | $twin:ident($process:ident, $own:ident; $($argument:ident: $kind:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($argument: $kind),*) -> u32 {
            let $own = false;
            $crate::frame::call($crate::symbols::at::$name, |$process| $body)
        }
        /// The same, for the thread's own default stream.
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $twin($($argument: $kind),*) -> u32 {
            let $own = true;
            $crate::frame::call($crate::symbols::at::$twin, |$process| $body)
        }
        $crate::frame::entry! { $($rest)* }
    };
}
pub(crate) use entry;
