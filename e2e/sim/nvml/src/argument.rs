//! Arguments as they come over the C boundary.
//!
//! Every type here is `repr(transparent)` over what the C header declares, so an entry point names them in its
//! signature and nothing below it sees a raw pointer. [`Argument::missing`] is asked of every argument before the body
//! of a call runs: a NULL where the call needs a pointer is INVALID_ARGUMENT, whatever else would have been wrong.
//! Past that check a pointer is good for what C's rules let the caller promise: reads and writes of its type.

use std::ffi::{CStr, c_char};

use divvy_sim::code::Code;
use divvy_sim::state::State;

use crate::abi::{Placement, Plain, Versioned};

/// What a call gives: its outputs are written through its arguments.
pub(crate) type Outcome<T = ()> = Result<T, Code>;

/// What every argument of an entry point can say of itself before the call runs.
pub(crate) trait Argument {
    /// A NULL where the call needs something.
    fn missing(&self) -> bool {
        false
    }

    /// The slot of the GPU that the argument names, for the trace and for faults by GPU.
    fn gpu(&self) -> Option<usize> {
        None
    }

    /// What the trace shows of it.
    fn words(&self, _words: &mut Words) {}

    /// What is wrong with the thing that it names, whatever is asked of it.
    fn check(&self, _state: &State) -> Outcome {
        Ok(())
    }
}

/// The numbers among the arguments of a call, for the trace.
#[derive(Default)]
pub(crate) struct Words {
    words: [u64; 6],
    used: usize,
}

impl Words {
    pub(crate) fn push(&mut self, word: u64) {
        if let Some(place) = self.words.get_mut(self.used) {
            *place = word;
            self.used += 1;
        }
    }

    pub(crate) fn as_slice(&self) -> &[u64] {
        self.words.get(..self.used).unwrap_or_default()
    }
}

macro_rules! numbers {
    ($($kind:ty)*) => {$(
        impl Argument for $kind {
            fn words(&self, words: &mut Words) {
                words.push(*self as u64);
            }
        }
    )*};
}

numbers! { i32 u32 u64 }

/// A place for one value.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Argument for Out<T> {
    fn missing(&self) -> bool {
        self.0.is_null()
    }
}

impl<T> Out<T> {
    pub(crate) fn set(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not NULL, so the caller's promise of C holds: room for one T. No alignment is assumed.
            unsafe { self.0.write_unaligned(value) };
        }
    }
}

impl<T: Plain> Out<T> {
    /// What the caller left there.
    pub(crate) fn get(&self) -> T {
        if self.0.is_null() {
            return T::zeroed();
        }
        // SAFETY: not NULL, so one T lies there by the caller's promise, and any bytes are a T.
        unsafe { self.0.read_unaligned() }
    }
}

impl<T> Out<T> {
    /// The array that follows the structure, in a C structure with a long tail.
    pub(crate) fn behind<U>(&self) -> Array<U> {
        Array(self.0.wrapping_add(1).cast())
    }
}

impl<T: Versioned> Out<T> {
    /// The version word, at the start of every version of the structure.
    pub(crate) fn version(&self) -> u32 {
        if self.0.is_null() {
            return 0;
        }
        // SAFETY: not NULL; the word is the first field of each version (`Versioned`), however short the structure.
        unsafe { self.0.cast::<u32>().read_unaligned() }
    }

    pub(crate) fn expect_version(&self) -> Outcome {
        if self.version() == T::VERSION { Ok(()) } else { Err(Code::ArgumentVersionMismatch) }
    }

