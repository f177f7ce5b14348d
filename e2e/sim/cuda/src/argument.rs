//! Arguments of C programs: output pointers, strings and structures.

use std::ffi::{CStr, c_char};

use crate::code::{Code, Outcome};

/// An output pointer. NULL is refused when it is used.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Refuses NULL before the call has any effect.
    pub(crate) fn check(self) -> Outcome {
        if self.0.is_null() { Err(Code::InvalidValue) } else { Ok(()) }
    }

    pub(crate) fn set(self, value: T) -> Outcome {
        self.check()?;
        // SAFETY: not NULL, and the header says that it points at a `T`.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Sets the value unless the pointer is NULL.
    pub(crate) fn offer(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: as above.
            unsafe { self.0.write(value) };
        }
    }

    /// Writes a sequence to an array of `length` elements.
    pub(crate) fn fill(self, length: usize, values: impl IntoIterator<Item = T>) -> Outcome {
        self.check()?;
        for (at, value) in values.into_iter().take(length).enumerate() {
            // SAFETY: the caller's array has `length` elements, and `at` is below it.
            unsafe { self.0.add(at).write(value) };
        }
        Ok(())
    }

    /// The value that the caller put there.
    pub(crate) fn get(self) -> Outcome<T> {
        self.check()?;
        // SAFETY: not NULL, and the header says that it points at a `T`.
        Ok(unsafe { self.0.read() })
    }

    pub(crate) const fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The pointer `count` elements further.
    pub(crate) fn skip(self, count: usize) -> Outcome<Self> {
        self.check()?;
        Ok(Self(self.0.wrapping_add(count)))
    }

    pub(crate) const fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// A structure or an array to read. NULL is refused when it is read.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct In<T>(*const T);

impl<T> In<T> {
    pub(crate) const NULL: Self = Self(std::ptr::null());
}

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> Outcome<T> {
        self.at(0)
    }

    /// An element of an array; the caller guarantees its length.
    pub(crate) fn at(self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Code::InvalidValue);
        }
        // SAFETY: not NULL, and the header says that it points at enough elements.
        Ok(unsafe { self.0.add(index).read() })
    }

    pub(crate) const fn is_null(self) -> bool {
        self.0.is_null()
    }
}

impl In<u8> {
    /// The bytes up to NUL. A NULL pointer is refused.
    pub(crate) fn c_bytes<'t>(self) -> Outcome<&'t [u8]> {
        if self.0.is_null() {
            return Err(Code::InvalidValue);
        }
        // SAFETY: not NULL, and the caller's text ends in NUL and lives during the call.
        Ok(unsafe { CStr::from_ptr(self.0.cast()) }.to_bytes())
    }
}

/// A string.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get<'t>(self) -> Outcome<&'t str> {
        if self.0.is_null() {
            return Err(Code::InvalidValue);
        }
        // SAFETY: not NULL, and the caller's string ends in NUL and lives during the call.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| Code::InvalidValue)
    }
}

/// Writes a string into a buffer of `length` bytes, truncated if necessary.
pub(crate) fn write_text(buffer: Out<u8>, length: i32, text: &str) -> Outcome {
    let length = usize::try_from(length).ok().filter(|length| *length > 0).ok_or(Code::InvalidValue)?;
    let kept = text.len().min(length - 1);
    buffer.fill(length, text.bytes().take(kept).chain([0]))
}

/// Reads a list that the caller passed.
pub(crate) fn read_all<T: Copy>(list: In<T>, count: usize) -> Outcome<Vec<T>> {
    (0..count).map(|at| list.at(at)).collect()
}

/// An address of code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pointer(pub(crate) *const ());

// SAFETY: code may be called from any thread.
unsafe impl Send for Pointer {}
// SAFETY: the same.
unsafe impl Sync for Pointer {}

/// A NUL-terminated string constant as a C string.
pub(crate) const fn c_text(text: &'static str) -> *const c_char {
    text.as_ptr().cast()
}
