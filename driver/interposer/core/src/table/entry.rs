//! The entries of the table.
//!
//! An entry has two words: the key (an address or a handle) and a packed value. So 100,000 entries
//! fit into a core's own caches or nearly so.

/// The kind of key. The same number may be a key in several classes.
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
    /// The graph memory of a device, by the device's index.
    Graph = 7,
    /// A handle of `cuMemCreate`. Bytes: the number of its object. Extra: the program's references.
    Handle = 8,
    /// Physical memory by its number. Extra: references by handles and mappings together.
    Object = 9,
    /// A mapped address. Bytes: the number of its object.
    Mapping = 10,
    /// A mapped address. Bytes: the length of the mapping.
    Length = 11,
    /// A device pointer of managed memory that replaces device memory. A [`Class::Pointer`] entry
    /// exists too. Extra: the number of its context.
    Substitute = 12,
    /// A `CUmemoryPool`, without a charge. Extra: the ordinal of the device that owns its memory
    /// plus 1; 0 for host memory.
    PoolOwner = 13,
    /// An executable graph on a device, without a charge. Bytes: the size of its memory nodes
    /// there.
    GraphNeed = 14,
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
        Self::Substitute,
        Self::PoolOwner,
        Self::GraphNeed,
    ];
}

/// One entry. A value of 0 is an empty entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: u64,
    /// Bytes (bits 0 to 43), class (44 to 47), device (48 to 52), managed (53), extra (54 to 63).
    pub(super) value: u64,
}

/// The action on an entry after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryAction {
    Keep,
    Remove,
}

const BYTES: u64 = (1 << 44) - 1;
const MANAGED: u64 = 1 << 53;
/// The largest extra. A count that reaches it stays there: such memory is charged until the process
/// exits, so the charge is never too low.
pub(crate) const EXTRA_MAX: u64 = (1 << 10) - 1;

impl Entry {
    pub fn new(class: Class, key: u64, device: u32, bytes: u64, extra: u64) -> Self {
        let value = bytes.min(BYTES) | (class as u64) << 44 | u64::from(device & 31) << 48;
        Self { key, value: value | extra.min(EXTRA_MAX) << 54 }
    }

    /// The same entry with the managed flag.
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
    pub(super) fn matches(&self, class: Class, key: u64) -> bool {
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

    /// The same entry with other bytes.
    #[must_use]
    pub fn with_bytes(self, bytes: u64) -> Self {
        Self { value: self.value & !BYTES | bytes.min(BYTES), ..self }
    }

    pub fn extra(&self) -> u64 {
        self.value >> 54
    }

    fn with_extra(self, extra: u64) -> Self {
        Self { value: self.value & !(EXTRA_MAX << 54) | extra.min(EXTRA_MAX) << 54, ..self }
    }

    /// Increments the count in the extra.
    pub(crate) fn increment(&mut self) {
        *self = self.with_extra(self.extra() + 1);
    }

    /// Decrements the count in the extra. At 0, the action is to remove the entry.
    pub(crate) fn decrement(&mut self, count: u64) -> EntryAction {
        if self.extra() < EXTRA_MAX {
            *self = self.with_extra(self.extra().saturating_sub(count));
        }
        if self.extra() == 0 { EntryAction::Remove } else { EntryAction::Keep }
    }
}
