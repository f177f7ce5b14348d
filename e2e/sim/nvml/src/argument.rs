//! Arguments at the C boundary.
//!
//! Every type is `repr(transparent)` over the type in the C header, so entry points use them in
//! their signatures and no other code sees a raw pointer. Before the body of a call runs, each
//! argument is checked with [`Argument::is_missing`]; a required pointer that is NULL is
//! INVALID_ARGUMENT. All other pointers are valid for reads and writes of their type, as C requires
//! from the caller.

use std::ffi::{CStr, c_char};

use divvy_sim::code::Code;
use divvy_sim::state::State;

use crate::abi::{Placement, Plain, Versioned};

/// Result of a call. Outputs are written through its arguments.
pub(crate) type Outcome<T = ()> = Result<T, Code>;

/// Checks and trace values of an argument, used before the call runs.
pub(crate) trait Argument {
    /// Whether a required argument is NULL.
    fn is_missing(&self) -> bool {
        false
    }

    /// The slot of the GPU that the argument names, for the trace and for rules that name a GPU.
    fn gpu(&self) -> Option<usize> {
        None
    }

    /// Adds the values that the trace shows.
    fn trace_args(&self, _args: &mut TraceArgs) {}

    /// Whether the object that it names can be used at all.
    fn check(&self, _state: &State) -> Outcome {
        Ok(())
    }
}

/// The numbers in a call's arguments that the trace shows.
#[derive(Default)]
pub(crate) struct TraceArgs {
    values: [u64; 6],
    used: usize,
}

impl TraceArgs {
    pub(crate) fn push(&mut self, word: u64) {
        if let Some(place) = self.values.get_mut(self.used) {
            *place = word;
            self.used += 1;
        }
    }

    pub(crate) fn as_slice(&self) -> &[u64] {
        self.values.get(..self.used).unwrap_or_default()
    }
}

macro_rules! numbers {
    ($($kind:ty)*) => {$(
        impl Argument for $kind {
            fn trace_args(&self, args: &mut TraceArgs) {
                args.push(*self as u64);
            }
        }
    )*};
}

numbers! { i32 u32 u64 }

/// Pointer to one output value.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Argument for Out<T> {
    fn is_missing(&self) -> bool {
        self.0.is_null()
    }
}

impl<T> Out<T> {
    pub(crate) fn set(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not NULL, so the caller has provided room for one T. No alignment is assumed.
            unsafe { self.0.write_unaligned(value) };
        }
    }
}

impl<T: Plain> Out<T> {
    /// The value that the caller has stored there.
    pub(crate) fn get(&self) -> T {
        if self.0.is_null() {
            return T::zeroed();
        }
        // SAFETY: not NULL, so the caller has stored one T there, and any bytes are valid.
        unsafe { self.0.read_unaligned() }
    }
}

impl<T> Out<T> {
    /// The array that follows a structure of variable length.
    pub(crate) fn array_after<U>(&self) -> Array<U> {
        Array(self.0.wrapping_add(1).cast())
    }
}

impl<T: Versioned> Out<T> {
    /// The version word, which starts every version of the structure.
    pub(crate) fn version(&self) -> u32 {
        if self.0.is_null() {
            return 0;
        }
        // SAFETY: not NULL. The word is the first field of every version (`Versioned`), however
        // short.
        unsafe { self.0.cast::<u32>().read_unaligned() }
    }

    pub(crate) fn expect_version(&self) -> Outcome {
        if self.version() == T::VERSION { Ok(()) } else { Err(Code::ArgumentVersionMismatch) }
    }

