//! What C programs pass: places for answers, strings, structures.

use std::ffi::{CStr, c_char};

use crate::code::Code;
use crate::frame::Outcome;

/// A place for an answer; NULL is refused when it is used.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Refuses NULL before anything is done.
    pub(crate) fn check(self) -> Outcome {
        if self.0.is_null() { Err(Code::InvalidValue) } else { Ok(()) }
    }

    pub(crate) fn set(self, value: T) -> Outcome {
        self.check()?;
        // SAFETY: not NULL, and the header says that it points at a `T`.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Sets it where the caller gave a place.
    pub(crate) fn offer(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: as above.
            unsafe { self.0.write(value) };
        }
    }

    /// Writes a sequence to an array of that length.
    pub(crate) fn fill(self, length: usize, values: impl IntoIterator<Item = T>) -> Outcome {
        self.check()?;
        for (at, value) in values.into_iter().take(length).enumerate() {
            // SAFETY: the caller's array has `length` elements, and `at` is below it.
            unsafe { self.0.add(at).write(value) };
        }
        Ok(())
    }

    /// What the caller put there.
    pub(crate) fn get(self) -> Outcome<T> {
        self.check()?;
        // SAFETY: not NULL, and the header says that it points at a `T`.
        Ok(unsafe { self.0.read() })
    }

    pub(crate) const fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// So many elements on.
    pub(crate) fn skip(self, count: usize) -> Outcome<Self> {
        self.check()?;
        Ok(Self(self.0.wrapping_add(count)))
    }

    pub(crate) const fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// A structure or an array to read; NULL is refused when it is read.
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

    /// An element of an array that is long enough.
    pub(crate) fn at(self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Code::InvalidValue);
        }
        // SAFETY: not NULL, and the header says that it points at so many.
        Ok(unsafe { self.0.add(index).read() })
    }

    pub(crate) const fn is_null(self) -> bool {
        self.0.is_null()
    }
}

impl In<u8> {
    /// The bytes up to a NUL; NULL is refused.
    pub(crate) fn c_bytes<'t>(self) -> Outcome<&'t [u8]> {
        if self.0.is_null() {
            return Err(Code::InvalidValue);
        }
        // SAFETY: not NULL, and the caller says that it is text, which ends in NUL, and that lives during the call.
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

/// Writes a string into a buffer of that length, cut if need be.
pub(crate) fn write_text(buffer: Out<u8>, length: i32, text: &str) -> Outcome {
    let length = usize::try_from(length).ok().filter(|length| *length > 0).ok_or(Code::InvalidValue)?;
    let kept = text.len().min(length - 1);
    buffer.fill(length, text.bytes().take(kept).chain([0]))
}
