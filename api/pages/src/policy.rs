//! The policy page: the limits of a share, written by the node as a file of [`SIZE`] bytes.
//!
//! Root owns the file (mode 0444), and containers mount it read-only. The policy is stored twice: a
//! writer fills the older copy with the next generation and then increments `stamp`; a reader takes
//! the newest copy with a valid checksum. So a reader during a write, or after a writer died, reads
//! the previous policy. [`Policy::encode`] writes a new page. [`Policy::decode`] accepts any bytes
//! and returns a policy or an error.

mod page;

use crate::crc::crc32c;
use crate::{GpuUuid, MAJOR, MINOR, Text};
use core::fmt;
pub use page::PolicyPage;

/// The size of a policy page, in bytes.
pub const SIZE: usize = 4096;
/// The first eight bytes of a policy page.
pub const MAGIC: [u8; 8] = *b"divvypol";

/// Offsets of the two copies, and the space for each.
const COPIES: [usize; 2] = [1024, 2048];
const COPY_BYTES: usize = 1024;

/// Offset of the throttle word; see [`PolicyPage::is_rate_limited`].
const THROTTLE: usize = 68;

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
    // 268 is reserved: pages of earlier versions may have an obsolete number there.
    pub(super) const BURST: usize = 272;
    /// The record length of the first minor version. Later fields are 0 in such a record.
    pub(super) const FIRST: usize = 280;
    pub(super) const ENCODERS: usize = 280;
    pub(super) const DECODERS: usize = 284;
    /// The record length of this minor version.
    pub(super) const END: usize = 288;
}

/// The limits of a share: one (claim, shareID) on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The UID of the claim.
    pub claim: Text<64>,
    /// The shareID of the allocation result. The pages of one device are charged in the order of
    /// their shareIDs.
    pub share: Text<64>,
    /// The UUID of the GPU.
    pub gpu: GpuUuid,
    /// The UUID of the MIG instance, if the share is part of one.
    pub mig: Option<GpuUuid>,
    /// The GPU's PCI bus id in NVML's form, `00000000:3B:00.0`.
    pub pci: Text<32>,
    pub memory: Memory,
    pub compute: Compute,
    pub codec: Codec,
    pub flags: Flags,
}

/// Most sessions of the video engines that the share may have open at once; `None` means no limit
/// but that of the GPU driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Codec {
    pub encoders: Option<u32>,
    pub decoders: Option<u32>,
}

/// Device memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Most bytes that all processes of the share may hold.
    pub limit: u64,
    /// With over-commit, memory beyond this is managed memory; 0 means none.
    pub soft: u64,
    /// The limit with over-commit; 0 means `limit`.
    pub overcommit: u64,
    /// The memory of the device, or of the MIG instance.
    pub physical: u64,
    /// The charge of a context until the node has measured its size.
    pub context: u64,
}

/// Limits of compute time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compute {
    /// Guaranteed percent of the device; 0 means none.
    pub cores: u32,
    /// Most percent of the device, even while others are idle; 0 means no ceiling.
    pub ceiling: u32,
    /// Weight for time that is not guaranteed to any share; 0 counts as 1.
    pub weight: u32,
    /// While a share of a higher class works, the gate of lower classes is closed.
    pub priority: u32,
    /// Most unused time that is saved, in microseconds of GPU time; 0 means the library's default.
    pub burst_us: u64,
}

impl Compute {
    /// Whether the share is limited to less than the device, so its launches must be throttled.
    pub fn is_limited(self) -> bool {
        self.rate() < SECOND_NS
    }

    /// The rate without a grant, in nanoseconds of GPU time per second: the guarantee, else the
    /// ceiling, else the whole device.
    pub fn rate(self) -> u64 {
        let percent = match (self.cores, self.ceiling) {
            (0, 0) => 100,
            (0, ceiling) => ceiling,
            (cores, _) => cores,
        };
        u64::from(percent.min(100)) * (SECOND_NS / 100)
    }
}

/// One second, in nanoseconds.
const SECOND_NS: u64 = 1_000_000_000;

/// A granted rate without limit: the share may use the whole device. Other rates apply to the time
/// that the library estimates, and may exceed one second per second, because kernels that are
/// preempted by other shares look longer than they are.
pub const UNBOUNDED: u64 = u64::MAX;

/// Nanoseconds of GPU time that the bucket of a share gains in `nanoseconds`. With an unlimited
/// rate it gains no more than the device can work. So the balance is negative while launched work
/// runs, which tells the node that the share is active.
pub fn accrued(rate: u64, nanoseconds: u64) -> i64 {
    let rate = if rate == UNBOUNDED { SECOND_NS } else { rate };
    let accrued = u128::from(nanoseconds) * u128::from(rate) / u128::from(SECOND_NS);
    i64::try_from(accrued).unwrap_or(i64::MAX)
}

/// Flags. Unknown bits are preserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u32);

impl Flags {
    /// Count usage, but refuse nothing.
    pub const OBSERVE_ONLY: Self = Self(1);
    /// Refuse all allocations if the page is not trustworthy.
    pub const STRICT: Self = Self(1 << 1);
    /// NVML reports the share instead of the device.
    pub const NVML_VIEW: Self = Self(1 << 2);
    /// The GPU driver enforces the memory limit: only count usage.
    pub const NATIVE_MEMORY: Self = Self(1 << 3);
    /// Memory beyond the soft limit is managed memory.
    pub const UVM: Self = Self(1 << 4);
    /// The library prints no lines on the container's standard error.
    pub const NO_MESSAGES: Self = Self(1 << 5);

