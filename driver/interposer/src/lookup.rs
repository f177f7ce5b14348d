//! `dlsym` and `dlvsym`, which behave like libc's except for hooked names.
//!
//! libc evaluates `RTLD_NEXT` and `RTLD_DEFAULT` from the caller's return address, so a wrapper
//! would change the result. The entry points are therefore written in assembly. Names without the
//! prefixes `cu`, `nv`, `Nv` and `dl` are passed on by a jump with the caller's frame. A result is
//! replaced only if it is an address in NVIDIA's library, or libc's own `dlsym`/`dlvsym`. Nothing
//! here allocates or locks: programs call `dlsym` from allocators, constructors, and with the
//! loader's lock held.

use crate::elf;
use crate::real_symbols;
use crate::symbol_table;
use core::arch::naked_asm;
use core::ffi::{c_char, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

/// The next functions after ours: libc's, or those of a library preloaded behind this one. 0 if not
/// looked up yet.
static DLSYM: AtomicUsize = AtomicUsize::new(0);
static DLVSYM: AtomicUsize = AtomicUsize::new(0);

const RTLD_DEFAULT: usize = 0;
const RTLD_NEXT: usize = usize::MAX;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// # Safety
/// As for libc's function.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(panic = "abort", unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    naked_asm!(
        "endbr64",
        "test rsi, rsi",
        "jz 3f",
        "cmp byte ptr [rsi], 99", // c
        "jne 1f",
        "cmp byte ptr [rsi + 1], 117", // u
        "je 2f",
        "jmp 3f",
        "1: cmp byte ptr [rsi], 110", // n
        "je 6f",
        "cmp byte ptr [rsi], 78", // N
        "jne 5f",
        "6: cmp byte ptr [rsi + 1], 118", // v
        "je 2f",
        "jmp 3f",
        "5: cmp byte ptr [rsi], 100", // d
        "jne 3f",
        "cmp byte ptr [rsi + 1], 108", // l
        "jne 3f",
        // A hooked prefix: keep both arguments, and pass the caller's return address as the third.
        "2: mov rdx, [rsp]",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {hooked}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jz 3f",
        "ret",
        "3: mov rax, [rip + {next}]",
        "test rax, rax",
        "jz 4f",
        "jmp rax",
        "4: push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        hooked = sym hooked,
        next = sym DLSYM,
        find = sym find_dlsym,
    )
}

/// # Safety
/// As for libc's function.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(panic = "abort", unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlvsym(
    _handle: *mut c_void,
    _name: *const c_char,
    _version: *const c_char,
) -> *mut c_void {
    naked_asm!(
        "endbr64",
        "test rsi, rsi",
        "jz 3f",
        "cmp byte ptr [rsi], 99",
        "jne 1f",
        "cmp byte ptr [rsi + 1], 117",
        "je 2f",
        "jmp 3f",
        "1: cmp byte ptr [rsi], 110",
        "je 6f",
        "cmp byte ptr [rsi], 78",
        "jne 5f",
        "6: cmp byte ptr [rsi + 1], 118",
        "je 2f",
        "jmp 3f",
        "5: cmp byte ptr [rsi], 100",
        "jne 3f",
        "cmp byte ptr [rsi + 1], 108",
        "jne 3f",
        "2: mov rcx, [rsp]",
        "push rdi",
        "push rsi",
        "push rdx",
        "call {hooked}",
        "mov rcx, rdx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rcx, rcx",
        "jz 3f",
        "ret",
        "3: mov rax, [rip + {next}]",
        "test rax, rax",
        "jz 4f",
        "jmp rax",
        "4: push rdi",
        "push rsi",
        "push rdx",
        "call {find}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        hooked = sym hooked_version,
        next = sym DLVSYM,
        find = sym find_dlvsym,
    )
}

/// # Safety
/// As for libc's function.
#[cfg(target_arch = "aarch64")]
#[cfg_attr(panic = "abort", unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    naked_asm!(
        "hint #34",
        "cbz x1, 3f",
        "ldrb w9, [x1]",
        "cmp w9, #99", // c
        "b.ne 1f",
        "ldrb w9, [x1, #1]",
        "cmp w9, #117", // u
        "b.eq 2f",
        "b 3f",
        "1: cmp w9, #110", // n
        "b.eq 6f",
        "cmp w9, #78", // N
        "b.ne 5f",
        "6: ldrb w9, [x1, #1]",
        "cmp w9, #118", // v
        "b.eq 2f",
        "b 3f",
        "5: cmp w9, #100", // d
        "b.ne 3f",
        "ldrb w9, [x1, #1]",
        "cmp w9, #108", // l
        "b.ne 3f",
        // A hooked prefix: keep both arguments, and pass the caller's return address as the third.
        "2: stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "mov x2, x30",
        "bl {hooked}",
        "mov x9, x0",
        "mov x10, x1",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbz x10, 3f",
        "mov x0, x9",
        "ret",
        "3: adrp x16, {next}",
        "ldr x16, [x16, #:lo12:{next}]",
        "cbz x16, 4f",
        "br x16",
        "4: stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "bl {find}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        hooked = sym hooked,
        next = sym DLSYM,
        find = sym find_dlsym,
    )
}

