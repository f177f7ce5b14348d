//! Handles: numbers that encode the object, not addresses.
//!
//! A handle has a tag, its kind, the GPU's slot, and the ids of GPU and compute instance. It also
//! has the low bits of the generation in which an instance was created, or of a GPU's device id.
//! Every process can thus tell a stale handle from one of a new object in the same place, and refuse
//! numbers that are no handles. The tag is outside any address range, so that garbage collectors do
//! not mistake handles for pointers.

use divvy_sim::code::Code;
use divvy_sim::state::{Ci, Gi, Gpu, State};

use crate::argument::{Argument, Outcome, TraceArgs};

const TAG: u64 = 0x5d << 56;
const TAG_BITS: u64 = 0xff << 56;
const BORN_BITS: u64 = 0xffff_ffff;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Gpu = 1,
    MigDevice = 2,
    GpuInstance = 3,
    ComputeInstance = 4,
}

/// The fields of a handle.
#[derive(Clone, Copy)]
struct Parts {
    slot: usize,
    gi: u32,
    ci: u32,
    born: u64,
}

const fn pack(kind: Kind, parts: Parts) -> u64 {
    TAG | (kind as u64) << 52
        | (parts.slot as u64 & 0xff) << 44
        | (parts.gi as u64 & 0x3f) << 38
        | (parts.ci as u64 & 0x3f) << 32
        | parts.born & BORN_BITS
}

const fn unpack(handle: u64) -> Parts {
    Parts {
        slot: (handle >> 44 & 0xff) as usize,
        gi: (handle >> 38 & 0x3f) as u32,
        ci: (handle >> 32 & 0x3f) as u32,
        born: handle & BORN_BITS,
    }
}

const fn is(handle: u64, kind: Kind) -> bool {
    handle & TAG_BITS == TAG && handle >> 52 & 0xf == kind as u64
}

impl Kind {
    fn of(handle: u64) -> Option<Self> {
        let kinds = [Self::Gpu, Self::MigDevice, Self::GpuInstance, Self::ComputeInstance];
        kinds.into_iter().find(|kind| is(handle, *kind))
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident: $($kind:ident)|+;)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) struct $name(u64);

        impl Argument for $name {
            fn is_missing(&self) -> bool {
                !($(is(self.0, Kind::$kind))||+)
            }

            fn gpu(&self) -> Option<usize> {
                (!self.is_missing()).then(|| unpack(self.0).slot)
            }

            fn trace_args(&self, args: &mut TraceArgs) {
                let Parts { gi, ci, .. } = unpack(self.0);
                match Kind::of(self.0) {
                    Some(Kind::GpuInstance) => args.push(gi.into()),
                    Some(Kind::MigDevice | Kind::ComputeInstance) => {
                        args.push(gi.into());
                        args.push(ci.into());
                    }
                    Some(Kind::Gpu) | None => {}
                }
            }

            fn check(&self, state: &State) -> Outcome {
                present(state, self.0).map(drop)
            }
        }
    )*};
}

handles! {
    /// `nvmlDevice_t`: a GPU or a MIG device.
    Device: Gpu | MigDevice;
    /// `nvmlGpuInstance_t`.
    GpuInstance: GpuInstance;
    /// `nvmlComputeInstance_t`.
    ComputeInstance: ComputeInstance;
}

/// The object that a device handle names.
pub(crate) struct Target<'s> {
    pub(crate) slot: usize,
    pub(crate) gpu: &'s Gpu,
    pub(crate) mig: Option<(&'s Gi, &'s Ci)>,
}

/// The GPU of a handle, if the driver lists it and can reach it. A GPU that was replaced since is
/// lost.
fn present(state: &State, handle: u64) -> Outcome<&Gpu> {
    let parts = unpack(handle);
    let gpu = state.gpus.get(parts.slot).ok_or(Code::InvalidArgument)?;
    let is_replaced = is(handle, Kind::Gpu) && gpu.pdi & BORN_BITS != parts.born;
    if gpu.missing || is_replaced {
        return Err(Code::GpuIsLost);
    }
    gpu.failure().map_or(Ok(gpu), Err)
}