    /// The same place seen as another version of the structure; whoever asks has read the version word.
    pub(crate) fn as_version<U: Versioned>(&self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// A structure that the caller gives.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl Argument for In<Placement> {
    fn missing(&self) -> bool {
        self.0.is_null()
    }

    fn words(&self, words: &mut Words) {
        let Placement { start, size } = self.get();
        words.push(start.into());
        words.push(size.into());
    }
}

impl<T: Plain> In<T> {
    pub(crate) fn get(&self) -> T {
        Out(self.0.cast_mut()).get()
    }
}

/// A place that may be NULL, in a call that leaves it alone.
#[repr(transparent)]
pub(crate) struct MaybeOut<T>(*mut T);

impl<T> Argument for MaybeOut<T> {}

/// An array whose length another argument says; NULL asks for the length alone.
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

    /// Writes all items; the caller of the C function promised room for them by its count.
    pub(crate) fn fill(&self, items: impl IntoIterator<Item = T>) {
        for (at, item) in items.into_iter().enumerate() {
            // SAFETY: callers check NULL and the count given beside the array first (`Counted`, `fixed`).
            unsafe { self.0.add(at).write_unaligned(item) };
        }
    }
}

impl<T: Plain> Array<T> {
    pub(crate) fn at(&self, index: usize) -> Out<T> {
        // SAFETY: callers stay below the count given beside the array.
        Out(unsafe { self.0.add(index) })
    }
}

/// A count beside an array: room on the way in, number of items on the way out.
#[repr(transparent)]
pub(crate) struct Count(*mut u32);

impl Argument for Count {
    fn missing(&self) -> bool {
        self.0.is_null()
    }
}

impl Count {
    pub(crate) fn room(&self) -> usize {
        // SAFETY: `missing` was asked, so not NULL: one word lies there by the caller's promise.
        if self.0.is_null() { 0 } else { unsafe { self.0.read_unaligned() as usize } }
    }

    pub(crate) fn set(&self, items: usize) {
        Out(self.0).set(items as u32);
    }

    /// The protocol of process lists, sessions and retired pages: too little room is INSUFFICIENT_SIZE with the
    /// number that is needed, and so is a NULL array unless there is nothing to list.
    pub(crate) fn list<T>(&self, array: &Array<T>, items: Vec<T>) -> Outcome {
        let room = self.room();
        self.set(items.len());
        if items.len() > room || (array.is_null() && !items.is_empty()) {
            return Err(Code::InsufficientSize);
        }
        array.fill(items);
        Ok(())
    }

    /// The protocol of topology: room for nothing asks for the number alone; otherwise as many as there is room for.
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

    /// The protocol of placements and nearest GPUs: a NULL array asks for the number alone and succeeds.
    pub(crate) fn list_or_count<T>(&self, array: &Array<T>, items: Vec<T>) -> Outcome {
        if array.is_null() {
            self.set(items.len());
            return Ok(());
        }
        self.list(array, items)
    }
}

/// A place for a text; the length of the buffer is the argument after it.
#[repr(transparent)]
pub(crate) struct TextOut(*mut c_char);

impl Argument for TextOut {
    fn missing(&self) -> bool {
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

/// A text the caller gives.
#[repr(transparent)]
pub(crate) struct TextIn(*const c_char);

impl From<*const c_char> for TextIn {
    fn from(pointer: *const c_char) -> Self {
        Self(pointer)
    }
}

impl Argument for TextIn {
    fn missing(&self) -> bool {
        self.0.is_null()
    }
}

impl TextIn {
    pub(crate) fn text(&self) -> Outcome<&str> {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        // SAFETY: not NULL, so a string that ends in NUL by the caller's promise; it outlives the call.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| Code::NotFound)
    }
}

/// A text in a fixed array of a structure, cut to fit.
pub(crate) fn fixed<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, from) in array.iter_mut().zip(text.bytes().take(N.saturating_sub(1))) {
        *to = from as c_char;
    }
    array
}

/// Arguments of stubs: what they mean is never read, only whether they are there.
pub(crate) type PointerArgument = Out<u8>;
pub(crate) type WordArgument = u32;
pub(crate) type LongArgument = u64;
pub(crate) type DeviceArgument = crate::handle::Device;
