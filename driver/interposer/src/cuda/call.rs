//! Types and macros to define hooks and to call the driver's functions.

use core::marker::PhantomData;
use core::ptr;

/// `CUresult`.
pub(crate) type CuResult = i32;
pub(crate) const SUCCESS: CuResult = 0;
pub(crate) const OUT_OF_MEMORY: CuResult = 2;
/// CUDA_ERROR_SHARED_OBJECT_INIT_FAILED: the driver's library is not loaded, or has no such
/// function.
pub(crate) const MISSING: CuResult = 303;

/// Defines a hook: its exported name, its arguments in C's order, and a body that gets the driver's
/// own function.
macro_rules! hook {
    ($(#[$meta:meta])* $name:ident($($argument:ident: $kind:ty),* $(,)?) |$real:ident| $body:block) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// As required by `cuda.h` for this function.
        #[cfg_attr(panic = "abort", unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> $crate::cuda::call::CuResult {
            let Some(address) = $crate::real_symbols::function($crate::symbol_table::index::$name) else {
                return $crate::cuda::call::MISSING;
            };
            // SAFETY: the driver's function of that name, with this signature.
            let function = unsafe {
                core::mem::transmute::<
                    usize,
                    unsafe extern "C" fn($($kind),*) -> $crate::cuda::call::CuResult,
                >(address)
            };
            // SAFETY: called with the caller's arguments, or with our own in place of some.
            let $real = |$($argument: $kind),*| unsafe { function($($argument),*) };
            $body
        }
    };
}
pub(crate) use hook;

/// The register of the next argument after this many.
macro_rules! behind {
    (x86_64 1) => {
        "esi"
    };
    (x86_64 2) => {
        "edx"
    };
    (x86_64 3) => {
        "ecx"
    };
    (x86_64 5) => {
        "r9d"
    };
    (aarch64 1) => {
        "w1"
    };
    (aarch64 2) => {
        "w2"
    };
    (aarch64 3) => {
        "w3"
    };
    (aarch64 5) => {
        "w5"
    };
}
pub(crate) use behind;

/// Defines hooks of functions with the same arguments and the same body: like [`hook`], but with
/// one shared function. An extra argument says which function was called.
macro_rules! twins {
    (
        $all:ident($($argument:ident: $kind:ty),* $(,)?) of $count:tt |$real:ident| $body:block
        $($(#[$meta:meta])* $name:ident;)*
    ) => {
        unsafe extern "C" fn $all($($argument: $kind,)* at: u32) -> $crate::cuda::call::CuResult {
            const _: () = assert!([$(stringify!($argument)),*].len() == $count);
            let Some(address) = $crate::real_symbols::function(at as usize) else {
                return $crate::cuda::call::MISSING;
            };
            // SAFETY: the driver's function of the name that was called; all of them have this
            // signature.
            let function = unsafe {
                core::mem::transmute::<
                    usize,
                    unsafe extern "C" fn($($kind),*) -> $crate::cuda::call::CuResult,
                >(address)
            };
            // SAFETY: called with the caller's arguments, or with our own in place of some.
            let $real = |$($argument: $kind),*| unsafe { function($($argument),*) };
            $body
        }

        $(
            $(#[$meta])*
            ///
            /// # Safety
            /// As required by `cuda.h` for this function.
            #[cfg_attr(panic = "abort", unsafe(no_mangle))]
            #[unsafe(naked)]
            pub(crate) unsafe extern "C" fn $name() {
                #[cfg(target_arch = "x86_64")]
                core::arch::naked_asm!(
                    concat!("mov ", $crate::cuda::call::behind!(x86_64 $count), ", {at}"), "jmp {all}",
                    at = const $crate::symbol_table::index::$name, all = sym $all,
                );
                #[cfg(target_arch = "aarch64")]
                core::arch::naked_asm!(
                    concat!("mov ", $crate::cuda::call::behind!(aarch64 $count), ", {at}"), "b {all}",
                    at = const $crate::symbol_table::index::$name, all = sym $all,
                );
            }
        )*
    };
}
pub(crate) use twins;

/// The driver's own function of a hooked name, to undo a call: `real!(cuMemFree_v2(u64))`.
macro_rules! real {
    ($name:ident($($kind:ty),*)) => {
        $crate::real_symbols::function($crate::symbol_table::index::$name).map(|address|
            // SAFETY: the driver's function of that name, with this signature.
            unsafe {
                core::mem::transmute::<
                    usize,
                    unsafe extern "C" fn($($kind),*) -> $crate::cuda::call::CuResult,
                >(address)
            })
    };
}
pub(crate) use real;

/// A call of the driver's function from code shared by many hooks: a closure and its call function.
/// A `dyn Fn` would have a vtable with three addresses, which the loader relocates in every
/// process.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a, A = ()> {
    run: unsafe fn(*const (), A) -> CuResult,
    closure: *const (),
    lives: PhantomData<&'a ()>,
}

/// Makes a [`Call`] from a closure.
pub(crate) fn by<F: Fn() -> CuResult>(closure: &F) -> Call<'_> {
    /// # Safety
    /// `closure` points to a closure of that type.
    unsafe fn run<F: Fn() -> CuResult>(closure: *const (), (): ()) -> CuResult {
        // SAFETY: guaranteed by the caller.
        unsafe { (*closure.cast::<F>())() }
    }
    Call { run: run::<F>, closure: ptr::from_ref(closure).cast(), lives: PhantomData }
}

/// Makes a [`Call`] from a closure with an argument: where to write the result.
pub(crate) fn to<A, F: Fn(A) -> CuResult>(closure: &F) -> Call<'_, A> {
    /// # Safety
    /// `closure` points to a closure of that type.
    unsafe fn run<A, F: Fn(A) -> CuResult>(closure: *const (), argument: A) -> CuResult {
        // SAFETY: guaranteed by the caller.
        unsafe { (*closure.cast::<F>())(argument) }
    }
    Call { run: run::<A, F>, closure: ptr::from_ref(closure).cast(), lives: PhantomData }
}

impl Call<'_> {
    pub(crate) fn call(self) -> CuResult {
        self.with(())
    }
}

impl<A> Call<'_, A> {
    pub(crate) fn with(self, argument: A) -> CuResult {
        // SAFETY: the closure that `run` was made for, which outlives this call.
        unsafe { (self.run)(self.closure, argument) }
    }
}
