//! How processes share a device, resolved to plain numbers.
//!
//! There are three cases. Claims for `gpu-N-timeslice` or `gpu-N-mps` share a GPU with other claims;
//! their limits come from the node's policy and the consumed capacities. A claim with an exclusive
//! GPU or MIG instance may configure how its own pods share it. A claim for a share gets a part of
//! the memory and compute time of a GPU or instance, with limits that the library enforces.

use divvy_api::sharing::{Interval, Mode, MpsSettings, ShareSettings, Sharing};
use divvy_api::{GpuUuid, Quantity};
use divvy_model::GpuPolicy;
use std::collections::BTreeMap;

/// Sharing setup of a device, made before processes use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    Timeslice(Interval),
    Mps(MpsLimits),
}

/// Limits of a share, and the settings for their enforcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareLimits {
    /// Device memory in bytes, not 0.
    pub memory: u64,
    /// Guaranteed compute time in per cent; 0 means no guarantee.
    pub cores: u32,
    pub settings: ShareSettings,
}

/// Limits of each client process of an MPS control daemon; `None` means no limit. The limits are
/// cooperative: see [`MpsSettings`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MpsLimits {
    /// Per cent of the multiprocessors, 1 to 100.
    pub threads: Option<u32>,
    /// MiB of device memory, at least 1.
    pub memory_mib: Option<u64>,
    /// Whether clients of different users may run at once; `None` means if the daemon supports it.
    pub multi_user: Option<bool>,
}

const MIB: u64 = 1 << 20;

impl Setup {
    /// The mode of a GPU with this setup.
    pub fn mode(&self) -> Mode {
        match self {
            Self::Timeslice(_) => Mode::Timeslice,
            Self::Mps(_) => Mode::Mps,
        }
    }

    /// The setup that a configuration requests, for a device with this UUID if it is known.
    pub fn of_config(sharing: &Sharing, uuid: Option<&GpuUuid>) -> Self {
        match sharing {
            Sharing::TimeSlicing(interval) => Self::Timeslice(*interval),
            Sharing::Mps(settings) => Self::Mps(MpsLimits::of_settings(settings, uuid)),
        }
    }
}

impl MpsLimits {
    /// Limits of a claim that consumes these capacities of `gpu-N-mps`. The scheduler sets all
    /// capacities. A missing one gets its published default: an equal part for each of the clients
    /// that the node's policy expects.
    pub fn of_share(consumed: &BTreeMap<String, Quantity>, memory_bytes: u64, policy: &GpuPolicy) -> Self {
        let parts = policy.mps_clients.max(1);
        let threads = consumed.get("threads").and_then(|threads| threads.value());
        let threads = threads.map_or(100 / parts, |threads| u32::try_from(threads).unwrap_or_default());
        let memory = consumed.get("memory").and_then(|memory| memory.as_bytes());
        // If NVML does not report the memory, there is no limit for it.
        let memory = memory.or((memory_bytes > 0).then_some(memory_bytes / u64::from(parts)));
        Self {
            threads: Some(threads.clamp(1, 100)),
            memory_mib: memory.map(|bytes| (bytes / MIB).max(1)),
            multi_user: None,
        }
    }

    /// Limits from a configuration. A request with an MPS configuration has one device (planning
    /// checks that), so its index is 0. A limit for another GPU is ignored: the scheduler chooses
    /// the GPU, so such a limit is no error.
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

    /// The larger of both limits: the daemon's defaults must suit its largest client.
    pub fn or_larger(self, other: Self) -> Self {
        // `None` is no limit and so larger than any limit.
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
    fn consumed_capacities_limit_a_share_with_defaults() {
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
    fn limits_per_device_apply_by_uuid_or_index() {
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
    fn missing_limit_is_larger_than_any_limit() {
        let none = MpsLimits::default();
        assert_eq!(limits(30, 10).or_larger(limits(20, 40)), limits(30, 40));
        assert_eq!(limits(30, 10).or_larger(none), none);
        assert_eq!(none.or_larger(limits(30, 10)), none);
    }
}
