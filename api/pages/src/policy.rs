//! The policy page: what a share may use.
//!
//! The node writes it as a file of [`SIZE`] bytes that root owns (mode 0444); the
//! container has it mounted read-only. The policy stands there twice. A writer fills
//! the older copy under the next generation and then rings `stamp`; a reader takes
//! the newest copy whose checksum holds, so a reader that comes in the middle of a
//! write, or after a writer that died in it, reads the policy before it.
//!
//! | offset | what |
//! |---|---|
//! | 0 | magic, major and minor version, size |
//! | 64 | what the node changes in place: gate (a futex word), whether launches are paced, stamp, rate, until when that is granted, until when the gate is closed, a word to trim pools, whether nobody sees what the share has |
//! | 128 | what the agent remembers of the share for the agent after it, two words |
//! | 1024, 2048 | two copies of the record, 1024 bytes each |
//!
//! Everything else is zero and reserved. [`Policy::encode`] is the writer's side and
//! [`Policy::decode`] the reader's, which is total: any bytes give a policy or an error.

mod page;

use crate::crc::crc32c;
use crate::{GpuUuid, MAJOR, MINOR, Text};
use core::fmt;
pub use page::PolicyPage;

/// The length of a policy page, in bytes.
pub const SIZE: usize = 4096;
/// The first eight bytes of a policy page.
pub const MAGIC: [u8; 8] = *b"divvypol";

/// Where the two copies begin, and the room of each.
const COPIES: [usize; 2] = [1024, 2048];
const ROOM: usize = 1024;

/// Where it stands whether launches are paced.
const PACED: usize = 68;

/// Offsets in a record. The checksum covers the record from 0 to its length, without itself.
mod at {
    pub(super) const GENERATION: usize = 0;
    pub(super) const LENGTH: usize = 8;
    pub(super) const CHECKSUM: usize = 12;
    pub(super) const FLAGS: usize = 16;
    pub(super) const PRIORITY: usize = 20;
    pub(super) const CLAIM: usize = 24;
    pub(super) const SHARE: usize = 88;
    pub(super) const GPU: usize = 152;
    pub(super) const MIG: usize = 168;
    pub(super) const PCI: usize = 184;
    pub(super) const LIMIT: usize = 216;
    pub(super) const SOFT: usize = 224;
    pub(super) const OVERCOMMIT: usize = 232;
    pub(super) const PHYSICAL: usize = 240;
    pub(super) const CONTEXT: usize = 248;
    pub(super) const CORES: usize = 256;
    pub(super) const CEILING: usize = 260;
    pub(super) const WEIGHT: usize = 264;
    // 268 is reserved: a page of an earlier version may have a number there that means nothing any more.
    pub(super) const BURST: usize = 272;
    /// The length of a record of the first minor version; what lies beyond is 0 there.
    pub(super) const FIRST: usize = 280;
    pub(super) const ENCODERS: usize = 280;
    pub(super) const DECODERS: usize = 284;
    /// The length of a record of this minor version.
    pub(super) const END: usize = 288;
}

/// What a share may use: one (claim, shareID) on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The UID of the claim.
    pub claim: Text<64>,
    /// The shareID of the allocation result; the pages of one device are charged in its order.
    pub share: Text<64>,
    /// The GPU.
    pub gpu: GpuUuid,
    /// The MIG instance, where the share is one of an instance.
    pub mig: Option<GpuUuid>,
    /// The GPU's PCI bus id as NVML writes it, `00000000:3B:00.0`.
    pub pci: Text<32>,
    pub memory: Memory,
    pub compute: Compute,
    pub codec: Codec,
    pub flags: Flags,
}

/// Sessions of the video engines that the processes of a share may have open at once; none: as many as the GPU driver
/// allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Codec {
    pub encoders: Option<u32>,
    pub decoders: Option<u32>,
}

/// Device memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The most that all processes of the share hold at once.
    pub limit: u64,
    /// What beyond goes to managed memory where over-commit is on; 0: none.
    pub soft: u64,
    /// The most with over-commit; 0: the limit.
    pub overcommit: u64,
    /// The memory of the device itself (of the instance on MIG).
    pub physical: u64,
    /// What a context is charged until the node has measured what it takes.
    pub context: u64,
}

