//! The rule which allocations are shares.
//!
//! A GPU and a MIG instance are published with all of their memory, and an allocation reports how
//! much it consumed. It is a share if it consumed less than all memory, or if it has a guarantee of
//! compute time. **A share of everything is the whole device**: requesting all memory equals
//! requesting none, and no library is injected. A claim that sets only `cores` gets all memory and
//! a compute limit. Published and compared figures come from the same functions, so rounding cannot
//! make a whole GPU a share.

use crate::device::Part;
use crate::inventory::{Gpu, MigProfile};
use divvy_api::{Hold, Quantity, Share};

/// Why the consumed capacity is not valid for a device. The message has the amount.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    #[error(
        "consumes {amount} of memory, expected at least 1Mi; this is not an allocation of a device of Divvy"
    )]
    Memory { amount: Quantity },
    #[error(
        "consumes {amount} percent of the cores, expected a whole number from 0 to 100; this is not an \
         allocation of a device of Divvy"
    )]
    Cores { amount: Quantity },
}

/// Published memory of a GPU or MIG instance: bytes in whole Mi; 0 if the GPU does not report it.
pub fn memory(gpu: &Gpu, part: Option<Part<'_>>) -> u64 {
    match part {
        None => gpu.memory_bytes >> 20 << 20,
        Some((profile, _)) => memory_of_profile(profile),
    }
}

/// Memory of an instance of a profile, in bytes.
pub fn memory_of_profile(profile: &MigProfile) -> u64 {
    profile.memory_mib.saturating_mul(1 << 20)
}

/// The share of an allocation on a device with this [`memory`]; `None` if the claim holds the whole
/// device or only observes.
///
/// # Errors
/// A consumed amount is out of range.
pub fn share(hold: &Hold, device_memory: u64) -> Result<Option<Share>, ShareError> {
    let Hold::Share { id, consumed } = hold else { return Ok(None) };
    let memory = match consumed.get("memory") {
        None => device_memory,
        Some(amount) => match amount.as_bytes() {
            Some(bytes) if bytes >= 1 << 20 => bytes.min(device_memory),
            _ => return Err(ShareError::Memory { amount: *amount }),
        },
    };
    let cores = match consumed.get("cores") {
        None => 0,
        Some(amount) => match amount.value().and_then(|percent| u32::try_from(percent).ok()) {
            Some(percent @ 0..=100) if amount.is_whole() => percent,
            _ => return Err(ShareError::Cores { amount: *amount }),
        },
    };
    let whole = memory == device_memory && cores == 0;
    Ok((!whole).then(|| Share { id: id.clone(), memory, cores }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Mig;
    use crate::inventory::tests::{gpu, profile};
    use crate::placement::Placement;
    use proptest::prelude::*;

    const GI: u64 = 1 << 30;

    fn check(consumed: &[(&str, &str)], expected: Result<Option<(u64, u32)>, &str>) {
        let consumed = consumed.iter().map(|(name, amount)| ((*name).to_owned(), amount.parse().unwrap()));
        let hold = Hold::Share { id: "s".into(), consumed: consumed.collect() };
        let found = share(&hold, 80 * GI).map(|share| share.map(|share| (share.memory, share.cores)));
        assert_eq!(found.map_err(|error| error.to_string()), expected.map_err(str::to_owned), "{hold:?}");
    }

    #[test]
    fn less_memory_or_guaranteed_compute_is_a_share() {
        check(&[("memory", "10Gi"), ("cores", "0")], Ok(Some((10 * GI, 0))));
        check(&[("memory", "10Gi"), ("cores", "30")], Ok(Some((10 * GI, 30))));
        check(&[("memory", "81919Mi")], Ok(Some((80 * GI - (1 << 20), 0))));
        check(&[("memory", "80Gi"), ("cores", "1")], Ok(Some((80 * GI, 1))));
        check(&[("cores", "100")], Ok(Some((80 * GI, 100))));
    }

    #[test]
    fn all_memory_is_the_whole_device() {
        check(&[("memory", "80Gi"), ("cores", "0"), ("decoders", "0")], Ok(None));
        check(&[("memory", "81920Mi")], Ok(None));
        check(&[], Ok(None));
        // The GPU driver reports less than at allocation.
        check(&[("memory", "81Gi")], Ok(None));
        assert_eq!(share(&Hold::Exclusive, 80 * GI), Ok(None));
        assert_eq!(share(&Hold::Admin { id: None }, 80 * GI), Ok(None));
    }

    #[test]
    fn amounts_out_of_range_are_rejected() {
        let memory = |amount: &str| {
            format!(
                "consumes {amount} of memory, expected at least 1Mi; this is not an allocation of a device \
                 of Divvy"
            )
        };
        for amount in ["0", "-1Gi", "1023Ki", "500m"] {
            check(&[("memory", amount)], Err(&memory(amount)));
        }
        for amount in ["101", "-1", "500m"] {
            let cores = format!(
                "consumes {amount} percent of the cores, expected a whole number from 0 to 100; this is not \
                 an allocation of a device of Divvy"
            );
            check(&[("cores", amount)], Err(&cores));
        }
    }

    #[test]
    fn memory_is_published_in_whole_mebibytes() {
        let mut gpu = gpu(0, Mig::Unsupported);
        gpu.memory_bytes += 4096;
        let profile = profile(19, "1g.10gb", &[(0, 1)]);
        assert_eq!(memory(&gpu, None), 81559 << 20);
        assert_eq!(memory(&gpu, Some((&profile, Placement { start: 0, size: 1 }))), 9984 << 20);
    }

    proptest! {
        #[test]
        fn share_is_never_larger_than_the_device(
            taken in 1u64..200 << 10, all in 1u64..200 << 10, cores in 0u32..=100,
        ) {
            let (memory, cores_) = (Quantity::bytes(taken << 20), Quantity::count(cores.into()));
            let consumed = [("memory", memory), ("cores", cores_)];
            let consumed = consumed.map(|(name, amount)| (name.to_owned(), amount)).into();
            let found = share(&Hold::Share { id: "s".into(), consumed }, all << 20).unwrap();
            prop_assert_eq!(found.is_none(), taken >= all && cores == 0);
            prop_assert!(found.is_none_or(|share| share.memory > 0 && share.memory <= all << 20));
        }
    }
}
