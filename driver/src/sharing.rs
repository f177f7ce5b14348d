//! How processes share a device, resolved to what a GPU's tools are told:
//! numbers, without names, quantities or keys that could still be wrong.
//!
//! Three roads lead here. A claim on `gpu-N-timeslice` or `gpu-N-mps` shares the
//! GPU with other claims; what it gets follows from the node's policy and from
//! the capacities it consumes. A claim that has a GPU or a MIG instance for
//! itself may say in a configuration how its own pods share it. And a claim that
//! takes a part of a GPU or MIG instance has a share of it, up to limits that are
//! kept in its containers.

use divvy_api::sharing::{Interval, Mode, MpsSettings, ShareSettings, Sharing};
use divvy_api::{GpuUuid, Quantity};
use divvy_model::GpuPolicy;
use std::collections::BTreeMap;

/// What a device is set up with before processes share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    Timeslice(Interval),
    Mps(MpsLimits),
}

/// What a share may have at most, and how that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareLimits {
    /// Bytes of device memory, not 0.
    pub memory: u64,
    /// Guaranteed per cent of the compute time; 0 is no guarantee.
    pub cores: u32,
    pub settings: ShareSettings,
}

/// What each client process of an MPS control daemon may have at most; none is
/// no limit. Limits are cooperative: see [`MpsSettings`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MpsLimits {
    /// Per cent of the multiprocessors, 1 to 100.
    pub threads: Option<u32>,
    /// MiB of device memory, at least 1.
    pub memory_mib: Option<u64>,
    /// Clients of different users at once; none means where the daemon can.
    pub multi_user: Option<bool>,
}

const MIB: u64 = 1 << 20;

impl Setup {
    /// The mode that it gives a GPU.
    pub fn mode(&self) -> Mode {
        match self {
            Self::Timeslice(_) => Mode::Timeslice,
            Self::Mps(_) => Mode::Mps,
        }
    }

    /// What a configuration asks for, on a device that has this UUID from the start.
    pub fn of_config(sharing: &Sharing, uuid: Option<&GpuUuid>) -> Self {
        match sharing {
            Sharing::TimeSlicing(interval) => Self::Timeslice(*interval),
            Sharing::Mps(settings) => Self::Mps(MpsLimits::of_settings(settings, uuid)),
        }
    }
}

impl MpsLimits {
    /// Of a claim that consumes these capacities of `gpu-N-mps`. The scheduler
    /// names them all; one that it left out is one part of as many as the node
    /// expects clients, as the published default is.
    pub fn of_share(consumed: &BTreeMap<String, Quantity>, memory_bytes: u64, policy: &GpuPolicy) -> Self {
        let parts = policy.mps_clients.max(1);
        let threads = consumed.get("threads").and_then(|threads| threads.value());
        let threads = threads.map_or(100 / parts, |threads| u32::try_from(threads).unwrap_or_default());
        let memory = consumed.get("memory").and_then(|memory| memory.as_bytes());
        // Where NVML does not tell the memory there is nothing to take a part of.
        let memory = memory.or((memory_bytes > 0).then_some(memory_bytes / u64::from(parts)));
        Self {
            threads: Some(threads.clamp(1, 100)),
            memory_mib: memory.map(|bytes| (bytes / MIB).max(1)),
            multi_user: None,
        }
    }

    /// A request with an MPS configuration has one device (see [`crate::plan`]), so
    /// its index is 0. A limit for another GPU rests: which one a claim gets is the
    /// scheduler's business, so there is nothing to refuse.
    pub fn of_settings(settings: &MpsSettings, uuid: Option<&GpuUuid>) -> Self {
        let of_key = |key: &str| settings.pinned_memory_per_device.get(key).copied();
        let memory = uuid.and_then(|uuid| of_key(uuid.as_str())).or_else(|| of_key("0"));
        let memory = memory.or(settings.pinned_memory).and_then(|limit| limit.as_bytes());
        Self {
            threads: settings.active_thread_percentage,
            memory_mib: memory.map(|bytes| (bytes / MIB).max(1)),
            multi_user: settings.multi_user,
        }
    }

    /// What lets both have theirs: the daemon's defaults are those of its largest client.
    pub fn or_more(self, other: Self) -> Self {
        // No limit is more than any.
        fn larger<T: Ord>(one: Option<T>, two: Option<T>) -> Option<T> {
            Some(one?.max(two?))
        }
        Self {
            threads: larger(self.threads, other.threads),
            memory_mib: larger(self.memory_mib, other.memory_mib),
            multi_user: self.multi_user.or(other.multi_user),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(threads: u32, memory_mib: u64) -> MpsLimits {
        MpsLimits { threads: Some(threads), memory_mib: Some(memory_mib), multi_user: None }
    }

    #[test]
    fn a_share_is_limited_by_what_it_consumes_else_by_one_part() {
        let check = |consumed: &[(&str, Quantity)], expected: MpsLimits| {
            let consumed = consumed.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect();
            assert_eq!(MpsLimits::of_share(&consumed, 80 << 30, &GpuPolicy::default()), expected);
        };
        check(
            &[("memory", Quantity::bytes(10 << 30)), ("threads", Quantity::count(30))],
            limits(30, 10 << 10),
        );
        check(&[], limits(25, 20 << 10));
        check(&[("memory", Quantity::bytes(1)), ("threads", Quantity::count(0))], limits(1, 1));
        check(&[("threads", Quantity::count(1000)), ("memory", Quantity::bytes(MIB))], limits(100, 1));
    }

    #[test]
    fn a_configuration_says_which_device_it_limits() {
        let check = |keys: &[(&str, u64)], uuid: Option<&str>, expected: u64| {
            let limit =
                |(key, mebibytes): &(&str, u64)| ((*key).to_owned(), Quantity::bytes(mebibytes * MIB + 1));
            let settings = MpsSettings {
                pinned_memory: Some(Quantity::bytes(5 * MIB)),
                pinned_memory_per_device: keys.iter().map(limit).collect(),
                ..MpsSettings::default()
            };
            let found = MpsLimits::of_settings(&settings, uuid.map(GpuUuid::from).as_ref());
            assert_eq!(found.memory_mib, Some(expected), "{keys:?}");
        };
        check(&[("0", 3)], Some("GPU-a"), 3);
        check(&[("GPU-a", 3), ("0", 4)], Some("GPU-a"), 3);
        check(&[("GPU-b", 3)], Some("GPU-a"), 5);
        check(&[("0", 3)], None, 3);
        check(&[], None, 5);
        assert_eq!(MpsLimits::of_settings(&MpsSettings::default(), None), MpsLimits::default());
    }

    #[test]
    fn no_limit_is_more_than_any() {
        let none = MpsLimits::default();
        assert_eq!(limits(30, 10).or_more(limits(20, 40)), limits(30, 40));
        assert_eq!(limits(30, 10).or_more(none), none);
        assert_eq!(none.or_more(limits(30, 10)), none);
    }
}