    /// The same pointer for another version of the structure. The caller has read the version word.
    pub(crate) fn as_version<U: Versioned>(&self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// Pointer to an input structure.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl Argument for In<Placement> {
    fn is_missing(&self) -> bool {
        self.0.is_null()
    }

    fn trace_args(&self, args: &mut TraceArgs) {
        let Placement { start, size } = self.get();
        args.push(start.into());
        args.push(size.into());
    }
}

impl<T: Plain> In<T> {
    pub(crate) fn get(&self) -> T {
        Out(self.0.cast_mut()).get()
    }
}

/// Pointer that may be NULL, for an output that the call does not write.
#[repr(transparent)]
pub(crate) struct MaybeOut<T>(*mut T);

impl<T> Argument for MaybeOut<T> {}

/// Pointer to an array whose length is another argument. NULL requests only the length.
#[repr(transparent)]
pub(crate) struct Array<T>(*mut T);

impl<T> Argument for Array<T> {}

impl<T> From<*mut T> for Array<T> {
    fn from(pointer: *mut T) -> Self {
        Self(pointer)
    }
}

impl<T> Array<T> {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Writes all items. The count argument must be large enough.
    pub(crate) fn fill(&self, items: impl IntoIterator<Item = T>) {
        for (at, item) in items.into_iter().enumerate() {
            // SAFETY: callers first check for NULL and the count (`Counted`, `fixed`).
            unsafe { self.0.add(at).write_unaligned(item) };
        }
    }
}

impl<T: Plain> Array<T> {
    pub(crate) fn at(&self, index: usize) -> Out<T> {
        // SAFETY: callers stay below the count given with the array.
        Out(unsafe { self.0.add(index) })
    }
}

/// Count of an array: its capacity on input, the number of items on output.
#[repr(transparent)]
pub(crate) struct Count(*mut u32);

impl Argument for Count {
    fn is_missing(&self) -> bool {
        self.0.is_null()
    }
}

impl Count {
    pub(crate) fn room(&self) -> usize {
        // SAFETY: not NULL, so the caller has stored one word there.
        if self.0.is_null() { 0 } else { unsafe { self.0.read_unaligned() as usize } }
    }

    pub(crate) fn set(&self, items: usize) {
        Out(self.0).set(items as u32);
    }

    /// Lists items as for process lists, sessions and retired pages. If the capacity is too small
    /// or the array NULL, returns INSUFFICIENT_SIZE and the required number, unless there are no
    /// items.
    pub(crate) fn list<T>(&self, array: &Array<T>, items: Vec<T>) -> Outcome {
        let room = self.room();
        self.set(items.len());
        if items.len() > room || (array.is_null() && !items.is_empty()) {
            return Err(Code::InsufficientSize);
        }
        array.fill(items);
        Ok(())
    }

    /// Lists items as for topology: capacity 0 requests only the number; otherwise lists as many as
    /// fit.
    pub(crate) fn list_when_asked<T>(&self, array: &Array<T>, items: Vec<T>) -> Outcome {
        let room = self.room();
        if room == 0 {
            self.set(items.len());
            return Ok(());
        }
        if array.is_null() {
            return Err(Code::InvalidArgument);
        }
        self.set(items.len().min(room));
        array.fill(items.into_iter().take(room));
        Ok(())
    }

    /// Lists items as for placements and nearest GPUs: a NULL array requests only the number and
    /// succeeds.
    pub(crate) fn list_or_count<T>(&self, array: &Array<T>, items: Vec<T>) -> Outcome {
        if array.is_null() {
            self.set(items.len());
            return Ok(());
        }
        self.list(array, items)
    }
}

/// Pointer to a text buffer. Its length is the next argument.
#[repr(transparent)]
pub(crate) struct TextOut(*mut c_char);

impl Argument for TextOut {
    fn is_missing(&self) -> bool {
        self.0.is_null()
    }
}

impl TextOut {
    pub(crate) fn set(&self, text: &str, length: u32) -> Outcome {
        if text.len() >= length as usize {
            return Err(Code::InsufficientSize);
        }
        Array(self.0).fill(text.bytes().map(|byte| byte as c_char).chain([0]));
        Ok(())
    }
}

/// Pointer to an input text.
#[repr(transparent)]
pub(crate) struct TextIn(*const c_char);

impl From<*const c_char> for TextIn {
    fn from(pointer: *const c_char) -> Self {
        Self(pointer)
    }
}

impl Argument for TextIn {
    fn is_missing(&self) -> bool {
        self.0.is_null()
    }
}

impl TextIn {
    pub(crate) fn text(&self) -> Outcome<&str> {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        // SAFETY: not NULL, so the caller has provided a string that ends in NUL and outlives the
        // call.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| Code::NotFound)
    }
}

/// A text for an array of fixed length, truncated to fit.
pub(crate) fn fixed<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, from) in array.iter_mut().zip(text.bytes().take(N.saturating_sub(1))) {
        *to = from as c_char;
    }
    array
}

/// Arguments of stubs. Stubs only check whether pointers are NULL.
pub(crate) type PointerArgument = Out<u8>;
pub(crate) type WordArgument = u32;
pub(crate) type LongArgument = u64;
pub(crate) type DeviceArgument = crate::handle::Device;
