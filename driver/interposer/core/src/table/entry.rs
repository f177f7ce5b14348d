//! What the table holds: two words, the key (an address or a handle) and a packed value, so that a hundred thousand
//! of them still lie in a core's own cache or beside it.

use super::Then;

/// What a key is; the same number may be a key in several classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Class {
    /// A device pointer. Extra: the number of its context.
    Pointer = 1,
    /// A `CUarray`. Extra: the number of its context.
    Array = 2,
    /// A `CUmipmappedArray`. Extra: the number of its context.
    Mipmap = 3,
    /// A `CUcontext`.
    Context = 4,
    /// A `CUmodule` or `CUlibrary`. Extra: the number of its context.
    Module = 5,
    /// A `CUmemoryPool`.
    Pool = 6,
    /// The graph memory of a device, by its index.
    Graph = 7,
    /// A handle of `cuMemCreate`. Bytes: the number of its object. Extra: references the program holds.
    Handle = 8,
    /// Physical memory by its number. Extra: handles' references and mappings together.
    Object = 9,
    /// A mapped address. Bytes: the number of its object.
    Mapping = 10,
    /// The same address. Bytes: how long the mapping is.
    Length = 11,
    /// A device pointer of managed memory that stands in for other memory: its entry is a [`Class::Pointer`] too.
    /// Extra: the number of its context.
    StandIn = 12,
    /// A `CUmemoryPool`, for which nothing is charged by this entry. Extra: one more than the ordinal of the device whose
    /// memory it has, 0 for the host's.
    Owner = 13,
    /// An executable graph on a device, for which nothing is charged by this entry. Bytes: what its memory nodes need there.
    Need = 14,
}

impl Class {
    const ALL: [Self; 14] = [
        Self::Pointer,
        Self::Array,
        Self::Mipmap,
        Self::Context,
        Self::Module,
        Self::Pool,
        Self::Graph,
        Self::Handle,
        Self::Object,
        Self::Mapping,
        Self::Length,
        Self::StandIn,
        Self::Owner,
        Self::Need,
    ];
}

/// One entry. A value of zero is no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: u64,
    /// Bytes (bits 0 to 43), class (44 to 47), device (48 to 52), managed (53), extra (54 to 63).
    pub(super) value: u64,
}

const BYTES: u64 = (1 << 44) - 1;
const MANAGED: u64 = 1 << 53;
/// The largest extra. As a count it stands for "more than can be counted" and stays: such memory is
/// charged until the process ends, never too little.
pub(crate) const MANY: u64 = (1 << 10) - 1;

impl Entry {
    pub fn new(class: Class, key: u64, device: u32, bytes: u64, extra: u64) -> Self {
        let value = bytes.min(BYTES) | (class as u64) << 44 | u64::from(device & 31) << 48;
        Self { key, value: value | extra.min(MANY) << 54 }
    }

    /// The same, of managed memory.
    #[must_use]
    pub fn managed(self, managed: bool) -> Self {
        Self { value: if managed { self.value | MANAGED } else { self.value & !MANAGED }, ..self }
    }

    pub fn is_managed(&self) -> bool {
        self.value & MANAGED != 0
    }

    pub(super) fn number(&self) -> u64 {
        self.value >> 44 & 15
    }

    pub fn class(&self) -> Option<Class> {
        Class::ALL.into_iter().find(|class| *class as u64 == self.number())
    }

    #[inline]
    pub(super) fn is(&self, class: Class, key: u64) -> bool {
        (self.key == key) & (self.number() == class as u64)
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.value == 0
    }

    pub fn device(&self) -> u32 {
        (self.value >> 48) as u32 & 31
    }

    pub fn bytes(&self) -> u64 {
        self.value & BYTES
    }

    /// The same with other bytes.
    #[must_use]
    pub fn with_bytes(self, bytes: u64) -> Self {
        Self { value: self.value & !BYTES | bytes.min(BYTES), ..self }
    }

    pub fn extra(&self) -> u64 {
        self.value >> 54
    }

    fn with_extra(self, extra: u64) -> Self {
        Self { value: self.value & !(MANY << 54) | extra.min(MANY) << 54, ..self }
    }

    /// Counts one more in the extra.
    pub(crate) fn hold(&mut self) {
        *self = self.with_extra(self.extra() + 1);
    }

    /// Counts so many less in the extra; what is to become of the entry.
    pub(crate) fn let_go(&mut self, count: u64) -> Then {
        if self.extra() < MANY {
            *self = self.with_extra(self.extra().saturating_sub(count));
        }
        if self.extra() == 0 { Then::Remove } else { Then::Keep }
    }
}