fn instance(gpu: &Gpu, parts: Parts) -> Outcome<&Gi> {
    gpu.gi(parts.gi).filter(|gi| gi.born & BORN_BITS == parts.born).ok_or(Code::InvalidArgument)
}

impl Device {
    pub(crate) const fn of_gpu(slot: usize, gpu: &Gpu) -> Self {
        Self(pack(Kind::Gpu, Parts { slot, gi: 0, ci: 0, born: gpu.pdi }))
    }

    pub(crate) const fn of_mig(slot: usize, gi: u32, ci: &Ci) -> Self {
        Self(pack(Kind::MigDevice, Parts { slot, gi, ci: ci.id, born: ci.born }))
    }

    /// The value for a field of a C structure.
    pub(crate) const fn raw(self) -> u64 {
        self.0
    }

    /// The GPU or MIG device; an error if the handle is stale.
    pub(crate) fn target(self, state: &State) -> Outcome<Target<'_>> {
        let parts = unpack(self.0);
        let gpu = present(state, self.0)?;
        if is(self.0, Kind::Gpu) {
            return Ok(Target { slot: parts.slot, gpu, mig: None });
        }
        let gi = gpu.gi(parts.gi).ok_or(Code::InvalidArgument)?;
        let ci =
            gi.ci(parts.ci).filter(|ci| ci.born & BORN_BITS == parts.born).ok_or(Code::InvalidArgument)?;
        Ok(Target { slot: parts.slot, gpu, mig: Some((gi, ci)) })
    }

    /// The GPU; an error for a MIG device.
    pub(crate) fn whole(self, state: &State) -> Outcome<(usize, &Gpu)> {
        let target = self.target(state)?;
        if target.mig.is_some() { Err(Code::NotSupported) } else { Ok((target.slot, target.gpu)) }
    }
}

impl GpuInstance {
    pub(crate) const fn of(slot: usize, gi: &Gi) -> Self {
        Self(pack(Kind::GpuInstance, Parts { slot, gi: gi.id, ci: 0, born: gi.born }))
    }

    pub(crate) const fn raw(self) -> u64 {
        self.0
    }

    pub(crate) fn target(self, state: &State) -> Outcome<(usize, &Gpu, &Gi)> {
        let parts = unpack(self.0);
        let gpu = present(state, self.0)?;
        Ok((parts.slot, gpu, instance(gpu, parts)?))
    }
}

impl ComputeInstance {
    pub(crate) const fn of(slot: usize, gi: u32, ci: &Ci) -> Self {
        Self(pack(Kind::ComputeInstance, Parts { slot, gi, ci: ci.id, born: ci.born }))
    }

    pub(crate) fn target(self, state: &State) -> Outcome<(usize, &Gpu, &Gi, &Ci)> {
        let parts = unpack(self.0);
        let gpu = present(state, self.0)?;
        let gi = gpu.gi(parts.gi).ok_or(Code::InvalidArgument)?;
        let ci =
            gi.ci(parts.ci).filter(|ci| ci.born & BORN_BITS == parts.born).ok_or(Code::InvalidArgument)?;
        Ok((parts.slot, gpu, gi, ci))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_round_trips() {
        for slot in [0, 1, 15, 255] {
            for (gi, ci) in [(0, 0), (14, 7), (63, 63)] {
                let born = 0x1_2345_6789;
                for kind in [Kind::Gpu, Kind::MigDevice, Kind::GpuInstance, Kind::ComputeInstance] {
                    let handle = pack(kind, Parts { slot, gi, ci, born });
                    let parts = unpack(handle);
                    assert_eq!((parts.slot, parts.gi, parts.ci), (slot, gi, ci));
                    assert_eq!(parts.born, born & BORN_BITS);
                    assert!(is(handle, kind));
                }
            }
        }
    }

    #[test]
    fn arbitrary_number_is_not_a_handle() {
        for number in [0, 1, 0xdead_beef, u64::MAX, TAG, 0x7fff_ffff_f000] {
            assert!(Device(number).is_missing(), "{number:#x}");
            assert!(GpuInstance(number).is_missing(), "{number:#x}");
            assert!(ComputeInstance(number).is_missing(), "{number:#x}");
        }
        assert!(Device(pack(Kind::GpuInstance, unpack(TAG))).is_missing());
    }
}