/// Compute time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compute {
    /// The guarantee, in percent of the device; 0: none.
    pub cores: u32,
    /// The most while others idle, in percent; 0: no ceiling.
    pub ceiling: u32,
    /// The part of what nobody is guaranteed; 0 counts as 1.
    pub weight: u32,
    /// A higher class closes the gate of a lower one while it works.
    pub priority: u32,
    /// How much unused time may be kept, in microseconds of GPU time; 0: the library's default.
    pub burst_us: u64,
}

impl Compute {
    /// The share is held to less than the device: its launches have to be paced.
    pub fn is_limited(self) -> bool {
        self.rate() < SECOND
    }

    /// Nanoseconds of GPU time a second while nobody arbitrates: the guarantee, or the
    /// ceiling where there is none; all of it without either.
    pub fn rate(self) -> u64 {
        let percent = match (self.cores, self.ceiling) {
            (0, 0) => 100,
            (0, ceiling) => ceiling,
            (cores, _) => cores,
        };
        u64::from(percent.min(100)) * (SECOND / 100)
    }
}

/// In nanoseconds.
const SECOND: u64 = 1_000_000_000;

/// Granted as a rate: the share may have all of the device, and nothing is held up. Any other is a rate of what the
/// library believes, and may be more than a second a second: kernels that are cut by neighbours look longer.
pub const UNBOUNDED: u64 = u64::MAX;

/// Nanoseconds of GPU time by which the stock of a share fills in so many nanoseconds. Whoever may have all of the device
/// fills no faster than it works, and so is in debt while what it launched runs: by that the node knows that it works.
pub fn accrued(rate: u64, nanoseconds: u64) -> i64 {
    let rate = if rate == UNBOUNDED { SECOND } else { rate };
    let accrued = u128::from(nanoseconds) * u128::from(rate) / u128::from(SECOND);
    i64::try_from(accrued).unwrap_or(i64::MAX)
}

/// Switches. Bits that this version does not know are kept as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u32);

impl Flags {
    /// Count and never refuse.
    pub const OBSERVE_ONLY: Self = Self(1);
    /// A page that cannot be trusted refuses all allocations.
    pub const STRICT: Self = Self(1 << 1);
    /// NVML shows the share in place of the device.
    pub const NVML_VIEW: Self = Self(1 << 2);
    /// The GPU driver holds the memory limit by itself: count, and let it refuse.
    pub const NATIVE_MEMORY: Self = Self(1 << 3);
    /// Memory beyond the soft limit is managed memory.
    pub const UVM: Self = Self(1 << 4);

    /// True where every bit of `other` is set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Why a page has no policy to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyError {
    /// Not a policy page: too short, or without the magic.
    Foreign,
    /// A major version that this reader does not know.
    Major(u16),
    /// No copy has a checksum that holds and fields that can be read.
    Damaged,
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("the file is not a policy page"),
            Self::Major(major) => write!(f, "the policy page has layout version {major}, this reads {MAJOR}"),
            Self::Damaged => f.write_str("no copy of the policy is whole"),
        }
    }
}

impl core::error::Error for PolicyError {}

impl Policy {
    /// A fresh page with this policy as its first generation.
    pub fn encode(&self) -> [u8; SIZE] {
        let mut page = [0; SIZE];
        put(&mut page, 0, &MAGIC);
        put(&mut page, 8, &MAJOR.to_le_bytes());
        put(&mut page, 10, &MINOR.to_le_bytes());
        put(&mut page, 12, &(SIZE as u32).to_le_bytes());
        put(&mut page, PACED, &u32::from(self.compute.is_limited()).to_le_bytes());
        put(&mut page, COPIES[0], &self.record(1));
        page
    }

