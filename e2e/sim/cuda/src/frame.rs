//! The frame of every call: counted, initialised, and nothing unwinds out of it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::code::Code;
use crate::process::{self, Process};
use crate::symbols;

pub(crate) type Outcome<T = ()> = Result<T, Code>;

/// A call that needs `cuInit`.
#[inline]
pub(crate) fn call(at: usize, body: impl FnOnce(&'static Process) -> Outcome) -> u32 {
    symbols::count(at);
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code as u32,
    };
    guarded(|| body(process))
}

/// A call that works before it.
#[inline]
pub(crate) fn call_early(at: usize, body: impl FnOnce() -> Outcome) -> u32 {
    symbols::count(at);
    guarded(body)
}

#[inline]
fn guarded(body: impl FnOnce() -> Outcome) -> u32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
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