/// # Safety
/// As for libc's function.
#[cfg(target_arch = "aarch64")]
#[cfg_attr(panic = "abort", unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlvsym(
    _handle: *mut c_void,
    _name: *const c_char,
    _version: *const c_char,
) -> *mut c_void {
    naked_asm!(
        "hint #34",
        "cbz x1, 3f",
        "ldrb w9, [x1]",
        "cmp w9, #99",
        "b.ne 1f",
        "ldrb w9, [x1, #1]",
        "cmp w9, #117",
        "b.eq 2f",
        "b 3f",
        "1: cmp w9, #110",
        "b.eq 6f",
        "cmp w9, #78",
        "b.ne 5f",
        "6: ldrb w9, [x1, #1]",
        "cmp w9, #118",
        "b.eq 2f",
        "b 3f",
        "5: cmp w9, #100",
        "b.ne 3f",
        "ldrb w9, [x1, #1]",
        "cmp w9, #108",
        "b.ne 3f",
        "2: stp x29, x30, [sp, #-48]!",
        "stp x0, x1, [sp, #16]",
        "str x2, [sp, #32]",
        "mov x3, x30",
        "bl {hooked}",
        "mov x9, x0",
        "mov x10, x1",
        "ldr x2, [sp, #32]",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #48",
        "cbz x10, 3f",
        "mov x0, x9",
        "ret",
        "3: adrp x16, {next}",
        "ldr x16, [x16, #:lo12:{next}]",
        "cbz x16, 4f",
        "br x16",
        "4: stp x29, x30, [sp, #-48]!",
        "stp x0, x1, [sp, #16]",
        "str x2, [sp, #32]",
        "bl {find}",
        "mov x16, x0",
        "ldr x2, [sp, #32]",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #48",
        "br x16",
        hooked = sym hooked_version,
        next = sym DLVSYM,
        find = sym find_dlvsym,
    )
}

/// The result, in two registers. The code above tests the second.
#[repr(C)]
struct LookupResult {
    address: usize,
    /// 0 if libc must answer with the caller's frame.
    is_final: usize,
}

const LIBC: LookupResult = LookupResult { address: 0, is_final: 0 };

impl LookupResult {
    fn hook(at: symbol_table::Index) -> Self {
        symbol_table::hook(at).map_or(LIBC, |address| Self { address, is_final: 1 })
    }
}

/// The result of [`dlsym`] for a name with a hooked prefix.
#[cold]
unsafe extern "C" fn hooked(handle: usize, name: *const c_char, caller: usize) -> LookupResult {
    let ask = || {
        // SAFETY: the next function has libc's signature; handle and name are the caller's.
        unsafe {
            core::mem::transmute::<usize, Dlsym>(next(&DLSYM, b"dlsym"))(handle as *mut c_void, name) as usize
        }
    };
    // SAFETY: the program's own name, which ends with zero.
    match unsafe { symbol_table::export(name.cast()) } {
        Some(at) => answer(at, handle, name, caller, ask),
        None => replace_own_lookup(handle, name, ask),
    }
}