    /// True if all bits of `other` are set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The union of both.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Why no policy can be read from a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyError {
    /// Not a policy page: too short, or without the magic.
    Foreign,
    /// A major version that this reader does not support.
    Major(u16),
    /// No copy has a valid checksum and valid fields.
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
    /// A new page with this policy as generation 1.
    pub fn encode(&self) -> [u8; SIZE] {
        let mut page = [0; SIZE];
        put(&mut page, 0, &MAGIC);
        put(&mut page, 8, &MAJOR.to_le_bytes());
        put(&mut page, 10, &MINOR.to_le_bytes());
        put(&mut page, 12, &(SIZE as u32).to_le_bytes());
        put(&mut page, THROTTLE, &u32::from(self.compute.is_limited()).to_le_bytes());
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
        // Older records have 0 here, which means no quota.
        let quota = |sessions: Option<u32>| sessions.map_or(0, |count| count.saturating_add(1)).to_le_bytes();
        put(&mut record, at::ENCODERS, &quota(self.codec.encoders));
        put(&mut record, at::DECODERS, &quota(self.codec.decoders));
        let sum = checksum(&record);
        put(&mut record, at::CHECKSUM, &sum.to_le_bytes());
        record
    }

    /// The newest valid copy of a page, with its generation.
    pub fn decode(page: &[u8]) -> Result<(u64, Self), PolicyError> {
        if page.len() < SIZE {
            return Err(PolicyError::Foreign);
        }
        check(page)?;
        let copies =
            COPIES.iter().filter_map(|start| Self::from_record(page.get(*start..start + COPY_BYTES)?));
        copies.max_by_key(|(generation, _)| *generation).ok_or(PolicyError::Damaged)
    }

    #[cold]
    fn from_record(space: &[u8]) -> Option<(u64, Self)> {
        let length = usize::try_from(u32::from_le_bytes(take(space, at::LENGTH)?)).ok()?;
        let record = space.get(..length).filter(|record| record.len() >= at::FIRST)?;
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

/// Whether a page has a valid header.
fn check(page: &[u8]) -> Result<(), PolicyError> {
    if page.get(..8) != Some(MAGIC.as_slice()) {
        return Err(PolicyError::Foreign);
    }
    let major = u16::from_le_bytes(take(page, 8).ok_or(PolicyError::Foreign)?);
    if major == MAJOR { Ok(()) } else { Err(PolicyError::Major(major)) }
}

/// The checksum of a record, without the checksum field.
fn checksum(record: &[u8]) -> u32 {
    let (head, tail) = record.split_at(at::CHECKSUM.min(record.len()));
    crc32c(&[head, tail.get(4..).unwrap_or_default()])
}

fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    if let Some(space) = bytes.get_mut(offset..offset + value.len()) {
        space.copy_from_slice(value);
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
    fn policy_page_matches_the_golden_file() {
        let mut page = sample().encode();
        // The golden page has a value in a reserved place.
        let start = COPIES[0];
        put(&mut page, start + 268, &20_000_u32.to_le_bytes());
        let sum = checksum(&page[start..start + at::END]);
        put(&mut page, start + at::CHECKSUM, &sum.to_le_bytes());
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/policy-1.4.hex");
        crate::golden::check(path, &page);
        assert_eq!(Policy::decode(&page), Ok((1, sample())));
    }

    #[test]
    fn longer_records_are_read_and_other_majors_are_not() {
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
    fn page_of_an_earlier_minor_is_read() {
        let written = crate::golden::bytes(include_str!("../tests/golden/policy-1.1.hex"));
        let before = Policy { codec: Codec::default(), ..sample() };
        assert_eq!(Policy::decode(&written), Ok((1, before)));
    }

    #[test]
    fn rate_is_the_guarantee_or_else_the_ceiling() {
        let rate =
            |cores, ceiling| Compute { cores, ceiling, ..Compute::default() }.rate() / (SECOND_NS / 100);
        assert_eq!(
            [rate(30, 60), rate(30, 0), rate(0, 60), rate(0, 0), rate(100, 0), rate(0, 900)],
            [30, 30, 60, 100, 100, 100]
        );
        assert!(!Compute { cores: 100, ..Compute::default() }.is_limited());
    }

    #[test]
    fn bucket_fills_at_its_rate_up_to_device_speed() {
        assert_eq!(accrued(SECOND_NS / 4, 2 * SECOND_NS), SECOND_NS as i64 / 2);
        assert_eq!(accrued(3 * SECOND_NS, 2 * SECOND_NS), 6 * SECOND_NS as i64);
        assert_eq!(accrued(UNBOUNDED, 2 * SECOND_NS), 2 * SECOND_NS as i64);
        assert_eq!(accrued(UNBOUNDED - 1, u64::MAX), i64::MAX);
        assert_eq!(accrued(0, u64::MAX), 0);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_policy_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let _ = Policy::decode(&bytes);
        }

        #[test]
        fn flipped_bit_of_the_only_copy_is_detected(bit in 0..at::END * 8) {
            let mut page = sample().encode();
            page[COPIES[0] + bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Policy::decode(&page), Err(PolicyError::Damaged));
        }
    }
}