    fn record(&self, generation: u64) -> [u8; at::END] {
        let mut record = [0; at::END];
        put(&mut record, at::GENERATION, &generation.to_le_bytes());
        put(&mut record, at::LENGTH, &(at::END as u32).to_le_bytes());
        put(&mut record, at::FLAGS, &self.flags.0.to_le_bytes());
        put(&mut record, at::PRIORITY, &self.compute.priority.to_le_bytes());
        put(&mut record, at::CLAIM, self.claim.bytes());
        put(&mut record, at::SHARE, self.share.bytes());
        put(&mut record, at::GPU, &self.gpu.0);
        put(&mut record, at::MIG, &self.mig.map_or([0; 16], |mig| mig.0));
        put(&mut record, at::PCI, self.pci.bytes());
        put(&mut record, at::LIMIT, &self.memory.limit.to_le_bytes());
        put(&mut record, at::SOFT, &self.memory.soft.to_le_bytes());
        put(&mut record, at::OVERCOMMIT, &self.memory.overcommit.to_le_bytes());
        put(&mut record, at::PHYSICAL, &self.memory.physical.to_le_bytes());
        put(&mut record, at::CONTEXT, &self.memory.context.to_le_bytes());
        put(&mut record, at::CORES, &self.compute.cores.to_le_bytes());
        put(&mut record, at::CEILING, &self.compute.ceiling.to_le_bytes());
        put(&mut record, at::WEIGHT, &self.compute.weight.to_le_bytes());
        put(&mut record, at::BURST, &self.compute.burst_us.to_le_bytes());
        // 0 is what an older record has there.
        let quota = |sessions: Option<u32>| sessions.map_or(0, |count| count.saturating_add(1)).to_le_bytes();
        put(&mut record, at::ENCODERS, &quota(self.codec.encoders));
        put(&mut record, at::DECODERS, &quota(self.codec.decoders));
        let sum = checksum(&record);
        put(&mut record, at::CHECKSUM, &sum.to_le_bytes());
        record
    }

    /// The newest whole copy of a page, with its generation.
    pub fn decode(page: &[u8]) -> Result<(u64, Self), PolicyError> {
        if page.len() < SIZE {
            return Err(PolicyError::Foreign);
        }
        check(page)?;
        let copies = COPIES.iter().filter_map(|start| Self::from_record(page.get(*start..start + ROOM)?));
        copies.max_by_key(|(generation, _)| *generation).ok_or(PolicyError::Damaged)
    }

    #[cold]
    fn from_record(room: &[u8]) -> Option<(u64, Self)> {
        let length = usize::try_from(u32::from_le_bytes(take(room, at::LENGTH)?)).ok()?;
        let record = room.get(..length).filter(|record| record.len() >= at::FIRST)?;
        let u32_at = |offset| take(record, offset).map(u32::from_le_bytes);
        let u64_at = |offset| take(record, offset).map(u64::from_le_bytes);
        let generation = u64_at(at::GENERATION).filter(|generation| *generation > 0)?;
        if u32_at(at::CHECKSUM)? != checksum(record) {
            return None;
        }
        let quota = |offset| u32_at(offset).and_then(|count| count.checked_sub(1));
        let policy = Self {
            claim: Text::read(record.get(at::CLAIM..at::SHARE)?)?,
            share: Text::read(record.get(at::SHARE..at::GPU)?)?,
            gpu: GpuUuid(take(record, at::GPU)?),
            mig: GpuUuid(take(record, at::MIG)?).none_if_zero(),
            pci: Text::read(record.get(at::PCI..at::LIMIT)?)?,
            memory: Memory {
                limit: u64_at(at::LIMIT)?,
                soft: u64_at(at::SOFT)?,
                overcommit: u64_at(at::OVERCOMMIT)?,
                physical: u64_at(at::PHYSICAL)?,
                context: u64_at(at::CONTEXT)?,
            },
            compute: Compute {
                cores: u32_at(at::CORES)?,
                ceiling: u32_at(at::CEILING)?,
                weight: u32_at(at::WEIGHT)?,
                priority: u32_at(at::PRIORITY)?,
                burst_us: u64_at(at::BURST)?,
            },
            codec: Codec { encoders: quota(at::ENCODERS), decoders: quota(at::DECODERS) },
            flags: Flags(u32_at(at::FLAGS)?),
        };
        Some((generation, policy))
    }
}

/// Whether a page begins as one of this version.
fn check(page: &[u8]) -> Result<(), PolicyError> {
    if page.get(..8) != Some(MAGIC.as_slice()) {
        return Err(PolicyError::Foreign);
    }
    let major = u16::from_le_bytes(take(page, 8).ok_or(PolicyError::Foreign)?);
    if major == MAJOR { Ok(()) } else { Err(PolicyError::Major(major)) }
}

/// The checksum of a record whose length is that of the slice.
fn checksum(record: &[u8]) -> u32 {
    let (head, tail) = record.split_at(at::CHECKSUM.min(record.len()));
    crc32c(&[head, tail.get(4..).unwrap_or_default()])
}

fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    if let Some(room) = bytes.get_mut(offset..offset + value.len()) {
        room.copy_from_slice(value);
    }
}

fn take<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..offset.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(super) fn sample() -> Policy {
        Policy {
            claim: Text::new("2f0c7a1e-7f43-4c5e-9d5a-0e6f2b1c3d4e").expect("a UID"),
            share: Text::new("b7a9d3c2-0a1b-4c2d-8e3f-405162738495").expect("a UID"),
            gpu: GpuUuid::parse("GPU-00112233-4455-6677-8899-aabbccddeeff").expect("a UUID"),
            mig: GpuUuid::parse("MIG-10213243-5465-7687-98a9-bacbdcedfe0f"),
            pci: Text::new("00000000:3B:00.0").expect("a bus id"),
            memory: Memory {
                limit: 10 << 30,
                soft: 9 << 30,
                overcommit: 12 << 30,
                physical: 80 << 30,
                context: 512 << 20,
            },
            compute: Compute { cores: 30, ceiling: 60, weight: 2, priority: 1, burst_us: 10_000 },
            codec: Codec { encoders: Some(3), decoders: Some(0) },
            flags: Flags::NVML_VIEW.with(Flags::STRICT),
        }
    }

    #[test]
    fn the_bytes_of_a_page_are_those_of_the_golden() {
        let mut page = sample().encode();
        // The golden has something in what is reserved.
        let start = COPIES[0];
        put(&mut page, start + 268, &20_000_u32.to_le_bytes());
        let sum = checksum(&page[start..start + at::END]);
        put(&mut page, start + at::CHECKSUM, &sum.to_le_bytes());
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/policy-1.3.hex");
        crate::golden::check(path, &page);
        assert_eq!(Policy::decode(&page), Ok((1, sample())));
    }

    #[test]
    fn a_higher_minor_with_a_longer_record_is_read_and_another_major_is_not() {
        let mut page = sample().encode();
        put(&mut page, 10, &7_u16.to_le_bytes());
        let start = COPIES[0];
        put(&mut page, start + at::LENGTH, &(at::END as u32 + 40).to_le_bytes());
        put(&mut page, start + at::END, &[0x5a; 40]);
        let sum = checksum(&page[start..start + at::END + 40]);
        put(&mut page, start + at::CHECKSUM, &sum.to_le_bytes());
        assert_eq!(Policy::decode(&page), Ok((1, sample())));
        put(&mut page, 8, &2_u16.to_le_bytes());
        assert_eq!(Policy::decode(&page), Err(PolicyError::Major(2)));
    }

    #[test]
    fn a_page_of_the_minor_before_is_read() {
        let written = crate::golden::bytes(include_str!("../tests/golden/policy-1.1.hex"));
        let before = Policy { codec: Codec::default(), ..sample() };
        assert_eq!(Policy::decode(&written), Ok((1, before)));
    }

    #[test]
    fn the_rate_is_the_guarantee_or_else_the_ceiling() {
        let rate = |cores, ceiling| Compute { cores, ceiling, ..Compute::default() }.rate() / (SECOND / 100);
        assert_eq!(
            [rate(30, 60), rate(30, 0), rate(0, 60), rate(0, 0), rate(100, 0), rate(0, 900)],
            [30, 30, 60, 100, 100, 100]
        );
        assert!(!Compute { cores: 100, ..Compute::default() }.is_limited());
    }

    #[test]
    fn a_stock_fills_by_its_rate_and_without_bounds_as_fast_as_the_device_works() {
        assert_eq!(accrued(SECOND / 4, 2 * SECOND), SECOND as i64 / 2);
        assert_eq!(accrued(3 * SECOND, 2 * SECOND), 6 * SECOND as i64);
        assert_eq!(accrued(UNBOUNDED, 2 * SECOND), 2 * SECOND as i64);
        assert_eq!(accrued(UNBOUNDED - 1, u64::MAX), i64::MAX);
        assert_eq!(accrued(0, u64::MAX), 0);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_policy_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let _ = Policy::decode(&bytes);
        }

        #[test]
        fn one_flipped_bit_of_a_lone_copy_is_seen(bit in 0..at::END * 8) {
            let mut page = sample().encode();
            page[COPIES[0] + bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Policy::decode(&page), Err(PolicyError::Damaged));
        }
    }
}