/// Like [`hooked`], with a version.
#[cold]
unsafe extern "C" fn hooked_version(
    handle: usize,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> LookupResult {
    let ask = || ask_version(handle, name, version);
    // SAFETY: the program's own name, which ends with zero.
    match unsafe { symbol_table::export(name.cast()) } {
        Some(at) => answer(at, handle, name, caller, ask),
        None => replace_own_lookup(handle, name, ask),
    }
}

fn ask_version(handle: usize, name: *const c_char, version: *const c_char) -> usize {
    // SAFETY: the next function has libc's signature; all arguments are the caller's.
    let real = unsafe { core::mem::transmute::<usize, Dlvsym>(next(&DLVSYM, b"dlvsym")) };
    // SAFETY: the same.
    unsafe { real(handle as *mut c_void, name, version) as usize }
}

fn answer(
    at: symbol_table::Index,
    handle: usize,
    name: *const c_char,
    caller: usize,
    ask: impl FnOnce() -> usize,
) -> LookupResult {
    match handle {
        // libc would find our export, while a program without this library finds nothing and
        // continues without a GPU. Asking for a version that does not exist makes the loader write
        // its usual error message.
        RTLD_DEFAULT | RTLD_NEXT if is_only_definition(at) => {
            LookupResult { address: ask_version(RTLD_DEFAULT, name, NO_VERSION.as_ptr()), is_final: 1 }
        }
        // In the global scope, our export precedes any library that a program needs or opens.
        RTLD_DEFAULT => LIBC,
        RTLD_NEXT if next_is_hooked(at, caller) => LookupResult::hook(at),
        RTLD_NEXT => LIBC,
        // With a handle, libc's result does not depend on the caller.
        _ => match ask() {
            0 => LIBC,
            address if real_symbols::library(at).owns(at, address) => LookupResult::hook(at),
            address => LookupResult { address, is_final: 1 },
        },
    }
}

/// Replaces libc's own `dlsym` and `dlvsym`, looked up by a handle on libc. Only if libc directly
/// follows this library: another interposer may look up its own next function this way, which must
/// not lead back to it.
fn replace_own_lookup(handle: usize, name: *const c_char, ask: impl FnOnce() -> usize) -> LookupResult {
    // SAFETY: the program's own name, which ends with zero.
    let is = |known: &[u8]| unsafe { elf::same(name.cast(), known) };
    let (own, behind) = match () {
        _ if matches!(handle, RTLD_DEFAULT | RTLD_NEXT) => return LIBC,
        _ if is(b"dlsym") => (dlsym as *const () as usize, next(&DLSYM, b"dlsym")),
        _ if is(b"dlvsym") => (dlvsym as *const () as usize, next(&DLVSYM, b"dlvsym")),
        _ => return LIBC,
    };
    let object = |address| elf::object_at(address).map(|object| object.base());
    match ask() {
        0 => LIBC,
        // libc's versions of a function may have different addresses.
        address if object(address) == object(behind) => LookupResult { address: own, is_final: 1 },
        address => LookupResult { address, is_final: 1 },
    }
}

/// Returns true if no other object in the program's namespace has a function of that name.
#[cold]
fn is_only_definition(at: symbol_table::Index) -> bool {
    let mut alone = true;
    elf::each_object(&mut |object, _| {
        alone = object.base() == elf::own_base() || object.function(symbol_table::name(at)).is_none();
        !alone
    });
    alone
}

/// Returns true if the next definition after the caller is NVIDIA's function, or our export before
/// it. libc would search the caller's own scope; the loader's list has the same order. If a library
/// was loaded before the caller for another object, NVIDIA's function is used: no other library
/// defines such names.
#[cold]
fn next_is_hooked(at: symbol_table::Index, caller: usize) -> bool {
    let library = real_symbols::library(at);
    let name = symbol_table::name(at);
    let mut behind = false;
    let mut foreign = false;
    let mut ours = false;
    elf::each_object(&mut |object, holds| {
        if behind {
            let own = object.base() == elf::own_base();
            if let Some(address) = object.function(name) {
                ours = own || library.owns(at, address);
                foreign = !ours;
            }
        }
        behind |= holds(caller);
        ours || foreign
    });
    ours || (!foreign && library.is_loaded())
}

extern "C" fn find_dlsym() -> usize {
    next(&DLSYM, b"dlsym")
}

extern "C" fn find_dlvsym() -> usize {
    next(&DLVSYM, b"dlvsym")
}

/// The first function of that name after this library; before glibc 2.34 that is libdl's.
#[cold]
fn next(known: &AtomicUsize, name: &[u8]) -> usize {
    let mut found = known.load(Ordering::Relaxed);
    if found != 0 {
        return found;
    }
    let mut behind = false;
    elf::each_object(&mut |object, _| {
        if behind {
            found = object.function(name).unwrap_or(0);
        }
        behind |= object.base() == elf::own_base();
        found != 0
    });
    if found == 0 {
        found = none as *const () as usize;
    }
    known.store(found, Ordering::Relaxed);
    found
}

/// A version that no function has.
const NO_VERSION: &core::ffi::CStr = c"DIVVY_0";

/// Used if libc has no such function.
#[unsafe(naked)]
extern "C" fn none() -> usize {
    constant_body!(0)
}
