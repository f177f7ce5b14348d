//! A library for `LD_PRELOAD` that kills its process at the N-th writing file-system call, to test crashes.
//!
//! `DIVVY_CRASH_CONTROL` names a control file. While it exists, writing calls below the directories
//! in `DIVVY_CRASH_UNDER` (separated by `:`) are counted. The content `7 before` kills the process
//! at the 7th call before its effect, `7 after` kills it after the effect. A new content restarts
//! the count. Raw system calls (rustix's default backend) are not intercepted; the driver writes
//! through std, and so through these symbols.
#![allow(unsafe_code)] // Replaces symbols of the C library; each block has a SAFETY comment.

mod control;

use control::around;
use libc::{c_char, c_int, c_uint, c_void, mode_t, off_t, size_t, ssize_t};
use std::ffi::CStr;
use std::path::PathBuf;

/// The next definition of a symbol: the C library's own.
macro_rules! next {
    ($name:literal, $type:ty) => {{
        // SAFETY: dlsym with RTLD_NEXT reads a constant name; the C library
        // defines the symbol with exactly this signature.
        unsafe {
            let symbol = libc::dlsym(libc::RTLD_NEXT, concat!($name, "\0").as_ptr().cast::<c_char>());
            if symbol.is_null() {
                libc::abort();
            }
            std::mem::transmute::<*mut c_void, $type>(symbol)
        }
    }};
}

/// A path argument as an absolute path.
fn path(text: *const c_char) -> Option<PathBuf> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller of the intercepted function passes a C string.
    let bytes = unsafe { CStr::from_ptr(text) }.to_str().ok()?;
    let path = PathBuf::from(bytes);
    if path.is_absolute() { Some(path) } else { std::env::current_dir().ok().map(|dir| dir.join(path)) }
}

/// The path of an open descriptor.
fn path_of(fd: c_int) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()
}

/// A path argument of an `*at` call.
fn path_at(dir: c_int, text: *const c_char) -> Option<PathBuf> {
    if text.is_null() {
        return None;
    }
    // SAFETY: as in `path`.
    let path = PathBuf::from(unsafe { CStr::from_ptr(text) }.to_str().ok()?);
    match (path.is_absolute(), dir) {
        (true, _) => Some(path),
        (false, libc::AT_FDCWD) => std::env::current_dir().ok().map(|here| here.join(path)),
        (false, dir) => path_of(dir).map(|base| base.join(path)),
    }
}

fn creates(flags: c_int) -> bool {
    flags & (libc::O_CREAT | libc::O_TRUNC) != 0
}

/// Defines replacements whose arguments are passed on unchanged.
macro_rules! replace {
    ($(
        $(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) -> $ret:ty, $symbol:literal, on $path:expr;
    )*) => {$(
        $(#[$doc])*
        /// # Safety
        /// The contract of the C function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $ret {
            let real = next!($symbol, unsafe extern "C" fn($($type),*) -> $ret);
            // SAFETY: the caller's own arguments, passed on unchanged.
            around(|| $path, || unsafe { real($($arg),*) })
        }
    )*};
}

replace! {
    write(fd: c_int, data: *const c_void, len: size_t) -> ssize_t, "write", on path_of(fd);
    pwrite64(fd: c_int, data: *const c_void, len: size_t, at: off_t) -> ssize_t, "pwrite64", on path_of(fd);
    ftruncate64(fd: c_int, len: off_t) -> c_int, "ftruncate64", on path_of(fd);
    fchmod(fd: c_int, mode: mode_t) -> c_int, "fchmod", on path_of(fd);
    chmod(name: *const c_char, mode: mode_t) -> c_int, "chmod", on path(name);
    mkdir(name: *const c_char, mode: mode_t) -> c_int, "mkdir", on path(name);
    rmdir(name: *const c_char) -> c_int, "rmdir", on path(name);
    unlink(name: *const c_char) -> c_int, "unlink", on path(name);
    unlinkat(dir: c_int, name: *const c_char, flags: c_int) -> c_int, "unlinkat", on path_at(dir, name);
    rename(from: *const c_char, to: *const c_char) -> c_int, "rename", on path(to);
    renameat(a: c_int, from: *const c_char, b: c_int, to: *const c_char) -> c_int,
        "renameat", on path_at(b, to);
    renameat2(a: c_int, from: *const c_char, b: c_int, to: *const c_char, flags: c_uint) -> c_int,
        "renameat2", on path_at(b, to);
    link(from: *const c_char, to: *const c_char) -> c_int, "link", on path(to);
    linkat(a: c_int, from: *const c_char, b: c_int, to: *const c_char, flags: c_int) -> c_int,
        "linkat", on path_at(b, to);
    symlink(target: *const c_char, name: *const c_char) -> c_int, "symlink", on path(name);
    copy_file_range(
        from: c_int, at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: c_uint
    ) -> ssize_t, "copy_file_range", on path_of(to);
}

// `open` is variadic in C. On x86_64 and aarch64 the third argument is passed as in a fixed
// signature. Passing on an argument that the caller did not give is harmless, because the C library
// reads it only with O_CREAT.

/// # Safety
/// The contract of `open`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open(name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let real = next!("open", unsafe extern "C" fn(*const c_char, c_int, mode_t) -> c_int);
    // SAFETY: the caller's own arguments.
    around(|| creates(flags).then(|| path(name)).flatten(), || unsafe { real(name, flags, mode) })
}

/// # Safety
/// The contract of `open64`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let real = next!("open64", unsafe extern "C" fn(*const c_char, c_int, mode_t) -> c_int);
    // SAFETY: the caller's own arguments.
    around(|| creates(flags).then(|| path(name)).flatten(), || unsafe { real(name, flags, mode) })
}

/// # Safety
/// The contract of `openat64`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat64(dir: c_int, name: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let real = next!("openat64", unsafe extern "C" fn(c_int, *const c_char, c_int, mode_t) -> c_int);
    // SAFETY: the caller's own arguments.
    around(
        || creates(flags).then(|| path_at(dir, name)).flatten(),
        || unsafe { real(dir, name, flags, mode) },
    )
}
