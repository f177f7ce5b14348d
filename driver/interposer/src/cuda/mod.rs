//! The hooked functions of `libcuda.so.1`, by subject.
//!
//! An allocation is charged before the driver is asked for it, so that no other process takes the same room meanwhile;
//! what the driver then refuses is given back. Refused by us, it is CUDA_ERROR_OUT_OF_MEMORY, and no output is touched:
//! the driver writes to a place of ours, which is passed on when all is well. A free asks the table what it frees, so it
//! does not matter which function made it or frees it; what the table does not know is the driver's alone.
//!
//! What is not here goes straight to the driver: most copies, and all memory that is charged to somebody else
//! (imported, opened by IPC) or is not the device's (pinned).

mod array;
mod context;
pub(crate) mod driver;
mod graph;
mod info;
mod launch;
mod memory;
mod overcommit;
pub(crate) mod pool;
mod proc_address;
mod update;
mod virtual_memory;
mod wait;

pub(crate) use array::*;
pub(crate) use context::*;
pub(crate) use graph::*;
pub(crate) use info::*;
pub(crate) use launch::*;
pub(crate) use memory::*;
pub(crate) use overcommit::*;
pub(crate) use pool::*;
pub(crate) use proc_address::*;
pub(crate) use update::*;
pub(crate) use virtual_memory::*;
pub(crate) use wait::*;

use crate::share::{self, LEDGER, Standing};
use core::marker::PhantomData;
use core::ptr;
use divvy_interposer_core::table::Class;
use divvy_interposer_core::{Full, Reservation};
use driver::Current;

/// `CUresult`.
pub(crate) type Answer = i32;
pub(crate) const SUCCESS: Answer = 0;
pub(crate) const OUT_OF_MEMORY: Answer = 2;
/// CUDA_ERROR_SHARED_OBJECT_INIT_FAILED: the driver's library is not loaded, or has no such function.
pub(crate) const MISSING: Answer = 303;

/// Defines the hook of one function: its exported name, its arguments in C's order, and a body that is given the
/// driver's own function.
macro_rules! hook {
    ($(#[$meta:meta])* $name:ident($($argument:ident: $kind:ty),* $(,)?) |$real:ident| $body:block) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// What `cuda.h` asks of the function of this name.
        #[cfg_attr(panic = "abort", unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> $crate::cuda::Answer {
            let Some(address) = $crate::genuine::function($crate::table::index::$name) else {
                return $crate::cuda::MISSING;
            };
            // SAFETY: the driver's function of that very name, whose signature this is.
            let function = unsafe { core::mem::transmute::<usize, unsafe extern "C" fn($($kind),*) -> $crate::cuda::Answer>(address) };
            // SAFETY: called with the arguments of our caller, or with our own in place of some.
            let $real = |$($argument: $kind),*| unsafe { function($($argument),*) };
            $body
        }
    };
}
pub(crate) use hook;

/// The register behind so many arguments.
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

/// Defines the hooks of functions that have the same arguments, so many, and the same body: as [`hook`], but one piece of code
/// for all of them. Which one was called it is told as one argument more.
macro_rules! twins {
    ($all:ident($($argument:ident: $kind:ty),* $(,)?) of $count:tt |$real:ident| $body:block $($(#[$meta:meta])* $name:ident;)*) => {
        unsafe extern "C" fn $all($($argument: $kind,)* at: u32) -> $crate::cuda::Answer {
            const _: () = assert!([$(stringify!($argument)),*].len() == $count);
            let Some(address) = $crate::genuine::function(at as usize) else {
                return $crate::cuda::MISSING;
            };
            // SAFETY: the driver's function of the name that was called, and all of those have this signature.
            let function = unsafe { core::mem::transmute::<usize, unsafe extern "C" fn($($kind),*) -> $crate::cuda::Answer>(address) };
            // SAFETY: called with the arguments of our caller, or with our own in place of some.
            let $real = |$($argument: $kind),*| unsafe { function($($argument),*) };
            $body
        }

        $(
            $(#[$meta])*
            ///
            /// # Safety
            /// What `cuda.h` asks of the function of this name.
            #[cfg_attr(panic = "abort", unsafe(no_mangle))]
            #[unsafe(naked)]
            pub(crate) unsafe extern "C" fn $name() {
                #[cfg(target_arch = "x86_64")]
                core::arch::naked_asm!(
                    concat!("mov ", $crate::cuda::behind!(x86_64 $count), ", {at}"), "jmp {all}",
                    at = const $crate::table::index::$name, all = sym $all,
                );
                #[cfg(target_arch = "aarch64")]
                core::arch::naked_asm!(
                    concat!("mov ", $crate::cuda::behind!(aarch64 $count), ", {at}"), "b {all}",
                    at = const $crate::table::index::$name, all = sym $all,
                );
            }
        )*
    };
}
pub(crate) use twins;

/// The driver's own function of a hooked name, to undo what it did: `real!(cuMemFree_v2(u64))`.
macro_rules! real {
    ($name:ident($($kind:ty),*)) => {
        $crate::genuine::function($crate::table::index::$name).map(|address|
            // SAFETY: the driver's function of that very name, whose signature this is.
            unsafe { core::mem::transmute::<usize, unsafe extern "C" fn($($kind),*) -> $crate::cuda::Answer>(address) })
    };
}
pub(crate) use real;

/// A call of the driver's function, made by code that serves many hooks: a closure and the code that calls it. For a `dyn Fn`
/// there is a table with three addresses, which the loader has to relocate in every process.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a, A = ()> {
    run: unsafe fn(*const (), A) -> Answer,
    closure: *const (),
    lives: PhantomData<&'a ()>,
}

/// Of a closure.
pub(crate) fn by<F: Fn() -> Answer>(closure: &F) -> Call<'_> {
    /// # Safety
    /// `closure` is one of that type.
    unsafe fn run<F: Fn() -> Answer>(closure: *const (), (): ()) -> Answer {
        // SAFETY: as the caller says.
        unsafe { (*closure.cast::<F>())() }
    }
    Call { run: run::<F>, closure: ptr::from_ref(closure).cast(), lives: PhantomData }
}

/// Of one that is told where to write.
pub(crate) fn to<A, F: Fn(A) -> Answer>(closure: &F) -> Call<'_, A> {
    /// # Safety
    /// `closure` is one of that type.
    unsafe fn run<A, F: Fn(A) -> Answer>(closure: *const (), argument: A) -> Answer {
        // SAFETY: as the caller says.
        unsafe { (*closure.cast::<F>())(argument) }
    }
    Call { run: run::<A, F>, closure: ptr::from_ref(closure).cast(), lives: PhantomData }
}

