//! Locations of memory, and the properties and access of pools, as in CUDA's headers.

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

impl Location {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`.
    pub(crate) const DEVICE: u32 = 1;

    /// The ordinal, if it is a device.
    pub(crate) fn device(self) -> Option<i32> {
        (self.kind == Self::DEVICE).then_some(self.id)
    }
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PoolProperties {
    pub(crate) allocation: u32,
    pub(crate) handles: u32,
    pub(crate) location: Location,
    security: usize,
    pub(crate) max_size: u64,
    usage: u16,
    rdma: u8,
    reserved: [u8; 53],
}

const _: () = assert!(size_of::<PoolProperties>() == 88);

impl PoolProperties {
    /// Pinned memory of a device.
    pub(crate) const fn of_device(ordinal: i32) -> Self {
        Self {
            allocation: 1,
            handles: 0,
            location: Location { kind: Location::DEVICE, id: ordinal },
            security: 0,
            max_size: 0,
            usage: 0,
            rdma: 0,
            reserved: [0; 53],
        }
    }

    /// The device of its memory, if it is device memory.
    pub(crate) fn device(self) -> Option<i32> {
        self.location.device()
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Access {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}
