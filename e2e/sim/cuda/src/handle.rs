//! Objects behind handles: modules, streams, events, graphs, pools, arrays.
//!
//! A handle is the object's address, as with the real driver. Objects are never freed, so that a
//! stale handle, or one of another kind, is refused.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::code::{Code, Outcome};

/// A kind of object with handles.
pub(crate) trait Object: Sized + Sync + 'static {
    /// The first word of living objects, different for each kind.
    const MAGIC: u64;
}

/// An object in memory.
#[repr(C)]
struct Place<T> {
    magic: AtomicU64,
    object: T,
}

/// A handle that a program passes or receives.
#[repr(transparent)]
pub(crate) struct Handle<T>(*const Place<T>);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

// SAFETY: only an address; the object is `Sync`.
unsafe impl<T: Sync> Send for Handle<T> {}
// SAFETY: the same.
unsafe impl<T: Sync> Sync for Handle<T> {}

impl<T> Handle<T> {
    pub(crate) const NULL: Self = Self(std::ptr::null());

    pub(crate) const fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The handle as a number, for handles with special values.
    pub(crate) fn number(self) -> usize {
        self.0 as usize
    }
}

impl<T: Object> Handle<T> {
    pub(crate) fn new(object: T) -> Self {
        Self(Box::leak(Box::new(Place { magic: AtomicU64::new(T::MAGIC), object })))
    }

    fn place(self) -> Outcome<&'static Place<T>> {
        if self.0.is_null() || !self.0.is_aligned() {
            return Err(Code::InvalidHandle);
        }
        // SAFETY: the caller passes a handle from this library, and objects are never freed.
        Ok(unsafe { &*self.0 })
    }

    /// The object, if it lives.
    #[inline]
    pub(crate) fn get(self) -> Outcome<&'static T> {
        let place = self.place()?;
        if place.magic.load(Ordering::Relaxed) == T::MAGIC {
            Ok(&place.object)
        } else {
            Err(Code::InvalidHandle)
        }
    }

    /// Marks the object as dead. Only the first caller gets it, to clean up.
    pub(crate) fn end(self) -> Outcome<&'static T> {
        let place = self.place()?;
        let ended = place.magic.compare_exchange(T::MAGIC, 0, Ordering::AcqRel, Ordering::Relaxed);
        if ended.is_ok() { Ok(&place.object) } else { Err(Code::InvalidHandle) }
    }
}