impl Call<'_> {
    pub(crate) fn call(self) -> Answer {
        self.with(())
    }
}

impl<A> Call<'_, A> {
    fn with(self, argument: A) -> Answer {
        // SAFETY: the closure that `run` is for, which outlives this.
        unsafe { (self.run)(self.closure, argument) }
    }
}

/// An allocation of `bytes`. `call` asks the driver, writing to a place of its own, and says what was made;
/// `keep` puts that, with the context, into the accounts; `pass` gives it to the program; `undo` frees it again.
fn allocate<T: Copy>(
    current: Option<Current>,
    bytes: u64,
    call: impl FnOnce() -> Result<T, Answer>,
    keep: impl FnOnce(Reservation<'static, crate::process::Kernel>, T, u64) -> Result<(), Full>,
    pass: impl FnOnce(T),
    undo: impl FnOnce(T),
) -> Answer {
    allocate_in(current, room(current, bytes), call, keep, pass, undo)
}

/// What is charged, if the device is one of a share.
type Room = Result<Option<Reservation<'static, crate::process::Kernel>>, Full>;

/// [`allocate`], in what was found to be free for it.
fn allocate_in<T: Copy>(
    current: Option<Current>,
    room: Room,
    call: impl FnOnce() -> Result<T, Answer>,
    keep: impl FnOnce(Reservation<'static, crate::process::Kernel>, T, u64) -> Result<(), Full>,
    pass: impl FnOnce(T),
    undo: impl FnOnce(T),
) -> Answer {
    let Ok(reservation) = room else { return OUT_OF_MEMORY };
    let context = current.map_or(0, |current| current.context as u64);
    let made = match call() {
        Ok(made) => made,
        Err(error) => return error,
    };
    if let Some(reservation) = reservation
        && keep(reservation, made, context).is_err()
    {
        undo(made);
        return OUT_OF_MEMORY;
    }
    pass(made);
    SUCCESS
}

/// Charges, if the device is one of a share, after a second look at what pools keep for nothing.
fn room(current: Option<Current>, bytes: u64) -> Room {
    charged(current, |device| device.reserve(bytes))
}

/// The same for managed memory.
fn managed_room(current: Option<Current>, bytes: u64) -> Room {
    charged(current, |device| device.reserve_managed(bytes))
}

fn charged(
    current: Option<Current>,
    charge: impl Fn(&share::Device) -> Result<Reservation<'static, crate::process::Kernel>, Full>,
) -> Room {
    // Without a context, or for a device that is none, the driver refuses by itself.
    match current.map_or(Standing::Free, |current| share::of_cuda(current.device)) {
        Standing::Free => Ok(None),
        Standing::Closed => Err(Full),
        Standing::Share(device) => charge(&device)
            .or_else(|_| {
                pool::shrink(&device);
                charge(&device)
            })
            .map(Some),
    }
}

/// Gives back what is charged for `key` if `call` frees it.
fn free(class: Class, key: u64, call: Call<'_>) -> Answer {
    let Some(freeing) = LEDGER.freeing(class, key) else { return call.call() };
    let answer = call.call();
    if answer == SUCCESS {
        freeing.freed();
    }
    answer
}
